"""The index: a few numbers a row from which every head's score can be bounded (VestigeKV §3).

An index is two linear maps, one for rows and one for queries, and three functions: `fit` the maps, `encode` rows,
`prepare` a query. A row leaves K numbers, its code, and eta, the length of what the code misses; for every future query

    s = scale * <mapped query, code> + delta,   |delta| <= scale * ||rest of the mapped query|| * eta.

Kind 'sketch', the paper's: the branch is exact (read in place), the latent is seen through K orthonormal columns V.
Kind 'balanced' (§8): K dimensions of the whole row, chosen for queries and rows together (vestige_jax.balanced).
Codes are floats, or whole multiples, in 8 or 4 bits, of a step of their own for each dimension.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import codes, exact
from vestige_jax import balanced, checks, linear
from vestige_jax.spec import CacheSpec

Array = jax.Array

_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

# Relative error of a float32 dot product, with room: what the sound mode adds so that it is sound in arithmetic too.
_FLOAT_SLACK = 1e-6
_DIGIT_ERROR = 16 * exact.DIGIT_ERROR  # the upper half of a byte is multiplied as 16 times its number


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
    values, vectors = linear.eigh(_einsum("nr,ns->rs", centred, centred) / count)
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


Basis = Array | balanced.Pair
"""The maps of a sequence: V [B, R, K] of a sketch, or a balanced pair."""

_PROVISIONAL_SPAN = 4.0
"""What codes are expected to reach before calibration; a latent's numbers have a mean square near 1."""


def provisional(spec: CacheSpec, batch: int) -> tuple[Basis, Array]:
    """The maps before calibration, the first K unit vectors, and the step of each code: [B, K]; [B, 0] for floats."""
    if spec.index == "balanced":
        basis = balanced.unit(batch, spec.row_dim)
    else:
        basis = jnp.tile(jnp.eye(spec.latent_dim, spec.rank, dtype=jnp.float32), (batch, 1, 1))
    return basis, jnp.full((batch, spec.steps), _PROVISIONAL_SPAN / codes.largest(spec.index_bits), jnp.float32)


def fit(spec: CacheSpec, queries: Array, mask: Array, covariance: Array | None = None) -> Basis:
    """The maps of one index a sequence: queries [B, N, C], mask bool [B, N].

    `covariance` [B, C, C] of the closed rows is what a balanced index also needs.
    """
    if spec.index == "balanced":
        return balanced.fit(queries, mask, covariance, spec.shrinkage)
    content = queries[..., : spec.latent_dim].astype(jnp.float32)
    return jax.vmap(lambda q, m: _fit_basis(q, spec.rank, m))(content, mask)


def project(spec: CacheSpec, basis: Basis, rows: Array) -> tuple[Array, Array]:
    """Rows [B, S, C] as the numbers to be coded, float32 [B, S, K], and eta, the length of the rest: [B, S]."""
    rows = rows.astype(jnp.float32)
    if spec.index == "balanced":
        mapped = _einsum("bsc,bcd->bsd", rows, basis.row)
        return mapped[..., : spec.rank], jnp.linalg.norm(mapped[..., spec.rank :], axis=-1)
    content = rows[..., : spec.latent_dim]
    projected = _einsum("bsr,brk->bsk", content, basis)
    return projected, jnp.linalg.norm(content - _einsum("bsk,brk->bsr", projected, basis), axis=-1)


def encode(spec: CacheSpec, basis: Basis, rows: Array, step: Array | None = None) -> tuple[Array, Array]:
    """Index entries of rows [B, S, C]: code [B, S, .] as stored, in units of step [B, K], and bound float32 [B, E, S].

    bound[:, 0] is eta, computed directly, and with it what clipping cut off a code of few bits. In the sound mode the
    other bounds are what rounding, clipping, a kernel's digits and float32 sums can add, per unit of what `prepare`
    puts beside them.
    """
    projected, eta = project(spec, basis, rows)
    code, clipped, rounding = _store(spec, step, projected)
    if spec.copied_branch:
        branch = rows[..., spec.latent_dim : spec.row_dim].astype(code.dtype)
        code = jnp.concatenate([branch, code], axis=-1)
    if spec.bound != "sound":
        return code, (eta + clipped)[:, None]
    size = jnp.linalg.norm(rows.astype(jnp.float32), axis=-1)
    if spec.index == "balanced":
        return code, jnp.stack([eta, rounding, (_FLOAT_SLACK + basis.error[:, None]) * size], axis=1)
    return code, jnp.stack([eta, rounding + _FLOAT_SLACK * size], axis=1)


def sketch(spec: CacheSpec, code: Array) -> Array:
    """Codes as stored [..., .] without the branch that a TPU has before a sketch."""
    return code[..., spec.copied_branch :]


def branch(spec: CacheSpec, words: Array) -> Array:
    """Of rows as stored [B, S, .], what the index copies to scan it there: [B, S, CacheSpec.branch_apart]."""
    return words[..., spec.latent_dim : spec.latent_dim + spec.branch_apart]


def _store(spec: CacheSpec, step: Array | None, projected: Array) -> tuple[Array, Array, Array]:
    """Code as stored; the lengths of what clipping, and of what storing altogether, took from it: [B, S].

    With the latter, of a code of few bits, what a kernel's digits leave out, per unit of the query's largest number.
    """
    if spec.index_bits == 16:
        largest = jnp.finfo(spec.index_dtype).max.astype(jnp.float32)
        code = jnp.clip(projected, -largest, largest).astype(spec.index_dtype)
        rounding = jnp.linalg.norm(projected - code.astype(jnp.float32), axis=-1)
        return code, jnp.zeros_like(rounding), rounding
    step, most = step[:, None], codes.largest(spec.index_bits)
    whole = jnp.clip(jnp.round(projected / step), -most, most)
    clipped = jnp.linalg.norm(jnp.maximum(jnp.abs(projected) - most * step, 0), axis=-1)
    rounding = jnp.linalg.norm(projected - whole * step, axis=-1)
    rounding += _DIGIT_ERROR * step.max(-1) * jnp.abs(whole).sum(-1)
    whole = whole.astype(jnp.int8)
    return codes.pack(whole) if spec.index_bits == 4 else whole, clipped, rounding


def prepare(spec: CacheSpec, basis: Basis, query: Array, step: Array | None = None) -> Probe:
    """Maps a query [B, Q, C] to what index entries are scored with. The residual is 0 where the code misses nothing."""
    query = query.astype(jnp.float32)
    if spec.index == "balanced":
        branch = query[..., :0]
        mapped = _einsum("bqc,bcd->bqd", query, basis.query)
        sketch, missed = mapped[..., : spec.rank], jnp.linalg.norm(mapped[..., spec.rank :], axis=-1)
    else:
        content, branch = query[..., : spec.latent_dim], query[..., spec.latent_dim :]
        sketch = _einsum("bqr,brk->bqk", content, basis)
        missed = jnp.linalg.norm(content - _einsum("bqk,brk->bqr", sketch, basis), axis=-1)
    free = spec.free_dims
    residual = [missed / math.sqrt(free) if free else jnp.zeros_like(missed)]
    if spec.bound == "sound":
        size = jnp.linalg.norm(query, axis=-1)
        mapped_size = [jnp.linalg.norm(sketch, axis=-1)] if spec.index == "balanced" else []
        residual = [missed, *mapped_size, size]
    if spec.index_bits < 16:
        sketch = sketch * step[:, None]
    return Probe(spec.scale * branch, spec.scale * sketch, spec.scale * jnp.stack(residual, axis=-1))
