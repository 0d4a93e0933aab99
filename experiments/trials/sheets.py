"""Sheets of needle cells: the trials of one place, a column for each method, rows that carry their verdict.

A driver has several sheets in one file of rows: other checkpoints, lengths or kinds of haystack. Each has its own dense
column, first, against which all others are judged.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from experiments.harness.runner import Run
from experiments.reports import needle_report
from experiments.text.needles import Trial
from experiments.trials import needle_batch
from experiments.trials.cells import Cells
from experiments.trials.needle_batch import Batch
from vestige_jax import baselines, generation
from vestige_jax.models import DecoderState
from vestige_jax.spec import CacheSpec

Rows = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Column:
    """One cell of each batch. `fields` name it in the rows; `after` changes the state that is decoded from."""

    fields: Mapping[str, Any]
    spec: CacheSpec
    method: baselines.Method
    ratio: float
    after: Callable[[DecoderState], DecoderState] | None = None


@dataclasses.dataclass(frozen=True)
class Sheet:
    """Columns on the same trials. A row's key is `place`, then the column's fields, then the number of the trial."""

    place: Mapping[str, Any]
    cells: Cells
    batches: Sequence[Batch]
    columns: Sequence[Column]  # the first is dense
    seed: int
    below: float = 1.0  # nats: a trial whose dense answer costs this much is dropped
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # more fields of every row

    def plan(self) -> Iterator[tuple]:
        """The key of every row in the order of measuring: batch by batch, dense first."""
        for batch in self.batches:
            for column in self.columns:
                for _, trial in batch.places:
                    yield self._key(column, trial)

    def fill(self, run: Run, label: str) -> None:
        """Measures what the run lacks; a row is written as soon as its batch is known."""
        dense: dict[int, float] = {}
        for key in run.todo(self.plan(), label=label):
            for row in self._measure(key, run, dense):
                run.add(row)

    def rows(self, run: Run) -> list[dict[str, Any]]:
        """What the run knows of this sheet."""
        return rows_of(run, self.place)

    def _measure(self, key: tuple, run: Run, dense: dict[int, float]) -> Iterator[dict[str, Any]]:
        batch, column = next(
            (batch, column)
            for batch in self.batches
            for column in self.columns
            if any(self._key(column, trial) == key for _, trial in batch.places)
        )
        self._recall_dense(run, dense)
        for (_, trial), row in zip(batch.places, self._column(batch, column), strict=True):
            base = dense.setdefault(trial, row["nll"])  # dense is the first column
            fields = dict(self.place) | dict(column.fields) | {"trial": trial} | dict(self.facts)
            yield fields | judge(row, base, self.below)

    def _recall_dense(self, run: Run, dense: dict[int, float]) -> None:
        """What an earlier run knew of the dense column."""
        if not dense:
            first = dict(self.place) | dict(self.columns[0].fields)
            dense.update({row["trial"]: row["nll"] for row in rows_of(run, first)})

    def _column(self, batch: Batch, column: Column) -> list[dict[str, Any]]:
        spec, state = self.cells.compressed(column.spec, batch, column.method, column.ratio, self.seed)
        state = state if column.after is None else column.after(state)
        tokens, lengths = jnp.asarray(batch.tokens), jnp.asarray(batch.lengths)
        forced = generation.teacher_force(self.cells.model, spec, state, tokens, lengths)
        return needle_batch.measure(spec, batch, state, forced)

    def _key(self, column: Column, trial: int) -> tuple:
        return (*self.place.values(), *column.fields.values(), trial)


def rows_of(run: Run, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a run that have these values in these fields."""
    return [row for row in run.rows if all(row[field] == value for field, value in fields.items())]


def judge(row: Mapping[str, Any], base: float, below: float = 1.0) -> dict[str, Any]:
    """The row and its verdict: intact within a nat of dense, dropped where dense itself costs `below` or more (§6)."""
    return dict(row) | {"nll_dense": base, "intact": row["nll"] - base < 1.0, "dropped": base >= below}


def batches(prefix: int, trials: Sequence[Trial], size: int, longest: int = 0) -> list[Batch]:
    """The trials in batches of one size, numbered as they come, with room for `longest` tokens behind the cut."""
    parts = needle_batch.batches(prefix, [(("", i), trial) for i, trial in enumerate(trials)], size)
    return [dataclasses.replace(batch, longest=max(longest, batch.longest)) for batch in parts]


def summarise(rows: Rows, by: Sequence[str]) -> list[dict[str, Any]]:
    """A cell for each combination of the fields `by`, in the order of the rows, counted as `needle_report` does."""
    groups: dict[tuple, list] = {}
    for row in rows:
        groups.setdefault(tuple(row[field] for field in by), []).append(row)
    cells = groups.items()
    return [dict(zip(by, place, strict=True)) | needle_report.summarise_cell(group) for place, group in cells]


def answers(rows: Rows) -> bool:
    """Whether dense attention answers these trials: it drops no more than the protocol allows."""
    return needle_report.summarise_cell(rows)["intact"] is not None
