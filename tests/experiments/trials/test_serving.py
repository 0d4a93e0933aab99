"""Every method through one prefill, one compression and the cache; what a second reading sees."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import vestige_jax as vk
from experiments.trials import rereading, serving
from vestige_jax import baselines, generation, models

pytestmark = pytest.mark.usefixtures("quick_compilation")

PREFIX, BEHIND, BATCH, SINKS = 48, 8, 2, 2
PHRASE = (5, 6, 7)
ALL = [
    *(name for name in baselines.SELECTORS if name not in ("sigma_pca8", "sigma_pca16", "sigma_pca32")),
    *baselines.MERGERS,
    "tova+recall",
    "kvzip_global+recall",
]


@pytest.fixture(scope="module")
def model(twins):
    """Two MLA layers, H 2, R 8, P 4."""
    return models.load(twins / "nope")


@pytest.fixture(scope="module")
def spec(model):
    sizes = dict(block=16, ratio=0.5, sinks=SINKS, rank=2, fetch=64, dtype=jnp.float32, trace=True)
    return model.config.cache_spec(PREFIX + BEHIND, **sizes)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 400, (BATCH, PREFIX + BEHIND)).astype(np.int32)


@pytest.fixture(scope="module")
def state(model, spec, tokens):
    _, state = generation.prefill(model, spec, jnp.asarray(tokens[:, :PREFIX]), chunk=16, observe=True)
    return rereading.observe(model, spec, state, jnp.asarray(tokens[:, :PREFIX]), PHRASE, part=20, chunk=16)


def compress(spec, state, name, count):
    method = baselines.method(name)
    own = serving.served(spec, method)
    return own, serving.compress(own, state, method, count, jnp.zeros((2, BATCH), jnp.uint32))


def kept(compressed):
    """bool [layers, B, n]."""
    return np.stack([cache.archive.kept for cache in compressed.caches])


def rows_of(cache, b):
    closed, tail = int(cache.archive.closed[b]), int(cache.tail.length[b])
    rows = np.concatenate([cache.archive.rows[b, :closed], cache.tail.rows[b, :tail]])
    return np.asarray(rows[:, :12], np.float64)


@pytest.mark.slow
def test_a_second_reading_sees_what_each_part_looks_back_at(model, spec, tokens, state):
    """Against a softmax over the rows of prompt ++ phrase ++ part, for every query behind the prompt."""
    roomy = dataclasses.replace(spec, capacity=96)
    wanted = np.zeros((2, BATCH, PREFIX))
    for start in range(0, PREFIX, 20):
        part = tokens[:, start : min(start + 20, PREFIX)]
        again = np.concatenate([tokens[:, :PREFIX], np.tile(PHRASE, (BATCH, 1)), part], axis=1)
        _, end = generation.prefill(model, roomy, jnp.asarray(again, jnp.int32), chunk=16)
        for i, layer in enumerate(end.layers):
            for b in range(BATCH):
                rows = rows_of(layer.cache, b)
                for query, at in zip(
                    np.asarray(layer.queries[b], np.float64), layer.positions[b].tolist(), strict=True
                ):
                    if at >= PREFIX:
                        score = spec.scale * query @ rows[: at + 1].T
                        weight = np.exp(score) / np.exp(score).sum(-1, keepdims=True)
                        wanted[i, b] = np.maximum(wanted[i, b], weight.max(0)[:PREFIX])
    for i, layer in enumerate(state.layers):
        assert_allclose(layer.seen.repeat[:, :PREFIX], wanted[i], rtol=1e-4)
        assert_array_equal(layer.seen.repeat[:, PREFIX:] > 1, False)


@pytest.mark.slow
def test_a_second_reading_leaves_the_state_as_it_was(model, spec, tokens, state):
    _, fresh = generation.prefill(model, spec, jnp.asarray(tokens[:, :PREFIX]), chunk=16, observe=True)
    for ours, theirs in zip(state.layers, fresh.layers, strict=True):
        assert_array_equal(ours.cache.archive.words, theirs.cache.archive.words)
        assert_array_equal(ours.seen.mass, theirs.seen.mass)


@pytest.mark.slow
def test_the_moments_are_those_of_the_prompt(model, spec, state):
    """48 queries fit in the buffer of the last 64."""
    for block, layer in zip(model.layers, state.layers, strict=True):
        seen = serving.observed(spec, layer, jnp.int32(3), jnp.zeros(BATCH, jnp.uint32))
        asked = np.asarray(layer.queries, np.float64)[:, -PREFIX:]
        assert_allclose(seen.query_mean, asked.mean(1), atol=1e-5)
        away = asked - asked.mean(1, keepdims=True)
        assert_allclose(seen.query_covariance, np.einsum("bthc,bthd->bhcd", away, away) / PREFIX, atol=1e-5)
        values = np.asarray(block.self_attn.kv_b_proj[...])[..., 8:]  # W_UV [R, H, V] behind W_UK
        rows = np.asarray(layer.cache.archive.rows)[:, :, :8]
        assert_allclose(seen.value_norms, np.linalg.norm(np.einsum("bsr,rhv->bshv", rows, values), axis=-1), rtol=1e-4)


@pytest.mark.slow
def test_one_budget_for_both_layers(spec, state):
    own, compressed = compress(spec, state, "kvzip_global", 6)
    mask = kept(compressed)
    assert mask[..., :SINKS].all()
    others = mask[..., SINKS:].sum(-1)
    assert_array_equal(others.sum(0), [12, 12])
    assert (others != 6).any()  # so that one threshold is not one for each layer
    weight = np.stack([layer.seen.repeat[:, SINKS:PREFIX] for layer in state.layers])
    for b in range(BATCH):
        chosen = mask[:, b, SINKS:]
        assert weight[:, b][chosen].min() >= weight[:, b][~chosen].max()
    assert_array_equal(np.stack([cache.tier1.count for cache in compressed.caches]), others + SINKS)
    assert own.tier1_rows == PREFIX + SINKS


@pytest.mark.slow
def test_kvzip_keeps_as_many_in_each_layer(spec, state):
    _, compressed = compress(spec, state, "kvzip", 6)
    assert_array_equal(kept(compressed).sum(-1), np.full((2, BATCH), 6 + SINKS))
    for mask, layer in zip(kept(compressed), state.layers, strict=True):
        best = np.argsort(-np.asarray(layer.seen.repeat[:, SINKS:PREFIX]), axis=1)[:, :6] + SINKS
        assert_array_equal(np.sort(best, axis=1), [np.flatnonzero(row)[SINKS:] for row in mask])


@pytest.mark.slow
@pytest.mark.parametrize("name", baselines.MERGERS)
def test_merging_as_many_rows_as_there_are_is_dense(model, spec, tokens, state, name):
    full = dataclasses.replace(spec, ratio=1.0)
    forced = {}
    for method in ("dense", name):
        roomy = dataclasses.replace(
            state,
            layers=tuple(dataclasses.replace(layer, cache=vk.grow(full, layer.cache)) for layer in state.layers),
        )
        own, compressed = compress(full, roomy, method, PREFIX)
        forced[method] = generation.teacher_force(model, own, compressed, jnp.asarray(tokens[:, PREFIX:]))
    assert_allclose(forced[name].logprob, forced["dense"].logprob, atol=1e-3)
    # The rows of the first layer depend on the token alone: k-means merges equal ones, exactly.
    share = np.asarray(forced[name].stats.attended)
    assert_allclose(share[:, 1], 1.0, rtol=1e-6)
    assert (share[:, 0] < 0.97).any() if name == "kmeans" else (share[:, 0] == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_every_method_is_served(model, spec, tokens, state, name):
    own, compressed = compress(spec, state, name, 5)
    forced = generation.teacher_force(model, own, compressed, jnp.asarray(tokens[:, PREFIX:]))
    assert np.isfinite(forced.logprob).all()
    method = baselines.method(name)
    rows = np.asarray(forced.stats.kept).sum(1)  # over the layers
    if method.kind == "merge" or name == "nuke":
        assert (rows == 2 * SINKS).all()
    else:
        assert (rows == 2 * (5 + SINKS)).all()
    attended = np.asarray(forced.stats.attended)[0] * (PREFIX + 1)
    if method.kind == "merge":
        assert (attended <= 5 + SINKS + 1.001).all() and (attended > SINKS + 1.001).all()
    elif method.recall == "none" and method.kind == "keep" and name != "nuke":
        assert_allclose(attended, 5 + SINKS + 1, rtol=1e-5)


@pytest.mark.slow
def test_what_was_not_observed_is_missed_in_one_sentence(model, spec, tokens, state):
    ids = jnp.asarray(tokens[:, :PREFIX])
    with pytest.raises(ValueError, match="phrase=None must hold tokens: \\['kvzip'\\] read the prompt again"):
        serving.prefill(model, spec, ids, [baselines.method("kvzip")], chunk=16)
    unread = [dataclasses.replace(x, seen=dataclasses.replace(x.seen, repeat=None)) for x in state.layers]
    with pytest.raises(ValueError, match="'repeat'"):
        compress(spec, dataclasses.replace(state, layers=tuple(unread)), "kvzip", 5)
    unseen = [dataclasses.replace(x, seen=None) for x in state.layers]
    with pytest.raises(ValueError, match="without observe=True"):
        compress(spec, dataclasses.replace(state, layers=tuple(unseen)), "sigma", 5)


def test_a_method_that_does_not_fit_is_found_before_anything_runs(spec):
    with pytest.raises(ValueError, match="width=8 must be at most branch_dim=4"):
        serving.check(spec, baselines.method("sigma_pca8"))
    for name in ("dense", "vestige", "kvzip_global", "kmeans", "expected_attention"):
        serving.check(spec, baselines.method(name))
