"""One path for every method: prefill once, compress the state, decode through the policy (VestigeKV §4, §5).

Prefill and decode are `vestige_jax.generation`'s; here is what lies between them.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp

import vestige_jax as vk
from experiments.trials import rereading
from vestige_jax import baselines, generation
from vestige_jax.cache import no_merged
from vestige_jax.models import Decoder, DecoderState, MLAState
from vestige_jax.models.cached import PROMPT_QUERIES
from vestige_jax.models.observation import nothing_seen

Array = jax.Array

PHRASE = "\n\nRepeat the context above.\n\n"
"""What a prompt is read again behind, for methods that ask for it."""


def served(spec: vk.CacheSpec, method: baselines.Method) -> vk.CacheSpec:
    """The spec that a method decodes under. They differ in tier 1's room at most: all share one prefilled state."""
    changes = {"recall": method.recall}
    if method.selector is None:
        changes["activation"] = spec.capacity + 1
    if method.kind == "share":  # a layer may get all that the others do without
        changes |= {"ratio": 1.0, "budget": None}
    if method.kind == "merge":
        changes["merged"] = max(1, spec.tier1_rows - spec.sinks)
    return dataclasses.replace(spec, **changes)


@functools.cache
def check(spec: vk.CacheSpec, method: baselines.Method) -> None:
    """Raises ValueError for a method that cannot be served under this spec. It is traced; nothing is computed."""
    if method.selector is not None:
        jax.eval_shape(functools.partial(_on_zeros, served(spec, method), spec, method))


def _on_zeros(spec, prefilled, method) -> vk.Cache:
    """Compression of a layer of zeros, and a step of it where a recall rule has its own conditions."""
    shape = (1, PROMPT_QUERIES, spec.num_heads, spec.row_dim)
    seen = dataclasses.replace(nothing_seen(spec, 1), repeat=jnp.zeros((1, spec.capacity)))
    layer = MLAState(vk.init(prefilled, 1), jnp.zeros(shape), jnp.full(shape[:2], -1, jnp.int32), seen)
    [cache] = _choose(spec, method.selector, method.kind, [layer], jnp.int32(1), jnp.zeros((1, 1), jnp.uint32))
    if callable(spec.recall):
        vk.attend(spec, cache, layer.queries[:, 0])
    return cache


def prefill(
    model: Decoder,
    spec: vk.CacheSpec,
    ids: Array,
    methods: Iterable[baselines.Method],
    *,
    chunk: int,
    phrase: Sequence[int] | None = None,
) -> DecoderState:
    """The state at the cut of prompts ids [B, T], with all that the methods look at.

    Args: phrase, token ids of PHRASE, for methods that read the prompt again. Raises ValueError where it is missing.
    """
    _, state = generation.prefill(model, spec, ids, chunk=chunk, observe=True)
    rereads = [method.name for method in methods if method.rereads]
    if rereads and not phrase:
        raise ValueError(f"phrase={phrase!r} must hold tokens: {rereads} read the prompt again behind it")
    return rereading.observe(model, spec, state, ids, phrase, chunk=chunk) if rereads else state


def compress(
    spec: vk.CacheSpec, state: DecoderState, method: baselines.Method, count: int, seeds: Array
) -> DecoderState:
    """The state with tier 1 of every MLA layer as the method's selector has it: `count` rows besides the sinks.

    With certified recall, each layer's index is then calibrated on its last prompt queries. Dense: the state as it is.

    Args
      spec from `served`; state from `prefill`, it stays usable.
      count m <= tier-1 rows of the spec that the state was made with, less its sinks; a smaller one leaves room empty.
      seeds uint32 [layers, B], what a random selector draws from.
    Raises ValueError for a state that lacks what the selector looks at.
    """
    if method.selector is None:
        return state
    layers = list(state.layers)
    cached = [i for i, layer in enumerate(layers) if isinstance(layer, MLAState)]
    if any(layers[i].seen is None for i in cached):
        raise ValueError("the state was prefilled without observe=True; use experiments.trials.serving.prefill")
    chosen = _choose(spec, method.selector, method.kind, [layers[i] for i in cached], jnp.int32(count), seeds)
    for i, cache in zip(cached, chosen, strict=True):
        if spec.recall == "certified":
            cache = vk.calibrate(spec, cache, layers[i].queries, layers[i].positions)
        layers[i] = dataclasses.replace(layers[i], cache=cache)
    return dataclasses.replace(state, layers=tuple(layers))


def _choose(spec, selector, kind: str, layers: list[MLAState], count, seeds) -> list[vk.Cache]:
    if kind == "share":
        return _share(spec, selector, layers, count, seeds)
    one = _merge if kind == "merge" else _keep
    return [one(spec, selector, layer, count, seed) for layer, seed in zip(layers, seeds, strict=True)]


@functools.partial(jax.jit, static_argnames=("spec", "selector"))
def _keep(spec, selector, layer: MLAState, count, seed) -> vk.Cache:
    return vk.keep_set(spec, layer.cache, baselines.select(selector, observed(spec, layer, count, seed)))


@functools.partial(jax.jit, static_argnames=("spec", "selector"))
def _share(spec, selector, layers: list[MLAState], count, seeds) -> list[vk.Cache]:
    seen = [observed(spec, layer, count, seed) for layer, seed in zip(layers, seeds, strict=True)]
    kept = baselines.share(selector, seen)
    return [vk.keep_set(spec, _room(spec, layer.cache), mask) for layer, mask in zip(layers, kept, strict=True)]


@functools.partial(jax.jit, static_argnames=("spec", "selector"))
def _merge(spec, selector, layer: MLAState, count, seed) -> vk.Cache:
    seen = observed(spec, layer, count, seed)
    return vk.merge_rows(spec, _room(spec, layer.cache), seen.live & ~seen.others, *selector(seen))


def _room(spec: vk.CacheSpec, cache: vk.Cache) -> vk.Cache:
    """The cache with tier 1 and merged rows as this spec lays them out, both empty."""
    batch = cache.fault.shape[0]
    return dataclasses.replace(cache, tier1=vk.init(spec, batch).tier1, merged=no_merged(spec, batch))


def observed(spec: vk.CacheSpec, layer: MLAState, count: Array, seed: Array) -> baselines.Observed:
    """What a selector may know of a prefilled layer: count int32 [] or [B], seed uint32 [B]."""
    archive, seen = layer.cache.archive, layer.seen
    closed = slice(spec.archive_rows)
    return baselines.Observed(
        rows=archive.rows[..., : spec.row_dim],
        closed=archive.closed,
        count=jnp.broadcast_to(count, archive.closed.shape),
        queries=layer.queries,
        positions=layer.positions,
        mass=seen.mass[:, closed],
        seed=seed,
        spec=spec,
        query_mean=seen.mean,
        query_covariance=seen.covariance,
        value_norms=seen.values[:, closed],
        repeat=None if seen.repeat is None else seen.repeat[:, closed],
    )
