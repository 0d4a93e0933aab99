"""One path for every method: prefill once, compress the state, decode through the policy (VestigeKV §4, §5)."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import vestige_jax as vk
from vestige_jax import baselines
from vestige_jax.models import Decoder, DecoderState, MLAState

Array = jax.Array


class Forced(NamedTuple):
    """Teacher-forced decoding of tokens [B, L]."""

    logprob: Array  # [B, L - 1] float32, of tokens[:, 1:]
    greedy: Array  # [B, L - 1] int32, the likeliest token in its place
    stats: vk.Stats  # leading [L - 1, layers]; steps at or past length - 1 mean nothing


def served(spec: vk.CacheSpec, method: baselines.Method) -> vk.CacheSpec:
    """The spec that a method decodes under. All have the same layout, so that they share one prefilled state."""
    activation = spec.capacity + 1 if method.selector is None else spec.activation
    return dataclasses.replace(spec, recall=method.recall, activation=activation)


def prefill(model: Decoder, spec: vk.CacheSpec, ids: Array, chunk: int) -> DecoderState:
    """The state after ids [B, T], with the statistics that selectors look at. Attention is dense."""
    state = model.init_state(spec, ids.shape[0], observe=True)
    graph, weights = nnx.split(model)
    for start in range(0, ids.shape[1], chunk):
        state = _prefill(graph, weights, spec, ids[:, start : start + chunk], state)
    return state


@functools.partial(jax.jit, static_argnames=("graph", "spec"), donate_argnames="state")
def _prefill(graph, weights, spec, ids, state):
    return nnx.merge(graph, weights).prefill(spec, ids, state, logits="none")[1]


def compress(
    spec: vk.CacheSpec, state: DecoderState, method: baselines.Method, count: int, seeds: Array
) -> DecoderState:
    """The state with tier 1 of every MLA layer as the method's selector has it: `count` rows besides the sinks.

    Args: spec from `served`; seeds uint32 [layers, B], what a random selector draws from.
    With recall, each layer's index is then calibrated on its last prompt queries. Dense: the state as it is.
    """
    if method.selector is None:
        return state
    layers = list(state.layers)
    cached = [i for i, layer in enumerate(layers) if isinstance(layer, MLAState)]
    for i, seed in zip(cached, seeds, strict=True):
        layers[i] = _compress(spec, method.selector, layers[i], jnp.int32(count), seed)
        if spec.recall == "certified":
            cache = vk.calibrate(spec, layers[i].cache, layers[i].queries, layers[i].positions)
            layers[i] = dataclasses.replace(layers[i], cache=cache)
    return dataclasses.replace(state, layers=tuple(layers))


@functools.partial(jax.jit, static_argnames=("spec", "selector"))
def _compress(spec, selector, layer: MLAState, count, seed) -> MLAState:
    archive = layer.cache.archive
    observed = baselines.Observed(
        rows=archive.rows,
        closed=archive.closed,
        count=jnp.broadcast_to(count, archive.closed.shape),
        queries=layer.queries,
        positions=layer.positions,
        mass=layer.mass[:, : spec.archive_rows],
        seed=seed,
        spec=spec,
    )
    cache = vk.keep_set(spec, layer.cache, baselines.select(selector, observed))
    return dataclasses.replace(layer, cache=cache)


def teacher_force(
    model: Decoder, spec: vk.CacheSpec, state: DecoderState, tokens: Array, lengths: Array
) -> Forced:
    """Decode tokens [B, L] one by one, of which lengths [B] are real, and score each by the step before it.

    Raises RuntimeError if a cache reports a fault.
    """
    graph, weights = nnx.split(model)
    forced = _teacher_force(graph, weights, spec, state, tokens, lengths)
    vk.raise_on_fault(forced.stats.fault)
    return forced


@functools.partial(jax.jit, static_argnames=("graph", "spec"))
def _teacher_force(graph, weights, spec, state, tokens, lengths):
    model = nnx.merge(graph, weights)

    def one(state, step):
        token, target, i = step
        logits, state, stats = model.decode(spec, token, state, active=i < lengths - 1)
        logprob = jnp.take_along_axis(jax.nn.log_softmax(logits), target[:, None], axis=-1)[:, 0]
        return state, (logprob, logits.argmax(-1).astype(jnp.int32), stats)

    steps = (tokens.T[:-1], tokens.T[1:], jnp.arange(tokens.shape[1] - 1))
    _, (logprob, greedy, stats) = jax.lax.scan(one, state, steps)
    return Forced(logprob.T, greedy.T, stats)
