"""The arms of a comparison, and one number per arm, text, layer and quantity (VestigeKV §6).

nope    the checkpoint, its branch as projected
turned  the same model's rows and queries, their branch rotated after the fact: one model, rotated or not
rope    its twin, trained with a rotated branch

A driver measures every layer of one arm on one text at a time; rows, intervals and tables are the same for all drivers.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from experiments.anatomy import dissection
from experiments.harness import claims, published, tables
from experiments.harness.checkpoints import checkpoint_folder, dtype, fingerprint
from experiments.harness.claims import Estimate
from experiments.harness.runner import Run
from experiments.harness.stats import percentiles, resampled
from experiments.text import corpus, needles
from experiments.trials import checks
from vestige_jax import models

KEY = ("prompt", "arm", "layer", "quantity")
SUMMARY = ("arm", "layer", "quantity", "value", "lo", "hi", "n")
MEAN = "mean"
"""In place of a layer's number: the mean over layers."""
Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Arm:
    """A model, and whether its rows and queries are rotated after the fact."""

    folder: pathlib.Path
    model: models.Decoder
    prose: needles.Prose
    turned: bool = False

    @property
    def layers(self) -> list[int]:
        """0-based numbers of the layers with rows."""
        return [i for i, block in enumerate(self.model.layers) if block.cached]

    @property
    def rotates(self) -> bool:
        """Whether its scores depend on positions."""
        return self.turned or self.model.config.rotated


def load(config: ml_collections.ConfigDict, turned: bool = False) -> dict[str, Arm]:
    """The arms of `checkpoint` and `twin`; an empty twin leaves its arm out, `turned` adds that arm.

    A rotated checkpoint is the rope arm. Grouped queries have no branch to turn. Raises ValueError where a rotated
    checkpoint has a twin, or where the twin is not rotated.
    """
    checks.checkpoint(config.checkpoint)
    if config.twin:
        checks.checkpoint(config.twin, "twin")
    text = corpus.load(config.text)
    first = _load(config.checkpoint, config.weights_dtype, text)
    if first.model.config.rotated:
        found = {"rope": first}
    else:
        found = {"nope": first}
        if turned and not first.model.config.grouped:
            found["turned"] = dataclasses.replace(first, turned=True)
    if config.twin:
        twin = _load(config.twin, config.weights_dtype, text, first)
        if "rope" in found or not twin.model.config.rotated:
            raise ValueError(
                f"twin={config.twin} must be a rotated model beside a checkpoint={config.checkpoint} that is not; "
                "an empty twin leaves that arm out"
            )
        found["rope"] = twin
    return found


def _load(path: str, weights_dtype: str, text: corpus.Corpus, other: Arm | None = None) -> Arm:
    folder = checkpoint_folder(path)
    model, tokenizer = models.load(folder, dtype=dtype("weights_dtype", weights_dtype)), models.Tokenizer.load(folder)
    if other is not None and tokenizer.encode(_SAMPLE) == other.prose.encoder.encode(_SAMPLE):
        return Arm(folder, model, other.prose)  # the same vocabulary: tokenised once
    return Arm(folder, model, needles.Prose(text, tokenizer))


_SAMPLE = "The quick brown fox writes 48213 lines, each of them return {key: value}; antidisestablishmentarianism."


def check(config: ml_collections.ConfigDict, *counts: str) -> None:
    """What every such config has. Raises ValueError for one of these counts below 1, or an unknown kind of text."""
    for name in ("prompts", *counts):
        if config[name] < 1:
            raise ValueError(f"{name}={config[name]} must be at least 1")
    if config.seed < 0:
        raise ValueError(f"seed={config.seed} must be at least 0")
    if config.kind not in dissection.KINDS:
        raise ValueError(f"kind={config.kind!r} is unknown; choose one of {', '.join(dissection.KINDS)}")


def start(config: ml_collections.ConfigDict, out: pathlib.Path, found: Mapping[str, Arm]) -> Run:
    """The run of a config over these arms; it can only go on with the same weights."""
    identity = config.copy_and_resolve_references()
    with identity.unlocked():
        identity.weights = {name: fingerprint(arm.folder) for name, arm in found.items()}
    text = next(iter(found.values())).prose.hash
    return Run(out, identity, key=KEY, text=text, seeds=[config.seed])


def collect(
    run: Run,
    found: Mapping[str, Arm],
    quantities: Sequence[str],
    ids: Callable[[Arm, int], np.ndarray],
    positions: np.ndarray,
    measure: Callable[[Arm, dissection.Anatomy], Mapping[str, Array]],
) -> None:
    """Adds the rows that are missing.

    Args:
      quantities: the names that `measure` returns, each with one value per layer [L].
      ids: (arm, number of a prompt) -> its tokens; all of one length.
      positions: where the queries are asked.
    """
    plan = [
        place
        for prompt in range(run.config.prompts)
        for name, arm in found.items()
        for place in itertools.product([prompt], [name], arm.layers, quantities)
    ]
    seen: tuple[tuple, dissection.Anatomy] | None = None
    for prompt, name, *_ in run.todo(plan, label=pathlib.Path(run.folder).name):
        arm = found[name]
        if seen is None or seen[0] != (prompt, arm.folder):
            seen = (prompt, arm.folder), dissection.dissect(arm.model, ids(arm, prompt), positions)
        values = {quantity: np.asarray(value, float) for quantity, value in measure(arm, seen[1]).items()}
        for (i, layer), quantity in itertools.product(enumerate(arm.layers), quantities):
            add(run, (prompt, name, layer, quantity), values[quantity][i])


