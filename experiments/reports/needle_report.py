"""Summary, table and figures of the needle experiment."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np

from experiments.harness import plots, published, tables
from experiments.harness.runner import Run
from experiments.harness.stats import wilson

MEANS = ("attended", "fetched_per_step", "fire_rate", "overflow")
CELL = ("trials", "dropped", "intact", "lo", "hi", "exact", *MEANS)
COLUMNS = ("method", "ratio", "prefix", *CELL)
GRID_COLUMNS = ("method", "ratio", "prefix", "depth", *CELL)
ORDER = ("ratio", "method", "prefix", "depth")
MOST_DROPPED = 2 / 24
"""A cell that drops more than this share of its trials is unusable (VestigeKV §6)."""
CAUTION = """\
Caution: with recall, intact says little about the selector: even a random tier 1 gets a single needle back through
the index (see random+recall). Read intact beside attended: at 1.00 a method is dense attention in disguise."""

Rows = Sequence[Mapping[str, Any]]


def write(run: Run, config: ml_collections.ConfigDict) -> None:
    """summary.csv and needle.png, the grid where there is one, and the table on the screen."""
    rows = list(run.rows)
    summary = list(summarise(rows, COLUMNS[:3]))
    run.write_csv("summary.csv", summary, COLUMNS)
    beside = [cell | {"published": _published(cell)} for cell in summary]
    run.write_csv("table.csv", beside, (*COLUMNS, "published"))
    bars = [cell for cell in summary if cell["method"] != "dense" and cell["prefix"] == max(config.prefixes)]
    if bars:
        trials = max(cell["trials"] for cell in bars)
        plots.intact_bars(run.path("needle.png"), bars, _title(config, trials), highlight=("vestige",))
    if len(config.depths) > 2 or len(config.prefixes) > 1:
        grid(run, rows, config)
    cells, notes = table(summary)
    print(cells)
    run.explain(notes)


def summarise(rows: Rows, by: Sequence[str]) -> list[dict[str, Any]]:
    """One cell for each combination of the fields `by`: ratio by ratio, each field's values as they first come."""
    cells: dict[tuple, list] = {}
    for row in rows:
        cells.setdefault(tuple(row[field] for field in by), []).append(row)
    summary = [dict(zip(by, place, strict=True)) | summarise_cell(group) for place, group in cells.items()]
    for field in sorted(by, key=ORDER.index, reverse=True):  # sorting is stable: the first of ORDER comes last and wins
        ranks = {value: rank for rank, value in enumerate(dict.fromkeys(row[field] for row in rows))}
        summary.sort(key=lambda cell, field=field, ranks=ranks: ranks[cell[field]])
    return summary


def summarise_cell(rows: Rows) -> dict[str, Any]:
    """Shares over the trials that dense answers, with Wilson's 95% interval; None where too many had to be dropped.

    What the cache did (attended rows, fetches) is averaged over all trials.
    """
    kept = [row for row in rows if not row["dropped"]]
    dropped = len(rows) - len(kept)
    cell: dict[str, Any] = {"trials": len(rows), "dropped": dropped}
    if dropped > MOST_DROPPED * len(rows):
        cell |= dict.fromkeys(("intact", "lo", "hi", "exact"))
    else:
        intact = sum(row["intact"] for row in kept)
        low, high = wilson(intact, len(kept))
        cell |= {"intact": intact / len(kept), "lo": low, "hi": high, "exact": _mean(row["exact"] for row in kept)}
    return cell | {name: _mean(row[name] for row in rows) for name in MEANS}


def table(summary: Rows) -> tuple[str, str]:
    """The cells beside what was published for the same ones; and how to read them."""
    lines = [_line(cell) for cell in summary]
    columns = ["method", "ratio", "prefix", "intact", "95%", "exact", "attended", "fetched", "fires", "overflow"]
    parts = []
    if any(line["published intact"] for line in lines):
        parts.append(published.legend())
    if any(cell["intact"] is None for cell in summary):
        parts.append("unusable: dense attention fails on more than 2 of 24 trials; the cell says nothing of the method")
    cells = tables.render(lines, [*columns, "dropped", "published intact"])
    return cells, "\n\n".join([*parts, CAUTION])


def grid(run: Run, rows: Rows, config: ml_collections.ConfigDict) -> None:
    """grid.csv, and for each method and ratio a heat map of depth by prefix."""
    cells = summarise(rows, GRID_COLUMNS[:4])
    run.write_csv("grid.csv", cells, GRID_COLUMNS)
    depths = list(dict.fromkeys(cell["depth"] for cell in cells))
    shares = {tuple(cell[field] for field in GRID_COLUMNS[:4]): cell["intact"] for cell in cells}
    for method, ratio in dict.fromkeys((cell["method"], cell["ratio"]) for cell in cells):
        if method == "dense":
            continue
        values = [[shares[method, ratio, prefix, depth] for prefix in config.prefixes] for depth in depths]
        plots.heat_map(
            run.path(f"grid-{re.sub(r'[^a-z0-9_]', '-', method)}-{ratio}.png"),
            np.array(values, np.float64),
            rows=depths,
            columns=config.prefixes,
            row_label="depth of the needle",
            column_label="tokens of the compressed prefix",
            title=f"{method}, 1/{ratio} of the rows kept: share intact",
        )


def _title(config: ml_collections.ConfigDict, trials: int) -> str:
    name = config.checkpoint.rstrip("/").rsplit("/", 1)[-1]
    return f"Needle in {max(config.prefixes)} tokens, {name}, {trials} trials"


def _line(cell: Mapping[str, Any]) -> dict[str, Any]:
    usable = cell["intact"] is not None
    place = {field: cell[field] for field in ("method", "ratio", "prefix")}
    return place | {
        "intact": f"{cell['intact']:.2f}" if usable else "unusable",
        "95%": f"{cell['lo']:.2f}-{cell['hi']:.2f}" if usable else None,
        "exact": cell["exact"],
        "attended": cell["attended"],
        "fetched": cell["fetched_per_step"],
        "fires": cell["fire_rate"],
        "overflow": cell["overflow"],
        "dropped": cell["dropped"],
        "published intact": _published(cell),
    }


def _published(cell: Mapping[str, Any]) -> str | None:
    return published.beside("intact", **{field: cell[field] for field in COLUMNS[:3]})


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)
