"""What rows receive and what sketches miss, added up over the queries of a text: [T, T] is never held."""

import jax
import jax.numpy as jnp
from jax import lax

import vestige_jax as vk

Array = jax.Array
CHUNK = 32  # queries at a time


def received(rows: Array, queries: Array, windows: Array, *, scale: float, sinks: int) -> tuple[Array, Array]:
    """Softmax weight of rows [T, C], summed over heads and over the queries [T, H, C] of each window.

    Query t is asked at position t and sees the rows up to it. windows: float32 [S, T], the factor of each query.
    Returns (float32 [S, T], and float32 [T], the weight that each query gives the first `sinks` rows, mean of heads).
    """
    length, slots = len(rows), jnp.arange(len(rows))

    def chunk(total, part):
        asked, positions, factors = part
        scores = jnp.where(slots <= positions[:, None, None], scale * asked @ rows.T, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        return total + factors @ weights.sum(1), weights[..., :sinks].sum(-1).mean(1)

    # The last chunk is filled up with queries at position 0 that no window counts.
    parts = _chunks(queries, 0), _chunks(slots, 0), _chunks(windows.swapaxes(0, 1), 0).swapaxes(1, 2)
    total, first = lax.scan(chunk, jnp.zeros((len(windows), length)), parts)
    return total, first.reshape(-1)[:length]


def _chunks(values: Array, fill: float) -> Array:
    """[T, ...] -> [T / CHUNK, CHUNK, ...], filled up at the end."""
    widths = [(0, -len(values) % CHUNK), *[(0, 0)] * (values.ndim - 1)]
    return jnp.pad(values, widths, constant_values=fill).reshape(-1, CHUNK, *values.shape[1:])


def pooled(votes: Array, kernel: int) -> Array:
    """Average over `kernel` positions of the last axis, centred; zeros beyond either end."""
    window, strides = (1,) * (votes.ndim - 1) + (kernel,), (1,) * votes.ndim
    return lax.reduce_window(votes, 0.0, lax.add, window, strides, "SAME") / kernel


def residuals(rows: Array, fitted: Array, asked: Array, *, latent: int, rank: int) -> dict[str, Array]:
    """What an index of `rank` columns leaves of the scores of rows [S, C], for queries that it was not fitted to (§3).

    The basis is fitted to the content of `fitted` [N, H, C] and judged on `asked` [Q, H, C], with delta = <q_c, c> -
    <V^T q_c, V^T c>: its root mean square over that of the content score <q_c, c>, and its spread over the rows of one
    query over the spread of the whole score. eta: ||c - V V^T c|| / ||c||, quantiles over rows.
    """
    basis = vk.fit_basis(fitted[..., :latent].reshape(-1, latent), rank)
    content = rows[:, :latent]
    missed = content - content @ basis @ basis.T  # <q_c, missed> is delta, as V V^T is a projection

    def sums(query):
        delta, part, full = query[:, :latent] @ missed.T, query[:, :latent] @ content.T, query @ rows.T
        squares = [(delta**2).sum(), (part**2).sum(), delta.var(-1).sum(), full.var(-1).sum()]
        return jnp.stack(squares)

    delta, part, spread, full = lax.map(sums, asked, batch_size=CHUNK).sum(0)
    eta = jnp.linalg.norm(missed, axis=-1) / jnp.linalg.norm(content, axis=-1)
    quantiles = {f"eta p{share}": jnp.quantile(eta, share / 100) for share in (10, 50, 90)}
    return {"sketch residual": _root(delta, part), "sketch spread": _root(spread, full)} | quantiles


def _root(part: Array, whole: Array) -> Array:
    """(part / whole)^1/2; 0 where there is nothing, as in a model whose scores have no content."""
    return jnp.where(whole > 0, jnp.sqrt(part / jnp.where(whole > 0, whole, 1)), 0)
