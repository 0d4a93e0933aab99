"""What every layer shares: initialisers, RMSNorm, the gated feed-forward part."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array


def kernel(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int, dtype) -> nnx.Param:
    """A weight with standard deviation fan_in^-1/2; kernels are [inputs..., outputs...]."""
    value = jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5
    return nnx.Param(value.astype(dtype))


def rms(x: Array, scale: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32, returned in the dtype of x."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale.astype(jnp.float32)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation of the last axis."""

    def __init__(self, width: int, eps: float, *, dtype):
        self.scale = nnx.Param(jnp.ones((width,), dtype))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        return rms(x, self.scale[...], self.eps)


class FFN(nnx.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, width: int, inner: int, *, rngs: nnx.Rngs, dtype):
        self.gate_proj = kernel(rngs, (width, inner), width, dtype)
        self.up_proj = kernel(rngs, (width, inner), width, dtype)
        self.down_proj = kernel(rngs, (inner, width), inner, dtype)

    def __call__(self, x: Array) -> Array:
        return (jax.nn.silu(x @ self.gate_proj[...]) * (x @ self.up_proj[...])) @ self.down_proj[...]
