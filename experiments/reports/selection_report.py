"""Summary, claims, tables and figures of the selection experiment."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_collections

from experiments.harness import claims, paired, plots, published, tables
from experiments.harness.claims import Estimate
from experiments.harness.runner import Run
from experiments.harness.twins import Twin
from experiments.reports import needle_report
from experiments.trials import sheets

COLUMNS = ("table", "arm", "checkpoint", "prefix", "method", "ratio", *needle_report.CELL, "published", "note")
OBSERVERS = ("h2o", "h2o_recent", "snapkv", "tova", "expected_attention")
"""Selectors that look at attention which the prompt itself paid."""
LEGEND = """\
{published}. arms: 95% of a mean over training seeds is a bootstrap over seeds, then over trials. nuke keeps the
sinks alone: what it finds leaks past the rows that were taken away. sigma_pcaK: sigma of K dimensions of the branch."""
Rows = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Reach:
    """limit: the longest prefix that all arms answer; reached: by checkpoint, 0 for one that answers at no length."""

    limit: int
    reached: Mapping[str, int]


class Measured:
    """The rows of a run by table, arm, method and ratio."""

    def __init__(self, rows: Iterable[Mapping[str, Any]], config: ml_collections.ConfigDict, twins: Sequence[Twin]):
        self.arm = {twin.name: twin.arm for twin in twins}
        self.rows = [row for row in rows if row["checkpoint"] in self.arm]
        self.main = next(twin.name for twin in twins if twin.arm == "nope" and twin.seed == 0)
        self.prefix = config.prefixes[0]
        self.missing = {twin.name: twin for twin in twins if not twin.weights}

    def method(self, name: str, ratio: int) -> Rows:
        """One cell of the first table, at the first prefix."""
        where = dict(table="methods", prefix=self.prefix, method=name, ratio=ratio)
        return [row for row in self.rows if all(row[field] == value for field, value in where.items())]

    def of_arm(self, arm: str, name: str, ratio: int, checkpoint: str = "") -> Rows:
        """One cell of the second table: all training seeds of an arm, or one checkpoint. Unusable ones are left out."""
        where = dict(table="arms", method=name, ratio=ratio)
        rows = [row for row in self.rows if all(row[field] == value for field, value in where.items())]
        rows = [row for row in rows if self.arm[row["checkpoint"]] == arm and checkpoint in ("", row["checkpoint"])]
        by_checkpoint: dict[str, list] = {}
        for row in rows:
            by_checkpoint.setdefault(row["checkpoint"], []).append(row)
        usable = [group for group in by_checkpoint.values() if not paired.unusable(group)]
        return [row for group in usable or by_checkpoint.values() for row in group]


def write(run: Run, config: ml_collections.ConfigDict, twins: Sequence[Twin], reach: Reach) -> None:
    """summary.csv, claims.csv, both figures, and the tables on the screen."""
    measured = Measured(run.rows, config, twins)
    summary = [*summarise(measured), *_absent(measured, reach)]
    run.write_csv("summary.csv", summary, COLUMNS)
    _draw(run, config, summary, reach)
    print(_tables(summary, reach))
    run.explain("\n\n".join(notes(measured, reach)))
    print(f"\n{claims.write(run, config.claims, estimates(measured, config))}")


def summarise(measured: Measured) -> list[dict[str, Any]]:
    """One row of COLUMNS for each cell of each table."""
    cells = sheets.summarise(measured.rows, ("table", "checkpoint", "prefix", "method", "ratio"))
    order = ("methods", "reach", "arms")
    cells.sort(key=lambda cell: (order.index(cell["table"]), cell["checkpoint"], cell["prefix"], cell["ratio"]))
    return [
        cell | {"arm": measured.arm[cell["checkpoint"]], "published": _published(cell, measured), "note": None}
        for cell in cells
    ]


def _published(cell: Mapping[str, Any], measured: Measured) -> str | None:
    place = {field: cell[field] for field in ("method", "ratio", "prefix")}
    arm, method = measured.arm[cell["checkpoint"]], cell["method"]
    if cell["table"] == "methods":
        width = method.removeprefix("sigma_pca")
        narrow = (
            published.beside("branch width intact", dims=int(width), ratio=cell["ratio"]) if width.isdigit() else None
        )
        return narrow and f"{narrow}, of 64" or published.beside("intact", **place)
    if cell["table"] == "arms" and method in ("sigma", "nuke"):
        name = {"sigma": arm, "nuke": "leakage floor" if arm == "rope" else ""}[method]
        return published.beside("dual arm intact", arm=name, ratio=cell["ratio"])
    return None


def _absent(measured: Measured, reach: Reach) -> Iterator[dict[str, Any]]:
    """A row for every checkpoint that has no cells among the arms, with the reason."""
    for name, arm in measured.arm.items():
        if name in measured.missing:
            note = f"missing; train it: {measured.missing[name].training}"
        elif not reach.reached.get(name):
            note = "dense answers at no length"
        else:
            continue
        yield dict.fromkeys(COLUMNS) | {"table": "arms", "arm": arm, "checkpoint": name, "note": note}


def estimates(measured: Measured, config: ml_collections.ConfigDict) -> dict[str, Estimate]:
    """Every quantity that a claim may be about, by its name."""
    found = {}
    for name, ratio in dict.fromkeys(
        (row["method"], row["ratio"]) for row in measured.rows if row["table"] == "methods"
    ):
        found[f"{name}, {ratio}x"] = paired.share(measured.method(name, ratio))
    for ratio in config.ratios:
        sigma, whole = measured.method("sigma", ratio), measured.method("full_row", ratio)
        found[f"full_row over sigma, {ratio}x"] = paired.difference(whole, sigma)
        found[f"sigma over the best observer, {ratio}x"] = _over_best(
            {name: measured.method(name, ratio) for name in OBSERVERS}, sigma
        )
    for ratio in config.width_ratios:
        found |= _widths(measured, config, ratio)
    for ratio in config.arm_ratios:
        found |= _arms(measured, config, ratio)
    return found


def _widths(measured: Measured, config: ml_collections.ConfigDict, ratio: int) -> dict[str, Estimate]:
    """The full branch against its narrowest part, and the worst step from one width to the next wider one."""
    names = [f"sigma_pca{width}" for width in sorted(config.widths)] + ["sigma"]
    groups = [group for group in (measured.method(name, ratio) for name in names) if group]
    if len(groups) < 2:
        return {}
    steps = [paired.difference(wide, narrow) for narrow, wide in zip(groups, groups[1:], strict=False)]
    usable = [step for step in steps if step.value is not None]
    worst = min(usable, key=lambda step: step.value) if usable else steps[0]
    return {
        f"full branch over its narrowest part, {ratio}x": paired.difference(groups[-1], groups[0]),
        f"worst step to a wider branch, {ratio}x": worst,
    }


def _arms(measured: Measured, config: ml_collections.ConfigDict, ratio: int) -> dict[str, Estimate]:
    def rows(arm: str, method: str) -> Rows:
        return measured.of_arm(arm, method, ratio)

    found = {f"{arm}, sigma, {ratio}x": paired.pooled(rows(arm, "sigma")) for arm in ("nope", "rope")}
    found[f"nope over rope, {ratio}x"] = paired.difference(rows("nope", "sigma"), rows("rope", "sigma"))
    for arm in ("nope", "rope"):
        found[f"{arm} over its floor, {ratio}x"] = paired.difference(rows(arm, "sigma"), rows(arm, "nuke"))
        found[f"{arm}, sigma over random, {ratio}x"] = paired.difference(rows(arm, "sigma"), rows(arm, "random"))
    found[f"gqa, sigma over the best observer, {ratio}x"] = _over_best(
        {name: rows("gqa", name) for name in OBSERVERS}, rows("gqa", "sigma")
    )
    found[f"order, gqa as nope, {ratio}x"] = paired.order(
        *({name: _costs(measured, arm, name, ratio) for name in config.order_methods} for arm in ("nope", "gqa"))
    )
    for quantity, estimate in found.items():
        gone = [name for name, twin in measured.missing.items() if twin.seed == 0 and twin.arm in quantity]
        if gone and not estimate.n:
            found[quantity] = paired.nothing(f"{', '.join(gone)} is missing")
    return found


def _costs(measured: Measured, arm: str, name: str, ratio: int) -> list[float]:
    """Nats over dense of every trial that dense answers, on the arm's first checkpoint."""
    first = measured.main if arm == "nope" else ""
    return [row["nll"] - row["nll_dense"] for row in measured.of_arm(arm, name, ratio, first) if not row["dropped"]]


