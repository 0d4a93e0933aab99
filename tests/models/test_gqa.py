"""Grouped-query attention as cache rows: equal to the plain layer, no position, one row for all heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import vestige_jax as vk
from vestige_jax import models
from vestige_jax.models import gqa

FILE = {
    "model_type": "kimi_linear_gqa",
    **dict(vocab_size=32, hidden_size=24, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4),
    **dict(num_key_value_heads=2, head_dim=8, initializer_range=1.0),
    "linear_attn_config": {"kda_layers": [], "full_attn_layers": [1], "num_heads": 1, "head_dim": 8},
}


@pytest.fixture(scope="module")
def config():
    return models.ModelConfig.from_json(FILE)


@pytest.fixture(scope="module")
def layer(config):
    return gqa.GQA(config, rngs=nnx.Rngs(0), dtype=jnp.float32)


@pytest.fixture(scope="module")
def spec(config):
    return config.cache_spec(96, block=16, ratio=1.0, rank=8, fetch=64, dtype=jnp.float32)


@pytest.fixture(scope="module")
def x():
    return 2 * jax.random.normal(jax.random.key(1), (2, 30, 24))


def plain(layer, x):
    """Head by head in float64; query heads 0 and 1 read key head 0, heads 2 and 3 key head 1."""
    wide = lambda weight: np.asarray(weight[...], np.float64)  # noqa: E731
    x, out = np.asarray(x, np.float64), 0
    for head, group in enumerate((0, 0, 1, 1)):
        query, key, value = (
            x @ wide(weight)[:, i] for weight, i in ((layer.q_proj, head), (layer.k_proj, group), (layer.v_proj, group))
        )
        scores = query @ key.transpose(0, 2, 1) / np.sqrt(8)
        weights = np.exp(scores) * np.tri(x.shape[1])
        out = out + (weights / weights.sum(-1, keepdims=True)) @ value @ wide(layer.o_proj)[head]
    return out


def test_dense_layer_is_plain_grouped_query_attention(layer, x):
    np.testing.assert_allclose(jax.jit(layer)(x), plain(layer, x), atol=2e-5)


def test_cache_path_is_plain_grouped_query_attention(layer, spec, x):
    out, state = jax.jit(functools.partial(layer.prefill, spec))(x[:, :20], layer.init_state(spec, 2, False))
    step, out = jax.jit(functools.partial(layer.decode, spec)), [out]
    for t in range(20, 30):
        one, state, _ = step(x[:, t], state)
        out.append(one[:, None])
    np.testing.assert_allclose(jnp.concatenate(out, axis=1), plain(layer, x), atol=2e-5)


def test_sizes_of_a_row(config, spec):
    assert (config.latent_dim, config.branch_dim, config.row_dim, config.softmax_scale) == (16, 16, 32, 8**-0.5)
    assert (spec.latent_dim, spec.branch_dim, spec.num_heads, spec.scale) == (16, 16, 4, 8**-0.5)


def test_row_by_hand(layer, x):
    """[v_1 v_2 | k_1 k_2], wherever the token stands."""
    rows = layer._rows(x[0, :3], jnp.array([5, 900, 7]))
    parts = [x[0, :3] @ weight[...][:, i] for weight in (layer.v_proj, layer.k_proj) for i in (0, 1)]
    np.testing.assert_allclose(rows, jnp.concatenate(parts, axis=-1), atol=1e-5)


def test_absorbed_query_and_expanded_output_by_hand():
    """Four heads, two key heads of width 1; o_proj adds head h times 10^h."""
    changed = dict(hidden_size=1, head_dim=1)
    layer = gqa.GQA(models.ModelConfig.from_json({**FILE, **changed}), rngs=nnx.Rngs(0), dtype=jnp.float32)
    layer.o_proj[...] = jnp.array([1.0, 10, 100, 1000])[:, None, None]
    query = layer._absorb(jnp.array([[1.0], [2], [3], [4]]))
    np.testing.assert_array_equal(query, [[0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 0, 3], [0, 0, 0, 4]])
    latent = jnp.array([[1.0, 9], [2, 9], [9, 3], [9, 4]])
    np.testing.assert_array_equal(layer._expand(latent, jnp.float32), [4321])
    np.testing.assert_array_equal(layer._value_norms(jnp.array([-5.0, 6, 7, 8])), [5, 5, 6, 6])


def test_order_of_earlier_tokens_is_ignored(layer, x):
    mixed = jnp.concatenate([x[:, 28::-1], x[:, 29:]], axis=1)
    run = jax.jit(layer)
    np.testing.assert_allclose(run(mixed)[:, -1], run(x)[:, -1], atol=1e-5)


def test_file_round_trip(config, tmp_path):
    model = models.Decoder(config, rngs=nnx.Rngs(0))
    models.save(tmp_path, model)
    shapes = {name: tensor.shape for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    attention = {name: shape for name, shape in shapes.items() if "self_attn" in name}
    wanted = {"q_proj": (32, 24), "k_proj": (16, 24), "v_proj": (16, 24), "o_proj": (24, 32)}
    assert attention == {f"model.layers.0.self_attn.{name}.weight": shape for name, shape in wanted.items()}
    again = models.load(tmp_path)
    assert again.config == config
    for a, b in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(again)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_compressed_cache_fetches_exactly_what_outscores_tier_1(config):
    """All of a score lies in the branch, which the index reads exactly: rows fire by their scores, whatever z is."""
    model = models.Decoder(config, rngs=nnx.Rngs(3))
    options = dict(block=16, ratio=1 / 8, sinks=1, rank=4, fetch=64, dtype=jnp.float32, trace=True)
    spec, ids = config.cache_spec(96, **options), jax.random.randint(jax.random.key(0), (1, 64), 0, 32)
    _, state = jax.jit(functools.partial(model.prefill, spec))(ids, model.init_state(spec, 1))
    kept = np.asarray(vk.where(spec, state.caches[0])[0, :64] == 1)
    assert kept.sum() == 9
    logits, _, stats = jax.jit(functools.partial(model.decode, spec))(jnp.array([7]), state)

    attention, norm = model.layers[0].self_attn, model.layers[0].input_layernorm
    x = norm(model.embed_tokens[...][jnp.append(ids[0], 7)])
    query, rows = attention.project(x, jnp.arange(65))
    scores = np.asarray(query[-1] @ rows.T)
    best = np.maximum(scores[:, :64][:, kept].max(1), scores[:, 64])
    margin = (scores[:, :64] - best[:, None]).max(0)
    fires, told = np.asarray(stats.rows[0, 0, :64], bool), (np.abs(margin) > 1e-4) & ~kept  # a token seen twice ties
    np.testing.assert_array_equal(fires[told], margin[told] > 0)
    assert told.sum() > 30 and 0 < (fires & told).sum() < 30
    assert int(stats.fired[0, 0]) == fires.sum() and not (fires & kept).any()
    weights = np.exp((scores - scores.max()) * spec.scale) * np.append(kept | fires, True)
    latent = (weights / weights.sum(1, keepdims=True)) @ rows[:, :16]
    out = model.embed_tokens[...][7] + attention._expand(latent, jnp.float32)
    np.testing.assert_allclose(logits[0], model._logits(model.layers[0]._feed(out)), atol=1e-3)
