"""What the recall tier does for queries that it was not calibrated on: coverage, recall, and what they cost (§3).

A prefix is compressed, and its index calibrated, as in deployment. The text behind the cut is then read densely: its
queries are real, and no choice of the policy changes them. Each is asked of the calibrated cache, which holds the rows
up to its own position. A query is one head at one position; it is hard if its best visible row is archived.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import vestige_jax as vk
from vestige_jax import attention, calibration, generation, models, recall
from vestige_jax import index as indexing
from vestige_jax.cache import Cache, Tail
from vestige_jax.models import Decoder, DecoderState, MLAState
from vestige_jax.models.cached import PROMPT_QUERIES

Array = jax.Array


class Asked(NamedTuple):
    """Queries behind the cut, by layer, and the rows that they see there."""

    queries: list[Array]  # [B, N, H, C]
    tails: list[Tail]
    positions: Array  # int32 [B, N], -1 for one that does not count


class Answers(NamedTuple):
    """What became of each query: bool [B, N, H] but for `ahead` and `rows`."""

    hard: Array  # its best visible row is archived
    own: Array  # that row fires for this very head
    fetched: Array  # that row fires for some head: it is attended
    ahead: Array  # int32 [B, N, H], archived rows that the index scores higher than that row
    fires: Array  # some row fires for this head
    open: Array  # the gate is
    rows: Array  # int32 [B, N], rows that fire for some head: what a step fetches


def ask(model: Decoder, spec: vk.CacheSpec, state: DecoderState, ids: np.ndarray, counts: np.ndarray) -> Asked:
    """Reads ids int [B, N] behind the cut; `state` stays usable. counts bool [B, N]: whose queries count.

    Raises ValueError where they do not fit in the spec, or would close a block.
    """
    batch, number = ids.shape
    if number >= spec.block:
        raise ValueError(f"{number} queries behind the cut would close a block of {spec.block}")
    start, reader = state.length, models.fork(spec, state, jnp.arange(batch))
    parts = []
    for first in range(0, number, PROMPT_QUERIES):
        part = jnp.asarray(ids[:, first : first + PROMPT_QUERIES])
        _, reader = generation.prefill(model, spec, part, chunk=PROMPT_QUERIES, state=reader)
        # Copied: the state is donated to the next prefill.
        parts.append([jnp.copy(layer.queries[:, -part.shape[1] :]) for layer in _cached(reader)])
    queries = [jnp.concatenate(layer, axis=1) for layer in zip(*parts, strict=True)]
    positions = jnp.where(jnp.asarray(counts), start[:, None] + jnp.arange(number), -1)
    return Asked(queries, [layer.cache.tail for layer in _cached(reader)], positions)


def _cached(state: DecoderState) -> list[MLAState]:
    return [layer for layer in state.layers if isinstance(layer, MLAState)]


def measure(spec: vk.CacheSpec, state: DecoderState, asked: Asked, tops: tuple[int, ...]) -> list[dict[str, Any]]:
    """For each sequence, counts over its queries, each a list by layer; `state` is compressed and calibrated.

    queries, hard, covered (the best row of a hard query fires for its head), recalled (for some head), open, open_hard,
    fires, steps, steps_fired, rows (fetched, over all steps), top{j} (the best row is among the index's first j). Then
    z and clamped by layer, and `archived`, the rows of a layer that can be fetched.
    """
    layers = []
    for queries, tail, cache in zip(asked.queries, asked.tails, state.caches, strict=True):
        seen = dataclasses.replace(cache, tail=tail)
        answers = Answers(*map(np.asarray, answer(spec, seen, queries, asked.positions)))
        counts = tally(answers, np.asarray(asked.positions) >= 0, tops)
        layers.append(counts | {"z": np.asarray(cache.calibration.z), "clamped": np.asarray(cache.calibration.clamped)})
    batch, first = len(asked.positions), state.caches[0]
    archived = np.asarray(first.archive.closed - first.tier1.count)
    return [
        {"archived": archived[b].item()} | {name: [layer[name][b].item() for layer in layers] for name in layers[0]}
        for b in range(batch)
    ]


def tally(answers: Answers, real: np.ndarray, tops: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Counts of one layer, int [B] each; real bool [B, N]: queries that count."""
    heads = np.broadcast_to(real[..., None], answers.hard.shape)
    hard = answers.hard & heads
    over_queries = {
        "queries": heads,
        "hard": hard,
        "covered": hard & answers.own,
        "recalled": hard & answers.fetched,
        "open": heads & answers.open,
        "open_hard": hard & answers.open,
        "fires": heads & answers.fires,
        **{f"top{j}": hard & (answers.ahead < j) for j in tops},
    }
    over_steps = {"steps": real, "steps_fired": real & (answers.rows > 0), "rows": np.where(real, answers.rows, 0)}
    counts = {name: values.sum((1, 2)) for name, values in over_queries.items()}
    return counts | {name: values.sum(1) for name, values in over_steps.items()}


@functools.partial(jax.jit, static_argnames="spec")
def answer(spec: vk.CacheSpec, cache: Cache, queries: Array, positions: Array) -> Answers:
    """What the index and gate of one layer do for queries [B, N, H, C] at positions [B, N], each on its own.

    The cache's tail holds the rows of all of them; a query sees those up to its own position.
    """
    batch, number, heads, _ = queries.shape
    queries = queries.astype(spec.dtype)
    flat = queries.reshape(batch, number * heads, -1)
    samples = calibration.observe(spec, cache, flat, jnp.repeat(positions, heads, axis=1))
    target = jnp.clip(samples.target, 0, spec.archive_rows - 1).reshape(batch, number, heads)
    rows = cache.archive.rows[..., : spec.row_dim]
    code = indexing.sketch(spec, cache.index.code)
    archived = ~cache.archive.kept & (jnp.arange(spec.archive_rows) < cache.archive.closed[:, None])

    def one(asked):
        query, position, target = asked
        upto = jnp.maximum(position - cache.archive.closed + 1, 0)
        seen = dataclasses.replace(cache, tail=dataclasses.replace(cache.tail, length=upto))
        part = attention.attended(spec, seen, query)
        probe = indexing.prepare(spec, cache.index.basis, query, cache.index.step)
        probe = probe._replace(residual=cache.calibration.z[:, None, None] * probe.residual)
        score = recall.probe_scores(probe, rows, code, cache.index.bound)  # [B, H, A]
        open_ = recall.gate(cache, part)
        threshold = jnp.where(open_, part.peak, jnp.inf)
        fires = (score >= threshold[..., None]) & archived[:, None]
        union = fires.any(1)
        best = jnp.take_along_axis(score, target[..., None], axis=-1)
        return (
            jnp.take_along_axis(fires, target[..., None], axis=-1)[..., 0],
            jnp.take_along_axis(union, target, axis=-1),
            ((score > best) & archived[:, None]).sum(-1, dtype=jnp.int32),
            fires.any(-1),
            open_,
            union.sum(-1, dtype=jnp.int32),
        )

    results = lax.map(one, (jnp.moveaxis(queries, 1, 0), positions.T, jnp.moveaxis(target, 1, 0)))
    hard = samples.hard.reshape(batch, number, heads)
    return Answers(hard, *(jnp.moveaxis(result, 0, 1) for result in results))


def always_open(state: DecoderState) -> DecoderState:
    """The state with the gate of every layer open for all queries."""

    def opened(layer):
        if not isinstance(layer, MLAState):
            return layer
        held = layer.cache.calibration
        held = dataclasses.replace(held, threshold=jnp.full_like(held.threshold, -jnp.inf))
        return dataclasses.replace(layer, cache=dataclasses.replace(layer.cache, calibration=held))

    return dataclasses.replace(state, layers=tuple(map(opened, state.layers)))
