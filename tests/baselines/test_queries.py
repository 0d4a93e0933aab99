"""Selectors that follow queries, by hand: TOVA, SnapKV's variants, Expected Attention, KVzip."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tests.baselines.tiny import SPEC, kept, observed
from vestige_jax import baselines
from vestige_jax.baselines.expected_attention import logits

pytestmark = pytest.mark.usefixtures("quick_compilation")

LN2 = (0, 0, 0, math.log(2), 0, 0, 0, 0)
"""Branches: by a query (0, 2) at scale 1/2, row 3 weighs twice as much as any other."""


def score(name, seen, **options):
    return np.asarray(baselines.SELECTORS[name](**options)(seen)[0])


def test_tova_is_the_attention_of_the_last_query():
    # It is asked at position 3 and sees rows 0-3. The query before it looks hard at row 5 and does not matter.
    seen = observed(branch=LN2, content=(0, 0, 0, 0, 0, 9, 0, 0), queries=((9, 0), (0, 2)), positions=(6, 3))
    assert_allclose(score("tova", seen), [0.2, 0.2, 0.2, 0.4, 0, 0, 0, 0], rtol=1e-6)


def test_tova_is_a_mean_over_heads():
    seen = observed(branch=LN2, content=(0,) * 8, positions=(3,))
    queries = jnp.array([[[[0.0, 2.0], [0.0, 0.0]]]])  # the second head spreads over the four rows it sees
    seen = dataclasses.replace(seen, queries=queries, spec=dataclasses.replace(SPEC, num_heads=2))
    assert_allclose(score("tova", seen), [0.225, 0.225, 0.225, 0.325, 0, 0, 0, 0], rtol=1e-6)


def test_snapkv_can_take_the_largest_of_its_neighbours():
    facts = dict(branch=LN2, content=(0,) * 8, queries=((0, 2),), positions=(7,))
    one, two = 1 / 9, 2 / 9
    assert_allclose(score("snapkv_max", observed(**facts)), [two] * 7 + [one], rtol=1e-6)  # 7 wide: rows 0 to 6
    near = score("snapkv", observed(**facts), pool="max", kernel=3)
    assert_allclose(near, [one, one, two, two, two, one, one, one], rtol=1e-6)
    five = score("snapkv_k5", observed(**facts))
    assert_allclose(five, np.array([3, 5, 6, 6, 6, 6, 4, 3]) * one / 5, rtol=1e-6)
    with pytest.raises(ValueError, match="pool='mean' must be one of"):
        baselines.SELECTORS["snapkv"](pool="mean")


def test_snapkv_looks_back_64_queries():
    seen = observed(branch=LN2, content=(0,) * 8, queries=((0, 2),) + ((0, 0),) * 63, positions=(7,) * 64)
    even = 1 / 8
    wide, narrow = baselines.SELECTORS["snapkv"](window=64, kernel=1), baselines.SELECTORS["snapkv"](kernel=1)
    assert_allclose(wide(seen)[0], np.array([1, 1, 1, 2, 1, 1, 1, 1]) / 9 + 63 * even, rtol=1e-6)
    assert_allclose(narrow(seen)[0], [32 * even] * 8, rtol=1e-6)
    pooled = lambda rows: np.convolve(np.pad(rows, 3), np.ones(7) / 7, "valid")  # noqa: E731
    assert_allclose(score("snapkv_w64", seen), pooled(np.asarray(wide(seen)[0])), rtol=1e-6)


def test_expected_attention_adds_half_the_variance_and_weighs_by_the_value():
    # mu = (0, 2), Sigma = diag(0, 4), scale 1/2: the logit of branch r is r + r^2 / 2, which is ln 2 for row 3.
    r = math.sqrt(1 + 2 * math.log(2)) - 1
    facts = dict(mean=(0, 2), covariance=((0, 0), (0, 4)), content=(0,) * 8, norms=(1, 1, 1, 1, 6, 1, 1, 1))
    seen = observed(branch=(0, 0, 0, r, 0, 0, 0, 0), **facts)
    assert_allclose(score("expected_attention", seen), np.array([1, 1, 1, 2, 6, 1, 1, 1]) / 9, rtol=1e-6)
    assert kept("expected_attention", branch=(0, 0, 0, r, 0, 0, 0, 0), count=2, **facts) == [0, 1, 3, 4]


def test_expected_attention_is_the_mean_over_gaussian_queries():
    rng = np.random.default_rng(0)
    half = rng.normal(size=(2, 2))
    mean, covariance = rng.normal(size=2), half @ half.T
    seen = observed(branch=rng.normal(size=8), content=rng.normal(size=8), mean=mean, covariance=covariance)
    queries = rng.multivariate_normal(mean, covariance, 400_000)
    exact = np.exp(SPEC.scale * queries @ np.asarray(seen.rows[0], np.float64).T)
    wanted, error = exact.mean(0), exact.std(0) / math.sqrt(len(queries))
    ours = np.exp(np.asarray(logits(seen, seen.query_mean[:, 0], seen.query_covariance[:, 0])[0]))
    assert (abs(ours - wanted) < 5 * error).all() and (5 * error < 0.02 * wanted).all()


def test_expected_attention_is_a_mean_over_heads():
    seen = observed(branch=LN2, content=(0,) * 8)
    two = dict(
        query_mean=jnp.array([[[0.0, 2.0], [0.0, 0.0]]]),
        query_covariance=jnp.zeros((1, 2, 2, 2)),
        value_norms=jnp.stack([jnp.ones((1, 8)), jnp.full((1, 8), 3.0)], axis=-1),
        spec=dataclasses.replace(SPEC, num_heads=2),
    )
    wanted = (np.array([1, 1, 1, 2, 1, 1, 1, 1]) / 9 + 3 / 8) / 2
    assert_allclose(score("expected_attention", dataclasses.replace(seen, **two)), wanted, rtol=1e-6)


def test_kvzip_keeps_what_was_looked_at_when_the_prompt_was_read_again():
    assert kept("kvzip", repeat=(9, 9, 0.1, 0.7, 0.2, 0.9, 0, 0.8)) == [0, 1, 3, 5, 7]


def test_kvzip_needs_the_second_reading():
    with pytest.raises(ValueError, match="'repeat'.* was not observed"):
        kept("kvzip", repeat=None)


def test_one_threshold_for_all_layers():
    # Twice m = 2 rows: the best four of both layers are 8, 7 and 6 of the first and 5 of the second.
    layers = [observed(count=2, repeat=repeat) for repeat in ((9, 9, 8, 0, 7, 0, 6, 1), (9, 9, 0, 5, 0, 4, 0, 0))]
    masks = baselines.share(baselines.SELECTORS["kvzip_global"](), layers)
    assert [np.flatnonzero(mask[0]).tolist() for mask in masks] == [[0, 1, 2, 4, 6], [0, 1, 3]]


def test_ties_over_layers_go_to_the_lower_position_then_the_lower_layer():
    layers = [observed(count=count, repeat=(1,) * 8, closed=closed) for count, closed in ((3, 8), (3, 4))]
    masks = baselines.share(baselines.SELECTORS["kvzip_global"](), layers)  # the second layer has rows 2 and 3 only
    assert [np.flatnonzero(mask[0]).tolist() for mask in masks] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3]]
    with pytest.raises(ValueError, match="selector's answer"):
        baselines.share(baselines.SELECTORS["nuke"](), layers)


def test_a_budget_for_all_layers_larger_than_the_prefix_keeps_what_exists():
    roomy = dataclasses.replace(SPEC, budget=8)
    layers = [observed(count=8, closed=6, spec=roomy, repeat=(0, 0, 0, 0, 0, 0, 9, 9)) for _ in range(2)]
    for mask in baselines.share(baselines.SELECTORS["kvzip_global"](), layers):
        assert_array_equal(mask[0], [True] * 6 + [False] * 2)
