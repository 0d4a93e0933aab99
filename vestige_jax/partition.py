"""Which tier every row lives in: blocks close, all closed rows are re-ranked, tier 1 is copied anew (VestigeKV §2).

Invariant: every written position is in exactly one of kept, tail, archive; nothing is deleted or rounded again.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels_pallas.blocks import device
from kernels_pallas.words import row_major, select, set_row, take_rows
from vestige_jax import checks
from vestige_jax import index as indexing
from vestige_jax.cache import Cache, Tier1, check_layout, length
from vestige_jax.control import after, when
from vestige_jax.sigma import sigma
from vestige_jax.spec import CacheSpec, keep_count

Array = jax.Array

EMPTY, KEPT, TAIL, ARCHIVED = range(4)


def keep(sigma: Array, closed: Array, *, ratio: float | None, budget: int | None = None, sinks: int) -> Array:
    """The keep set: the first `sinks` rows and the top m of the other closed rows, ties to the lower position (§2).

    m = max(1, floor(ratio * closed + 1/2)), or `budget`.

    Args
      sigma [..., S] any score, higher is kept; closed int32 [...]: rows u < closed exist.
    Returns bool [..., S]. Raises ValueError for a ratio outside (0, 1], for ratio and budget both given, or neither,
    and for misshaped arguments.
    """
    checks.require((ratio is None) != (budget is None), f"ratio={ratio!r}, budget={budget!r}: give exactly one of them")
    checks.require(ratio is None or 0 < ratio <= 1, f"ratio={ratio!r} must lie in (0, 1]")
    checks.require(budget is None or budget >= 1, f"budget={budget!r} must be at least 1")
    checks.require(sinks >= 0, f"sinks={sinks!r} must be at least 0")
    sigma, closed = jnp.asarray(sigma), jnp.asarray(closed)
    checks.require(sigma.ndim >= 1, f"sigma has shape {sigma.shape}; expected [..., S]")
    checks.shape("closed", closed, sigma.shape[:-1], "the leading axes of sigma [..., S]")
    checks.integer("closed", closed)
    slots = sigma.shape[-1]
    counts = np.array([keep_count(n, ratio, budget) for n in range(slots + 1)], np.int32)
    return top_rows(sigma, closed, jnp.asarray(counts)[closed], int(counts[-1]), sinks)


def top_rows(score: Array, closed: Array, count: Array, most: int, sinks: int) -> Array:
    """Sinks and the `count` [...] best other rows below `closed` [...]; `most` bounds count. bool [..., S]."""
    slots = score.shape[-1]
    position = jnp.arange(slots)
    live = position < closed[..., None]
    first = live & (position < sinks)
    if slots == 0:
        return first
    score = jnp.maximum(score.astype(jnp.float32), jnp.finfo(jnp.float32).min)  # -inf would tie with what isn't there
    _, order = lax.top_k(jnp.where(live & ~first, score, -jnp.inf), min(most, slots))
    chosen = jnp.arange(order.shape[-1]) < count[..., None]
    picked = jnp.put_along_axis(jnp.zeros(score.shape, bool), order, chosen, axis=-1, inplace=False)
    return first | (picked & live)


def members(mask: Array, width: int) -> tuple[Array, Array]:
    """Positions of the first `width` true entries of mask [B, S]: ascending int32 [B, width], then S; and how many."""
    running = jnp.cumsum(mask, axis=-1, dtype=jnp.int32)
    find = functools.partial(jnp.searchsorted, v=jnp.arange(1, width + 1), side="left")
    return jax.vmap(find)(running).astype(jnp.int32), jnp.minimum(running[:, -1], width)


def close(spec: CacheSpec, cache: Cache) -> Cache:
    """Close what is full and re-rank every sequence by sigma. Idempotent (§2)."""
    check_layout(spec, cache)
    return _close(spec, cache) if spec.archive_rows else cache


@functools.partial(jax.jit, static_argnames="spec")
def _close(spec, cache):
    return rerank(spec, close_full(spec, cache), jnp.ones(cache.fault.shape, bool))


def close_full(spec: CacheSpec, cache: Cache, reader: Array | None = None) -> Cache:
    """Move every full tail to the archive, with sigma and index entry; no re-rank.

    `reader` is what this step read from the cache: the archive is then written in place once that is known.
    """
    if spec.archive_rows == 0:
        return cache
    full = cache.tail.length == spec.block
    any_full = full.any() if reader is None else after(full.any(), reader)
    return when(any_full, lambda cache: _archive_tails(spec, cache, full), cache)


def _archive_tails(spec: CacheSpec, cache: Cache, full: Array) -> Cache:
    rows, archive, index = cache.tail.rows[..., : spec.row_dim], cache.archive, cache.index
    blocks = spec.archive_rows // spec.block
    target = jnp.where(full, archive.closed // spec.block, blocks)  # `blocks` is out of range: dropped
    score = sigma(rows[..., spec.latent_dim :], block=spec.block, kappa=spec.lowpass_bins, method=_method())
    code, bound = indexing.encode(spec, index.basis, rows, index.step)
    return dataclasses.replace(
        cache,
        tail=dataclasses.replace(cache.tail, length=jnp.where(full, 0, cache.tail.length)),
        archive=dataclasses.replace(
            archive,
            words=row_major(_write_block(archive.words, cache.tail.words, target, blocks)),
            sigma=_write_block(archive.sigma, score, target, blocks),
            closed=archive.closed + jnp.where(full, spec.block, 0),
        ),
        index=dataclasses.replace(
            index,
            code=_write_block(index.code, code, target, blocks),
            branch=_write_block(index.branch, indexing.branch(spec, cache.tail.words), target, blocks),
            bound=jnp.moveaxis(
                _write_block(jnp.moveaxis(index.bound, 1, 2), jnp.moveaxis(bound, 1, 2), target, blocks), 2, 1
            ),
        ),
    )


def _write_block(buffer: Array, values: Array, target: Array, blocks: int) -> Array:
    """buffer [B, blocks*block, ...] with block target[b] of sequence b replaced by values [B, block, ...]."""
    batch = buffer.shape[0]
    split = buffer.reshape(batch, blocks, values.shape[1], *buffer.shape[2:])
    return set_row(split, values, target).reshape(buffer.shape)


def _method() -> str:
    return "projection" if device().platform == "tpu" else "fft"  # a TPU's FFT takes seconds to compile


def rerank_closed(spec: CacheSpec, before: Array, cache: Cache) -> Cache:
    """Re-rank the sequences that closed a block since `before`, their closed counts then: int32 [B]."""
    which = cache.archive.closed > before
    return when(which.any(), lambda cache: rerank(spec, cache, which), cache)


def rerank(spec: CacheSpec, cache: Cache, which: Array) -> Cache:
    """Rank all closed rows of the sequences `which` bool[B] by sigma and rebuild their tier 1 (§2)."""
    if spec.archive_rows == 0:
        return cache
    table = [spec.keep_count(n) for n in range(0, spec.archive_rows + 1, spec.block)]
    count = jnp.asarray(table, jnp.int32)[cache.archive.closed // spec.block]
    ranked = top_rows(cache.archive.sigma, cache.archive.closed, count, table[-1], spec.sinks)
    cache = _fill_tier1(spec, cache, jnp.where(which[:, None], ranked, cache.archive.kept))
    return cache if cache.merged is None else _forget_merged(cache, which)


def _forget_merged(cache: Cache, which: Array) -> Cache:
    merged = dataclasses.replace(cache.merged, count=jnp.where(which, 0, cache.merged.count))
    return dataclasses.replace(cache, merged=merged)


def keep_set(spec: CacheSpec, cache: Cache, kept: Array) -> Cache:
    """Install another keep set and rebuild tier 1; it holds until a block of the sequence closes, or `close` is called.

    Args
      kept bool [B, A]; entries past the closed rows are ignored, and so are those past the M rows that tier 1 holds.
    """
    check_layout(spec, cache)
    checks.shape("kept", kept, (cache.fault.shape[0], spec.archive_rows), "[B, A]")
    checks.require(kept.dtype == bool, f"kept has dtype {kept.dtype}; expected bool")
    return _keep_set(spec, cache, kept) if spec.archive_rows else cache


@functools.partial(jax.jit, static_argnames="spec")
def _keep_set(spec, cache, kept):
    kept &= jnp.arange(spec.archive_rows) < cache.archive.closed[:, None]
    return _fill_tier1(spec, cache, kept & (jnp.cumsum(kept, -1) <= spec.tier1_rows))


def _fill_tier1(spec: CacheSpec, cache: Cache, kept: Array) -> Cache:
    position, count = members(kept, spec.tier1_slots)
    filled = position < spec.archive_rows
    rows = take_rows(cache.archive.words, position)
    tier1 = Tier1(select(filled, rows, jnp.zeros_like(rows)), jnp.where(filled, position, -1), count)
    return dataclasses.replace(cache, tier1=tier1, archive=dataclasses.replace(cache.archive, kept=kept))


def where(spec: CacheSpec, cache: Cache) -> Array:
    """The tier of every position: int8 [B, capacity], 0 empty, 1 kept, 2 tail, 3 archived."""
    check_layout(spec, cache)
    position = jnp.arange(spec.capacity)
    closed, end = cache.archive.closed[:, None], length(cache)[:, None]
    kept = jnp.pad(cache.archive.kept, ((0, 0), (0, spec.capacity - spec.archive_rows)))
    archived_or_kept = jnp.where(kept, KEPT, ARCHIVED)
    tier = jnp.where(position < closed, archived_or_kept, jnp.where(position < end, TAIL, EMPTY))
    return tier.astype(jnp.int8)
