"""Cells of the index experiment: kinds of index, what they read, and all that one batch of trials says of one of them.

A cell is an index at a ratio. What comes before the cut is prefilled once, and what is asked behind it is read once,
densely: each cell compresses, calibrates, decodes the trials, and is then asked the same held-out queries.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import ml_collections

from experiments.harness.runner import Run
from experiments.trials import held_out, needle_batch
from experiments.trials.cells import Cells
from experiments.trials.needle_batch import Batch
from experiments.trials.sheets import judge, rows_of
from vestige_jax import baselines, generation

KEY = ("checkpoint", "workload", "index", "rank", "bits", "target", "ratio", "trial")
COUNTS = ("queries", "hard", "covered", "recalled", "fires", "rows", "steps")
"""Of held-out queries, by layer; see `held_out.measure`."""
TRAFFIC = ("nll", "exact", "attended", "fetched_per_step", "fire_rate", "overflow", "clamped")
ETA = 4
"""Bytes of a row's float32 bound."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of index; rank and bits of a code, and the recall that it is calibrated to. 'dense' is none."""

    index: str
    rank: int
    bits: int
    target: float = 0.9

    @property
    def name(self) -> str:
        return f"{self.index} {self.rank}x{self.bits}, target {self.target:g}"

    @property
    def layout(self) -> dict[str, Any]:
        """Fields of a CacheSpec."""
        return dict(index=self.index, rank=self.rank, index_bits=self.bits, recall_target=self.target)

    def nbytes(self, branch: int, number: int) -> float:
        """Bytes that a scan reads of every row: code and bound, and of a sketch the branch, in place (VestigeKV §3)."""
        return self.rank * self.bits / 8 + ETA + (branch * number if self.index == "sketch" else 0)


DENSE = Kind("dense", 0, 16)


def kinds(config: ml_collections.ConfigDict) -> list[Kind]:
    """Every kind of index: the claims' two, then both kinds at each rank and width of code, at the paper's target.

    At the candidate's target, its rank at each width, and the paper's index.
    """
    grids = (("sketch", config.sketch_ranks), ("balanced", config.balanced_ranks))
    paper, new = reference(config), candidate(config)
    every = [Kind(index, rank, bits) for index, ranks in grids for rank in ranks for bits in config.bits]
    widths = [dataclasses.replace(new, bits=bits) for bits in config.bits]
    return list(dict.fromkeys([paper, new, *every, *widths, dataclasses.replace(paper, target=new.target)]))


def reference(config: ml_collections.ConfigDict) -> Kind:
    """The paper's index."""
    return Kind("sketch", config.paper_rank, 16)


def kind_of(row: Mapping[str, Any]) -> Kind:
    """The kind of index that a row or cell is about."""
    return Kind(*(row[field.name] for field in dataclasses.fields(Kind)))


def candidate(config: ml_collections.ConfigDict) -> Kind:
    """The index that the claims are about, named before any run."""
    return Kind("balanced", config.candidate_rank, config.candidate_bits, config.candidate_target)


def named(config: ml_collections.ConfigDict, kind: Kind) -> dict[str, str]:
    """The fields of the config that a kind's fields of a CacheSpec come from."""
    first = candidate(config)
    if kind == reference(config):
        return {"rank": "paper_rank"}
    if kind == dataclasses.replace(reference(config), target=first.target):
        return {"rank": "paper_rank", "recall_target": "candidate_target"}
    if dataclasses.replace(kind, bits=first.bits) == first:
        bits = "candidate_bits" if kind == first else "bits"
        return {"rank": "candidate_rank", "index_bits": bits, "recall_target": "candidate_target"}
    return {"rank": f"{kind.index}_ranks", "index_bits": "bits"}


