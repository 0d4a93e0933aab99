"""Attention over a set of rows as a mergeable part: the algebra of exact attention by pieces (VestigeKV §3)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class Part(NamedTuple):
    """Softmax attention of Q queries over some rows. The empty part: output 0, lse and peak -inf, mean 0."""

    out: Array  # [B, Q, R] float32, softmax-weighted mean of the rows' latents
    lse: Array  # [B, Q] float32, log-sum-exp of the scaled scores
    peak: Array  # [B, Q] float32, largest scaled score
    mean: Array  # [B, Q] float32, softmax-weighted mean score; the entropy is lse - mean


def empty(batch: int, queries: int, latent_dim: int) -> Part:
    """The part over no rows."""
    nothing = jnp.full((batch, queries), -jnp.inf, jnp.float32)
    return Part(jnp.zeros((batch, queries, latent_dim), jnp.float32), nothing, nothing, jnp.zeros_like(nothing))


def merge(a: Part, b: Part) -> Part:
    """The part over the union of two disjoint sets of rows."""
    lse = jnp.logaddexp(a.lse, b.lse)
    floor = jnp.where(jnp.isneginf(lse), 0.0, lse)  # both empty: weights exp(-inf) = 0, never NaN
    wa, wb = jnp.exp(a.lse - floor), jnp.exp(b.lse - floor)
    return Part(
        wa[..., None] * a.out + wb[..., None] * b.out, lse, jnp.maximum(a.peak, b.peak), wa * a.mean + wb * b.mean
    )
