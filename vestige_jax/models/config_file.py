"""`config.json` of each model type: which keys it must and may have, and how they become fields of ModelConfig."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from vestige_jax.models.rope import Yarn

# Keys that a checkpoint may carry and that change nothing in the mathematics here.
_IGNORED = frozenset(
    "architectures auto_map attention_dropout chunk_size_feed_forward dtype id2label is_encoder_decoder "
    "label2id max_position_embeddings name_or_path output_attentions output_hidden_states "
    "output_router_logits problem_type return_dict router_aux_loss_coef torch_dtype transformers_version use_cache "
    "_name_or_path".split()
)
_ALL = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_experts num_experts_per_token "
    "num_shared_experts moe_intermediate_size first_k_dense_replace moe_layer_freq routed_scaling_factor rms_norm_eps "
    "initializer_range model_max_length bos_token_id eos_token_id pad_token_id"
).split()
_SIZES = _ALL[:5]
_MLA = "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim".split()
# In the file these are a mapping of their own, `linear_attn_config`.
_LINEAR = "full_attn_layers kda_num_heads kda_head_dim short_conv_kernel_size".split()
_KIMI = [*_LINEAR, "moe_renormalize", "biased_router_weights"]
# Values that are understood; others would need code that is not here.
_KIMI_FIXED: dict[str, tuple[Any, ...]] = {
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
_DEEPSEEK_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "q_lora_rank": (None,),
    "tie_word_embeddings": (False,),
    "attention_bias": (False,),
    "n_group": (1,),
    "topk_group": (1,),
    "scoring_func": ("softmax",),
    "topk_method": ("greedy",),
    "norm_topk_prob": (False,),
}
_DEEPSEEK_NAMES = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}


@dataclasses.dataclass(frozen=True)
class _Type:
    """A model type: the fields of ModelConfig that its file may and must have, and what else it may say."""

    architecture: str
    fields: tuple[str, ...]
    required: tuple[str, ...]
    fixed: Mapping[str, tuple[Any, ...]]
    ignored: frozenset[str] = frozenset()
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)  # in the file -> of the field
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # fields that the type itself settles


TYPES: dict[str, _Type] = {
    "kimi_linear": _Type(
        "KimiLinearForCausalLM",
        (*_ALL, *_KIMI, *_MLA, "mla_use_nope", "kv_a_layernorm_eps", "rope_theta"),
        (*_SIZES, *_MLA),
        _KIMI_FIXED,
        frozenset(("head_dim", "num_key_value_heads", "use_grouped_topk")),
    ),
    "kimi_linear_gqa": _Type(
        "KimiLinearGQAForCausalLM",
        (*_ALL, *_KIMI, "num_key_value_heads", "head_dim"),
        (*_SIZES, "num_key_value_heads", "head_dim"),
        {key: allowed for key, allowed in _KIMI_FIXED.items() if key not in ("q_lora_rank", "rope_scaling")},
        frozenset(("use_grouped_topk",)),
    ),
    "deepseek_v2": _Type(
        "DeepseekV2ForCausalLM",
        (*_ALL, *_MLA, "kv_a_layernorm_eps", "rope_theta", "rope_scaling"),
        # Where these two are absent, other readers assume a low-rank query and no scaling.
        (*_SIZES, *_MLA, "rms_norm_eps", "rope_theta", "rope_scaling", "q_lora_rank"),
        _DEEPSEEK_FIXED,
        frozenset("aux_loss_alpha ep_size head_dim num_key_value_heads pretraining_tp seq_aux".split()),
        _DEEPSEEK_NAMES,
        {"mla_use_nope": False, "moe_renormalize": False},
    ),
}


def named_types() -> str:
    """The model types, for an error."""
    return " or ".join(map(repr, TYPES))


def check(ok: bool, name: str, value: Any, expected: str) -> None:
    """Raises ValueError that names the key, its value and what would be right."""
    if not ok:
        raise ValueError(f"config: {name} is {value!r}, expected {expected}")


def is_int(value: Any) -> bool:
    """True is no integer here, though Python says so."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_ints(value: Any) -> bool:
    """Whether it is a tuple of integers."""
    return isinstance(value, tuple) and all(map(is_int, value))


