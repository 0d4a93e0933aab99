"""Recall by pages: a digest of each page of archived rows says which pages a step fetches whole (VestigeKV §5).

Pages cut a sequence at multiples of their size, the last may be short. G counts pages, W the rows of one. Scores and
bounds are of <q, row>, unscaled.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import Part
from vestige_jax import attention
from vestige_jax.cache import Cache
from vestige_jax.partition import members
from vestige_jax.recall import Recalled
from vestige_jax.spec import CacheSpec

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Pages:
    """A rule for `CacheSpec.recall`: a step fetches the floor(fetch / page) best pages of a sequence (VestigeKV §5).

    A subclass digests pages and scores digests. Digests cover the rows that only the archive holds, for those of tier 1
    need no page. They are computed where they are used, from an archive that is never rewritten: this measures which
    rows pages find, not how fast a stored digest would be read. Nothing is calibrated, no gate, no overflow.
    Raises ValueError for a page of no rows and, where it is used, for a fetch smaller than a page.
    """

    page: int  # W

    def __post_init__(self):
        if isinstance(self.page, bool) or not isinstance(self.page, int) or self.page < 1:
            raise ValueError(f"page={self.page!r} must be an integer of at least 1 row")

    @property
    def bound(self) -> bool:
        """Whether no row of a page scores above its page."""
        raise NotImplementedError

    def digest(self, rows: Array, live: Array) -> Any:
        """What is stored of pages: arrays [..., G, ...] from rows [..., G, W, C] and live bool [..., G, W]."""
        raise NotImplementedError

    def score(self, digest: Any, query: Array) -> Array:
        """Scores [..., Q, G] of query [..., Q, C]; of a page without rows, any number."""
        raise NotImplementedError

    def scores(self, rows: Array, live: Array, query: Array) -> Array:
        """Scores float32 [..., Q, G] of query [..., Q, C]: rows [..., S, C], live bool [..., S]; no live row: -inf."""
        rows, live = paged(rows.astype(jnp.float32), self.page, axis=-2), paged(live, self.page, axis=-1)
        score = self.score(self.digest(rows, live), query.astype(jnp.float32))
        return jnp.where(live.any(-1)[..., None, :], score, -jnp.inf)

    def __call__(self, spec: CacheSpec, cache: Cache, query: Array, attended: Part) -> Recalled:
        """The best pages' archived rows, attended exactly."""
        if spec.fetch < self.page:
            raise ValueError(f"fetch={spec.fetch} rows hold no page of {self.page}; raise fetch")
        archive, slots = cache.archive, jnp.arange(spec.archive_rows)
        archived = (slots < archive.closed[:, None]) & ~archive.kept
        chosen = best(self.scores(archive.rows[..., : spec.row_dim], archived, query), spec.fetch // self.page)
        fired = archived & chosen[:, slots // self.page]
        position, count = members(fired, min(spec.fetch // self.page * self.page, spec.archive_rows))
        part = attention.over_list(spec, query, archive.words, position, count)
        never = jnp.zeros(count.shape, bool)
        return Recalled(part, count, count, fired if spec.trace else None, never, jnp.ones(query.shape[:2], bool))


def paged(values: Array, page: int, axis: int) -> Array:
    """The axis of S slots cut into [G, W]; the last page is filled up with zeros, or False."""
    axis %= values.ndim
    widths = [(0, -size % page if i == axis else 0) for i, size in enumerate(values.shape)]
    return jnp.pad(values, widths).reshape(*values.shape[:axis], -1, page, *values.shape[axis + 1 :])


def box(rows: Array, live: Array) -> tuple[Array, Array]:
    """Smallest and largest coordinates of a page's live rows, low and high [..., G, C]; zeros where there is none."""
    some, live = live.any(-1)[..., None], live[..., None]
    low = jnp.where(live, rows, jnp.inf).min(-2)
    high = jnp.where(live, rows, -jnp.inf).max(-2)
    return jnp.where(some, low, 0.0), jnp.where(some, high, 0.0)


def dot(query: Array, digest: Array) -> Array:
    """<q, d> of query [..., Q, C] and digests [..., G, C]: float32 [..., Q, G]."""
    return jnp.einsum("...qc,...gc->...qg", query, digest, precision=lax.Precision.HIGHEST)


def best(score: Array, count: int) -> Array:
    """The `count` best pages for all heads, bool [B, G] from score [B, H, G]; a page at -inf is never taken.

    Heads choose in rounds: each its best page, then each its second best, and so on, because bounds of different heads
    are not comparable. Within a round the higher score goes first, ties to the lower position.
    """
    order = jnp.argsort(score, axis=-1, stable=True, descending=True)
    rounds = jnp.argsort(order, axis=-1).min(1)
    top = score.max(1)
    exists = top > -jnp.inf
    order = jnp.lexsort((-top, jnp.where(exists, rounds, score.shape[-1])), axis=-1)[:, :count]
    chosen = jnp.take_along_axis(exists, order, axis=-1)
    return jnp.put_along_axis(jnp.zeros_like(exists), order, chosen, axis=-1, inplace=False)
