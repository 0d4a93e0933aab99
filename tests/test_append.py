"""Rows arrive: however a prompt is cut, the cache holds the same bits (VestigeKV §4)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vestige_jax as vj
from tests.caches import (
    BATCH,
    RAGGED,
    SPEC,
    TIME,
    append,
    assert_partition,
    assert_same,
    bits,
    filled,
    random_queries,
    random_rows,
    sequences,
    settled,
)


def test_every_length_around_the_block_size_fits_every_tail():
    """Lengths 0 to 2 * block + 1 at once, then again in the reverse order."""
    most = 2 * SPEC.block + 1
    lengths = np.arange(most + 1)
    first, second = random_rows(0, most + 1, most), random_rows(1, most + 1, most)
    cache = vj.append(SPEC, vj.init(SPEC, most + 1), first, lengths)
    expected = sequences(SPEC, first, lengths)
    assert_partition(SPEC, cache, expected)

    cache = vj.append(SPEC, cache, second, lengths[::-1])
    for sequence, rows, length in zip(expected, second, lengths[::-1], strict=True):
        for row in rows[:length]:
            sequence.write(row)
    assert_partition(SPEC, cache, expected)


@given(cuts=st.lists(st.integers(0, TIME), max_size=4).map(sorted))
def test_a_chunked_prompt_equals_one_append(cuts):
    """Bit for bit: kept set, archive and index."""
    rows = random_rows(2, BATCH, TIME)
    cache = vj.init(SPEC, BATCH)
    for start, stop in zip([0, *cuts], [*cuts, TIME], strict=True):
        cache = append(SPEC, cache, rows[:, start:stop], np.clip(RAGGED - start, 0, stop - start))
    assert_same(settled(cache), settled(filled(SPEC, rows, RAGGED)))


def test_rows_that_arrive_one_by_one_in_steps_equal_one_append():
    rows = random_rows(2, BATCH, TIME)
    cache = vj.init(SPEC, BATCH)
    for t in range(TIME):
        _, _, cache = vj.step(SPEC, cache, random_queries(t, BATCH), rows[:, t], t < RAGGED)
    assert_same(settled(cache), settled(filled(SPEC, rows, RAGGED)))


@pytest.mark.parametrize("padding", [1e6, np.nan, np.inf])
def test_padding_is_never_kept_or_archived(padding):
    """Padding so loud that it would win every ranking, or not finite, changes nothing."""
    rows = random_rows(3, BATCH, TIME)
    loud = rows.copy()
    for b, length in enumerate(RAGGED):
        loud[b, length:] = padding * (-1.0) ** np.arange(TIME - length)[:, None]
    cache = filled(SPEC, loud, RAGGED)
    assert_same(settled(cache), settled(filled(SPEC, rows, RAGGED)))


def test_what_an_earlier_block_left_in_the_tail_is_never_attended():
    cache = filled(SPEC, random_rows(4, BATCH, 9))
    assert np.abs(cache.tail.rows[:, 1:]).max() > 0  # else this test shows nothing
    clean = jax.tree.map(lambda x: x.at[:, 1:].set(0) if x.ndim > 1 else x, cache.tail)
    query = random_queries(0, BATCH)
    out, _ = vj.attend(SPEC, cache, query)
    np.testing.assert_array_equal(out, vj.attend(SPEC, dataclasses.replace(cache, tail=clean), query)[0])


def test_an_append_of_nothing_changes_nothing():
    cache = filled(SPEC, random_rows(5, BATCH, TIME), RAGGED)
    again = append(SPEC, cache, random_rows(6, BATCH, TIME), np.zeros(BATCH, np.int32))
    assert_same(again, cache)


def test_an_append_of_no_rows_needs_no_lengths():
    cache = filled(SPEC, random_rows(5, BATCH, TIME))
    assert_same(vj.append(SPEC, cache, np.zeros((BATCH, 0, SPEC.row_dim), np.float32)), cache)


def test_the_old_cache_is_not_changed():
    cache = filled(SPEC, random_rows(7, BATCH, TIME), RAGGED)
    before = jax.tree.map(np.array, cache)
    append(SPEC, cache, random_rows(8, BATCH, TIME), np.array([3, 9, 20]))
    assert_same(cache, before)


def extreme_rows(dtype):
    """Signed zeros, the smallest subnormal and normal numbers, and the largest latents, in the rows' dtype."""
    info = jnp.finfo(dtype)
    values = [0.0, -0.0, info.smallest_subnormal, -info.smallest_subnormal, info.tiny, -info.tiny, 1.0, -1e-3]
    rows = np.random.default_rng(9).choice(np.array(values, dtype), size=(BATCH, TIME, SPEC.row_dim))
    rows[..., 0] = np.random.default_rng(10).choice(np.array([info.max, -info.max], dtype), size=(BATCH, TIME))
    return rows


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_finite_number_is_held_bit_for_bit(dtype):
    spec = dataclasses.replace(SPEC, dtype=dtype)
    rows = extreme_rows(dtype)
    cache = jax.tree.map(np.asarray, filled(spec, rows))
    assert cache.archive.closed.tolist() == [24] * BATCH
    np.testing.assert_array_equal(bits(cache.archive.rows[:, :24]), bits(rows[:, :24]))
    np.testing.assert_array_equal(bits(cache.tail.rows[:, :3]), bits(rows[:, 24:]))
    for b in range(BATCH):
        count = cache.tier1.count[b]
        positions = cache.tier1.position[b, :count]
        np.testing.assert_array_equal(bits(cache.tier1.rows[b, :count]), bits(rows[b, positions]))


def test_rows_of_another_float_dtype_are_rounded_once():
    spec = dataclasses.replace(SPEC, dtype=jnp.bfloat16)
    rows = random_rows(11, BATCH, 8, spec=SPEC)
    cache = filled(spec, rows)
    np.testing.assert_array_equal(bits(np.asarray(cache.archive.rows)[:, :8]), bits(rows.astype(jnp.bfloat16)))


def test_length_counts_the_closed_rows_and_the_tail():
    cache = filled(SPEC, random_rows(12, BATCH, TIME), RAGGED)
    assert vj.length(cache).tolist() == RAGGED.tolist()
    assert vj.length(cache).dtype == jnp.int32
