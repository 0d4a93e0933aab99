"""The cache in use: append rows, and a decode step that attends exactly the rows that can matter (VestigeKV §3, §4)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import Part, merge
from kernels_pallas.words import select, set_row, take_rows, to_words
from vestige_jax import attention, calibration, checks, partition
from vestige_jax.cache import Cache, Tail, check_layout, length
from vestige_jax.checks import Fault
from vestige_jax.recall import Recalled, recall
from vestige_jax.spec import CacheSpec

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stats:
    """What a step did, per sequence. None but for `fault` when CacheSpec(stats=False)."""

    kept: Array | None  # [B] int32, rows in tier 1
    fired: Array | None  # [B] int32, archived rows whose margin reached s*, uncapped
    fetched: Array | None  # [B] int32, archived rows attended this step (all of them when served dense)
    overflowed: Array | None  # [B] bool, more fired than `fetch`
    clamped: Array | None  # [B] bool, z is z_max: provisional, or too few hard samples
    gate: Array | None  # [B] float32, share of heads whose gate is open
    attended: Array | None  # [B] float32, share of all rows attended this step
    fault: Array  # [B] int32, sticky bits of checks.Fault
    rows: Array | None = None  # [B, A] bool, archived rows attended this step, if CacheSpec(trace=True)


def append(spec: CacheSpec, cache: Cache, rows: Array, lengths: Array | None = None) -> Cache:
    """Append rows; blocks that fill up move to the archive, then one re-rank (§4).

    Args
      rows [B, T, C], any T; lengths int32 [B]: rows past it are ignored (None: all T are real).
    Raises ValueError for a misshaped argument; when values are known, also for lengths outside [0, T], non-finite rows
    and a full cache. Inside jit such a sequence appends nothing and its fault flag is set.
    """
    check_layout(spec, cache)
    rows, batch = jnp.asarray(rows), cache.fault.shape[0]
    checks.shape("rows", rows, (batch, None, spec.row_dim), "[B, T, C]")
    checks.floating("rows", rows)
    time = rows.shape[1]
    lengths = jnp.full(batch, time, jnp.int32) if lengths is None else jnp.asarray(lengths)
    checks.lengths("lengths", lengths, batch, time)
    if checks.concrete(cache, rows, lengths):
        checks.finite("rows", rows, spec.dtype, where=_real(lengths, time))
        _check_capacity(spec, cache, lengths)
    return _append(spec, cache, rows, lengths)


def _check_capacity(spec, cache, added):
    over = [(b, int(n)) for b, n in enumerate(length(cache) + added) if n > spec.capacity]
    checks.require(
        not over, f"capacity={spec.capacity} exceeded: (sequence, tokens) {over}; give CacheSpec a larger capacity"
    )


def _real(lengths, time):
    return jnp.arange(time) < lengths[:, None]


@functools.partial(jax.jit, static_argnames="spec")
def _append(spec, cache, rows, lengths):
    rows = rows.astype(spec.dtype)
    time = rows.shape[1]
    sane = (lengths >= 0) & (lengths <= time)
    finite = (jnp.isfinite(rows).all(-1) | ~_real(lengths, time)).all(-1)
    room = length(cache) + lengths <= spec.capacity
    cache = _flag(cache, (~sane, Fault.LENGTH), (~finite, Fault.NON_FINITE), (sane & ~room, Fault.CAPACITY))
    total = cache.tail.length + jnp.where(sane & finite & room, lengths, 0)
    first = cache.tail.length
    before = cache.archive.closed

    words = to_words(rows, cache.tail.words.shape[-1])

    def one_block(i, cache):
        return partition.close_full(spec, _fill_tail(spec, cache, words, first, total, i))

    cache = lax.fori_loop(0, 1 + total.max() // spec.block, one_block, cache)
    return partition.rerank_closed(spec, before, cache)


def _fill_tail(spec, cache, words, first, total, i) -> Cache:
    """Write into the tail block i of the stream [old tail | rows]; `first` rows were in it, `total` will be."""
    if words.shape[1] == 0:
        return cache
    source = i * spec.block + jnp.arange(spec.block) - first[:, None]
    new = (source >= 0) & (source < (total - first)[:, None])
    incoming = take_rows(words, source)
    filled = jnp.clip(total - i * spec.block, 0, spec.block)
    tail = Tail(
        select(new, incoming, cache.tail.words),
        jnp.where(total >= i * spec.block, filled, cache.tail.length),
    )
    return dataclasses.replace(cache, tail=tail)


def _flag(cache: Cache, *faults) -> Cache:
    bits = cache.fault
    for bad, flag in faults:
        bits = bits | jnp.where(bad, int(flag), 0)
    return dataclasses.replace(cache, fault=bits)


def attend(spec: CacheSpec, cache: Cache, query: Array) -> tuple[Array, Stats]:
    """Attention of one absorbed query per head over attended and recalled rows; nothing is written (§3).

    Args: query [B, H, C], unscaled. Returns out float32 [B, H, R] in latent space, and Stats.
    Raises ValueError for a misshaped query, and for a non-finite one when values are known.
    """
    check_layout(spec, cache)
    query = jnp.asarray(query)
    _check_query(spec, cache, query)
    return _attend(spec, cache, query)


def _check_query(spec, cache, query, active=True):
    checks.shape("query", query, (cache.fault.shape[0], spec.num_heads, spec.row_dim), "[B, H, C]")
    checks.floating("query", query)
    checks.finite("query", query, spec.dtype, where=active)


@functools.partial(jax.jit, static_argnames="spec")
def _attend(spec, cache, query):
    query = query.astype(spec.dtype)
    part = attention.attended(spec, cache, query)
    recalled = None
    serve_dense = length(cache) < spec.activation
    if spec.recall != "none" and spec.archive_rows:
        rule = recall if spec.recall == "certified" else spec.recall
        recalled = rule(spec, cache, query, part)
        part = merge(part, recalled.part)
        if spec.overflow == "dense":
            serve_dense |= recalled.overflowed
    if spec.archive_rows and (spec.activation or (recalled is not None and spec.overflow == "dense")):
        part = lax.cond(
            serve_dense.any(), functools.partial(_swap_dense, spec), lambda *a: a[-1], cache, query, serve_dense, part
        )
    return part.out, _stats(spec, cache, recalled, serve_dense)


def _swap_dense(spec, cache, query, which, part) -> Part:
    full = attention.dense(spec, cache, query)
    return jax.tree.map(lambda d, p: select(which, d, p), full, part)


def _stats(spec, cache, recalled: Recalled | None, serve_dense) -> Stats:
    if not spec.stats:
        return Stats(*[None] * 7, fault=cache.fault)
    none = jnp.zeros_like(cache.fault)
    kept, closed, total = cache.tier1.count, cache.archive.closed, length(cache)
    fetched = jnp.where(serve_dense, closed - kept, none if recalled is None else recalled.fetched)
    tier1 = kept if cache.merged is None else kept + jnp.where(serve_dense, 0, cache.merged.count)
    return Stats(
        kept=kept,
        fired=none if recalled is None else recalled.fired,
        fetched=fetched,
        overflowed=none.astype(bool) if recalled is None else recalled.overflowed,
        clamped=cache.calibration.clamped,
        gate=none.astype(jnp.float32) if recalled is None else recalled.gate.mean(-1, dtype=jnp.float32),
        attended=(tier1 + cache.tail.length + fetched) / jnp.maximum(total, 1),
        fault=cache.fault,
        rows=_traced(spec, cache, recalled, serve_dense) if spec.trace else None,
    )


def _traced(spec, cache, recalled: Recalled | None, serve_dense) -> Array:
    archived = ~cache.archive.kept & (jnp.arange(spec.archive_rows) < cache.archive.closed[:, None])
    fetched = jnp.zeros_like(archived) if recalled is None else recalled.rows
    return jnp.where(serve_dense[:, None], archived, fetched)


def step(
    spec: CacheSpec, cache: Cache, query: Array, row: Array, active: Array | None = None
) -> tuple[Array, Stats, Cache]:
    """One decode step: write the row into the tail, attend with it there, then close a block that is full (§4).

    Args
      query [B, H, C] absorbed and unscaled, row [B, C]; active bool [B]: False writes nothing and returns 0.
    Returns out float32 [B, H, R], Stats and the new cache (donate the old one: an undonated update copies it).
    Raises ValueError as `append` and `attend` do, of active sequences; inside jit a bad row is dropped and flagged.
    """
    check_layout(spec, cache)
    query, row, batch = jnp.asarray(query), jnp.asarray(row), cache.fault.shape[0]
    active = jnp.ones(batch, bool) if active is None else jnp.asarray(active)
    checks.shape("active", active, (batch,), "[B]")
    checks.require(active.dtype == bool, f"active has dtype {active.dtype}; expected bool")
    _check_query(spec, cache, query, active)
    checks.shape("row", row, (batch, spec.row_dim), "[B, C]")
    checks.floating("row", row)
    checks.finite("row", row, spec.dtype, where=active)
    if checks.concrete(cache, active):
        _check_capacity(spec, cache, active.astype(jnp.int32))
    return _step(spec, cache, query, row, active)


@functools.partial(jax.jit, static_argnames="spec")
def _step(spec, cache, query, row, active):
    row, query = row.astype(spec.dtype), query.astype(spec.dtype)
    finite = jnp.isfinite(row).all(-1) & jnp.isfinite(query).all((-1, -2))
    room = length(cache) < spec.capacity
    cache = _flag(cache, (active & ~finite, Fault.NON_FINITE), (active & finite & ~room, Fault.CAPACITY))
    written = active & finite & room
    position = length(cache)
    cache = dataclasses.replace(cache, tail=_write_row(spec, cache.tail, row, written))
    out, stats = _attend(spec, cache, jnp.where(finite[:, None, None], query, 0))
    cache = partition.rerank_closed(spec, cache.archive.closed, partition.close_full(spec, cache, reader=out))
    if spec.calibration == "decode":
        cache = calibration.observe_decode(spec, cache, query, position, written)
    return jnp.where(active[:, None, None], out, 0), stats, cache


def _write_row(spec, tail: Tail, row: Array, written: Array) -> Tail:
    slot = jnp.where(written, tail.length, spec.block)  # out of range: dropped
    return Tail(set_row(tail.words, to_words(row, tail.words.shape[-1]), slot), tail.length + written)
