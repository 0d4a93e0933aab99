"""What both Hopper kernels need: how tensor cores lay out registers and shared memory."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

Array = jax.Array

ROW, COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)  # one value a row of a product, one a column
TILE = 8  # rows that the copy engine moves together


def load(ref, layout) -> Array:
    """A vector from shared memory in a register layout."""
    return plgpu.layout_cast(ref[...], layout)


def transposed(ref):
    """The transpose of a matrix in shared memory; no data moves."""
    return ref.transpose((1, 0))


def tiled(shape: tuple[int, ...], dtype):
    """Shared memory as the tensor cores read it: the widest swizzle that divides a row of the buffer."""
    row = shape[-1] * jnp.dtype(dtype).itemsize
    swizzle = next(s for s in (128, 64, 32) if row % s == 0)
    transforms = (plgpu.TilingTransform((TILE, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)
