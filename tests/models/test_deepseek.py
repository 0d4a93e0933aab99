"""DeepSeek-V2 against golden logits of an independent implementation: YaRN, its softmax scale, the rotated cache."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from vestige_jax import models
from vestige_jax.models import moe, rope
from vestige_jax.models.checkpoint import entry

TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def deepseek(golden):
    """Two random layers, dense and MoE."""
    return models.load(golden / "dsv2_tiny")


@pytest.fixture(scope="module")
def reference(golden):
    return load_file(golden / "dsv2_tiny" / "reference.safetensors")


@pytest.fixture(scope="module")
def ids(reference):
    return jnp.asarray(reference["input_ids"], jnp.int32)


@pytest.fixture(scope="module")
def spec(deepseek):
    """Two closed blocks of 16 at the end of the reference ids, all of their rows kept."""
    options = dict(block=16, ratio=1.0, rank=8, fetch=64, dtype=jnp.float32)
    return deepseek.config.cache_spec(48, allow_rope=True, **options)


@pytest.fixture(scope="module")
def lite(golden):
    return models.ModelConfig.from_json(golden / "deepseek_v2_lite_config.json")


def close(actual, expected, tolerance=TOLERANCE):
    np.testing.assert_allclose(np.asarray(actual), expected, atol=tolerance, rtol=0)


@pytest.fixture(scope="module")
def dense(deepseek):
    """Compiled dense forward of `deepseek`."""
    return jax.jit(lambda ids: deepseek(ids))


def away(model, reference, ids):
    """Largest error of a logit at position 0, and at any later one."""
    error = np.abs(jax.jit(lambda ids: model(ids))(ids) - reference["logits"])
    return error[:, 0].max(), error[:, 1:].max()


def changed(golden, **attributes):
    """The golden model with attributes of its attention layers replaced."""
    model = models.load(golden / "dsv2_tiny")
    for block in model.layers:
        for name, value in attributes.items():
            setattr(block.self_attn, name, value)
    return model


def test_dense_forward_equals_golden(dense, ids, reference):
    assert ids.shape == (2, 40)
    close(dense(ids), reference["logits"])


def test_cache_path_equals_golden(deepseek, spec, ids, reference):
    """Two chunks that cut a block, then one token at a time: positions come from the cache's length."""
    prefill = jax.jit(functools.partial(deepseek.prefill, spec))
    step = jax.jit(functools.partial(deepseek.decode, spec))
    lengths, state = jnp.array([15, 15]), deepseek.init_state(spec, 2)
    for start in (0, 15):
        logits, state = prefill(ids[:, start : start + 15], state, lengths)
        close(logits, reference["logits"][:, start : start + 15])
    for t in range(30, 40):
        logits, state, _ = step(ids[:, t], state)
        close(logits, reference["logits"][:, t])
    check_rows(deepseek, state.caches[0], ids)


def check_rows(model, cache, ids):
    """The cache of the first layer holds the normed latent and the rotated branch."""
    block = model.layers[0]
    x = block.input_layernorm(model.embed_tokens[...][ids])
    raw = x @ block.self_attn.kv_a_proj_with_mqa[...]
    rows = np.concatenate([cache.archive.rows[:, :32], cache.tail.rows[:, :8]], axis=1)
    latent = np.asarray(raw[..., :24], np.float64)
    close(rows[..., :24], latent / np.sqrt(np.mean(latent**2, -1, keepdims=True) + 1e-6) * weight(block), 1e-4)
    turned = rope.rotate(raw[..., 24:], jnp.arange(40), 1e4, model.config.rope_scaling)
    close(rows[..., 24:], turned, 1e-4)
    assert np.abs(rows[:, 1:, 24:] - raw[:, 1:, 24:]).max() > 0.1


def weight(block):
    return np.asarray(block.self_attn.kv_a_layernorm.scale[...])


def test_without_rotation_only_position_zero_agrees(golden, reference, ids):
    first, later = away(changed(golden, theta=None), reference, ids)
    assert first < TOLERANCE and later > 0.01


def test_without_the_square_of_mscale_only_position_zero_agrees(golden, reference, ids):
    """Attention over one row is that row, whatever the softmax scale."""
    first, later = away(changed(golden, scale=24**-0.5), reference, ids)
    assert first < TOLERANCE and later > 0.01


def test_without_yarn_frequencies_only_position_zero_agrees(golden, reference, ids):
    first, later = away(changed(golden, yarn=None), reference, ids)
    assert first < TOLERANCE and later > 10 * TOLERANCE


