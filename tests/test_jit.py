"""Compiled use: one program for all steps, updates in place, the same bits on every run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vestige_jax as vj
from tests.caches import (
    BATCH,
    RAGGED,
    SPEC,
    TIME,
    append_jit,
    assert_partition,
    assert_same,
    filled,
    random_queries,
    random_rows,
    sequences,
    settled,
    step_jit,
)

# A cache large enough that a copy of it can't hide among the work arrays of a step.
LARGE = vj.CacheSpec(32, 16, 4, 0.2, 65536, block=256, rank=8, fetch=64, dtype=jnp.float32)
ALL = np.ones(BATCH, bool)


def test_no_step_compiles_anew():
    """Not at another length, not when a block closes, not with other sequences active."""
    cache = filled(SPEC, random_rows(0, BATCH, TIME), np.array([0, 7, 20]))
    for t in range(20):
        row, query = random_rows([1, t], BATCH), random_queries([2, t], BATCH)
        _, _, cache = step_jit(cache, query, row, np.array([True, t % 2 == 0, t < 3]))
    assert vj.length(cache).tolist() == [20, 17, 23]
    assert step_jit._cache_size() == 1


def test_no_public_step_compiles_anew():
    _, _, cache = vj.step(SPEC, vj.init(SPEC, BATCH), random_queries(0, BATCH), random_rows(0, BATCH))
    programs = vj.decode._step._cache_size()
    for t in range(18):
        _, _, cache = vj.step(SPEC, cache, random_queries(t, BATCH), random_rows(t, BATCH))
    assert vj.decode._step._cache_size() == programs


def test_lengths_within_a_bucket_compile_once():
    cache = vj.init(SPEC, BATCH)
    for lengths in ([0, 0, 0], [TIME, 1, 8], [9, 16, 0], [0, TIME, 20]):
        cache = append_jit(cache, random_rows(3, BATCH, TIME), np.array(lengths))
    assert vj.length(cache).tolist() == [36, 44, 28]
    assert append_jit._cache_size() == 1


def test_a_scan_of_steps_equals_the_steps_one_by_one():
    rows, queries = random_rows(4, 12, BATCH), random_queries(5, 12, BATCH)
    active = np.random.default_rng(6).random((12, BATCH)) < 0.7
    start = filled(SPEC, random_rows(7, BATCH, TIME), np.array([3, 12, 20]))

    def body(cache, inputs):
        out, stats, cache = vj.step(SPEC, cache, *inputs)
        return cache, (out, stats)

    last, (outs, stats) = jax.jit(lambda cache, inputs: jax.lax.scan(body, cache, inputs))(
        start, (queries, rows, active)
    )
    cache = start
    for t in range(12):
        out, one, cache = step_jit(cache, queries[t], rows[t], active[t])
        np.testing.assert_allclose(outs[t], out, rtol=1e-5, atol=1e-6)
        assert_same((stats.kept[t], stats.fired[t], stats.fetched[t]), (one.kept, one.fired, one.fetched))
    assert_same(settled(last), settled(cache))


def test_two_runs_give_the_same_bits():
    def run():
        cache = filled(SPEC, random_rows(8, BATCH, TIME), RAGGED)
        cache = vj.calibrate(SPEC, cache, random_queries(9, BATCH, 40), np.tile(RAGGED[:, None] - 1, (1, 40)))
        outs = []
        for t in range(6):
            out, stats, cache = step_jit(cache, random_queries([10, t], BATCH), random_rows([11, t], BATCH), ALL)
            outs.append((out, stats))
        return cache, outs

    assert_same(run(), run())


def test_close_works_inside_jit():
    cache = filled(SPEC, random_rows(12, BATCH, TIME), RAGGED)
    assert_same(jax.jit(lambda cache: vj.close(SPEC, cache))(cache), cache)


def test_vmap_of_a_step_equals_the_batch():
    """Correct, if slow: the leading axis is the way to batch."""
    cache = filled(SPEC, random_rows(13, BATCH, TIME), np.array([7, 15, 20]))  # the first two close a block
    query, row = random_queries(14, BATCH), random_rows(15, BATCH)

    @jax.jit
    @jax.vmap
    def one(cache, query, row):
        single = jax.tree.map(lambda x: x[None], (cache, query, row))
        return jax.tree.map(lambda x: x[0], vj.step(SPEC, *single))

    out, stats, stepped = one(cache, query, row)
    want_out, want_stats, want = step_jit(cache, query, row, ALL)
    np.testing.assert_allclose(out, want_out, rtol=1e-5, atol=1e-6)
    assert_same((stats.kept, stats.fired, stats.fetched), (want_stats.kept, want_stats.fired, want_stats.fetched))
    assert_same(settled(stepped)[:4], settled(want)[:4])
    assert stepped.archive.closed.tolist() == [8, 16, 16]


# in place


def large(batch=2):
    return jax.eval_shape(lambda: vj.init(LARGE, batch))


def arrays(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def temporary(function, *arguments):
    """Bytes that the program holds besides its arguments and results, with the cache donated."""
    memory = jax.jit(function, donate_argnums=0).lower(*arguments).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 0.9 * LARGE.nbytes(2)["total"]  # the cache given is the cache returned
    return memory.temp_size_in_bytes


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda c, q, r: vj.step(LARGE, c, q, r), [(2, 4, 48), (2, 48)]),
        (lambda c, r: vj.append(LARGE, c, r), [(2, 512, 48)]),
    ],
    ids=["step", "append"],
)
def test_a_donated_cache_is_updated_in_place(function, shapes):
    archive = LARGE.nbytes(2)["archive"]
    assert temporary(function, large(), *(arrays(*s) for s in shapes)) < archive / 4


def test_a_step_computes_nothing_of_a_close_before_a_block_is_full():
    """Not its sigma either, whose only trace in the program are Fourier transforms: they stay in the loop of `when`."""
    step = jax.jit(lambda c, q, r: vj.step(LARGE, c, q, r), donate_argnums=0)
    program = step.lower(large(), arrays(2, 4, 48), arrays(2, 48)).compile().as_text()
    always = program[program.index("\nENTRY") :]
    assert " fft(" in program and " fft(" not in always


def test_a_donated_step_gives_the_same_bits():
    cache = filled(SPEC, random_rows(16, BATCH, TIME), np.array([7, 15, 20]))
    inputs = random_queries(17, BATCH), random_rows(18, BATCH), ALL
    want = step_jit(cache, *inputs)
    donated = jax.tree.map(jnp.copy, cache)
    got = jax.jit(step_jit, donate_argnums=0)(donated, *inputs)
    assert_same(got, want)
    assert donated.archive.words.is_deleted()


def test_a_donated_append_gives_the_same_bits():
    rows, more = random_rows(19, BATCH, 13), random_rows(20, BATCH, TIME)
    run = jax.jit(lambda cache, rows: vj.append(SPEC, cache, rows), donate_argnums=0)
    cache = run(jax.tree.map(jnp.copy, filled(SPEC, rows)), more)
    assert_partition(SPEC, cache, sequences(SPEC, np.concatenate([rows, more], axis=1)))
