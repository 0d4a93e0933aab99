"""Recall by pages as a second tier: which rows a step attends, on ragged caches, against brute force."""

import dataclasses

import numpy as np
import pytest

import vestige_jax as vj
from tests import oracle_attention as oracle
from tests.scenes import CAPACITY, LENGTHS, SCALE, asked, scene
from tests.sources import R
from vestige_jax import baselines
from vestige_jax.baselines.arkvale import ArkVale
from vestige_jax.baselines.pages import Pages
from vestige_jax.baselines.quest import Quest

KINDS = [Quest(8), ArkVale(8), ArkVale(5, "mean", "cuboid")]

pytestmark = pytest.mark.usefixtures("quick_compilation")


def score(kind: Pages, rows, query) -> np.ndarray:
    """Score of one page's rows [W, C] for query [H, C], by the equation: [H]."""
    low, high = rows.min(0), rows.max(0)
    if isinstance(kind, Quest):
        return np.array([sum(max(x * a, x * b) for x, a, b in zip(q, high, low, strict=True)) for q in query])
    centre = (low + high) / 2
    if kind.volume == "sphere":
        radius = max(np.sqrt(((row - centre) ** 2).sum()) for row in rows)
        return np.array([q @ centre + radius * np.sqrt((q**2).sum()) for q in query])
    side = np.mean([abs(row - centre) for row in rows], axis=0)
    ends = list(zip(centre + side, centre - side, strict=True))
    return np.array([sum(max(x * a, x * b) for x, (a, b) in zip(q, ends, strict=True)) for q in query])


def pages_of(kind: Pages, here, b: int, query, most: int) -> list[int]:
    """The pages that heads choose in turn, the better score of a round first, until there are `most`."""
    sequence = here.sequence(b)
    archived = np.flatnonzero(sequence.tier == oracle.ARCHIVED)
    pages = sorted({u // kind.page for u in archived})
    if not pages:
        return []
    table = np.array([score(kind, sequence.rows[archived[archived // kind.page == g]], query) for g in pages])
    best = table.max(1)
    rank = np.argsort(np.argsort(-table, axis=0, kind="stable"), axis=0).min(1)
    return [pages[i] for i in sorted(range(len(pages)), key=lambda i: (rank[i], -best[i]))[:most]]


@pytest.fixture(scope="module")
def filled():
    """One cache for all: a rule changes nothing that is stored."""
    return scene(0)


def under(here, kind, **policy):
    return here.under(recall=kind, **(dict(fetch=17, trace=True) | policy))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_step_attends_tier_1_tail_and_the_best_pages(filled, kind):
    here = under(filled, kind)  # two pages of 8, or three of 5 that do not divide a block
    query = asked(0)
    out, stats = vj.attend(here.spec, here.cache, query)
    for b in range(len(LENGTHS)):
        sequence = here.sequence(b)
        chosen = pages_of(kind, here, b, np.asarray(query[b], np.float64), 17 // kind.page)
        fetched = (sequence.tier == oracle.ARCHIVED) & np.isin(np.arange(LENGTHS[b]) // kind.page, chosen)
        attended = fetched | (sequence.tier != oracle.ARCHIVED)
        exact = oracle.attention(query[b], sequence.rows[attended], R, SCALE)
        np.testing.assert_allclose(out[b], exact.out, atol=1e-5)
        closed = int(here.cache.archive.closed[b])
        np.testing.assert_array_equal(stats.rows[b, :closed], fetched[:closed])
        assert not stats.rows[b, closed:].any()
        assert stats.fetched[b] == stats.fired[b] == fetched.sum() and not stats.overflowed[b]
        assert stats.attended[b] == pytest.approx(attended.mean())


def test_enough_pages_are_dense_attention(filled):
    here = under(filled, Quest(8), fetch=CAPACITY, overflow="truncate")
    out, stats = vj.attend(here.spec, here.cache, asked(1))
    for b in range(len(LENGTHS)):
        np.testing.assert_allclose(out[b], here.attention(b, asked(1)[b]).out, atol=1e-5)
        assert stats.attended[b] == 1


def test_rows_of_tier_1_are_not_fetched_twice(filled):
    """Whatever is kept, fetched rows are others, and a page whose rows are all kept is no choice."""
    here = under(filled, Quest(8))
    _, stats = vj.attend(here.spec, here.cache, asked(3))
    best = np.flatnonzero(stats.rows[0])[0] // 8
    kept = np.zeros(here.cache.archive.kept.shape, bool)
    kept[:, best * 8 : best * 8 + 8] = True
    cache = vj.keep_set(here.spec, here.cache, kept)
    _, stats = vj.attend(here.spec, cache, asked(3))
    assert not (stats.rows & kept).any() and stats.fetched[0] == 16


def test_a_fetch_smaller_than_a_page_is_refused(filled):
    here = under(filled, Quest(8), fetch=7)
    with pytest.raises(ValueError, match="fetch=7 rows hold no page of 8"):
        vj.attend(here.spec, here.cache, asked(0))


@pytest.mark.parametrize("name", ["quest", "arkvale", "arkvale_mean", "arkvale_cuboid", "arkvale_cuboid_mean"])
def test_methods_with_pages(name):
    method = baselines.method(f"random+{name}")
    assert isinstance(method.recall, Pages) and method.recall == baselines.method(f"sigma+{name}").recall
    assert method.recall.page == (16 if name == "quest" else 32)
    assert method.recall.bound != name.endswith("_mean")


def test_rules_are_equal_by_value_so_that_nothing_compiles_twice(filled):
    here = under(filled, Quest(8))
    assert hash(here.spec) == hash(dataclasses.replace(here.spec, recall=Quest(8)))
    assert dataclasses.replace(here.spec, recall=Quest(4)) != here.spec
