"""Tables and published figures."""

import pytest

from experiments.harness import published, tables


def test_columns_line_up_and_gaps_are_dashes():
    rows = [
        {"method": "vestige", "ratio": 8, "intact": 1.0, "published": "1.00 (Base s11)"},
        {"method": "h2o", "ratio": 128, "intact": 0.0417, "published": None},
    ]
    assert tables.render(rows, ("method", "ratio", "intact", "published")).splitlines() == [
        "method   ratio  intact  published",
        "-------  -----  ------  ---------------",
        "vestige      8    1.00  1.00 (Base s11)",
        "h2o        128  0.0417  -",
    ]


def test_generations_stay_apart():
    figures = {figure.model: figure.value for figure in published.find("intact", method="sigma", ratio=32, prefix=4096)}
    assert figures == {published.BASE: 0.88, published.BASE_POOLED: 0.89, published.INSTRUCT: 0.92}


@pytest.mark.parametrize(
    "cell, phrase",
    [
        ({"method": "sigma", "ratio": 8, "prefix": 4096}, "1.00 (Base s11)"),
        ({"method": "sigma", "ratio": 128, "prefix": 16384}, "0.83 (48B ?)"),
        ({"method": "snapkv", "ratio": 32, "prefix": 4096}, "0.04 (Base s11)"),
        ({"method": "vestige", "ratio": 32, "prefix": 4096}, "1.00 (Base s11)"),
        ({"method": "vestige", "ratio": 8, "prefix": 4096}, None),
        ({"method": "sigma", "ratio": 32, "prefix": 1024}, None),
    ],
)
def test_the_phrase_beside_a_cell(cell, phrase):
    assert published.beside("intact", **cell) == phrase


def test_ranges_read_as_ranges():
    [figure] = published.find("dual arm intact", arm="nope", ratio=32)
    assert str(figure) == "0.88-0.89"


def test_no_figure_stands_twice():
    cells = [(figure.quantity, figure.model, tuple(sorted(figure.where.items()))) for figure in published.FIGURES]
    assert len(cells) == len(set(cells))
