"""ModelConfig: a Hugging Face `config.json`, checked once and frozen."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from vestige_jax.models import config_file
from vestige_jax.models.rope import Yarn
from vestige_jax.spec import CacheSpec

_POSITIVE = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads moe_layer_freq "
    "short_conv_kernel_size".split()
)
_MLA = "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim".split()
_GQA = "num_key_value_heads head_dim".split()
_KDA = "kda_num_heads kda_head_dim".split()


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one decoder; hashable, static under jit.

    `model_type` is one of
      kimi_linear      KDA and MLA layers; `mla_use_nope` false is the twin with a rotated branch
      kimi_linear_gqa  ours: the same with grouped-query attention, without positions, in place of MLA
      deepseek_v2      MLA layers with a rotated branch, no KDA

    Field names are Kimi's, except that `linear_attn_config` is flattened (`kda_*`), layer lists are 0-based and the
    end-of-sequence ids are always a tuple. A size that a model type does not have is 0. Two fields are ours:
    `kv_a_layernorm_eps` (the original code takes 1e-6 whatever `rms_norm_eps` says) and `biased_router_weights` (see
    `moe.route`). Build one with `from_json`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    full_attn_layers: tuple[int, ...]
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    kda_num_heads: int = 0
    kda_head_dim: int = 0
    short_conv_kernel_size: int = 4
    mla_use_nope: bool = True
    num_experts: int = 0
    num_experts_per_token: int = 0
    num_shared_experts: int = 0
    moe_intermediate_size: int = 0
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    biased_router_weights: bool = False
    rms_norm_eps: float = 1e-5
    kv_a_layernorm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Yarn | None = None
    initializer_range: float = 0.02
    model_max_length: int = 0
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None
    model_type: str = "kimi_linear"

    def __post_init__(self):
        _check_types(self)
        _check(self.model_type in config_file.TYPES, "model_type", self.model_type, config_file.named_types())
        self._check_sizes()
        layers = set(range(self.num_hidden_layers))
        _check(set(self.full_attn_layers) <= layers, "full_attn_layers", self.full_attn_layers, "layers of this model")
        self._check_rotation()
        if self.num_experts:
            _check(self.moe_intermediate_size > 0, "moe_intermediate_size", self.moe_intermediate_size, "positive")
            k = self.num_experts_per_token
            _check(0 < k <= self.num_experts, "num_experts_per_token", k, f"in 1..num_experts = {self.num_experts}")

    def _check_sizes(self):
        has, lacks = (_GQA, _MLA) if self.grouped else (_MLA, _GQA)
        for name in (*_POSITIVE, *has, *(_KDA if self.kda_layers else ())):
            _check(getattr(self, name) > 0, name, getattr(self, name), "a positive integer")
        for name in lacks:
            _check(getattr(self, name) == 0, name, getattr(self, name), f"0: a {self.model_type} has none")
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if self.grouped:
            _check(heads % groups == 0, "num_key_value_heads", groups, f"a divisor of num_attention_heads = {heads}")

    def _check_rotation(self):
        kind, width = self.model_type, self.qk_rope_head_dim
        if self.rotated:
            _check(not self.grouped, "mla_use_nope", False, f"true: a {kind} has no branch to rotate")
            _check(width % 2 == 0, "qk_rope_head_dim", width, "an even number: it is rotated in pairs")
        _check(self.rotated or kind != "deepseek_v2", "mla_use_nope", True, f"false: a {kind} rotates its branch")
        _check(self.rotated or not self.rope_scaling, "rope_scaling", self.rope_scaling, "null: nothing is rotated")

    @classmethod
    def from_json(cls, source: str | pathlib.Path | Mapping[str, Any]) -> ModelConfig:
        """Reads a `config.json` (path, folder that holds one, or the parsed mapping).

        Raises ValueError that names the key: for an architecture that is not built here, a key that is missing or
        unknown, a value of another type (no number is read from text), or one that would need other mathematics.
        """
        return cls(**config_file.read(source))

    def to_json(self) -> dict[str, Any]:
        """The `config.json` mapping that `from_json` reads back to an equal config."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return config_file.write({**values, "kda_layers": self.kda_layers})

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """0-based layers of Kimi Delta Attention: every layer that is not full attention."""
        return tuple(i for i in range(self.num_hidden_layers) if i not in self.full_attn_layers)

    @property
    def grouped(self) -> bool:
        """Whether full attention is grouped-query attention, not MLA."""
        return self.model_type == "kimi_linear_gqa"

    @property
    def rotated(self) -> bool:
        """Whether the branch is rotated (the RoPE twin, DeepSeek)."""
        return not self.mla_use_nope

    @property
    def softmax_router(self) -> bool:
        """Whether experts are weighed by a softmax (DeepSeek), not by sigmoids with a balancing bias (Kimi)."""
        return self.model_type == "deepseek_v2"

    @property
    def latent_dim(self) -> int:
        """R: the latent of MLA; in GQA the values of all key heads."""
        return self.num_key_value_heads * self.head_dim if self.grouped else self.kv_lora_rank

    @property
    def branch_dim(self) -> int:
        """P: the branch of MLA; in GQA the keys of all key heads."""
        return self.num_key_value_heads * self.head_dim if self.grouped else self.qk_rope_head_dim

    @property
    def row_dim(self) -> int:
        """C = R + P, the width of one cache row."""
        return self.latent_dim + self.branch_dim

    @property
    def softmax_scale(self) -> float:
        """lambda of VestigeKV §1: width of a query head^-1/2; YaRN multiplies it."""
        width = self.head_dim if self.grouped else self.qk_nope_head_dim + self.qk_rope_head_dim
        return width**-0.5 * (self.rope_scaling.score if self.rope_scaling else 1.0)

    def is_moe(self, layer: int) -> bool:
        """Whether the feed-forward part of a 0-based layer is a mixture of experts."""
        return bool(self.num_experts) and layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    def cache_spec(self, capacity: int, *, allow_rope: bool = False, **overrides) -> CacheSpec:
        """One `CacheSpec` that serves every full-attention layer; `overrides` go to `CacheSpec` as they are.

        Raises ValueError when the branch is rotated, unless `allow_rope=True`: the method reads a signal that rotation
        destroys, so such a run is a control arm and must say so.
        """
        if self.rotated and not allow_rope:
            why = "a deepseek_v2 rotates its branch" if self.model_type == "deepseek_v2" else "mla_use_nope is false"
            raise ValueError(
                f"{why}: the branch of this model is rotated, and VestigeKV selects by an unrotated "
                "branch. Pass allow_rope=True to run it as the RoPE control arm."
            )
        heads, scale = self.num_attention_heads, self.softmax_scale
        sizes = (self.latent_dim, self.branch_dim, heads, scale, capacity)
        return CacheSpec(*sizes, allow_rope=allow_rope, **overrides)


def _check(ok: bool, name: str, value: Any, expected: str) -> None:
    config_file.check(ok, name, value, expected)


def _is_float(value: Any) -> bool:
    return config_file.is_int(value) or isinstance(value, float) and math.isfinite(value)


# Annotation -> (whether a value is one, its name). True is no integer here, though Python says so.
_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (config_file.is_int, "an integer"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "float": (_is_float, "a finite number"),
    "str": (lambda value: isinstance(value, str), "text"),
    "int | None": (lambda value: value is None or config_file.is_int(value), "an integer or null"),
    "tuple[int, ...]": (config_file.is_ints, "integers"),
    "Yarn | None": (lambda value: value is None or isinstance(value, Yarn), "a Yarn or null"),
}


def _check_types(config: ModelConfig) -> None:
    for field in dataclasses.fields(config):
        fits, expected = _TYPES[field.type]
        value = getattr(config, field.name)
        _check(fits(value), field.name, value, expected)
