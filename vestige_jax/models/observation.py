"""What selectors may know of prompt queries, added up chunk by chunk: nothing of T x T is ever held (VestigeKV §5).

A layer's state carries one of two observers. `Observation` sums what the prompt's own queries look at; `Rereading`
keeps the largest weight that any query gives a position, while a prompt is read a second time.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

import vestige_jax as vk


class Chunk(NamedTuple):
    """One prefill chunk as a layer saw it."""

    queries: Array  # [B, T, H, C] absorbed, unscaled
    positions: Array  # [B, T] int32
    real: Array  # [B, T] bool, not padding
    values: Array  # [B, T, H] float32, ||W_UV,h c|| of the chunk's own rows
    received: Array  # [B, S] float32, softmax weight each position got: summed, or the largest, as the observer asks


def _observer(cls):
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


@_observer
class Observation:
    """Sums over all prompt queries of one layer; S positions up to the capacity."""

    mass: Array  # [B, S] float32, softmax weight of a position, summed over queries and heads
    asked: Array  # [B] float32, queries seen
    mean: Array  # [B, H, C] float32, mu_h of the absorbed queries
    scatter: Array  # [B, H, C, C] float32, sum of (q - mu_h)(q - mu_h)^T
    values: Array  # [B, S, H] float32, ||W_UV,h c_u||
    repeat: Array | None = None  # [B, S] float32, the largest weight when the prompt was read again

    most = False
    """`Chunk.received` is a sum."""

    @property
    def covariance(self) -> Array:
        """Sigma_h of the absorbed queries, float32 [B, H, C, C]: divided by their number."""
        return self.scatter / jnp.maximum(self.asked, 1)[:, None, None, None]

    def after(self, chunk: Chunk) -> Observation:
        """With one more chunk. Mean and scatter by Chan's update, which cancels nothing however long the prompt is."""
        number = chunk.real.sum(1, dtype=jnp.float32)
        queries = jnp.where(chunk.real[..., None, None], chunk.queries.astype(jnp.float32), 0.0)
        mean = queries.sum(1) / jnp.maximum(number, 1)[:, None, None]
        away = jnp.where(chunk.real[..., None, None], queries - mean[:, None], 0.0)
        moved, total = mean - self.mean, self.asked + number
        share = number / jnp.maximum(total, 1)
        where = jnp.where(chunk.real, chunk.positions, self.mass.shape[1])  # out of range: dropped
        return dataclasses.replace(
            self,
            mass=self.mass + chunk.received,
            asked=total,
            mean=self.mean + share[:, None, None] * moved,
            scatter=self.scatter
            + _outer("bthc,bthd->bhcd", away, away)
            + (self.asked * share)[:, None, None, None] * _outer("bhc,bhd->bhcd", moved, moved),
            values=self.values.at[jnp.arange(len(number))[:, None], where].set(chunk.values, mode="drop"),
        )


@_observer
class Rereading:
    """The largest softmax weight that any query and head gave a position."""

    peak: Array  # [B, S] float32

    most = True
    """`Chunk.received` is a maximum."""

    def after(self, chunk: Chunk) -> Rereading:
        """With one more chunk."""
        return Rereading(jnp.maximum(self.peak, chunk.received))


def nothing_seen(spec: vk.CacheSpec, batch: int) -> Observation:
    """An Observation before the first token."""
    heads, width = spec.num_heads, spec.row_dim
    zeros = lambda *shape: jnp.zeros((batch, *shape), jnp.float32)  # noqa: E731
    return Observation(
        mass=zeros(spec.capacity),
        asked=zeros(),
        mean=zeros(heads, width),
        scatter=zeros(heads, width, width),
        values=zeros(spec.capacity, heads),
    )


def _outer(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, precision=lax.Precision.HIGHEST)
