"""Summary, claims, table and figure of the language-model cost."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np

from experiments.harness import claims, plots, published, tables
from experiments.harness.claims import Estimate, bootstrapped
from experiments.harness.runner import Run

COLUMNS = (
    *("method", "ratio", "windows", "tokens", "nats_per_token", "delta", "lo", "hi"),
    *("bits_per_byte", "delta_bits_per_byte", "delta_bits_lo", "delta_bits_hi"),
    *("attended", "fetched_per_step", "fire_rate", "overflow", "published_delta"),
)
MEANS = ("attended", "fetched_per_step", "fire_rate", "overflow")
PUBLISHED = {"streaming": "recent"}
"""Our name -> the published one, where they differ."""
CAUTION = """\
delta: nats per token over dense attention on the same path; 95% bootstrap over windows. Every method attends the rows
behind the cut: a delta near 0 says that plain text hardly needs the prefix, not that nothing was lost (see needle)."""

Cells = Mapping[tuple[str, int], np.ndarray]
"""(method, ratio) -> for each window nats, tokens, bytes, and nats of dense: float64 [N, 4]."""


def write(run: Run, config: ml_collections.ConfigDict) -> None:
    """summary.csv, claims.csv, lm_cost.png and the tables on the screen."""
    rows = list(run.rows)
    cells = collect(rows)
    summary = [summarise(cells, rows, *place) for place in cells]
    run.write_csv("summary.csv", summary, COLUMNS)
    name = config.checkpoint.rstrip("/").rsplit("/", 1)[-1]
    title = f"Cost on plain text behind {config.prefix} compressed tokens, {name}"
    plots.intervals(run.path("lm_cost.png"), list(series(summary)), title, "compression", "nats per token over dense")
    print(tables.render([_line(cell) for cell in summary], [*_line(summary[0])]))
    run.explain(f"{published.legend()}\n\n{CAUTION}")
    print(claims.write(run, config.claims, measured(cells)))


def collect(rows: Sequence[Mapping[str, Any]]) -> Cells:
    """Windows of every cell beside the same windows under dense attention."""
    dense = {row["window"]: row["nats"] for row in rows if row["method"] == "dense"}
    cells: dict[tuple[str, int], list] = {}
    for row in rows:
        line = [row["nats"], row["tokens"], row["bytes"], dense[row["window"]]]
        cells.setdefault((row["method"], row["ratio"]), []).append(line)
    return {place: np.array(lines, np.float64) for place, lines in cells.items()}


def nats_per_token(cell: np.ndarray) -> float:
    """Cross-entropy over dense, of all tokens: float64 [N, 4] -> nats per token."""
    nats, tokens, _, dense = cell.sum(0)
    return (nats - dense) / tokens


def bits_per_byte(cell: np.ndarray) -> float:
    """The same in bits per byte of text, which does not depend on the tokenizer."""
    nats, _, size, dense = cell.sum(0)
    return (nats - dense) / math.log(2) / size


def measured(cells: Cells) -> dict[str, Estimate]:
    """What the claims of a config may speak of."""
    compressed = {place: cell for place, cell in cells.items() if place[0] != "dense"}
    found = {f"delta CE, {name}, {r}x": bootstrapped(cell, nats_per_token) for (name, r), cell in compressed.items()}
    for (name, ratio), cell in cells.items():
        if name == "vestige" and ("sigma", ratio) in cells:
            both = np.stack([cell, cells["sigma", ratio]], axis=1)  # the same windows in the same order
            found[f"saved by recall, {ratio}x"] = bootstrapped(both, saved)
    return found


def saved(both: np.ndarray) -> float:
    """Nats per token that recall saves: cost of tier 1 alone less that of both tiers, float64 [N, 2, 4]."""
    return nats_per_token(both[:, 1]) - nats_per_token(both[:, 0])


def summarise(cells: Cells, rows: Sequence[Mapping[str, Any]], method: str, ratio: int) -> dict[str, Any]:
    """One row of COLUMNS."""
    cell, group = cells[method, ratio], [row for row in rows if (row["method"], row["ratio"]) == (method, ratio)]
    nats, tokens, size, _ = cell.sum(0)
    line = {"method": method, "ratio": ratio, "windows": len(cell), "tokens": int(tokens)}
    line |= {"nats_per_token": nats / tokens, "bits_per_byte": nats / math.log(2) / size}
    for statistic, names in ((nats_per_token, _DELTA), (bits_per_byte, _BITS)):
        found = bootstrapped(cell, statistic) if method != "dense" else None
        line |= dict(zip(names, (found.value, found.low, found.high) if found else (None,) * 3, strict=True))
    line |= {name: float(np.mean([row[name] for row in group])) for name in MEANS}
    return line | {
        "published_delta": published.beside("nats per token", ratio=ratio, method=PUBLISHED.get(method, method))
    }


_DELTA = ("delta", "lo", "hi")
_BITS = ("delta_bits_per_byte", "delta_bits_lo", "delta_bits_hi")


def series(summary: Sequence[Mapping[str, Any]]) -> Iterator[plots.Series]:
    """Every method's cost by ratio, and what was published."""
    compressed = [cell for cell in summary if cell["method"] != "dense"]
    for method in dict.fromkeys(cell["method"] for cell in compressed):
        own = [cell for cell in compressed if cell["method"] == method]
        at = [cell["ratio"] for cell in own]
        yield plots.Series(method, at, *([cell[name] for cell in own] for name in _DELTA))
        for model in (published.BASE, published.INSTRUCT):
            figures = [
                (ratio, figure.value)
                for ratio in at
                for figure in published.find("nats per token", ratio=ratio, method=PUBLISHED.get(method, method))
                if figure.model == model
            ]
            if figures:
                label = f"{method}, {published.SHORT[model]}"
                yield plots.Series(label, *map(list, zip(*figures, strict=True)), published_for=method)


def _line(cell: Mapping[str, Any]) -> dict[str, Any]:
    """A row for the screen: costs need more digits than a table gives by itself."""
    compressed = cell["delta"] is not None
    shown = {name: cell[name] for name in ("method", "ratio", "nats_per_token")}
    shown |= {"delta": f"{cell['delta']:+.4f}" if compressed else None}
    shown |= {"95%": f"{cell['lo']:+.4f} to {cell['hi']:+.4f}" if compressed else None}
    shown |= {"bits/byte": f"{cell['bits_per_byte']:.4f}"}
    shown |= {"attended": cell["attended"], "fetched": cell["fetched_per_step"], "overflow": cell["overflow"]}
    return shown | {"published delta": cell["published_delta"]}