def _over_best(others: Mapping[str, Rows], sigma: Rows) -> Estimate:
    """Sigma against whichever of the others keeps the most on these very trials."""
    present = {name: rows for name, rows in others.items() if rows}
    return paired.difference(sigma, present[paired.best(present)]) if present else paired.nothing(paired.NOTHING)


def _draw(run: Run, config: ml_collections.ConfigDict, summary: Rows, reach: Reach) -> None:
    name, trials = config.checkpoint.rstrip("/").rsplit("/", 1)[-1], config.trials
    cells = [cell for cell in summary if cell["method"] not in ("dense", None)]
    bars = [cell for cell in cells if cell["table"] == "methods" and cell["prefix"] == config.prefixes[0]]
    title = f"Needle in {config.prefixes[0]} tokens, {name}, {trials} trials"
    if bars:
        plots.intact_bars(run.path("selection.png"), bars, title, highlight=("sigma",))
    arms = [cell for cell in cells if cell["table"] == "arms" and cell["method"] in config.arm_methods]
    named = [cell | {"method": f"{cell['checkpoint']}: {cell['method']}"} for cell in arms]
    if named:
        ours = [cell["method"] for cell in named if cell["method"].endswith(": sigma")]
        title = f"Needle in {reach.limit} tokens, branch rotated or not, {trials} trials"
        plots.intact_bars(run.path("selection-arms.png"), named, title, highlight=ours)


