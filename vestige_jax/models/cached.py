"""What every attention layer with a VestigeKV cache shares: its state, prefill, calibration, decode, dense attention.

A layer turns tokens into cache rows and absorbed queries, and what attention returns, a mean of latents per head, back
into the residual stream. Everything between those two maps is here.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import vestige_jax as vk
from vestige_jax.models.observation import Chunk, Observation, Rereading, nothing_seen

PROMPT_QUERIES = 64
QUERY_BLOCK = 128  # a block sees no key after its own: short blocks skip nearly half of the scores
QUERY_BLOCKS = 8  # at most, so that a long sequence compiles as fast as a short one


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MLAState:
    """What one layer with a cache, MLA or GQA, carries from token to token.

    cache: the VestigeKV cache of its rows.
    queries: float32 [B, 64, H, C], the last absorbed queries of the prompt, oldest first.
    positions: int32 [B, 64], their positions; -1 where there is none yet.
    seen: what selectors may know of the prompt's queries, if it is observed.
    """

    cache: vk.Cache
    queries: Array
    positions: Array
    seen: Observation | Rereading | None


class Cached(nnx.Module):
    """An attention layer that serves through a VestigeKV cache. A subclass defines how rows and queries come about."""

    def init_state(self, spec: vk.CacheSpec, batch: int, observe: bool) -> MLAState:
        """The state before the first token."""
        width = spec.latent_dim + spec.branch_dim
        queries = jnp.zeros((batch, PROMPT_QUERIES, spec.num_heads, width), jnp.float32)
        positions = jnp.full((batch, PROMPT_QUERIES), -1, jnp.int32)
        seen = nothing_seen(spec, batch) if observe else None
        return MLAState(vk.init(spec, batch), queries, positions, seen)

    def prefill(
        self, spec: vk.CacheSpec, x: Array, state: MLAState, lengths: Array | None = None
    ) -> tuple[Array, MLAState]:
        """Continues from `state` by x [B,T,D]: dense attention over every earlier row, then the rows are appended."""
        positions = vk.length(state.cache)[:, None] + jnp.arange(x.shape[1])
        query, rows = self.project(x, positions)
        most = state.seen is not None and state.seen.most
        out, received = vk.attend_chunk(spec, state.cache, query, rows, lengths, most=most)
        cache = vk.append(spec, state.cache, rows, lengths)
        seen = state.seen
        if seen is not None:
            real = jnp.ones(positions.shape, bool) if lengths is None else jnp.arange(x.shape[1]) < lengths[:, None]
            seen = seen.after(Chunk(query, positions, real, self._value_norms(rows), received))
        queries, at = _last(state.queries, query, lengths), _last(state.positions, positions, lengths)
        return self._expand(out, x.dtype), MLAState(cache, queries, at, seen)

    def calibrate(self, spec: vk.CacheSpec, state: MLAState) -> MLAState:
        """Fits the cache's index to the prompt queries of this layer."""
        cache = vk.calibrate(spec, state.cache, state.queries, state.positions)
        return dataclasses.replace(state, cache=cache)

    def decode(
        self, spec: vk.CacheSpec, x: Array, state: MLAState, active: Array | None = None
    ) -> tuple[Array, MLAState, vk.Stats]:
        """One token x [B,D] through the cache; a sequence with active[b] false writes nothing."""
        positions = vk.length(state.cache)
        query, row = self.project(x, positions)
        out, stats, cache = vk.step(spec, state.cache, query, row, active)
        return self._expand(out, x.dtype), dataclasses.replace(state, cache=cache), stats

    def project(self, x: Array, positions: Array) -> tuple[Array, Array]:
        """What x [..., D] asks and leaves: absorbed queries float32 [..., H, C], unscaled, and cache rows [..., C].

        positions: int32 [...]; position 0 turns nothing, so that zeros give both as they are before rotation.
        """
        return self._absorb(self._query(x, positions)), self._rows(x, positions)

    def _query(self, x: Array, positions: Array) -> Array:
        """[..., D] -> the query [..., H, ·] of each head, before it is absorbed."""
        raise NotImplementedError

    def _rows(self, x: Array, positions: Array) -> Array:
        """[..., D] -> [..., C], the cache row of each token."""
        raise NotImplementedError

    def _absorb(self, query: Array) -> Array:
        """What `_query` returns -> float32 [..., H, C], in the space of rows."""
        raise NotImplementedError

    def _value_norms(self, rows: Array) -> Array:
        """[..., C] -> float32 [..., H], the length of the value that each head reads from a row."""
        raise NotImplementedError

    def _expand(self, latent: Array, dtype) -> Array:
        """[..., H, R], the mean of latents that each head attends -> [..., D]."""
        raise NotImplementedError


def causal(query: Array, key: Array, value: Array, scale: float) -> Array:
    """Causal attention [B,T,H,·], softmax in float32, a block of queries at a time so that [T,T] is not held."""
    length = query.shape[1]
    block = max(QUERY_BLOCK, -(-length // QUERY_BLOCKS))
    parts = [_causal_block(query[:, i : i + block], key, value, scale, i) for i in range(0, length, block)]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _causal_block(query: Array, key: Array, value: Array, scale: float, start: int) -> Array:
    end = start + query.shape[1]
    key, value = key[:, :end], value[:, :end]
    scores = jnp.einsum("bthk,bshk->bhts", query, key, preferred_element_type=jnp.float32) * scale
    visible = jnp.arange(end) <= jnp.arange(start, end)[:, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshv->bthv", weights.astype(value.dtype), value)


def _last(old: Array, new: Array, lengths: Array | None) -> Array:
    """The last entries of old ++ new[:lengths[b]] for every sequence, as many as `old` holds."""
    kept = old.shape[1]
    joined = jnp.concatenate([old, new.astype(old.dtype)], axis=1)
    if lengths is None:
        return joined[:, joined.shape[1] - kept :]
    where = lengths[:, None] + jnp.arange(kept)
    return jnp.take_along_axis(joined, where.reshape(*where.shape, *[1] * (old.ndim - 2)), axis=1)
