"""Serving a decoder through the cache: chunked prefill, calibration, scoring, generation (VestigeKV §4).

Every loop over tokens runs inside one compiled program. A program is compiled once per spec and array shapes; prompts
are padded to whole chunks so that their lengths do not matter.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

import vestige_jax as vk
from vestige_jax.models import Decoder, DecoderState


@dataclasses.dataclass(frozen=True)
class Sampler:
    """How the next token is drawn: greedily at temperature 0, else from the top_k likeliest within mass top_p."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} must be at least 0 (0 is greedy)")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]")


class Forced(NamedTuple):
    """Scores of given tokens [B, L]; entries at or past lengths[b] - 1 mean nothing."""

    logprob: Array  # [B, L-1] float32 nats, of tokens[:, 1:]
    greedy: Array  # [B, L-1] int32, the likeliest token in that place
    stats: vk.Stats | None  # leading [L-1, MLA layers]; None in a model without MLA
    state: DecoderState  # after all tokens but the last


class Generated(NamedTuple):
    """New tokens of every sequence."""

    tokens: Array  # [B, steps] int32; -1 past lengths
    lengths: Array  # [B] int32, the end-of-sequence token included
    stats: vk.Stats | None  # leading [steps, MLA layers], zero where no step was made
    state: DecoderState


def pad(prompts: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """Prompts of different lengths as (ids int32 [B, T], lengths int32 [B]), padded with 0 at the end."""
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or min(lengths) == 0:
        raise ValueError(f"prompts have lengths {lengths}: each needs at least one token")
    ids = np.zeros((len(lengths), max(lengths)), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    return jnp.asarray(ids), jnp.asarray(lengths, jnp.int32)


def prefill(
    model: Decoder,
    spec: vk.CacheSpec,
    ids: Array,
    lengths: Array | None = None,
    *,
    chunk: int = 1024,
    observe: bool = False,
    state: DecoderState | None = None,
) -> tuple[Array, DecoderState]:
    """Reads prompts ids [B, T] chunk by chunk; attention is dense.

    Args:
      lengths: int32 [B], 1..T; tokens past it are padding. None: all T are real.
      chunk: tokens read at a time; cuts memory, changes no result.
      observe: as in `Decoder.init_state`.
      state: continue from it (it is donated: do not use it again). None: from the beginning.

    Returns: (logits float32 [B, V] after the last real token of each sequence, state).
    Raises ValueError for an id outside the vocabulary, a length outside 1..T, a chunk below 1, a full cache.
    """
    batch, time = _check_prompt(model, ids, lengths, chunk)
    lengths = jnp.full((batch,), time, jnp.int32) if lengths is None else jnp.asarray(lengths, jnp.int32)
    state = model.init_state(spec, batch, observe) if state is None else state
    _check_room(spec, state, lengths)
    width = min(chunk, 1 << max(0, time - 1).bit_length())
    ids = jnp.pad(ids, ((0, 0), (0, -time % width)))
    graph, weights = nnx.split(model)
    logits = jnp.zeros((batch, model.config.vocab_size), jnp.float32)
    for start in range(0, time, width):
        part, real = ids[:, start : start + width], jnp.clip(lengths - start, 0, width)
        logits, state = _prefill(graph, weights, spec, part, real, logits, state)
    _raise_on_fault(state)
    return logits, state


def calibrate(model: Decoder, spec: vk.CacheSpec, state: DecoderState) -> DecoderState:
    """`Decoder.calibrate`, compiled; `state` is donated."""
    graph, weights = nnx.split(model)
    return _calibrate(graph, weights, spec, state)


def teacher_force(
    model: Decoder, spec: vk.CacheSpec, state: DecoderState, tokens: Array, lengths: Array | None = None
) -> Forced:
    """Decodes tokens [B, L] one by one through the cache and scores each by the step before it.

    The first token is what follows the prompt in `state`; the last is scored, not fed. `state` stays usable.

    Args: lengths int32 [B], how many tokens of each sequence are real.
    Raises ValueError for ids outside the vocabulary, lengths outside 1..L or a full cache, RuntimeError for a fault.
    """
    batch, time = _check_prompt(model, tokens, lengths, chunk=1)
    lengths = jnp.full((batch,), time, jnp.int32) if lengths is None else jnp.asarray(lengths, jnp.int32)
    _check_room(spec, state, lengths - 1)
    graph, weights = nnx.split(model)
    forced = Forced(*_teacher_force(graph, weights, spec, state, tokens, lengths))
    _raise_on_fault(forced.state)
    return forced


def generate(
    model: Decoder,
    spec: vk.CacheSpec,
    prompts: Sequence[Sequence[int]],
    steps: int,
    *,
    sampler: Sampler | None = None,
    seed: int = 0,
    eos: Sequence[int] | None = None,
    chunk: int = 1024,
) -> Generated:
    """Continues each prompt by at most `steps` tokens, each sequence until it emits an end-of-sequence token.

    Args: eos, the ids that end a sequence; None takes the config's, () never stops.
    Raises as `prefill` does, and when prompt and steps do not fit in spec.capacity.
    """
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    ids, lengths = pad(prompts)
    if int(lengths.max()) + steps > spec.capacity:
        needed = int(lengths.max()) + steps
        raise ValueError(f"capacity={spec.capacity} is too small: the longest prompt and {steps} steps need {needed}")
    logits, state = prefill(model, spec, ids, lengths, chunk=chunk)
    if spec.calibration == "prompt":
        state = calibrate(model, spec, state)
    stop = model.config.eos_token_id if eos is None else tuple(eos)
    graph, weights = nnx.split(model)
    options = (steps, sampler or Sampler(), tuple(int(i) for i in stop))
    out = Generated(*_generate(graph, weights, spec, options, logits, state, jax.random.key(seed)))
    _raise_on_fault(out.state)
    return out


def sample(key: Array, logits: Array, sampler: Sampler) -> Array:
    """One token per sequence from logits float32 [B, V]: int32 [B]."""
    if sampler.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / sampler.temperature
    if sampler.top_k is not None and sampler.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, sampler.top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampler.top_p is not None:
        logits = jnp.where(_outside(logits, sampler.top_p), -jnp.inf, logits)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)


def _outside(logits: Array, mass: float) -> Array:
    """Tokens that are not among the likeliest whose probabilities reach `mass`; the likeliest is always inside."""
    order = jnp.argsort(logits, axis=-1, descending=True)
    sorted_ = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
    before = jnp.cumsum(sorted_, axis=-1) - sorted_
    each = jnp.arange(logits.shape[0])[:, None]
    return jnp.zeros(logits.shape, bool).at[each, order].set(before >= mass)


@functools.partial(jax.jit, static_argnames=("graph", "spec"), donate_argnames=("logits", "state"))
def _prefill(graph, weights, spec, ids, lengths, logits, state):
    new, state = nnx.merge(graph, weights).prefill(spec, ids, state, lengths, "last")
    return jnp.where(lengths[:, None] > 0, new, logits), state


@functools.partial(jax.jit, static_argnames=("graph", "spec"), donate_argnames="state")
def _calibrate(graph, weights, spec, state):
    return nnx.merge(graph, weights).calibrate(spec, state)


@functools.partial(jax.jit, static_argnames=("graph", "spec"))
def _teacher_force(graph, weights, spec, state, tokens, lengths):
    model = nnx.merge(graph, weights)

    def one(state, step):
        token, target, i = step
        logits, state, stats = model.decode(spec, token, state, i < lengths - 1)
        logprob = jnp.take_along_axis(jax.nn.log_softmax(logits), target[:, None], axis=-1)[:, 0]
        return state, (logprob, jnp.argmax(logits, axis=-1).astype(jnp.int32), stats)

    steps = (tokens.T[:-1], tokens.T[1:], jnp.arange(tokens.shape[1] - 1))
    state, (logprob, greedy, stats) = jax.lax.scan(one, state, steps)
    return logprob.T, greedy.T, stats, state


@functools.partial(jax.jit, static_argnames=("graph", "spec", "options"), donate_argnames="state")
def _generate(graph, weights, spec, options, logits, state, key):
    model, (steps, sampler, eos), batch = nnx.merge(graph, weights), options, logits.shape[0]
    shapes = jax.eval_shape(lambda s: model.decode(spec, jnp.zeros((batch,), jnp.int32), s)[2], state)
    stats = jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype), shapes)

    def going(carry):
        i, active, *_ = carry
        return (i < steps) & jnp.any(active)

    def one(carry):
        i, active, logits, state, tokens, stats = carry
        token = sample(jax.random.fold_in(key, i), logits, sampler)
        tokens = tokens.at[:, i].set(jnp.where(active, token, -1))
        active &= ~jnp.isin(token, jnp.asarray(eos, jnp.int32))
        logits, state, seen = model.decode(spec, token, state, active)
        stats = jax.tree.map(lambda all_, x: all_.at[i].set(x), stats, seen)
        return i + 1, active, logits, state, tokens, stats

    tokens = jnp.full((batch, steps), -1, jnp.int32)
    start = (0, jnp.ones((batch,), bool), logits, state, tokens, stats)
    *_, state, tokens, stats = jax.lax.while_loop(going, one, start)
    return tokens, jnp.sum(tokens >= 0, axis=1), stats, state


