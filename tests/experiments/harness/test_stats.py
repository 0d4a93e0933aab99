"""Wilson's interval against values worked out by hand."""

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose

from experiments.harness import stats


@pytest.mark.parametrize(
    "successes, n, low, high",
    [
        # z² = 3.841459. At 0 of n the interval is [0, z²/(n + z²)]; at n of n its mirror image.
        (0, 10, 0.0, 3.841459 / 13.841459),
        (10, 10, 10 / 13.841459, 1.0),
        (24, 24, 24 / 27.841459, 1.0),
        # 5 of 10: centre 1/2, half = z sqrt(1/40 + z²/400) / (1 + z²/10) = 0.263404
        (5, 10, 0.5 - 0.263404, 0.5 + 0.263404),
        # 1 of 4: centre (1/4 + z²/8)/(1 + z²/4) = 0.372473, half = z sqrt(3/64 + z²/64)/(1 + z²/4) = 0.326885
        (1, 4, 0.372473 - 0.326885, 0.372473 + 0.326885),
    ],
)
def test_wilson_by_hand(successes, n, low, high):
    assert stats.wilson(successes, n) == pytest.approx((low, high), abs=2e-5)


def test_wilson_ends_solve_the_score_equation():
    for p in stats.wilson(7, 24):
        assert (7 / 24 - p) ** 2 == pytest.approx(stats.Z95**2 * p * (1 - p) / 24)


def test_quantile_is_the_one_of_95_percent():
    assert math.erf(stats.Z95 / math.sqrt(2)) == pytest.approx(0.95, abs=1e-12)


def test_nothing_counted_says_nothing():
    assert stats.wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize("successes, n", [(-1, 3), (4, 3)])
def test_impossible_counts_are_refused(successes, n):
    with pytest.raises(ValueError, match="successes must be between 0 and n = 3"):
        stats.wilson(successes, n)


def test_the_ends_are_exact():
    assert stats.wilson(0, 24)[0] == 0.0
    assert stats.wilson(24, 24)[1] == 1.0


def test_resampling_all_draws_at_once_gives_the_same_interval():
    values = np.arange(20.0) ** 2
    assert_allclose(stats.percentiles(values[stats.resampled(20)].mean(-1)), stats.bootstrap(values), rtol=0.05)
    assert np.array_equal(stats.resampled(5), stats.resampled(5))
