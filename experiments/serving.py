"""One path for every method: prefill once, compress the state, decode through the policy (VestigeKV §4, §5).

Prefill and decode are `vestige_jax.generation`'s; here is the step between them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

import vestige_jax as vk
from vestige_jax import baselines
from vestige_jax.models import DecoderState, MLAState

Array = jax.Array


def served(spec: vk.CacheSpec, method: baselines.Method) -> vk.CacheSpec:
    """The spec that a method decodes under. All have the same layout, so that they share one prefilled state."""
    activation = spec.capacity + 1 if method.selector is None else spec.activation
    return dataclasses.replace(spec, recall=method.recall, activation=activation)


def compress(
    spec: vk.CacheSpec, state: DecoderState, method: baselines.Method, count: int, seeds: Array
) -> DecoderState:
    """The state with tier 1 of every MLA layer as the method's selector has it: `count` rows besides the sinks.

    With recall, each layer's index is then calibrated on its last prompt queries. Dense: the state as it is.

    Args
      spec from `served`; state prefilled with observe=True, it stays usable.
      count m <= spec.tier1_rows - spec.sinks; a smaller one leaves the rest of tier 1 empty.
      seeds uint32 [layers, B], what a random selector draws from.
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
