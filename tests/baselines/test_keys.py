"""Selectors that look at rows alone, by hand: Knorm, KeyDiff, sigma of a narrow branch, and the control nuke."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import vestige_jax as vk
from tests.baselines.tiny import SPEC, kept, observed
from vestige_jax import baselines
from vestige_jax.baselines.sigma_pca import sigma_pca

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROWS = np.random.default_rng(0).normal(size=(8, 2))
TURN = np.array([[0.6, -0.8], [0.8, 0.6]])


def score(name, rows):
    content, branch = np.asarray(rows).T
    return np.asarray(baselines.SELECTORS[name]()(observed(content=content, branch=branch))[0])


def test_knorm_keeps_the_shortest_rows():
    # Lengths sqrt 26, 1, 1, 9, 1, 2, 1, 4; rows 0 and 1 are sinks.
    assert kept("knorm") == [0, 1, 2, 4, 6]
    assert_allclose(score("knorm", [(3, 4)] * 8), [-5] * 8, rtol=1e-6)


def test_knorm_sees_lengths_only():
    assert_allclose(score("knorm", ROWS @ TURN), score("knorm", ROWS), rtol=1e-5)
    assert_allclose(score("knorm", -2 * ROWS), 2 * score("knorm", ROWS), rtol=1e-5)


def test_keydiff_keeps_what_differs_from_the_mean_direction():
    # Seven rows point along the latent and one along the branch: the anchor is (7, 1) / sqrt 50.
    rows = [(2, 0)] * 3 + [(0, 5)] + [(1, 0)] * 4
    assert_allclose(score("keydiff", rows), np.array([7, 7, 7, 1, 7, 7, 7, 7]) / -math.sqrt(50), rtol=1e-6)
    assert kept("keydiff", content=(2, 2, 2, 0, 1, 1, 1, 1), branch=(0, 0, 0, 5, 0, 0, 0, 0), count=1) == [0, 1, 3]


def test_keydiff_sees_directions_only():
    lengths = np.random.default_rng(1).uniform(0.1, 9, size=(8, 1))
    assert_allclose(score("keydiff", lengths * ROWS), score("keydiff", ROWS), rtol=1e-5)
    assert_allclose(score("keydiff", ROWS @ TURN), score("keydiff", ROWS), rtol=1e-4)


def test_keydiff_takes_the_mean_over_rows_that_exist():
    content, branch = ROWS.T
    facts = dict(closed=6, content=content, branch=branch)
    far = facts | dict(branch=(*branch[:6], 99, -99))
    few = np.asarray(baselines.SELECTORS["keydiff"]()(observed(**facts))[0, :6])
    assert_array_equal(few, baselines.SELECTORS["keydiff"]()(observed(**far))[0, :6])


def test_nuke_keeps_the_sinks_alone():
    assert kept("nuke") == [0, 1]
    assert kept("nuke", closed=0) == []
    assert kept("nuke", spec=dataclasses.replace(SPEC, sinks=0)) == []


# Branches about (10, 20): T along (.6, .8), where they vary most, and S across it, uncorrelated with T.
T, S = np.array([5, -5, 3, -3, 1, -1, 2, -2]), np.array([1, 1, -1, -1, 1, 1, -1, -1])


def branched(closed=8, width=2):
    spec = vk.CacheSpec(1, width, 1, 0.5, 8, block=8, kappa=1, sinks=2, budget=3, rank=1, dtype=jnp.float32)
    branch = np.array([10, 20]) + T[:, None] * [0.6, 0.8] + S[:, None] * [0.8, -0.6]
    rows = jnp.asarray(np.concatenate([np.zeros((8, 1)), branch], axis=1), jnp.float32)[None]
    return dataclasses.replace(observed(closed=closed), rows=rows, spec=spec)


def test_one_dimension_of_the_branch_is_the_one_that_varies_most():
    # kappa = 1 takes the mean away: sigma of T is |T|, of the whole branch sqrt(T^2 + S^2).
    whole = baselines.SELECTORS["sigma"]()
    assert_allclose(sigma_pca(1)(branched())[0], abs(T), rtol=1e-5)
    assert_allclose(sigma_pca(2)(branched())[0], np.sqrt(T**2 + 1), rtol=1e-5)
    assert_allclose(sigma_pca(2)(branched())[0], whole(branched())[0], rtol=1e-5)


def test_a_width_beyond_the_branch_is_refused():
    with pytest.raises(ValueError, match="width=4 must be at most branch_dim=2"):
        baselines.SELECTORS["sigma_pca4"]()(branched())
    with pytest.raises(ValueError, match="width=0"):
        sigma_pca(0)


def test_directions_are_those_of_rows_that_exist():
    spec = dataclasses.replace(branched().spec, capacity=16)
    seen = branched()
    padded = jnp.pad(seen.rows, ((0, 0), (0, 8), (0, 0)), constant_values=50.0)
    padded = dataclasses.replace(seen, rows=padded, spec=spec)
    assert_allclose(sigma_pca(1)(padded)[0, :8], abs(T), rtol=1e-5)
