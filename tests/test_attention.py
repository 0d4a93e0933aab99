"""Exact attention by parts, and dense causal attention of prefill chunks, against float64."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas
import vestige_jax as vj
from tests import oracle_attention as oracle
from tests.scenes import CAPACITY, SCALE, C, H, R, asked, attend_chunk, both_parts, scene, small_spec
from tests.sources import random_rows

pytestmark = pytest.mark.usefixtures("quick_compilation")


@jax.jit
def three_parts(query, rows, counts):
    """Attention over the first counts[i] rows of each buffer rows[i], merged left to right."""
    parts = [kernels_pallas.attend(query, rows[i], counts[i], latent_dim=R, scale=SCALE) for i in range(3)]
    return kernels_pallas.merge(kernels_pallas.merge(parts[0], parts[1]), parts[2])


@hypothesis.given(
    counts=st.lists(st.sampled_from([0, 1, 5, 16]), min_size=3, max_size=3), size=st.sampled_from([0.1, 3.0])
)
def test_merged_parts_are_attention_over_the_union(counts, size):
    rng = np.random.default_rng(sum(counts))
    rows, query = random_rows(rng, 3, 1, 16), size * rng.normal(size=(H, C)).astype(np.float32)
    part = three_parts(query[None], rows, jnp.asarray(counts)[:, None])
    union = np.concatenate([rows[i, 0, :n] for i, n in enumerate(counts)])
    exact = oracle.attention(query, union, R, SCALE)
    loose = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(part.out[0], exact.out, **loose)
    np.testing.assert_allclose(part.lse[0], exact.lse, **loose)
    np.testing.assert_allclose(part.peak[0], exact.peak, **loose)
    if len(union):
        np.testing.assert_allclose(part.lse[0] - part.mean[0], exact.entropy, **loose)


def test_the_empty_part_changes_nothing_and_holds_no_nan():
    none = kernels_pallas.empty(1, H, R)
    assert not np.any(none.out) and np.all(np.isneginf(none.lse)) and np.all(np.isneginf(none.peak))
    jax.tree.map(np.testing.assert_array_equal, kernels_pallas.merge(none, none), none)
    rows = random_rows(np.random.default_rng(0), 1, 5)
    part = kernels_pallas.attend(rows[:, :H], rows, jnp.asarray([5]), latent_dim=R, scale=SCALE)
    for merged in (kernels_pallas.merge(part, none), kernels_pallas.merge(none, part)):
        jax.tree.map(np.testing.assert_array_equal, merged, part)


def test_parts_with_scores_far_apart_merge_without_overflow():
    rows = np.zeros((1, 2, C), np.float32)
    rows[0, 0, :2], rows[0, 1, :2] = (300, 1), (-300, 5)
    query = np.zeros((1, 1, C), np.float32)
    query[..., 0] = 10 / SCALE
    high, low = (
        kernels_pallas.attend(query, rows[:, i : i + 1], jnp.ones(1, int), latent_dim=R, scale=SCALE) for i in (0, 1)
    )
    merged = kernels_pallas.merge(low, high)
    np.testing.assert_allclose(merged.lse, 3000, rtol=1e-6)
    np.testing.assert_allclose(merged.out[0, 0, :2], [300, 1], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_attended_tier_and_the_whole_cache_are_brute_force_over_their_rows(dtype):
    here = scene(3, dtype=dtype)
    query = asked(3)
    near, full = both_parts(here.spec, here.cache, jnp.asarray(query, dtype))
    for b in range(3):
        tier = here.sequence(b).tier
        for part, mask in [(near, tier != oracle.ARCHIVED), (full, tier > 0)]:
            exact = here.attention(b, query[b], mask)
            np.testing.assert_allclose(part.out[b], exact.out, atol=1e-5)
            np.testing.assert_allclose(part.lse[b], exact.lse, atol=1e-5)
            np.testing.assert_allclose(part.lse[b] - part.mean[b], exact.entropy, atol=1e-5)


# --- prefill chunks: prompts up to the capacity, in any cut

PROMPTS = (CAPACITY, 50, 5)
CHUNK = 8
WHOLE = [8] * 10 + [4]


def prompt(seed):
    rng = np.random.default_rng(seed)
    return 2 * rng.normal(size=(3, CAPACITY, H, C)).astype(np.float32), random_rows(rng, 3, CAPACITY)


def prefill(spec, queries, rows, cut):
    """Attend and append in chunks of the lengths in `cut`; padding is NaN. Returns out [B, T, H, R], mass, cache."""
    cache, out, mass, start = vj.init(spec, 3), np.zeros((3, CAPACITY, H, R)), 0, 0
    for size in cut:
        lengths = np.clip(np.array(PROMPTS) - start, 0, size)
        chunk_queries, chunk_rows = np.full((3, CHUNK, H, C), np.nan, "f"), np.full((3, CAPACITY, C), np.nan, "f")
        for b, n in enumerate(lengths):
            chunk_queries[b, :n], chunk_rows[b, :n] = (x[b, start : start + n] for x in (queries, rows))
        some, weight = map(np.asarray, attend_chunk(spec, cache, chunk_queries, chunk_rows[:, :CHUNK], lengths))
        cache = vj.append(spec, cache, chunk_rows, lengths)  # at a width that other tests have compiled
        for b, n in enumerate(lengths):
            out[b, start : start + n] = some[b, :n]
            np.testing.assert_array_equal(some[b, n:], 0)
        mass, start = mass + weight, start + size
    return out, mass, cache


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_are_dense_causal_attention_and_their_mass_its_column_sums(dtype):
    spec = small_spec(dtype=dtype)
    queries, rows = prompt(40)
    out, mass, _ = prefill(spec, queries, rows, WHOLE)
    for b, n in enumerate(PROMPTS):
        exact, columns = oracle.causal(
            oracle.rounded(queries[b, :n], dtype), oracle.rounded(rows[b, :n], dtype), 0, R, SCALE
        )
        np.testing.assert_allclose(out[b, :n], exact, atol=1e-5)
        np.testing.assert_allclose(mass[b, :n], columns, atol=1e-4)
        np.testing.assert_array_equal(mass[b, n:], 0)
    np.testing.assert_allclose(mass.sum(1), np.array(PROMPTS) * H, rtol=1e-5)


@pytest.mark.parametrize("cut", [[1] * CAPACITY, [3, 5] + [8] * 9 + [4], [7, 8, 1] + [8] * 7 + [5, 7]])
def test_how_a_prompt_is_cut_changes_neither_attention_nor_cache(cut):
    spec = small_spec()
    queries, rows = prompt(41)
    out, mass, cache = prefill(spec, queries, rows, cut)
    whole_out, whole_mass, whole_cache = prefill(spec, queries, rows, WHOLE)
    np.testing.assert_allclose(out, whole_out, atol=1e-5)
    np.testing.assert_allclose(mass, whole_mass, atol=1e-4)
    np.testing.assert_array_equal(vj.where(spec, cache), vj.where(spec, whole_cache))
    np.testing.assert_array_equal(cache.archive.words, whole_cache.archive.words)


def test_a_chunk_sees_archived_rows_too():
    here = scene(42)
    queries, rows = (x[:, :CHUNK] for x in prompt(42))
    out, mass = attend_chunk(here.spec, here.cache, queries, rows)
    for b, n in enumerate(here.lengths):
        exact, columns = oracle.causal(queries[b], np.vstack([here.rows[b, :n], rows[b]]), n, R, SCALE)
        np.testing.assert_allclose(out[b], exact, atol=1e-5)
        np.testing.assert_allclose(mass[b, : n + CHUNK], columns, atol=1e-4)


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda q, r, n: (q[:, :, :2], r, n), "queries has shape"),
        (lambda q, r, n: (q, r[..., :15], n), "rows has shape"),
        (lambda q, r, n: (q, r, n + CHUNK), "lengths holds"),
        (lambda q, r, n: (q, r, n[:2]), "lengths has shape"),
    ],
)
def test_bad_arguments_of_a_chunk_raise(spoil, words):
    queries, rows = (x[:, :CHUNK] for x in prompt(43))
    spec = small_spec()
    with pytest.raises(ValueError, match=words):
        vj.attend_chunk(spec, vj.init(spec, 3), *spoil(queries, rows, np.array([8, 3, 1])))
