"""Grouped-query attention without positional encoding: one cache row [v_1 .. v_G | k_1 .. k_G] per token.

Written as rows that all heads share, it is a special case of latent attention. The latent holds the values of all G key
heads, the branch their keys. The absorbed query of head h is zero on the latent and holds q_h in the slot of its key
head; of the mean of latents, head h reads the slot of its key head. So rows are kept for all heads or for none, and
sigma of the branch is the high-frequency energy of the keys.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array

from vestige_jax.models.cached import Cached, causal
from vestige_jax.models.config import ModelConfig
from vestige_jax.models.layers import kernel


class GQA(Cached):
    """The layer: H query heads, G key heads of width K; consecutive query heads share a key head. R = P = G K."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype):
        width, heads, groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        size = config.head_dim
        self.q_proj = kernel(rngs, (width, heads, size), width, dtype)
        self.k_proj = kernel(rngs, (width, groups, size), width, dtype)
        self.v_proj = kernel(rngs, (width, groups, size), width, dtype)
        self.o_proj = kernel(rngs, (heads, size, width), heads * size, dtype)
        self.heads, self.groups = heads, groups
        self.latent, self.scale = config.latent_dim, config.softmax_scale

    def __call__(self, x: Array) -> Array:
        """Dense causal attention of [B,T,D]."""
        key, value = (
            jnp.repeat(self._heads(x, weight), self.heads // self.groups, axis=2)
            for weight in (self.k_proj, self.v_proj)
        )
        return self._output(causal(self._heads(x, self.q_proj), key, value, self.scale), x.dtype)

    def _query(self, x: Array, positions: Array) -> Array:
        """[..., D] -> [..., H, K]."""
        return self._heads(x, self.q_proj)

    def _rows(self, x: Array, positions: Array) -> Array:
        """[..., D] -> [..., C]: the values of all key heads, then their keys."""
        parts = [self._heads(x, weight).reshape(*x.shape[:-1], -1) for weight in (self.v_proj, self.k_proj)]
        return jnp.concatenate(parts, axis=-1)

    def _absorb(self, query: Array) -> Array:
        """[..., H, K] -> float32 [..., H, C]: zeros but for the slot of the key head."""
        mine = self._key_head()[:, None] == jnp.arange(self.groups)
        slots = jnp.where(mine[..., None], query.astype(jnp.float32)[..., None, :], 0)
        branch = slots.reshape(*query.shape[:-1], -1)
        return jnp.concatenate([jnp.zeros_like(branch), branch], axis=-1)

    def _value_norms(self, rows: Array) -> Array:
        """|| v_u || of the key head of each head."""
        values = rows[..., : self.latent].reshape(*rows.shape[:-1], self.groups, -1).astype(jnp.float32)
        return jnp.linalg.norm(values, axis=-1)[..., self._key_head()]

    def _expand(self, latent: Array, dtype) -> Array:
        """[..., H, R] -> [..., D] through the slot of the key head and o_proj."""
        slots = latent.reshape(*latent.shape[:-1], self.groups, -1)
        return self._output(slots[..., jnp.arange(self.heads), self._key_head(), :], dtype)

    def _key_head(self) -> Array:
        """int32 [H], which key head a query head reads."""
        return jnp.arange(self.heads) // (self.heads // self.groups)

    def _heads(self, x: Array, weight: nnx.Param) -> Array:
        return jnp.einsum("...d,dhk->...hk", x, weight[...])

    def _output(self, heads: Array, dtype) -> Array:
        return jnp.einsum("...hk,hkd->...d", heads.astype(dtype), self.o_proj[...])
