"""Serving: attend and step against a float64 brute force over exactly the rows that should be attended."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vestige_jax as vj
from kernels_pallas.words import to_floats, to_words
from tests.scenes import CAPACITY, C, H, R, asked, assert_served, scene
from tests.sources import random_rows

pytestmark = pytest.mark.usefixtures("quick_compilation")

jitted_step = jax.jit(vj.step, static_argnums=0, donate_argnums=1)


def new_rows(seed):
    return random_rows(np.random.default_rng(2000 + seed), 3)


def step_inside_jit(here, query, row, active=(True, True, True)):
    """One compiled, donated step; the scene keeps its cache."""
    return jitted_step(here.spec, jax.tree.map(jnp.copy, here.cache), query, row, jnp.asarray(active))


@pytest.mark.parametrize("source", ["random", "correlated"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", [0, 1])
def test_attends_kept_tail_and_fired_rows_and_nothing_else(source, dtype, seed):
    here = scene(seed, source, dtype=dtype)
    here = here.calibrated(here.z_that_fires(asked(seed)[0], 20))
    out, stats = vj.attend(here.spec, here.cache, asked(seed))
    assert stats.fetched[0] == 20
    assert_served(here, asked(seed), out, stats)


def test_tier_one_alone_attends_kept_and_tail():
    here = scene(4).under(trace=True, recall="none")
    out, stats = vj.attend(here.spec, here.cache, asked(4))
    assert_served(here, asked(4), out, stats)
    assert not np.any(stats.fetched)


def test_keeping_every_row_is_dense():
    here = scene(5, ratio=1.0).under(trace=True, recall="none")
    out, stats = vj.attend(here.spec, here.cache, asked(5))
    for b in range(3):
        np.testing.assert_allclose(out[b], here.attention(b, asked(5)[b]).out, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(stats.attended, 1)


def test_below_activation_a_sequence_is_served_dense_and_from_there_by_the_policy():
    for length, dense in [(37, [False, False, True]), (36, [False, True, True])]:
        here = scene(7, lengths=(70, length, 9)).under(trace=True, activation=37).calibrated(z=0.5)
        out, stats = vj.attend(here.spec, here.cache, asked(7))
        assert_served(here, asked(7), out, stats)
        assert list(stats.attended == 1) == dense


def test_an_empty_attended_tier_recalls_from_the_whole_archive():
    here = scene(9, lengths=(64, 32, 16))
    nothing_kept = jnp.zeros((3, here.spec.archive_rows), bool)
    here = here._replace(cache=vj.keep_set(here.spec, here.cache, nothing_kept))
    out, stats = vj.attend(here.spec, here.cache, asked(9))
    for b in range(3):
        np.testing.assert_allclose(out[b], here.attention(b, asked(9)[b]).out, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(stats.fetched, here.lengths)


@pytest.mark.parametrize("count", [0, 1, 16])
def test_empty_single_row_and_single_block_caches_are_finite(count):
    here = scene(10, lengths=(count,) * 3)
    out, stats = vj.attend(here.spec, here.cache, asked(10))
    assert_served(here, asked(10), out, stats)
    if count < 2:
        only = here.rows[:, :1, :R] if count else 0.0
        np.testing.assert_allclose(out, np.broadcast_to(only, out.shape), atol=1e-6)


def poison(cache):
    """Every slot that holds no row filled with enormous values."""

    def past(values, count, axis=1):
        slot = np.arange(values.shape[axis]).reshape([-1 if a == axis else 1 for a in range(values.ndim)])
        return jnp.where(slot >= count.reshape(-1, *[1] * (values.ndim - 1)), jnp.asarray(1e30, values.dtype), values)

    def poisoned(part, count, **fields):
        words = to_words(past(to_floats(part.words), count))
        return dataclasses.replace(part, words=words, **fields)

    archive, index, closed = cache.archive, cache.index, cache.archive.closed
    return dataclasses.replace(
        cache,
        tail=poisoned(cache.tail, cache.tail.length),
        tier1=poisoned(cache.tier1, cache.tier1.count),
        archive=poisoned(archive, closed, sigma=past(archive.sigma, closed)),
        index=dataclasses.replace(
            index,
            code=past(index.code, closed),
            branch=to_words(past(to_floats(index.branch), closed)),
            bound=past(index.bound, closed, axis=2),
        ),
    )


def test_slots_that_hold_no_row_are_never_read():
    for z in (0.5, 2.0):
        here = scene(11).calibrated(z)
        clean = vj.attend(here.spec, here.cache, asked(11))
        jax.tree.map(np.testing.assert_array_equal, vj.attend(here.spec, poison(here.cache), asked(11)), clean)


def test_slots_that_hold_no_row_are_never_ranked_or_kept():
    here = scene(11)
    rows = random_rows(np.random.default_rng(11), 3, CAPACITY)
    ends = jnp.asarray([10, 11, 7])  # the first completes its block exactly, the second its block and none more
    clean, dirty = (vj.append(here.spec, cache, rows, ends) for cache in (here.cache, poison(here.cache)))
    np.testing.assert_array_equal(vj.where(here.spec, clean), vj.where(here.spec, dirty))
    answers = (vj.attend(here.spec, cache, asked(11)) for cache in (clean, dirty))
    jax.tree.map(np.testing.assert_array_equal, *answers)


def test_without_statistics_the_output_is_the_same_and_the_fault_remains():
    here = scene(0).calibrated(z=0.5)
    out, stats = vj.attend(here.under(stats=False).spec, here.cache, asked(0))
    np.testing.assert_array_equal(out, vj.attend(here.spec, here.cache, asked(0))[0])
    assert stats.kept is None and stats.attended is None
    np.testing.assert_array_equal(stats.fault, 0)


@pytest.mark.parametrize("dtype, inside_jit", [("float32", True), ("bfloat16", False)])
def test_a_step_attends_with_its_own_row_and_closes_a_full_block_afterwards(dtype, inside_jit):
    here = scene(12, lengths=(63, 37, 15), dtype=dtype).calibrated(z=0.5)
    query, row = asked(12), new_rows(12)
    out, stats, cache = step_inside_jit(here, query, row) if inside_jit else vj.step(*here[:2], query, row)
    assert_served(here, query, out, stats, row)
    np.testing.assert_array_equal(vj.length(cache), [64, 38, 16])
    np.testing.assert_array_equal(cache.archive.closed, [64, 32, 16])
    one_more = np.zeros((3, CAPACITY, C), np.float32)
    one_more[:, 0] = row
    appended = vj.append(here.spec, here.cache, one_more, jnp.ones(3, jnp.int32))
    np.testing.assert_array_equal(vj.where(here.spec, cache), vj.where(here.spec, appended))
    jax.tree.map(np.testing.assert_array_equal, cache.archive.words, appended.archive.words)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), cache.index, appended.index)


def test_the_first_step_of_an_empty_cache_returns_its_own_row():
    here = scene(12, lengths=(0, 0, 0))
    out, stats, cache = step_inside_jit(here, asked(0), new_rows(0))
    np.testing.assert_allclose(out, np.broadcast_to(new_rows(0)[:, None, :R], out.shape), atol=1e-6)
    np.testing.assert_array_equal(stats.attended, 1)
    np.testing.assert_array_equal(vj.length(cache), 1)


def test_an_inactive_sequence_returns_zero_and_is_left_as_it_was():
    here = scene(13, lengths=(63, 37, 15))
    active = np.array([False, True, False])
    out, _, cache = step_inside_jit(here, asked(13), new_rows(13), active)
    everyone, _, _ = step_inside_jit(here, asked(13), new_rows(13))
    np.testing.assert_array_equal(out, np.where(active[:, None, None], everyone, 0))
    np.testing.assert_array_equal(vj.length(cache), [63, 38, 15])
    for b in (0, 2):
        now, before = (vj.take(here.spec, c, b) for c in (cache, here.cache))
        jax.tree.map(np.testing.assert_array_equal, now, before)


def test_steps_attend_what_the_oracle_attends_across_block_closes():
    here = scene(16, lengths=(60, 37, 9)).calibrated(z=0.5)
    rng = np.random.default_rng(16)
    rows, queries = random_rows(rng, 20, 3), 2 * rng.normal(size=(20, 3, H, C)).astype(np.float32)

    def body(cache, given):
        out, stats, after = vj.step(here.spec, cache, *given)
        return after, (out, stats, cache)

    _, (out, stats, caches) = jax.jit(functools.partial(jax.lax.scan, body))(here.cache, (queries, rows))
    for t in range(20):
        before, seen = jax.tree.map(lambda x, t=t: x[t], (caches, stats))
        assert_served(here._replace(cache=before), queries[t], out[t], seen, rows[t])
        here = here.grown(rows[t])
    assert here.lengths == (80, 57, 29)


def test_steps_compile_once_and_may_donate_the_cache():
    here = scene(16, lengths=(60, 37, 9))
    before = jitted_step._cache_size()
    cache = jax.tree.map(jnp.copy, here.cache)
    for t in range(8):
        given = cache
        _, _, cache = jitted_step(here.spec, given, asked(t), new_rows(t), jnp.ones(3, bool))
        assert given.archive.words.is_deleted()
    assert jitted_step._cache_size() <= before + 1
    assert list(vj.length(cache)) == [68, 45, 17]


def test_inside_jit_a_bad_row_or_query_is_dropped_and_flagged():
    here = scene(14, lengths=(63, 37, 15))
    row, query = new_rows(14), asked(14)
    row[0, 3], query[1, 0, 0] = np.nan, np.inf
    out, stats, cache = step_inside_jit(here, query, row)
    np.testing.assert_array_equal(stats.fault, [vj.Fault.NON_FINITE, vj.Fault.NON_FINITE, 0])
    np.testing.assert_array_equal(cache.fault, stats.fault)
    np.testing.assert_array_equal(vj.length(cache), [63, 37, 16])
    assert np.isfinite(out).all()
    for b in (0, 1):
        now, before = (vj.take(here.spec, c, b) for c in (cache, here.cache))
        jax.tree.map(np.testing.assert_array_equal, dataclasses.replace(now, fault=before.fault), before)
    with pytest.raises(RuntimeError, match="sequence 0.*sequence 1"):
        vj.raise_on_fault(stats.fault)


def test_inside_jit_a_full_cache_drops_the_row_and_flags_it():
    here = scene(15, lengths=(CAPACITY, CAPACITY - 1, 15))
    _, stats, cache = step_inside_jit(here, asked(15), new_rows(15))
    np.testing.assert_array_equal(stats.fault, [vj.Fault.CAPACITY, 0, 0])
    np.testing.assert_array_equal(vj.length(cache), [CAPACITY, CAPACITY, 16])
    now, before = (vj.take(here.spec, c, 0) for c in (cache, here.cache))
    jax.tree.map(np.testing.assert_array_equal, dataclasses.replace(now, fault=before.fault), before)


def test_a_fault_stays_until_the_sequence_is_reset():
    here = scene(14, lengths=(63, 37, 15))
    bad = new_rows(14)
    bad[0] = np.nan
    cache = step_inside_jit(here, asked(14), bad)[2]
    _, stats, cache = jitted_step(here.spec, cache, asked(14), new_rows(14), jnp.ones(3, bool))
    np.testing.assert_array_equal(stats.fault, [vj.Fault.NON_FINITE, 0, 0])
    np.testing.assert_array_equal(vj.reset(here.spec, cache, 0).fault, 0)


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda q, r: (q[:, :2], r), r"query has shape \(3, 2, 16\)"),
        (lambda q, r: (q, r[:, :15]), r"row has shape \(3, 15\)"),
        (lambda q, r: (q * np.nan, r), "query holds NaN"),
        (lambda q, r: (q, r * np.inf), "row holds NaN"),
        (lambda q, r: (q.astype(int), r), "query has dtype int"),
        (lambda q, r: (q, r, jnp.ones(2, bool)), r"active has shape \(2,\)"),
    ],
)
def test_outside_jit_bad_arguments_of_a_step_raise(spoil, words):
    here = scene(14, lengths=(63, 37, 15))
    with pytest.raises(ValueError, match=words):
        vj.step(here.spec, here.cache, *spoil(asked(14), new_rows(14)))


def test_outside_jit_a_step_into_a_full_cache_raises():
    here = scene(15, lengths=(CAPACITY, CAPACITY - 1, 15))
    with pytest.raises(ValueError, match=f"capacity={CAPACITY}"):
        vj.step(here.spec, here.cache, asked(15), new_rows(15))
