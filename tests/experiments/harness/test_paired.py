"""Estimates from paired trials."""

import math

import numpy as np
import pytest

from experiments.harness import paired


def rows(intact, dropped=(), checkpoint="a"):
    numbers = enumerate(intact)
    return [{"checkpoint": checkpoint, "trial": i, "intact": bool(x), "dropped": i in dropped} for i, x in numbers]


def test_a_share_counts_the_trials_that_dense_answers():
    found = paired.share(rows([1] * 12 + [0] * 12, dropped=(0, 23)))
    assert (found.value, found.n, found.unusable) == (11 / 22, 22, "")
    assert found.low == pytest.approx(0.3072, abs=1e-4) and found.high == pytest.approx(0.6928, abs=1e-4)  # Wilson
    assert paired.share(rows([1] * 24, dropped=(0, 1, 2))).unusable == "dense fails on 3 of 24 trials"
    assert paired.share([]).unusable


def test_a_difference_is_taken_trial_by_trial():
    one, other = rows([1, 1, 1, 0] * 6), rows([0, 0, 1, 0] * 6)
    found = paired.difference(one, other)
    assert (found.value, found.n) == (0.5, 24)
    assert 0.25 <= found.low < 0.5 < found.high <= 0.75
    same = paired.difference(one, one)
    assert same.value == same.low == same.high == 0  # unpaired draws would give it a width
    assert paired.difference(one, []).value is None


def test_training_seeds_are_drawn_before_trials():
    good, bad = rows([1] * 24, checkpoint="a"), rows([0] * 24, checkpoint="b")
    found = paired.pooled(good + bad)
    assert (found.value, found.low, found.high, found.n) == (0.5, 0.0, 1.0, 48)  # two models tell little
    same = paired.difference(good + bad, good + bad)
    assert (same.low, same.high) == (0, 0)  # the same models are drawn on both sides
    mixed = [row for name in "ab" for row in rows([1, 0] * 12, checkpoint=name)]
    assert 0.25 < paired.pooled(mixed).low < paired.pooled(mixed).high < 0.75
    apart = paired.difference(rows([1] * 24, checkpoint="a"), rows([0] * 24, checkpoint="b"))
    assert (apart.value, apart.low, apart.high) == (1.0, 1.0, 1.0)


def test_a_trial_that_dense_fails_counts_nowhere():
    table = paired.table(rows([1, 0, 1], dropped=(1,)) + rows([0, 0, 1], checkpoint="b"))
    np.testing.assert_array_equal(table, [[1, math.nan, 1], [0, 0, 1]])


def test_kendall_by_hand():
    assert paired.kendall(np.array([1, 2, 3]), np.array([4, 5, 6])) == 1
    assert paired.kendall(np.array([1, 2, 3]), np.array([6, 5, 4])) == -1
    assert paired.kendall(np.array([1, 2, 3]), np.array([5, 4, 6])) == pytest.approx(1 / 3)  # two pairs of three
    assert paired.kendall(np.array([1, 1, 3]), np.array([4, 5, 6])) == pytest.approx(2 / 3)  # a tie is neither


def test_the_order_of_two_groups_of_trials():
    one = {"a": [0.1] * 8, "b": [1.0] * 8, "c": [9.0] * 8, "only here": [2.0] * 8}
    found = paired.order(one, {"a": [0.0] * 5, "b": [3.0] * 5, "c": [4.0] * 5})
    assert (found.value, found.low, found.high, found.n) == (1, 1, 1, 3)
    assert paired.order(one, {"a": [1.0], "b": []}).value is None


def test_the_best_of_some_groups():
    assert paired.best({"a": rows([1, 0]), "b": rows([1, 1]), "c": rows([1, 1])}) == "b"
