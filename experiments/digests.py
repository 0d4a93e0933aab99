"""Page digests: do they find the page that holds a query's best row, with and without rotation? (VestigeKV §5, §6)

The last queries of held-out texts are asked about the rows before them, all of which they see. Pages are ranked by
digest, query by query and head by head; recall@8 is the share of queries whose best row lies in one of the first 8.
Arms: the model as it is (nope), its own rows and queries with their branch rotated (turned), its rotated twin (rope).
Writes trials.jsonl, summary.csv, claims.csv, meta.json and digests.png.
"""

import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from configs import digests as digests_config
from experiments.anatomy import arms, dissection
from experiments.anatomy.arms import Arm
from experiments.harness.checkpoints import fingerprint
from experiments.harness.runner import Run, launch, reading_input
from experiments.reports import digests_report
from vestige_jax.baselines.pages import Pages, dot, paged
from vestige_jax.baselines.quest import pruned
from vestige_jax.baselines.recalls import PAGES

KEY = ("prefix", "text", "trial", "arm", "layer", "digest")
Array = jax.Array


def main(config: ml_collections.ConfigDict, out: pathlib.Path) -> None:
    lab = Lab(config)
    text = next(iter(lab.arms.values())).prose.hash
    with Run(out, lab.identity, key=KEY, text=text, seeds=[config.seed]) as run:
        for key in run.todo(lab.plan(), label="digests"):
            for row in lab.measure(*key[:4]):
                run.add(row)
        digests_report.write(run, config)


class Lab:
    """The arms and digests of a config; measures one arm on one text at a time.

    Raises UserError for a config that cannot be run.
    """

    def __init__(self, config: ml_collections.ConfigDict):
        self.config = config
        with reading_input():
            _check(config)
            self.arms = arms.load(config, turned=True)
        self.rules = {name: PAGES[name] for name in config.digests}
        self.identity = config.copy_and_resolve_references()
        with self.identity.unlocked():
            self.identity.weights = {name: fingerprint(arm.folder) for name, arm in self.arms.items()}
        self._seen: tuple[tuple, dissection.Anatomy] | None = None

    def plan(self) -> Iterator[tuple]:
        """The key of every row in the order of measuring."""
        for prefix in self.config.prefixes:
            asked = {name: arm for name, arm in self.arms.items() if name != "rope" or prefix <= self.config.reach}
            for text in self.config.texts:
                for trial in range(self.config.trials):
                    for name, arm in asked.items():
                        for layer in arm.layers:
                            for digest in self.rules:
                                yield prefix, text, trial, name, layer, digest

    def measure(self, prefix: int, text: str, trial: int, name: str) -> Iterator[dict[str, Any]]:
        """The rows of every layer and digest, of one arm on one text."""
        seen = self._dissect(prefix, text, trial, self.arms[name])
        rows, queries = seen.rotated() if self.arms[name].turned else (seen.rows, seen.queries)
        for digest, rule in self.rules.items():
            found = measure(rule, self.config.top, seen.scale, rows[:, :prefix], queries)
            for i, layer in enumerate(seen.layers):
                key = dict(zip(KEY, (prefix, text, trial, name, layer, digest), strict=True))
                yield key | {field: float(values[i]) for field, values in found.items()}

    def _dissect(self, prefix: int, kind: str, trial: int, arm: Arm) -> dissection.Anatomy:
        """One dense pass, kept for the next arm of the same model."""
        place = prefix, kind, trial, arm.folder
        if self._seen is None or self._seen[0] != place:
            self._seen = None  # one at a time
            count = self.config.queries
            ids = dissection.text(arm.prose, trial, length=prefix + count, seed=self.config.seed, kind=kind)
            self._seen = place, dissection.dissect(arm.model, ids, prefix + jnp.arange(count))
        return self._seen[1]


@functools.partial(jax.jit, static_argnums=(0, 1))
def measure(rule: Pages, top: int, scale: float, rows: Array, queries: Array) -> dict[str, Array]:
    """How well a digest ranks pages, layer by layer: rows [L, n, C], queries [L, N, H, C] that see all rows.

    Returns float32 [L], means over queries and heads: recall, whether the page of the best row is among the first
    `top`, ties to the lower page; mass, the softmax weight of the rows in those pages; pruned, the share of pages
    scored below the best row; first, whether the best row is in page 0, where attention sinks are.
    """
    asked = queries.reshape(len(queries), -1, rows.shape[-1])
    return jax.lax.map(lambda layer: _measure(rule, top, scale, *layer), (rows, asked))


def _measure(rule: Pages, top: int, scale: float, rows: Array, queries: Array) -> dict[str, Array]:
    exact = dot(queries, rows)
    page = jnp.argmax(exact, axis=-1)[:, None] // rule.page
    scores = rule.scores(rows, jnp.ones(len(rows), bool), queries)
    _, chosen = jax.lax.top_k(scores, min(top, scores.shape[-1]))
    weight = paged(jax.nn.softmax(scale * exact, axis=-1), rule.page, axis=-1).sum(-1)
    found = {
        "recall": (chosen == page).any(-1),
        "mass": jnp.take_along_axis(weight, chosen, axis=-1).sum(-1),
        "pruned": pruned(scores, exact.max(-1)),
        "first": page == 0,
    }
    return {name: values.mean(dtype=jnp.float32) for name, values in found.items()}


def _check(config: ml_collections.ConfigDict) -> None:
    """Sizes and names that nothing else would refuse."""
    for name, least in (("trials", 1), ("queries", 1), ("top", 1), ("seed", 0)):
        if config[name] < least:
            raise ValueError(f"{name}={config[name]} must be at least {least}")
    if not config.prefixes or min(config.prefixes) < 1:
        raise ValueError(f"prefixes={config.prefixes} must be numbers of tokens, at least 1")
    for name, known in (("digests", tuple(PAGES)), ("texts", dissection.KINDS)):
        if not config[name] or not set(config[name]) <= set(known):
            raise ValueError(f"{name}={config[name]} must be some of {', '.join(known)}")


if __name__ == "__main__":
    launch(main, like=digests_config)
