"""What kernels need of tiled layouts: padding to tiles, and words seen as floats."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

Array = jax.Array

LANES = 128  # a tile's width
_FLOAT = {"uint16": jnp.bfloat16, "uint32": jnp.float32}


def float_dtype(rows) -> jnp.dtype:
    """The dtype of the rows that are stored in an array of words (or of floats)."""
    return jnp.dtype(_FLOAT.get(rows.dtype.name, rows.dtype))


def floats(words: Array) -> Array:
    """Inside a kernel: the floats whose bits the words are; floats stay as they are."""
    return pltpu.bitcast(words, _FLOAT[words.dtype.name]) if words.dtype.name in _FLOAT else words


def live_block(block: Array, length: Array, size: int) -> Array:
    """The block to read: past the last one that holds a row below `length`, that one again, and nothing is copied."""
    return jnp.minimum(block, jnp.maximum((length + size - 1) // size - 1, 0))


def pad_axis(x: Array, axis: int, size: int) -> Array:
    """x with zeros after it along an axis, up to size."""
    return jnp.pad(x, [(0, size - n if i == axis else 0) for i, n in enumerate(x.shape)])


def round_up(n: int, multiple: int) -> int:
    """The least multiple that holds n."""
    return -(-n // multiple) * multiple
