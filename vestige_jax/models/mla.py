"""Multi-head latent attention: one row [c | r] per token, shared by all heads.

Training reads it expanded (keys and values per head). Serving reads it absorbed: the query moves into the latent space,
q_h = [W_UK,h^T q_nope | q_branch], attention runs over rows in the VestigeKV cache, and W_UV expands the result.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array

from vestige_jax.models import rope
from vestige_jax.models.cached import Cached, causal
from vestige_jax.models.config import ModelConfig
from vestige_jax.models.layers import RMSNorm, kernel


class MLA(Cached):
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
        self.yarn = config.rope_scaling

    def __call__(self, x: Array) -> Array:
        """Dense causal attention of [B,T,D] with expanded keys and values."""
        positions = jnp.arange(x.shape[1])
        query, rows = self._query(x, positions), self._rows(x, positions)
        expanded = jnp.einsum("btr,rhn->bthn", rows[..., : self.latent], self.kv_b_proj[...])
        branch = jnp.broadcast_to(rows[:, :, None, self.latent :], (*query.shape[:-1], rows.shape[-1] - self.latent))
        key = jnp.concatenate([expanded[..., : self.nope], branch], axis=-1)
        return self._output(causal(query, key, expanded[..., self.nope :], self.scale), x.dtype)

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
        return jnp.concatenate([x[..., :start], rope.rotate(x[..., start:], positions, self.theta, self.yarn)], axis=-1)

    def _absorb(self, query: Array) -> Array:
        """[..., H, N+P] -> float32 [..., H, C]."""
        up = self.kv_b_proj[...][..., : self.nope]
        content = jnp.einsum("...hn,rhn->...hr", query[..., : self.nope], up, preferred_element_type=jnp.float32)
        return jnp.concatenate([content, query[..., self.nope :].astype(jnp.float32)], axis=-1)

    def _value_norms(self, rows: Array) -> Array:
        """|| W_UV,h c ||."""
        up = self.kv_b_proj[...][..., self.nope :]
        values = jnp.einsum("...r,rhv->...hv", rows[..., : self.latent], up, preferred_element_type=jnp.float32)
        return jnp.linalg.norm(values, axis=-1)

    def _expand(self, latent: Array, dtype) -> Array:
        """[..., H, R] -> [..., D] through W_UV and o_proj."""
        up = self.kv_b_proj[...][..., self.nope :]
        return self._output(jnp.einsum("...hr,rhv->...hv", latent.astype(dtype), up), dtype)

    def _output(self, heads: Array, dtype) -> Array:
        return jnp.einsum("...hv,hvd->...d", heads.astype(dtype), self.o_proj[...])
