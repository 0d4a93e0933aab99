"""Tier 2: scan the index, fire the rows that could beat what is attended, fetch them exactly (VestigeKV §3)."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import kernels_pallas
from kernels_pallas import Margins, Part, codes, empty
from kernels_pallas.fetchlist import count_fired
from kernels_pallas.words import take_rows, to_floats
from vestige_jax import attention
from vestige_jax import index as indexing
from vestige_jax.cache import Cache
from vestige_jax.partition import members
from vestige_jax.spec import CacheSpec

Array = jax.Array


class Recalled(NamedTuple):
    """What one step brought back."""

    part: Part  # attention over the fetched rows
    fired: Array  # [B] int32, rows whose margin is >= 0, uncapped
    fetched: Array  # [B] int32
    rows: Array | None  # [B, A] bool, the rows fetched, if CacheSpec(trace=True)
    overflowed: Array  # [B] bool, more fired than `fetch`
    gate: Array  # [B, H] bool, heads that may fire


Rule = Callable[[CacheSpec, Cache, Array, Part], Recalled]
"""(spec, cache, query [B, H, C], its attention over the attended tier) -> archived rows, each brought back once.

`recall` is one; another, given as CacheSpec.recall, has to be hashable and equal to its copies: a frozen dataclass.
"""


def gate(cache: Cache, attended: Part) -> Array:
    """Heads unsure of what they attend: their entropy over the attended tier is above the threshold. bool [B, H]."""
    entropy = jnp.where(jnp.isneginf(attended.lse), 0.0, attended.lse - attended.mean)  # nothing attended: 0, not -inf
    return entropy > cache.calibration.threshold[:, None]


def recall(spec: CacheSpec, cache: Cache, query: Array, attended: Part) -> Recalled:
    """Scan and fetch for query [B, H, C], given its attention over the attended tier."""
    probe = _certified(cache, indexing.prepare(spec, cache.index.basis, query, cache.index.step))
    open_ = gate(cache, attended)
    threshold = jnp.where(open_, attended.peak, jnp.inf)
    margins = scan(spec, cache, probe, threshold)
    count = margins.fired.sum(-1, dtype=jnp.int32)
    overflowed = count > spec.fetch
    if spec.overflow == "dense":  # the step serves such a sequence dense
        margins = margins._replace(fired=jnp.where(overflowed[:, None], 0, margins.fired))
    else:
        margins = lax.cond(overflowed.any(), functools.partial(_largest, spec), lambda m: m, margins)
    part, fetched, rows = _fetch(spec, cache, query, probe, threshold, margins)
    return Recalled(part, count, fetched, rows, overflowed, open_)


def _certified(cache: Cache, probe: indexing.Probe) -> indexing.Probe:
    """The probe with z folded into its residual."""
    return probe._replace(residual=cache.calibration.z[:, None, None] * probe.residual)


def scan(spec: CacheSpec, cache: Cache, probe: indexing.Probe, threshold: Array) -> Margins:
    """Best margin of every archived row over the heads, -inf for kept and unwritten rows."""
    archive, index = cache.archive, cache.index
    if spec.copied_branch:  # it is part of the code
        both = jnp.concatenate([probe.branch, probe.sketch], axis=-1)
        probe = probe._replace(branch=probe.branch[..., :0], sketch=both)
    rows, start = (index.branch, 0) if spec.branch_apart else (archive.words, spec.latent_dim)
    return kernels_pallas.scan(
        *probe, threshold, rows, index.code, index.bound, ~archive.kept, archive.closed, latent_dim=start,
        implementation=spec.implementation,
    )  # fmt: skip


def _largest(spec: CacheSpec, margins: Margins) -> Margins:
    """The `fetch` largest margins that fired; ties to the lower position."""
    margin = margins.margin
    values, order = lax.top_k(margin, min(spec.fetch, margin.shape[-1]))
    values = jnp.where(values >= 0, values, -jnp.inf)
    margin = jnp.put_along_axis(jnp.full_like(margin, -jnp.inf), order, values, axis=-1, inplace=False)
    return Margins(margin, count_fired(margin))


def _fetch(spec, cache, query, probe, threshold, margins) -> tuple[Part, Array, Array | None]:
    """Attention over the fired rows, gathered at the smallest static width that holds them."""
    widths = spec.fetch_widths
    most = margins.fired.sum(-1).max()
    branches = [functools.partial(_fetch_width, spec, width) for width in widths]
    fits = jnp.searchsorted(jnp.asarray(widths), most)
    return lax.switch(fits, branches, cache, query, probe, threshold, margins)


def _fetch_width(spec, width, cache, query, probe, threshold, margins) -> tuple[Part, Array, Array | None]:
    nothing = jnp.zeros(margins.margin.shape, bool) if spec.trace else None
    if width == 0:
        batch, heads, _ = query.shape
        return empty(batch, heads, spec.latent_dim), jnp.zeros(batch, jnp.int32), nothing
    position, count, _ = kernels_pallas.compact(margins, width, implementation=spec.implementation)
    if spec.top_j is not None:
        position, count = _top_j(spec, cache, probe, threshold, position, count)
    part = attention.over_list(spec, query, cache.archive.words, position, count)
    return part, count, _listed(position, count, nothing) if spec.trace else None


def _listed(position: Array, count: Array, nothing: Array) -> Array:
    """The fetch list as a mask of the archive, bool [B, A]; `nothing` is the mask of none."""
    listed = jnp.arange(position.shape[1]) < count[:, None]
    each = jnp.arange(position.shape[0])[:, None]
    return nothing.at[each, position].max(listed, mode="drop")


def _top_j(spec, cache, probe, threshold, position, count) -> tuple[Array, Array]:
    """Of the fetch list, the rows that are among some head's `top_j` fired scores; still ascending (§3)."""
    width = position.shape[1]
    rows = to_floats(take_rows(cache.archive.words, position))[..., : spec.row_dim]
    score = probe_scores(
        probe, rows, indexing.sketch(spec, take_rows(cache.index.code, position)),
        jnp.moveaxis(take_rows(jnp.moveaxis(cache.index.bound, 1, 2), position), 2, 1),
    )  # fmt: skip
    fires = (score >= threshold[..., None]) & (jnp.arange(width) < count[:, None, None])
    best, order = lax.top_k(jnp.where(fires, score, -jnp.inf), min(spec.top_j, width))
    chosen = jnp.put_along_axis(jnp.zeros_like(fires), order, best > -jnp.inf, axis=-1, inplace=False).any(1)
    slot, count = members(chosen, width)
    return jnp.take_along_axis(position, jnp.minimum(slot, width - 1), axis=1), count


def probe_scores(probe: indexing.Probe, rows: Array, code: Array, bound: Array) -> Array:
    """Index scores of rows [B, S, C] with entries code [B, S, K] and bound [B, E, S]: float32 [B, Q, S]."""
    branch = rows[..., rows.shape[-1] - probe.branch.shape[-1] :]
    einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    score = einsum("bqp,bsp->bqs", probe.branch, branch.astype(jnp.float32))
    score += einsum("bqk,bsk->bqs", probe.sketch, codes.to_float32(code))
    return score + einsum("bqe,bes->bqs", probe.residual, bound)
