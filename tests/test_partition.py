"""The partition: every written row is in exactly one of kept, tail and archive, whatever came before (VestigeKV §2)."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vestige_jax as vj
from tests import oracle
from tests.caches import (
    BATCH,
    SHAPE,
    SPEC,
    TIME,
    append,
    assert_partition,
    assert_same,
    filled,
    kept_positions,
    random_queries,
    random_rows,
    sequences,
)

BFLOAT16 = dataclasses.replace(SPEC, dtype=jnp.bfloat16)
appends = st.tuples(*[st.integers(0, TIME)] * BATCH).map(lambda lengths: ("append", lengths))
steps = st.tuples(*[st.booleans()] * BATCH).map(lambda active: ("step", active))
closes = st.just(("close", None))


@pytest.mark.parametrize("spec", [SPEC, BFLOAT16], ids=["float32", "bfloat16"])
@settings(max_examples=15)
@given(actions=st.lists(st.one_of(appends, steps, closes), max_size=8), seed=st.integers(0, 99))
def test_it_holds_after_any_sequence_of_appends_steps_and_closes(spec, actions, seed):
    cache = vj.init(spec, BATCH)
    expected = [oracle.Sequence(spec) for _ in range(BATCH)]
    for i, (action, amounts) in enumerate(actions):
        rows = random_rows([seed, i], BATCH, TIME, spec=spec)
        if action == "close":
            cache, written = vj.close(spec, cache), [0] * BATCH
        else:
            written = [min(int(n), spec.capacity - len(s.rows)) for n, s in zip(amounts, expected, strict=True)]
        if action == "append":
            cache = vj.append(spec, cache, rows, written)
        if action == "step":
            query = random_queries([seed, i, 1], BATCH, spec=spec)
            _, _, cache = vj.step(spec, cache, query, rows[:, 0], np.array(written, bool))
        for sequence, one, n in zip(expected, rows, written, strict=True):
            for row in one[:n]:
                sequence.write(row)
        assert_partition(spec, cache, expected)


def blocks(*loudness):
    """Rows of BATCH equal sequences, a block for each given loudness: its branch alternates at that size, growing."""
    rows = random_rows(0, sum(len(loud) for loud in loudness))
    size = np.concatenate([np.asarray(loud, np.float32) for loud in loudness])
    sign = np.where(np.arange(len(size)) % 2, -1, 1)
    rows[:, SPEC.latent_dim :] = (sign * size)[:, None]
    return np.tile(rows, (BATCH, 1, 1))


RISING = np.arange(1, 9)


def test_a_louder_block_moves_kept_rows_to_the_archive():
    """m is 2, then 4: both places of block 0 are lost to block 1, whose rows are all louder."""
    rows = blocks(RISING, 100 + RISING)
    cache = filled(SPEC, rows[:, :8])
    assert kept_positions(cache, 0) == [0, 1, 6, 7]
    cache = append(SPEC, cache, rows[:, 8:])
    assert kept_positions(cache, 0) == [0, 1, 12, 13, 14, 15]
    assert vj.where(SPEC, cache)[0, 6] == oracle.ARCHIVED


def test_a_silent_block_moves_archived_rows_to_the_kept():
    """m is 2, then 4, and the two new places go to rows of block 0 that were archived."""
    rows = blocks(RISING, 0 * RISING)
    cache = filled(SPEC, rows[:, :8])
    assert vj.where(SPEC, cache)[0, 4] == oracle.ARCHIVED
    cache = append(SPEC, cache, rows[:, 8:])
    assert kept_positions(cache, 0) == [0, 1, 4, 5, 6, 7]


def test_rows_are_ranked_only_when_a_block_closes():
    rows = blocks(RISING, 100 + RISING)
    cache = filled(SPEC, rows[:, :8])
    ranked = cache.archive.kept
    for position in range(8, 15):
        cache = append(SPEC, cache, rows[:, position : position + 1])
        np.testing.assert_array_equal(cache.archive.kept, ranked)
    cache = append(SPEC, cache, rows[:, 15:16])
    assert kept_positions(cache, 0) == [0, 1, 12, 13, 14, 15]


def test_the_close_of_one_sequence_leaves_the_keep_set_of_the_others():
    rows = random_rows(1, BATCH, 16)
    cache = filled(SPEC, rows[:, :8])
    installed = np.zeros((BATCH, SPEC.archive_rows), bool)
    installed[:, [3, 4, 5]] = True
    cache = vj.keep_set(SPEC, cache, jnp.asarray(installed))
    cache = append(SPEC, cache, rows[:, 8:], np.array([7, 8, 0]))
    assert [kept_positions(cache, b) for b in (0, 2)] == [[3, 4, 5]] * 2
    assert kept_positions(cache, 1) == sequences(SPEC, rows)[1].kept


def test_ties_go_to_the_lower_position():
    rows = random_rows(2, BATCH, 24)
    rows[..., SPEC.latent_dim :] = 0  # sigma is 0 everywhere
    assert kept_positions(filled(SPEC, rows), 0) == [0, 1, 2, 3, 4, 5, 6, 7]  # 2 sinks, m = 6


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        (dict(ratio=1.0, sinks=2), 24),
        (dict(sinks=0), 1),  # the default ratio, 1/32: floor(0.75 + 0.5)
        (dict(budget=5, sinks=1), 6),
        (dict(budget=100, sinks=30), 24),
    ],
    ids=str,
)
def test_m_rows_and_the_sinks_are_kept(changes, count):
    spec = vj.CacheSpec(**SHAPE, block=8, rank=3, dtype=jnp.float32, **changes)
    rows = random_rows(3, 1, 27)
    cache = filled(spec, rows)
    assert_partition(spec, cache, sequences(spec, rows))
    assert cache.tier1.count.tolist() == [count]
    assert kept_positions(cache, 0)[: min(spec.sinks, 24)] == list(range(min(spec.sinks, 24)))


def test_the_branch_alone_decides():
    rows = random_rows(4, BATCH, 24)
    other = rows.copy()
    other[..., : SPEC.latent_dim] = 100 * random_rows(5, BATCH, 24)[..., : SPEC.latent_dim]
    np.testing.assert_array_equal(filled(SPEC, rows).archive.kept, filled(SPEC, other).archive.kept)


@pytest.mark.parametrize("capacity", [3, 8, 17])
def test_a_capacity_of_any_size_can_be_filled(capacity):
    spec = dataclasses.replace(SPEC, capacity=capacity)
    rows = random_rows(6, 1, capacity)
    cache = vj.append(spec, vj.init(spec, 1), rows)
    assert_partition(spec, cache, sequences(spec, rows))
    assert (vj.where(spec, cache) != oracle.EMPTY).all()


def test_where_an_empty_cache_holds_nothing():
    tiers = vj.where(SPEC, vj.init(SPEC, BATCH))
    assert tiers.shape == (BATCH, SPEC.capacity) and tiers.dtype == jnp.int8
    assert (tiers == oracle.EMPTY).all()


# close


def test_close_is_idempotent():
    cache = filled(SPEC, random_rows(7, BATCH, TIME), np.array([0, 8, TIME]))
    assert_same(vj.close(SPEC, cache), cache)


def test_close_moves_a_full_tail_to_the_archive():
    """`append` and `step` leave none, but `close` does not count on it."""
    rows = random_rows(8, BATCH, 8)
    tail = filled(SPEC, rows).tail  # closed: its buffer still holds the block
    tail = dataclasses.replace(tail, length=jnp.full(BATCH, 8))
    full = dataclasses.replace(vj.init(SPEC, BATCH), tail=tail)
    assert_partition(SPEC, vj.close(SPEC, full), sequences(SPEC, rows))


# keep_set


def test_a_keep_set_is_installed_as_it_is():
    rows = random_rows(9, BATCH, 21)
    kept = np.zeros((BATCH, SPEC.archive_rows), bool)
    kept[0, [2, 9, 15]] = kept[1, :12] = True
    expected = sequences(SPEC, rows)
    for b, sequence in enumerate(expected):
        sequence.kept = np.flatnonzero(kept[b]).tolist()
    assert_partition(SPEC, vj.keep_set(SPEC, filled(SPEC, rows), jnp.asarray(kept)), expected)


def test_a_keep_set_ignores_rows_that_are_not_closed():
    cache = filled(SPEC, random_rows(10, BATCH, 19), np.array([7, 8, 19]))
    kept = np.zeros((BATCH, SPEC.archive_rows), bool)
    kept[:, [3, 12, 30]] = True
    cache = vj.keep_set(SPEC, cache, jnp.asarray(kept))
    assert [kept_positions(cache, b) for b in range(BATCH)] == [[], [3], [3, 12]]


def test_a_keep_set_beyond_tier_1_keeps_its_first_rows():
    rows = random_rows(11, BATCH, 24)
    cache = vj.keep_set(SPEC, filled(SPEC, rows), jnp.ones((BATCH, SPEC.archive_rows), bool))
    assert kept_positions(cache, 0) == list(range(SPEC.tier1_rows)) and SPEC.tier1_rows == 12
