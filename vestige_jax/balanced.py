"""The balanced index: the best rank-K approximation of the scores, fitted to queries and rows (VestigeKV §8).

With Sigma_q the second moment of the queries, Sigma_c the covariance of the rows and Sigma_q^1/2 Sigma_c^1/2 = U S W^T,

    A = Sigma_q^-1/2 U S^1/2,   B = Sigma_c^-1/2 W S^1/2,   A B^T = I,
    <q, row> = <A_K^T q, B_K^T row> + <A_rest^T q, B_rest^T row>,

split after the K columns of largest S. The row keeps B_K^T row and the length of B_rest^T row.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from vestige_jax import linear

Array = jax.Array

_FLOAT_SLACK = 2e-6  # relative error of a float32 dot product of a row's length, twice, with room

_matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pair:
    """The two maps of a sequence; their first K columns make codes, the others the bound."""

    query: Array  # [B, C, C] float32, A
    row: Array  # [B, C, C] float32, B
    error: Array  # [B] float32: |<q, row> - <A^T q, B^T row>| <= error * ||q|| ||row||, all that float32 does to it


def unit(batch: int, width: int) -> Pair:
    """A = B = I: the provisional index, whose codes are the first K numbers of a row."""
    eye = jnp.tile(jnp.eye(width, dtype=jnp.float32), (batch, 1, 1))
    return Pair(eye, eye, jnp.zeros(batch, jnp.float32))


def fit(queries: Array, mask: Array, covariance: Array, shrinkage: float) -> Pair:
    """The maps for queries [B, N, C] with mask bool [B, N] and rows of covariance [B, C, C].

    Each moment gets `shrinkage` times its mean eigenvalue on the diagonal; one of nothing is taken as I.
    """
    query = _root(_moment(queries, mask), shrinkage)
    row = _root(covariance, shrinkage)
    left, values, right = linear.svd(_matmul(query.root, row.root))
    spread = jnp.sqrt(values)[:, None, :]
    a = _matmul(query.inverse, left) * spread
    b = _matmul(row.inverse, jnp.swapaxes(right, 1, 2)) * spread
    b = _refine(a, b)
    return Pair(a, b, _error(a, b))


def _error(a: Array, b: Array) -> Array:
    """||A B^T - I||, and the rounding of the two mappings, which cancel each other's stretch but not its error."""
    identity = jnp.linalg.norm(_matmul(a, jnp.swapaxes(b, 1, 2)) - jnp.eye(a.shape[1]), axis=(1, 2))
    stretch = linear.svd(a)[1][:, 0] * linear.svd(b)[1][:, 0]  # their spectral norms
    return identity + _FLOAT_SLACK * stretch


def _moment(samples: Array, mask: Array) -> Array:
    """Second moment [B, C, C] of samples [B, N, C] where mask."""
    kept = jnp.where(mask[..., None], samples, 0).astype(jnp.float32)
    return _matmul(jnp.swapaxes(kept, 1, 2), kept) / jnp.maximum(mask.sum(-1), 1)[:, None, None]


@dataclasses.dataclass(frozen=True)
class _Roots:
    root: Array
    inverse: Array


def _root(moment: Array, shrinkage: float) -> _Roots:
    """Symmetric square root of moment [B, C, C], shrunk, and its inverse."""
    width = moment.shape[-1]
    mean = jnp.trace(moment, axis1=1, axis2=2)[:, None, None] / width
    eye = jnp.eye(width, dtype=jnp.float32)
    shrunk = jnp.where(mean > 0, moment / jnp.where(mean > 0, mean, 1) + shrinkage * eye, eye)
    values, vectors = linear.eigh(shrunk)
    scale = jnp.sqrt(jnp.maximum(values, shrinkage))[:, None, :]
    back = jnp.swapaxes(vectors, 1, 2)
    return _Roots(_matmul(vectors * scale, back), _matmul(vectors / scale, back))


def _refine(a: Array, b: Array) -> Array:
    """One Newton step towards B^T = A^-1: the eigenvectors leave an error of 1e-5, and a bound has to be one."""
    inverse = jnp.swapaxes(b, 1, 2)
    return jnp.swapaxes(_matmul(inverse, 2 * jnp.eye(a.shape[1]) - _matmul(a, inverse)), 1, 2)
