"""What both Hopper kernels need: how tensor cores lay out registers and shared memory."""

import inspect

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

Array = jax.Array

ROW, COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)  # one value a row of a product, one a column
TILE = 8  # rows that the copy engine moves together
_INDEX = [()] if "idx" in inspect.signature(plgpu.load).parameters else []  # which jax 0.10 still asks for


def load(ref, layout, conflicts: bool = False) -> Array:
    """An array from shared memory in a register layout; the compiler refuses bank conflicts that are not allowed."""
    if not conflicts:
        return plgpu.layout_cast(ref[...], layout)
    return plgpu.load(ref, *_INDEX, layout=layout, optimized=False)


def transposed(ref):
    """The transpose of a matrix in shared memory; no data moves."""
    return ref.transpose((1, 0))


def swizzle(dtype, *extents: int) -> int:
    """Bytes of the widest swizzle that divides all these extents of a buffer, or of what is multiplied at once."""
    return next(s for s in (128, 64, 32) if not any(n * jnp.dtype(dtype).itemsize % s for n in extents))


def tiled(shape: tuple[int, ...], dtype, bytes_: int | None = None):
    """Shared memory as the tensor cores read it, by default with the widest swizzle that divides a row."""
    bytes_ = bytes_ or swizzle(dtype, shape[-1])
    transforms = (plgpu.TilingTransform((TILE, bytes_ // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(bytes_))
    return plgpu.SMEM(shape, dtype, transforms=transforms)
