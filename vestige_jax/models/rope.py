"""Rotation of the branch by position: DeepSeek's interleaved layout, with YaRN where a config asks for it."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax import Array


@dataclasses.dataclass(frozen=True)
class Yarn:
    """How a context is stretched `factor` times: slow pairs turn that much slower, fast ones as before.

    Field names are those of `rope_scaling` in a `config.json`. `beta_fast` and `beta_slow` are turns within the
    original length: a pair of more turns than the first keeps its frequency, one of fewer than the second is stretched.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    @property
    def amplitude(self) -> float:
        """Factor on the rotated branch of queries and keys alike."""
        return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)

    @property
    def score(self) -> float:
        """Factor on the softmax scale: the square of 0.1 mscale_all_dim ln(factor) + 1."""
        return self._magnitude(self.mscale_all_dim) ** 2

    def stretched(self, frequency: Array, theta: float) -> Array:
        """The frequencies [P/2] of all pairs, from those without scaling: a linear ramp over the pairs in between."""
        pairs = frequency.shape[0]
        low = max(math.floor(self._pair(self.beta_fast, pairs, theta)), 0)
        high = min(math.ceil(self._pair(self.beta_slow, pairs, theta)), 2 * pairs - 1)
        ramp = jnp.clip((jnp.arange(pairs, dtype=jnp.float32) - low) / max(high - low, 1e-3), 0, 1)
        return frequency / self.factor * ramp + frequency * (1 - ramp)

    def _pair(self, turns: float, pairs: int, theta: float) -> float:
        """The (fractional) pair that makes so many turns within the original length."""
        return pairs * math.log(self.original_max_position_embeddings / (2 * math.pi * turns)) / math.log(theta)

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1 if self.factor > 1 else 1.0


def rotate(branch: Array, positions: Array, theta: float, yarn: Yarn | None = None) -> Array:
    """Rotates pair j, channels (2j, 2j+1), by the angle position * theta^(-2j/P).

    Args:
      branch: [..., P], P even. The last axis is the branch; leading axes must broadcast with `positions`.
      positions: int32 [...], one position for each branch vector.
      theta: base of the geometric series of frequencies.
      yarn: changes frequencies and, unless mscale = mscale_all_dim, the length of the result.

    Returns: the rotated branch in the same layout and dtype; the angles are computed in float32.
    """
    width = branch.shape[-1]
    frequency = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    if yarn is not None:
        frequency = yarn.stretched(frequency, theta)
    angle = positions[..., None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    even, odd = branch[..., 0::2].astype(jnp.float32), branch[..., 1::2].astype(jnp.float32)
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    if yarn is not None and yarn.amplitude != 1:
        turned = turned * yarn.amplitude
    return turned.reshape(branch.shape).astype(branch.dtype)
