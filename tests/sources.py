"""Rows and queries from several processes: the single place that says what the laws are tried on.

Add an entry to `SOURCES` and every law runs on it.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vestige_jax import models

CHECKPOINT = pathlib.Path(__file__).parent.parent / "vestige_jax" / "checkpoints" / "tiny_nope"

R, P, H, C = 12, 4, 3, 16


def random_rows(rng, *shape) -> np.ndarray:
    """Independent normal rows [*shape, C]."""
    return rng.normal(size=(*shape, C)).astype(np.float32)


def correlated_rows(rng, *batch_and_count) -> np.ndarray:
    """Slowly changing rows around a common mean, with a salient outlier about every ninth, as a real sequence has."""
    *batch, count = batch_and_count
    noise = rng.normal(size=(*batch, count, C))
    rows = np.zeros_like(noise)
    for u in range(count):
        rows[..., u, :] = 0.95 * rows[..., u - 1, :] + 0.3 * noise[..., u, :]
    salient = rng.random((*batch, count)) < 1 / 9
    rows[..., R:] += 4 * salient[..., None] * rng.normal(size=(*batch, count, P))
    return (rows + rng.normal(size=C)).astype(np.float32)


def random_queries(rng, *shape) -> np.ndarray:
    """Independent normal queries [*shape, H, C]."""
    return (2 * rng.normal(size=(*shape, H, C))).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Source:
    """A process of rows [..., n, C], neighbours last but one, and of absorbed queries [..., H, C]."""

    rows: Callable
    queries: Callable = random_queries
    latent_dim: int = R
    branch_dim: int = P
    num_heads: int = H
    scale: float = 0.3


@functools.cache
def trained() -> tuple[np.ndarray, np.ndarray]:
    """Rows [250, C] of the trained model's last MLA layer on English text, and its last absorbed queries [64, H, C]."""
    model, text = models.load(CHECKPOINT), topics["assignment"] + topics["strings"]
    ids = models.Tokenizer.load(CHECKPOINT).encode(text)[:250]
    spec = model.config.cache_spec(256, block=256, rank=8, dtype=jnp.float32)
    graph, weights = nnx.split(model)

    @jax.jit
    def read(weights, ids, state):
        return nnx.merge(graph, weights).prefill(spec, ids, state, logits="none")[1]

    layers = read(weights, jnp.asarray([ids]), model.init_state(spec, 1)).layers
    layer = [state for state in layers if isinstance(state, models.MLAState)][-1]
    return np.asarray(layer.cache.tail.rows[0, :250]), np.asarray(layer.queries[0])


def trained_rows(rng, count) -> np.ndarray:
    """`count` consecutive rows of the trained model."""
    rows, _ = trained()
    start = rng.integers(len(rows) - count)
    return rows[start : start + count].copy()


def trained_queries(rng, *shape) -> np.ndarray:
    """Absorbed queries of the trained model."""
    _, queries = trained()
    return queries[rng.integers(len(queries), size=shape)].copy()


SOURCES = {
    "random": Source(random_rows),
    "correlated": Source(correlated_rows),
    "trained": Source(trained_rows, trained_queries, latent_dim=32, branch_dim=16, num_heads=4, scale=32**-0.5),
}