def notes(measured: Measured, reach: Reach) -> Iterator[str]:
    """How to read the tables, and which checkpoints are not in them."""
    yield LEGEND.format(published=published.legend())
    yield f"Arms were compared at {reach.limit} tokens, the longest prefix that all of them answer."
    yield needle_report.CAUTION
    for twin in measured.missing.values():
        yield f"missing: {twin.name} ({twin.arm}, training seed {twin.seed}); train it: {twin.training}"


def _tables(summary: Rows, reach: Reach) -> str:
    methods = [_line(cell) for cell in summary if cell["table"] == "methods"]
    arms = [_line(cell) for cell in summary if cell["table"] == "arms" and cell["method"]]
    dense = [_line(cell) for cell in summary if cell["table"] == "reach"]
    columns = ["method", "ratio", "prefix", "intact", "95%", "exact", "attended", "fetched", "dropped", "published"]
    parts = [tables.render(methods, columns), "How far dense attention answers, on validation needles:"]
    parts += [tables.render(dense, ["arm", "checkpoint", "prefix", "intact", "dropped", "trials"])]
    if arms:
        parts.append(f"Arms at {reach.limit} tokens, the longest prefix that all of them answer:")
        parts.append(tables.render(arms, ["arm", "checkpoint", *columns]))
    return "\n\n".join(parts)


def _line(cell: Mapping[str, Any]) -> dict[str, Any]:
    usable = cell["intact"] is not None
    return dict(cell) | {
        "intact": f"{cell['intact']:.2f}" if usable else "unusable",
        "95%": f"{cell['lo']:.2f}-{cell['hi']:.2f}" if usable else None,
        "fetched": cell["fetched_per_step"],
    }
