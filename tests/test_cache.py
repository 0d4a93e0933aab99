"""Sequences enter, leave, clear and copy themselves: what continuous batching needs."""

import dataclasses
import functools

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
    append,
    assert_partition,
    assert_same,
    filled,
    random_rows,
    sequences,
)


@functools.cache
def calibrated():
    """A ragged cache whose sequences differ in everything: rows, tiers, basis, z, gate and fault."""
    rows = random_rows(0, BATCH, TIME)
    cache = filled(SPEC, rows, RAGGED)
    queries = 3 * random_rows(1, BATCH, 40, SPEC.num_heads)
    cache = vj.calibrate(SPEC, cache, queries, np.tile(RAGGED[:, None] - 1, (1, 40)))
    return dataclasses.replace(cache, fault=jnp.array([0, 4, 2], jnp.int32))


def test_init_is_empty():
    cache = vj.init(SPEC, 2)
    assert vj.length(cache).tolist() == [0, 0]
    assert cache.tier1.count.tolist() == [0, 0]
    assert (cache.tier1.position == -1).all()
    assert not cache.fault.any()


def test_init_has_the_provisional_index():
    """V is the first K unit vectors, the gate is open, z is z_max and flagged (§3)."""
    cache = vj.init(SPEC, 2)
    np.testing.assert_array_equal(cache.index.basis, np.tile(np.eye(SPEC.latent_dim, SPEC.rank), (2, 1, 1)))
    assert cache.calibration.z.tolist() == [8, 8]
    assert np.isneginf(cache.calibration.threshold).all()
    assert cache.calibration.clamped.all() and not cache.calibration.installed.any()


def test_the_leaves_have_the_row_dtype_or_say_so():
    cache = vj.init(dataclasses.replace(SPEC, dtype=jnp.bfloat16, sketch_dtype=jnp.float16), 1)
    assert {part.rows.dtype for part in (cache.tail, cache.tier1, cache.archive)} == {jnp.dtype(jnp.bfloat16)}
    assert cache.index.code.dtype == jnp.float16
    assert cache.archive.sigma.dtype == cache.index.bound.dtype == cache.index.basis.dtype == jnp.float32


@pytest.mark.parametrize("slot", range(BATCH))
def test_put_back_what_was_taken_changes_nothing(slot):
    cache = calibrated()
    assert_same(vj.put(SPEC, cache, slot, vj.take(SPEC, cache, slot)), cache)


def test_take_is_that_sequence_alone():
    single = vj.take(SPEC, calibrated(), 2)
    assert_same(single, jax.tree.map(lambda x: x[2:3], calibrated()))
    assert vj.length(single).tolist() == [16]


def test_put_replaces_that_sequence_alone():
    other = filled(SPEC, random_rows(5, BATCH, 21))
    cache = vj.put(SPEC, calibrated(), 1, vj.take(SPEC, other, 0))
    assert_same(vj.take(SPEC, cache, 1), vj.take(SPEC, other, 0))
    for b in (0, 2):
        assert_same(vj.take(SPEC, cache, b), vj.take(SPEC, calibrated(), b))


def test_reset_empties_a_sequence_with_its_calibration_and_fault():
    cache = vj.reset(SPEC, calibrated(), 2)
    assert_same(vj.take(SPEC, cache, 2), vj.init(SPEC, 1))
    for b in (0, 1):
        assert_same(vj.take(SPEC, cache, b), vj.take(SPEC, calibrated(), b))


def test_a_reset_slot_serves_a_new_sequence_like_a_new_cache():
    rows = random_rows(6, BATCH, 20)
    lengths = np.array([0, 0, 20])
    cache = vj.put(SPEC, vj.init(SPEC, BATCH), 2, vj.take(SPEC, calibrated(), 2))
    cache = append(SPEC, vj.reset(SPEC, cache, 2), rows, lengths)
    assert_partition(SPEC, cache, sequences(SPEC, rows, lengths))


def test_fork_copies_sequences_in_the_order_given():
    cache = vj.fork(SPEC, calibrated(), [2, 0, 2])
    for i, source in enumerate([2, 0, 2]):
        assert_same(vj.take(SPEC, cache, i), vj.take(SPEC, calibrated(), source))


def test_forks_grow_apart():
    """Two continuations of one prompt, and the prompt itself, which must stay as it is."""
    prompts, more = random_rows(7, BATCH, 13), random_rows(8, BATCH, TIME)
    cache = vj.fork(SPEC, filled(SPEC, prompts), [1, 1, 1])
    lengths = np.array([0, 5, TIME])
    grown = append(SPEC, cache, more, lengths)
    streams = [np.concatenate([prompts[1], more[b, : lengths[b]]]) for b in range(BATCH)]
    assert_partition(SPEC, grown, [sequences(SPEC, stream[None])[0] for stream in streams])
    assert_partition(SPEC, cache, sequences(SPEC, prompts[1:2]) * BATCH)


def test_slots_may_be_traced():
    """Continuous batching picks its slot inside a compiled program."""
    cache = calibrated()

    @jax.jit
    def swap(cache, i, j):
        first, second = vj.take(SPEC, cache, i), vj.take(SPEC, cache, j)
        return vj.put(SPEC, vj.put(SPEC, cache, i, second), j, first)

    assert_same(swap(cache, 0, 2), vj.fork(SPEC, cache, [2, 1, 0]))
    assert_same(jax.jit(lambda c, i: vj.reset(SPEC, c, i))(cache, 1), vj.reset(SPEC, cache, 1))


@pytest.mark.parametrize("slot", [-1, BATCH])
def test_a_slot_out_of_range_is_named(slot):
    cache = calibrated()
    message = rf"slot.*{slot}.*0 to {BATCH - 1}"
    for use in (
        lambda: vj.take(SPEC, cache, slot),
        lambda: vj.put(SPEC, cache, slot, vj.take(SPEC, cache, 0)),
        lambda: vj.reset(SPEC, cache, slot),
        lambda: vj.fork(SPEC, cache, [0, slot]),
    ):
        with pytest.raises(ValueError, match=message):
            use()


def test_a_slot_that_is_no_integer_is_named():
    with pytest.raises(ValueError, match="slot.*float"):
        vj.take(SPEC, calibrated(), 0.5)


@pytest.mark.parametrize(
    "other",
    [dict(capacity=16), dict(rank=2), dict(dtype=jnp.bfloat16), dict(bound="sound"), dict(calibration="decode")],
    ids=str,
)
def test_put_refuses_a_sequence_of_another_spec(other):
    with pytest.raises(ValueError, match="single has an array"):
        vj.put(SPEC, calibrated(), 0, vj.init(dataclasses.replace(SPEC, **other), 1))


def test_put_refuses_more_than_one_sequence():
    with pytest.raises(ValueError, match="single has an array"):
        vj.put(SPEC, calibrated(), 0, vj.init(SPEC, 2))
