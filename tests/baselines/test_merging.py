"""Merging, by hand and by what it promises: identical rows merge exactly, KeepKV leaves its reference query alone."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import vestige_jax as vk
from tests.baselines.tiny import SPEC, observed
from vestige_jax import baselines
from vestige_jax.baselines import clusters
from vestige_jax.baselines.keepkv import keepkv
from vestige_jax.baselines.kmeans import kmeans

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONTENT = (1, 2, 3, 1, 1, 0, 0, 0)
BRANCH = (0, 0, 0, 0, 0, 2, 1, 1)
QUERY = (2, 2)
"""At scale 1/2 a row's score is the sum of its two numbers. Rows 2-4 point along the latent, 5-7 along the branch."""


def merged(merger, **facts):
    """The rows that exist after merging: (value [W, R], key [W, C], bias [W])."""
    rows = merger(observed(**facts))
    count = int(rows.count[0])
    return [np.asarray(x[0, :count], np.float64) for x in rows[:3]]


def attention(query, value, key, bias):
    """Output and log-sum-exp of one query over rows with a bias, in float64."""
    score = SPEC.scale * key @ np.asarray(query, np.float64) + bias
    total = np.log(np.sum(np.exp(score)))
    return np.exp(score - total) @ value, total


def plain(content=CONTENT, branch=BRANCH, closed=8):
    """The closed rows behind the sinks, unmerged."""
    rows = np.stack([content, branch], axis=1)[2:closed].astype(np.float64)
    return rows[:, :1], rows, np.zeros(len(rows))


# k-means


def test_centroids_are_means_and_weigh_as_much_as_their_rows():
    # m = 2 starts from rows 2 and 5 of branches 0 0 0 | 6 6 9.
    value, key, bias = merged(kmeans(), content=(0,) * 8, branch=(1, 1, 0, 0, 0, 6, 6, 9), count=2)
    assert_allclose(key, [[0, 0], [0, 7]])
    assert_allclose(bias, [math.log(3)] * 2, rtol=1e-6)
    assert_array_equal(value, [[0], [0]])


def test_lloyd_moves_rows_between_centroids():
    # From 0 and 5: {0 1 2} {5 6 7}? No: runs start at rows 2 and 5, branches 0 and 1; row 4 joins the second at first.
    facts = dict(content=(0,) * 8, branch=(9, 9, 0, 0.2, 0.8, 1, 9, 9), count=2)
    _, key, _ = merged(kmeans(1), **facts)
    assert_allclose(key[:, 1], [0.1, 4.95])  # {0, .2} and {.8, 1, 9, 9}
    _, key, bias = merged(kmeans(2), **facts)
    assert_allclose(key[:, 1], [0.5, 9])
    assert_allclose(np.exp(bias), [4, 2], rtol=1e-6)


def test_a_centroid_without_rows_is_dropped():
    # m = 3 starts from rows 2, 4 and 6; the first two are equal, and ties go to the first.
    _, key, bias = merged(kmeans(), content=(0,) * 8, branch=(1, 1, 0, 0, 0, 6, 6, 9))
    assert_allclose(key[:, 1], [0, 7])
    assert_allclose(bias, [math.log(3)] * 2, rtol=1e-6)


def test_equal_rows_merge_exactly():
    content, branch = (7, 7, 1, 1, 2, 2, 1, 2), (7, 7, 0, 0, 3, 3, 0, 3)
    value, key, bias = merged(kmeans(), content=content, branch=branch, count=2)
    assert len(key) == 2
    for query in ((1, -2), (0.3, 0.7)):
        ours, exact = attention(query, value, key, bias), attention(query, *plain(content, branch))
        assert_allclose(ours[0], exact[0], rtol=1e-6)
        assert_allclose(ours[1], exact[1], rtol=1e-6)


# KeepKV


def test_carriers_take_the_votes_of_rows_in_their_direction():
    # m = 2: the query looks most at row 2 (score 3) and row 5 (score 2). Weights e^3 e e and e^2 e e.
    value, key, bias = merged(keepkv(), content=CONTENT, branch=BRANCH, queries=(QUERY,), count=2)
    along = (3 * math.e**2 + 2) / (math.e**2 + 2)
    across = (2 * math.e + 2) / (math.e + 2)
    assert_allclose(value[:, 0], [along, 0], rtol=1e-6)
    assert_allclose(bias, [math.log(3)] * 2, rtol=1e-5)
    wanted = [math.log((math.e**3 + 2 * math.e) / 3), math.log((math.e**2 + 2 * math.e) / 3)]
    assert_allclose(key[0], [wanted[0], 0], rtol=1e-5)  # rescaled to this score: by .86 of 2.62
    assert_allclose(key[1], [0, wanted[1]], rtol=1e-5)
    assert wanted[0] < along and wanted[1] < across