def _check_prompt(model: Decoder, ids: Array, lengths: Array | None, chunk: int) -> tuple[int, int]:
    if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer) or ids.shape[1] < 1:
        raise ValueError(f"ids has shape {ids.shape} and dtype {ids.dtype}, expected integers [B, T] with T >= 1")
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1")
    (batch, time), vocab = ids.shape, model.config.vocab_size
    bad = (ids < 0) | (ids >= vocab)
    if lengths is not None:
        lengths = np.asarray(lengths)
        if lengths.shape != (batch,) or (lengths < 1).any() or (lengths > time).any():
            raise ValueError(f"lengths={lengths.tolist()} must be {batch} integers in 1..{time}")
        bad &= jnp.arange(time) < lengths[:, None]
    if bad.any():
        raise ValueError(f"ids {np.asarray(ids)[np.asarray(bad)][:8].tolist()} are outside the vocabulary of {vocab}")
    return batch, time


def _check_room(spec: vk.CacheSpec, state: DecoderState, added: Array) -> None:
    needed = int((state.length + added).max())
    if state.caches and needed > spec.capacity:
        raise ValueError(f"capacity={spec.capacity} is too small for {needed} tokens; give the spec a larger capacity")


def _raise_on_fault(state: DecoderState) -> None:
    for cache in state.caches:
        vk.raise_on_fault(cache.fault)
