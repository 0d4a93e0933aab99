"""The recall tier: what it brings back, what that costs, and when tier 1 matters under it (VestigeKV §3, §6, §7).

Needle trials of three kinds (one needle among prose, many, a haystack of nothing but key-value lines) under a generous
fetch, under fetches so small that the tier starves, and with other indexes (rank, sound bound, no gate, top-j). Beside
them, queries of held-out text that follows the cut, asked of the calibrated index: coverage against its target, on text
like the calibration's and on another kind (prose, code), and at the answers of the trials. Writes trials.jsonl,
summary.csv, claims.csv, meta.json, recall.png and recall-starved.png.
"""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import ml_collections
import numpy as np

from configs import recall as recall_config
from experiments.harness.checkpoints import fingerprint
from experiments.harness.runner import Run, launch, reading_input
from experiments.reports import recall_report
from experiments.text import corpus, haystack, needles
from experiments.text.needles import Trial
from experiments.trials import checks, held_out, needle_batch, sheets
from experiments.trials.cells import Cells
from experiments.trials.listening import After, Listening
from experiments.trials.needle_batch import Batch
from experiments.trials.sheets import Column, Sheet
from vestige_jax import baselines

KEY = ("workload", "prefix", "table", "variant", "method", "ratio", "trial")
LAYOUT = ("rows_dtype", "sinks", "rank", "fetch", "overflow", "allow_rope")
ROOM = 8  # tokens behind the cut are padded to a multiple of this, so that workloads share their programs


def main(config: ml_collections.ConfigDict, out: pathlib.Path) -> None:
    lab = Lab(config)
    with Run(out, lab.identity, key=KEY, text=lab.cells.prose.hash, seeds=[config.seed]) as run:
        answered = [lab.answered(run, kind) for kind in lab.workloads]
        for workload in filter(None, answered):
            for sheet, answers in lab.trials(workload):
                sheet.fill(run, workload.name)
                answers.fill(run)
        for listening in lab.texts():
            listening.fill(run)
        facts = dict(tau=lab.tau, latent=lab.cells.model.config.latent_dim)
        recall_report.write(run, config, list(filter(None, answered)), **facts)


@dataclasses.dataclass(frozen=True)
class Workload:
    """A kind of needle trial: `prefix` tokens with so many `needles`; 0 fills them."""

    kind: str
    prefix: int
    needles: int

    @property
    def name(self) -> str:
        return f"{self.needles} needle{'s' * (self.needles > 1)}" if self.needles else "pairs"


