"""Latent attention: expanded equals absorbed, no position in the NoPE model, position in its RoPE twin."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vestige_jax as vk
from vestige_jax import models
from vestige_jax.models import cached, mla, rope


def twin(config, **changes):
    """The same layer with the branch rotated."""
    return dataclasses.replace(config, mla_use_nope=False, **changes)


@pytest.fixture(scope="module")
def layers(kimi):
    """(NoPE layer, RoPE twin with the same weights)."""
    nope, turned = (mla.MLA(config, rngs=nnx.Rngs(0), dtype=jnp.float32) for config in (kimi.config, twin(kimi.config)))
    return nope, turned


@pytest.fixture(scope="module")
def x():
    return jax.random.normal(jax.random.key(1), (2, 30, 48))


def through_cache(layer, spec, x, cut):
    """Prefill up to `cut`, then decode the rest."""
    prefill = jax.jit(functools.partial(layer.prefill, spec))
    step = jax.jit(functools.partial(layer.decode, spec))
    out, state = prefill(x[:, :cut], layer.init_state(spec, 2, False))
    out = [out]
    for t in range(cut, x.shape[1]):
        one, state, _ = step(x[:, t], state)
        out.append(one[:, None])
    return jnp.concatenate(out, axis=1), state


@pytest.mark.parametrize("which", [0, 1], ids=["nope", "rope"])
def test_absorbed_attention_equals_expanded(layers, spec, x, which):
    """In the twin this also says that positions come from the cache's length, in prefill and in decode."""
    out, _ = through_cache(layers[which], spec, x, 20)
    np.testing.assert_allclose(out, jax.jit(layers[which])(x), atol=2e-5)


def test_cache_row_is_normed_latent_and_raw_branch(layers, spec, x):
    nope, _ = layers
    _, state = through_cache(nope, spec, x, 20)
    raw = np.asarray(x @ nope.kv_a_proj_with_mqa[...], np.float64)
    latent = raw[..., :24] / np.sqrt(np.mean(raw[..., :24] ** 2, -1, keepdims=True) + 1e-6)
    rows = np.concatenate([state.cache.archive.rows[:, :16], state.cache.tail.rows[:, :14]], axis=1)
    np.testing.assert_allclose(rows[..., :24], latent, atol=1e-5)
    np.testing.assert_allclose(rows[..., 24:], raw[..., 24:], atol=1e-5)


def test_cache_holds_the_rotated_branch_in_the_twin(layers, spec, x):
    _, turned = layers
    _, state = through_cache(turned, spec, x, 20)
    raw = (x @ turned.kv_a_proj_with_mqa[...])[..., 24:]
    rows = np.concatenate([state.cache.archive.rows[:, :16], state.cache.tail.rows[:, :14]], axis=1)
    np.testing.assert_allclose(rows[..., 24:], rope.rotate(raw, jnp.arange(30), 10000.0), atol=1e-5)


def scores(layer, x, start):
    """Absorbed score of the last of x on each row, with positions from `start`."""
    at = start + jnp.arange(x.shape[1])
    query, rows = layer._absorb(layer._query(x, at)), layer._rows(x, at)
    return jnp.einsum("bhc,btc->bht", query[:, -1], rows)


def test_position_offset_changes_nothing(layers, x):
    """Scores depend on no position (NoPE) or on differences only (RoPE)."""
    for layer in layers:
        near, far = scores(layer, x, 0), scores(layer, x, 512)
        np.testing.assert_allclose(far, near, atol=2e-4 * np.abs(near).max())


def test_only_the_twin_sees_distance(layers, x):
    """One query asked at two times of the same rows: equal without rotation, different with it."""
    at = jnp.arange(30)
    for layer, same in zip(layers, (True, False), strict=True):
        rows = layer._rows(x, at)
        asked = [layer._absorb(layer._query(x[:, :1], jnp.full((1,), t))) for t in (30, 90)]
        now, later = (jnp.einsum("bqhc,btc->bht", query, rows) for query in asked)
        assert bool(np.abs(now - later).max() < 1e-5) is same


def test_nope_model_ignores_the_order_of_earlier_tokens(layers, x):
    """The output at the last token is a function of the set of rows; the twin's is not."""
    mixed = jnp.concatenate([x[:, 28::-1], x[:, 29:]], axis=1)
    nope, turned = (jax.jit(layer) for layer in layers)
    np.testing.assert_allclose(nope(mixed)[:, -1], nope(x)[:, -1], atol=1e-5)
    assert np.abs(turned(mixed)[:, -1] - turned(x)[:, -1]).max() > 1e-3


def test_rotation_by_hand():
    """Pairs (0, 1) and (2, 3), theta 100, position 3: angles 3 and 0.3."""
    out = rope.rotate(jnp.array([1.0, 0.0, 0.0, 2.0]), jnp.array(3), 100.0)
    np.testing.assert_allclose(out, [np.cos(3), np.sin(3), -2 * np.sin(0.3), 2 * np.cos(0.3)], atol=1e-6)


def test_rotation_at_position_zero_is_the_identity():
    branch = jax.random.normal(jax.random.key(0), (3, 8))
    np.testing.assert_array_equal(rope.rotate(branch, jnp.zeros(3, jnp.int32), 1e4), branch)


def test_dense_attention_in_query_blocks_equals_one_block(layers, x, monkeypatch):
    whole = layers[0](x)
    monkeypatch.setattr(cached, "QUERY_BLOCK", 7)
    np.testing.assert_allclose(layers[0](x), whole, atol=1e-5)


def test_latent_norm_has_its_own_epsilon(kimi):
    """1e-6 whatever rms_norm_eps (1e-5) says, unless the config asks for another; too small for any logit to show."""
    assert kimi.layers[2].self_attn.kv_a_layernorm.eps == 1e-6
    assert kimi.layers[2].input_layernorm.eps == 1e-5
    other = models.ModelConfig.from_json({**kimi.config.to_json(), "kv_a_layernorm_eps": 1e-5})
    assert mla.MLA(other, rngs=nnx.Rngs(0), dtype=jnp.float32).kv_a_layernorm.eps == 1e-5


def test_rows_are_rounded_before_the_chunk_attends(layers, kimi, x):
    """With bfloat16 rows, a chunk sees its own rows as later chunks will, so cutting the prompt changes nothing."""
    spec = kimi.config.cache_spec(96, block=16, ratio=1.0, rank=8, fetch=64, dtype=jnp.bfloat16)
    prefill = jax.jit(functools.partial(layers[0].prefill, spec))
    whole, _ = prefill(x, layers[0].init_state(spec, 2, False))
    first, state = prefill(x[:, :20], layers[0].init_state(spec, 2, False))
    second, _ = prefill(x[:, 20:], state)
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), whole, atol=2e-5)
    assert vk.length(state.cache).tolist() == [20, 20]
