"""Codes of 8 and 4 bits inside kernels: whole numbers in int8, as matrix units multiply them, two to a byte unpacked.

The float32 query comes in int8 digits (`exact.digits`), so that the products and their sums are exact. What digits
leave out of a query, the sound bound counts (`vestige_jax.index.encode`).

No half of a byte is shifted down: where it lies in the upper half it is the number times 16, and the query is divided.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.codes import NARROW, PACKED
from kernels_pallas.hopper import load

Array = jax.Array

_UPPER = 16  # what a number of 4 bits is multiplied by in the upper half of a byte
_UPPER_HALVES = -0x0F0F0F10  # of the four bytes of an int32


def narrow(code) -> bool:
    """Whether these are codes of 8 or 4 bits, which are multiplied as whole numbers."""
    return code.dtype in NARROW


def packed(code) -> bool:
    """Whether these are codes of 4 bits, two to a byte."""
    return code.dtype == PACKED


def tpu_query(query: Array, code) -> Array:
    """The query [..., K] that goes with `tpu_numbers` of the code."""
    return query / _UPPER if packed(code) else query


def tpu_numbers(code: Array, axis: int) -> Array:
    """A block of codes as numbers along `axis`: 4-bit ones as int8, times 16; others as they are.

    Four bytes are taken at once, as a TPU shifts words only: in a word each half keeps to its byte.
    """
    if packed(code):
        words = pltpu.bitcast(code, jnp.int32)
        halves = [half & jnp.int32(_UPPER_HALVES) for half in (words << 4, words)]
        return jnp.concatenate([pltpu.bitcast(half, jnp.int8) for half in halves], axis)
    return code


def gpu_queries(query: Array, code) -> list[Array]:
    """The parts of a query [..., K], each of which goes with one of `gpu_numbers`."""
    if not packed(code):
        return [query]
    low, high = jnp.split(query, 2, axis=-1)
    return [low, high / _UPPER]


def gpu_numbers(code) -> list[Array]:
    """Codes of 4 bits [S, K / 2] in shared memory as int8 in registers: low halves as -8..7, high ones times 16.

    By masks, as a GPU's registers of bytes know no shifts, and sums of 16 bits at least.
    """
    values = load(code, plgpu.Layout.WGMMA_8BIT).astype(jnp.int8)  # a bitcast leaves it unsigned, as jax 0.10 sees it
    low = ((values ^ jnp.int8(8)) & jnp.int8(0x0F)).astype(jnp.int16) - jnp.int16(8)
    return [low.astype(jnp.int8), values & jnp.int8(-_UPPER)]
