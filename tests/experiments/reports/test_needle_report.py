"""Cells and table of the needle report."""

import itertools

from numpy.testing import assert_allclose

from experiments.reports import needle_report


def cell_of(dropped, intact=12, trials=24):
    same = dict.fromkeys(needle_report.MEANS, 0.5)
    rows = [dict(dropped=i < dropped, intact=i >= trials - intact, exact=True) | same for i in range(trials)]
    return needle_report.summarise_cell(rows)


def test_a_cell_counts_the_trials_that_dense_answers():
    cell = cell_of(dropped=2)
    assert (cell["trials"], cell["dropped"], cell["intact"], cell["exact"]) == (24, 2, 12 / 22, 1)
    assert_allclose((cell["lo"], cell["hi"]), (0.3466, 0.7308), atol=1e-4)  # Wilson, 12 of 22


def test_a_cell_that_drops_more_than_two_in_24_is_unusable():
    cell = cell_of(dropped=3)
    assert cell["intact"] is cell["lo"] is cell["hi"] is cell["exact"] is None
    assert cell["attended"] == 0.5
    place = {"method": "sigma", "ratio": 32, "prefix": 4096}
    assert "unusable" in "".join(needle_report.table([place | cell]))


def test_cells_stand_ratio_by_ratio_whatever_the_order_of_rows():
    same = dict(dropped=False, intact=True, exact=True, prefix=64) | dict.fromkeys(needle_report.MEANS, 0.5)
    batches = itertools.product(("near", "far"), (8, 32), ("b", "a"))
    rows = [same | dict(depth=depth, ratio=ratio, method=method) for depth, ratio, method in batches]
    cells = needle_report.summarise(rows, ("method", "ratio", "prefix", "depth"))
    order = [(cell["ratio"], cell["method"], cell["depth"]) for cell in cells]
    assert order == list(itertools.product((8, 32), ("b", "a"), ("near", "far")))


def test_the_table_names_the_model_of_a_published_figure_and_warns():
    text = "".join(needle_report.table([{"method": "sigma", "ratio": 32, "prefix": 4096} | cell_of(dropped=0)]))
    assert "0.88 (Base s11)" in text and "Kimi-Linear-48B-A3B-Base" in text
    assert "random tier 1" in text and "dense attention in disguise" in text
    other = "".join(needle_report.table([{"method": "sigma", "ratio": 32, "prefix": 512} | cell_of(dropped=0)]))
    assert "Kimi" not in other
