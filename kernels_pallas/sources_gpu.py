"""How the Hopper attention kernel brings rows into shared memory: a range of a buffer, or what a list names in it.

A source holds arrays outside of a kernel, and their references inside. The copying warpgroup runs its `bring`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.hopper import load
from kernels_pallas.tiles import float_dtype, pad_axis, round_up

Array = jax.Array

STRIP = 64  # numbers in the 128 bytes that a bulk copy moves multiples of, and that its place is aligned to
_AHEAD = 8  # entries of a list that are read together: they lie in one cache line


class Range(NamedTuple):
    """Slot s is row s; one copy brings a block, in the layout that tensor cores read."""

    rows: Array  # [B, S, C]

    @property
    def slots(self) -> int:
        return self.rows.shape[1]

    @property
    def width(self) -> int:
        return self.rows.shape[2]

    def scratch(self, stages: int, size: int) -> list:
        """What `bring` needs beside the buffers."""
        return []

    def bring(self, b, start, mine, buffers, swizzled, arrived, free) -> None:
        """Bring the block at slot start(j) into buffer j % stages as soon as that is free, for all j < mine."""
        stages, size, _ = buffers.shape

        @pl.loop(0, mine)
        def _(j):
            slot = lax.rem(j, stages)
            pl.when(j >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
            plgpu.copy_gmem_to_smem(self.rows.at[b, pl.ds(start(j), size), :], buffers.at[slot], arrived.at[slot])


class Listed(NamedTuple):
    """Slot f is entry f of a list. A bulk copy brings a row as it lies, all those of `stages` blocks are in flight.

    The copy engine writes the layout that tensor cores read only 8 rows at a time: of single rows it makes a plain copy
    in shared memory, and the warpgroup moves that over.
    """

    rows: Array  # [B, S, C / 64, 64]
    position: Array  # int32 [B, F], whole blocks of rows that exist

    @property
    def slots(self) -> int:
        return self.position.shape[1]

    @property
    def width(self) -> int:
        return self.rows.shape[2] * STRIP

    def scratch(self, stages: int, size: int) -> list:
        """See `Range`."""
        plain = plgpu.SMEM((stages, size, *self.rows.shape[2:]), self.rows.dtype)
        return [plain, plgpu.Barrier(num_arrivals=size, num_barriers=stages)]

    def bring(self, b, start, mine, buffers, swizzled, arrived, free, plain, landed) -> None:
        """See `Range`."""
        stages, size, _ = buffers.shape
        layout = plgpu.Layout.SMEM_GMEM_COPY((size, STRIP), self.rows.dtype, swizzled)

        def fetch(j):
            slot = lax.rem(j, stages)

            @pl.loop(0, size // _AHEAD)
            def _(i):
                listed = [self.position[b, start(j) + i * _AHEAD + n] for n in range(_AHEAD)]
                for n, row in enumerate(listed):
                    place = plain.at[slot, i * _AHEAD + n]
                    plgpu.copy_gmem_to_smem(self.rows.at[b, row], place, landed.at[slot])

        for j in range(stages):
            pl.when(j < mine)(functools.partial(fetch, jnp.int32(j)))

        @pl.loop(0, mine)
        def _(j):
            slot = lax.rem(j, stages)
            plgpu.barrier_wait(landed.at[slot])
            pl.when(j >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
            for n in range(plain.shape[2]):
                strip = load(plain.at[slot, :, n, :], layout, conflicts=swizzled == 32)  # of tiny sizes only
                buffers[slot, :, pl.ds(n * STRIP, STRIP)] = strip
            plgpu.commit_smem()  # tensor cores see the block, and the copy engine may overwrite the plain copy
            plgpu.barrier_arrive(arrived.at[slot])
            pl.when(j + stages < mine)(functools.partial(fetch, j + stages))


def listed(rows: Array, position: Array, size: int) -> Listed:
    """The rows [B, S, C] at position int32 [B, F], in blocks of `size`; positions outside [0, S) are clamped.

    Rows that are not whole strips are padded: a copy, of tiny sizes only.
    """
    rows = lax.bitcast_convert_type(rows, float_dtype(rows))
    rows = pad_axis(rows, 2, round_up(rows.shape[2], STRIP))
    position = jnp.clip(position.astype(jnp.int32), 0, rows.shape[1] - 1)
    position = pad_axis(position, 1, round_up(position.shape[1], size))
    return Listed(rows.reshape(*rows.shape[:2], -1, STRIP), position)
