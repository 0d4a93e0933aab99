"""The stages of a step alone, what a closed block costs, and what the policy adds to prefill."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

import kernels_pallas
import vestige_jax as vj
from experiments.benchmark import bench_account as account
from experiments.benchmark.bench_clock import Program
from experiments.benchmark.bench_programs import Item, append_row, at, reading, updating
from experiments.benchmark.bench_scene import Scene
from kernels_pallas import Margins
from kernels_pallas.words import to_words
from vestige_jax import attention, partition, recall
from vestige_jax import index as indexing
from vestige_jax.cache import Cache
from vestige_jax.spec import CacheSpec

Array = jax.Array

STAGES = ("attend tier 1", "attend tail", "scan", "compact", "fetch and attend", "append")
BLOCKS = ("sigma", "re-rank", "close")
PREFILL = ("append", "store")


def stages(scene: Scene, inner: int) -> list[Program]:
    """Each stage of a step on what the stage before it leaves; the fetch at the width that the step would choose."""
    spec, ring = scene.spec, _prepared(scene)
    fetched = int(ring["count"].max())
    width = next(width for width in spec.fetch_widths if width >= min(fetched, spec.fetch_widths[-1]))
    ring["position"] = ring["position"][..., :width]

    def make(name, function, **counts):
        return reading(name, lambda: scene.cache, ring, functools.partial(function, spec), inner=inner, **counts)

    mean = float(ring["count"].mean())
    return [
        make("attend tier 1", _attend_tier1, **account.attend(scene, account.kept(scene))),
        make("attend tail", _attend_tail, **account.attend(scene, scene.tail + 1)),
        make("scan", _scan, **account.scan(scene)),
        make("compact", functools.partial(_compact, width), **account.compact(scene, round(mean))),
        make("fetch and attend", _fetch, **account.attend(scene, round(mean))),
        updating("append", scene, ring, functools.partial(append_row, spec, scene.tail), inner=inner,
                 bytes=2 * scene.batch * account.row(scene)),
    ]  # fmt: skip


def scan(name: str, scene: Scene, inner: int) -> Program:
    """The scan alone, of a scene with another index: its thresholds come from the same attended rows."""
    ring = _prepared(scene)
    asked = {field: ring[field] for field in ("query", "threshold")}
    function = functools.partial(_scan, scene.spec)
    return reading(name, lambda: scene.cache, asked, function, inner=inner, **account.scan(scene))


def _prepared(scene: Scene) -> Item:
    """The ring, with the thresholds, margins and fetch list of every query."""
    each = [_prepare(scene.spec, scene.cache, query) for query in scene.queries]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    return {"query": scene.queries, "row": scene.new} | stacked


@functools.partial(jax.jit, static_argnums=0)
def _prepare(spec, cache, query):
    threshold = attention.attended(spec, cache, query).peak
    margins = _scan(spec, cache, {"query": query, "threshold": threshold})
    listed = kernels_pallas.compact(margins, spec.fetch_widths[-1], implementation=spec.implementation)
    return {"threshold": threshold, "margin": margins.margin, "fired": margins.fired,
            "position": listed.position, "count": listed.count}  # fmt: skip


def _attend_tier1(spec: CacheSpec, cache: Cache, item: Item):
    return attention.over(spec, item["query"], cache.tier1.words, cache.tier1.count)


def _attend_tail(spec: CacheSpec, cache: Cache, item: Item):
    return attention.over(spec, item["query"], cache.tail.words, cache.tail.length)


def _scan(spec: CacheSpec, cache: Cache, item: Item) -> Margins:
    probe = indexing.prepare(spec, cache.index.basis, item["query"], cache.index.step)
    probe = probe._replace(residual=cache.calibration.z[:, None, None] * probe.residual)
    return recall.scan(spec, cache, probe, item["threshold"])


def _compact(width: int, spec: CacheSpec, cache: Cache, item: Item):
    return kernels_pallas.compact(Margins(item["margin"], item["fired"]), width, implementation=spec.implementation)


def _fetch(spec: CacheSpec, cache: Cache, item: Item):
    return attention.over_list(spec, item["query"], cache.archive.words, item["position"], item["count"])


def blocks(scene: Scene) -> list[Program]:
    """Once in `block` tokens: sigma of the block, the re-rank of all closed rows, and all of a close."""
    spec = scene.spec
    everyone = jnp.ones(scene.batch, bool)

    def sigma(cache, item):
        branch = cache.tail.rows[..., spec.latent_dim : spec.row_dim]
        return vj.sigma(branch, block=spec.block, kappa=spec.lowpass_bins, method=partition._method())

    def rerank(cache, item):
        return partition.rerank(spec, cache, everyone), cache.tail.length, None

    def close(cache, item):
        cache = partition.rerank(spec, partition.close_full(spec, _reopened(spec, cache, spec.block)), everyone)
        return cache, cache.tail.length, None

    ring = {"row": scene.new}
    moved = {"bytes": 2 * scene.batch * spec.block * account.row(scene)}
    return [
        reading("sigma", lambda: scene.cache, ring, sigma),
        updating("re-rank", scene, ring, rerank),
        updating("close", scene, ring, close, **moved),
    ]


def prefill(scene: Scene) -> list[Program]:
    """A block of rows of a prompt: appended, closed and ranked, beside the same rows written and nothing else."""
    spec = scene.spec
    start = scene.closed - spec.block

    def append(cache, item):
        cache = vj.append(spec, _reopened(spec, cache, 0), item["rows"])
        return cache, cache.tail.length, None

    def store(cache, item):
        words = to_words(item["rows"], cache.archive.words.shape[2])
        words = lax.dynamic_update_slice_in_dim(cache.archive.words, words, start, 1)
        return dataclasses.replace(cache, archive=dataclasses.replace(cache.archive, words=words)), words[:, 0, 0], None

    ring = {"rows": _last_block(spec, scene.cache, start)[None]}
    moved = {"bytes": 2 * scene.batch * spec.block * account.row(scene)}
    return [updating("append", scene, ring, append, **moved), updating("store", scene, ring, store, **moved)]


@functools.partial(jax.jit, static_argnums=(0, 2))
def _last_block(spec, cache, start):
    return dataclasses.replace(cache.tail, words=cache.archive.words[:, start : start + spec.block]).rows[
        ..., : spec.row_dim
    ]


def _reopened(spec: CacheSpec, cache: Cache, tail: int) -> Cache:
    """The cache as it was before its last block closed, with `tail` rows in the tail."""
    archive = dataclasses.replace(cache.archive, closed=cache.archive.closed - spec.block)
    return at(dataclasses.replace(cache, archive=archive), tail)
