"""Rotation of the branch by position: DeepSeek's interleaved layout, used by the RoPE twin only."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def rotate(branch: Array, positions: Array, theta: float) -> Array:
    """Rotates pair j, channels (2j, 2j+1), by the angle position * theta^(-2j/P).

    Args:
      branch: [..., P], P even. The last axis is the branch; leading axes must broadcast with `positions`.
      positions: int32 [...], one position for each branch vector.
      theta: base of the geometric series of frequencies.

    Returns: the rotated branch in the same layout and dtype; the angles are computed in float32.
    """
    width = branch.shape[-1]
    frequency = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angle = positions[..., None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    even, odd = branch[..., 0::2].astype(jnp.float32), branch[..., 1::2].astype(jnp.float32)
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(branch.shape).astype(branch.dtype)
