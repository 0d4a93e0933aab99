"""Decompositions of small symmetric and square matrices, that may be wanted in several layers at once.

On a CPU, XLA shares a batch of matrices among its threads, and the thread that shares it out waits for the others. Two
batches in one program can so occupy every thread of a machine with two cores, each waiting for the other, for ever:
there a batch is decomposed matrix by matrix.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import sequential_vmap


def eigh(matrix: Array) -> tuple[Array, Array]:
    """Eigenvalues [..., N], ascending, and eigenvectors [..., N, N] of symmetric matrices [..., N, N]."""
    return lax.platform_dependent(matrix, cpu=_each(_eigh), default=_eigh)


def svd(matrix: Array) -> tuple[Array, Array, Array]:
    """U [..., N, N], singular values [..., N], descending, and V^T [..., N, N] of square matrices [..., N, N]."""
    return lax.platform_dependent(matrix, cpu=_each(_svd), default=_svd)


def _eigh(matrix):
    return tuple(jnp.linalg.eigh(matrix))


def _svd(matrix):
    return tuple(jnp.linalg.svd(matrix))


def _each(decompose):
    """The same, one matrix at a time."""

    def apply(matrix):
        one = sequential_vmap(decompose)
        for _ in range(matrix.ndim - 2):
            one = jax.vmap(one)
        return one(matrix)

    return apply
