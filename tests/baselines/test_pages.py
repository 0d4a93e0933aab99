"""Page digests: examples worked out by hand, bounds that hold, and what a step fetches by pages."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from vestige_jax.baselines import pages
from vestige_jax.baselines.arkvale import ArkVale
from vestige_jax.baselines.quest import Quest, pruned

pytestmark = pytest.mark.usefixtures("quick_compilation")

KINDS = [Quest(3), *(ArkVale(3, radius, volume) for radius in ("max", "mean") for volume in ("sphere", "cuboid"))]
BOUNDS = [kind for kind in KINDS if kind.bound]

# A page of three rows: box [0, 6] x [-2, 0], centre (3, -1). The rows are (3, 1), (3, 1) and (1, 0) away from it.
ROWS = np.array([[0, 0], [6, -2], [2, -1]], np.float32)
QUERIES = np.array([[1, 2], [-2, 0]], np.float32)


_scores = jax.jit(lambda kind, *arrays: kind.scores(*arrays), static_argnums=0)


def scores(kind, rows=ROWS, queries=QUERIES, live=None):
    live = np.ones(rows.shape[:-1], bool) if live is None else live
    return np.asarray(_scores(kind, rows, live, queries))


# By hand


def test_quest_takes_the_better_corner_of_each_coordinate():
    assert scores(Quest(3)).tolist() == [[1 * 6 + 2 * 0], [-2 * 0]]


def test_a_sphere_reaches_as_far_as_its_farthest_row():
    # <q, c> = 1 and -6, |q| = sqrt 5 and 2, the farthest rows are sqrt 10 away, the third is 1 away.
    reach = np.sqrt(10) * np.array([[np.sqrt(5)], [2]])
    assert_allclose(scores(ArkVale(3, "max", "sphere")), [[1], [-6]] + reach, rtol=1e-6)
    assert_allclose(scores(ArkVale(3, "mean", "sphere")), [[1], [-6]] + reach * (2 + 1 / np.sqrt(10)) / 3, rtol=1e-6)


def test_a_cuboid_reaches_as_far_in_each_coordinate():
    # Largest distances (3, 1), mean ones (7/3, 2/3).
    assert_allclose(scores(ArkVale(3, "max", "cuboid")), [[1 + 3 + 2 * 1], [-6 + 2 * 3]])
    assert_allclose(scores(ArkVale(3, "mean", "cuboid")), [[1 + 7 / 3 + 2 * 2 / 3], [-6 + 2 * 7 / 3]], rtol=1e-6)


def test_a_mean_radius_is_no_bound():
    # Row 1 scores 6 - 2*2 = 2 by (1, 2) and row 0 scores 0 by (-2, 0); by (1, -1) row 1 scores 8.
    best = (ROWS @ [1, -1]).max()
    assert best == 8
    for volume in ("sphere", "cuboid"):
        kind = ArkVale(3, "mean", volume)
        assert not kind.bound and scores(kind, queries=np.array([[1, -1]], np.float32))[0, 0] < best


def test_the_largest_cuboid_is_the_box_of_quest():
    rows, queries = random(5, 12), random(6, 4)
    assert_allclose(scores(ArkVale(4, "max", "cuboid"), rows, queries), scores(Quest(4), rows, queries), rtol=1e-5)


def random(seed, count, width=5):
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_page_of_one_row_scores_what_its_row_does(kind):
    rows, queries = random(0, 4), random(1, 3)
    assert_allclose(scores(dataclasses.replace(kind, page=1), rows, queries), queries @ rows.T, rtol=1e-5, atol=1e-6)


# Pages with rows missing


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_dead_rows_leave_no_trace(kind):
    rows, queries = random(2, 9), random(3, 2)
    live = np.array([1, 0, 1, 0, 0, 0, 0, 1, 0], bool)
    poisoned = np.where(live[:, None], rows, 1e6 * rows)
    got = scores(kind, poisoned, queries, live)
    assert_allclose(got[:, 0], scores(dataclasses.replace(kind, page=2), rows[[0, 2]], queries)[:, 0], rtol=1e-5)
    assert (got[:, 1] == -np.inf).all()
    assert_allclose(got[:, 2], queries @ rows[7], rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_last_page_may_be_short(kind):
    rows, queries = random(4, 7), random(5, 2)
    got = scores(kind, rows, queries)
    assert got.shape == (2, 3)
    assert_allclose(got[:, 2], queries @ rows[6], rtol=1e-5)
    assert_allclose(got[:, :2], scores(kind, rows[:6], queries), rtol=1e-6)


# Bounds


@pytest.mark.parametrize("kind", BOUNDS, ids=str)
@hypothesis.given(
    seed=st.integers(0, 10**6), size=st.sampled_from([1e-3, 1.0, 1e3]), spread=st.sampled_from([0.0, 3.0])
)
def test_no_row_scores_above_the_bound_of_its_page(kind, seed, size, spread):
    rng = np.random.default_rng(seed)
    rows = (size * (rng.normal(size=(2, 10, 5)) + spread * rng.normal(size=5))).astype(np.float32)
    queries, live = rng.normal(size=(2, 4, 5)).astype(np.float32), rng.random((2, 10)) < 0.7
    bounds = scores(kind, rows, queries, live).astype(np.float64)
    exact = np.einsum("bqc,bsc->bqs", queries.astype(np.float64), rows.astype(np.float64))
    over = np.where(live[:, None], exact - bounds[..., np.arange(10) // 3], -np.inf)
    assert over.max() <= 1e-5 * np.abs(exact).max()


def test_pruned_pages_are_those_that_cannot_hold_the_best_row():
    bounds = jnp.array([[3.0, 1.0, 2.0, -jnp.inf], [5.0, 5.0, 5.0, 5.0], [-jnp.inf] * 4])
    assert_allclose(pruned(bounds, jnp.array([2.0, 5.0, -jnp.inf])), [1 / 3, 0, 0])


# Which pages


def test_heads_choose_in_rounds():
    score = jnp.array([[[9.0, 8.0, 7.0, 0.0], [0.1, 0.2, 0.3, 0.5]]])  # the second head speaks in small numbers
    chosen = [np.flatnonzero(pages.best(score, count)[0]).tolist() for count in (1, 2, 3, 9)]
    assert chosen == [[0], [0, 3], [0, 1, 3], [0, 1, 2, 3]]


def test_ties_go_to_the_lower_page_and_empty_ones_are_never_taken():
    score = jnp.array([[[1.0, 1.0, -jnp.inf, 1.0]], [[-jnp.inf] * 4]])
    assert_array_equal(pages.best(score, 2), [[1, 1, 0, 0], [0, 0, 0, 0]])
    assert_array_equal(pages.best(score, 4), [[1, 1, 0, 1], [0, 0, 0, 0]])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Quest(0), "page=0 must be an integer of at least 1"),
        (lambda: ArkVale(2.5), "page=2.5 must be an integer"),
        (lambda: ArkVale(radius="median"), "radius='median' is unknown; choose max or mean"),
        (lambda: ArkVale(volume="ball"), "volume='ball' is unknown; choose sphere or cuboid"),
    ],
)
def test_what_is_no_kind_of_page(make, message):
    with pytest.raises(ValueError, match=message):
        make()
