"""Find a needle through a compressed cache (VestigeKV §6).

One sentence of a long prompt ties a name to a five-digit code; the prompt is compressed; then a question asks for it.
A trial is intact if the code costs less than one nat more than it does with dense attention. Writes trials.jsonl,
summary.csv, meta.json and needle.png; for more than one depth or prefix also grid.csv and heat maps.
"""

import hashlib
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import ml_collections

from configs import needle as needle_config
from experiments import corpus, needle_batch, needle_report, needles, serving
from experiments.needle_batch import Batch
from experiments.runner import ROOT, Run, launch, reading_input
from vestige_jax import baselines, generation, models
from vestige_jax.models import DecoderState
from vestige_jax.spec import CacheSpec, keep_count

KEY = ("prefix", "depth", "method", "ratio", "trial")
MOST_TOKENS = 1 << 24
DENSE = ("dense", 1)
"""The cell that every trial is measured against."""


def main(config: ml_collections.ConfigDict, out: pathlib.Path) -> None:
    lab = Lab(config)
    with Run(out, lab.identity, key=KEY, text=lab.prose.hash, seeds=[config.seed]) as run:
        dense = {place(row): row["nll"] for row in run.rows if row["method"] == "dense"}
        for key in run.todo(lab.plan(), label="needle"):
            if run.done(*key):  # measured with another trial of its batch
                continue
            for row in lab.measure(key):
                base = dense.setdefault(place(row), row["nll"])  # dense is the first cell of every batch
                if not run.done(*(row[field] for field in KEY)):
                    run.add(judge(row, base))
        needle_report.write(run, config)


def place(row: dict[str, Any]) -> tuple:
    """Which trial a row is of."""
    return row["prefix"], row["depth"], row["trial"]


def judge(row: dict[str, Any], base: float) -> dict[str, Any]:
    """The row and its verdict: intact if it costs less than a nat over dense, dropped where dense itself fails (§6)."""
    return row | {"nll_dense": base, "intact": row["nll"] - base < 1.0, "dropped": base >= 1.0}


class Lab:
    """The model, trials and specs of a config; measures one cell of one batch at a time.

    Raises UserError for a config that cannot be run.
    """

    def __init__(self, config: ml_collections.ConfigDict):
        self.config = config
        with reading_input():
            _check(config)
            self.methods = {name: baselines.method(name) for name in dict.fromkeys(("dense", *config.methods))}
            folder = _checkpoint(config.checkpoint)
            self.model = models.load(folder, dtype=_dtype("weights_dtype", config.weights_dtype))
            self.prose = needles.Prose(corpus.load(config.text), models.Tokenizer.load(folder))
            self.batches = [batch for prefix in config.prefixes for batch in self._batches(prefix)]
            self.specs = {batch.prefix: self._spec(batch) for batch in self.batches}
        self.identity = config.copy_and_resolve_references()
        with self.identity.unlocked():
            self.identity.weights = fingerprint(folder)
        self._prefilled: tuple[Batch, DecoderState] | None = None

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
        method, spec = self.methods[name], serving.served(self.specs[prefix], self.methods[name])
        rows, layers = keep_count(prefix, 1 / ratio, None), len(self.model.config.full_attn_layers)
        seeds = jnp.asarray(needle_batch.seeds(batch, self.config.seed, layers))
        state = serving.compress(spec, self._prefill(batch), method, rows, seeds)
        tokens, lengths = jnp.asarray(batch.tokens), jnp.asarray(batch.lengths)
        forced = generation.teacher_force(self.model, spec, state, tokens, lengths)
        measured = needle_batch.measure(spec, batch, state, forced)
        for (depth, trial), row in zip(batch.places, measured, strict=True):
            yield dict(zip(KEY, (prefix, depth, name, ratio, trial), strict=True)) | row

    def _prefill(self, batch: Batch) -> DecoderState:
        """The state of the batch at the cut: computed once, and shared by its cells."""
        if self._prefilled is None or self._prefilled[0] is not batch:
            self._prefilled = None  # one at a time
            spec, ids = self.specs[batch.prefix], jnp.asarray(batch.ids)
            _, state = generation.prefill(self.model, spec, ids, chunk=self.config.chunk, observe=True)
            self._prefilled = batch, state
        return self._prefilled[1]

    def _batches(self, prefix: int) -> Iterator[Batch]:
        config = self.config
        facts = dict(prefix=prefix, seed=config.seed, template=config.template, needles=config.needles)
        trials = [
            ((f"{low:g}-{high:g}", index), needles.trial(self.prose, index, depth=(low, high), **facts))
            for depth, (low, high) in enumerate(itertools.pairwise(config.depths))
            for index in range(depth * config.trials, (depth + 1) * config.trials)  # no needle at two depths
        ]
        return needle_batch.batches(prefix, trials, config.batch)

    def _spec(self, batch: Batch) -> CacheSpec:
        """One spec for every method and ratio: tier 1 has room for the largest keep set; smaller ones fit in."""
        config, block = self.config, self.config.block or batch.prefix
        if batch.prefix % block:
            raise ValueError(
                f"prefixes={batch.prefix} must be a multiple of block={block}: rows behind the last whole block are "
                "always attended, and the needle may be one of them"
            )
        if batch.longest >= block:
            raise ValueError(f"block={block} must be longer than the {batch.longest} tokens of question and answer")
        return self.model.config.cache_spec(
            batch.prefix + batch.longest,
            allow_rope=config.allow_rope,
            block=block,
            ratio=1 / min(config.ratios),
            trace=True,
            dtype=_dtype("rows_dtype", config.rows_dtype),
            **{name: config[name] for name in ("sinks", "rank", "fetch", "overflow", "top_j")},
        )


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
    if not config.checkpoint:
        raise ValueError("checkpoint='' must be a folder, like vestige_jax/checkpoints/tiny_nope")


def _dtype(name: str, value: str) -> jnp.dtype:
    if value not in ("float32", "bfloat16"):
        raise ValueError(f"{name}={value!r} must be float32 or bfloat16")
    return jnp.dtype(value)


def _checkpoint(path: str) -> pathlib.Path:
    """The folder as given, or under the root of the checkout."""
    return pathlib.Path(path) if pathlib.Path(path).exists() else ROOT / path


def fingerprint(folder: pathlib.Path) -> str:
    """A hash of a checkpoint: the first and last MiB of each file that decides what the model computes."""
    digest, end = hashlib.sha256(), 1 << 20
    names = ("config.json", "tokenizer_config.json", "tiktoken.model")
    for path in sorted(p for p in folder.iterdir() if p.suffix == ".safetensors" or p.name in names):
        with open(path, "rb") as file:
            digest.update(f"{path.name} {path.stat().st_size} ".encode() + file.read(end))
            file.seek(max(0, path.stat().st_size - end))
            digest.update(file.read(end))
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    launch(main, like=needle_config)
