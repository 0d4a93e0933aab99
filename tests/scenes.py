"""Small filled caches of ragged lengths, and the comparison of what they serve with the oracle."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vestige_jax as vj
from tests import oracle_attention as oracle
from tests.sources import SOURCES, C, H, P, R
from vestige_jax import attention, recall

SCALE, CAPACITY = 0.3, 84
LENGTHS = (70, 37, 9)  # blocks of 16: 4 closed and a tail, 2 closed and a tail, a tail only


def small_spec(**changes) -> vj.CacheSpec:
    """Five blocks of 16 rows and a tail that cannot fill, a quarter kept besides 2 sinks, rank 5 of 12, float32."""
    fields = {"latent_dim": R, "branch_dim": P, "num_heads": H, "scale": SCALE, "capacity": CAPACITY}
    fields |= {"block": 16, "ratio": 1 / 4, "sinks": 2, "rank": 5, "fetch": 64}
    fields |= {"dtype": jnp.float32, "sketch_dtype": jnp.float32}
    return vj.CacheSpec(**(fields | changes))


class Scene(NamedTuple):
    """A filled cache and the rows that went in."""

    spec: vj.CacheSpec
    cache: vj.Cache
    rows: np.ndarray  # [B, n, C], sequence b holds the first lengths[b]
    lengths: tuple

    def sequence(self, b: int) -> oracle.Sequence:
        """Sequence b for the oracle: rows rounded to the spec's dtype; tiers, V, z and gate of the cache."""
        count, held = self.lengths[b], self.cache.calibration
        rows = oracle.rounded(self.rows[b, :count], self.spec.dtype)
        tier = np.asarray(vj.where(self.spec, self.cache))[b, :count]
        basis = np.asarray(self.cache.index.basis[b], np.float64)
        return oracle.Sequence(rows, tier, basis, float(held.z[b]), float(held.threshold[b]))

    def served(self, b: int, query, row=None) -> oracle.Served:
        """What the oracle serves sequence b, with one more row in its tail if given."""
        spec, sequence = self.spec, self.sequence(b)
        if row is not None:
            rows = np.vstack([sequence.rows, oracle.rounded(row, spec.dtype)])
            sequence = sequence._replace(rows=rows, tier=np.append(sequence.tier, oracle.TAIL))
        served = oracle.serve(
            sequence, oracle.rounded(query, spec.dtype), latent_dim=spec.latent_dim, scale=spec.scale,
            sketch_dtype=spec.sketch_dtype, fetch=spec.fetch, overflow=spec.overflow, top_j=spec.top_j,
            activation=spec.activation, recall=spec.recall == "certified",
        )  # fmt: skip
        assert not np.any(np.abs(served.margin) < 1e-5), "a margin is too close to call in float32: take another seed"
        return served

    def attention(self, b: int, query, mask=slice(None)) -> oracle.Attention:
        """Brute force over the rows of sequence b in the mask."""
        rows = self.sequence(b).rows[mask]
        return oracle.attention(oracle.rounded(query, self.spec.dtype), rows, self.spec.latent_dim, self.spec.scale)

    def z_that_fires(self, query, count: int) -> float:
        """A z at which exactly `count` archived rows of sequence 0 fire."""
        spec, sequence = self.spec, self.sequence(0)
        archived = sequence.tier == oracle.ARCHIVED
        peak = self.attention(0, query, ~archived).peak
        known, certificate = oracle.index_terms(
            oracle.rounded(query, spec.dtype), sequence.rows[archived], sequence.basis, latent_dim=spec.latent_dim,
            scale=spec.scale, sketch_dtype=spec.sketch_dtype,
        )  # fmt: skip
        crossing = np.sort(((peak[:, None] - known) / certificate).min(0))
        crossing = np.concatenate([[crossing[0] - 1], crossing, [crossing[-1] + 1]])
        return crossing[count : count + 2].mean()

    def under(self, **policy) -> "Scene":
        """The same cache served under another policy."""
        return self._replace(spec=dataclasses.replace(self.spec, **policy))

    def calibrated(self, z, threshold=-np.inf) -> "Scene":
        """The same scene with this z and gate threshold installed."""
        batch = len(self.lengths)
        held = dataclasses.replace(
            self.cache.calibration, z=jnp.full(batch, z, jnp.float32), threshold=jnp.full(batch, threshold, jnp.float32)
        )
        return self._replace(cache=dataclasses.replace(self.cache, calibration=held))

    def grown(self, row) -> "Scene":
        """The same scene with row [B, C] among its rows (the cache is the caller's to replace)."""
        rows = np.array(self.rows)
        rows[np.arange(len(row)), self.lengths] = row
        return self._replace(rows=rows, lengths=tuple(n + 1 for n in self.lengths))


