"""k-means merging: rows give way to the centroids of their clusters, each with the logarithm of its size."""

import jax
import jax.numpy as jnp
from jax import lax

from vestige_jax.baselines.clusters import nearest, totals
from vestige_jax.baselines.observed import MergedRows, Merger, Observed

Array = jax.Array


def kmeans(iterations: int = 10) -> Merger:
    """m centroids of all closed rows but the sinks, + ln count on the logit (VestigeKV §5; exact for equal rows, §1).

    Lloyd's iterations, a fixed number, on whole rows, from the first row of each of m runs as equal as can be. Counts
    are those of the clusters whose means the centroids are. A centroid that loses all its rows is dropped, so a layer
    may hold fewer than m.
    Raises ValueError for no iterations.
    """
    if iterations < 1:
        raise ValueError(f"iterations={iterations} must be at least 1")

    def merge(observed: Observed) -> MergedRows:
        rows = observed.rows.astype(jnp.float32)
        centres, exists = _first(observed, rows)

        def lloyd(_, carry):
            return _updated(rows, observed.others, *carry)

        centres, size = lax.fori_loop(0, iterations, lloyd, (centres, exists.astype(jnp.float32)))
        return _compact(centres, size, observed.spec.latent_dim)

    return merge


def _first(observed: Observed, rows: Array) -> tuple[Array, Array]:
    """The first row of each run: centres [B, W, C], and which of them exist: bool [B, W]."""
    sinks, place = observed.spec.sinks, jnp.arange(observed.most)
    number = jnp.maximum(observed.closed - sinks, 0)[:, None]
    runs = jnp.minimum(observed.count[:, None], number)
    short, longer = number // jnp.maximum(runs, 1), number % jnp.maximum(runs, 1)
    start = sinks + place * short + jnp.minimum(place, longer)
    picked = jnp.take_along_axis(rows, jnp.minimum(start, rows.shape[1] - 1)[..., None], axis=1)
    return picked, place < runs


def _updated(rows: Array, others: Array, centres: Array, size: Array) -> tuple[Array, Array]:
    """One iteration: the means of the rows nearest to each centre, and how many they are. Empty centres stay out."""
    offset = jnp.where(size > 0, -0.5 * jnp.sum(centres**2, axis=-1), -jnp.inf)
    group = jnp.where(others, nearest(rows, centres, offset), -1)
    ones = jnp.ones((*rows.shape[:2], 1), jnp.float32)
    sums = totals(jnp.concatenate([rows, ones], axis=-1), group, centres.shape[1])
    size = sums[..., -1]
    return jnp.where(size[..., None] > 0, sums[..., :-1] / jnp.maximum(size, 1)[..., None], centres), size


def _compact(centres: Array, size: Array, latent: int) -> MergedRows:
    """Centroids with rows first, in their order."""
    order = jnp.argsort(size <= 0, axis=-1, stable=True)
    centres = jnp.take_along_axis(centres, order[..., None], axis=1)
    size = jnp.take_along_axis(size, order, axis=1)
    bias = jnp.log(jnp.maximum(size, 1))
    return MergedRows(centres[..., :latent], centres, bias, jnp.sum(size > 0, axis=-1, dtype=jnp.int32))
