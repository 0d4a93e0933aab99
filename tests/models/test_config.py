"""Reading config.json: what is understood, what is refused, by name."""

import dataclasses
import json

import pytest

from vestige_jax.models import ModelConfig


@pytest.fixture
def raw(golden):
    return json.loads((golden / "kimi_tiny" / "config.json").read_text())


def refuse(raw, match, **changes):
    changed = {k: v for k, v in {**raw, **changes}.items() if v != "absent"}
    with pytest.raises(ValueError, match=match):
        ModelConfig.from_json(changed)


def test_layer_lists_become_zero_based(raw):
    config = ModelConfig.from_json(raw)
    assert config.full_attn_layers == (2,) and config.kda_layers == (0, 1)


def test_head_dim_of_the_file_is_unused(raw):
    """It is neither the KDA nor the MLA width: 12 here, 72 in the 48B config."""
    config = ModelConfig.from_json({**raw, "head_dim": 999})
    assert config.kda_head_dim == 16 and config.softmax_scale == 24**-0.5


def test_first_layer_is_dense(raw):
    config = ModelConfig.from_json(raw)
    assert [config.is_moe(i) for i in range(3)] == [False, True, True]


def test_model_without_experts(raw):
    """No experts, as null or 0: every layer is dense."""
    for none in (None, 0):
        config = ModelConfig.from_json({**raw, "num_experts": none, "num_experts_per_token": none})
        assert not any(config.is_moe(i) for i in range(3))


def test_end_of_sequence_comes_from_the_config(raw):
    assert ModelConfig.from_json(raw).eos_token_id == (2,)
    assert ModelConfig.from_json({**raw, "eos_token_id": [7, 9]}).eos_token_id == (7, 9)
    assert ModelConfig.from_json({**raw, "eos_token_id": None}).eos_token_id == ()


def test_json_round_trip(raw):
    config = dataclasses.replace(ModelConfig.from_json(raw), eos_token_id=(1, 2), biased_router_weights=True)
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_the_committed_twin_is_written_as_it_was(repository):
    path = repository / "vestige_jax" / "checkpoints" / "tiny_nope" / "config.json"
    assert ModelConfig.from_json(path).to_json() == json.loads(path.read_text())


def grouped(raw, **changes):
    """The same file with grouped-query attention in place of MLA."""
    sizes = {"num_key_value_heads": 2, "head_dim": 12}
    mla = "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim mla_use_nope q_lora_rank rope_theta".split()
    kept = {k: v for k, v in raw.items() if k not in (*mla, "rope_scaling")}
    return {**kept, "model_type": "kimi_linear_gqa", **sizes, **changes}


def test_grouped_query_attention(raw):
    config = ModelConfig.from_json(grouped(raw))
    assert config.grouped and not config.rotated
    assert (config.latent_dim, config.branch_dim, config.softmax_scale) == (24, 24, 12**-0.5)
    written = json.loads(json.dumps(config.to_json()))
    assert ModelConfig.from_json(written) == config
    assert "kv_lora_rank" not in written and written["model_type"] == "kimi_linear_gqa"


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, expected a divisor of num_attention_heads = 4"),
        ({"num_key_value_heads": "absent"}, r"missing keys \['num_key_value_heads'\]"),
        ({"head_dim": None}, "head_dim is None, expected an integer"),
        ({"head_dim": 0}, "head_dim is 0, expected a positive integer"),
        ({"kv_lora_rank": 24}, "unknown keys.*kv_lora_rank"),
        ({"mla_use_nope": False}, "unknown keys.*mla_use_nope"),
    ],
)
def test_grouped_query_attention_is_strict(raw, changes, match):
    refuse(grouped(raw), match, **changes)


def test_sizes_of_another_model_type_are_refused(raw):
    config = ModelConfig.from_json(raw)
    with pytest.raises(ValueError, match="head_dim is 8, expected 0: a kimi_linear has none"):
        dataclasses.replace(config, head_dim=8)
    with pytest.raises(ValueError, match="kv_lora_rank is 24, expected 0: a kimi_linear_gqa has none"):
        dataclasses.replace(config, model_type="kimi_linear_gqa", num_key_value_heads=2, head_dim=8)


