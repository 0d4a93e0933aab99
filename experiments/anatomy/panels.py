"""Figures of several small panels: values with their intervals, a colour for each arm."""

import dataclasses
import pathlib
import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from experiments.anatomy.arms import Measured
from experiments.harness import plots
from experiments.harness.claims import Estimate

COLOURS = {"nope": plots.BLUE, "turned": plots.COLOURS[4], "rope": plots.COLOURS[1]}


@dataclasses.dataclass(frozen=True)
class Panel:
    """Values at `ticks`, a colour for each arm, `joined` where the ticks are in order; `note`: what was published."""

    title: str
    x_label: str
    ticks: Sequence[str]
    lines: dict[str, Sequence[Estimate]]
    note: str | None = None
    joined: bool = True


def by_layer(measured: Measured, quantity: str, note: str | None = None) -> Panel:
    """A quantity by layer; of arms with other layers, those of the first arm that was measured."""
    names = measured.arms(quantity)
    layers = measured.layers[names[0]]
    lines = {
        arm: [measured.layer(arm, quantity, layer) for layer in layers]
        for arm in names
        if measured.layers[arm] == layers
    }
    return Panel(quantity, "layer", [str(layer) for layer in layers], lines, note)


def along(measured: Measured, title: str, x_label: str, quantities: dict[str, str], joined: bool = True) -> Panel:
    """The layer means of several quantities, tick -> quantity, side by side."""
    names = measured.arms(next(iter(quantities.values())))
    lines = {arm: [measured.mean(arm, quantity) for quantity in quantities.values()] for arm in names}
    return Panel(title, x_label, list(quantities), lines, joined=joined)


def draw(path: pathlib.Path, parts: Sequence[Panel], title: str, columns: int = 3) -> None:
    """The panels, in rows of `columns`."""
    rows = -(-len(parts) // columns)
    figure = Figure(figsize=(3.1 * min(columns, len(parts)), 0.7 + 2.4 * rows), layout="constrained")
    grid = figure.subplots(rows, min(columns, len(parts)), squeeze=False).ravel()
    for place, part in zip(grid, parts, strict=False):
        _draw(place, part)
    for place in grid[len(parts) :]:
        place.set_visible(False)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=10, color=plots.INK)
    plots.save(figure, path)


def _draw(place, part: Panel) -> None:
    shift = 0.12 * (np.arange(len(part.lines)) - (len(part.lines) - 1) / 2)
    for (arm, values), by in zip(part.lines.items(), shift, strict=True):
        middle = np.array([value.value for value in values])
        ends = np.array([[value.low, value.high] for value in values]).T
        style = dict(
            fmt="o-" if part.joined else "o", markersize=4, linewidth=1, capsize=2, color=COLOURS[arm], label=arm
        )
        place.errorbar(np.arange(len(values)) + by, middle, np.abs(ends - middle), **style)
    plots.clean(place)
    place.set_xticks(range(len(part.ticks)), part.ticks)
    place.set_xlabel(part.x_label, fontsize=8, color=plots.INK)
    low, high = place.get_ylim()
    place.set(xlim=(-0.5, len(part.ticks) - 0.5), ylim=(min(0.0, low), high + 0.05 * (high - min(0.0, low))))
    note = textwrap.wrap(f"published {part.note}", 38) if part.note else []
    place.set_title("\n".join([part.title, *note]), fontsize=8, color=plots.INK)