class Lab:
    """The model, trials and texts of a config, as sheets to fill.

    Raises UserError for a config that cannot be run.
    """

    def __init__(self, config: ml_collections.ConfigDict):
        self.config = config
        with reading_input():
            _check(config)
            loading = {name: config[name] for name in ("text", "weights_dtype", "chunk")}
            named = map(baselines.method, (*config.methods, *config.starved_methods, *config.other_recalls))
            reading = [method for method in named if method.rereads]  # none of the others looks at a second reading
            self.cells = Cells(config.checkpoint, **loading, methods=reading)
            other = corpus.load(config.other_text)
            self.prose = {"prose": self.cells.prose, "code": needles.Prose(other, self.cells.prose.encoder)}
            self.workloads = _workloads(config)
            self._check_layouts()
            self.tau = self._spec(self._batches(self.workloads["single"][0], 1, "test")[0], (1,)).recall_target
        self.identity = config.copy_and_resolve_references()
        with self.identity.unlocked():
            self.identity.weights = fingerprint(self.cells.folder)
            self.identity.other_text_hash = other.hash

    def _check_layouts(self) -> None:
        """What cannot be run is said before anything is: every workload and every text, under every index."""
        for workload in (workload for group in self.workloads.values() for workload in group):
            batch = self._batches(workload, 1, "test")[0]
            list(self._columns(workload, batch))
        list(self.texts())

    def answered(self, run: Run, kind: str) -> Workload | None:
        """The first workload of a kind that dense attention answers, on validation needles; None if it is none."""
        for workload in self.workloads[kind]:
            batches = self._batches(workload, self.config.reach_trials, "validation")
            sheet = self._sheet(workload, batches, [self._column(batches[0], "reach", "base", "dense", 1)])
            sheet.fill(run, f"reach, {workload.name}, {workload.prefix}")
            if sheets.answers([row for row in sheet.rows(run) if row["table"] == "reach"]):
                return workload
        return None

    def trials(self, workload: Workload) -> Iterator[tuple[Sheet, Listening]]:
        """The test trials of a workload, batch by batch: every cell, and the queries that predict the answers.

        Those are taken as dense attention asks them. The cells are recovery, starved, and for the first kind the knobs.
        """
        for batch in self._batches(workload, self.config.trials, "test"):
            base = self._column(batch, "", "base", "vestige", self.config.ratios[0])
            after = After("answers", [(batch.tokens[:, :-1], batch.answers)], [base])
            listening = Listening(workload.name, self.cells, [batch], [after], self.config.seed, self.config.recall_at)
            yield self._sheet(workload, [batch], list(self._columns(workload, batch))), listening

    def _columns(self, workload: Workload, batch: Batch) -> Iterator[Column]:
        config, main = self.config, self.config.ratios[0]
        yield self._column(batch, "recovery", "base", "dense", 1)
        for ratio in config.ratios:
            for name in config.methods:
                yield self._column(batch, "recovery", "base", name, ratio)
        for fetch in config.starved:
            for name in config.starved_methods:
                changes = dict(fetch=fetch, overflow="truncate")
                yield self._column(batch, "starved", f"fetch={fetch}", name, main, **changes)
        if workload.kind == "single":
            yield from self._knobs(batch, "knobs", base=False)

    def _knobs(self, batch: Batch, table: str, base: bool) -> Iterator[Column]:
        """VestigeKV under other indexes; the base is a cell of another table, or the first of these."""
        config = self.config
        if base:
            yield self._column(batch, table, "base", "vestige", config.ratios[0])
        for rank in config.ranks:
            yield self._column(batch, table, f"rank={rank}", "vestige", config.ratios[0], rank=rank)
        changes = dict(bound="sound", fetch=batch.prefix)
        yield self._column(batch, table, "sound", "vestige", config.ratios[0], **changes)
        opened = self._column(batch, table, "gate off", "vestige", config.ratios[0])
        yield dataclasses.replace(opened, after=held_out.always_open)
        if config.top_j and not base:
            yield self._column(batch, table, f"top_j={config.top_j}", "vestige", config.ratios[0], top_j=config.top_j)

    def texts(self) -> Iterator[Listening]:
        """Held-out text of both kinds behind prefixes of both: all knobs where the prefix is prose and goes on."""
        config, kinds = self.config, list(self.prose)
        for first in kinds:
            batches = self._text_batches(first)
            afters = [self._after(batches, first, second) for second in kinds]
            yield Listening(first, self.cells, batches, afters, config.seed, config.recall_at)

    def _after(self, batches: list[Batch], first: str, second: str) -> After:
        config, batch = self.config, batches[0]
        columns = list(self._knobs(batch, "", base=True))
        columns += [self._column(batch, "", "base", name, config.ratios[0]) for name in config.other_recalls]
        parts = [self._continued(batch, first, second) for batch in batches]
        return After(second, parts, columns if first == second == "prose" else columns[:1])

    def _continued(self, batch: Batch, first: str, second: str) -> tuple[np.ndarray, np.ndarray]:
        """What follows each prefix of a batch: its own text, or the beginning of one of the other kind."""
        if first == second:
            ids = batch.tokens
        else:
            numbers = [number for _, number in batch.places]
            numbers += numbers[:1] * (len(batch.trials) - len(numbers))
            ids = np.stack([self._draw(second, number, self.config.queries) for number in numbers])
        return ids, np.ones(ids.shape, bool)

    def _text_batches(self, kind: str) -> list[Batch]:
        """Prefixes of held-out text; the text that follows each stands in place of question and answer."""
        config, length = self.config, self.config.text_prefix
        trials = []
        for i in range(config.sequences):
            drawn = self._draw(kind, i, length - 1 + config.queries)
            ids = np.concatenate([np.array([self.prose[kind].bos], np.int32), drawn])
            trials.append(Trial(ids[:length], ids[length : length + 1], ids[length + 1 :], (0, 0), (), "", ""))
        return sheets.batches(length, trials, config.batch)

    def _draw(self, kind: str, number: int, length: int) -> np.ndarray:
        place = [corpus.SPLITS.index("test"), self.config.seed, number, list(self.prose).index(kind)]
        return self.prose[kind].draw("test", np.random.default_rng(place), length)

    def _trials(self, workload: Workload, count: int, split: str) -> list[Trial]:
        facts = dict(prefix=workload.prefix, seed=self.config.seed, template=self.config.template, split=split)
        draw = haystack.trial
        if workload.needles:
            draw, facts = needles.trial, facts | {"needles": workload.needles}
        return [draw(self.cells.prose, i, **facts) for i in range(count)]

    def _batches(self, workload: Workload, count: int, split: str) -> list[Batch]:
        trials = self._trials(workload, count, split)
        longest = -(-max(map(needle_batch.behind, trials)) // ROOM) * ROOM
        return sheets.batches(workload.prefix, trials, self.config.batch, longest)

    def _column(self, batch: Batch, table: str, variant: str, name: str, ratio: int, **changes: Any) -> Column:
        fields = dict(table=table, variant=variant, method=name, ratio=ratio)
        return Column(fields, self._spec(batch, self.config.ratios, **changes), baselines.method(name), ratio)

    def _spec(self, batch: Batch, ratios: tuple[int, ...], **changes: Any):
        layout = {name: self.config[name] for name in LAYOUT} | {"block": batch.prefix} | changes
        with checks.naming(self.config, **({"rank": "ranks"} if "rank" in changes else {})):
            return self.cells.spec(batch, ratios=ratios, **layout)

    def _sheet(self, workload: Workload, batches: list[Batch], columns: list[Column]) -> Sheet:
        place = {"workload": workload.name, "prefix": workload.prefix}
        return Sheet(place, self.cells, batches, columns, self.config.seed, self.config.dense_below)


def _workloads(config: ml_collections.ConfigDict) -> dict[str, list[Workload]]:
    """The workloads of each kind, the one to prefer first."""
    return {
        "single": [Workload("single", config.prefix, 1)],
        "many": [Workload("many", config.prefix, count) for count in config.many],
        "pairs": [Workload("pairs", prefix, 0) for prefix in config.pairs],
    }


def _check(config: ml_collections.ConfigDict) -> None:
    """Sizes that nothing else would refuse."""
    for name in ("trials", "reach_trials", "batch", "chunk", "sequences", "queries"):
        if config[name] < 1:
            raise ValueError(f"{name}={config[name]} must be at least 1")
    checks.positive(config, "dense_below")
    checks.distinct(config, "ratios", "methods", "starved", "starved_methods", "ranks", "other_recalls", "recall_at")
    shortest = min((config.prefix, *config.pairs))
    if not config.ratios or not 1 <= min(config.ratios) <= max(config.ratios) <= shortest:
        raise ValueError(f"ratios={config.ratios} must lie between 1 and the shortest prefix; 32 keeps one row in 32")
    for name, least in (("starved", 1), ("ranks", 0), ("recall_at", 1), ("many", 2)):
        if not config[name] or min(config[name]) < least:
            raise ValueError(f"{name}={config[name]} must be whole numbers of at least {least}")
    if config.queries >= config.text_prefix:
        raise ValueError(f"queries={config.queries} must be fewer than text_prefix={config.text_prefix}, a block")
    if config.seed < 0:
        raise ValueError(f"seed={config.seed} must be at least 0")


if __name__ == "__main__":
    launch(main, like=recall_config)
