"""The deployed path against dense attention: chunked prefill, blocks that close on the way, recall (VestigeKV §4, §6).

Three parts. text: |difference| in NLL of every token, beside the floor of what dense attention itself reproduces in
other chunks and in another dtype; bits per byte. needle: trials left intact at each compression, with and without
recall. samples: MAUVE of sampled continuations, on the model's own hidden states in place of GPT-2's.
Writes trials.jsonl, summary.csv, claims.csv, meta.json, parity.png and parity-needles.png.
"""

import pathlib
from collections.abc import Iterator
from typing import Any

import ml_collections

from configs import parity as parity_config
from experiments.harness.checkpoints import fingerprint
from experiments.harness.runner import Run, launch, reading_input
from experiments.reports import parity_report
from experiments.text import needles, windows
from experiments.trials import needle_batch, parity_parts
from experiments.trials.cells import Cells
from experiments.trials.needle_batch import Batch
from experiments.trials.parity_parts import CHUNKS, DENSE, DTYPE, RESAMPLED, TEXT
from experiments.trials.sheets import judge

KEY = ("part", "side", "ratio", "trial")
POLICY, EVICTION = "vestige", "sigma"


def main(config: ml_collections.ConfigDict, out: pathlib.Path) -> None:
    lab = Lab(config)
    with Run(out, lab.identity, key=KEY, text=lab.cells.prose.hash, seeds=[config.seed]) as run:
        dense = {row["trial"]: row["nll"] for row in run.rows if (row["part"], row["side"]) == ("needle", DENSE)}
        for key in run.todo(lab.plan(), label="parity"):
            for row in lab.measure(key):
                if row["part"] == "needle":
                    row = judge(row, dense.setdefault(row["trial"], row["nll"]))  # dense is the first side
                run.add(row)
        parity_report.write(run, config)


class Lab:
    """The model, batches and specs of a config; measures one side of one batch at a time.

    Raises UserError for a config that cannot be run.
    """

    def __init__(self, config: ml_collections.ConfigDict):
        self.config = config
        with reading_input():
            _check(config)
            self.cells = Cells(config.checkpoint, **{name: config[name] for name in ("text", "weights_dtype", "chunk")})
            self.batches = {part: make(self.cells, config) for part, make in _BATCHES.items()}
            self.parts = {
                "text": parity_parts.Text(self.cells, config),
                "needle": parity_parts.Needle(self.cells, config, self.batches["needle"][0]),
                "samples": parity_parts.Samples(self.cells, config),
            }
        self.identity = config.copy_and_resolve_references()
        with self.identity.unlocked():
            self.identity.weights = fingerprint(self.cells.folder)

    def plan(self) -> Iterator[tuple]:
        """The key of every row in the order of measuring: part by part, batch by batch, dense first."""
        compressed = [(POLICY, ratio) for ratio in self.config.ratios]
        sides = {
            "text": [(DENSE, 1), (CHUNKS, 1), *compressed, (DTYPE, 1)],
            "needle": [(DENSE, 1), *((side, ratio) for _, ratio in compressed for side in (EVICTION, POLICY))],
            "samples": [(TEXT, 1), (DENSE, 1), (RESAMPLED, 1), (POLICY, self.config.deployed)],
        }
        for part, cells in sides.items():
            order = [(side, batch) for batch in self.batches[part] for side in cells]
            if part == "text":  # the other dtype is another model: last, so that it is loaded once
                order.sort(key=lambda place: place[0][0] == DTYPE)
            for (side, ratio), batch in order:
                for _, trial in batch.places:
                    yield part, side, ratio, trial

    def measure(self, key: tuple) -> Iterator[dict[str, Any]]:
        """The rows of this key's side for its whole batch, needles without the verdict."""
        part, side, ratio, trial = key
        batch = next(b for b in self.batches[part] if trial in [number for _, number in b.places])
        rows = self.parts[part].measure(batch, side, ratio)
        for (_, number), row in zip(batch.places, rows, strict=True):
            yield dict(zip(KEY, (part, side, ratio, number), strict=True)) | row


def _windows(cells: Cells, config: ml_collections.ConfigDict) -> list[Batch]:
    length = config.prefix + config.tokens
    ids = windows.draw(cells.prose, seed=config.seed, count=config.windows, length=length)
    return windows.batches(ids, config.prefix, config.batch)


def _needles(cells: Cells, config: ml_collections.ConfigDict) -> list[Batch]:
    facts = dict(prefix=config.needle_prefix, seed=config.seed)
    trials = [(("", i), needles.trial(cells.prose, i, **facts)) for i in range(config.trials)]
    return list(needle_batch.batches(config.needle_prefix, trials, config.needle_batch))


def _contexts(cells: Cells, config: ml_collections.ConfigDict) -> list[Batch]:
    length = config.context + config.steps
    ids = windows.draw(cells.prose, seed=config.seed, count=config.contexts, length=length)
    return windows.batches(ids, config.context, config.sample_batch)


_BATCHES = {"text": _windows, "needle": _needles, "samples": _contexts}


def _check(config: ml_collections.ConfigDict) -> None:
    """Sizes that nothing else would refuse."""
    windows.at_least(config, seed=0, windows=2, tokens=2, trials=2, contexts=2, steps=2, block=1, clusters=2)
    windows.at_least(config, batch=1, needle_batch=1, sample_batch=1, chunk=1, other_chunk=1, deployed=1)
    windows.check_ratios(config, config.needle_prefix)
    block = config.block
    for name, behind in (("prefix", "tokens"), ("context", "steps")):
        if config[name] <= block or (config[name] + config[behind] - 1) // block <= config[name] // block:
            raise ValueError(
                f"{name}={config[name]} and {behind}={config[behind]} must reach over a block={block} each: one has to "
                "close in the prefix, and one behind it"
            )
    if config.chunk == config.other_chunk:
        raise ValueError(f"other_chunk={config.other_chunk} must differ from chunk={config.chunk}")
    if (config.weights_dtype, config.rows_dtype) == (config.other_weights_dtype, config.other_rows_dtype):
        raise ValueError(f"other_rows_dtype={config.other_rows_dtype!r} or other_weights_dtype must be another dtype")
    if config.clusters > 4 * config.contexts:
        raise ValueError(f"clusters={config.clusters} must be at most four times contexts={config.contexts}")


if __name__ == "__main__":
    launch(main, like=parity_config)
