"""What compression costs a language model: cross-entropy on the text that follows a compressed prefix (VestigeKV §6).

The first part of a window of held-out text is compressed; the second is read token by token through the policy, each
token scored by the step before it. The cost is the cross-entropy over that of dense attention on the same path, in nats
per token and in bits per byte. Writes trials.jsonl, summary.csv, claims.csv, meta.json and lm_cost.png.
"""

import pathlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import ml_collections

from configs import lm_cost as lm_cost_config
from experiments.harness.checkpoints import fingerprint
from experiments.harness.runner import Run, launch, reading_input
from experiments.reports import lm_cost_report
from experiments.text import windows
from experiments.trials import serving
from experiments.trials.cells import Cells
from vestige_jax import baselines, generation

KEY = ("method", "ratio", "window")


def main(config: ml_collections.ConfigDict, out: pathlib.Path) -> None:
    lab = Lab(config)
    with Run(out, lab.identity, key=KEY, text=lab.cells.prose.hash, seeds=[config.seed]) as run:
        for key in run.todo(lab.plan(), label="lm_cost"):
            for row in lab.measure(key):
                run.add(row)
        lm_cost_report.write(run, config)


class Lab:
    """The model, windows and spec of a config; measures one cell of one batch at a time.

    Raises UserError for a config that cannot be run.
    """

    def __init__(self, config: ml_collections.ConfigDict):
        self.config = config
        with reading_input():
            _check(config)
            self.methods = {name: baselines.method(name) for name in dict.fromkeys(("dense", *config.methods))}
            loading = {name: config[name] for name in ("text", "weights_dtype", "chunk")}
            self.cells = Cells(config.checkpoint, **loading, methods=self.methods.values())
            length = config.prefix + config.tokens
            ids = windows.draw(self.cells.prose, seed=config.seed, count=config.windows, length=length)
            self.batches = windows.batches(ids, config.prefix, config.batch)
            # One layout for every method and ratio: tier 1 has room for the largest keep set; smaller ones fit in.
            changes = dict(ratio=1 / min(config.ratios), block=config.block or config.prefix)
            self.spec = windows.cache_spec(self.cells.model, config, config.prefix, config.tokens, **changes)
            for method in self.methods.values():
                serving.check(self.spec, method)
        self.identity = config.copy_and_resolve_references()
        with self.identity.unlocked():
            self.identity.weights = fingerprint(self.cells.folder)

    def plan(self) -> Iterator[tuple]:
        """The key of every row in the order of measuring: batch by batch, dense first."""
        methods = [name for name in self.methods if name != "dense"]
        for batch in self.batches:
            for method, ratio in (("dense", 1), *((name, ratio) for ratio in self.config.ratios for name in methods)):
                for _, window in batch.places:
                    yield method, ratio, window

    def measure(self, key: tuple) -> Iterator[dict[str, Any]]:
        """The rows of this key's cell for its whole batch."""
        name, ratio, window = key
        batch = next(batch for batch in self.batches if ("", window) in batch.places)
        spec, state = self.cells.compressed(self.spec, batch, self.methods[name], ratio, self.config.seed)
        forced = generation.teacher_force(self.cells.model, spec, state, jnp.asarray(batch.tokens))
        loss, traffic = windows.losses(forced).sum(1), windows.traffic(spec, batch, forced)
        for line, (_, number) in enumerate(batch.places):
            row = dict(zip(KEY, (name, ratio, number), strict=True))
            scored = batch.trials[line].answer
            row |= {"nats": loss[line], "tokens": len(scored), "bytes": windows.nbytes(self.cells.prose, scored)}
            yield row | traffic[line]


def _check(config: ml_collections.ConfigDict) -> None:
    """Sizes that nothing else would refuse."""
    windows.at_least(config, seed=0, windows=2, prefix=2, tokens=2, block=0, batch=1, chunk=1)
    windows.check_ratios(config, config.prefix)
    block = config.block or config.prefix
    if config.prefix % block:
        raise ValueError(
            f"prefix={config.prefix} must be a multiple of block={block}: rows behind the last whole block are attended"
        )
    if config.tokens > block:
        raise ValueError(
            f"tokens={config.tokens} must be at most block={block}: a block that closes is ranked by sigma, "
            "whatever the method"
        )
    if not config.methods:
        raise ValueError(f"methods={config.methods} must name at least one; {baselines.known()}")


if __name__ == "__main__":
    launch(main, like=lm_cost_config)