@pytest.mark.parametrize(
    "key, value",
    [
        ("model_type", "llama"),
        ("hidden_act", "gelu"),
        ("q_lora_rank", 32),
        ("rope_scaling", {"type": "yarn"}),
        ("tie_word_embeddings", True),
        ("num_expert_group", 8),
        ("topk_group", 4),
        ("moe_router_activation_func", "softmax"),
        ("num_nextn_predict_layers", 1),
        ("num_key_value_heads", 2),
        ("hidden_size", 0),
        ("num_experts_per_token", 5),
        ("moe_intermediate_size", 0),
        ("linear_attn_config", None),
    ],
)
def test_value_that_needs_other_code_is_named(raw, key, value):
    refuse(raw, key, **{key: value})


@pytest.mark.parametrize(
    "key, value, expected",
    [
        ("mla_use_nope", "false", "true or false"),
        ("mla_use_nope", 0, "true or false"),
        ("hidden_size", "64", "an integer"),
        ("hidden_size", 64.0, "an integer"),
        ("hidden_size", True, "an integer"),
        ("kv_lora_rank", None, "an integer"),
        ("num_hidden_layers", "3", "an integer"),
        ("rms_norm_eps", "1e-5", "a finite number"),
        ("rms_norm_eps", float("nan"), "a finite number"),
        ("bos_token_id", "1", "an integer or null"),
        ("eos_token_id", "2", "integers"),
        ("tie_word_embeddings", 0, "False"),
    ],
)
def test_value_of_another_type_is_named(raw, key, value, expected):
    refuse(raw, f"config: {key} is .*{str(value)[:3]}.*, expected {expected}", **{key: value})


def test_types_inside_the_linear_attention_config_are_named(raw):
    linear = raw["linear_attn_config"]
    for key, value in {"num_heads": "4", "head_dim": None, "kda_layers": "12", "full_attn_layers": ["3"]}.items():
        refuse(raw, rf"linear_attn_config\.{key} is", linear_attn_config={**linear, key: value})


def test_a_whole_number_is_a_float_too(raw):
    assert ModelConfig.from_json({**raw, "routed_scaling_factor": 2}).routed_scaling_factor == 2


def test_missing_and_unknown_keys_are_named(raw):
    refuse(raw, "missing keys.*kv_lora_rank", kv_lora_rank="absent")
    refuse(raw, "unknown keys.*sliding_window", sliding_window=4096)
    refuse(raw, "unknown keys.*kda_num_heads", kda_num_heads=4)


def test_layer_lists_must_cover_every_layer_once(raw):
    linear = raw["linear_attn_config"]
    refuse(raw, "kda_layers", linear_attn_config={**linear, "full_attn_layers": [2, 3]})
    refuse(raw, "kda_layers", linear_attn_config={**linear, "kda_layers": [0, 1]})
    refuse(raw, "gate_lower_bound", linear_attn_config={**linear, "gate_lower_bound": -5.0})


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json"):
        ModelConfig.from_json(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not valid JSON"):
        ModelConfig.from_json(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="list"):
        ModelConfig.from_json(tmp_path)


def test_cache_spec_of_a_nope_model(raw):
    spec = ModelConfig.from_json(raw).cache_spec(64, block=16, rank=8)
    assert (spec.latent_dim, spec.branch_dim, spec.num_heads, spec.capacity) == (24, 8, 4, 64)
    assert spec.scale == 24**-0.5 and spec.block == 16


def test_rotated_branch_needs_the_flag(raw):
    config = ModelConfig.from_json({**raw, "mla_use_nope": False})
    with pytest.raises(ValueError, match="allow_rope=True"):
        config.cache_spec(64, block=16, rank=8)
    assert config.cache_spec(64, allow_rope=True, block=16, rank=8).branch_dim == 8


def test_config_is_hashable_and_frozen(raw):
    config = ModelConfig.from_json(raw)
    assert hash(config) == hash(ModelConfig.from_json(raw))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.vocab_size = 3