def test_a_vote_goes_to_the_nearest_direction():
    # Rows 3 and 4 lie 10 and 80 degrees off the latent.
    turned = [(math.cos(a), math.sin(a)) for a in np.radians([10, 80])]
    content, branch = ((1, 2, 3, *(x[i] for x in turned), 0, 0, 0) for i in range(2))
    branch = (0, 0, 0, *branch[3:5], 2, 1, 1)
    _, _, bias = merged(keepkv(), content=content, branch=branch, queries=(QUERY,), count=2)
    assert_allclose(np.exp(bias), [2, 4], rtol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_reference_query_gets_what_it_got(count):
    rng = np.random.default_rng(count)
    content, branch = rng.normal(size=(2, 8)) * 3
    facts = dict(content=content, branch=branch, count=count, spec=dataclasses.replace(SPEC, budget=4))
    queries = rng.normal(size=(3, 2))
    value, key, bias = merged(keepkv(), queries=queries, positions=(7, 7, 7), **facts)
    assert len(key) == count
    ours, exact = attention(queries.mean(0), value, key, bias), attention(queries.mean(0), *plain(content, branch))
    assert_allclose(ours[0], exact[0], rtol=1e-4)
    assert_allclose(ours[1], exact[1], rtol=1e-5)
    assert (
        abs(attention(-queries.mean(0), value, key, bias)[1] - attention(-queries.mean(0), *plain(content, branch))[1])
        > 0.01
    )


def test_queries_that_do_not_exist_are_left_out_of_the_reference():
    _, key, _ = merged(keepkv(), content=CONTENT, branch=BRANCH, queries=(QUERY,), count=2)
    _, same, _ = merged(keepkv(), content=CONTENT, branch=BRANCH, queries=((9, 9), QUERY), positions=(-1, 8), count=2)
    assert_array_equal(key, same)


def test_a_window_of_no_queries_and_no_iterations_are_refused():
    with pytest.raises(ValueError, match="window=0"):
        keepkv(window=0)
    with pytest.raises(ValueError, match="iterations=0"):
        kmeans(iterations=0)


# Both


@pytest.mark.parametrize("name", baselines.MERGERS)
def test_a_budget_larger_than_the_prefix_merges_nothing(name):
    roomy = dataclasses.replace(SPEC, budget=8)
    content, branch = np.random.default_rng(0).normal(size=(2, 8))
    padded = [(*x[:6], 99, -99) for x in (content, branch)]
    facts = dict(count=8, closed=6, spec=roomy, queries=(QUERY,), content=padded[0], branch=padded[1])
    value, key, bias = merged(baselines.MERGERS[name](), **facts)
    rows = plain(content, branch, closed=6)
    assert_allclose(key, rows[1], rtol=1e-5)
    assert_allclose(value, rows[0], rtol=1e-5)
    assert_allclose(bias, 0, atol=1e-6)


@pytest.mark.parametrize("name", baselines.MERGERS)
@pytest.mark.parametrize("count, closed", [(1, 8), (3, 8), (3, 0)])
def test_no_row_is_lost_or_counted_twice(name, count, closed):
    branch = np.random.default_rng(1).normal(size=8)
    _, _, bias = merged(baselines.MERGERS[name](), count=count, closed=closed, branch=branch, queries=((0, 0),))
    assert len(bias) == min(count, max(0, closed - 2))
    assert_allclose(np.exp(bias).sum(), max(0, closed - 2), rtol=1e-5)


def test_merging_is_a_kind_of_its_own():
    assert baselines.method("kmeans").kind == "merge"
    with pytest.raises(ValueError, match="kmeans merges rows, and none of them is recalled"):
        baselines.method("kmeans+recall")


def test_merged_rows_are_served_with_sinks_and_tail():
    """Through the cache: what a query attends after k-means of equal rows is what it attended before."""
    spec = vk.CacheSpec(
        3, 2, 2, 0.4, 24, block=8, budget=5, sinks=2, merged=5, rank=1, recall="none", dtype=jnp.float32
    )
    rng = np.random.default_rng(0)
    kinds = rng.normal(size=(2, 4, 5))
    kinds[:, :, 0] += 9 * np.arange(4)  # far apart
    rows = kinds[:, [3, 2, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 0, 1, 1, 0]]  # 5 runs and 4 runs start in every kind
    cache = vk.append(spec, vk.init(spec, 2), jnp.asarray(rows, jnp.float32), jnp.array([18, 16]))
    closed = cache.archive.closed
    seen = dataclasses.replace(
        observed(),
        rows=cache.archive.rows,
        closed=closed,
        count=jnp.array([5, 4]),
        spec=spec,
    )
    merged = kmeans()(seen)
    assert merged.count.tolist() == [4, 4]
    compressed = vk.merge_rows(spec, cache, seen.live & ~seen.others, *merged)
    query = jnp.asarray(rng.normal(size=(2, 2, 5)), jnp.float32)
    out, stats = vk.attend(spec, compressed, query)
    for b, length in enumerate((18, 16)):
        score = 0.4 * np.asarray(query[b], np.float64) @ rows[b, :length].T
        weight = np.exp(score) / np.exp(score).sum(-1, keepdims=True)
        assert_allclose(out[b], weight @ rows[b, :length, :3], rtol=1e-4, atol=1e-5)
        assert stats.attended[b] == pytest.approx((2 + 4 + length - 16) / length)


# Groups


def test_groups_are_found_slice_by_slice(monkeypatch):
    monkeypatch.setattr(clusters, "SLICE", 4)
    rng = np.random.default_rng(0)
    rows, centres, offset = rng.normal(size=(2, 10, 3)), rng.normal(size=(2, 5, 3)), rng.normal(size=(2, 5))
    offset[1, 2] = -np.inf
    score = np.einsum("bsd,bwd->bsw", rows, centres) + offset[:, None]
    group = clusters.nearest(*(jnp.asarray(x, jnp.float32) for x in (rows, centres, offset)))
    assert_array_equal(group, score.argmax(-1))
    group = np.array(group)
    group[0, 3] = -1
    sums = clusters.totals(jnp.asarray(rows, jnp.float32), jnp.asarray(group), 5)
    for b in range(2):
        for w in range(5):
            assert_allclose(sums[b, w], rows[b][group[b] == w].sum(0), atol=1e-5)
    top = np.asarray(clusters.largest(jnp.asarray(rows[..., 0], jnp.float32), jnp.asarray(group), 5))
    wanted = [[max(rows[b][group[b] == w][:, 0], default=-np.inf) for w in range(5)] for b in range(2)]
    assert_allclose(top, wanted, rtol=1e-6)
