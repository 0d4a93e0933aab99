"""Index codes of 8 and 4 bits: small signed integers, the latter two to a byte.

A code is int8 [..., K], or uint8 [..., K/2] whose low halves hold dimensions [0, K/2) and whose high halves hold
[K/2, K): a kernel unpacks it with shifts alone and never interleaves lanes.
"""

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

PACKED = jnp.uint8
NARROW = (jnp.int8, PACKED)


def largest(bits: int) -> int:
    """The largest magnitude of a code: 127 or 7. The range is symmetric, so that -x is as exact as x."""
    return 2 ** (bits - 1) - 1


def pack(values: Array) -> Array:
    """int8 [..., K] with values in -8..7, K even -> uint8 [..., K/2]."""
    half = values.shape[-1] // 2
    low, high = (lax.bitcast_convert_type(x, PACKED) for x in (values[..., :half], values[..., half:]))
    return (low & 0x0F) | (high << 4)


def unpack(code: Array) -> Array:
    """uint8 [..., K/2] -> int8 [..., K]."""
    low, high = (lax.bitcast_convert_type(x, jnp.int8) >> 4 for x in (code << 4, code))  # arithmetic: signs extend
    return jnp.concatenate([low, high], axis=-1)


def to_float32(code: Array) -> Array:
    """Codes of any width as float32 [..., K], in units of their step where they have one."""
    return (unpack(code) if code.dtype == PACKED else code).astype(jnp.float32)


def numbers(code: Array) -> int:
    """K of a code of any width."""
    return 2 * code.shape[-1] if code.dtype == PACKED else code.shape[-1]
