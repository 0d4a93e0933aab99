"""Every selector against an example worked out by hand: R = P = 1, one head, eight rows, two sinks."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tests.baselines.tiny import CONTENT, SPEC, kept, observed
from vestige_jax import baselines

pytestmark = pytest.mark.usefixtures("quick_compilation")

FITTING = [name for name in baselines.SELECTORS if name != "nuke" and not name.startswith("sigma_pca")]
"""Selectors that fill a budget, of any branch; the others have tests of their own."""


def test_sigma_is_the_distance_of_the_branch_from_its_mean():
    # kappa = 1 keeps the mean, 2: distances 1 1 1 7 1 4 1 2. Rows 0 and 1 are sinks.
    score = baselines.SELECTORS["sigma"]()(observed())
    assert_allclose(score[0], [1, 1, 1, 7, 1, 4, 1, 2], rtol=1e-6)
    assert kept("sigma") == [0, 1, 3, 5, 7]


def test_full_row_sees_the_latent_too():
    # With content (0,0,0,0,8,0,0,0), mean 1, row 4 is sqrt(7^2 + 1^2) away and row 5 sqrt(1 + 4^2).
    content = (0, 0, 0, 0, 8, 0, 0, 0)
    score = baselines.SELECTORS["full_row"]()(observed(content=content))
    assert_allclose(score[0, 3:6], np.sqrt([1 + 49, 49 + 1, 1 + 16]), rtol=1e-6)
    assert kept("full_row", content=content, count=2) == [0, 1, 3, 4]


def test_norm_is_the_length_of_the_branch():
    assert kept("norm") == [0, 1, 3, 5, 7]
    assert kept("norm", branch=(9, 9, 1, 1, 1, -2, 1, 1), count=1) == [0, 1, 5]


def test_streaming_keeps_sinks_and_the_last():
    assert kept("streaming") == [0, 1, 5, 6, 7]


@pytest.mark.parametrize(
    "count, rows",
    [
        (1, [0, 1, 2]),
        (2, [0, 1, 2, 5]),  # six rows in two runs of three
        (3, [0, 1, 2, 4, 6]),
        (4, [0, 1, 2, 4, 6, 7]),  # runs of 2, 2, 1, 1
        (6, list(range(8))),
    ],
)
def test_stride_cuts_the_rows_into_equal_runs(count, rows):
    mask = baselines.SELECTORS["stride"]()(observed(count=count))[0] > 0
    assert [0, 1, *np.flatnonzero(mask)] == rows


def test_h2o_keeps_what_was_attended_most():
    mass = (9, 9, 1, 5, 2, 4, 3, 0)
    assert kept("h2o", mass=mass) == [0, 1, 3, 5, 6]


def test_h2o_recent_gives_half_of_the_budget_to_the_last_rows():
    mass = (9, 9, 1, 5, 2, 4, 3, 0)
    assert kept("h2o_recent", mass=mass) == [0, 1, 3, 5, 7]  # floor(3 / 2) = 1 recent row, then 5 and 4
    assert kept("h2o_recent", mass=mass, count=2) == [0, 1, 3, 7]


def test_snapkv_sums_softmax_and_averages_over_neighbours():
    # Branches (0, 0, 0, ln 2, 0, 0, 0, 0). Query 2 at scale .5 and position 3 sees rows 0-3: weights 1/5 1/5 1/5 2/5.
    # Query 0 (zero) at position 7 sees all eight: 1/8 each. A query at position -1 does not exist.
    branch = (0, 0, 0, math.log(2), 0, 0, 0, 0)
    queries = ((0, 9), (0, 2), (0, 0))
    facts = dict(branch=branch, content=(0,) * 8, queries=queries, positions=(-1, 3, 7))
    total = np.array([0.2, 0.2, 0.2, 0.4, 0, 0, 0, 0]) + 1 / 8
    raw = baselines.SELECTORS["snapkv"](kernel=1)(observed(**facts))
    assert_allclose(raw[0], total, rtol=1e-6)
    padded = np.pad(total, 3)
    pooled = baselines.SELECTORS["snapkv"]()(observed(**facts))
    assert_allclose(pooled[0], [padded[i : i + 7].sum() / 7 for i in range(8)], rtol=1e-6)


def test_snapkv_takes_the_last_queries_of_its_window():
    facts = dict(queries=((0, 9), (0, 0)), positions=(6, 7))
    only_last = baselines.SELECTORS["snapkv"](window=1, kernel=1)(observed(**facts))
    assert_allclose(only_last[0], [1 / 8] * 8, rtol=1e-6)


def test_snapkv_refuses_what_it_cannot_pool():
    with pytest.raises(ValueError, match="kernel=4 must be odd"):
        baselines.SELECTORS["snapkv"](kernel=4)
    with pytest.raises(ValueError, match="window=0"):
        baselines.SELECTORS["snapkv"](window=0)


def test_random_depends_on_the_seed_alone():
    assert kept("random", seed=1) == kept("random", seed=1, branch=CONTENT)
    assert len({tuple(kept("random", seed=seed)) for seed in range(8)}) > 3


def test_random_keeps_every_row_equally_often():
    counts = np.zeros(8)
    for seed in range(300):
        counts[kept("random", seed=seed)] += 1
    assert (counts[:2] == 300).all()
    assert_allclose(counts[2:] / 300, 0.5, atol=0.12)  # four standard errors


@pytest.mark.parametrize("name", FITTING)
@pytest.mark.parametrize("count, closed", [(1, 8), (3, 8), (3, 0)])
def test_every_selector_keeps_the_sinks_and_exactly_the_budget(name, count, closed):
    mask = baselines.select(baselines.SELECTORS[name](), observed(count=count, closed=closed))
    assert mask.sum() == min(closed, 2 + count)
    assert mask[0, :2].all() == (closed > 0)


@pytest.mark.parametrize("name", FITTING)
def test_a_budget_larger_than_the_prefix_keeps_what_exists(name):
    # Rows 6 and 7 are padding, and would win by every score that looks at them.
    roomy = dataclasses.replace(SPEC, budget=8)
    behind = (0, 0, 0, 0, 0, 0, 9, 9)
    facts = dict(count=8, closed=6, spec=roomy, branch=(1, 1, 1, 1, 1, 1, 99, 99), mass=behind, repeat=behind)
    assert kept(name, **facts) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", [name for name in FITTING if name not in ("random", "stride", "streaming")])
def test_ties_go_to_the_lower_position(name):
    # Two of the tied rows 2, 3, ... are kept; full averaging windows tie for snapkv only in the middle of the rows.
    tied = dict(content=(0,) * 8, branch=(1,) * 8, mass=(1,) * 8, repeat=(1,) * 8, count=2)
    first = {"snapkv": [0, 1, 3, 4], "snapkv_w64": [0, 1, 3, 4], "h2o_recent": [0, 1, 2, 7]}
    assert kept(name, **tied) == first.get(name, [0, 1, 2, 3])


def test_a_mask_is_taken_as_it_is():
    nuke = baselines.select(lambda o: o.live & (o.position < 2), observed())
    assert_array_equal(nuke[0], [True, True] + [False] * 6)
    everything = baselines.select(lambda o: jnp.ones_like(o.mass, bool), observed(closed=6))
    assert_array_equal(everything[0], [True] * 6 + [False] * 2)  # but padding is never kept


def test_an_answer_of_the_wrong_shape_is_refused():
    with pytest.raises(ValueError, match="selector's answer has shape"):
        baselines.select(lambda o: o.mass[0], observed())


@pytest.mark.parametrize("name", ["sigma", "vestige", "norm+recall", "random+recall", "dense"])
def test_methods_are_named_by_selector_and_recall(name):
    method = baselines.method(name)
    assert method.name == name
    assert (method.selector is None) == (name == "dense")
    assert method.recall == ("certified" if name in ("vestige", "norm+recall", "random+recall") else "none")


@pytest.mark.parametrize("name", ["h3o", "sigma+", "sigma+pages", "dense+recall", "", "vestige+recall"])
def test_an_unknown_method_lists_the_known_ones(name):
    with pytest.raises(ValueError, match="unknown; choose from dense, vestige, sigma, full_row, norm.*with \\+recall"):
        baselines.method(name)
