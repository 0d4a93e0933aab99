"""From the margins of a scan to the ordered list of rows to fetch (VestigeKV §3). Plain XLA on every device."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

GROUP = 128  # rows counted together by a scan
PIECE = 256  # rows that a CPU looks for at once


class Margins(NamedTuple):
    """What a scan leaves of every row and of every group of 128 rows."""

    margin: Array  # [B, S] float32, best margin over the heads; -inf where a row can't fire
    fired: Array  # [B, ceil(S / 128)] int32, rows of the group with margin >= 0


class FetchList(NamedTuple):
    """Rows to fetch, in position order."""

    position: Array  # [B, width] int32, ascending; S past count
    count: Array  # [B] int32, at most width
    overflowed: Array  # [B] bool, more fired than width


def count_fired(margin: Array) -> Array:
    """Fired rows of every group of 128: margin [B, S] -> int32 [B, ceil(S / 128)]."""
    return (_groups(margin) >= 0).sum(-1, dtype=jnp.int32)


def compact(margins: Margins, width: int, *, platform: str) -> FetchList:
    """See `kernels_pallas.compact`. A short list looks only into the groups that its rows are in.

    On a TPU searches compare with everything: loops are slow there, and take its compiler minutes. A CPU looks for as
    many rows as fired, piece by piece, if that is less than a pass over all.
    """
    batch, slots = margins.margin.shape
    total = margins.fired.sum(-1, dtype=jnp.int32)
    count = jnp.minimum(total, width)
    if width == 0 or slots == 0:
        return FetchList(jnp.full((batch, width), slots, jnp.int32), count, total > width)
    wanted = jnp.arange(1, width + 1)
    if platform == "cpu" and slots >= PIECE * GROUP:
        pieces = -(-count.max() // PIECE)
        by_row = functools.partial(_by_row, margins, wanted, platform)
        position = lax.cond(pieces <= slots // (PIECE * GROUP), lambda: _by_piece(margins, wanted, pieces), by_row)
    else:
        find = _by_group if width * GROUP <= slots else _by_row
        position = find(margins, wanted, platform)
    return FetchList(jnp.where(wanted <= count[:, None], position, slots), count, total > width)


def _by_group(margins: Margins, wanted: Array, platform: str) -> Array:
    """Row number n to fire is in the first group by whose end n rows fired. wanted: n, [F], from 1 -> [B, F]."""
    ends = jnp.cumsum(margins.fired, axis=-1)
    group = jnp.minimum(_search(ends, wanted, platform), ends.shape[-1] - 1)
    rank = wanted - jnp.take_along_axis(ends - margins.fired, group, axis=1)
    inside = jnp.take_along_axis(_groups(margins.margin), group[..., None], axis=1) >= 0
    # A running count as a product, exact up to 128: a sum along many short rows is slow on every device.
    number = jnp.float32 if platform == "cpu" else jnp.bfloat16
    upto = jnp.triu(jnp.ones((GROUP, GROUP), number))
    running = jnp.dot(inside.astype(number), upto, preferred_element_type=jnp.float32)
    return (group * GROUP + (running < rank[..., None]).sum(-1)).astype(jnp.int32)


def _by_piece(margins: Margins, wanted: Array, pieces: Array) -> Array:
    """The same for the first pieces of the rows wanted, one after another."""
    width, piece = len(wanted), min(PIECE, len(wanted))

    def body(i, position):
        start = jnp.minimum(i * piece, width - piece)  # the last piece ends at the list's end
        some = lax.dynamic_slice_in_dim(wanted, start, piece)
        return lax.dynamic_update_slice_in_dim(position, _by_group(margins, some, "cpu"), start, axis=1)

    nothing = jnp.zeros((margins.margin.shape[0], width), jnp.int32)
    return lax.fori_loop(0, pieces, body, nothing)


def _by_row(margins: Margins, wanted: Array, platform: str) -> Array:
    """The same from one pass over all rows: cheaper for a long list."""
    running = jnp.cumsum(margins.margin >= 0, axis=-1, dtype=jnp.int32)
    return _search(running, wanted, platform).astype(jnp.int32)


def _search(ascending: Array, wanted: Array, platform: str) -> Array:
    """Of every sequence [B, N], the first entry that reaches each wanted value: int [B, F]."""
    method = "compare_all" if platform == "tpu" else "scan"
    return jax.vmap(lambda values: jnp.searchsorted(values, wanted, method=method))(ascending)


def _groups(margin: Array) -> Array:
    """[B, S] -> [B, ceil(S / 128), 128], padded with rows that can't fire."""
    batch, slots = margin.shape
    missing = ((0, 0), (0, -slots % GROUP))
    return jnp.pad(margin, missing, constant_values=-jnp.inf).reshape(batch, -1, GROUP)
