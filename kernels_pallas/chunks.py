"""Passes over buffers chunk by chunk in plain XLA, so that nothing as long as a buffer reaches memory."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import blocks

Array = jax.Array


class Along(NamedTuple):
    """A buffer [B, ..., S, ...] to be cut along its axis of slots; of rows [B, S, W] some columns, where given."""

    buffer: Array
    axis: int = 1
    columns: tuple[int, int] | None = None  # the first, and how many

    @property
    def numbers(self) -> int:
        """Numbers that a slot holds."""
        batch, slots = self.buffer.shape[0], self.buffer.shape[self.axis]
        return self.columns[1] if self.columns else self.buffer.size // max(batch * slots, 1)

    def cut(self, sequence, group: int, start, size: int) -> Array:
        """Slots [start, start + size) of `group` sequences from `sequence` on."""
        at, sizes = [0] * self.buffer.ndim, list(self.buffer.shape)
        at[0], sizes[0], at[self.axis], sizes[self.axis] = sequence, group, start, size
        if self.columns:
            at[-1], sizes[-1] = self.columns
        return lax.dynamic_slice(self.buffer, at, sizes)


def fold_chunks(fold: Callable, first: Callable, asked: Any, length: Array, along: list[Along], queries: int) -> Any:
    """The carry after fold(carry, asked, chunks, start, valid_from) over every chunk up to the longest length.

    Args
      first(b): the carry of b sequences before any chunk; asked: arrays [B, ...] that each fold sees whole;
        length int32 [B, ...]; along: buffers that are cut, alike long. Slots below `valid_from` were folded before.
      queries: how many a sequence asks at once; few of them, on a CPU, are asked of many rows at once.
    Sequences share their chunks where those stay in the caches. Else they go one after another, each to its own length.
    """
    batch, slots = length.shape[0], along[0].buffer.shape[along[0].axis]
    group, sizes = blocks.xla_chunks(batch, slots, sum(part.numbers for part in along), queries)
    if slots == 0:
        return first(batch)

    def of(sequence, asked, length):
        longest, done, carry = jnp.max(length), 0, first(group)
        for size in sizes:
            left_over = size - 1 if size == sizes[-1] else 0
            count = (longest - done + left_over) // size
            carry = lax.fori_loop(0, count, functools.partial(body, sequence, asked, size, done), carry)
            done += count * size
        return carry

    def body(sequence, asked, size, done, i, carry):
        start = jnp.minimum(done + i * size, slots - size)  # the last chunk is moved back to end at S
        return fold(carry, asked, [part.cut(sequence, group, start, size) for part in along], start, done + i * size)

    if slots == sizes[-1]:
        return fold(first(batch), asked, [part.cut(0, batch, 0, slots) for part in along], 0, 0)
    if group == batch:
        return of(0, asked, length)
    each = jax.tree.map(lambda x: x[:, None], (jnp.arange(batch), asked, length))
    return jax.tree.map(lambda x: x[:, 0], lax.map(lambda one: of(one[0][0], *one[1:]), each))
