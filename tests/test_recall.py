"""Recall: which archived rows fire, which of them are fetched, and that the sound mode misses none."""

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

import vestige_jax as vj
from tests import oracle_attention as oracle
from tests.scenes import CAPACITY, C, H, R, asked, assert_served, best_scores, both_parts, fill, scene, small_spec
from tests.sources import random_rows

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("rank", [0, R])
def test_an_index_of_no_or_full_rank_fires_as_its_equation_says(rank):
    here = scene(2, "correlated", rank=rank)
    here = here.calibrated(z=here.z_that_fires(asked(2)[0], 20) if rank < R else 8.0)
    assert_served(here, asked(2), *vj.attend(here.spec, here.cache, asked(2)))


def test_a_full_rank_index_fetches_exactly_the_rows_that_beat_the_attended_tier():
    here = scene(3, rank=R)
    _, stats = vj.attend(here.spec, here.cache, asked(3))
    for b in range(3):
        sequence = here.sequence(b)
        archived = sequence.tier == oracle.ARCHIVED
        peak = here.attention(b, asked(3)[b], ~archived).peak
        beats = oracle.scores(asked(3)[b], sequence.rows[archived], here.spec.scale) >= peak[:, None]
        assert stats.fetched[b] == beats.any(0).sum()


def test_z_may_be_negative():
    here = scene(0)
    archived = np.flatnonzero(here.sequence(0).tier == oracle.ARCHIVED)
    query = 2 * here.rows[:, archived[:H]]
    query[:, :, 5:R] *= 0.1  # the index sees most of what it looks for
    query[1:] = asked(0)[1:]
    z = here.z_that_fires(query[0], 2)
    assert z < 0
    here = here.calibrated(z)
    out, stats = vj.attend(here.spec, here.cache, query)
    assert stats.fired[0] == 2
    assert_served(here, query, out, stats)


def test_a_head_fires_only_above_its_gate_but_sees_what_others_fetch():
    here = scene(8)
    entropy = here.attention(0, asked(8)[0], here.sequence(0).tier != oracle.ARCHIVED).entropy
    for threshold in [-np.inf, *(np.sort(entropy) + 1e-3)]:
        gated = here.calibrated(z=0.5, threshold=threshold)
        assert_served(gated, asked(8), *vj.attend(here.spec, gated.cache, asked(8)))
    opened = [here.calibrated(0.5, t).served(0, asked(8)[0]).open.sum() for t in np.sort(entropy) + 1e-3]
    assert opened == [2, 1, 0]


@pytest.fixture(scope="module")
def long_scene():
    """A thousand archived rows: enough for every gather width, 0, 64, 512 and F = 1024."""
    spec = small_spec(capacity=1088, block=64, ratio=1 / 32, fetch=1024)
    return fill(spec, random_rows(np.random.default_rng(20), 3, 1088), (1088, 700, 30))


@pytest.mark.parametrize("fired", [0, 1, 64, 65, 512, 513, 900])
def test_every_gather_width_gives_the_brute_force_answer(long_scene, fired):
    query = asked(21)
    here = long_scene.calibrated(long_scene.z_that_fires(query[0], fired))
    out, stats = vj.attend(here.spec, here.cache, query)
    assert stats.fired[0] == fired
    assert_served(here, query, out, stats)


def test_as_many_fired_rows_as_fit_are_fetched_and_one_more_overflows():
    here = scene(6).under(trace=True, fetch=22)
    fits, exceeds = (here.calibrated(here.z_that_fires(asked(6)[0], n)) for n in (22, 23))
    for now, overflow in [(fits, False), (exceeds, True)]:
        out, stats = vj.attend(now.spec, now.cache, asked(6))
        assert stats.overflowed[0] == overflow
        assert_served(now, asked(6), out, stats)


