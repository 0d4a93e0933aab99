"""KeepKV (Tian et al., arXiv 2504.09936): merging that leaves one query's output as it was."""

import jax
import jax.numpy as jnp
from jax import lax

from vestige_jax.baselines.clusters import largest, nearest, totals
from vestige_jax.baselines.keydiff import unit
from vestige_jax.baselines.observed import MergedRows, Merger, Observed
from vestige_jax.baselines.snapkv import window_mass
from vestige_jax.partition import members, top_rows

Array = jax.Array

RESCALE = (0.5, 2.0)
"""How far a key may be rescaled; the rest of the correction goes to its bias."""


def keepkv(window: int = 32) -> Merger:
    """m rows stand for their groups, with p votes and rescaled keys (VestigeKV §5).

    Carriers are the m rows that the last `window` queries look at most; every other row votes for the carrier of the
    nearest direction (cosine). With a reference query q, x_u = scale <q, row_u>, w_u = e^x_u, for a group of p rows:

        row = sum w_u row_u / sum w_u,  value = its latent,  key = g row,  logit = scale <q', key> + ln p,
        g = ln(sum w_u / p) / (scale <q, row>),

    so that q itself gets the group's mass and output exactly. Adapted to one row for all heads: q is the mean of the
    window's queries over heads and positions, where the original takes each head's own query; g is one number, for the
    row is key and value at once; a whole group is merged in one step; sinks are not merged. Near <q, row> = 0 no g can
    do it: g is held between 1/2 and 2, and what it leaves is added to the logit.
    Raises ValueError for a window of no queries.
    """
    if window < 1:
        raise ValueError(f"window={window} must be at least 1 query")

    def merge(observed: Observed) -> MergedRows:
        rows = observed.rows.astype(jnp.float32)
        group, count = _votes(observed, rows, window)
        return _merged(observed, rows, group, count, reference(observed, window))

    return merge


def reference(observed: Observed, window: int) -> Array:
    """The mean of the last `window` queries over positions and heads: float32 [B, C]; zero where there is none."""
    queries, asked = observed.queries[:, -window:].astype(jnp.float32), observed.positions[:, -window:] >= 0
    total = jnp.where(asked[..., None, None], queries, 0.0).sum((1, 2))
    return total / jnp.maximum(asked.sum(1)[:, None] * queries.shape[2], 1)


def _votes(observed: Observed, rows: Array, window: int) -> tuple[Array, Array]:
    """Which carrier each row votes for, int32 [B, A], -1 for none; and how many carriers there are: int32 [B]."""
    score = jnp.where(observed.others, window_mass(observed, window), -jnp.inf)
    kept = top_rows(score, observed.closed, observed.count, observed.most, observed.spec.sinks) & observed.others
    place, count = members(kept, observed.most)
    exists = jnp.arange(observed.most) < count[:, None]
    directions = unit(rows)
    carriers = jnp.take_along_axis(directions, jnp.minimum(place, rows.shape[1] - 1)[..., None], axis=1)
    chosen = nearest(directions, carriers, jnp.where(exists, 0.0, -jnp.inf))
    own = jnp.where(kept, jnp.cumsum(kept, axis=-1) - 1, chosen)  # a carrier stands for itself whatever its twins
    return jnp.where(observed.others, own, -1), count


def _merged(observed: Observed, rows: Array, group: Array, count: Array, query: Array) -> MergedRows:
    width, scale = observed.most, observed.spec.scale
    score = scale * jnp.einsum("bsc,bc->bs", rows, query, precision=lax.Precision.HIGHEST)
    peak = largest(score, group, width)
    peak = jnp.where(jnp.isneginf(peak), 0.0, peak)
    each = jnp.clip(group, 0, max(width - 1, 0))
    weight = jnp.where(group < 0, 0.0, jnp.exp(score - jnp.take_along_axis(peak, each, axis=1)))[..., None]
    sums = totals(jnp.concatenate([weight * rows, weight, jnp.ones_like(weight)], axis=-1), group, width)
    mass, votes = sums[..., -2], jnp.maximum(sums[..., -1], 1)
    row = sums[..., :-2] / jnp.where(mass > 0, mass, 1)[..., None]
    wanted = peak + jnp.log(jnp.where(mass > 0, mass, 1) / votes)
    have = scale * jnp.einsum("bwc,bc->bw", row, query, precision=lax.Precision.HIGHEST)
    rescale = jnp.clip(jnp.where(have == 0, 1.0, wanted / jnp.where(have == 0, 1.0, have)), *RESCALE)
    bias = jnp.log(votes) + wanted - rescale * have
    return MergedRows(row[..., : observed.spec.latent_dim], rescale[..., None] * row, bias, count)
