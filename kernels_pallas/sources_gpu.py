"""Where the Hopper attention kernel takes a block of rows from: a range of a buffer, or what a list names in it.

A source holds arrays outside of a kernel, and their references inside. It has `slots` in all; slots past the rows that
are there, or that a block brings along and nobody asked for, are masked.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.hopper import COLUMN, TILE, load
from kernels_pallas.tiles import pad_axis, round_up

Array = jax.Array


class Range(NamedTuple):
    """Slot s is row s; one copy brings a block."""

    rows: Array  # [B, S, C]

    @property
    def slots(self) -> int:
        return self.rows.shape[1]

    def copies(self, size: int) -> int:
        """Copies that bring a block of `size` slots."""
        return 1

    def marks(self, stages: int, size: int) -> list:
        """Shared memory that a source wants beside the rows."""
        return []

    def copy(self, b, start, buffer, marks, arrived) -> None:
        """Start to bring the slots from `start` on into a buffer; each copy arrives at the barrier."""
        plgpu.copy_gmem_to_smem(self.rows.at[b, pl.ds(start, buffer.shape[0]), :], buffer, arrived)

    def narrow(self, seen: Array, marks) -> Array:
        """seen [Q, size] without the slots that nobody asked for."""
        return seen


class Listed(NamedTuple):
    """Slots 8 f ... 8 f + 7 are the group of rows that entry f of the list lies in; one copy brings a group.

    The copy engine moves whole tiles of 8 rows into the layout that tensor cores read.
    """

    rows: Array  # [B, S, C], S a multiple of 8
    group: Array  # int32 [B, F], the group an entry lies in
    asked: Array  # int32 [B, 8 F], 1 in the slot that is an entry of the list

    @property
    def slots(self) -> int:
        return self.asked.shape[1]

    def copies(self, size: int) -> int:
        """See `Range`; all are in flight at once."""
        return size // TILE + 1

    def marks(self, stages: int, size: int) -> list:
        """See `Range`: what is asked for of a block."""
        return [plgpu.SMEM((stages, size), jnp.int32)]

    def copy(self, b, start, buffer, marks, arrived) -> None:
        """See `Range`. The list is read before the first copy starts: a barrier stands before each."""
        size = buffer.shape[0]
        first = start // TILE
        groups = [self.group[b, first + i] for i in range(size // TILE)]
        plgpu.copy_gmem_to_smem(self.asked.at[b, pl.ds(start, size)], marks[0], arrived)
        for i, group in enumerate(groups):
            source = self.rows.at[b, pl.ds(pl.multiple_of(group * TILE, TILE), TILE), :]
            plgpu.copy_gmem_to_smem(source, buffer.at[pl.ds(i * TILE, TILE), :], arrived)

    def narrow(self, seen: Array, marks) -> Array:
        """See `Range`."""
        return seen & (lax.broadcast_in_dim(load(marks[0], COLUMN), seen.shape, [1]) != 0)


def listed(rows: Array, position: Array, count: Array, size: int) -> Listed:
    """The entries f < count [B] of position int32 [B, F], in whole blocks of `size` slots: see `Listed`."""
    width = round_up(position.shape[1], size // TILE)
    position = pad_axis(jnp.clip(position.astype(jnp.int32), 0, rows.shape[1] - 1), 1, width)
    entry = jnp.where(jnp.arange(width) < count[:, None], position % TILE, -1)
    asked = entry[..., None] == jnp.arange(TILE)
    return Listed(rows, position // TILE, asked.reshape(len(asked), -1).astype(jnp.int32))
