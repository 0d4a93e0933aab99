"""Calibration: from real queries, the index basis, the conformal z and the entropy gate (VestigeKV §3).

A query is *hard* for a head when its best visible row is archived. z is the conformal quantile of how many bound units
the index must add so that the hard queries' rows fire; the gate spares heads whose attention is as concentrated as that
of almost no hard query.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import codes
from kernels_pallas.blocks import XLA
from kernels_pallas.words import select, set_row, take_rows, to_floats
from vestige_jax import checks
from vestige_jax import index as indexing
from vestige_jax.cache import Cache, Index, check_layout
from vestige_jax.control import when
from vestige_jax.spec import CacheSpec

Array = jax.Array

_GATE_MOST = 0.6  # a gate that passes more than this share of all samples is no gate: always open
_NEVER = -1e30  # stands for z = -inf: finite, so that 0 * z stays 0

DECODE_STEPS = (8, 16, 32, 64)


class Samples(NamedTuple):
    """One head of one calibration query each; Q = N * H of them, as seen by exact attention."""

    mask: Array  # [B, Q] bool
    peak: Array  # [B, Q] float32, s*: best score over the attended tier
    peak_at: Array  # [B, Q] int32, its position
    entropy: Array  # [B, Q] float32 nats, of the softmax over the attended tier
    best: Array  # [B, Q] float32, best score over the archive
    target: Array  # [B, Q] int32, its position

    @property
    def hard(self) -> Array:
        """bool [B, Q]: the best visible row is archived (ties to the lower position)."""
        ahead = (self.best > self.peak) | ((self.best == self.peak) & (self.target < self.peak_at))
        return self.mask & (self.best > -jnp.inf) & ahead


def calibrate(spec: CacheSpec, cache: Cache, queries: Array, positions: Array) -> Cache:
    """Fit the basis to the queries, rebuild the index of every closed row, set z and the gate (§3).

    Args
      queries [B, N, H, C] real absorbed queries, unscaled (cache rows used as queries are never hard).
      positions int32 [B, N]: where each was asked; it sees rows at positions <= it; -1 leaves a query out.
    Returns the cache with one basis, z and threshold a sequence; `clamped` where hard samples were too few.
    Raises ValueError for misshaped or non-finite queries, or positions that are not integers.
    """
    check_layout(spec, cache)
    queries, positions = jnp.asarray(queries), jnp.asarray(positions)
    batch = cache.fault.shape[0]
    checks.shape("queries", queries, (batch, None, spec.num_heads, spec.row_dim), "[B, N, H, C]")
    checks.require(queries.shape[1] > 0, "queries has N=0; expected at least one query (position -1 ignores it)")
    checks.floating("queries", queries)
    checks.shape("positions", positions, (batch, queries.shape[1]), "[B, N]")
    checks.positions("positions", positions, spec.capacity)
    checks.finite("queries", queries, spec.dtype, where=positions >= 0)
    return _calibrate(spec, cache, queries, positions)


@functools.partial(jax.jit, static_argnames="spec")
def _calibrate(spec, cache, queries, positions):
    batch, count, heads, _ = queries.shape
    query = queries.astype(spec.dtype).reshape(batch, count * heads, -1)
    position = jnp.repeat(positions, heads, axis=1)
    finite = jnp.isfinite(query).all(-1)
    query = jnp.where(finite[..., None], query, 0)
    cache = refit(spec, cache, query, (position >= 0) & finite)
    samples = observe(spec, cache, query, jnp.where(finite, position, -1))
    need = required_z(spec, cache, query, samples)
    z, clamped = conformal_z(need, samples.hard, spec)
    threshold = gate_threshold(samples, clamped, spec)
    if spec.bound == "sound":  # nothing to calibrate but the basis
        z, clamped = jnp.full_like(z, spec.provisional_z), jnp.zeros_like(clamped)
        threshold = jnp.full_like(z, -jnp.inf)
    calibration = dataclasses.replace(
        cache.calibration, z=z, threshold=threshold, clamped=clamped, installed=jnp.ones_like(clamped)
    )
    return dataclasses.replace(cache, calibration=calibration)


def refit(spec: CacheSpec, cache: Cache, query: Array, mask: Array, axis: str | None = None) -> Cache:
    """The cache with an index fitted to query [B, Q, C] where mask bool [B, Q], and to its closed rows if balanced.

    `axis` names the mesh axis of a shard_map over which the closed rows of a sequence are spread, its queries are not:
    the rows' moments are summed over it, and every device gets the maps of the first one.
    """
    covariance = row_covariance(spec, cache, axis) if spec.index == "balanced" else None
    basis = indexing.fit(spec, query, mask, covariance)
    if axis:
        first = lax.axis_index(axis) == 0
        basis = jax.tree.map(lambda part: lax.psum(jnp.where(first, part, 0), axis), basis)
    return rebuild(spec, cache, basis, code_steps(spec, cache, basis, axis))


def row_covariance(spec: CacheSpec, cache: Cache, axis: str | None = None) -> Array:
    """Covariance of every sequence's closed rows, float32 [B, C, C], streamed block by block (§8); `axis` as above."""

    def add(sums, rows, exists):
        kept = jnp.where(exists[..., None], rows.astype(jnp.float32), 0)
        products = jnp.einsum("bsc,bsd->bcd", kept, kept, precision=lax.Precision.HIGHEST)
        return sums[0] + products, sums[1] + kept.sum(1)

    width = spec.row_dim
    batch = cache.fault.shape[0]
    sums = _fold_blocks(spec, cache, add, (jnp.zeros((batch, width, width)), jnp.zeros((batch, width))))
    moments = *sums, cache.archive.closed
    products, total, closed = lax.psum(moments, axis) if axis else moments
    count = jnp.maximum(closed, 1)[:, None, None]
    mean = total[..., None] / count
    return products / count - mean * jnp.swapaxes(mean, 1, 2)


