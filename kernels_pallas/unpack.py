"""Codes of 8 and 4 bits inside kernels: unpacked in registers into bfloat16, which holds whole steps exactly.

So the products with the three pieces of a float32 query are those of a code of floats, and the certificate needs no
term for them. An int8 product would need the query in int8; its rounding would be one more term.

No half of a byte is shifted down: where it lies in the upper half it is the number times 16, and the query is divided.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.codes import NARROW, PACKED
from kernels_pallas.hopper import load

Array = jax.Array

_UPPER = 16  # what a number of 4 bits is multiplied by in the upper half of a byte
_UPPER_HALVES = -0x0F0F0F10  # of the four bytes of an int32


def narrow(code) -> bool:
    """Whether these are codes of 8 or 4 bits, which are unpacked."""
    return code.dtype in NARROW


def operand_dtype(code) -> jnp.dtype:
    """Of the numbers that a matrix unit multiplies."""
    return jnp.dtype(jnp.bfloat16) if narrow(code) else code.dtype


def tpu_query(query: Array, code) -> Array:
    """The query [..., K] that goes with `tpu_numbers` of the code."""
    return query / _UPPER if code.dtype == PACKED else query


def tpu_numbers(code: Array, axis: int) -> Array:
    """A block of codes as numbers along `axis`: bfloat16, 4-bit ones times 16; floats as they are.

    Four bytes are taken at once, as a TPU shifts words only: in a word each half keeps to its byte.
    """
    if code.dtype == PACKED:
        words = pltpu.bitcast(code, jnp.int32)
        halves = [half & jnp.int32(_UPPER_HALVES) for half in (words << 4, words)]
        return jnp.concatenate([pltpu.bitcast(half, jnp.int8).astype(jnp.bfloat16) for half in halves], axis)
    return code.astype(operand_dtype(code))


def gpu_queries(query: Array, code) -> list[Array]:
    """The parts of a query [..., K], each of which goes with one of `gpu_numbers`."""
    if code.dtype != PACKED:
        return [query]
    low, high = jnp.split(query, 2, axis=-1)
    return [low, high / _UPPER]


def gpu_numbers(code) -> list[Array]:
    """Codes [S, K] in shared memory as left operands of tensor cores, in registers: bfloat16.

    Only masks, as a GPU's registers of bytes know no shifts: low halves as -8..7, high ones times 16.
    """
    layout = plgpu.Layout.WGMMA_UPCAST_2X
    values = load(code, layout, conflicts=code.shape[1] % 32 != 0)
    if code.dtype != PACKED:
        numbers = [values.astype(jnp.bfloat16)]
    else:
        values = lax.bitcast_convert_type(values, jnp.int8)
        low = ((values ^ jnp.int8(8)) & jnp.int8(0x0F)).astype(jnp.bfloat16) - jnp.bfloat16(8)
        numbers = [low, (values & jnp.int8(-_UPPER)).astype(jnp.bfloat16)]
    return [plgpu.layout_cast(x, plgpu.Layout.WGMMA) for x in numbers]