def fill(spec: vj.CacheSpec, rows, lengths) -> Scene:
    """A cache with rows [B, n, C] appended; what lies past a length is NaN."""
    rows = np.array(rows, np.float32)
    for b, count in enumerate(lengths):
        rows[b, count:] = np.nan
    cache = vj.append(spec, vj.init(spec, len(lengths)), jnp.asarray(rows), jnp.asarray(lengths, jnp.int32))
    return Scene(spec, cache, rows, tuple(lengths))


def scene(seed=0, source="random", lengths=LENGTHS, **changes) -> Scene:
    """A filled cache of a small spec."""
    rng = np.random.default_rng(seed)
    spec = small_spec(**changes)
    return fill(spec, SOURCES[source].rows(rng, len(lengths), spec.capacity), lengths)


def queries_for(rng, rows, *shape) -> np.ndarray:
    """Queries [*shape, C] that each look for some row of rows [n, C], with noise: many are hard."""
    wanted = rows[rng.integers(len(rows), size=shape)] - rows.mean(0)
    wanted[..., R:] *= 0.3  # else outliers, which are kept, win
    return (2 * wanted + rng.normal(size=(*shape, rows.shape[-1]))).astype(np.float32)


def asked(seed, size=2.0) -> np.ndarray:
    """One random query per head: [B, H, C]."""
    return (size * np.random.default_rng(1000 + seed).normal(size=(len(LENGTHS), H, C))).astype(np.float32)


TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-4}


def assert_served(here: Scene, query, out, stats, row=None):
    """`out` is float64 attention over exactly the oracle's rows (with `row` in the tail), and `stats` counts them."""
    spec = here.spec
    for b in range(len(here.lengths)):
        served, sequence = here.served(b, query[b], None if row is None else row[b]), here.sequence(b)
        rows = sequence.rows if row is None else np.vstack([sequence.rows, oracle.rounded(row[b], spec.dtype)])
        tier = sequence.tier
        exact = oracle.attention(oracle.rounded(query[b], spec.dtype), rows[served.attended], R, spec.scale)
        np.testing.assert_allclose(out[b], exact.out, rtol=0, atol=TOLERANCE[spec.dtype.name])
        assert stats.kept[b] == (tier == oracle.KEPT).sum()
        assert stats.fired[b] == served.fires.any(0).sum()
        assert stats.fetched[b] == served.attended[: len(tier)][tier == oracle.ARCHIVED].sum()
        assert stats.overflowed[b] == served.overflowed
        assert stats.attended[b] == pytest.approx(served.attended.mean() if len(rows) else 0)
        assert stats.gate[b] == pytest.approx(served.open.mean() if spec.recall == "certified" else 0)
        assert stats.clamped[b] == here.cache.calibration.clamped[b]
        assert stats.fault[b] == 0
        if stats.rows is not None:
            expected = served.attended[: len(tier)] & (tier == oracle.ARCHIVED)
            np.testing.assert_array_equal(np.flatnonzero(stats.rows[b]), np.flatnonzero(expected))


attend_chunk = jax.jit(vj.attend_chunk, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def both_parts(spec, cache, query):
    """The attended tier, and everything."""
    return attention.attended(spec, cache, query), attention.dense(spec, cache, query)


@functools.partial(jax.jit, static_argnums=0)
def best_scores(spec, cache, query):
    """Best score per head over attended and fetched rows, and over all rows."""
    near = attention.attended(spec, cache, query)
    fetched = recall.recall(spec, cache, query, near)
    return jnp.maximum(near.peak, fetched.part.peak), attention.dense(spec, cache, query).peak
