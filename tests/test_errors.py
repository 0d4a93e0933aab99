"""Bad input: one clear error each, before compilation; inside jit a dropped write and a sticky fault."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vestige_jax as vj
from tests.caches import (
    BATCH,
    SPEC,
    TIME,
    append,
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

ROWS = random_rows(0, BATCH, TIME)
QUERY = random_queries(0, BATCH)
WIDE = np.zeros((BATCH, TIME, SPEC.row_dim + 1), np.float32)


def empty():
    return vj.init(SPEC, BATCH)


def full():
    """Every sequence holds all but 2 of its 44 rows."""
    return append(SPEC, filled(SPEC, ROWS), ROWS[:, :15])


def spoilt(array, *index, value=np.nan):
    array = array.copy()
    array[index] = value
    return array


@pytest.mark.parametrize(
    ("rows", "lengths", "message"),
    [
        (WIDE, None, r"rows has shape \(3, 27, 11\); expected .*10\)"),
        (ROWS[:2], None, r"rows has shape \(2, 27, 10\); expected .*\(3,"),
        (ROWS[:, 0], None, r"rows has shape \(3, 10\); expected \[B, T, C\]"),
        (ROWS.astype(int), None, r"rows has dtype int.*expected a float"),
        (ROWS, [1, -2, 3], r"lengths holds \[-2\].*\[0, 27\]"),
        (ROWS, [1, 2, 28], r"lengths holds \[28\].*\[0, 27\]"),
        (ROWS, [1, 2], r"lengths has shape \(2,\); expected \[B\] = \(3,\)"),
        (ROWS, 5, r"lengths has shape \(\); expected \[B\] = \(3,\)"),
        (ROWS, [1.0, 2.0, 3.0], r"lengths has dtype float.*expected integers"),
        (spoilt(ROWS, 1, 3, 2), None, "rows holds NaN or infinite"),
        (spoilt(ROWS, 1, 3, 2, value=-np.inf), None, "rows holds NaN or infinite"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_bad_append_is_named(rows, lengths, message):
    with pytest.raises(ValueError, match=message):
        vj.append(SPEC, empty(), rows, lengths)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(row=WIDE[:, 0]), r"row has shape \(3, 11\); expected \[B, C\] = \(3, 10\)"),
        (dict(row=ROWS[:, 0].astype(int)), r"row has dtype int.*expected a float"),
        (dict(row=spoilt(ROWS[:, 0], 0, 0)), "row holds NaN or infinite"),
        (dict(query=QUERY[..., 1:]), r"query has shape \(3, 2, 9\); expected \[B, H, C\] = \(3, 2, 10\)"),
        (dict(query=QUERY[:, :1]), r"query has shape \(3, 1, 10\); expected \[B, H, C\] = \(3, 2, 10\)"),
        (dict(query=QUERY.astype(int)), r"query has dtype int.*expected a float"),
        (dict(query=spoilt(QUERY, 2, 1, 0, value=np.inf)), "query holds NaN or infinite"),
        (dict(active=np.ones(2, bool)), r"active has shape \(2,\); expected \[B\] = \(3,\)"),
        (dict(active=np.ones(BATCH)), r"active has dtype float.*expected bool"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_bad_step_is_named(change, message):
    arguments = dict(query=QUERY, row=ROWS[:, 0], active=None) | change
    with pytest.raises(ValueError, match=message):
        vj.step(SPEC, empty(), *arguments.values())


def test_a_bad_attend_is_named():
    with pytest.raises(ValueError, match=r"query has shape \(3, 10\); expected \[B, H, C\]"):
        vj.attend(SPEC, empty(), QUERY[:, 0])
    with pytest.raises(ValueError, match="query holds NaN or infinite"):
        vj.attend(SPEC, empty(), spoilt(QUERY, 0, 0, 0))


@pytest.mark.parametrize(
    ("queries", "positions", "message"),
    [
        (QUERY, np.zeros((BATCH, 2), int), r"queries has shape \(3, 2, 10\); expected \[B, N, H, C\]"),
        (QUERY[:, None], np.zeros((BATCH, 2), int), r"positions has shape \(3, 2\); expected \[B, N\] = \(3, 1\)"),
        (QUERY[:, None], np.zeros((BATCH, 1)), r"positions has dtype float.*expected integers"),
        (spoilt(QUERY[:, None], 0), np.zeros((BATCH, 1), int), "queries holds NaN or infinite"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_bad_calibration_is_named(queries, positions, message):
    with pytest.raises(ValueError, match=message):
        vj.calibrate(SPEC, empty(), queries, positions)


def test_a_bad_keep_set_is_named():
    with pytest.raises(ValueError, match=r"kept has shape \(3, 44\); expected \[B, A\] = \(3, 40\)"):
        vj.keep_set(SPEC, empty(), jnp.zeros((BATCH, SPEC.capacity), bool))
    with pytest.raises(ValueError, match=r"kept has dtype int.*expected bool"):
        vj.keep_set(SPEC, empty(), jnp.zeros((BATCH, SPEC.archive_rows), int))


def test_beyond_the_capacity_nothing_is_overwritten():
    """The error names the capacity, and which sequences asked for how much."""
    cache = full()
    before = jax.tree.map(np.array, cache)
    with pytest.raises(ValueError, match=re.escape("capacity=44 exceeded: (sequence, tokens) [(1, 45)]")):
        vj.append(SPEC, cache, ROWS, np.array([2, 3, 0]))
    assert_same(cache, before)


def test_a_step_beyond_the_capacity_is_refused():
    cache = full()
    for _ in range(2):
        _, _, cache = vj.step(SPEC, cache, QUERY, ROWS[:, 0])
    with pytest.raises(ValueError, match="capacity=44 exceeded"):
        vj.step(SPEC, cache, QUERY, ROWS[:, 0])
    _, _, idle = vj.step(SPEC, cache, QUERY, ROWS[:, 0], np.zeros(BATCH, bool))
    assert_same(idle, cache)


def test_the_capacity_can_be_filled_to_the_last_row():
    cache = vj.append(SPEC, full(), ROWS, np.array([2, 2, 2]))
    assert vj.length(cache).tolist() == [SPEC.capacity] * BATCH


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_an_inactive_sequence_brings_is_not_looked_at(value):
    """An empty slot of a batch may hold anything."""
    cache = filled(SPEC, ROWS)
    active = np.array([True, False, True])
    bad = spoilt(QUERY, 1, value=value), spoilt(ROWS[:, 0], 1, value=value)
    out, stats, stepped = vj.step(SPEC, cache, *bad, active)
    good_out, _, good = vj.step(SPEC, cache, QUERY, ROWS[:, 0], active)
    assert_same((out, stepped), (good_out, good))
    assert not out[1].any() and not stats.fault.any()


def test_rows_too_large_for_the_row_dtype_are_not_finite():
    """3.4e38 is finite in float32 and rounds to infinity in bfloat16."""
    spec = vj.CacheSpec(6, 4, 2, 0.3, 44, block=8, rank=3, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="rows holds NaN or infinite"):
        vj.append(spec, vj.init(spec, BATCH), spoilt(ROWS, 0, 0, 0, value=3.4e38))
    with pytest.raises(ValueError, match="row holds NaN or infinite"):
        vj.step(spec, vj.init(spec, BATCH), QUERY, spoilt(ROWS[:, 0], 0, 0, value=3.4e38))


# inside jit

LENGTHS = np.array([20, 20, 20])


def flags(cache):
    return [vj.Fault(int(bits)) for bits in cache.fault]


@pytest.mark.parametrize(
    ("rows", "lengths", "fault"),
    [
        (ROWS, spoilt(LENGTHS, 1, value=28), vj.Fault.LENGTH),
        (ROWS, spoilt(LENGTHS, 1, value=-1), vj.Fault.LENGTH),
        (ROWS, spoilt(LENGTHS, 1, value=2**31 - 1), vj.Fault.LENGTH),
        (spoilt(ROWS, 1, 19, 9), LENGTHS, vj.Fault.NON_FINITE),
        (spoilt(ROWS, 1, 0, 0, value=np.inf), LENGTHS, vj.Fault.NON_FINITE),
    ],
    ids=["too long", "negative", "huge", "nan", "inf"],
)
def test_a_bad_append_is_dropped_and_flagged(rows, lengths, fault):
    """All of that sequence's rows, and none of the others'."""
    start = append(SPEC, empty(), ROWS[:, :3])
    cache = append_jit(start, rows, lengths)
    assert flags(cache) == [0, fault, 0]
    assert_same(settled(vj.take(SPEC, cache, 1))[:-1], settled(vj.take(SPEC, start, 1))[:-1])
    good = append_jit(start, ROWS, spoilt(LENGTHS, 1, value=0))
    for b in (0, 2):
        assert_same(vj.take(SPEC, cache, b), vj.take(SPEC, good, b))


def test_an_append_beyond_the_capacity_is_dropped_and_flagged():
    start = full()
    cache = append_jit(start, ROWS, np.array([2, 3, 0]))
    assert flags(cache) == [0, vj.Fault.CAPACITY, 0]
    assert vj.length(cache).tolist() == [44, 42, 42]
    assert_same(settled(vj.take(SPEC, cache, 1))[:-1], settled(vj.take(SPEC, start, 1))[:-1])


@pytest.mark.parametrize(
    ("query", "row"),
    [(spoilt(QUERY, 1, 0, 0), ROWS[:, 0]), (QUERY, spoilt(ROWS[:, 0], 1, 9, value=-np.inf))],
    ids=["query", "row"],
)
def test_a_step_that_is_not_finite_is_dropped_and_flagged(query, row):
    start = filled(SPEC, ROWS)
    out, stats, cache = step_jit(start, query, row, np.ones(BATCH, bool))
    assert flags(cache) == [0, vj.Fault.NON_FINITE, 0]
    np.testing.assert_array_equal(stats.fault, cache.fault)
    assert vj.length(cache).tolist() == [28, 27, 28]
    assert jnp.isfinite(out).all()
    good, _, _ = step_jit(start, QUERY, ROWS[:, 0], np.ones(BATCH, bool))
    np.testing.assert_array_equal(out[::2], good[::2])


def test_a_step_beyond_the_capacity_is_dropped_and_flagged():
    cache = append(SPEC, full(), ROWS, np.array([2, 1, 0]))
    out, stats, after = step_jit(cache, QUERY, ROWS[:, 0], np.ones(BATCH, bool))
    assert flags(after) == [vj.Fault.CAPACITY, 0, 0]
    assert vj.length(after).tolist() == [44, 44, 43]
    assert_same(settled(vj.take(SPEC, after, 0))[:-1], settled(vj.take(SPEC, cache, 0))[:-1])
    np.testing.assert_allclose(out[0], vj.attend(SPEC, cache, QUERY)[0][0], rtol=1e-5, atol=1e-6)
    assert stats.fault.tolist() == after.fault.tolist()


def test_an_inactive_sequence_has_no_fault():
    active = np.array([True, False, True])
    bad = spoilt(QUERY, 1), spoilt(ROWS[:, 0], 1)
    _, _, cache = step_jit(filled(SPEC, ROWS), *bad, active)
    assert flags(cache) == [0, 0, 0]
    cache = append(SPEC, full(), ROWS, np.array([2, 2, 2]))
    assert flags(step_jit(cache, QUERY, ROWS[:, 0], ~active)[2]) == [0, vj.Fault.CAPACITY, 0]


def test_faults_add_up_and_stay_until_reset():
    cache = append_jit(empty(), ROWS, spoilt(LENGTHS, 1, value=-1))
    cache = append_jit(cache, spoilt(ROWS, 1, 0, 0), LENGTHS)
    cache = append_jit(cache, ROWS, np.array([0, 5, 0]))  # a good write goes on, under the flag
    assert flags(cache) == [0, vj.Fault.LENGTH | vj.Fault.NON_FINITE, 0]
    assert vj.length(cache).tolist() == [40, 5, 40]
    assert flags(vj.reset(SPEC, cache, 0))[1] == vj.Fault.LENGTH | vj.Fault.NON_FINITE
    assert flags(vj.reset(SPEC, cache, 1)) == [0, 0, 0]


def test_a_dropped_write_leaves_a_valid_partition():
    cache = append_jit(filled(SPEC, ROWS, LENGTHS), ROWS, spoilt(LENGTHS, 1, value=99))
    expected = sequences(SPEC, np.concatenate([ROWS[:, :20], ROWS[:, :20]], axis=1), [40, 20, 40])
    assert_partition(SPEC, vj.put(SPEC, cache, 1, vj.take(SPEC, filled(SPEC, ROWS, LENGTHS), 1)), expected)
    assert vj.where(SPEC, cache)[1].tolist() == expected[1].tiers()


def test_a_fault_is_raised_with_its_sequence_and_its_reason():
    with pytest.raises(RuntimeError, match="sequence 1: the capacity was exceeded.*; a row or query held NaN") as error:
        vj.raise_on_fault(jnp.array([0, 3, 0]))
    assert "sequence 0" not in str(error.value)
    with pytest.raises(RuntimeError, match="sequence 0: a length was negative.*sequence 2: the capacity"):
        vj.raise_on_fault(np.array([[4, 0, 0], [0, 0, 1]]))  # over layers or steps
    vj.raise_on_fault(jnp.zeros((2, 3), jnp.int32))
    vj.raise_on_fault(jnp.zeros((0, 3), jnp.int32))  # of no step


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (np.int32(1), r"fault has shape \(\); expected \[\.\.\., B\], B >= 1"),
        (np.zeros(0, np.int32), r"fault has shape \(0,\); expected \[\.\.\., B\], B >= 1"),
        (np.zeros((2, 0), np.int32), r"fault has shape \(2, 0\); expected \[\.\.\., B\], B >= 1"),
        (np.zeros(3, np.float32), "fault has dtype float32; expected integers"),
        (None, r"fault has shape \(\)"),
    ],
    ids=["scalar", "empty", "no sequence", "floats", "none"],
)
def test_a_bad_fault_is_named(fault, message):
    with pytest.raises(ValueError, match=message):
        vj.raise_on_fault(fault)


def test_shapes_are_checked_inside_jit_too():
    with pytest.raises(ValueError, match=r"rows has shape \(3, 27, 11\)"):
        jax.jit(vj.append, static_argnums=0)(SPEC, empty(), WIDE, LENGTHS)


def test_nothing_is_compiled_for_a_bad_call():
    """Errors come before the program: with compilation forbidden, the error is still the clear one."""
    cache = jax.eval_shape(lambda: vj.init(SPEC, BATCH))
    with pytest.raises(ValueError, match=r"row has shape \(3, 11\)"):
        jax.eval_shape(lambda c, q, r: vj.step(SPEC, c, q, r), cache, QUERY, WIDE[:, 0])


def test_a_cache_of_another_spec_is_refused():
    other = dataclasses.replace(SPEC, rank=SPEC.rank + 1)
    for call in (
        lambda: vj.append(other, empty(), ROWS),
        lambda: vj.attend(other, empty(), QUERY),
        lambda: vj.step(other, empty(), QUERY, ROWS[:, 0]),
        lambda: vj.close(other, empty()),
        lambda: vj.where(other, empty()),
    ):
        with pytest.raises(ValueError, match=r"cache\.index\.basis is .*this spec has float32"):
            call()


@pytest.mark.parametrize("merged", [None, 4])
def test_a_cache_with_other_room_for_merged_rows_is_refused(merged):
    spec, other = (dataclasses.replace(SPEC, merged=room) for room in (merged or 0, 6))
    with pytest.raises(ValueError, match=rf"cache\.merged has room for {merged} rows; this spec has merged=6"):
        vj.where(other, vj.init(spec, BATCH))
    with pytest.raises(ValueError, match=rf"cache\.merged has room for 6 rows; this spec has merged={merged or 0}"):
        vj.where(spec, vj.init(other, BATCH))


KEPT = np.zeros((BATCH, SPEC.archive_rows), bool)


@pytest.mark.parametrize(
    "call",
    [
        lambda cache: vj.append(SPEC, cache, ROWS),
        lambda cache: vj.attend(SPEC, cache, QUERY),
        lambda cache: vj.attend_chunk(SPEC, cache, QUERY[:, None], ROWS[:, :1]),
        lambda cache: vj.step(SPEC, cache, QUERY, ROWS[:, 0]),
        lambda cache: vj.calibrate(SPEC, cache, QUERY[:, None], np.zeros((BATCH, 1), int)),
        lambda cache: vj.close(SPEC, cache),
        lambda cache: vj.keep_set(SPEC, cache, KEPT),
        lambda cache: vj.merge_rows(SPEC, cache, KEPT, *[None] * 4),
        lambda cache: vj.where(SPEC, cache),
        lambda cache: vj.length(cache),
        lambda cache: vj.take(SPEC, cache, 0),
        lambda cache: vj.fork(SPEC, cache, [0]),
        lambda cache: vj.put(SPEC, cache, 0, vj.init(SPEC, 1)),
        lambda cache: vj.reset(SPEC, cache, 0),
        lambda cache: vj.grow(SPEC, cache),
    ],
)
def test_what_is_no_cache_is_named(call):
    with pytest.raises(ValueError, match="cache is a NoneType; expected a Cache, as init makes it"):
        call(None)
    with pytest.raises(ValueError, match="cache is a tuple; expected a Cache"):
        call((empty(), empty()))  # of all layers


def test_a_single_that_is_no_cache_is_named():
    with pytest.raises(ValueError, match="single is a NoneType; expected a Cache"):
        vj.put(SPEC, empty(), 0, None)


@pytest.mark.parametrize(
    ("queries", "positions", "message"),
    [
        (QUERY[:, None][:, :0], np.zeros((BATCH, 0), int), "queries has N=0"),
        (QUERY[:, None].astype(int), np.zeros((BATCH, 1), int), "queries has dtype int"),
        (QUERY[:, None], np.full((BATCH, 1), SPEC.capacity), r"positions holds \[44\].*capacity=44"),
        (QUERY[:, None], np.full((BATCH, 1), -2), r"positions holds \[-2\].*-1: ignored"),
    ],
)
def test_calibration_names_what_is_wrong(queries, positions, message):
    with pytest.raises(ValueError, match=message):
        vj.calibrate(SPEC, empty(), queries, positions)


def test_an_ignored_query_may_hold_anything():
    cache, positions = filled(SPEC, ROWS), np.full((BATCH, 1), TIME - 1)
    positions[0] = -1
    clean = vj.calibrate(SPEC, cache, QUERY[:, None], positions)
    assert_same(vj.calibrate(SPEC, cache, spoilt(QUERY[:, None], 0), positions), clean)
    assert not jnp.array_equal(clean.index.basis[1], cache.index.basis[1])  # the other sequences were calibrated


@pytest.mark.parametrize("call", [vj.grow, vj.close, vj.where])
def test_a_cache_of_another_kind_of_index_is_refused(call):
    balanced = dataclasses.replace(SPEC, index="balanced", index_bits=8)
    for made, asked in ((SPEC, balanced), (balanced, SPEC)):
        with pytest.raises(ValueError, match="^cache.*"):
            call(asked, vj.init(made, BATCH))
