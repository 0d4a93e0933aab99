"""What the benchmark times: a decode step with the policy, dense ones, and every stage of the step alone.

A program makes `inner` steps in one compiled loop, as a generation does, and each asks another query of the ring.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import vestige_jax as vj
from experiments.benchmark import bench_account as account
from experiments.benchmark.bench_clock import Program
from experiments.benchmark.bench_scene import Scene
from kernels_pallas.words import to_floats, widened
from vestige_jax import attention, decode
from vestige_jax.cache import Cache
from vestige_jax.spec import CacheSpec

Array = jax.Array
Item = dict[str, Array]  # what one step is given; a ring of them has a leading axis

CHUNKS = (128, 4096)  # rows that a plain dense form holds at once: few stay in a core's cache, many keep two cores busy
DENSE = ("dense cache", *(f"dense {dtype} {size}" for dtype in ("native", "float32") for size in CHUNKS))
EINSUM = ("einsum native", "einsum float32")


def names(dtype: str) -> tuple[str, ...]:
    """The programs of a step: where rows are float32 already, nothing is upcast."""
    return ("policy", *(name for name in (*DENSE, *EINSUM) if not (dtype == "float32" and dtype in name)))


def steps(scene: Scene, inner: int, seen: list) -> list[Program]:
    """The policy's decode step and the dense ones. `seen` receives the Stats of the policy's steps, in order."""
    spec, ring = scene.spec, {"query": scene.queries, "row": scene.new}
    size = {"inner": inner, **account.dense(scene)}
    programs = [
        policy("policy", scene, inner, seen),
        updating("dense cache", scene, ring, functools.partial(_dense_step, spec, scene.tail), **size),
    ]
    dtypes = {"native": spec.dtype} | ({} if spec.dtype == jnp.float32 else {"float32": jnp.float32})
    for name, dtype in dtypes.items():
        forms = {f"dense {name} {chunk}": functools.partial(_by_chunks, chunk) for chunk in CHUNKS}
        for form, function in (forms | {f"einsum {name}": _einsum}).items():
            function = functools.partial(function, spec, dtype)
            programs.append(reading(form, lambda: scene.words, ring, function, **size))
    return programs


def policy(name: str, scene: Scene, inner: int, seen: list) -> Program:
    """The policy's decode step. `seen` receives its Stats, in order."""
    ring = {"query": scene.queries, "row": scene.new}
    return updating(name, scene, ring, functools.partial(policy_step, scene.spec, scene.tail), seen, inner=inner)


def updating(name, scene: Scene, ring: Item, function: Callable, seen: list | None = None, *, inner=1, **counts):
    """A program of function(cache, item) -> (cache, out, stats): the scene's cache is donated and replaced."""
    run, start = jax.jit(loop(function, inner), donate_argnums=0), itertools.count(step=inner)

    def call():
        scene.cache, out, stats = run(scene.cache, ring, next(start))
        if seen is not None:
            seen.append(stats)
        return out

    return Program(name, call, inner=inner, **counts)


def reading(name, held: Callable[[], Any], ring: Item, function: Callable, *, inner=1, **counts) -> Program:
    """A program of function(held(), item) -> out, which changes nothing."""

    @jax.jit
    def run(held, ring, start):
        return loop(lambda nothing, item: (nothing, function(held, item), None), inner)((), ring, start)[1]

    start = itertools.count(step=inner)
    return Program(name, lambda: run(held(), ring, next(start)), inner=inner, **counts)


def loop(function: Callable, inner: int) -> Callable:
    """(state, ring, start) -> (state, last out, all stats) of `inner` calls of function(state, item) -> the same."""

    def run(state, ring, start):
        def body(carry, i):
            state, out, stats = function(carry[0], jax.tree.map(lambda x: x[i % x.shape[0]], ring))
            return (state, out), stats

        first = jax.tree.map(lambda x: x[0], ring)
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, state, first)[1])
        (state, out), stats = lax.scan(body, (state, nothing), start + jnp.arange(inner))
        return state, out, stats

    return run


def at(cache: Cache, tail: int) -> Cache:
    """The cache with `tail` rows in its tail: so every step is timed at the same length, and none closes a block."""
    return dataclasses.replace(
        cache, tail=dataclasses.replace(cache.tail, length=jnp.full_like(cache.tail.length, tail))
    )


def policy_step(spec: CacheSpec, tail: int, cache: Cache, item: Item):
    out, stats, cache = vj.step(spec, at(cache, tail), item["query"], item["row"])
    return cache, out, stats


def _dense_step(spec: CacheSpec, tail: int, cache: Cache, item: Item):
    cache = append_row(spec, tail, cache, item)[0]
    return cache, attention.dense(spec, cache, item["query"]).out, None


def append_row(spec: CacheSpec, tail: int, cache: Cache, item: Item):
    cache = at(cache, tail)
    written = jnp.ones(cache.fault.shape, bool)
    cache = dataclasses.replace(cache, tail=decode._write_row(spec, cache.tail, item["row"], written))
    return cache, cache.tail.length, None


def _einsum(spec: CacheSpec, dtype, words: Array, item: Item) -> Array:
    """Attention as anyone would write it."""
    query, rows = item["query"].astype(dtype), to_floats(words).astype(dtype)
    score = spec.scale * jnp.einsum("bhc,bsc->bhs", query, rows, preferred_element_type=jnp.float32)
    weight = jax.nn.softmax(score, axis=-1).astype(dtype)
    return jnp.einsum("bhs,bsr->bhr", weight, rows[..., : spec.latent_dim], preferred_element_type=jnp.float32)


def _by_chunks(chunk_rows: int, spec: CacheSpec, dtype, words: Array, item: Item) -> Array:
    """The same with a running softmax, so that rows are read once and converted where they are read."""
    query, (batch, count, _) = item["query"].astype(dtype), words.shape
    size = min(chunk_rows, count)

    def body(i, carry):
        peak, total, out = carry
        start = jnp.minimum(i * size, count - size)  # the last chunk overlaps the one before
        chunk = lax.dynamic_slice_in_dim(words, start, size, 1)
        chunk = widened(chunk) if dtype == jnp.float32 else to_floats(chunk)
        score = spec.scale * jnp.einsum("bhc,bsc->bhs", query, chunk, preferred_element_type=jnp.float32)
        score = jnp.where(start + jnp.arange(size) >= i * size, score, -jnp.inf)
        top = jnp.maximum(peak, score.max(-1))
        weight, fade = jnp.exp(score - top[..., None]), jnp.exp(peak - top)
        value = jnp.einsum("bhs,bsr->bhr", weight.astype(dtype), chunk[..., : spec.latent_dim],
                           preferred_element_type=jnp.float32)  # fmt: skip
        return top, fade * total + weight.sum(-1), fade[..., None] * out + value

    heads = (batch, spec.num_heads)
    start = jnp.full(heads, -jnp.inf), jnp.zeros(heads), jnp.zeros((*heads, spec.latent_dim))
    _, total, out = lax.fori_loop(0, -(-count // size), body, start)
    return out / total[..., None]
