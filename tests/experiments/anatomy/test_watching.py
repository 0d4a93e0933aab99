"""What rows receive and what sketches miss, against loops over queries and heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from experiments.anatomy import watching

T, H, R, P = 37, 2, 5, 2  # no whole number of chunks


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly(quick_compilation):
    """All of this module."""


@pytest.fixture(scope="module")
def text():
    rng = np.random.default_rng(0)
    return rng.normal(size=(T, R + P)).astype(np.float32), rng.normal(size=(T, H, R + P)).astype(np.float32)


def test_mass_is_a_sum_over_the_queries_of_a_window(text):
    rows, queries = text
    windows = np.stack([np.arange(T) < 20, np.arange(T) >= 35]).astype(np.float32)
    received = jax.jit(functools.partial(watching.received, scale=0.7, sinks=3))
    mass, first = received(rows, queries, windows)
    wanted, sinks = np.zeros((2, T)), np.zeros(T)
    for t in range(T):
        for query in queries[t]:
            weights = np.exp(0.7 * rows[: t + 1] @ query)
            weights /= weights.sum()
            wanted[:, : t + 1] += windows[:, t, None] * weights
            sinks[t] += weights[:3].sum() / H
    assert_allclose(mass, wanted, atol=1e-5)
    assert_allclose(first, sinks, atol=1e-5)
    assert_allclose(mass.sum(1), [20 * H, 2 * H], rtol=1e-5)


def test_pooling_counts_zeros_beyond_the_ends():
    assert_allclose(watching.pooled(jnp.array([[3.0, 0, 0, 6]]), 3), [[1, 1, 2, 2]])


residuals = jax.jit(functools.partial(watching.residuals, latent=R, rank=2))


def test_residuals_are_what_the_projection_leaves(text):
    rows, queries = text
    fitted, asked = queries[:10], queries[10:]
    found = residuals(rows, fitted, asked)
    samples = fitted[..., :R].reshape(-1, R).astype(np.float64)
    basis = np.linalg.eigh(np.cov(samples.T))[1][:, -2:]
    delta, part, full = [], [], []
    for query in asked.reshape(-1, R + P):
        score, sketch = rows[:, :R] @ query[:R], (rows[:, :R] @ basis) @ (basis.T @ query[:R])
        delta, part, full = [*delta, score - sketch], [*part, score], [*full, rows @ query]
    assert_allclose(found["sketch residual"], np.linalg.norm(delta) / np.linalg.norm(part), rtol=1e-4)
    spread = np.sqrt(np.var(delta, axis=1).sum() / np.var(full, axis=1).sum())
    assert_allclose(found["sketch spread"], spread, rtol=1e-4)
    left = np.linalg.norm(rows[:, :R] - rows[:, :R] @ basis @ basis.T, axis=1) / np.linalg.norm(rows[:, :R], axis=1)
    assert_allclose([found[f"eta p{share}"] for share in (10, 50, 90)], np.quantile(left, (0.1, 0.5, 0.9)), rtol=1e-4)


def test_nothing_is_left_at_full_rank_or_without_content(text):
    rows, queries = text
    every = jax.jit(functools.partial(watching.residuals, latent=R, rank=R))
    assert every(rows, queries[:10], queries[10:])["sketch residual"] < 1e-5
    queries = np.where(np.arange(R + P) < R, 0, queries)
    assert residuals(rows, queries[:10], queries[10:])["sketch residual"] == 0
