"""One MLA layer in the middle of decoding: a filled cache, the same rows as a plain array, and queries to ask of it.

Rows and queries are synthetic, drawn from a seed. Latents are RMS-normed with a falling spectrum, branches noisy with a
spike here and there, scores spread over a few nats. What decides the work of a step is how many rows fire, and random
rows know nothing of that: so z is set, per sequence, to the value at which the wanted share of the archive fires.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

import vestige_jax as vj
from kernels_pallas.words import to_floats
from vestige_jax import attention, calibration, recall
from vestige_jax import index as indexing
from vestige_jax.cache import Cache, Calibration, Index
from vestige_jax.spec import CacheSpec

Array = jax.Array

RING = 8  # queries and rows that the steps go around in
SPREAD = 2.5  # nats, standard deviation of the scores of a head
NOISE, SPIKE, SPIKES = 0.3, 2.0, 1 / 64  # of a branch: deviation, that of a spike, share of rows that have one


@dataclasses.dataclass
class Scene:
    """A layer to time. Steps that donate the cache put its successor in its place."""

    spec: CacheSpec
    cache: Cache
    words: Array  # [B, S, C] bits of every row, and of one more for the step: what a model without the policy holds
    queries: Array  # [N, B, H, C]
    new: Array  # [N, B, C], rows that the steps append
    closed: int
    tail: int

    @property
    def batch(self) -> int:
        return self.queries.shape[1]

    @property
    def total(self) -> int:
        """Rows that a step sees, its own included."""
        return self.closed + self.tail + 1


class Reindexed(Scene):
    """The rows of a scene under another index. Everything but index and calibration is the scene's own, not a copy."""

    def __init__(self, scene: Scene, spec: CacheSpec, index: Index, calibrated: Calibration):
        self.of, self.index, self.calibrated, self.spec = scene, index, calibrated, spec
        for name in ("words", "queries", "new", "closed", "tail"):
            setattr(self, name, getattr(scene, name))

    @property
    def cache(self) -> Cache:
        return dataclasses.replace(self.of.cache, index=self.index, calibration=self.calibrated)

    @cache.setter
    def cache(self, cache: Cache) -> None:
        self.index, self.calibrated, own = cache.index, cache.calibration, self.of.cache
        self.of.cache = dataclasses.replace(cache, index=own.index, calibration=own.calibration)


def reindexed(scene: Scene, share: float, **kind) -> Reindexed:
    """The scene with an index of another `kind`, fitted to its queries and rows; as many rows fire."""
    spec, batch = dataclasses.replace(scene.spec, **kind), scene.batch
    asked = jnp.moveaxis(scene.queries, 0, 1).reshape(batch, -1, spec.row_dim)

    @jax.jit
    def fitted(cache):
        cache = dataclasses.replace(cache, index=vj.init(spec, batch).index)
        return calibration.refit(spec, cache, asked, jnp.ones(asked.shape[:2], bool)).index

    made = Reindexed(scene, spec, fitted(scene.cache), jax.tree.map(jnp.copy, scene.cache.calibration))
    z = _z(spec, made.cache, scene.queries, share)
    made.calibrated = dataclasses.replace(made.calibrated, z=z)
    return made


