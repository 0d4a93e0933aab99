"""Held-out queries: each is answered as a decode step would answer it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import vestige_jax as vk
from experiments.trials import held_out
from experiments.trials.held_out import Answers
from tests import oracle_attention as oracle
from tests.scenes import LENGTHS, C, H, queries_for, scene

pytestmark = pytest.mark.usefixtures("quick_compilation")

NUMBER = 4


@pytest.fixture(scope="module")
def asked():
    """A calibrated scene, queries of its last four positions, and their answers."""
    here = scene(4, "correlated", trace=True, fetch=80).calibrated(z=0.3, threshold=1.0)
    rng = np.random.default_rng(4)
    queries = np.stack([queries_for(rng, here.rows[b, : LENGTHS[b]], NUMBER, H) for b in range(len(LENGTHS))])
    positions = np.array(LENGTHS)[:, None] - NUMBER + np.arange(NUMBER)
    answers = held_out.answer(here.spec, here.cache, jnp.asarray(queries), jnp.asarray(positions))
    return here, queries, positions, Answers(*map(np.asarray, answers))


def upto(here, positions):
    """The cache as it is when the queries at `positions` [B] are asked."""
    tail = dataclasses.replace(here.cache.tail, length=jnp.asarray(positions) - here.cache.archive.closed + 1)
    return dataclasses.replace(here.cache, tail=tail)


def best(here, b, query, position):
    """Brute force: the best visible row of each head, and whether it is archived."""
    sequence = here.sequence(b)
    scores = oracle.scores(query, sequence.rows[: position + 1], here.spec.scale)
    top = scores.argmax(-1)
    return top, sequence.tier[top] == oracle.ARCHIVED


def test_a_step_fetches_what_the_answer_counts(asked):
    here, queries, positions, answers = asked
    for i in range(NUMBER):
        _, stats = vk.attend(here.spec, upto(here, positions[:, i]), queries[:, i])
        assert_array_equal(answers.rows[:, i], stats.fetched)
        np.testing.assert_allclose(answers.open[:, i].mean(-1), stats.gate)
        for b in range(len(LENGTHS)):
            top, hard = best(here, b, queries[b, i], positions[b, i])
            assert_array_equal(answers.hard[b, i], hard)
            fetched = [h and bool(stats.rows[b, row]) for row, h in zip(top, hard, strict=True)]
            assert_array_equal(answers.fetched[b, i] & hard, fetched)
    assert 0 < answers.rows.sum() < answers.rows.size * 20  # some fire, not all
    assert 0 < answers.hard.sum() < answers.hard.size and 0 < answers.open.sum() < answers.open.size


def test_a_query_sees_its_own_row_and_none_behind_it(asked):
    _, queries, positions, _ = asked
    here = scene(4, trace=True, fetch=80).calibrated(z=0.3)  # rows that have little in common; the gate is open
    each = np.arange(len(LENGTHS))[:, None]
    for shift in (0, 1):  # its own row is far ahead of all others; or the next one is
        wanted = 40 * here.rows[each, np.minimum(positions + shift, np.array(LENGTHS)[:, None] - 1)]
        looking = np.broadcast_to(wanted[:, :, None], queries.shape)
        answers = held_out.answer(here.spec, here.cache, jnp.asarray(looking), jnp.asarray(positions))
        for i in range(NUMBER):
            _, stats = vk.attend(here.spec, upto(here, positions[:, i]), looking[:, i])
            assert_array_equal(answers.rows[:, i], stats.fetched)
        assert (answers.rows.sum() == 0) == (shift == 0)  # nothing beats its own row, but much what it cannot see


def test_a_head_covers_its_row_where_it_fires_itself(asked):
    here, queries, positions, answers = asked
    for b in range(2):
        for i in range(NUMBER):
            alone = [np.repeat(queries[:, i, h : h + 1], H, axis=1) for h in range(H)]
            top, hard = best(here, b, queries[b, i], positions[b, i])
            for h in np.flatnonzero(hard):
                _, stats = vk.attend(here.spec, upto(here, positions[:, i]), alone[h])
                assert answers.own[b, i, h] == stats.rows[b, top[h]]
                assert answers.fires[b, i, h] == (stats.fetched[b] > 0)
    covered, fetched = answers.own & answers.hard, answers.fetched & answers.hard
    assert not (covered & ~fetched).any() and covered.any()


def test_codes_of_few_bits_are_asked_in_their_own_steps():
    here = scene(4, "correlated", trace=True, fetch=80, index="balanced", index_bits=4, rank=4)
    rng = np.random.default_rng(4)
    queries = np.stack([queries_for(rng, here.rows[b, : LENGTHS[b]], NUMBER, H) for b in range(len(LENGTHS))])
    positions = np.array(LENGTHS)[:, None] - NUMBER + np.arange(NUMBER)
    cache = vk.calibrate(here.spec, here.cache, jnp.asarray(queries), jnp.asarray(positions))
    here = here._replace(cache=cache).calibrated(z=0.3)
    answers = held_out.answer(here.spec, here.cache, jnp.asarray(queries), jnp.asarray(positions))
    for i in range(NUMBER):
        _, stats = vk.attend(here.spec, upto(here, positions[:, i]), queries[:, i])
        assert_array_equal(answers.rows[:, i], stats.fetched)
    assert answers.rows.sum() > 0


def test_counts_by_hand():
    yes, no = np.ones((1, 2, 2), bool), np.zeros((1, 2, 2), bool)
    hard, own = no.copy(), no.copy()
    hard[0, 0] = True  # both heads of the first query; the second does not count
    own[0, 0, 0] = True
    ahead = np.array([[[0, 3], [0, 0]]])
    answers = Answers(hard | ~hard, own, yes, ahead, own, yes, np.array([[5, 9]]))._replace(hard=hard | no)
    counts = held_out.tally(answers, np.array([[True, False]]), (1, 4))
    want = dict(queries=2, hard=2, covered=1, recalled=2, open=2, open_hard=2, fires=1, top1=1, top4=2)
    assert {name: int(values[0]) for name, values in counts.items()} == want | dict(steps=1, steps_fired=1, rows=5)


def test_queries_that_would_close_a_block_are_refused():
    spec = vk.CacheSpec(8, C - 8, H, 0.3, 64, block=16, rank=2)
    with pytest.raises(ValueError, match="16 queries behind the cut would close a block of 16"):
        held_out.ask(None, spec, None, np.zeros((1, 16), int), np.ones((1, 16), bool))
