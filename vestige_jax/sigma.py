"""sigma: how much of a row's branch its block's low-pass cannot explain (VestigeKV §2).

A row that stands out from its neighbours in the vestigial branch is worth attending before any query exists.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from vestige_jax import checks

Array = jax.Array


def sigma(branch: Array, *, block: int, kappa: int, method: str = "fft") -> Array:
    """High-frequency energy of every row of whole blocks: sigma_u = || r_u - lowpass(r)_u ||.

    Args
      branch [..., S, P], any float dtype, S a multiple of block; each block is filtered on its own, in float32.
      kappa  Fourier bins kept by the low-pass, 2*kappa - 1 < block.
      method 'fft' (jnp.fft), or 'projection': the same low-pass as two matmuls with 2*kappa - 1 trigonometric columns,
        whose only sum over rows is Q^T r; for sharded sequences and for TPUs.
    Returns float32 [..., S]. Raises ValueError for another method, a ragged S, or too large a kappa.
    """
    checks.floating("branch", branch)
    checks.require(jnp.ndim(branch) >= 2, f"branch has shape {jnp.shape(branch)}; expected [..., S, P]")
    checks.require(method in _LOWPASS, f"method={method!r} is unknown; choose from {list(_LOWPASS)}")
    checks.require(kappa >= 1 and 2 * kappa - 1 < block, f"kappa={kappa} must satisfy 1 <= 2*kappa-1 < block={block}")
    *lead, rows, width = branch.shape
    checks.require(rows % block == 0, f"branch has {rows} rows; only whole blocks of block={block} are scored")
    blocks = branch.astype(jnp.float32).reshape(*lead, rows // block, block, width)
    smooth = _LOWPASS[method](blocks, kappa)
    return jnp.linalg.norm(blocks - smooth, axis=-1).reshape(*lead, rows)


def _lowpass_fft(blocks: Array, kappa: int) -> Array:
    spectrum = jnp.fft.rfft(blocks, axis=-2)
    low = jnp.arange(spectrum.shape[-2])[:, None] < kappa
    return jnp.fft.irfft(jnp.where(low, spectrum, 0), n=blocks.shape[-2], axis=-2)


def _lowpass_projection(blocks: Array, kappa: int) -> Array:
    columns = jnp.asarray(trigonometric_basis(blocks.shape[-2], kappa))
    weights = jnp.einsum("sj,...sp->...jp", columns, blocks, precision=lax.Precision.HIGHEST)
    return jnp.einsum("sj,...jp->...sp", columns, weights, precision=lax.Precision.HIGHEST)


def trigonometric_basis(block: int, kappa: int) -> np.ndarray:
    """Orthonormal constant, cosines and sines of the kappa lowest bins: float32 [block, 2*kappa - 1]."""
    angle = 2 * np.pi * np.outer(np.arange(block), np.arange(1, kappa)) / block
    wave = np.sqrt(2 / block) * np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    return np.concatenate([np.full((block, 1), block**-0.5), wave], axis=1).astype(np.float32)


_LOWPASS = {"fft": _lowpass_fft, "projection": _lowpass_projection}
