"""Rows as integer words: moved bit-exactly whatever a backend does to 16-bit floats.

XLA on a CPU slices, gathers and updates a bfloat16 buffer by way of float32, all of it, every time; a TPU copies
groups of rows only from whole tiles. So rows are stored as words (uint16 for bfloat16, uint32 for float32), and become
floats chunk by chunk, where they are read.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from kernels_pallas import blocks

Array = jax.Array

_FLOAT = {"uint16": jnp.bfloat16, "uint32": jnp.float32}
_WORD = {2: jnp.uint16, 4: jnp.uint32}


def word_dtype(dtype) -> jnp.dtype:
    """The unsigned integer as wide as a row dtype."""
    return jnp.dtype(_WORD[jnp.dtype(dtype).itemsize])


def row_words(row_dim: int) -> int:
    """Words in a stored row. On a TPU whole tiles of 128, zeros after the row: it lays out any other width across.

    (Rows of 576 would be stored column by column, and every kernel call would first copy the whole archive.)
    """
    return -(-row_dim // 128) * 128 if blocks.device().platform == "tpu" else row_dim


def branch_copied(row_dtype, code_dtype) -> bool:
    """Whether index entries hold a copy of the branch before the sketch, for the scan to read.

    On a TPU reading it in place costs the tile of 128 numbers that it lies in: 393 bytes a row at 64 + 64 numbers of 16
    bits, and 265 with a copy. A GPU reads it in place for the 265. A dtype that would round it is left alone.
    """
    return blocks.device().platform == "tpu" and jnp.dtype(row_dtype) == jnp.dtype(code_dtype)


def float_dtype(words: Array) -> jnp.dtype:
    """The dtype of the floats whose bits the words are; that of floats is their own."""
    return jnp.dtype(_FLOAT.get(words.dtype.name, words.dtype))


def to_words(rows: Array, width: int | None = None) -> Array:
    """The bits of bfloat16 or float32 rows, with zeros after each up to `width` words."""
    words = lax.bitcast_convert_type(rows, word_dtype(rows.dtype))
    missing = 0 if width is None else width - rows.shape[-1]
    return jnp.pad(words, [(0, 0)] * (rows.ndim - 1) + [(0, missing)]) if missing else words


def to_floats(words: Array) -> Array:
    """bfloat16 of uint16, float32 of uint32; floats stay as they are."""
    return lax.bitcast_convert_type(words, _FLOAT[words.dtype.name]) if words.dtype.name in _FLOAT else words


def widened(words: Array) -> Array:
    """The floats as float32, exactly. Bits of bfloat16 are shifted: a CPU's XLA converts them far more slowly."""
    if words.dtype == jnp.uint16:
        return lax.bitcast_convert_type(words.astype(jnp.uint32) << 16, jnp.float32)
    return to_floats(words).astype(jnp.float32)


def row_major(values: Array) -> Array:
    """values [B, S, ...], row after row in memory. Only inside jit.

    For a buffer in which a loop writes: XLA for a GPU would lay it out to suit a product with what is written, once in
    a block, and transpose all of it before and after the loop, every step.
    """
    return with_layout_constraint(values, Layout(tuple(range(values.ndim))))


def take_rows(values: Array, position: Array) -> Array:
    """values [B, S, ...] at position int [B, W]: [B, W, ...]; positions outside [0, S) are clamped."""
    return jax.vmap(lambda v, p: jnp.take(v, p, axis=0, mode="clip"))(values, position)


def set_row(values: Array, new: Array, slot: Array) -> Array:
    """values [B, S, ...] with row slot[b] of sequence b replaced by new [B, ...]; a slot past S changes nothing."""
    return values.at[jnp.arange(values.shape[0]), slot].set(new, mode="drop")


def select(which: Array, new: Array, old: Array) -> Array:
    """new where which (its axes lead), else old."""
    return jnp.where(which.reshape(*which.shape, *[1] * (new.ndim - which.ndim)), new, old)
