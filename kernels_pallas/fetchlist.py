"""From the margins of a scan to the ordered list of rows to fetch (VestigeKV §3). Plain XLA on every device."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array

GROUP = 128  # rows counted together by a scan


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


def compact(margins: Margins, width: int, *, tpu: bool) -> FetchList:
    """See `kernels_pallas.compact`. A short list looks only into the groups that its rows are in.

    On a TPU searches compare with everything and sums run on the matrix unit: loops and cumulative sums of many short
    rows are slow there, and take its compiler minutes.
    """
    batch, slots = margins.margin.shape
    total = margins.fired.sum(-1, dtype=jnp.int32)
    count = jnp.minimum(total, width)
    if width == 0 or slots == 0:
        return FetchList(jnp.full((batch, width), slots, jnp.int32), count, total > width)
    find = _by_group if width * GROUP <= slots else _by_row
    position = find(margins, width, tpu)
    listed = jnp.arange(width) < count[:, None]
    return FetchList(jnp.where(listed, position, slots), count, total > width)


def _by_group(margins: Margins, width: int, tpu: bool) -> Array:
    """Entry f is in the first group by whose end more than f rows fired, and there the row that makes it f + 1."""
    ends = jnp.cumsum(margins.fired, axis=-1)
    wanted = jnp.arange(1, width + 1)
    group = _search(ends, wanted, tpu)
    group = jnp.minimum(group, ends.shape[-1] - 1)
    rank = wanted - jnp.take_along_axis(ends - margins.fired, group, axis=1)
    inside = jnp.take_along_axis(_groups(margins.margin), group[..., None], axis=1) >= 0
    if tpu:
        upto = jnp.triu(jnp.ones((GROUP, GROUP), jnp.bfloat16))  # counts up to 128: exact
        running = jnp.dot(inside.astype(jnp.bfloat16), upto, preferred_element_type=jnp.float32)
    else:
        running = jnp.cumsum(inside, axis=-1, dtype=jnp.int32)
    return (group * GROUP + (running < rank[..., None]).sum(-1)).astype(jnp.int32)


def _by_row(margins: Margins, width: int, tpu: bool) -> Array:
    """The same from one pass over all rows: cheaper for a long list."""
    running = jnp.cumsum(margins.margin >= 0, axis=-1, dtype=jnp.int32)
    return _search(running, jnp.arange(1, width + 1), tpu).astype(jnp.int32)


def _search(ascending: Array, wanted: Array, tpu: bool) -> Array:
    """Of every sequence [B, N], the first entry that reaches each wanted value: int [B, F]."""
    method = "compare_all" if tpu else "scan"
    return jax.vmap(lambda values: jnp.searchsorted(values, wanted, method=method))(ascending)


def _groups(margin: Array) -> Array:
    """[B, S] -> [B, ceil(S / 128), 128], padded with rows that can't fire."""
    batch, slots = margin.shape
    missing = ((0, 0), (0, -slots % GROUP))
    return jnp.pad(margin, missing, constant_values=-jnp.inf).reshape(batch, -1, GROUP)
