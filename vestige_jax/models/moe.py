"""Mixture of experts: a sigmoid (Kimi) or softmax (DeepSeek) router, and experts that see only their own tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from vestige_jax.models.config import ModelConfig
from vestige_jax.models.layers import FFN, kernel


def route(
    scores: Array, bias: Array | None, k: int, *, renormalize: bool, scaling: float, biased: bool = False
) -> tuple[Array, Array]:
    """Chooses k experts by score + bias and weighs them by the score alone.

    Args:
      scores: float32 [N, E], sigmoid(x W) or softmax(x W).
      bias: float32 [E], the balancing correction: it moves the choice, not the weights. None where there is none.
      renormalize: divide the weights by (their sum + 1e-20).
      scaling: a factor on all weights.
      biased: parity flag. The original remote code adds the bias in place, so its weights carry the bias too.

    Returns: (weights float32 [N, k], experts int32 [N, k]).
    """
    choice = scores if bias is None else scores + bias
    _, experts = jax.lax.top_k(choice, k)
    weights = jnp.take_along_axis(choice if biased else scores, experts, axis=-1)
    if renormalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return weights * scaling, experts


class MoE(nnx.Module):
    """Routed experts plus shared ones. Expert kernels are stacked: w1, w3 [E, D, F], w2 [E, F, D]."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype):
        width, inner, experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
        self.gate = kernel(rngs, (width, experts), width, dtype)
        softmax = config.softmax_router
        self.e_score_correction_bias = None if softmax else nnx.Param(jnp.zeros((experts,), dtype))
        self.w1 = kernel(rngs, (experts, width, inner), width, dtype)
        self.w2 = kernel(rngs, (experts, inner, width), inner, dtype)
        self.w3 = kernel(rngs, (experts, width, inner), width, dtype)
        shared = config.num_shared_experts
        self.shared_experts = FFN(width, inner * shared, rngs=rngs, dtype=dtype) if shared else None
        self.k, self.renormalize = config.num_experts_per_token, config.moe_renormalize
        self.scaling, self.biased = config.routed_scaling_factor, config.biased_router_weights

    def __call__(self, x: Array) -> Array:
        tokens = x.reshape(-1, x.shape[-1])
        weights, experts = self.route(tokens)
        picked = jnp.repeat(tokens, self.k, axis=0)
        out = _grouped(picked, experts.reshape(-1), self.w1[...], self.w2[...], self.w3[...])
        out = jnp.einsum("nkd,nk->nd", out.reshape(*weights.shape, -1).astype(jnp.float32), weights)
        out = out.astype(x.dtype).reshape(x.shape)
        return out if self.shared_experts is None else out + self.shared_experts(x)

    def route(self, tokens: Array) -> tuple[Array, Array]:
        """(weights, experts) of tokens [N, D], computed in float32."""
        logits = tokens.astype(jnp.float32) @ self.gate[...].astype(jnp.float32)
        options = dict(renormalize=self.renormalize, scaling=self.scaling, biased=self.biased)
        if self.e_score_correction_bias is None:
            return route(jax.nn.softmax(logits), None, self.k, **options)
        bias = self.e_score_correction_bias[...].astype(jnp.float32)
        return route(jax.nn.sigmoid(logits), bias, self.k, **options)


def _grouped(x: Array, experts: Array, w1: Array, w2: Array, w3: Array) -> Array:
    """Row i of x [N, D] through the gated layer of expert experts[i].

    Rows are sorted by expert and cut into blocks that belong to one expert each; a loop over the blocks reads one
    expert's kernels at a time. Work and memory follow the number of rows, not rows x experts, and no row sees another.
    """
    rows, count = x.shape[0], w1.shape[0]
    block = _block_size(rows, count)
    blocks = min(rows, rows // block + count)
    sizes = jnp.bincount(experts, length=count)
    needed = -(-sizes // block)
    ends = jnp.cumsum(needed)
    order = jnp.argsort(experts, stable=True)
    # The place of each sorted row in the padded, block-aligned layout.
    rank = jnp.arange(rows) - (jnp.cumsum(sizes) - sizes)[experts[order]]
    place = (ends - needed)[experts[order]] * block + rank
    padded = jnp.zeros((blocks * block, x.shape[1]), x.dtype).at[place].set(x[order])
    owner = jnp.minimum(jnp.searchsorted(ends, jnp.arange(blocks), side="right"), count - 1)

    def one(item):
        part, e = item
        return (jax.nn.silu(part @ w1[e]) * (part @ w3[e])) @ w2[e]

    out = jax.lax.map(one, (padded.reshape(blocks, block, -1), owner)).reshape(blocks * block, -1)
    return jnp.zeros_like(out, shape=(rows, out.shape[1])).at[order].set(out[place])


def _block_size(rows: int, count: int) -> int:
    """A power of two near the mean load of an expert, 8 to 128."""
    return min(128, max(8, 1 << max(0, rows // count).bit_length()))
