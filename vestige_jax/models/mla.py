"""Multi-head latent attention: one row [c | r] per token, shared by all heads.

Training reads it expanded (keys and values per head). Serving reads it absorbed: the query moves into the latent space,
q_h = [W_UK,h^T q_nope | q_branch], attention runs over rows in the VestigeKV cache, and W_UV expands the result.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import vestige_jax as vk
from vestige_jax.models import rope
from vestige_jax.models.config import ModelConfig
from vestige_jax.models.layers import RMSNorm, kernel

PROMPT_QUERIES = 64
QUERY_BLOCK = 128  # a block sees no key after its own: short blocks skip nearly half of the scores
QUERY_BLOCKS = 8  # at most, so that a long sequence compiles as fast as a short one


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MLAState:
    """What one MLA layer carries from token to token.

    cache: the VestigeKV cache of its rows.
    queries: float32 [B, 64, H, C], the last absorbed queries of the prompt, oldest first.
    positions: int32 [B, 64], their positions; -1 where there is none yet.
    mass: float32 [B, capacity], softmax weight of a position, summed over prompt queries and heads; or None.
    """

    cache: vk.Cache
    queries: Array
    positions: Array
    mass: Array | None


class MLA(nnx.Module):
    """The layer: projections into and out of the latent, dense attention, attention through the cache."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype):
        width, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
        nope, branch, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.q_proj = kernel(rngs, (width, heads, nope + branch), width, dtype)
        self.kv_a_proj_with_mqa = kernel(rngs, (width, latent + branch), width, dtype)
        self.kv_a_layernorm = RMSNorm(latent, config.kv_a_layernorm_eps, dtype=dtype)
        self.kv_b_proj = kernel(rngs, (latent, heads, nope + value), latent, dtype)
        self.o_proj = kernel(rngs, (heads, value, width), heads * value, dtype)
        self.nope, self.latent, self.scale = nope, latent, config.softmax_scale
        self.theta = config.rope_theta if config.rotated else None

    def __call__(self, x: Array) -> Array:
        """Dense causal attention of [B,T,D] with expanded keys and values."""
        positions = jnp.arange(x.shape[1])
        query, rows = self._query(x, positions), self._rows(x, positions)
        expanded = jnp.einsum("btr,rhn->bthn", rows[..., : self.latent], self.kv_b_proj[...])
        branch = jnp.broadcast_to(rows[:, :, None, self.latent :], (*query.shape[:-1], rows.shape[-1] - self.latent))
        key = jnp.concatenate([expanded[..., : self.nope], branch], axis=-1)
        return self._output(_causal(query, key, expanded[..., self.nope :], self.scale), x.dtype)

    def init_state(self, spec: vk.CacheSpec, batch: int, observe: bool) -> MLAState:
        """The state before the first token."""
        width = spec.latent_dim + spec.branch_dim
        queries = jnp.zeros((batch, PROMPT_QUERIES, spec.num_heads, width), jnp.float32)
        positions = jnp.full((batch, PROMPT_QUERIES), -1, jnp.int32)
        mass = jnp.zeros((batch, spec.capacity), jnp.float32) if observe else None
        return MLAState(vk.init(spec, batch), queries, positions, mass)

    def prefill(
        self, spec: vk.CacheSpec, x: Array, state: MLAState, lengths: Array | None = None
    ) -> tuple[Array, MLAState]:
        """Continues from `state` by x [B,T,D]: dense attention over every earlier row, then the rows are appended."""
        positions = vk.length(state.cache)[:, None] + jnp.arange(x.shape[1])
        query, rows = self._absorb(self._query(x, positions)), self._rows(x, positions)
        out, mass = vk.attend_chunk(spec, state.cache, query, rows, lengths)
        cache = vk.append(spec, state.cache, rows, lengths)
        observed = None if state.mass is None else state.mass + mass
        queries, at = _last(state.queries, query, lengths), _last(state.positions, positions, lengths)
        return self._expand(out, x.dtype), MLAState(cache, queries, at, observed)

    def calibrate(self, spec: vk.CacheSpec, state: MLAState) -> MLAState:
        """Fits the cache's index to the prompt queries of this layer."""
        cache = vk.calibrate(spec, state.cache, state.queries, state.positions)
        return dataclasses.replace(state, cache=cache)

    def decode(
        self, spec: vk.CacheSpec, x: Array, state: MLAState, active: Array | None = None
    ) -> tuple[Array, MLAState, vk.Stats]:
        """One token x [B,D] through the cache; a sequence with active[b] false writes nothing."""
        positions = vk.length(state.cache)
        query, row = self._absorb(self._query(x, positions)), self._rows(x, positions)
        out, stats, cache = vk.step(spec, state.cache, query, row, active)
        return self._expand(out, x.dtype), dataclasses.replace(state, cache=cache), stats

    def _query(self, x: Array, positions: Array) -> Array:
        """[..., D] -> [..., H, N+P], the branch rotated in the RoPE twin."""
        query = jnp.einsum("...d,dhk->...hk", x, self.q_proj[...])
        return self._turn(query, positions[..., None], self.nope)

    def _rows(self, x: Array, positions: Array) -> Array:
        """[..., D] -> [..., C]: the latent normalised, the branch as projected (rotated in the RoPE twin)."""
        rows = x @ self.kv_a_proj_with_mqa[...]
        rows = jnp.concatenate([self.kv_a_layernorm(rows[..., : self.latent]), rows[..., self.latent :]], axis=-1)
        return self._turn(rows, positions, self.latent)

    def _turn(self, x: Array, positions: Array, start: int) -> Array:
        if self.theta is None:
            return x
        return jnp.concatenate([x[..., :start], rope.rotate(x[..., start:], positions, self.theta)], axis=-1)

    def _absorb(self, query: Array) -> Array:
        """[..., H, N+P] -> float32 [..., H, C]."""
        up = self.kv_b_proj[...][..., : self.nope]
        content = jnp.einsum("...hn,rhn->...hr", query[..., : self.nope], up, preferred_element_type=jnp.float32)
        return jnp.concatenate([content, query[..., self.nope :].astype(jnp.float32)], axis=-1)

    def _expand(self, latent: Array, dtype) -> Array:
        """[..., H, R] -> [..., D] through W_UV and o_proj."""
        up = self.kv_b_proj[...][..., self.nope :]
        return self._output(jnp.einsum("...hr,rhv->...hv", latent.astype(dtype), up), dtype)

    def _output(self, heads: Array, dtype) -> Array:
        return jnp.einsum("...hv,hvd->...d", heads.astype(dtype), self.o_proj[...])


def _causal(query: Array, key: Array, value: Array, scale: float) -> Array:
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
