"""A batch of needle trials, and what one cell of the experiment measures on it."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments.text import needles
from vestige_jax.generation import Forced
from vestige_jax.models import DecoderState
from vestige_jax.spec import CacheSpec

Place = tuple[str, int]
"""Depth and number of a trial."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Trials of one prefix that are served together, ragged behind the cut."""

    prefix: int
    places: tuple[Place, ...]
    trials: tuple[needles.Trial, ...]
    longest: int  # tokens behind the cut, over every batch of this prefix

    @property
    def ids(self) -> np.ndarray:
        """int32 [B, T], the prompts up to the cut."""
        return np.stack([trial.prefix for trial in self.trials])

    @property
    def lengths(self) -> np.ndarray:
        """int32 [B], tokens behind the cut."""
        return np.array([behind(trial) for trial in self.trials], np.int32)

    @property
    def tokens(self) -> np.ndarray:
        """int32 [B, L], question and answer, padded with 0."""
        tokens = np.zeros((len(self.trials), self.longest), np.int32)
        for line, trial in zip(tokens, self.trials, strict=True):
            line[: behind(trial)] = np.concatenate([trial.question, trial.answer])
        return tokens

    @property
    def steps(self) -> np.ndarray:
        """bool [L - 1, B]: decode steps that a trial takes; the last token is scored, not fed."""
        return np.arange(self.longest - 1)[:, None] < self.lengths - 1

    @property
    def answers(self) -> np.ndarray:
        """bool [B, L - 1]: steps that predict a token of the answer."""
        sizes = np.array([len(trial.answer) for trial in self.trials])
        first = np.arange(self.longest - 1)[:, None] >= self.lengths - 1 - sizes
        return (first & self.steps).T

    @property
    def spans(self) -> np.ndarray:
        """bool [B, T]: the rows of the asked sentence."""
        first, last = np.array([trial.span for trial in self.trials]).T[..., None]
        position = np.arange(self.prefix)
        return (position >= first) & (position < last)


def behind(trial: needles.Trial) -> int:
    """Tokens behind the cut."""
    return len(trial.question) + len(trial.answer)


def batches(prefix: int, trials: Sequence[tuple[Place, needles.Trial]], size: int) -> Iterator[Batch]:
    """The trials in batches of one size; the last is filled up with trials again, so that nothing compiles twice."""
    longest = max(behind(trial) for _, trial in trials)
    size = min(size, len(trials))
    for start in range(0, len(trials), size):
        part = trials[start : start + size]
        filled = [*part, *itertools.islice(itertools.cycle(part), size - len(part))]
        yield Batch(prefix, tuple(place for place, _ in part), tuple(trial for _, trial in filled), longest)


def seeds(batch: Batch, seed: int, layers: int) -> np.ndarray:
    """uint32 [layers, B]: what a random selector draws from, different for each layer and trial."""
    numbers = [number for _, number in itertools.islice(itertools.cycle(batch.places), len(batch.trials))]
    places = zip(numbers, (trial.span[0] for trial in batch.trials), strict=True)
    drawn = [np.random.SeedSequence([seed, batch.prefix, *place]).generate_state(layers) for place in places]
    return np.array(drawn, np.uint32).T


def measure(spec: CacheSpec, batch: Batch, state: DecoderState, forced: Forced) -> list[dict[str, Any]]:
    """All that one cell measures, for each of the batch's places."""
    arrays = answered(batch, forced) | traffic(spec, batch, forced) | found(spec, batch, state, forced)
    rows = [{name: values[b].tolist() for name, values in arrays.items()} for b in range(len(batch.places))]
    asked = [{"key": trial.key, "code": trial.code, "at": trial.span[0]} for trial in batch.trials]
    return [facts | row for facts, row in zip(asked, rows, strict=False)]


def answered(batch: Batch, forced: Forced) -> dict[str, np.ndarray]:
    """Cross-entropy of the answer in nats, summed over its tokens, and whether each of them is the likeliest: [B]."""
    steps = batch.answers
    right = np.asarray(forced.greedy) == batch.tokens[:, 1:]
    return {
        "nll": -np.where(steps, np.asarray(forced.logprob, np.float64), 0).sum(1),
        "exact": (right | ~steps).all(1),
    }


def traffic(spec: CacheSpec, batch: Batch, forced: Forced) -> dict[str, np.ndarray]:
    """What decoding cost, averaged over the steps of a trial and the layers: [B]. Without recall nothing is fetched."""
    stats, steps = forced.stats, batch.steps[:, None]

    def mean(values) -> np.ndarray:
        values = np.asarray(values, np.float64)
        return np.where(steps, values, 0).sum((0, 1)) / (steps.sum((0, 1)) * values.shape[1])

    recalls = spec.recall != "none"
    return {
        "attended": mean(stats.attended),
        "fetched_per_step": mean(stats.fetched) * recalls,
        "fire_rate": mean(np.asarray(stats.fired) > 0) * recalls,
        "overflow": mean(stats.overflowed) * recalls,
        "gate": mean(stats.gate) * recalls,
        "clamped": mean(stats.clamped) * recalls,
    }


def found(spec: CacheSpec, batch: Batch, state: DecoderState, forced: Forced) -> dict[str, np.ndarray]:
    """Share of the asked sentence's rows that tier 1 holds, and that some step fetched, by layer: [B, layers].

    Nothing for dense attention, where no row has to be looked for.
    """
    if spec.activation > spec.capacity:
        return {}
    spans = batch.spans[:, None]  # [B, 1, T]
    kept = np.stack([np.asarray(cache.archive.kept) for cache in state.caches], axis=1)[..., : batch.prefix]
    fetched = np.asarray(forced.stats.rows)[..., : batch.prefix]  # [L - 1, layers, B, T]
    fetched = (fetched & batch.steps[:, None, :, None]).any(0).swapaxes(0, 1)
    return {"needle_kept": _share(kept, spans), "needle_fetched": _share(fetched, spans)}


def _share(rows: np.ndarray, spans: np.ndarray) -> np.ndarray:
    return (rows & spans).sum(-1) / spans.sum(-1)