def test_only_the_sequence_that_overflows_is_served_dense():
    here = scene(6).under(trace=True, fetch=22).calibrated(z=2.0)
    out, stats = vj.attend(here.spec, here.cache, asked(6))
    assert list(stats.overflowed) == [True, False, False], "the scene should overflow in its longest sequence alone"
    assert stats.fired[1] > 0
    assert_served(here, asked(6), out, stats)
    np.testing.assert_allclose(out[0], here.attention(0, asked(6)[0]).out, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(stats.attended == 1, [True, False, True])  # the last is all tail


def test_truncating_fetches_the_rows_with_the_largest_margins():
    here = scene(6).under(trace=True, fetch=22, overflow="truncate").calibrated(z=2.0)
    out, stats = vj.attend(here.spec, here.cache, asked(6))
    assert stats.overflowed[0] and stats.fetched[0] == 22
    assert_served(here, asked(6), out, stats)


def test_truncating_breaks_a_tie_of_margins_by_position():
    here = scene(6).under(trace=True, fetch=22, overflow="truncate").calibrated(z=2.0)
    served, keep = here.served(0, asked(6)[0]), here.cache.archive.kept
    by_margin = np.argsort(-served.margin.max(0), kind="stable")
    last, twin = by_margin[21], by_margin[30]
    rows = np.array(here.rows)
    rows[0, twin] = rows[0, last]
    rows[0, twin, 5:R] *= -1  # beyond the sketch: another row with the same index entry
    tied = fill(small_spec(), rows, here.lengths).under(trace=True, fetch=22, overflow="truncate")
    tied = tied._replace(cache=vj.keep_set(small_spec(), tied.cache, keep)).calibrated(z=2.0)
    expected = tied.served(0, asked(6)[0])
    assert np.flatnonzero(expected.attended[[last, twin]] == (last < twin, twin < last)).size == 2
    assert_served(tied, asked(6), *vj.attend(tied.spec, tied.cache, asked(6)))


@pytest.mark.parametrize("z, overflows", [(1.0, False), (2.0, True)])
def test_top_j_fetches_at_most_j_rows_a_head_of_those_that_fired_and_fit(z, overflows):
    here = scene(6).under(trace=True, fetch=22, overflow="truncate", top_j=3).calibrated(z)
    out, stats = vj.attend(here.spec, here.cache, asked(6))
    assert stats.overflowed[0] == overflows
    assert 3 < stats.fetched[0] <= 3 * H and stats.fired[0] > stats.fetched[0]
    assert_served(here, asked(6), out, stats)


def test_overflow_is_judged_before_top_j_takes_its_share():
    here = scene(6).under(trace=True, fetch=22, top_j=3).calibrated(z=2.0)
    out, stats = vj.attend(here.spec, here.cache, asked(6))
    assert stats.overflowed[0] and not stats.overflowed[1]
    assert 0 < stats.fetched[1] <= 9
    assert_served(here, asked(6), out, stats)


# --- the sound mode

SOUND = {"bound": "sound", "fetch": 80}


def assert_argmax_attended(spec, cache, query):
    reached, best = best_scores(spec, cache, query)
    np.testing.assert_allclose(reached, best, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("sketch_dtype, fitted", [("float16", True), ("bfloat16", False)])
@hypothesis.given(seed=st.integers(0, 10**6), norm=st.sampled_from([1e-3, 1.0, 300.0]), looks=st.booleans())
def test_the_sound_mode_never_misses_the_best_row(sketch_dtype, fitted, seed, norm, looks):
    rng = np.random.default_rng(seed)
    spec = small_spec(rank=R - 1, sketch_dtype=sketch_dtype, **SOUND)
    rows = norm * random_rows(rng, 3, CAPACITY)
    rows[:, :, R - 1 : R] *= 10.0 ** -rng.integers(0, 6)  # down to a tiny eta: rounding is all there is
    here = fill(spec, rows, (80, 48, 64))
    query = rng.normal(size=(3, H, C))
    if looks:  # for one row each, so that near ties with it decide
        query = np.stack([rows[b, rng.integers(0, here.lengths[b], H)] for b in range(3)])
    cache = here.cache
    if fitted:
        cache = vj.calibrate(spec, cache, rng.normal(size=(3, 8, H, C)).astype(np.float32), np.full((3, 8), 47))
    assert_argmax_attended(spec, cache, jnp.asarray(query, jnp.float32))


@pytest.mark.parametrize("sketch_dtype", ["float16", "bfloat16"])
def test_the_sound_mode_covers_a_sketch_that_rounds_the_best_row_down(sketch_dtype):
    spec = small_spec(rank=R - 1, sketch_dtype=sketch_dtype, **SOUND)
    ulp = 32 * float(jnp.finfo(sketch_dtype).eps)
    rows = random_rows(np.random.default_rng(30), 3, CAPACITY)
    rows[:, 17] = 0
    rows[:, 17, : R - 1] = 32 + 0.49 * ulp  # rounds down in every coordinate; nothing beyond the sketch
    rows[:, 40] = rows[:, 17]
    rows[:, 40, 0] -= 0.2 * ulp  # scores a little less, and is kept
    here = fill(spec, rows, (64, 64, 48))
    only_40 = jnp.zeros((3, 80), bool).at[:, 40].set(True)
    query = jnp.zeros((3, H, C)).at[:, :, : R - 1].set(1.0)
    cache = vj.keep_set(spec, here.cache, only_40)
    near = both_parts(spec, cache, query)[0].peak
    _, best = best_scores(spec, cache, query)
    assert (near < best - 1e-3).all()
    assert_argmax_attended(spec, cache, query)


def test_the_sound_mode_needs_no_calibration_whatever_z_max_is():
    spec = small_spec(rank=5, sketch_dtype="float16", z_max=0.01, **SOUND)
    rng = np.random.default_rng(31)
    for _ in range(5):
        here = fill(spec, random_rows(rng, 3, CAPACITY), (80, 48, 64))
        query = np.stack([here.rows[b, rng.integers(0, here.lengths[b], H)] for b in range(3)])
        query[..., :5] = query[..., R:] = 0  # the sketch and the branch see nothing of it
        assert_argmax_attended(spec, here.cache, jnp.asarray(query))


def test_the_sound_bound_is_the_certificate_and_no_more():
    here = scene(32, **SOUND)
    rng = np.random.default_rng(32)
    sample = jnp.asarray(rng.normal(size=(3, 8, H, C)), jnp.float32)
    here = here._replace(cache=vj.calibrate(here.spec, here.cache, sample, np.full((3, 8), 8)))
    query = asked(32)
    query[..., 5:R] *= 0.1
    _, stats = vj.attend(here.spec, here.cache, query)
    certain = here.calibrated(z=np.sqrt(R - 5))  # the oracle knows one bound, the calibrated one
    for b in range(3):
        assert stats.fired[b] == certain.served(b, query[b]).fires.any(0).sum()
    assert 0 < stats.fired[0] < 46, "the bound should fire some of the archived rows but not all"
