"""Summary, claims, table and figure of the page digests."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np

from experiments.harness import claims, plots, published, tables
from experiments.harness.claims import ABSENT, Estimate, bootstrapped
from experiments.harness.runner import Run
from vestige_jax.baselines.recalls import PAGES

ARMS = ("nope", "turned", "rope")
COLUMNS = (
    *("prefix", "arm", "digest", "texts", "worst", "lo", "hi", "layer", "median", "median_lo", "median_hi"),
    *("chance", "mass", "pruned", "first", "published_worst"),
)
PUBLISHED_TOP = 8
CAUTION = """\
worst and median: over layers, of the mean over texts; 95% bootstrap over texts. chance: ranking pages blindly. Medians
over layers: mass, the attention that the rows of the chosen pages get; pruned, pages whose bound is below the best row;
first, best rows in page 0, a sink that any page holds. turned: the rows of the nope model, rotated. Which volume the
published radii are of is not stated; published gain of NoPE over RoPE at the median layer: {gain}."""

Table = Mapping[tuple, np.ndarray]
"""(prefix, arm, digest) -> recall float64 [texts, layers]."""


def write(run: Run, config: ml_collections.ConfigDict) -> None:
    """summary.csv, claims.csv, digests.png and the tables on the screen."""
    rows = list(run.rows)
    recalls = {place: array for place, (array, _) in collect(rows, "recall").items()}
    summary = list(summarise(rows, config))
    run.write_csv("summary.csv", summary, COLUMNS)
    name = config.checkpoint.rstrip("/").rsplit("/", 1)[-1]
    plots.dots(
        run.path("digests.png"),
        [cell | {"panel": f"{cell['prefix']} tokens"} for cell in summary],
        series="arm",
        label="digest",
        title=f"Pages that hold the best row, {name}",
        x_label=f"recall@{config.top}: worst layer with 95% interval, median layer hollow, grey: chance",
    )
    print(tables.render([_line(cell) for cell in summary], list(_line(summary[0]))))
    run.explain(f"{published.legend()}\n\n{CAUTION.format(gain=published.beside('page recall@8, median gain'))}")
    known = quantities(recalls, common(recalls))
    measured = {claim.quantity: known[claim.quantity]() for claim in config.claims.values()}
    print(claims.write(run, config.claims, measured))


def collect(rows: Iterable[Mapping[str, Any]], field: str) -> dict[tuple, tuple[np.ndarray, list[int]]]:
    """(prefix, arm, digest) -> the field as float64 [texts, layers], and the layers."""
    cells: dict[tuple, dict] = {}
    for row in rows:
        cell = cells.setdefault((row["prefix"], row["arm"], row["digest"]), {})
        cell.setdefault((row["text"], row["trial"]), {})[row["layer"]] = row[field]
    layers = {place: list(next(iter(cell.values()))) for place, cell in cells.items()}
    return {
        place: (np.array([[text[layer] for layer in layers[place]] for text in cell.values()], float), layers[place])
        for place, cell in cells.items()
    }


def worst(recall: np.ndarray) -> float:
    """Smallest mean of any layer: recall [texts, layers]."""
    return float(recall.mean(0).min())


def median(recall: np.ndarray) -> float:
    """Median over layers of the mean over texts."""
    return float(np.median(recall.mean(0)))


def summarise(rows: Sequence[Mapping[str, Any]], config: ml_collections.ConfigDict) -> Iterable[dict[str, Any]]:
    """One row of COLUMNS for each prefix, arm and digest."""
    means = {name: collect(rows, name) for name in ("mass", "pruned", "first")}
    for place, (recall, layers) in collect(rows, "recall").items():
        prefix, arm, digest = place
        rule = PAGES[digest]
        lowest, middle = bootstrapped(recall, worst), bootstrapped(recall, median)
        figure = dict(radius=getattr(rule, "radius", None), branch=arm) if config.top == PUBLISHED_TOP else {}
        yield dict(prefix=prefix, arm=arm, digest=digest, texts=len(recall)) | {
            **dict(worst=lowest.value, lo=lowest.low, hi=lowest.high, layer=layers[int(recall.mean(0).argmin())]),
            **dict(median=middle.value, median_lo=middle.low, median_hi=middle.high),
            "chance": min(1.0, config.top / -(-prefix // rule.page)),
            **{name: median(cells[place][0]) for name, cells in means.items()},
            **({} if rule.bound else {"pruned": None}),
            "published_worst": published.beside("page recall@8, worst layer", **figure),
        }


def common(recalls: Table) -> int:
    """The longest prefix at which every arm was asked; the shortest of all if there is none."""
    arms = {arm for _, arm, _ in recalls}
    asked = {prefix: {arm for p, arm, _ in recalls if p == prefix} for prefix, _, _ in recalls}
    return max((prefix for prefix, present in asked.items() if present == arms), default=min(asked))


def quantities(recalls: Table, prefix: int) -> dict[str, Callable[[], Estimate]]:
    """What the claims of a config may speak of, all at one prefix; unusable where an arm or a digest was left out."""
    found = {}
    for digest in PAGES:
        cells = {arm: recalls.get((prefix, arm, digest)) for arm in ARMS}
        for arm, cell in cells.items():
            found[f"worst layer, {digest}, {arm}"] = functools.partial(estimate, worst, cell)
            found[f"median layer, {digest}, {arm}"] = functools.partial(estimate, median, cell)
        both = cells["nope"], cells["rope"]
        found[f"median gain, {digest}"] = functools.partial(estimate, median, *both)
        found[f"median change, {digest}"] = functools.partial(size, functools.partial(estimate, median, *both))
    for arm in ARMS:
        for volume in ("arkvale", "arkvale_cuboid"):
            both = [recalls.get((prefix, arm, name)) for name in (volume, f"{volume}_mean")]
            found[f"worst layer, {volume}, max over mean, {arm}"] = functools.partial(estimate, worst, *both)
    return found


def estimate(statistic: Callable, *cells: np.ndarray | None) -> Estimate:
    """The statistic of a cell [texts, layers], or its difference between two, with a bootstrap over the texts."""
    if any(cell is None for cell in cells):
        return ABSENT
    edge = cells[0].shape[1]

    def of(drawn: np.ndarray) -> float:
        return statistic(drawn) if len(cells) == 1 else statistic(drawn[:, :edge]) - statistic(drawn[:, edge:])

    return bootstrapped(np.concatenate(cells, axis=1), of)


def size(gain: Callable[[], Estimate]) -> Estimate:
    """How large a difference is, whichever sign it has: its interval is that of |gain|, and may end at 0."""
    own = gain()
    if own.unusable:
        return own
    ends = abs(own.low), abs(own.high)
    low = 0.0 if own.low <= 0 <= own.high else min(ends)
    return dataclasses.replace(own, value=abs(own.value), low=low, high=max(ends))


def _line(cell: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: cell[name] for name in ("prefix", "arm", "digest", "worst")}
    shown |= {"95%": f"{cell['lo']:.2f}-{cell['hi']:.2f}", "layer": cell["layer"], "median": cell["median"]}
    shown |= {name: cell[name] for name in ("chance", "mass", "pruned", "first")}
    return shown | {"published worst": cell["published_worst"]}
