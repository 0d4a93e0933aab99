"""Scan and attend in plain XLA: chunk by chunk, so that no H x S score matrix reaches memory."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import blocks
from kernels_pallas.chunks import Along, fold_chunks
from kernels_pallas.codes import to_float32
from kernels_pallas.parts import Part
from kernels_pallas.words import float_dtype, to_floats, widened

Array = jax.Array

_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def attend(query: Array, rows: Array, length: Array, *, latent_dim: int, scale: float) -> Part:
    """See `kernels_pallas.attend`. A softmax that runs along: nothing is divided before the end."""
    batch, queries, width = query.shape
    query = query.astype(float_dtype(rows))

    def first(sequences):
        nothing = jnp.zeros((sequences, queries), jnp.float32)
        return nothing - jnp.inf, nothing, jnp.zeros((sequences, queries, width), jnp.float32)

    def fold(running, asked, chunks, start, valid_from):
        peak, total, out = running
        chunk = _floats(chunks[0])
        score = _scores(*asked, chunk, start, valid_from, scale)
        top = jnp.maximum(peak, score.max(-1))
        floor = jnp.where(jnp.isneginf(top), 0.0, top)  # nothing seen yet: weights exp(-inf) = 0, never NaN
        weight, fade = jnp.exp(score - floor[..., None]), jnp.exp(peak - floor)
        # All columns: those past the latent cost less than cutting them off, and give the mean score.
        out = fade[..., None] * out + _einsum("bqs,bsc->bqc", weight, chunk.astype(jnp.float32))
        return top, fade * total + weight.sum(-1), out

    asked = query, _by_query(length, queries)
    along = [Along(rows, columns=(0, width))]
    peak, total, out = fold_chunks(fold, first, asked, asked[1], along, queries)
    mean = out / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
    return Part(
        mean[..., :latent_dim], peak + jnp.log(total), peak, scale * jnp.sum(query.astype(jnp.float32) * mean, -1)
    )


def _scores(query, length, chunk, start, valid_from, scale) -> Array:
    """Scaled scores [b, Q, c], -inf where a slot is past the query's length or was seen before."""
    score = scale * _einsum("bqc,bsc->bqs", query.astype(chunk.dtype), chunk)
    slots = start + jnp.arange(chunk.shape[1])
    return jnp.where((slots < length[..., None]) & (slots >= valid_from), score, -jnp.inf)


def _by_query(length: Array, queries: int) -> Array:
    batch = length.shape[0]
    return jnp.broadcast_to(length.reshape(batch, -1), (batch, queries))


def _floats(words: Array) -> Array:
    return widened(words) if blocks.device().platform == "cpu" else to_floats(words)


def mass(query: Array, rows: Array, length: Array, lse: Array, *, scale: float) -> Array:
    """Softmax weight each row received, summed over queries: float32 [B, S]. `lse` [B, Q] is of the whole softmax."""
    return _received(query, rows, length, lse, scale, lambda old, weight: old + weight.sum(1))


def most(query: Array, rows: Array, length: Array, lse: Array, *, scale: float) -> Array:
    """The largest softmax weight each row received from any query: float32 [B, S]. Arguments as of `mass`."""
    return _received(query, rows, length, lse, scale, lambda old, weight: jnp.maximum(old, weight.max(1)))


def _received(query, rows, length, lse, scale, add) -> Array:
    _, queries, width = query.shape
    query = query.astype(float_dtype(rows))

    def fold(total, asked, chunks, start, valid_from):
        *asked, lse = asked
        score = _scores(*asked, _floats(chunks[0]), start, valid_from, scale)
        weight = jnp.where(jnp.isneginf(score), 0.0, jnp.exp(score - lse[..., None]))
        old = lax.dynamic_slice_in_dim(total, start, weight.shape[2], 1)
        return lax.dynamic_update_slice_in_dim(total, add(old, weight), start, 1)

    asked = query, _by_query(length, queries), lse
    along = [Along(rows, columns=(0, width))]
    return fold_chunks(fold, lambda b: jnp.zeros((b, rows.shape[1]), jnp.float32), asked, asked[1], along, queries)


def scan(branch, sketch, residual, threshold, rows, code, bound, member, length, *, latent_dim) -> Array:
    """See `kernels_pallas.scan`. Scores stand row by row: a product then reads rows as they lie."""

    def fold(margin, asked, chunks, start, valid_from):
        del valid_from  # a row seen twice gets the same margin
        branch, sketch, residual, threshold, length = asked
        row, code, bound, member = chunks
        score = _einsum("bsp,bhp->bsh", _floats(row).astype(jnp.float32), branch)
        score += _einsum("bsk,bhk->bsh", to_float32(code), sketch)
        for term in range(bound.shape[1]):
            score += bound[:, term, :, None] * residual[:, None, :, term]
        best = (score - threshold[:, None]).max(-1)
        live = member & (start + jnp.arange(best.shape[1]) < length[:, None])
        return lax.dynamic_update_slice_in_dim(margin, jnp.where(live, best, -jnp.inf), start, 1)

    along = [Along(rows, columns=(latent_dim, branch.shape[2])), Along(code), Along(bound, axis=2), Along(member)]
    asked = branch, sketch, residual, threshold, length
    return fold_chunks(
        fold, lambda b: jnp.full((b, rows.shape[1]), -jnp.inf, jnp.float32), asked, length, along, branch.shape[1]
    )
