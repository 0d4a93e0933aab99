"""float32 products on a matrix unit that multiplies less: three 16-bit pieces of the float32, or four int8 digits."""

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

_HIGH = {"bfloat16": 0xFFFF0000, "float16": 0xFFFFE000}  # the bits of a float32 that fit: 8 and 11 significant ones
BASE = 256  # of digits
_DIGIT_BITS = 30  # of a vector's largest number, in four digits
DIGIT_ERROR = 2.0**-_DIGIT_BITS


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


def digits(x: Array) -> tuple[Array, tuple[Array, ...]]:
    """float32 vectors [..., K] as whole numbers of a power of two each, [...], in four int8 digits to base 256.

    Off by at most DIGIT_ERROR of a vector's largest number, or of 2^-91. Vectors with inf or nan get the unit nan.
    """
    largest = jnp.abs(x).max(-1)
    _, exponent = jnp.frexp(largest)
    unit = jnp.ldexp(jnp.float32(1), jnp.maximum(exponent, -90) - _DIGIT_BITS)
    rest = jnp.round(x / unit[..., None]).astype(jnp.int32)
    out = []
    for _ in range(3):
        low = ((rest + 128) & 255) - 128
        out.append(low)
        rest = (rest - low) >> 8
    return jnp.where(jnp.isfinite(largest), unit, jnp.nan), tuple(d.astype(jnp.int8) for d in (rest, *out[::-1]))


def collapse(product: Array, rows: int) -> Array:
    """The product [rows, S] that those of stacked pieces, float32, or digits, int32 [n * rows, S], add up to."""
    base = BASE if product.dtype == jnp.int32 else 1
    total = product[:rows].astype(jnp.float32)
    for start in range(rows, product.shape[0], rows):
        total = base * total + product[start : start + rows].astype(jnp.float32)
    return total


def dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """a . b over one axis each, operands of one dtype: bfloat16 products are exact and int8 sums too, float32 full."""
    precision = lax.Precision.HIGHEST if b.dtype == jnp.float32 else lax.Precision.DEFAULT
    sums = jnp.int32 if b.dtype == jnp.int8 else jnp.float32
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a.astype(b.dtype), b, dims, precision=precision, preferred_element_type=sums)