def code_steps(spec: CacheSpec, cache: Cache, basis: indexing.Basis, axis: str | None = None) -> Array:
    """The step of each code dimension at which no closed row is clipped: [B, K]; [B, 0] for codes that are floats."""
    if spec.steps == 0:
        return cache.index.step

    def widen(reach, rows, exists):
        projected, _ = indexing.project(spec, basis, rows)
        return jnp.maximum(reach, jnp.where(exists[..., None], jnp.abs(projected), 0).max(1))

    reach = _fold_blocks(spec, cache, widen, jnp.zeros_like(cache.index.step))
    reach = lax.pmax(reach, axis) if axis else reach
    return jnp.where(reach > 0, reach / codes.largest(spec.index_bits), cache.index.step)


def _fold_blocks(spec: CacheSpec, cache: Cache, fold, state):
    """state = fold(state, rows [B, block, C], exists bool [B, block]) over the closed blocks of all sequences."""
    if spec.archive_rows == 0:
        return state

    def one_block(i, state):
        words = lax.dynamic_slice_in_dim(cache.archive.words, i * spec.block, spec.block, 1)
        exists = (i * spec.block < cache.archive.closed)[:, None] & jnp.ones(spec.block, bool)
        return fold(state, to_floats(words)[..., : spec.row_dim], exists)

    return lax.fori_loop(0, cache.archive.closed.max() // spec.block, one_block, state)


def rebuild(spec: CacheSpec, cache: Cache, basis: indexing.Basis, step: Array | None = None) -> Cache:
    """The cache with every closed row's index entry made anew from basis and step, block by block."""
    step = cache.index.step if step is None else step
    if spec.archive_rows == 0:
        return dataclasses.replace(cache, index=dataclasses.replace(cache.index, basis=basis, step=step))

    def one_block(i, index: Index) -> Index:
        start = i * spec.block
        words = lax.dynamic_slice_in_dim(cache.archive.words, start, spec.block, 1)
        code, bound = indexing.encode(spec, basis, to_floats(words)[..., : spec.row_dim], step)
        return Index(
            basis,
            step,
            lax.dynamic_update_slice_in_dim(index.code, code, start, 1),
            lax.dynamic_update_slice_in_dim(index.branch, indexing.branch(spec, words), start, 1),
            lax.dynamic_update_slice_in_dim(index.bound, bound, start, 2),
        )

    start = dataclasses.replace(cache.index, basis=basis, step=step)
    index = lax.fori_loop(0, cache.archive.closed.max() // spec.block, one_block, start)
    return dataclasses.replace(cache, index=index)


def observe(spec: CacheSpec, cache: Cache, query: Array, position: Array) -> Samples:
    """What query [B, Q, C] asked at position [B, Q] attends and misses, with the tiers as they are now.

    A query's own row counts as attended. Rows stream by in chunks; nothing of size Q x S is held.
    """
    fold = functools.partial(_fold_rows, spec, query, position)
    nothing = jnp.full(position.shape, -jnp.inf, jnp.float32)
    nowhere = jnp.full(position.shape, jnp.iinfo(jnp.int32).max, jnp.int32)
    start = (nothing, nowhere, nothing, nowhere, nothing, jnp.zeros_like(nothing))
    archive, tail = cache.archive, cache.tail
    state = _fold_chunks(fold, start, archive.words, archive.kept, archive.closed, jnp.zeros_like(archive.closed))
    everywhere = jnp.ones(tail.words.shape[:2], bool)
    state = _fold_chunks(fold, state, tail.words, everywhere, tail.length, archive.closed)
    peak, peak_at, best, target, lse, mean = state
    entropy = jnp.where(jnp.isneginf(lse), 0.0, lse - mean)
    return Samples(position >= 0, peak, peak_at, entropy, best, target)


def _fold_chunks(fold, state, words, kept, count, offset):
    """Fold over chunks of words [B, S, C]; `count` of them exist, the first at position offset [B]."""
    slots = words.shape[1]
    size = min(XLA.rows, slots)
    if slots == 0:
        return state

    def body(i, state):
        start = jnp.minimum(i * size, slots - size)
        slot = start + jnp.arange(size)
        new = (slot >= i * size) & (slot < count[:, None])  # the last chunk overlaps the one before
        part = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=size, axis=1)
        return fold(state, to_floats(part(words)), part(kept), new, offset[:, None] + slot)

    return lax.fori_loop(0, -(-count.max() // size), body, state)


def _fold_rows(spec, query, position, state, rows, kept, exists, at):
    rows = rows[..., : spec.row_dim]
    peak, peak_at, best, target, lse, mean = state
    score = spec.scale * jnp.einsum(
        "bqc,bsc->bqs", query, rows, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    visible = exists[:, None] & (at[:, None] <= position[..., None])
    attended = visible & (kept[:, None] | (at[:, None] == position[..., None]))
    peak, peak_at = _running_max(peak, peak_at, jnp.where(attended, score, -jnp.inf), at)
    best, target = _running_max(best, target, jnp.where(visible & ~attended, score, -jnp.inf), at)
    new = jax.nn.logsumexp(score, axis=-1, where=attended)
    total = jnp.logaddexp(lse, new)
    floor = jnp.where(jnp.isneginf(total), 0.0, total)
    weighed = jnp.where(attended, jnp.exp(jnp.where(attended, score, 0) - floor[..., None]) * score, 0).sum(-1)
    return peak, peak_at, best, target, total, jnp.exp(lse - floor) * mean + weighed


def _running_max(best, where, score, at):
    """Running maximum and its lowest position."""
    slot = score.argmax(-1)
    value = jnp.take_along_axis(score, slot[..., None], -1)[..., 0]
    found = jnp.take_along_axis(at, slot, 1)
    return jnp.maximum(best, value), jnp.where(value > best, found, where)


def required_z(spec: CacheSpec, cache: Cache, query: Array, samples: Samples) -> Array:
    """z_q = (s* - idx_target) / cert_target: the z at which the target's row would just fire. float32 [B, Q] (§3)."""
    archive, index = cache.archive, cache.index
    probe = indexing.prepare(spec, index.basis, query, index.step)
    if spec.archive_rows == 0:
        return jnp.full(samples.best.shape, jnp.inf)
    at = jnp.clip(samples.target, 0, spec.archive_rows - 1)
    row = to_floats(take_rows(archive.words, at))[..., : spec.row_dim].astype(jnp.float32)
    row = row[..., spec.row_dim - probe.branch.shape[-1] :]
    code = codes.to_float32(indexing.sketch(spec, take_rows(index.code, at)))
    eta = jnp.take_along_axis(index.bound[:, 0], at, axis=1)
    known = (probe.branch * row).sum(-1) + (probe.sketch * code).sum(-1)
    certificate = probe.residual[..., 0] * eta
    short = samples.peak - known
    edge = jnp.where(short <= 0, -jnp.inf, jnp.inf)
    return jnp.where(certificate > 0, short / jnp.where(certificate > 0, certificate, 1), edge)


def conformal_z(need: Array, hard: Array, spec: CacheSpec) -> tuple[Array, Array]:
    """The k-th smallest required z over the n hard samples, k = ceil((n + 1) tau_s), at most z_max (§3).

    need float32 [B, Q], hard bool [B, Q]. Returns z float32 [B] and clamped bool [B]: k > n, so that z = z_max.
    """
    count = hard.sum(-1, dtype=jnp.int32)
    num, den = spec.coverage.numerator, spec.coverage.denominator
    k = ((count + 1) * num + den - 1) // den
    ordered = jnp.sort(jnp.where(hard, need, jnp.inf), axis=-1)
    value = jnp.take_along_axis(ordered, jnp.clip(k - 1, 0, need.shape[-1] - 1)[:, None], -1)[:, 0]
    clamped = k > count
    return jnp.where(clamped, spec.z_max, jnp.clip(value, _NEVER, spec.z_max)).astype(jnp.float32), clamped


def gate_threshold(samples: Samples, clamped: Array, spec: CacheSpec) -> Array:
    """alpha-quantile of the hard samples' entropies, or -inf (always open). float32 [B] nats (§3)."""
    threshold = masked_quantile(samples.entropy, samples.hard, spec.gate_quantile)
    passed = (samples.mask & (samples.entropy > threshold[:, None])).sum(-1)
    always = clamped | (passed > _GATE_MOST * samples.mask.sum(-1))
    return jnp.where(always, -jnp.inf, threshold)


def masked_quantile(values: Array, mask: Array, quantile: float) -> Array:
    """Quantile of values [B, Q] where mask, linearly interpolated; +inf where nothing is masked in. float32 [B]."""
    ordered = jnp.sort(jnp.where(mask, values, jnp.inf), axis=-1)
    last = jnp.maximum(mask.sum(-1) - 1, 0)
    rank = quantile * last.astype(jnp.float32)
    low = jnp.floor(rank).astype(jnp.int32)
    below = jnp.take_along_axis(ordered, low[:, None], -1)[:, 0]
    above = jnp.take_along_axis(ordered, jnp.minimum(low + 1, last)[:, None], -1)[:, 0]
    share = rank - low
    return jnp.where(share > 0, below + share * (above - below), below)


def observe_decode(spec: CacheSpec, cache: Cache, query: Array, position: Array, active: Array) -> Cache:
    """Buffer a decode query [B, H, C] and calibrate at steps 8, 16, 32 and 64, until it holds (§3, mode b)."""
    held = cache.calibration
    slot = jnp.where(active & ~held.installed, held.count, spec.query_buffer)
    held = dataclasses.replace(
        held,
        queries=set_row(held.queries, query.astype(spec.dtype), slot),
        positions=set_row(held.positions, position, slot),
        count=held.count + (slot < spec.query_buffer),
    )
    cache = dataclasses.replace(cache, calibration=held)
    due = (slot < spec.query_buffer) & jnp.isin(held.count, jnp.asarray(DECODE_STEPS))
    return when(due.any(), lambda cache: _try_install(spec, cache, due), cache)


def _try_install(spec: CacheSpec, cache: Cache, due: Array) -> Cache:
    held = cache.calibration
    tried = _calibrate(spec, cache, held.queries, held.positions)
    install = due & (~tried.calibration.clamped | (held.count == DECODE_STEPS[-1]))

    choose = functools.partial(select, install)
    index = jax.tree.map(choose, tried.index, cache.index)
    calibration = jax.tree.map(choose, tried.calibration, held)
    return dataclasses.replace(cache, index=index, calibration=calibration)
