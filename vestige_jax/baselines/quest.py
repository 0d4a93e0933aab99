"""Quest (Tang et al., arXiv 2406.10774): pages by the best score that their coordinate-wise box allows."""

import dataclasses

import jax
import jax.numpy as jnp

from vestige_jax.baselines.pages import Pages, box, dot

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Quest(Pages):
    """sum_d max(q_d high_d, q_d low_d) over the page's box (VestigeKV §5).

    Adapted to one latent row for all heads: a page is fetched for all of them.
    """

    page: int = 16

    @property
    def bound(self) -> bool:
        """Each coordinate of a row lies in the box."""
        return True

    def digest(self, rows: Array, live: Array) -> tuple[Array, Array]:
        """Low and high corner of each page: two [..., G, C]."""
        return box(rows, live)

    def score(self, digest: tuple[Array, Array], query: Array) -> Array:
        """A positive q_d takes the high side, a negative one the low side."""
        low, high = digest
        return dot(jnp.maximum(query, 0), high) + dot(jnp.minimum(query, 0), low)


def pruned(bounds: Array, peak: Array) -> Array:
    """Share of pages that cannot hold the best row: bound below the attained maximum.

    Args: bounds [..., G], -inf for a page without rows, which is not counted; peak [...], the largest score of any row.
    Returns float32 [...], in [0, 1].
    """
    exists = bounds > -jnp.inf
    below = exists & (bounds < peak[..., None])
    return below.sum(-1) / jnp.maximum(exists.sum(-1), 1)
