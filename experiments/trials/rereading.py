"""Reading a prompt a second time, to see which of its rows the tokens look back at (KVzip, VestigeKV §5)."""

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import Array, lax

import vestige_jax as vk
from vestige_jax import generation, models
from vestige_jax.models import Decoder, DecoderState, MLAState
from vestige_jax.models.observation import Rereading

PART = 2000
"""Tokens that are fed again at a time."""


def observe(
    model: Decoder,
    spec: vk.CacheSpec,
    state: DecoderState,
    ids: Array,
    phrase: Sequence[int],
    *,
    part: int = PART,
    chunk: int = 1024,
) -> DecoderState:
    """The state with `Observation.repeat` filled in: the largest softmax weight that any query and head gave each row.

    The prompts ids [B, T] are fed again in parts of `part` tokens, each behind the phrase, to a copy of the state.
    Their queries see all of the prompt, the phrase and the part so far; their rows are thrown away.
    """
    batch, time = ids.shape
    part = min(part, time)
    roomy = dataclasses.replace(spec, capacity=time + len(phrase) + part)
    start = _layers(state, lambda layer: _reader(roomy, layer))
    asked = jnp.broadcast_to(jnp.asarray(phrase, jnp.int32), (batch, len(phrase)))
    padded = jnp.pad(ids, ((0, 0), (0, -time % part)))
    for first in range(0, time, part):
        again = jnp.concatenate([asked, padded[:, first : first + part]], axis=1)
        lengths = jnp.full(batch, len(phrase) + min(part, time - first), jnp.int32)
        copy = models.fork(roomy, start, jnp.arange(batch))
        _, end = generation.prefill(model, roomy, again, lengths, chunk=chunk, state=copy)
        start = _pairs(start, end, lambda old, new: dataclasses.replace(old, seen=new.seen))
    return _pairs(state, start, _with_repeat)


def _reader(spec: vk.CacheSpec, layer: MLAState) -> MLAState:
    """The layer with room for more rows, watching which of them are read."""
    batch = layer.positions.shape[0]
    cache = vk.grow(spec, layer.cache)
    return dataclasses.replace(layer, cache=cache, seen=Rereading(jnp.zeros((batch, spec.capacity), jnp.float32)))


def _with_repeat(layer: MLAState, reader: MLAState) -> MLAState:
    weight = lax.slice_in_dim(reader.seen.peak, 0, min(reader.seen.peak.shape[1], layer.seen.mass.shape[1]), axis=1)
    missing = layer.seen.mass.shape[1] - weight.shape[1]
    return dataclasses.replace(
        layer, seen=dataclasses.replace(layer.seen, repeat=jnp.pad(weight, ((0, 0), (0, missing))))
    )


def _layers(state: DecoderState, change: Callable) -> DecoderState:
    return _pairs(state, state, lambda layer, _: change(layer))


def _pairs(state: DecoderState, other: DecoderState, change: Callable) -> DecoderState:
    """The state with each layer that has a cache changed, given its counterpart."""
    layers = zip(state.layers, other.layers, strict=True)
    return dataclasses.replace(
        state, layers=tuple(change(one, two) if isinstance(one, MLAState) else one for one, two in layers)
    )