def build(spec: CacheSpec, batch: int, closed: int, tail: int, share: float, seed: int) -> Scene:
    """`closed` rows (whole blocks) of which `share` fires on average, and `tail` < block more."""
    key = jax.random.key(seed)
    queries = draw_queries(spec, jax.random.fold_in(key, 0), batch)
    cache = vj.init(spec, batch)
    asked = jnp.moveaxis(queries, 0, 1).reshape(batch, -1, spec.row_dim)
    basis = jax.jit(indexing.fit, static_argnums=0)(spec, asked, jnp.ones(asked.shape[:2], bool))
    cache = dataclasses.replace(cache, index=dataclasses.replace(cache.index, basis=basis))
    for i in range(closed // spec.block + 1):
        size = spec.block if i * spec.block < closed else tail
        rows = draw_rows(spec, jax.random.fold_in(key, i + 1), batch, spec.block)
        cache = _append(spec, cache, rows, jnp.full(batch, size, jnp.int32))
    cache = dataclasses.replace(
        cache, calibration=dataclasses.replace(cache.calibration, z=_z(spec, cache, queries, share))
    )
    new = draw_rows(spec, jax.random.fold_in(key, 1 << 20), batch, RING)
    plain = _plain(spec, cache, closed, tail)
    return Scene(spec, cache, plain, queries, jnp.moveaxis(new, 1, 0), closed, tail)


_append = jax.jit(vj.append, static_argnums=0, donate_argnums=1)


def _deviations(spec: CacheSpec) -> Array:
    """Standard deviation of every number of a row, float32 [C]."""
    fall = (1 + jnp.arange(spec.latent_dim)) ** -0.5
    branch = math.sqrt(NOISE**2 + SPIKES * SPIKE**2)
    return jnp.concatenate(
        [fall * jnp.sqrt(spec.latent_dim) / jnp.linalg.norm(fall), jnp.full(spec.branch_dim, branch)]
    )


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def draw_rows(spec: CacheSpec, key: Array, batch: int, count: int) -> Array:
    """Rows [B, count, C] in the spec's dtype."""
    keys = jax.random.split(key, 4)
    latent = jax.random.normal(keys[0], (batch, count, spec.latent_dim)) * _deviations(spec)[: spec.latent_dim]
    latent *= lax.rsqrt(jnp.square(latent).mean(-1, keepdims=True))
    branch, spike = (jax.random.normal(k, (batch, count, spec.branch_dim)) for k in keys[1:3])
    rare = jax.random.uniform(keys[3], (batch, count, 1)) < SPIKES
    return jnp.concatenate([latent, NOISE * branch + jnp.where(rare, SPIKE * spike, 0)], -1).astype(spec.dtype)


@functools.partial(jax.jit, static_argnums=(0, 2))
def draw_queries(spec: CacheSpec, key: Array, batch: int) -> Array:
    """Absorbed queries [RING, B, H, C] in the spec's dtype."""
    deviations = _deviations(spec)
    query = jax.random.normal(key, (RING, batch, spec.num_heads, spec.row_dim)) * deviations
    size = spec.scale * jnp.linalg.norm(query * deviations, axis=-1, keepdims=True)
    return (SPREAD / size * query).astype(spec.dtype)


def _z(spec: CacheSpec, cache: Cache, queries: Array, share: float) -> Array:
    """Mean over the queries of the z at which `share` of the archived rows fires: float32 [B]."""
    return jnp.stack([_z_of(spec, cache, query, share) for query in queries]).mean(0)


@functools.partial(jax.jit, static_argnums=0)
def _z_of(spec, cache, query, share):
    threshold = attention.attended(spec, cache, query).peak
    probe = indexing.prepare(spec, cache.index.basis, query, cache.index.step)
    slots = jnp.arange(spec.archive_rows)

    def one(sequence):
        probe, threshold, archive, index = jax.tree.map(lambda x: x[None], sequence)
        rows = to_floats(archive.words)[..., spec.latent_dim : spec.row_dim]
        code = indexing.sketch(spec, index.code)
        known = recall.probe_scores(probe._replace(residual=0 * probe.residual), rows, code, index.bound)
        need = (threshold[..., None] - known) / (probe.residual * index.bound)  # one term: eta
        archived = ~archive.kept & (slots < archive.closed)
        ordered = jnp.sort(jnp.where(archived, need.min(1), jnp.inf), -1)[0]
        return ordered[jnp.round(share * archived.sum()).astype(jnp.int32)]

    return lax.map(one, (probe, threshold, cache.archive, cache.index))


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _plain(spec, cache, closed, tail):
    words = jnp.concatenate([cache.archive.words[:, :closed], cache.tail.words[:, : tail + 1]], 1)
    return words[..., : spec.row_dim]