def test_scores_see_distance_and_no_offset(deepseek):
    """The same tokens 512 places later score the same; a query asked 60 places later does not."""
    layer, at = deepseek.layers[0].self_attn, jnp.arange(12)
    x = jax.random.normal(jax.random.key(0), (12, 48))
    scores = lambda asked, rows: jnp.einsum("thc,sc->hts", layer.project(x, asked)[0], layer.project(x, rows)[1])  # noqa: E731
    near = scores(at, at)
    np.testing.assert_allclose(scores(at + 512, at + 512), near, atol=2e-4 * np.abs(near).max())
    assert np.abs(scores(at + 60, at) - near).max() > 0.05 * np.abs(near).max()


def test_order_of_earlier_tokens_matters(dense, ids):
    mixed = jnp.concatenate([ids[:, 38::-1], ids[:, 39:]], axis=1)
    assert np.abs(dense(mixed)[:, -1] - dense(ids)[:, -1]).max() > 0.01


def test_yarn_of_the_lite_model(lite):
    """Pairs to 10 keep their frequency, those from 23 turn 40 times slower, pair 16 stands 6/13 between."""
    plain = 1e4 ** (-np.arange(32) / 32)
    frequency = np.asarray(lite.rope_scaling.stretched(jnp.asarray(plain, jnp.float32), lite.rope_theta))
    np.testing.assert_allclose(frequency[:11], plain[:11], rtol=1e-6)
    np.testing.assert_allclose(frequency[23:], plain[23:] / 40, rtol=1e-6)
    np.testing.assert_allclose(frequency[16], 0.01 * (7 / 13 + 6 / 13 / 40), rtol=1e-5)
    assert frequency[11] < plain[11] and frequency[22] > plain[22] / 40
    assert lite.rope_scaling.amplitude == 1
    np.testing.assert_allclose(lite.softmax_scale, 0.11472, atol=5e-6)
    np.testing.assert_allclose(lite.softmax_scale, 192**-0.5 * (0.0707 * np.log(40) + 1) ** 2, rtol=1e-12)


def test_yarn_with_another_magnitude_lengthens_the_branch():
    """mscale 1 and mscale_all_dim 0 at factor e^10: twice as long, and no change of the scale."""
    yarn = rope.Yarn(np.e**10, 4096)
    branch = jax.random.normal(jax.random.key(0), (5, 8))
    turned = rope.rotate(branch, jnp.arange(5), 1e4, yarn)
    np.testing.assert_allclose(jnp.linalg.norm(turned, axis=-1), 2 * jnp.linalg.norm(branch, axis=-1), rtol=1e-5)
    assert yarn.score == 1


def test_router_takes_the_largest_softmax_weights_as_they_are():
    scores = jnp.array([[0.1, 0.4, 0.2, 0.3]])
    weights, experts = moe.route(scores, None, 2, renormalize=False, scaling=1.0)
    np.testing.assert_array_equal(experts, [[1, 3]])
    np.testing.assert_allclose(weights, [[0.4, 0.3]], rtol=1e-6)


def test_router_of_the_model(deepseek):
    layer = deepseek.layers[1].block_sparse_moe
    x = jax.random.normal(jax.random.key(0), (5, 48))
    weights, experts = layer.route(x)
    logits = np.asarray(x, np.float64) @ np.asarray(layer.gate[...], np.float64)
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_array_equal(experts, np.argsort(-scores, axis=-1)[:, :2])
    np.testing.assert_allclose(weights, -np.sort(-scores, axis=-1)[:, :2], rtol=1e-5)
    assert layer.shared_experts.gate_proj.shape == (48, 64) and layer.e_score_correction_bias is None


def test_save_writes_the_same_tensors(golden, deepseek, tmp_path):
    models.save(tmp_path, deepseek)
    ours, theirs = load_file(tmp_path / "model.safetensors"), load_file(golden / "dsv2_tiny" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)
    assert models.load(tmp_path).config == deepseek.config


