"""Scan and attend in plain XLA: chunk by chunk, so that no H x S score matrix reaches memory."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import blocks
from kernels_pallas.codes import to_float32
from kernels_pallas.parts import Part, empty, merge
from kernels_pallas.words import float_dtype, to_floats, widened

Array = jax.Array

CHUNK = 1024  # rows a pass holds at once: their scores stay in a core's cache
FEW = 128  # the same for the queries of a decode step on a CPU: the rows, as float32, stay in a core's cache

_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def attend(query: Array, rows: Array, length: Array, *, latent_dim: int, scale: float) -> Part:
    """See `kernels_pallas.attend`."""
    batch, queries, _ = query.shape
    query = query.astype(float_dtype(rows))
    length = jnp.broadcast_to(length.reshape(batch, -1), (batch, queries))

    def fold(part, chunk, start, valid_from):
        slots = start + jnp.arange(chunk.shape[1])
        live = (slots < length[..., None]) & (slots >= valid_from)
        return merge(part, _attend_chunk(query, chunk, live, latent_dim, scale))

    return fold_chunks(fold, empty(batch, queries, latent_dim), length, rows, queries)


def _attend_chunk(query, rows, live, latent_dim, scale) -> Part:
    score = scale * _einsum("bqc,bsc->bqs", query.astype(rows.dtype), rows[..., : query.shape[-1]])
    score = jnp.where(live, score, -jnp.inf)
    peak = score.max(-1)
    weight = jnp.exp(score - jnp.where(jnp.isneginf(peak), 0.0, peak)[..., None])
    total = weight.sum(-1)
    share = weight / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    out = _einsum("bqs,bsr->bqr", share, rows[..., :latent_dim].astype(jnp.float32))
    mean = jnp.sum(share * jnp.where(live, score, 0.0), -1)
    return Part(out, peak + jnp.log(total), peak, mean)


def mass(query: Array, rows: Array, length: Array, lse: Array, *, scale: float) -> Array:
    """Softmax weight each row received, summed over queries: float32 [B, S]. `lse` [B, Q] is of the whole softmax."""
    batch, queries, _ = query.shape
    query = query.astype(float_dtype(rows))
    length = jnp.broadcast_to(length.reshape(batch, -1), (batch, queries))

    def fold(total, chunk, start, valid_from):
        slots = start + jnp.arange(chunk.shape[1])
        live = (slots < length[..., None]) & (slots >= valid_from)
        score = scale * _einsum("bqc,bsc->bqs", query.astype(chunk.dtype), chunk[..., : query.shape[-1]])
        weight = jnp.where(live, jnp.exp(score - lse[..., None]), 0.0).sum(1)
        old = lax.dynamic_slice_in_dim(total, start, chunk.shape[1], 1)
        return lax.dynamic_update_slice_in_dim(total, old + weight, start, 1)

    return fold_chunks(fold, jnp.zeros(rows.shape[:2], jnp.float32), length, rows, queries)


def scan(branch, sketch, residual, threshold, rows, code, bound, member, length, *, latent_dim) -> Array:
    """See `kernels_pallas.scan`."""
    at = latent_dim, branch.shape[-1]

    def fold(margin, chunk, start, valid_from):
        del valid_from  # a row seen twice gets the same margin
        size = chunk.shape[1]
        part = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
        score = _einsum("bhp,bsp->bhs", branch, chunk.astype(jnp.float32))
        score += _einsum("bhk,bsk->bhs", sketch, to_float32(part(code, axis=1)))
        score += _einsum("bhe,bes->bhs", residual, part(bound, axis=2))
        best = (score - threshold[..., None]).max(1)
        live = part(member, axis=1) & (start + jnp.arange(size) < length[:, None])
        return lax.dynamic_update_slice_in_dim(margin, jnp.where(live, best, -jnp.inf), start, 1)

    return fold_chunks(fold, jnp.full(rows.shape[:2], -jnp.inf, jnp.float32), length, rows, branch.shape[1], at)


def fold_chunks(fold, carry, length: Array, rows: Array, queries: int, columns: tuple[int, int] | None = None):
    """Fold `fold(carry, chunk[B, c, C], start, valid_from)` over the chunks of rows [B, S, C] up to the longest length.

    The last chunk is moved back to end at S; `valid_from` is the first slot not folded before. A chunk holds floats, on
    a CPU float32, of all columns or of (first, how many).
    """
    batch, slots, width = rows.shape
    on_cpu = blocks.device().platform == "cpu"
    size = min(FEW if on_cpu and queries <= FEW else CHUNK, slots)
    first, width = columns or (0, width)
    floats = widened if on_cpu else to_floats
    if slots == 0:
        return carry
    if slots == size:
        return fold(carry, floats(rows[..., first : first + width]), 0, 0)

    def body(i, carry):
        start = jnp.minimum(i * size, slots - size)
        chunk = lax.dynamic_slice(rows, (0, start, first), (batch, size, width))
        return fold(carry, floats(chunk), start, i * size)

    return lax.fori_loop(0, -(-jnp.max(length) // size), body, carry)


def most(query: Array, rows: Array, length: Array, lse: Array, *, scale: float) -> Array:
    """The largest softmax weight each row received from any query: float32 [B, S]. Arguments as of `mass`."""
    batch, queries, width = query.shape
    query = query.astype(float_dtype(rows))
    length = jnp.broadcast_to(length.reshape(batch, -1), (batch, queries))

    def fold(best, chunk, start, valid_from):
        slots = start + jnp.arange(chunk.shape[1])
        live = (slots < length[..., None]) & (slots >= valid_from)
        score = scale * _einsum("bqc,bsc->bqs", query.astype(chunk.dtype), chunk[..., :width])
        weight = jnp.where(live, jnp.exp(score - lse[..., None]), 0.0).max(1)
        old = lax.dynamic_slice_in_dim(best, start, chunk.shape[1], 1)
        return lax.dynamic_update_slice_in_dim(best, jnp.maximum(old, weight), start, 1)

    return fold_chunks(fold, jnp.zeros(rows.shape[:2], jnp.float32), length, rows, queries)
