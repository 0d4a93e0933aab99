"""Rows and queries from several processes: the single place that says what the laws are tried on.

Add an entry to `SOURCES` and every law runs on it.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

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


SOURCES = {"random": Source(random_rows), "correlated": Source(correlated_rows)}
