"""The index: a few numbers a row from which every head's score can be bounded (VestigeKV §3).

An index is two linear maps, one for rows and one for queries, and three functions: `fit` the maps, `encode` rows,
`prepare` a query. Kind 'sketch', the paper's: the branch is exact (read in place), the latent is seen through K
orthonormal columns V, and eta is the length of what V misses. Then for every future query

    s = scale * (<q_r, r> + <V^T q_c, V^T c>) + delta,   |delta| <= scale * ||(I - V V^T) q_c|| * eta.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from vestige_jax import checks
from vestige_jax.spec import CacheSpec

Array = jax.Array

_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

# Relative error of a float32 dot product, with room: what the sound mode adds so that it is sound in arithmetic too.
_FLOAT_SLACK = 1e-6


class Probe(NamedTuple):
    """A prepared query: scores of index entries are <branch, r> + <sketch, code> + z * <residual, bound>."""

    branch: Array  # [B, Q, P] float32, scale folded in
    sketch: Array  # [B, Q, K] float32, scale folded in
    residual: Array  # [B, Q, E] float32, scale and 1/sqrt(R - K) folded in


def fit_basis(queries: Array, rank: int, mask: Array | None = None) -> Array:
    """V: the top `rank` eigenvectors of the covariance of the queries, completed where there are too few (§3).

    Args
      queries [N, R], the content part of calibration queries, heads pooled; mask bool [N], False leaves one out.
    Returns float32 [R, K], orthonormal. Where samples span fewer than K directions, unit vectors orthonormalised in
    index order complete it. Raises ValueError for a rank beyond R or misshaped arguments.
    """
    checks.require(jnp.ndim(queries) == 2, f"queries has shape {jnp.shape(queries)}; expected [N, R]")
    samples, width = queries.shape
    checks.require(0 <= rank <= width, f"rank={rank} must lie in [0, R={width}]")
    mask = jnp.ones(samples, bool) if mask is None else mask
    checks.shape("mask", mask, (samples,), "[N]")
    return _fit_basis(queries.astype(jnp.float32), rank, mask)


def _fit_basis(queries, rank, mask):
    if rank == 0:
        return jnp.zeros((queries.shape[1], 0))
    keep = mask[:, None]
    count = jnp.maximum(mask.sum(), 1)
    centred = jnp.where(keep, queries - jnp.where(keep, queries, 0).sum(0) / count, 0)
    values, vectors = jnp.linalg.eigh(_einsum("nr,ns->rs", centred, centred) / count)
    values, vectors = values[::-1][:rank], vectors[:, ::-1][:, :rank]
    noise = 8 * jnp.finfo(jnp.float32).eps * jnp.max(values, initial=0.0)
    spanned = (values > noise) & (jnp.arange(rank) < mask.sum() - 1)  # n centred samples span n - 1 directions
    return _complete(jnp.where(spanned, vectors, 0), spanned.sum())


def _complete(basis: Array, found: Array) -> Array:
    """Fill columns from `found` on with unit vectors orthonormalised against those before, in index order."""
    width, rank = basis.shape

    def unfinished(carry):
        return carry[1] < rank

    def add(carry):
        basis, found, i = carry
        unit = jnp.zeros(width).at[i].set(1.0)
        rest = unit - basis @ (basis.T @ unit)
        rest = rest - basis @ (basis.T @ rest)  # twice is enough
        size = jnp.linalg.norm(rest)
        fits = size > 1e-3  # else (almost) inside the span; as 1e-6 < 1/R, enough unit vectors always pass
        column = basis.at[:, found].set(rest / size)
        return jnp.where(fits, column, basis), found + fits, i + 1

    return lax.while_loop(unfinished, add, (basis, found, 0))[0]


def fit(spec: CacheSpec, queries: Array, mask: Array) -> Array:
    """The maps of one index a sequence: queries [B, N, C], mask bool [B, N] -> V [B, R, K]."""
    content = queries[..., : spec.latent_dim].astype(jnp.float32)
    return jax.vmap(lambda q, m: _fit_basis(q, spec.rank, m))(content, mask)


def encode(spec: CacheSpec, basis: Array, rows: Array) -> tuple[Array, Array]:
    """Index entries of rows [B, S, C]: code [B, S, K] in the sketch dtype, and bound float32 [B, E, S].

    On a TPU the branch comes before the K numbers (`CacheSpec.code_dim`).

    bound[:, 0] is eta = ||c - V V^T c||, computed directly; in the sound mode bound[:, 1] is what rounding the code and
    float32 sums can add, per unit of query length.
    """
    content = rows[..., : spec.latent_dim].astype(jnp.float32)
    projected = _einsum("bsr,brk->bsk", content, basis)
    largest = jnp.finfo(spec.index_dtype).max.astype(jnp.float32)
    code = jnp.clip(projected, -largest, largest).astype(spec.index_dtype)
    bounds = [jnp.linalg.norm(content - _einsum("bsk,brk->bsr", projected, basis), axis=-1)]
    if spec.bound == "sound":
        rounding = jnp.linalg.norm(projected - code.astype(jnp.float32), axis=-1)
        bounds.append(rounding + _FLOAT_SLACK * jnp.linalg.norm(rows.astype(jnp.float32), axis=-1))
    if spec.code_dim > spec.rank:
        branch = rows[..., spec.latent_dim : spec.row_dim].astype(spec.index_dtype)
        code = jnp.concatenate([branch, code], axis=-1)
    return code, jnp.stack(bounds, axis=1)


def sketch(spec: CacheSpec, code: Array) -> Array:
    """The sketch [..., K] of codes, without the branch that a TPU has before it."""
    return code[..., spec.code_dim - spec.rank :]


def prepare(spec: CacheSpec, basis: Array, query: Array) -> Probe:
    """Maps a query [B, Q, C] to what index entries are scored with. The residual is 0 at K = R."""
    query = query.astype(jnp.float32)
    content, branch = query[..., : spec.latent_dim], query[..., spec.latent_dim :]
    sketch = _einsum("bqr,brk->bqk", content, basis)
    missed = jnp.linalg.norm(content - _einsum("bqk,brk->bqr", sketch, basis), axis=-1)
    free = spec.latent_dim - spec.rank
    residual = [missed / math.sqrt(free) if free else jnp.zeros_like(missed)]
    if spec.bound == "sound":
        residual = [missed, jnp.linalg.norm(query, axis=-1)]
    return Probe(spec.scale * branch, spec.scale * sketch, spec.scale * jnp.stack(residual, axis=-1))
