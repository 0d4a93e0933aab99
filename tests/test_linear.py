"""Decompositions of a batch: those of each matrix, and on a CPU never handed over as a batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from vestige_jax import linear


@pytest.fixture
def symmetric():
    matrix = np.random.default_rng(0).normal(size=(2, 3, 5, 5)).astype(np.float32)
    return jnp.asarray(matrix + matrix.swapaxes(-1, -2))


def test_each_matrix_is_put_together_again(symmetric):
    values, vectors = linear.eigh(symmetric)
    assert_allclose(jnp.einsum("...ik,...k,...jk->...ij", vectors, values, vectors), symmetric, atol=1e-5)
    left, singular, right = jax.vmap(linear.svd)(symmetric)
    assert_allclose(jnp.einsum("...ik,...k,...kj->...ij", left, singular, right), symmetric, atol=1e-5)
    assert_allclose(singular, -np.sort(-np.abs(values), axis=-1), atol=1e-5)


@pytest.mark.parametrize("decompose", [linear.eigh, linear.svd])
def test_no_batch_reaches_the_threads_of_a_cpu(decompose, symmetric):
    """Two batches that are decomposed at once can wait for each other for ever, with as many threads as batches."""
    text = (
        jax.jit(lambda x: (decompose(x), jax.vmap(decompose)(x + 1)))
        .trace(symmetric)
        .lower(lowering_platforms=("cpu",))
        .as_text()
    )
    calls = [line for line in text.splitlines() if "@lapack_" in line]
    assert calls and not any("x5x5xf32" in line for line in calls)
    other = jax.jit(decompose).trace(symmetric).lower(lowering_platforms=("cuda",)).as_text()
    assert "2x3x5x5xf32" in next(line for line in other.splitlines() if "custom_call @cu" in line)
