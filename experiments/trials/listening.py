"""Sheets of held-out queries: what follows a compressed prefix, asked of each variant of the recall tier."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.harness.runner import Run
from experiments.trials import held_out
from experiments.trials.cells import Cells
from experiments.trials.needle_batch import Batch
from experiments.trials.sheets import Column
from vestige_jax.models import DecoderState
from vestige_jax.spec import CacheSpec

TABLE = "held out"


@dataclasses.dataclass(frozen=True)
class After:
    """What follows the cut of each batch: ids int [B, N], and counts bool [B, N], which of its queries count."""

    name: str
    parts: Sequence[tuple[np.ndarray, np.ndarray]]
    columns: Sequence[Column]


@dataclasses.dataclass(frozen=True)
class Listening:
    """Prefixes of one kind, and several texts that may follow them. Rows are keyed as those of the needle sheets."""

    name: str
    cells: Cells
    batches: Sequence[Batch]
    afters: Sequence[After]
    seed: int
    tops: tuple[int, ...]

    def plan(self) -> Iterator[tuple]:
        """The key of every row in the order of measuring: batch by batch."""
        for batch in self.batches:
            for after in self.afters:
                for column in after.columns:
                    for _, trial in batch.places:
                        yield self._key(batch, after, column, trial)

    def fill(self, run: Run) -> None:
        """Measures what the run lacks."""
        asked: tuple[tuple, held_out.Asked] | None = None
        for key in run.todo(self.plan(), label=f"{self.name}, {TABLE}"):
            i, after, column = self._find(key)
            spec, state = self._compressed(i, column)
            if asked is None or asked[0] != (i, after.name):
                asked = (i, after.name), self._ask(i, after)
            measured = held_out.measure(spec, state, asked[1], self.tops)
            for (_, trial), row in zip(self.batches[i].places, measured, strict=False):
                name = self._key(self.batches[i], after, column, trial)
                run.add(dict(zip(run.rows.key, name, strict=True)) | row)

    def _compressed(self, i: int, column: Column) -> tuple[CacheSpec, DecoderState]:
        spec, state = self.cells.compressed(column.spec, self.batches[i], column.method, column.ratio, self.seed)
        return spec, state if column.after is None else column.after(state)

    def _ask(self, i: int, after: After) -> held_out.Asked:
        spec = after.columns[0].spec
        return held_out.ask(self.cells.model, spec, self.cells.prefill(spec, self.batches[i]), *after.parts[i])

    def _find(self, key: tuple) -> tuple[int, After, Column]:
        return next(
            (i, after, column)
            for i, batch in enumerate(self.batches)
            for after in self.afters
            for column in after.columns
            if any(self._key(batch, after, column, trial) == key for _, trial in batch.places)
        )

    def _key(self, batch: Batch, after: After, column: Column, trial: int) -> tuple[Any, ...]:
        fields: Mapping[str, Any] = dict(column.fields) | {"table": TABLE}
        rest = (fields[name] for name in ("table", "variant", "method", "ratio"))
        return (f"{self.name} > {after.name}", batch.prefix, *rest, trial)
