"""float32 products on a matrix unit that multiplies bfloat16: three pieces that add up to the float32, bit for bit."""

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

_HIGH = 0xFFFF0000  # the bits of a float32 that are a bfloat16


def pieces(x: Array) -> tuple[Array, Array, Array]:
    """Three bfloat16 arrays whose sum is the float32 x exactly (but for bits below the smallest normal number).

    Cut by masking bits and not by rounding: a compiler may drop a conversion to bfloat16 and back.
    """
    high = _truncate(x)
    rest = x - high
    middle = _truncate(rest)
    return high.astype(jnp.bfloat16), middle.astype(jnp.bfloat16), _truncate(rest - middle).astype(jnp.bfloat16)


def _truncate(x: Array) -> Array:
    bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(_HIGH)
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
