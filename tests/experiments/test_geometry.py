"""Geometry of rows: unions and overlaps from loops, and a whole run on random twins."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from configs import geometry as geometry_config
from experiments import geometry
from experiments.harness import published
from experiments.harness.rows import UserError

SMALL = dict(prefix=48, steps=4, tops=(1, 4), ratio=8, shifts=(3, 40), tolerances=(0.0, 0.5))


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly(quick_compilation):
    """All of this module."""


def test_a_union_counts_each_row_once():
    rows = jnp.eye(4)
    queries = jnp.array([[[3.0, 2, 1, 0], [3, 0, 2, 1]], [[9, 1, 0, 0], [0, 9, 1, 0]]])
    union = jax.jit(geometry.union, static_argnums=2)
    assert_allclose(union(rows, queries, 1), 2 / 4)  # rows 0 and 1
    assert_allclose(union(rows, queries, 2), 3 / 4)


def test_stationarity_compares_with_the_query_asked_now():
    rows = jnp.eye(3)
    now, later = jnp.array([[[3.0, 2, 1], [3, 1, 2]]]), jnp.array([[[3.0, 1, 2], [1, 2, 3]]])  # [N=1, H=2, C]
    kept = jax.jit(geometry.stationarity, static_argnums=2)(rows, jnp.stack([now, now, later]), 2)
    assert_allclose(kept, [1, (0.5 + 0.5) / 2])


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("results") / "geometry"
    geometry.main(tiny(geometry_config.get_config(), **SMALL), out)
    return out


def summary(out):
    with open(out / "summary.csv", newline="") as file:
        return {(row["arm"], row["layer"], row["quantity"]): float(row["value"]) for row in csv.DictReader(file)}


@pytest.mark.slow
def test_a_run_has_a_row_for_everything(finished):
    rows = [json.loads(line) for line in (finished / "trials.jsonl").read_text().splitlines()]
    names = geometry.check(geometry_config_with(SMALL)).names
    keys = {(row["prompt"], row["arm"], row["layer"], row["quantity"]) for row in rows}
    assert keys == {(p, a, i, q) for p in (0, 1) for a in ("nope", "turned", "rope") for i in (0, 1) for q in names}
    assert all(0 <= row["value"] <= 1 for row in rows)
    assert (finished / "geometry.png").stat().st_size > 1000


def geometry_config_with(changes):
    config = geometry_config.get_config()
    with config.ignore_type():
        config.update(changes)
    return config


@pytest.mark.slow
def test_rotation_is_what_breaks_stationarity(finished):
    found = summary(finished)
    for shift in SMALL["shifts"]:
        assert found["nope", "mean", f"overlap at +{shift}"] == 1
        assert found["turned", "mean", f"overlap at +{shift}"] < 0.99
        assert found["rope", "mean", f"overlap at +{shift}"] < 0.99


@pytest.mark.slow
def test_the_first_layer_of_the_twins_is_one_model_rotated_or_not(finished):
    """The twins have the same weights here, so that up to the first attention they are the same."""
    found = summary(finished)
    for name in ("union top-1", "overlap at +3", "distinct at 0.5"):
        assert_allclose(found["turned", "0", name], found["rope", "0", name], rtol=1e-3)


@pytest.mark.slow
def test_inflation_is_a_ratio_of_means(finished):
    found = summary(finished)
    for layer in ("0", "1", "mean"):
        wanted = found["turned", layer, "union top-4"] / found["nope", layer, "union top-4"]
        assert_allclose(found["turned", layer, "inflation top-4"], wanted, rtol=1e-5)


def test_published_figures_stand_beside_their_means():
    assert geometry.paper("inflation top-1", "mean") == "3.2-8.5 (48B ?)"
    assert geometry.paper("union top-1", "mean") == "nope 0.0003-0.0019 (48B ?); rotated 0.0028-0.0062 (48B ?)"
    assert geometry.paper("union top-16", "mean") is geometry.paper("union top-1", 3) is None
    assert published.find("winner union, inflation by rotation", top=64)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(prefix=4), "ratio=8 must be at most prefix=4"),
        (dict(tops=(4, 1)), "tops=.*rising numbers from 1 to 48"),
        (dict(tops=(64,)), "tops=.*rising numbers from 1 to 48"),
        (dict(shifts=()), "shifts=.*rising"),
        (dict(tolerances=(0.5, 2.0)), "tolerances=.*from 0 to 1"),
        (dict(steps=0), "steps=0 must be at least 1"),
    ],
)
def test_what_cannot_be_run(tiny, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        geometry.main(tiny(geometry_config.get_config(), **(SMALL | changes)), tmp_path / "out")


@pytest.mark.slow
def test_without_a_twin_its_claims_cannot_be_told(tiny, tmp_path, finished):
    geometry.main(tiny(geometry_config.get_config(), **SMALL, twin=""), tmp_path / "out")
    with open(tmp_path / "out" / "claims.csv", newline="") as file:
        rows = {row["claim"]: row for row in csv.DictReader(file)}
    assert rows["so does training with rotation"]["because"] == "there is no arm rope in this run"
    assert np.isfinite(float(rows["rotating the same rows makes it depend on when"]["ours"]))
