"""Orders of rows by score, how much two of them share, and rows that are nearly copies of each other."""

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


def top(scores: Array, count: int) -> Array:
    """The `count` best of the last axis, ties to the lower position: bool like scores [..., S]."""
    _, best = lax.top_k(scores, count)
    return jnp.put_along_axis(jnp.zeros(scores.shape, bool), best, True, axis=-1, inplace=False)


def overlap(one: Array, other: Array, count: int) -> Array:
    """Share of the `count` best by `one` that are among those by `other`: float32 [...] of scores [..., S]."""
    return (top(one, count) & top(other, count)).sum(-1) / count


def classes(rows: Array, tolerances: Array) -> Array:
    """Greedy leaders (VestigeKV §6): the leader that each row joins, int32 [K, S] for rows [S, C], tolerances [K].

    In order, row b joins the first earlier leader a with ||a - b|| <= tolerance ||a||; without one it leads itself.
    Differences are taken one row at a time: [S, S] is never held.
    """
    size = len(rows)
    length = jnp.linalg.norm(rows, axis=-1)
    slots = jnp.arange(size)

    def assign(b, joined):
        distance = jnp.linalg.norm(rows - rows[b], axis=-1)
        leads = (joined == slots) & (slots < b)
        near = leads & (distance <= tolerances[:, None] * length)
        return joined.at[:, b].set(jnp.where(near.any(-1), near.argmax(-1), b))

    return lax.fori_loop(0, size, assign, jnp.full((len(tolerances), size), -1))


def distinct(joined: Array) -> Array:
    """Share of rows that lead a class, float32 [K], of what `classes` gives."""
    return (joined == jnp.arange(joined.shape[-1])).mean(-1, dtype=jnp.float32)


def shared(joined: Array) -> Array:
    """Share of rows in a class of more than one, float32 [K]."""
    sizes = jax.vmap(lambda leader: jnp.zeros(len(leader), jnp.int32).at[leader].add(1))(joined)
    return (jnp.take_along_axis(sizes, joined, axis=-1) > 1).mean(-1, dtype=jnp.float32)