def test_the_lite_layout(lite):
    """15,706,484,224 parameters, as published (15.7 B), under the public names."""
    abstract = nnx.eval_shape(lambda: models.Decoder(lite, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    state = nnx.to_flat_state(nnx.state(abstract))
    shapes = {name: item.shape for item in (entry(w, p.shape, "deepseek_v2") for w, p in state) for name in item.names}
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 15_706_484_224
    attention = "model.layers.26.self_attn."
    expected = {
        "model.embed_tokens.weight": (102400, 2048),
        f"{attention}q_proj.weight": (3072, 2048),
        f"{attention}kv_a_proj_with_mqa.weight": (576, 2048),
        f"{attention}kv_a_layernorm.weight": (512,),
        f"{attention}kv_b_proj.weight": (4096, 512),
        f"{attention}o_proj.weight": (2048, 2048),
        "model.layers.0.mlp.gate_proj.weight": (10944, 2048),
        "model.layers.1.mlp.gate.weight": (64, 2048),
        "model.layers.1.mlp.experts.63.down_proj.weight": (2048, 1408),
        "model.layers.26.mlp.shared_experts.up_proj.weight": (2816, 2048),
        "model.norm.weight": (2048,),
        "lm_head.weight": (102400, 2048),
    }
    assert {name: shapes.get(name) for name in expected} == expected
    assert not any("correction_bias" in name or "q_a_proj" in name for name in shapes)
    assert len(shapes) == 3 + 27 * 7 + 3 + 26 * (1 + 3 * 64 + 3)


def test_config_of_the_lite_model(lite):
    assert lite.rotated and lite.kda_layers == () and not lite.grouped
    assert (lite.rms_norm_eps, lite.kv_a_layernorm_eps, lite.moe_renormalize) == (1e-6, 1e-6, False)
    assert [lite.is_moe(i) for i in (0, 1, 26)] == [False, True, True]
    assert (lite.num_experts, lite.num_experts_per_token, lite.num_shared_experts) == (64, 6, 2)
    assert models.ModelConfig.from_json(json.loads(json.dumps(lite.to_json()))) == lite
    with pytest.raises(ValueError, match="deepseek_v2 rotates its branch.*allow_rope=True"):
        lite.cache_spec(4096)
    spec = lite.cache_spec(4096, allow_rope=True)
    assert (spec.latent_dim, spec.branch_dim, spec.num_heads, spec.scale) == (512, 64, 16, lite.softmax_scale)


YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    "key, value, match",
    [
        ("q_lora_rank", 1536, "q_lora_rank is 1536, expected None"),
        ("q_lora_rank", "absent", "missing keys.*q_lora_rank"),
        ("topk_method", "group_limited_greedy", "topk_method is 'group_limited_greedy'"),
        ("scoring_func", "sigmoid", "scoring_func is 'sigmoid'"),
        ("norm_topk_prob", True, "norm_topk_prob is True"),
        ("num_key_value_heads", 2, "num_key_value_heads is 2"),
        ("rope_scaling", "absent", "missing keys.*rope_scaling"),
        ("rope_scaling", {**YARN, "type": "linear"}, "rope_scaling.type is .*linear.*, expected 'yarn'"),
        ("rope_scaling", {**YARN, "truncate": False}, "rope_scaling is .*truncate.*unknown or missing"),
        (
            "rope_scaling",
            {"type": "yarn", "factor": 40},
            "rope_scaling is .*'original_max_position_embeddings'.*missing",
        ),
        ("rope_scaling", {**YARN, "factor": "40"}, "rope_scaling.factor is '40', expected a finite number"),
        ("num_experts", 4, "unknown keys.*num_experts"),
        ("mla_use_nope", True, "unknown keys.*mla_use_nope"),
        ("linear_attn_config", {}, "unknown keys.*linear_attn_config"),
    ],
)
def test_value_that_needs_other_code_is_named(golden, key, value, match):
    raw = {**json.loads((golden / "dsv2_tiny" / "config.json").read_text()), key: value}
    with pytest.raises(ValueError, match=match):
        models.ModelConfig.from_json({k: v for k, v in raw.items() if v != "absent"})


def test_rope_without_scaling(golden):
    raw = {**json.loads((golden / "dsv2_tiny" / "config.json").read_text()), "rope_scaling": None}
    config = models.ModelConfig.from_json(raw)
    assert config.rope_scaling is None and config.softmax_scale == 24**-0.5


def test_rotation_belongs_to_the_model_type(deepseek, lite):
    with pytest.raises(ValueError, match="mla_use_nope is True, expected false"):
        dataclasses.replace(deepseek.config, mla_use_nope=True, rope_scaling=None)
    with pytest.raises(ValueError, match="rope_scaling is .*, expected null"):
        dataclasses.replace(lite, model_type="kimi_linear", mla_use_nope=True)
