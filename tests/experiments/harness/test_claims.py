"""Verdicts: an interval on either side of a bound, across it, and a quantity that means nothing."""

import pytest
from ml_collections import ConfigDict

from experiments.harness.claims import Estimate, judge
from experiments.harness.stats import bootstrap


def verdict(low, high, unusable="", **bound):
    claims = ConfigDict({"some claim": ConfigDict({"paper": "said", "quantity": "x", **bound})})
    (row,) = judge(claims, {"x": Estimate((low + high) / 2, low, high, 9, unusable)})
    return row["agrees"]


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0.5, 0.7, "yes"), (0.1, 0.4, "no"), (0.4, 0.6, "can't be told")]
)
def test_at_least(low, high, expected):
    assert verdict(low, high, at_least=0.5) == expected


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0.5, 0.7, "no"), (0.1, 0.4, "yes"), (0.4, 0.6, "can't be told")]
)
def test_at_most(low, high, expected):
    assert verdict(low, high, at_most=0.45) == expected


def test_what_is_unusable_proves_nothing():
    assert verdict(0.9, 1.0, "dense fails", at_least=0.5) == "can't be told"


def test_what_this_run_did_not_measure_cannot_be_told():
    claims = ConfigDict({"some claim": ConfigDict({"paper": "said", "quantity": "y", "at_least": 1})})
    (row,) = judge(claims, {"x": Estimate(1, 1, 1, 9)})
    assert (row["agrees"], row["because"], row["ours"]) == ("can't be told", "not measured with these settings", None)


def test_a_claim_has_one_bound():
    with pytest.raises(ValueError, match="one bound"):
        verdict(0, 1)
    with pytest.raises(ValueError, match="one bound"):
        verdict(0, 1, at_least=0, at_most=1)


def test_bootstrap_of_a_mean():
    """Mean 0.5, standard error 0.05: an interval of about 0.5 -+ 0.098, the same one every time."""
    low, high = bootstrap([0.0, 1.0] * 50)
    assert low == pytest.approx(0.402, abs=0.015) and high == pytest.approx(0.598, abs=0.015)
    assert (low, high) == bootstrap([0.0, 1.0] * 50)
    assert bootstrap([2.0] * 5) == (2.0, 2.0)
    with pytest.raises(ValueError, match="values is empty"):
        bootstrap([])
