"""Dividends: overlaps and pages by hand, and a whole run on random twins."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict
from numpy.testing import assert_allclose, assert_array_equal

from configs import dividends as dividends_config
from experiments import dividends
from experiments.harness.rows import UserError

SMALL = dict(length=64, ratio=8, horizons=(4, 32), window=8, kernel=3, page=4, asked=8, rank=2, calibration=16)


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly(quick_compilation):
    """All of this module."""


def sizes(**changes):
    config = dividends_config.get_config()
    with config.ignore_type():
        config.update(SMALL | changes)
    return dividends.check(config)


def test_windows_of_queries():
    own = sizes(length=16, horizons=(2, 8), window=4, sinks=1, ratio=2, asked=2, calibration=4)
    spans = [(0, 8), (4, 8), (8, 10), (8, 16), (6, 10), (12, 16)]  # past, vote; received twice; votes twice
    assert_array_equal(own.windows, [(np.arange(16) >= low) & (np.arange(16) < high) for low, high in spans])
    assert list(own.octaves.values()) == [(2, 4), (4, 8), (8, 16)]


def test_overlaps_by_hand():
    own = sizes(length=16, horizons=(2, 8), window=4, sinks=1, ratio=4, kernel=1, asked=2, calibration=4)
    assert own.best == 2
    mass = np.zeros((6, 16), np.float32)
    mass[0, [1, 7]] = 1  # H2O's top rows at the cut
    mass[2, [1, 3]], mass[3, [1, 7]] = 1, 1  # one of them, then both, still get the most
    mass[2:4, 12] = 9  # rows behind the cut do not count
    mass[1, [0, 2]] = 1  # SnapKV's
    mass[4, [1, 3]], mass[5, [0, 2]] = 1, 1
    mass[5, 5] = 9  # nor do rows of the first window, for votes
    found = jax.jit(dividends.overlaps, static_argnums=0)(own, mass)
    assert {name: float(value) for name, value in found.items()} == {
        "h2o overlap +2": 0.5,
        "h2o overlap +8": 1.0,
        "snapkv overlap +2": 0.0,
        "snapkv overlap +8": 1.0,
    }


def test_pruned_pages_by_hand():
    """Pages of two rows, boxes [0, 2], [1, 1], [-1, 0]: for q = 1 only the first can hold the best row, score 2."""
    own = sizes(length=8, horizons=(1,), window=1, sinks=1, ratio=2, page=2, asked=2, calibration=1)
    rows = jnp.array([0.0, 2, 1, 1, -1, 0, 50, 50])[:, None]  # the rows of the last queries are no one's
    assert_allclose(jax.jit(dividends.pages, static_argnums=0)(own, rows, jnp.ones((8, 1, 1))), 2 / 3)


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("results") / "dividends"
    dividends.main(tiny(dividends_config.get_config(), **SMALL), out)
    return out


@pytest.mark.slow
def test_a_run_has_a_row_for_everything(finished):
    rows = [json.loads(line) for line in (finished / "trials.jsonl").read_text().splitlines()]
    keys = {(row["prompt"], row["arm"], row["layer"], row["quantity"]) for row in rows}
    assert keys == {(p, a, i, q) for p in (0, 1) for a in ("nope", "rope") for i in (0, 1) for q in sizes().names}
    assert all(np.isfinite(row["value"]) for row in rows)
    assert (finished / "dividends.png").stat().st_size > 1000


@pytest.mark.slow
def test_every_claim_is_judged(finished):
    with open(finished / "claims.csv", newline="") as file:
        rows = {row["claim"]: row for row in csv.DictReader(file)}
    assert set(rows) == set(dividends_config.get_config().claims)
    with open(finished / "summary.csv", newline="") as file:
        means = {
            (row["arm"], row["quantity"]): float(row["value"]) for row in csv.DictReader(file) if row["layer"] == "mean"
        }
    gap = means["nope", "quest pruned"] - means["rope", "quest pruned"]
    assert_allclose(float(rows["Quest prunes more pages without rotation"]["ours"]), gap, atol=1e-5)


def test_a_sink_and_its_stability_are_two_numbers():
    measured = dividends.Measured(ConfigDict(dict(rows=[])), {})
    names = [*sizes().overlaps("h2o"), *sizes().overlaps("snapkv")]
    masses = dict(zip(sizes().octaves, (0.4, 0.3, 0.2), strict=True)) | dict.fromkeys((*names, *dividends.SKETCH), 0.0)
    masses |= {dividends.PAGES: 0.0, dividends.MERGED: 0.0}
    measured.cells = {(arm, name): np.full((2, 2), mass) for name, mass in masses.items() for arm in ("nope", "rope")}
    found = dividends.estimates(measured, sizes())
    assert found["sink mass, last octave, nope"].value == pytest.approx(0.2)
    assert found["sink mass, last over first octave, nope"].value == pytest.approx(0.5)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(horizons=(33,)), "horizons=.*rising numbers from 1 to 32, half of length=64"),
        (dict(ratio=64), "ratio=64 must leave 1 to 24"),
        (dict(kernel=2), "kernel=2 must be odd"),
        (dict(window=33), "window=33 must be at most 32"),
        (dict(sinks=9), "sinks=9 must be at most an eighth"),
        (dict(tolerance=2.0), r"tolerance=2.0 must lie in \[0, 1\]"),
        (dict(rank=9), "rank=9 must be at most 8, the latent of the nope arm"),
        (dict(page=0), "page=0 must be at least 1"),
    ],
)
def test_what_cannot_be_run(tiny, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        dividends.main(tiny(dividends_config.get_config(), **(SMALL | changes)), tmp_path / "out")
