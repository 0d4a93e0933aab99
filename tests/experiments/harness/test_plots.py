"""Figures are written whole, and show what they were given."""

import numpy as np
import pytest
from PIL import Image

from experiments.harness import plots

ROW = {"method": "sigma", "ratio": 8, "trials": 24, "intact": 0.5, "lo": 0.3, "hi": 0.7}


def pixels(path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


def amount(image: np.ndarray, colour: str) -> int:
    rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return int((np.abs(image.astype(int) - rgb) <= 3).all(-1).sum())


def test_bars_are_as_long_as_their_share(tmp_path):
    areas = []
    for intact in (0.25, 0.75):
        rows = [ROW, {**ROW, "method": "vestige", "intact": intact, "lo": intact, "hi": intact}]
        plots.intact_bars(tmp_path / "bars.png", rows, "title", highlight=("vestige",))
        areas.append(amount(pixels(tmp_path / "bars.png"), plots.BLUE))
    assert areas[1] / areas[0] == pytest.approx(3, rel=0.1)


def test_a_cell_that_is_unusable_has_no_bar(tmp_path):
    plots.intact_bars(tmp_path / "bars.png", [{**ROW, "intact": None}], "title", highlight=("sigma",))
    assert amount(pixels(tmp_path / "bars.png"), plots.BLUE) == 0


def test_heat_map_leaves_missing_cells_empty(tmp_path):
    labels = {"rows": ["0.1"], "columns": [1, 2, 3, 4], "row_label": "", "column_label": "", "title": ""}
    plots.heat_map(tmp_path / "map.png", [[1.0, 1.0, 1.0, 1.0]], **labels)
    full = amount(pixels(tmp_path / "map.png"), "#fee838")  # the upper end of the colour map
    plots.heat_map(tmp_path / "map.png", [[1.0, np.nan, np.nan, 1.0]], **labels)
    assert amount(pixels(tmp_path / "map.png"), "#fee838") == pytest.approx(full / 2, rel=0.1)
    assert full > 10_000


def test_intervals_show_ours_and_what_was_published(tmp_path):
    ours = plots.Series("sigma", [8, 32], [0.1, 0.2], [0.0, 0.1], [0.2, 0.4])
    plots.intervals(tmp_path / "points.png", [ours], "title", "compression", "nats")
    alone = amount(pixels(tmp_path / "points.png"), plots.BLUE)
    figures = plots.Series("sigma, 48B", [8, 32], [0.15, 0.3], published_for="sigma")
    plots.intervals(tmp_path / "points.png", [ours, figures], "title", "compression", "nats")
    assert amount(pixels(tmp_path / "points.png"), plots.BLUE) > alone > 100


def test_dots_have_a_colour_for_each_series(tmp_path):
    row = dict(panel="64 tokens", digest="quest", arm="nope", worst=0.2, lo=0.1, hi=0.4, median=0.7, chance=0.1)
    plots.dots(tmp_path / "dots.png", [row, row | {"arm": "rope"}], label="digest", series="arm", title="", x_label="")
    image = pixels(tmp_path / "dots.png")
    assert min(amount(image, colour) for colour in plots.COLOURS[:2]) > 50 and amount(image, plots.COLOURS[2]) == 0
