"""The divergence frontier against areas worked out by hand, and the clusters under it."""

import math

import numpy as np
import pytest

from experiments.reports import frontier


@pytest.mark.parametrize("p", [[1, 0], [3, 1, 4], [1, 1, 1, 1]])
def test_equal_histograms(p):
    assert frontier.area(p, np.array(p) * 7) == pytest.approx(1, abs=1e-9)


def test_disjoint_histograms():
    """x = (1 - w)^c, y = w^c: the integral of w^c d(1 - w)^c is c B(c + 1, c), 1/2 at c = 1 and 1/252 at c = 5."""
    assert frontier.area([1, 0], [0, 1], scale=1) == pytest.approx(1 / 2, abs=1e-5)
    assert frontier.area([2, 3, 0, 0], [0, 0, 1, 4]) == pytest.approx(1 / 252, abs=1e-5)


def test_a_point_and_a_fair_coin():
    """r = ((1 + w)/2, (1 - w)/2): x = sqrt(1 - w^2), y = (1 + w)/2, a quarter of a circle on a bar: 1/2 + pi/8."""
    assert frontier.area([1, 0], [1, 1], scale=1) == pytest.approx(1 / 2 + math.pi / 8, abs=1e-5)
    assert frontier.area([1, 1], [1, 0], scale=1) == pytest.approx(1 / 2 + math.pi / 8, abs=1e-5)


def test_the_nearer_the_larger():
    areas = [frontier.area([0.5 + d, 0.5 - d], [0.5 - d, 0.5 + d]) for d in (0.0, 0.1, 0.2, 0.3, 0.5)]
    assert areas == sorted(areas, reverse=True) and areas[0] - areas[1] > 0.02


@pytest.mark.parametrize(("p", "q"), [([1, 1], [1, 1, 1]), ([0, 0], [1, 1]), ([1, -1], [1, 1]), ([[1]], [[1]])])
def test_what_is_no_pair_of_histograms(p, q):
    with pytest.raises(ValueError, match="histogram"):
        frontier.area(p, q)


def test_clusters_are_directions():
    rng = np.random.default_rng(0)
    centres = np.eye(3)[np.arange(30) % 3]
    features = (centres + 0.02 * rng.normal(size=(30, 3))) * rng.uniform(0.1, 9, size=(30, 1))
    labels = frontier.cluster(features, 3)
    assert len(set(labels[:3])) == 3 and (labels == np.tile(labels[:3], 10)).all()
    assert (labels == frontier.cluster(features, 3)).all()
    assert frontier.between(labels[:15], labels[15:], 3) == pytest.approx(1)
    assert frontier.between(labels[0::3], labels[1::3], 3) == pytest.approx(1 / 252, abs=1e-5)
    with pytest.raises(ValueError, match="clusters=31 must be at least 2, and at most the 30"):
        frontier.cluster(features, 31)
