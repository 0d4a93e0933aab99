"""Exact attention by parts, merged by log-sum-exp, and dense attention over everything (VestigeKV §1, §3, §4)."""

import jax
import jax.numpy as jnp

from kernels_pallas import Part, attend, attend_list, merge, reference
from vestige_jax import checks
from vestige_jax.cache import Cache, Merged, check_layout, length
from vestige_jax.spec import CacheSpec

Array = jax.Array


def over(spec: CacheSpec, query: Array, rows: Array, count: Array) -> Part:
    """Attention of query [B, Q, C] over the first count (int32 [B] or [B, Q]) of rows [B, S, C]."""
    return attend(query, rows, count, latent_dim=spec.latent_dim, scale=spec.scale, implementation=spec.implementation)


def over_list(spec: CacheSpec, query: Array, rows: Array, position: Array, count: Array) -> Part:
    """Attention of query [B, Q, C] over the rows [B, S, C] at the first count (int32 [B]) of position [B, F]."""
    return attend_list(
        query, rows, position, count, latent_dim=spec.latent_dim, scale=spec.scale, implementation=spec.implementation
    )


def attended(spec: CacheSpec, cache: Cache, query: Array) -> Part:
    """Attention over the attended tier: kept rows, rows that stand for others, and tail."""
    tier1 = over(spec, query, cache.tier1.words, cache.tier1.count)
    part = merge(tier1, over(spec, query, cache.tail.words, cache.tail.length))
    return part if cache.merged is None else merge(part, over_merged(spec, query, cache.merged))


def over_merged(spec: CacheSpec, query: Array, merged: Merged) -> Part:
    """Attention of query [B, Q, C] over merged rows: [0 | q | 1] meets [value | key | bias / scale] (§1)."""
    before, behind = jnp.zeros((*query.shape[:-1], spec.latent_dim)), jnp.ones((*query.shape[:-1], 1))
    asked = jnp.concatenate([before, query.astype(jnp.float32), behind], axis=-1)
    return attend(asked, merged.rows, merged.count, latent_dim=spec.latent_dim, scale=spec.scale, implementation="xla")


def dense(spec: CacheSpec, cache: Cache, query: Array) -> Part:
    """Attention over every row: what the cache serves on overflow and below `activation`."""
    closed = over(spec, query, cache.archive.words, cache.archive.closed)
    return merge(closed, over(spec, query, cache.tail.words, cache.tail.length))


def attend_chunk(
    spec: CacheSpec, cache: Cache, queries: Array, rows: Array, lengths: Array | None = None, *, most: bool = False
) -> tuple[Array, Array]:
    """Dense causal attention of a prefill chunk, called before the chunk is appended (§4).

    Query t sees every row in the cache and the chunk's rows 0..t, so how a prompt is cut into chunks cannot matter.

    Args
      queries [B, T, H, C] absorbed and unscaled, rows [B, T, C], lengths int32 [B]: rows past it are padding.
      most: return the largest weight in place of the sum.
    Returns
      out float32 [B, T, H, R] in latent space (0 at padding), and mass float32 [B, capacity]: the softmax weight each
      position received from the chunk, summed over its queries and heads (jit drops it when unused).
    """
    check_layout(spec, cache)
    queries, rows = jnp.asarray(queries), jnp.asarray(rows)
    checks.shape("queries", queries, (cache.fault.shape[0], None, spec.num_heads, spec.row_dim), "[B, T, H, C]")
    batch, time, heads, _ = queries.shape
    lengths = jnp.full(batch, time, jnp.int32) if lengths is None else jnp.asarray(lengths)
    checks.shape("rows", rows, (batch, time, spec.row_dim), "[B, T, C]")
    checks.lengths("lengths", lengths, batch, time)

    padding = jnp.arange(time) >= lengths[:, None]  # zeroed: a weight of 0 would not silence a NaN
    query = jnp.where(padding[..., None, None], 0, queries.astype(spec.dtype)).reshape(batch, time * heads, -1)
    rows = jnp.where(padding[..., None], 0, rows.astype(spec.dtype))
    real = jnp.repeat(~padding, heads, axis=1)
    causal = jnp.where(real, jnp.repeat(jnp.arange(time) + 1, heads), 0)
    part = merge(dense(spec, cache, query), over(spec, query, rows, causal))
    out = jnp.where(real[..., None], part.out, 0).reshape(batch, time, heads, -1)
    return out, _received(spec, cache, query, rows, causal, jnp.where(real, part.lse, jnp.inf), most)


def _received(spec, cache, query, rows, causal, lse, most) -> Array:
    """Column sums, or maxima, of the softmax with normaliser lse [B, Q], by position."""
    received = reference.most if most else reference.mass
    batch, time, _ = rows.shape
    each = jnp.arange(batch)[:, None]
    tail_at = cache.archive.closed[:, None] + jnp.arange(spec.block)
    chunk_at = length(cache)[:, None] + jnp.arange(time)
    total = jnp.zeros((batch, spec.capacity), jnp.float32)
    total = total.at[:, : spec.archive_rows].add(
        received(query, cache.archive.words, cache.archive.closed, lse, scale=spec.scale)
    )
    tail = received(query, cache.tail.words, cache.tail.length, lse, scale=spec.scale)
    chunk = received(query, rows, causal, lse, scale=spec.scale)
    return total.at[each, tail_at].add(tail, mode="drop").at[each, chunk_at].add(chunk, mode="drop")
