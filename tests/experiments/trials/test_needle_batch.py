"""Batches of needle trials: masks, what is scored, traffic, where a needle was."""

from types import SimpleNamespace

import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

from experiments.text import needles
from experiments.trials import needle_batch


def tiny_batch():
    """Two trials of 3 + 1 and 2 + 2 tokens behind a prefix of 4."""

    def trial(question, answer, span):
        return needles.Trial(np.arange(4), np.array(question), np.array(answer), span, (span,), "Ann", "12")

    trials = [(("0-1", 0), trial([5, 6, 7], [8], (1, 3))), (("0-1", 1), trial([5], [8, 9], (0, 1)))]
    [batch] = needle_batch.batches(4, trials, 8)
    return batch


def test_masks_of_a_batch():
    batch = tiny_batch()
    assert_array_equal(batch.tokens, [[5, 6, 7, 8], [5, 8, 9, 0]])
    assert_array_equal(batch.steps.T, [[1, 1, 1], [1, 1, 0]])
    assert_array_equal(batch.answers, [[0, 0, 1], [1, 1, 0]])
    assert_array_equal(batch.spans, [[0, 1, 1, 0], [1, 0, 0, 0]])


def test_the_answer_alone_is_scored():
    forced = SimpleNamespace(
        logprob=np.array([[-9, -9, -0.5], [-0.25, -1, -9]]), greedy=np.array([[0, 0, 8], [8, 0, 0]])
    )
    measured = needle_batch.answered(tiny_batch(), forced)
    assert_allclose(measured["nll"], [0.5, 1.25])
    assert_array_equal(measured["exact"], [True, False])


def test_traffic_is_averaged_over_the_steps_of_each_trial():
    fetched = np.array([[[3, 1]], [[0, 0]], [[6, 99]]])  # [L - 1, layers, B]; the second trial has two steps
    same = dict.fromkeys(("attended", "overflowed", "gate", "clamped"), np.zeros((3, 1, 2)))
    forced = SimpleNamespace(stats=SimpleNamespace(fetched=fetched, fired=fetched, **same))
    spec = SimpleNamespace(recall="certified")
    measured = needle_batch.traffic(spec, tiny_batch(), forced)
    assert_allclose(measured["fetched_per_step"], [3, 0.5])
    assert_allclose(measured["fire_rate"], [2 / 3, 1 / 2])
    assert needle_batch.traffic(SimpleNamespace(recall="none"), tiny_batch(), forced)["fire_rate"].sum() == 0


def test_the_last_batch_is_filled_up():
    trial = tiny_batch().trials[0]
    parts = list(needle_batch.batches(4, [(("0-1", i), trial) for i in range(5)], 2))
    assert [len(part.places) for part in parts] == [2, 2, 1]
    assert [len(part.trials) for part in parts] == [2, 2, 2]


def test_where_a_needle_was_by_layer():
    batch = tiny_batch()  # spans: rows 1, 2 of trial 0, row 0 of trial 1
    kept = [[[0, 1, 0, 1], [1, 1, 1, 0]], [[1, 1, 1, 0], [0, 0, 0, 0]]]  # [layers, B, A]
    state = SimpleNamespace(caches=[SimpleNamespace(archive=SimpleNamespace(kept=np.array(k, bool))) for k in kept])
    fetched = np.zeros((3, 2, 2, 4), bool)  # [L - 1, layers, B, A]
    fetched[0, 0, 0, 2] = fetched[2, 1, 0, 1] = fetched[2, 1, 0, 2] = True
    fetched[2, 0, 1, 0] = True  # a step that trial 1 did not take
    forced = SimpleNamespace(stats=SimpleNamespace(rows=fetched))
    spec = SimpleNamespace(activation=0, capacity=9)
    measured = needle_batch.found(spec, batch, state, forced)
    assert_allclose(measured["needle_kept"], [[0.5, 1], [1, 0]])  # [B, layers]
    assert_allclose(measured["needle_fetched"], [[0.5, 1], [0, 0]])
    assert needle_batch.found(SimpleNamespace(activation=10, capacity=9), batch, state, forced) == {}
