"""Workloads of the index experiment: needle trials of three kinds, and text behind a prefix of its kind or of another.

A text is a `needles.Trial` whose question is the first token behind the cut and whose answer are all others, so that
everything that measures needles measures its language-model cost.
"""

import dataclasses
from collections.abc import Mapping

import ml_collections
import numpy as np

from experiments.text import corpus, haystack, needles
from experiments.text.needles import Prose, Trial
from experiments.trials import needle_batch, sheets
from experiments.trials.needle_batch import Batch

ROOM = 8  # tokens behind the cut are padded to a multiple of this, so that workloads share their programs
KINDS = ("single", "many", "pairs", "prose > prose", "prose > code", "code > prose")
"""The last three: text of one kind behind a prefix of it, and of the other."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """`prefix` tokens with so many `needles`; of text, and of key-value lines, which fill them: 0."""

    kind: str
    prefix: int
    needles: int = 0

    @property
    def text(self) -> bool:
        return ">" in self.kind

    @property
    def name(self) -> str:
        return f"{self.needles} needle{'s' * (self.needles > 1)}" if self.needles else self.kind


def candidates(config: ml_collections.ConfigDict) -> dict[str, list[Workload]]:
    """The workloads of each kind, the one to prefer first. ValueError for an unknown kind."""
    sizes = {
        "single": [Workload("single", config.prefix, 1)],
        "many": [Workload("many", config.prefix, count) for count in config.many],
        "pairs": [Workload("pairs", prefix) for prefix in config.pairs],
    }
    for kind in config.workloads:
        if kind not in KINDS:
            raise ValueError(f"workloads={kind!r} is unknown; choose from {', '.join(KINDS)}")
    return {kind: sizes.get(kind, [Workload(kind, config.prefix)]) for kind in config.workloads}


def batches(
    workload: Workload, texts: Mapping[str, Prose], config: ml_collections.ConfigDict, *, count: int, split: str
) -> list[Batch]:
    """Trials 0 to `count` of a workload in batches. Raises ValueError for a prefix that they do not fit in."""
    draw = _text if workload.text else _needle
    trials = [draw(workload, texts, config, i, split) for i in range(count)]
    longest = -(-max(map(needle_batch.behind, trials)) // ROOM) * ROOM
    return sheets.batches(workload.prefix, trials, config.batch, longest)


def _needle(workload: Workload, texts: Mapping[str, Prose], config, index: int, split: str) -> Trial:
    facts = dict(prefix=workload.prefix, seed=config.seed, template=config.template, split=split)
    if workload.needles:
        return needles.trial(texts["prose"], index, needles=workload.needles, **facts)
    return haystack.trial(texts["prose"], index, **facts)


def _text(workload: Workload, texts: Mapping[str, Prose], config, index: int, split: str) -> Trial:
    first, second = workload.kind.split(" > ")
    length, behind = workload.prefix - 1, config.tokens
    if first == second:
        ids = _draw(texts, first, config.seed, index, split, length + behind)
    else:
        parts = ((first, length), (second, behind))
        ids = np.concatenate([_draw(texts, kind, config.seed, index, split, size) for kind, size in parts])
    ids = np.concatenate([np.array([texts[first].bos], np.int32), ids])
    cut = workload.prefix
    return Trial(ids[:cut], ids[cut : cut + 1], ids[cut + 1 :], (0, 0), (), "", "")


def _draw(texts: Mapping[str, Prose], kind: str, seed: int, number: int, split: str, length: int) -> np.ndarray:
    place = [corpus.SPLITS.index(split), seed, number, list(texts).index(kind)]
    return texts[kind].draw(split, np.random.default_rng(place), length)
