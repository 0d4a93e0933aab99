"""The figures of the drivers, in colours that every kind of colour vision tells apart."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import matplotlib.lines
import numpy as np
from matplotlib.figure import Figure

from experiments.harness.rows import atomic

BLUE, GREY, INK = "#0072B2", "#B5B5B5", "#333333"
COLOURS = (BLUE, "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


@dataclasses.dataclass(frozen=True)
class Series:
    """Points of one method for `intervals`; hollow and without intervals where they are `published_for` another one."""

    label: str
    x: Sequence[float]
    value: Sequence[float]
    lo: Sequence[float] | None = None
    hi: Sequence[float] | None = None
    published_for: str | None = None


def intact_bars(
    path: pathlib.Path, rows: Sequence[Mapping[str, Any]], title: str, highlight: Sequence[str] = ()
) -> None:
    """Bars of the share intact: one panel per ratio, one bar per method, Wilson 95% intervals, values as labels.

    Args:
      rows: summary rows with ``method``, ``ratio``, ``trials``, ``intact``, ``lo`` and ``hi``, in the order to show;
        a method that has no row at some ratio leaves a gap there. ``intact`` None: unusable, said so in place of a bar.
      highlight: methods drawn in colour; the others are grey.
    """
    methods = list(dict.fromkeys(row["method"] for row in rows))
    ratios = sorted({row["ratio"] for row in rows})
    figure = Figure(figsize=(1.6 + 2.3 * len(ratios), 1.1 + 0.27 * len(methods)), layout="constrained")
    panels = figure.subplots(1, len(ratios), sharey=True, squeeze=False)[0]
    for panel, ratio in zip(panels, ratios, strict=True):
        for row in rows:
            if row["ratio"] == ratio:
                _bar(panel, methods.index(row["method"]), row, BLUE if row["method"] in highlight else GREY)
        clean(panel)
        panel.set(xlim=(0, 1.22), xticks=[0, 0.5, 1])
        panel.set_title(f"1/{ratio} of the rows kept", fontsize=9, color=INK)
    panels[0].set_yticks(range(len(methods)), methods)
    panels[0].set_ylim(len(methods) - 0.4, -0.6)
    figure.supxlabel("share of trials intact, Wilson 95% interval", fontsize=9, color=INK)
    figure.suptitle(title, fontsize=10, color=INK)
    save(figure, path)


def heat_map(
    path: pathlib.Path,
    values: np.ndarray,
    *,
    rows: Sequence[Any],
    columns: Sequence[Any],
    row_label: str,
    column_label: str,
    title: str,
) -> None:
    """A grid of shares in [0, 1] with each value written in its cell; NaN leaves a cell empty."""
    values = np.asarray(values, np.float64)
    figure = Figure(figsize=(max(4.5, 1.7 + 0.75 * len(columns)), 1.2 + 0.42 * len(rows)), layout="constrained")
    panel = figure.subplots()
    panel.imshow(values, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        if np.isfinite(value):
            ink = "white" if value < 0.55 else "black"
            panel.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=8, color=ink)
    clean(panel)
    panel.set_xticks(range(len(columns)), [str(column) for column in columns])
    panel.set_yticks(range(len(rows)), [str(row) for row in rows])
    panel.set_xlabel(column_label, fontsize=9, color=INK)
    panel.set_ylabel(row_label, fontsize=9, color=INK)
    panel.set_title(title, fontsize=10, color=INK)
    save(figure, path)


def intervals(
    path: pathlib.Path,
    series: Sequence[Series],
    title: str,
    x_label: str,
    y_label: str,
    levels: Mapping[str, float] | None = None,
) -> None:
    """Values with their intervals over a logarithmic axis of ratios; published figures hollow, in our colour.

    levels: what does not depend on the ratio, as named dashed lines.
    """
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    panel = figure.subplots()
    own = [line.label for line in series if line.published_for is None]
    panel.axhline(0, color=GREY, linewidth=1)
    for line in series:
        place = own.index(line.published_for or line.label)
        at = np.asarray(line.x, float) * 1.06 ** (place - (len(own) - 1) / 2)  # side by side
        _points(panel, at, line, COLOURS[place % len(COLOURS)])
    for (label, level), dashes in zip((levels or {}).items(), ("--", ":", "-."), strict=False):
        panel.axhline(level, color=INK, linewidth=1, linestyle=dashes, label=label)
    panel.set_xscale("log")
    ticks = sorted({x for line in series for x in line.x})
    panel.set_xticks(ticks, [f"{x:g}x" for x in ticks], minor=False)
    panel.minorticks_off()
    clean(panel)
    panel.set_xlabel(x_label, fontsize=9, color=INK)
    panel.set_ylabel(y_label, fontsize=9, color=INK)
    panel.set_title(title, fontsize=10, color=INK)
    panel.legend(fontsize=8, frameon=False, labelcolor=INK)
    save(figure, path)


def _points(panel: matplotlib.axes.Axes, at: np.ndarray, line: Series, colour: str) -> None:
    if line.published_for is not None:
        panel.plot(at, line.value, "D", color=colour, markerfacecolor="none", markersize=5, label=line.label)
        return
    error = None if line.lo is None else np.abs(np.array([line.lo, line.hi]) - line.value)
    panel.errorbar(at, line.value, error, fmt="o", color=colour, markersize=5, capsize=3, label=line.label)


def dots(
    path: pathlib.Path, rows: Sequence[Mapping[str, Any]], *, label: str, series: str, title: str, x_label: str
) -> None:
    """Shares in [0, 1]: a panel for each ``panel``, a line for each ``label``, on it a colour for each ``series``.

    Args:
      rows: with ``panel``, the fields that `label` and `series` name, ``worst`` with ``lo`` and ``hi``, ``median``
        (drawn hollow) and ``chance`` (a grey tick).
    """
    names, kinds, panes = (list(dict.fromkeys(row[field] for row in rows)) for field in (label, series, "panel"))
    size = (2 + 2.6 * len(panes), 1.4 + 0.2 * len(names) * len(kinds))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(panes), sharey=True, squeeze=False)[0]
    for panel, pane in zip(panels, panes, strict=True):
        for row in (row for row in rows if row["panel"] == pane):
            kind = kinds.index(row[series])
            _dot(panel, names.index(row[label]) + 0.7 * (kind + 0.5) / len(kinds) - 0.35, row, COLOURS[kind])
        clean(panel)
        panel.set(xlim=(-0.03, 1.03), xticks=[0, 0.5, 1])
        panel.set_title(pane, fontsize=9, color=INK)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].set_ylim(len(names) - 0.5, -0.5)
    marks = [matplotlib.lines.Line2D([], [], marker="o", linestyle="", color=COLOURS[i]) for i in range(len(kinds))]
    figure.legend(marks, kinds, loc="outside right center", fontsize=8, frameon=False, labelcolor=INK)
    figure.supxlabel(x_label, fontsize=9, color=INK)
    figure.suptitle(title, fontsize=10, color=INK)
    save(figure, path)


def _dot(panel: matplotlib.axes.Axes, place: float, row: Mapping[str, Any], colour: str) -> None:
    panel.plot(row["chance"], place, "|", color=GREY, markersize=8)
    panel.plot([row["lo"], row["hi"]], [place, place], color=colour, linewidth=1)
    panel.plot(row["median"], place, "o", color=colour, markerfacecolor="white", markersize=5)
    panel.plot(row["worst"], place, "o", color=colour, markersize=4)


def _bar(panel: matplotlib.axes.Axes, place: int, row: Mapping[str, Any], colour: str) -> None:
    if row["intact"] is None:
        panel.text(0.02, place, "unusable", va="center", fontsize=8, color=INK)
        return
    panel.barh(place, row["intact"], height=0.7, color=colour)
    for width, ink in ((3, "white"), (1, INK)):  # a halo, so that the interval shows on any bar
        panel.plot([row["lo"], row["hi"]], [place, place], color=ink, linewidth=width, solid_capstyle="butt")
    panel.text(max(row["intact"], row["hi"]) + 0.03, place, f"{row['intact']:.2f}", va="center", fontsize=8, color=INK)


def clean(panel: matplotlib.axes.Axes) -> None:
    """No frame, no ticks, small labels."""
    panel.spines[:].set_visible(False)
    panel.tick_params(length=0, labelsize=8, labelcolor=INK)


def save(figure: Figure, path: pathlib.Path) -> None:
    """Writes the file whole or not at all; its suffix says the format."""
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=160, format=pathlib.Path(path).suffix.lstrip("."))