@dataclasses.dataclass(frozen=True)
class Grid:
    """Kinds of index at ratios, on the batches of one workload; a dense cell first, against which all are judged."""

    place: Mapping[str, Any]  # checkpoint and workload, first of every key
    cells: Cells
    batches: Sequence[Batch]
    kinds: Sequence[Kind]
    ratios: Sequence[int]
    layout: Mapping[str, Any]  # the rest of the spec
    seed: int
    bound: float  # nats over dense at which a trial is no longer intact
    below: float  # nats: a trial whose dense answer costs this much is dropped
    number: int  # bytes of a row's number, as counted
    facts: Mapping[str, Any]
    dense_only: bool = False  # whether dense attention answers, under the same layout: nothing compiles twice

    @property
    def columns(self) -> list[tuple[Kind, int]]:
        others = [] if self.dense_only else [(kind, ratio) for kind in self.kinds for ratio in self.ratios]
        return [(DENSE, 1), *others]

    def plan(self) -> Iterator[tuple]:
        """The key of every row in the order of measuring: batch by batch, dense first."""
        for batch in self.batches:
            for kind, ratio in self.columns:
                for _, trial in batch.places:
                    yield self._key(kind, ratio, trial)

    def fill(self, run: Run, label: str) -> None:
        """Measures what the run lacks; a row is written as soon as its batch is known."""
        asked: tuple[Batch, held_out.Asked] | None = None
        dense = {row["trial"]: row["nll"] for row in self.rows(run) if row["index"] == "dense"}
        for key in run.todo(self.plan(), label=label):
            batch, kind, ratio = self._find(key)
            if kind != DENSE and (asked is None or asked[0] is not batch):
                asked = batch, self._ask(batch)
            measured = self._dense(batch) if kind == DENSE else self._measure(batch, kind, ratio, asked[1])
            for (_, trial), asks, row in zip(batch.places, batch.trials, measured, strict=False):
                name = self._key(kind, ratio, trial)
                row = self._judge(row, dense.setdefault(trial, row["nll"])) | {"scored": len(asks.answer)}
                run.add(dict(zip(KEY, name, strict=True)) | dict(self.facts) | row)

    def rows(self, run: Run) -> list[dict[str, Any]]:
        """What the run knows of this workload on this checkpoint."""
        return rows_of(run, self.place)

    def spec(self, batch: Batch, kind: Kind):
        """One spec for every ratio. Raises ValueError for an index that it refuses."""
        layout = dict(self.layout) | kind.layout
        return self.cells.spec(batch, ratios=self.ratios, block=batch.prefix, **layout)

    def _ask(self, batch: Batch) -> held_out.Asked:
        """The queries behind the cut, as dense attention asks them; those that predict the answer count."""
        spec = self.spec(batch, self.kinds[0])
        state = self.cells.prefill(spec, batch)
        return held_out.ask(self.cells.model, spec, state, batch.tokens[:, :-1], batch.answers)

    def _dense(self, batch: Batch) -> list[dict[str, Any]]:
        spec = self.spec(batch, self.kinds[0])
        measured = self.cells.measure(spec, batch, baselines.method("dense"), 1, self.seed)
        return [{name: row[name] for name in TRAFFIC} | {"bytes_per_row": self._row} for row in measured]

    def _measure(self, batch: Batch, kind: Kind, ratio: int, asked: held_out.Asked) -> Iterator[dict[str, Any]]:
        method = baselines.method("vestige")
        spec, state = self.cells.compressed(self.spec(batch, kind), batch, method, ratio, self.seed)
        heard = held_out.measure(spec, state, asked, ())
        tokens, lengths = jnp.asarray(batch.tokens), jnp.asarray(batch.lengths)
        forced = generation.teacher_force(self.cells.model, spec, state, tokens, lengths)
        arrays = needle_batch.answered(batch, forced) | needle_batch.traffic(spec, batch, forced)
        index = kind.nbytes(spec.branch_dim, self.number)
        for line, counts in enumerate(heard[: len(batch.places)]):
            row = {name: arrays[name][line].item() for name in TRAFFIC}
            read = (batch.prefix - counts["archived"] + row["fetched_per_step"]) / batch.prefix
            found = row | {name: counts[name] for name in COUNTS}
            yield found | {"bytes_per_row": index + read * self._row}

    @property
    def _row(self) -> int:
        config = self.cells.model.config
        return (config.latent_dim + config.branch_dim) * self.number

    def _judge(self, row: dict[str, Any], base: float) -> dict[str, Any]:
        """Intact: within `bound` nats of dense, over all of a trial's tokens."""
        judged = judge(row, base, self.below) | {"intact": bool(row["nll"] - base < self.bound)}
        return judged | {"bytes_ratio": row["bytes_per_row"] / self._row}

    def _find(self, key: tuple) -> tuple[Batch, Kind, int]:
        return next(
            (batch, kind, ratio)
            for batch in self.batches
            for kind, ratio in self.columns
            if any(self._key(kind, ratio, trial) == key for _, trial in batch.places)
        )

    def _key(self, kind: Kind, ratio: int, trial: int) -> tuple:
        return (*self.place.values(), kind.index, kind.rank, kind.bits, kind.target, ratio, trial)
