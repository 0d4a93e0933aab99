"""ModelConfig: a Hugging Face `config.json`, checked once and frozen."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from vestige_jax.spec import CacheSpec

# Keys that a checkpoint may carry and that change nothing in the mathematics here.
_IGNORED = frozenset(
    "architectures auto_map attention_dropout chunk_size_feed_forward dtype head_dim id2label is_encoder_decoder "
    "label2id max_position_embeddings name_or_path num_key_value_heads output_attentions output_hidden_states "
    "output_router_logits problem_type return_dict router_aux_loss_coef torch_dtype transformers_version use_cache "
    "use_grouped_topk _name_or_path".split()
)

# Keys whose other values would need code that is not here: name -> the values that are understood.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "q_lora_rank": (None,),
    "rope_scaling": (None,),
    "tie_word_embeddings": (False,),
    "attention_bias": (False,),
    "num_expert_group": (1,),
    "topk_group": (1,),
    "num_nextn_predict_layers": (0,),
    "moe_router_activation_func": ("sigmoid",),
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one Kimi Linear decoder; hashable, static under jit.

    Field names are the file's, except that `linear_attn_config` is flattened (`kda_*`), layer lists are 0-based and the
    end-of-sequence ids are always a tuple. Two fields are ours: `kv_a_layernorm_eps` (the original code takes 1e-6
    whatever `rms_norm_eps` says) and `biased_router_weights` (see `moe.route`). Build one with `from_json`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    full_attn_layers: tuple[int, ...]
    kda_num_heads: int
    kda_head_dim: int
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
    initializer_range: float = 0.02
    model_max_length: int = 0
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self):
        _check_types(self)
        for name in _POSITIVE:
            _check(getattr(self, name) > 0, name, getattr(self, name), "a positive integer")
        layers = set(range(self.num_hidden_layers))
        _check(set(self.full_attn_layers) <= layers, "full_attn_layers", self.full_attn_layers, "layers of this model")
        if self.rotated:
            width = self.qk_rope_head_dim
            _check(width % 2 == 0, "qk_rope_head_dim", width, "an even number: it is rotated in pairs")
        if self.num_experts:
            _check(self.moe_intermediate_size > 0, "moe_intermediate_size", self.moe_intermediate_size, "positive")
            k = self.num_experts_per_token
            _check(0 < k <= self.num_experts, "num_experts_per_token", k, f"in 1..num_experts = {self.num_experts}")

    @classmethod
    def from_json(cls, source: str | pathlib.Path | Mapping[str, Any]) -> ModelConfig:
        """Reads a `config.json` (path, folder that holds one, or the parsed mapping).

        Raises ValueError that names the key: for an architecture that is not built here, a key that is missing or
        unknown, a value of another type (no number is read from text), or one that would need other mathematics.
        """
        raw = dict(source) if isinstance(source, Mapping) else _read(pathlib.Path(source))
        _check_architecture(raw)
        raw.pop("model_type", None)
        for key, allowed in _FIXED.items():
            if key in raw:
                value = raw.pop(key)
                same = any(value == fixed and type(value) is type(fixed) for fixed in allowed)
                _check(same, key, value, " or ".join(map(repr, allowed)))
        kv_heads = raw.get("num_key_value_heads", raw.get("num_attention_heads"))
        _check(kv_heads == raw.get("num_attention_heads"), "num_key_value_heads", kv_heads, "num_attention_heads")
        values = _flatten_linear(raw)
        return cls(**_known(cls, values))

    def to_json(self) -> dict[str, Any]:
        """The `config.json` mapping that `from_json` reads back to an equal config."""
        out = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        linear = {
            "kda_layers": [i + 1 for i in self.kda_layers],
            "full_attn_layers": [i + 1 for i in out.pop("full_attn_layers")],
            "num_heads": out.pop("kda_num_heads"),
            "head_dim": out.pop("kda_head_dim"),
            "short_conv_kernel_size": out.pop("short_conv_kernel_size"),
        }
        eos = out.pop("eos_token_id")
        out["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos)
        fixed = {key: allowed[0] for key, allowed in _FIXED.items()}
        head = {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear"}
        return {**head, **out, **fixed, "num_key_value_heads": self.num_attention_heads, "linear_attn_config": linear}

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """0-based layers of Kimi Delta Attention: every layer that is not full attention."""
        return tuple(i for i in range(self.num_hidden_layers) if i not in self.full_attn_layers)

    @property
    def rotated(self) -> bool:
        """Whether the branch is rotated (the RoPE twin)."""
        return not self.mla_use_nope

    @property
    def row_dim(self) -> int:
        """C = R + P, the width of one cache row."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """lambda of VestigeKV §1: (nope + branch)^-1/2."""
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5

    def is_moe(self, layer: int) -> bool:
        """Whether the feed-forward part of a 0-based layer is a mixture of experts."""
        return bool(self.num_experts) and layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    def cache_spec(self, capacity: int, *, allow_rope: bool = False, **overrides) -> CacheSpec:
        """One `CacheSpec` that serves every MLA layer; `overrides` go to `CacheSpec` as they are.

        Raises ValueError when the branch is rotated, unless `allow_rope=True`: the method reads a signal that rotation
        destroys, so such a run is a control arm and must say so.
        """
        if self.rotated and not allow_rope:
            raise ValueError(
                "mla_use_nope is false: the branch of this model is rotated, and VestigeKV selects by an unrotated "
                "branch. Pass allow_rope=True to run it as the RoPE control arm."
            )
        heads, scale = self.num_attention_heads, self.softmax_scale
        sizes = (self.kv_lora_rank, self.qk_rope_head_dim, heads, scale, capacity)
        return CacheSpec(*sizes, allow_rope=allow_rope, **overrides)


_POSITIVE = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads kv_lora_rank qk_nope_head_dim "
    "qk_rope_head_dim v_head_dim kda_num_heads kda_head_dim short_conv_kernel_size moe_layer_freq"
).split()


def _check(ok: bool, name: str, value: Any, expected: str) -> None:
    if not ok:
        raise ValueError(f"config: {name} is {value!r}, expected {expected}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_float(value: Any) -> bool:
    return _is_int(value) or isinstance(value, float) and math.isfinite(value)


def _is_ints(value: Any) -> bool:
    return isinstance(value, tuple) and all(map(_is_int, value))


# Annotation -> (whether a value is one, its name). True is no integer here, though Python says so.
_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_is_int, "an integer"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "float": (_is_float, "a finite number"),
    "int | None": (lambda value: value is None or _is_int(value), "an integer or null"),
    "tuple[int, ...]": (_is_ints, "integers"),
}


def _check_types(config: ModelConfig) -> None:
    for field in dataclasses.fields(config):
        fits, expected = _TYPES[field.type]
        value = getattr(config, field.name)
        _check(fits(value), field.name, value, expected)


def _read(path: pathlib.Path) -> dict[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"no model config at {path}")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a {type(raw).__name__}, expected a JSON object")
    return raw


def _check_architecture(raw: Mapping[str, Any]) -> None:
    kind = raw.get("model_type")
    if kind == "deepseek_v2":
        raise ValueError("config: model_type 'deepseek_v2' is not supported yet; only 'kimi_linear' can be built")
    _check(kind == "kimi_linear", "model_type", kind, "'kimi_linear'")


def _flatten_linear(raw: dict[str, Any]) -> dict[str, Any]:
    linear = raw.pop("linear_attn_config", None)
    _check(isinstance(linear, Mapping), "linear_attn_config", linear, "a mapping with kda_layers and full_attn_layers")
    linear = dict(linear)
    full, kda = (_layers(linear, key) for key in ("full_attn_layers", "kda_layers"))
    layers = raw.get("num_hidden_layers", 0)
    _check(_is_int(layers), "num_hidden_layers", layers, "an integer")
    every = sorted([*full, *kda])
    _check(every == list(range(1, layers + 1)), "kda_layers + full_attn_layers", every, f"each of 1..{layers} once")
    values = dict(raw, full_attn_layers=tuple(i - 1 for i in full))
    for ours, theirs in (("kda_num_heads", "num_heads"), ("kda_head_dim", "head_dim")):
        values[ours] = linear.pop(theirs, None)
        _check(_is_int(values[ours]), f"linear_attn_config.{theirs}", values[ours], "an integer")
    values["short_conv_kernel_size"] = linear.pop("short_conv_kernel_size", 4)
    _check(not linear, "linear_attn_config", sorted(linear), "no other keys")
    return values


def _layers(linear: dict[str, Any], key: str) -> tuple[int, ...]:
    value = linear.pop(key, None)
    value = () if value is None else value
    fits = isinstance(value, list | tuple) and _is_ints(tuple(value))
    _check(fits, f"linear_attn_config.{key}", value, "a list of integers")
    return tuple(value)


def _known(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(values) - set(fields) - _IGNORED)
    if unknown:
        raise ValueError(f"config: unknown keys {unknown}: they may change what the model computes")
    required = {name for name, f in fields.items() if f.default is dataclasses.MISSING}
    missing = sorted(required - set(values))
    if missing:
        raise ValueError(f"config: missing keys {missing}")
    eos = values.get("eos_token_id")
    if eos is not None:
        values["eos_token_id"] = tuple(eos) if isinstance(eos, list | tuple) else (eos,)
    # A null count (num_experts of a dense model) means the field's default; a required one is refused by its type.
    return {k: v for k, v in values.items() if k in fields and (v is not None or k in required)}
