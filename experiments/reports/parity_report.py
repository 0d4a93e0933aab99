"""Summary, claims, tables and figures of the parity experiment, all from its rows."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from experiments.harness import claims, plots, published, tables
from experiments.harness.claims import Estimate, bootstrapped
from experiments.harness.runner import Run
from experiments.harness.stats import wilson
from experiments.reports import frontier
from experiments.reports.needle_report import MOST_DROPPED
from experiments.trials.parity_parts import CHUNKS, DENSE, DTYPE, RESAMPLED, TEXT

COLUMNS = ("part", "quantity", "side", "ratio", "value", "lo", "hi", "n")
COLUMNS += ("attended", "fetched", "overflow", "published")
GAP, BITS, MORE_BITS, INTACT = "median |dNLL|", "bits per byte", "delta bits per byte", "intact"
MAUVE, LOST = "MAUVE on own hidden states", "MAUVE lost"
NOTES = """\
median |dNLL|: of all tokens behind the cut, in nats, against dense; other chunks and other dtype are the floor, what
dense attention itself reproduces. MAUVE here reads the model's own hidden states in place of GPT-2's: 'dense again' is
what a second draw reaches, and only the distance to it means anything."""

Rows = Sequence[Mapping[str, Any]]
Sides = Mapping[tuple[str, int], Rows]
"""(side, ratio) -> the rows of one part."""


class Line(NamedTuple):
    """One line of the summary."""

    part: str
    quantity: str
    side: str
    ratio: int
    estimate: Estimate

    @property
    def name(self) -> str:
        """How a claim calls it."""
        return f"{self.quantity}, {self.side}, {self.ratio}x"


def write(run: Run, config: ml_collections.ConfigDict) -> None:
    """summary.csv, claims.csv, two figures and the tables on the screen."""
    parts = {part: collect(row for row in run.rows if row["part"] == part) for part in ("text", "needle", "samples")}
    lines = [*text(parts["text"]), *needle(parts["needle"]), *samples(parts["samples"], config.clusters)]
    summary = [summarise(line, parts[line.part]) for line in lines]
    run.write_csv("summary.csv", summary, COLUMNS)
    model = config.checkpoint.rstrip("/").rsplit("/", 1)[-1]
    _draw_gaps(run.path("parity.png"), lines, f"The deployed path against dense attention, {model}")
    _draw_needles(run.path("parity-needles.png"), lines, f"Needle in {config.needle_prefix} tokens, {model}")
    print(tables.render([_shown(row) for row in summary], COLUMNS))
    run.explain(f"{published.legend()}\n\n{NOTES}")
    print(claims.write(run, config.claims, measured(lines, parts, config.clusters)))


def collect(rows) -> Sides:
    """Rows by side and ratio, in the order of their trials."""
    cells: dict[tuple[str, int], list] = {}
    for row in rows:
        cells.setdefault((row["side"], row["ratio"]), []).append(row)
    return {place: sorted(group, key=lambda row: row["trial"]) for place, group in cells.items()}


def text(cells: Sides) -> Iterator[Line]:
    """How far each side's NLL is from dense, and bits per byte."""
    dense, size = losses(cells, DENSE), np.array([row["bytes"] for row in cells[DENSE, 1]])
    for side, ratio in cells:
        if side != DENSE:
            gap = np.abs(losses(cells, side, ratio) - dense)
            yield Line("text", GAP, side, ratio, bootstrapped(gap, np.median))
    for side, ratio in cells:
        nats = losses(cells, side, ratio).sum(1)
        yield Line("text", BITS, side, ratio, bootstrapped(np.stack([nats, size], 1), _bits))
        if side != DENSE:
            more = np.stack([nats - dense.sum(1), size], 1)
            yield Line("text", MORE_BITS, side, ratio, bootstrapped(more, _bits))


def losses(cells: Sides, side: str, ratio: int = 1) -> np.ndarray:
    """NLL in nats of every token: float64 [windows, tokens]."""
    return np.array([row["nll"] for row in cells[side, ratio]], np.float64)


def _bits(pairs: np.ndarray) -> float:
    """Sums of nats and bytes [N, 2] -> bits per byte."""
    nats, size = pairs.sum(0)
    return nats / size / math.log(2)


def needle(cells: Sides) -> Iterator[Line]:
    """Share of the trials that dense answers left intact, with Wilson's interval."""
    for (side, ratio), rows in cells.items():
        if side != DENSE:
            kept = [row["intact"] for row in rows if not row["dropped"]]
            share = sum(kept) / len(kept) if kept else 0.0
            ours = Estimate(share, *wilson(sum(kept), len(kept)), len(kept), _unusable(rows))
            yield Line("needle", INTACT, side, ratio, ours)


def _unusable(rows: Rows) -> str:
    dropped = sum(row["dropped"] for row in rows)
    return f"dense fails on {dropped} of {len(rows)} trials" if dropped > MOST_DROPPED * len(rows) else ""


def samples(cells: Sides, clusters: int) -> Iterator[Line]:
    """MAUVE of every pair of sets that means something: each against the text, and each against dense."""
    labels = label(cells, clusters)
    for reference in ((TEXT, 1), (DENSE, 1)):
        for side, ratio in cells:
            if side != TEXT and (side, ratio) != reference:
                pair = np.stack([labels[side, ratio], labels[reference]], 1)
                ours = bootstrapped(pair, lambda pair: frontier.between(pair[:, 0], pair[:, 1], clusters))
                yield Line("samples", f"{MAUVE}, against {reference[0]}", side, ratio, ours)