def add(run: Run, key: tuple, value: float) -> None:
    """One row."""
    run.add(dict(zip(KEY, key, strict=True)) | {"value": float(value)})


class Measured:
    """The rows of a run as one array per arm and quantity: float64 [prompts, layers]."""

    def __init__(self, run: Run, found: Mapping[str, Arm]):
        values = {tuple(row[field] for field in KEY): row["value"] for row in run.rows}
        cells: dict[tuple, dict[int, list[float]]] = {}
        for prompt, name, layer, quantity in values:  # in the order of the plan
            if layer == found[name].layers[0]:
                line = [values[prompt, name, layer, quantity] for layer in found[name].layers]
                cells.setdefault((name, quantity), {})[prompt] = line
        self.layers = {name: arm.layers for name, arm in found.items()}
        self.cells = {place: np.array([cell[i] for i in sorted(cell)]) for place, cell in cells.items()}

    def arms(self, quantity: str) -> list[str]:
        """The arms in which it was measured."""
        return [name for name in self.layers if (name, quantity) in self.cells]

    def mean(self, arm: str, quantity: str) -> Estimate:
        """Over layers and prompts; 95% bootstrap over prompts. Unusable if it was not measured."""
        return self.of(lambda cell: cell.mean((-2, -1)), (arm, quantity))

    def difference(self, quantity: str, one: str = "nope", other: str = "rope") -> Estimate:
        """Of two arms on the same prompts, each the mean over its layers."""
        return self.of(lambda a, b: a.mean((-2, -1)) - b.mean((-2, -1)), (one, quantity), (other, quantity))

    def of(self, statistic: Callable[..., Any], *places: tuple[str, str]) -> Estimate:
        """A statistic of arrays [..., prompts, layers], one for each (arm, quantity); 95% bootstrap over prompts."""
        missing = sorted({arm for arm, quantity in places if (arm, quantity) not in self.cells})
        if missing:
            return Estimate(np.nan, np.nan, np.nan, 0, f"there is no arm {', '.join(missing)} in this run")
        cells = [self.cells[place] for place in places]
        draws = resampled(len(cells[0]))
        low, high = percentiles(statistic(*(cell[draws] for cell in cells)))
        return Estimate(float(statistic(*cells)), low, high, len(cells[0]))

    def layer(self, arm: str, quantity: str, layer: int) -> Estimate:
        """Of one layer, the mean over prompts."""
        index = self.layers[arm].index(layer)
        return self.of(lambda cell: cell[..., index].mean(-1), (arm, quantity))

    def summary(self) -> list[dict[str, Any]]:
        """A row of SUMMARY for each arm and quantity: every layer, then their mean."""
        rows = []
        for name, quantity in self.cells:
            for layer in (*self.layers[name], MEAN):
                own = self.mean(name, quantity) if layer == MEAN else self.layer(name, quantity, layer)
                rows.append(line(name, layer, quantity, own))
        return rows


def line(arm: str, layer: int | str, quantity: str, own: Estimate) -> dict[str, Any]:
    """A row of SUMMARY."""
    return dict(zip(SUMMARY, (arm, layer, quantity, own.value, own.low, own.high, own.n), strict=True))


def table(
    summary: Sequence[Mapping[str, Any]], paper: Callable[[str, Any], str | None]
) -> tuple[list[dict[str, Any]], list[str]]:
    """A line for each quantity and layer, a column for each arm, and what was published for (quantity, layer)."""
    arms = list(dict.fromkeys(row["arm"] for row in summary))
    lines: dict[tuple, dict[str, Any]] = {}
    for quantity in dict.fromkeys(row["quantity"] for row in summary):
        for row in (row for row in summary if row["quantity"] == quantity):
            layer = row["layer"]
            first = {"quantity": quantity, "layer": str(layer), "published": paper(quantity, layer)}
            line = lines.setdefault((quantity, layer), first)
            line[row["arm"]] = f"{row['value']:.3g} ({row['lo']:.3g} to {row['hi']:.3g})"
    columns = ["quantity", "layer", *arms, "published"]
    return [dict.fromkeys(columns) | line for line in lines.values()], columns


def finish(
    run: Run,
    measured: Measured,
    estimates: Mapping[str, Estimate],
    paper: Callable[[str, Any], str | None],
    more: Sequence[Mapping[str, Any]] = (),
) -> None:
    """summary.csv with `more` rows at its end, table.csv as it stands on the screen, and claims.csv."""
    summary = [*measured.summary(), *more]
    run.write_csv("summary.csv", summary, SUMMARY)
    lines, columns = table(summary, paper)
    run.write_csv("table.csv", lines, columns)
    print(tables.render(lines, columns))
    run.explain(f"In brackets: 95% bootstrap over prompts. {published.legend()}.")
    print(claims.write(run, run.config.claims, estimates))
