"""The figure of the index experiment: hard recall over bytes, its upper left the frontier."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.harness import plots
from experiments.harness.runner import Run
from experiments.trials import index_grid

COLOURS = {"sketch": (plots.COLOURS[0], plots.COLOURS[2]), "balanced": (plots.COLOURS[1], plots.INK)}
"""Of an index at the usual target, and at another."""
MARKS = {16: "o", 8: "s", 4: "^"}  # by bits of a code
LINES = ("-", "--", ":", "-.")  # by rank
Cells = Sequence[Mapping[str, Any]]


def draw(run: Run, config: ml_collections.ConfigDict, cells: Cells) -> None:
    """index.png: a row of panels for each arm, a panel for each kind of workload, at the first ratio.

    A line is an index at one rank and target, a mark one width of its codes.

    Args:
      cells: with ``arm``, ``kind``, the fields of an index, ``bytes_per_row``, and ``hard_recall`` with its interval.
    """
    cells = [cell for cell in cells if cell["ratio"] == config.ratios[0] and cell["hard_recall"] is not None]
    if not cells:
        return
    arms, works = (list(dict.fromkeys(cell[field] for cell in cells)) for field in ("arm", "kind"))
    figure = Figure(figsize=(2.4 + 2.1 * len(works), 0.8 + 2.3 * len(arms)), layout="constrained")
    panels = figure.subplots(len(arms), len(works), sharex=True, sharey=True, squeeze=False)
    lines = _lines(cells)
    for (i, arm), (j, work) in itertools.product(enumerate(arms), enumerate(works)):
        here = [cell for cell in cells if (cell["arm"], cell["kind"]) == (arm, work)]
        for line, style in lines.items():
            _draw_line(panels[i][j], [cell for cell in here if _line(cell) == line], style)
        _mark_paper(panels[i][j], here, index_grid.reference(config))
        plots.clean(panels[i][j])
        panels[i][j].set_title(f"{work}, {arm}", fontsize=9, color=plots.INK)
    figure.legend(handles=_legend(lines), loc="outside right center", fontsize=8, frameon=False, labelcolor=plots.INK)
    figure.supxlabel("bytes per archived row: index, tier 1 and fetches", fontsize=9, color=plots.INK)
    figure.supylabel("hard recall, 95% interval", fontsize=9, color=plots.INK)
    plots.save(figure, run.path("index.png"))


def _line(cell: Mapping[str, Any]) -> tuple[str, int, float]:
    return cell["index"], cell["rank"], cell["target"]


def _lines(cells: Cells) -> dict[tuple[str, int, float], dict[str, Any]]:
    """The style of every line: colour by index and target, dashes by rank at the usual target."""
    found = sorted({_line(cell) for cell in cells}, key=lambda line: (line[0] != "sketch", line[2], line[1]))
    usual = min(target for _, _, target in found)
    ranks = {index: sorted({rank for kind, rank, _ in found if kind == index}) for index, _, _ in found}
    return {
        (index, rank, target): dict(
            color=COLOURS[index][target != usual],
            linestyle=LINES[ranks[index].index(rank) % len(LINES)] if target == usual else "-",
        )
        for index, rank, target in found
    }


def _draw_line(panel: Axes, cells: Cells, style: Mapping[str, Any]) -> None:
    cells = sorted(cells, key=lambda cell: cell["bytes_per_row"])
    panel.plot([c["bytes_per_row"] for c in cells], [c["hard_recall"] for c in cells], linewidth=1, **style)
    for cell in cells:
        error = np.abs([[cell["hard_recall"] - cell["hard_lo"]], [cell["hard_hi"] - cell["hard_recall"]]])
        place = cell["bytes_per_row"], cell["hard_recall"]
        panel.errorbar(*place, error, fmt=MARKS[cell["bits"]], markersize=4, linewidth=0.7, color=style["color"])


def _mark_paper(panel: Axes, cells: Cells, paper: index_grid.Kind) -> None:
    """A diamond around the paper's index, and a dotted line at half of its bytes."""
    for cell in cells:
        if index_grid.kind_of(cell) == paper:
            panel.plot(cell["bytes_per_row"], cell["hard_recall"], "D", markersize=9, color=plots.INK, mfc="none")
            panel.axvline(cell["bytes_per_row"] / 2, color=plots.GREY, linewidth=1, linestyle=":")


def _legend(lines: Mapping[tuple[str, int, float], Mapping[str, Any]]) -> list[Line2D]:
    named = [
        Line2D([], [], label=f"{index}, rank {rank}, target {target:g}", **style)
        for (index, rank, target), style in lines.items()
    ]
    bare = dict(linestyle="", color=plots.INK)
    marks = [Line2D([], [], marker=mark, markersize=4, label=f"{bits} bits", **bare) for bits, mark in MARKS.items()]
    paper = Line2D([], [], marker="D", markersize=8, mfc="none", label="the paper's", **bare)
    half = Line2D([], [], color=plots.GREY, linestyle=":", label="half of its bytes")
    return [*named, *marks, paper, half]
