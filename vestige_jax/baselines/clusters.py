"""Groups of rows, a slice of rows at a time so that no [A, W] array is held. W centres, A rows."""

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

SLICE = 512  # rows compared with all centres at once


def nearest(rows: Array, centres: Array, offset: Array) -> Array:
    """argmax_w <row, centre_w> + offset_w for rows [B, A, D], centres [B, W, D], offset [B, W]: int32 [B, A].

    Ties go to the first centre; an offset of -inf keeps a centre out.
    """

    def one(part):
        score = jnp.einsum("bsd,bwd->bsw", part, centres, precision=lax.Precision.HIGHEST) + offset[:, None]
        return jnp.argmax(score, axis=-1).astype(jnp.int32)

    return _joined(lax.map(one, _slices(rows, 0.0)), rows.shape[1])


def totals(values: Array, group: Array, width: int) -> Array:
    """Sums over each group of values [B, A, D]: float32 [B, W, D]. A group outside [0, W) is left out.

    A matrix product with the indicator of the groups: unlike a scatter it adds in one order on every device.
    """

    def add(total, part):
        values, group = part
        member = jax.nn.one_hot(group, width, dtype=jnp.float32)
        return total + jnp.einsum("bsw,bsd->bwd", member, values, precision=lax.Precision.HIGHEST), None

    start = jnp.zeros((values.shape[0], width, values.shape[2]), jnp.float32)
    return lax.scan(add, start, (_slices(values, 0.0), _slices(group, -1)))[0]


def largest(values: Array, group: Array, width: int) -> Array:
    """The largest of values [B, A] in each group: float32 [B, W], -inf for a group without rows."""
    start = jnp.full((values.shape[0], width), -jnp.inf)
    return start.at[jnp.arange(len(values))[:, None], jnp.where(group < 0, width, group)].max(values, mode="drop")


def _slices(x: Array, fill: float) -> Array:
    """[B, A, ...] -> [slices, B, SLICE, ...], filled up at the end."""
    size = min(SLICE, x.shape[1])
    padded = jnp.pad(x, [(0, -x.shape[1] % size if axis == 1 else 0) for axis in range(x.ndim)], constant_values=fill)
    return jnp.moveaxis(padded.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def _joined(slices: Array, rows: int) -> Array:
    """The inverse of `_slices`: the first `rows` of them."""
    joined = jnp.moveaxis(slices, 0, 1)
    return joined.reshape(joined.shape[0], -1, *joined.shape[3:])[:, :rows]