def read(source: str | pathlib.Path | Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ModelConfig that a file (path, folder that holds one, or the parsed mapping) gives."""
    raw = dict(source) if isinstance(source, Mapping) else _parsed(pathlib.Path(source))
    kind = raw.pop("model_type", None)
    check(isinstance(kind, str) and kind in TYPES, "model_type", kind, named_types())
    made = TYPES[kind]
    missing = sorted(set(made.required) - set(raw))
    for key, allowed in made.fixed.items():
        if key in raw:
            value = raw.pop(key)
            same = any(value == fixed and type(value) is type(fixed) for fixed in allowed)
            check(same, key, value, " or ".join(map(repr, allowed)))
    if "num_key_value_heads" in made.ignored:
        heads = raw.get("num_key_value_heads", raw.get("num_attention_heads"))
        check(heads == raw.get("num_attention_heads"), "num_key_value_heads", heads, "num_attention_heads")
    _check_keys(made, raw, missing)
    values = {made.names.get(key, key): value for key, value in raw.items()}
    if kind == "deepseek_v2":
        values["full_attn_layers"] = tuple(range(_layer_count(values)))
    else:
        values = _flatten_linear(values)
    if values.get("rope_scaling") is not None:
        values["rope_scaling"] = _yarn(values["rope_scaling"])
    return {**_fields(made, values), **made.constants, "model_type": kind}


def write(values: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping that `read` takes, from the fields of ModelConfig and its `kda_layers`."""
    kind = values["model_type"]
    made = TYPES[kind]
    theirs = {ours: name for name, ours in made.names.items()}
    out = {theirs.get(name, name): value for name, value in values.items() if name in made.fields}
    eos = out.pop("eos_token_id")
    out["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos)
    out |= {key: allowed[0] for key, allowed in made.fixed.items()}
    out.setdefault("num_key_value_heads", values["num_attention_heads"])
    if isinstance(out.get("rope_scaling"), Yarn):
        out["rope_scaling"] = {"type": "yarn", **dataclasses.asdict(out["rope_scaling"])}
    if kind != "deepseek_v2":
        out["linear_attn_config"] = {
            "kda_layers": [i + 1 for i in values["kda_layers"]],
            "full_attn_layers": [i + 1 for i in out.pop("full_attn_layers")],
            "num_heads": out.pop("kda_num_heads"),
            "head_dim": out.pop("kda_head_dim"),
            "short_conv_kernel_size": out.pop("short_conv_kernel_size"),
        }
    return {"architectures": [made.architecture], "model_type": kind, **out}


def _parsed(path: pathlib.Path) -> dict[str, Any]:
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


def _layer_count(values: Mapping[str, Any]) -> int:
    layers = values.get("num_hidden_layers", 0)
    check(is_int(layers), "num_hidden_layers", layers, "an integer")
    return layers


def _flatten_linear(values: dict[str, Any]) -> dict[str, Any]:
    linear = values.pop("linear_attn_config", None)
    check(isinstance(linear, Mapping), "linear_attn_config", linear, "a mapping with kda_layers and full_attn_layers")
    linear = dict(linear)
    full, kda = (_layers(linear, key) for key in ("full_attn_layers", "kda_layers"))
    every, layers = sorted([*full, *kda]), _layer_count(values)
    check(every == list(range(1, layers + 1)), "kda_layers + full_attn_layers", every, f"each of 1..{layers} once")
    values = dict(values, full_attn_layers=tuple(i - 1 for i in full))
    for ours, theirs in (("kda_num_heads", "num_heads"), ("kda_head_dim", "head_dim")):
        values[ours] = linear.pop(theirs, None)
        check(is_int(values[ours]), f"linear_attn_config.{theirs}", values[ours], "an integer")
    values["short_conv_kernel_size"] = linear.pop("short_conv_kernel_size", 4)
    check(not linear, "linear_attn_config", sorted(linear), "no other keys")
    return values


def _layers(linear: dict[str, Any], key: str) -> tuple[int, ...]:
    value = linear.pop(key, None)
    value = () if value is None else value
    fits = isinstance(value, list | tuple) and is_ints(tuple(value))
    check(fits, f"linear_attn_config.{key}", value, "a list of integers")
    return tuple(value)


def _yarn(scaling: Any) -> Yarn:
    check(isinstance(scaling, Mapping), "rope_scaling", scaling, "null or a mapping")
    values = dict(scaling)
    kinds = {values.pop(key) for key in ("type", "rope_type") if key in values}
    check(kinds == {"yarn"}, "rope_scaling.type", sorted(map(str, kinds)), "'yarn'")
    names = {f.name: f.default is dataclasses.MISSING for f in dataclasses.fields(Yarn)}
    wrong = sorted(set(values) - set(names)) + [name for name, must in names.items() if must and name not in values]
    check(not wrong, "rope_scaling", dict(scaling), f"the keys {sorted(names)}; {wrong} are unknown or missing")
    for name, value in values.items():
        number = is_int(value) or isinstance(value, float) and math.isfinite(value)
        low = 0 if name.startswith("mscale") else 1
        check(number and value >= low, f"rope_scaling.{name}", value, f"a finite number of at least {low}")
    return Yarn(**values)


def _check_keys(made: _Type, raw: Mapping[str, Any], missing: list[str]) -> None:
    theirs = {ours: name for name, ours in made.names.items()}
    known = {theirs.get(name, name) for name in made.fields if name not in _LINEAR} | _IGNORED | made.ignored
    known |= {"linear_attn_config"} if "full_attn_layers" in made.fields else set()
    unknown = sorted(set(raw) - known)
    if unknown:
        raise ValueError(f"config: unknown keys {unknown}: they may change what the model computes")
    if missing:
        raise ValueError(f"config: missing keys {missing}")


def _fields(made: _Type, values: dict[str, Any]) -> dict[str, Any]:
    eos = values.get("eos_token_id")
    if eos is not None:
        values["eos_token_id"] = tuple(eos) if isinstance(eos, list | tuple) else (eos,)
    # A null count (num_experts of a dense model) means the field's default; a required one is refused by its type.
    fields = {*made.fields, "full_attn_layers"}
    return {k: v for k, v in values.items() if k in fields and (v is not None or k in made.required)}
