"""float32 products on a matrix unit that multiplies 16-bit floats: three pieces that add up to the float32."""

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

_HIGH = {"bfloat16": 0xFFFF0000, "float16": 0xFFFFE000}  # the bits of a float32 that fit: 8 and 11 significant ones


def pieces(x: Array, dtype=jnp.bfloat16) -> tuple[Array, Array, Array]:
    """Three arrays of dtype whose sum is the float32 x exactly (but for bits below the smallest normal number).

    Cut by masking bits and not by rounding: a compiler may drop a conversion to 16 bits and back.
    """
    high = truncate(x, dtype)
    rest = x - high
    middle = truncate(rest, dtype)
    return high.astype(dtype), middle.astype(dtype), truncate(rest - middle, dtype).astype(dtype)


def truncate(x: Array, dtype=jnp.bfloat16) -> Array:
    """The float32 x without the bits that do not fit into dtype."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(_HIGH[jnp.dtype(dtype).name])
    return lax.bitcast_convert_type(bits, jnp.float32)


def stack(x: Array, dtype, axis: int) -> Array:
    """The float32 x as operands of dtype that can multiply exactly: its three pieces along axis, or x itself."""
    return jnp.concatenate(pieces(x), axis) if dtype == jnp.bfloat16 else x


def collapse(product: Array, rows: int) -> Array:
    """Sum of the products [n * rows, S] of stacked pieces: [rows, S]."""
    total = product[:rows]
    for start in range(rows, product.shape[0], rows):
        total += product[start : start + rows]
    return total


def dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """a . b over one axis each: operands of one dtype, float32 sums. bfloat16 products are exact, float32 ones full."""
    precision = lax.Precision.HIGHEST if b.dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a.astype(b.dtype), b, dims, precision=precision, preferred_element_type=jnp.float32)
