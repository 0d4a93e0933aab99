"""Find a needle through a compressed cache (VestigeKV §6).

One sentence of a long prompt ties a name to a five-digit code; the prompt is compressed; then a question asks for it.
A trial is intact if the code costs less than one nat more than it does with dense attention. Writes trials.jsonl,
summary.csv, meta.json and needle.png; for more than one depth or prefix also grid.csv and heat maps.
"""

import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import ml_collections

from configs import needle as needle_config
from experiments.harness.checkpoints import fingerprint
from experiments.harness.runner import Run, launch, reading_input
from experiments.reports import needle_report
from experiments.text import needles
from experiments.trials import needle_batch
from experiments.trials.cells import Cells
from experiments.trials.needle_batch import Batch
from experiments.trials.sheets import judge
from vestige_jax import baselines

KEY = ("prefix", "depth", "method", "ratio", "trial")
MOST_TOKENS = 1 << 24
DENSE = ("dense", 1)
"""The cell that every trial is measured against."""


def main(config: ml_collections.ConfigDict, out: pathlib.Path) -> None:
    lab = Lab(config)
    with Run(out, lab.identity, key=KEY, text=lab.cells.prose.hash, seeds=[config.seed]) as run:
        dense = {place(row): row["nll"] for row in run.rows if row["method"] == "dense"}
        for key in run.todo(lab.plan(), label="needle"):
            for row in lab.measure(key):
                base = dense.setdefault(place(row), row["nll"])  # dense is the first cell of every batch
                run.add(judge(row, base))
        needle_report.write(run, config)


def place(row: dict[str, Any]) -> tuple:
    """Which trial a row is of."""
    return row["prefix"], row["depth"], row["trial"]


class Lab:
    """The model, trials and specs of a config; measures one cell of one batch at a time.

    Raises UserError for a config that cannot be run.
    """

    def __init__(self, config: ml_collections.ConfigDict):
        self.config = config
        with reading_input():
            _check(config)
            self.methods = {name: baselines.method(name) for name in dict.fromkeys(("dense", *config.methods))}
            loading = {name: config[name] for name in ("text", "weights_dtype", "chunk")}
            self.cells = Cells(config.checkpoint, **loading, methods=self.methods.values())
            self.batches = [batch for prefix in config.prefixes for batch in self._batches(prefix)]
            self.specs = {batch.prefix: self.cells.spec(batch, **_layout(config)) for batch in self.batches}
        self.identity = config.copy_and_resolve_references()
        with self.identity.unlocked():
            self.identity.weights = fingerprint(self.cells.folder)

    def plan(self) -> Iterator[tuple]:
        """The key of every row in the order of measuring: batch by batch, dense first."""
        methods = [name for name in self.methods if name != "dense"]
        for batch in self.batches:
            for method, ratio in (DENSE, *((name, ratio) for ratio in self.config.ratios for name in methods)):
                for depth, trial in batch.places:
                    yield batch.prefix, depth, method, ratio, trial

    def measure(self, key: tuple) -> Iterator[dict[str, Any]]:
        """The rows of this key's cell for its whole batch, without the verdict."""
        prefix, depth, name, ratio, trial = key
        batch = next(b for b in self.batches if b.prefix == prefix and (depth, trial) in b.places)
        measured = self.cells.measure(self.specs[prefix], batch, self.methods[name], ratio, self.config.seed)
        for (depth, trial), row in zip(batch.places, measured, strict=True):
            yield dict(zip(KEY, (prefix, depth, name, ratio, trial), strict=True)) | row

    def _batches(self, prefix: int) -> Iterator[Batch]:
        config = self.config
        facts = dict(prefix=prefix, seed=config.seed, template=config.template, needles=config.needles)
        trials = [
            ((f"{low:g}-{high:g}", index), needles.trial(self.cells.prose, index, depth=(low, high), **facts))
            for depth, (low, high) in enumerate(itertools.pairwise(config.depths))
            for index in range(depth * config.trials, (depth + 1) * config.trials)  # no needle at two depths
        ]
        return needle_batch.batches(prefix, trials, config.batch)


def _layout(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """The fields of the config that lay out a cache."""
    names = ("block", "rows_dtype", "ratios", "allow_rope", "sinks", "rank", "fetch", "overflow", "top_j")
    return {name: config[name] for name in names}


def _check(config: ml_collections.ConfigDict) -> None:
    """Sizes that nothing else would refuse."""
    for name, least in (("trials", 1), ("batch", 1), ("chunk", 1), ("seed", 0)):
        if config[name] < least:
            raise ValueError(f"{name}={config[name]} must be at least {least}")
    if not config.ratios or min(config.ratios) < 1:
        raise ValueError(f"ratios={config.ratios} must be whole numbers of at least 1; 32 keeps one row in 32")
    if not config.prefixes or not 1 <= min(config.prefixes) <= max(config.prefixes) <= MOST_TOKENS:
        raise ValueError(f"prefixes={config.prefixes} must be numbers of tokens, 1 to {MOST_TOKENS}")
    if max(config.ratios) > min(config.prefixes):
        raise ValueError(f"ratios={config.ratios} must not exceed the shortest of prefixes={config.prefixes}")
    edges = config.depths
    if len(edges) < 2 or not all(0 <= low < high <= 1 for low, high in itertools.pairwise(edges)):
        raise ValueError(f"depths={edges} must be at least two edges, rising between 0 and 1, like 0.1,0.8")
    if not config.methods:
        raise ValueError(f"methods={config.methods} must name at least one; {baselines.known()}")


if __name__ == "__main__":
    launch(main, like=needle_config)