def label(cells: Sides, clusters: int) -> dict[tuple[str, int], np.ndarray]:
    """The cluster of every continuation, int [contexts] for each side; all sides are clustered together."""
    features = np.concatenate([[row["features"] for row in rows] for rows in cells.values()])
    sizes = np.cumsum([len(rows) for rows in cells.values()])[:-1]
    return dict(zip(cells, np.split(frontier.cluster(features, clusters), sizes), strict=True))


def measured(lines: Sequence[Line], parts: Mapping[str, Sides], clusters: int) -> dict[str, Estimate]:
    """What the claims of a config may speak of: the lines of the summary, and what is made of two of them."""
    return {line.name: line.estimate for line in lines} | dict(_paired(parts, clusters))


def _paired(parts: Mapping[str, Sides], clusters: int) -> Iterator[tuple[str, Estimate]]:
    cells = parts["text"]
    dense, floors = losses(cells, DENSE), [losses(cells, CHUNKS), losses(cells, DTYPE)]
    for side, ratio in cells:
        if side not in (DENSE, CHUNKS, DTYPE):
            gaps = np.abs(np.stack([losses(cells, side, ratio), *floors], 1) - dense[:, None])
            yield f"policy over floor, {ratio}x", bootstrapped(gaps, over_floor)
    for (side, ratio), rows in parts["needle"].items():
        if side == "vestige" and ("sigma", ratio) in parts["needle"]:
            pairs = zip(rows, parts["needle"]["sigma", ratio], strict=True)
            gained = [int(one["intact"]) - int(other["intact"]) for one, other in pairs if not one["dropped"]]
            if gained:
                ours = bootstrapped(gained)
                yield (
                    f"restored by recall, {ratio}x",
                    Estimate(ours.value, ours.low, ours.high, ours.n, _unusable(rows)),
                )
    labels = label(parts["samples"], clusters)
    (policy,) = [place for place in labels if place[0] not in (TEXT, DENSE, RESAMPLED)]
    for reference in (TEXT, DENSE):
        sides = [labels[RESAMPLED, 1], labels[policy], labels[reference, 1]]
        lost = bootstrapped(np.stack(sides, 1), lambda sides: _lost(sides, clusters))
        yield f"{LOST} against {reference}", lost


def over_floor(gaps: np.ndarray) -> float:
    """Median |dNLL| of the policy over that of the larger floor; [windows, (policy, floor, floor), tokens]."""
    policy, *floors = np.median(np.moveaxis(gaps, 1, 0).reshape(3, -1), axis=1)
    return policy / max(*floors, np.finfo(np.float64).tiny)


def _lost(sides: np.ndarray, clusters: int) -> float:
    """MAUVE of dense again less that of the policy, both against the reference: clusters int [contexts, 3]."""
    again, policy, reference = sides.T
    return frontier.between(again, reference, clusters) - frontier.between(policy, reference, clusters)


def summarise(line: Line, cells: Sides) -> dict[str, Any]:
    """One row of COLUMNS."""
    rows, ours = cells[line.side, line.ratio], line.estimate
    place = {"part": line.part, "quantity": line.quantity, "side": line.side, "ratio": line.ratio}
    row = place | {"value": ours.value, "lo": ours.low, "hi": ours.high, "n": ours.n}
    for name, field in (("attended", "attended"), ("fetched", "fetched_per_step"), ("overflow", "overflow")):
        row[name] = float(np.mean([r[field] for r in rows])) if field in rows[0] else None
    return row | {"published": _published(line)}


def _published(line: Line) -> str | None:
    """The published figure beside a line; none of them says at which ratio, but for 512x."""
    sides = {DENSE: "dense", "vestige": "policy", CHUNKS: "floor", DTYPE: "floor"}
    if line.quantity == GAP:
        return published.beside("median |delta NLL|", side=sides[line.side])
    if line.quantity == BITS and line.side in (DENSE, "vestige"):
        return published.beside("bits per byte", side=sides[line.side])
    if line.quantity == INTACT and line.ratio == 512:
        return published.beside("needles at 512x", side="two-tier" if line.side == "vestige" else "eviction only")
    if line.quantity.startswith(MAUVE) and line.side in (RESAMPLED, "vestige"):
        return published.beside("MAUVE, 16 contexts", side="policy" if line.side == "vestige" else "dense")
    return None


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """For the screen: small differences need more digits than a table gives by itself."""
    return row | {name: f"{row[name]:.4f}" for name in ("value", "lo", "hi")}


def _draw_gaps(path, lines: Sequence[Line], title: str) -> None:
    gaps = [line for line in lines if line.quantity == GAP]
    own = [line for line in gaps if line.side == "vestige"]
    values = [[getattr(line.estimate, name) for line in own] for name in ("value", "low", "high")]
    figures = [plots.Series("policy", [line.ratio for line in own], *values)]
    levels = {line.side: line.estimate.value for line in gaps if line.side in (CHUNKS, DTYPE)}
    plots.intervals(path, figures, title, "compression", "median |difference| in NLL, nats", levels)


def _draw_needles(path, lines: Sequence[Line], title: str) -> None:
    rows = []
    for line in lines:
        if line.quantity == INTACT:
            ours = line.estimate
            share = None if ours.unusable else ours.value
            row = {"method": line.side, "ratio": line.ratio, "trials": ours.n, "intact": share}
            rows.append(row | {"lo": ours.low, "hi": ours.high})
    plots.intact_bars(path, rows, title, highlight=("vestige",))
