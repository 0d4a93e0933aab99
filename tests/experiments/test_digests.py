"""The page digests' driver on random models: what it measures, writes and refuses."""

import csv
import json

import numpy as np
import pytest
from numpy.testing import assert_allclose

from configs import digests as digests_config
from experiments import digests
from experiments.harness.rows import UserError
from experiments.reports import digests_report
from vestige_jax.baselines.quest import Quest
from vestige_jax.baselines.recalls import PAGES

PREFIXES, LAYERS = (64, 128), (0, 1)
DIGESTS = ("arkvale", "arkvale_mean", "quest")


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly(quick_compilation):
    """All of this module."""


def make_config(twins, **changes):
    config = digests_config.get_config()
    paths = dict(checkpoint=str(twins / "nope"), twin=str(twins / "rope"), text=str(twins / "text.txt"))
    small = dict(trials=1, prefixes=PREFIXES, reach=64, queries=16, top=1, digests=DIGESTS)
    with config.ignore_type():
        config.update(paths | small | changes)
    return config


@pytest.fixture(scope="module")
def finished(twins, tmp_path_factory):
    out = tmp_path_factory.mktemp("results")
    digests.main(make_config(twins), out)
    return out


def read(out, name="trials.jsonl"):
    if name.endswith(".csv"):
        with open(out / name, newline="") as file:
            return list(csv.DictReader(file))
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def test_rows_of_every_arm_layer_and_digest(finished):
    rows = read(finished)
    arms = [(64, arm) for arm in ("nope", "turned", "rope")] + [(128, arm) for arm in ("nope", "turned")]
    kinds = [(text, layer, digest) for text in ("prose", "needle") for layer in LAYERS for digest in DIGESTS]
    places = [(row["prefix"], row["arm"], row["text"], row["layer"], row["digest"]) for row in rows]
    assert sorted(places) == sorted((*arm, *kind) for arm in arms for kind in kinds)
    assert all(0 <= row[name] <= 1 for row in rows for name in ("recall", "mass", "pruned", "first"))


def test_rotation_changes_what_is_found_and_the_twin_is_another_model(finished):
    found = {}
    for row in read(finished):
        found.setdefault((row["prefix"], row["arm"]), []).append(row["pruned"])
    assert found[64, "nope"] != found[64, "turned"] != found[64, "rope"] != found[64, "nope"]


def test_the_summary_and_the_claims(finished):
    summary = read(finished, "summary.csv")
    assert list(summary[0]) == list(digests_report.COLUMNS) and len(summary) == 5 * len(DIGESTS)
    for cell in summary:
        ends = [float(cell[name]) for name in ("lo", "worst", "hi", "median_hi")]
        assert ends == sorted(ends) and float(cell["worst"]) <= float(cell["median"])
        assert (cell["pruned"] == "") == cell["digest"].endswith("_mean")
        assert float(cell["chance"]) == pytest.approx(1 / (int(cell["prefix"]) / PAGES[cell["digest"]].page))
    verdicts = read(finished, "claims.csv")
    assert [row["claim"] for row in verdicts] == list(digests_config.get_config().claims)
    assert {row["n"] for row in verdicts} == {"2"}
    assert (finished / "digests.png").stat().st_size > 10_000


def test_a_second_run_measures_nothing_anew(twins, finished, monkeypatch):
    before = read(finished)
    monkeypatch.setattr(digests.Lab, "measure", None)
    digests.main(make_config(twins), finished)
    assert read(finished) == before


def test_without_a_twin_its_claims_cannot_be_told(twins, tmp_path):
    digests.main(make_config(twins, twin="", prefixes=(64,), texts=("prose",), digests=("arkvale",)), tmp_path)
    verdicts = {row["claim"]: row for row in read(tmp_path, "claims.csv")}
    assert verdicts["with rotation some layer is lost to a sound radius"]["because"].startswith("not measured")
    assert verdicts["a sound radius finds the page without rotation, in every layer"]["n"] == "1"


# What is measured, by hand


# One layer, one head, pages of two rows. Boxes (-1..3, 0..5), (2..2, 1..1), (0..1, 0..4).
ROWS = np.array([[[3, 0], [-1, 5], [2, 1], [2, 1], [1, 0], [0, 4]]], np.float32)
QUERIES = np.array([[[[1, 0]], [[0, 1]], [[1, 1]], [[1, -1]], [[-1, -1]]]], np.float32)


def test_recall_of_the_page_of_the_best_row():
    # Best rows 0 (3), 1 (5), 1 (4), 0 (3), 4 (-1). Quest's scores: 3 2 1, 5 1 4, 8 3 5, 3 1 1, 1 -3 0.
    # The last query's page comes second, all others' first. Below the best row: 2, 2, 1, 2, 1 of 3 pages.
    found = digests.measure(Quest(2), 1, 1.0, ROWS, QUERIES)
    assert_allclose(found["recall"], [4 / 5])
    assert_allclose(found["pruned"], [8 / 15], rtol=1e-6)
    weights = np.exp(QUERIES[0, :, 0] @ ROWS[0].T)
    in_page_0 = weights[:, :2].sum(1) / weights.sum(1)
    assert_allclose(found["mass"], [in_page_0.mean()], rtol=1e-5)
    assert_allclose(found["first"], [4 / 5])
    assert_allclose(digests.measure(Quest(2), 2, 1.0, ROWS, QUERIES)["recall"], [1])


def test_a_tie_goes_to_the_lower_page():
    # Two pages with the upper corner (2, 2); the best row, at that corner, lies in the second.
    rows = np.array([[[0, 2], [2, 0], [2, 2], [2, 2], [0, 0], [0, 0]]], np.float32)
    assert digests.measure(Quest(2), 1, 1.0, rows, np.ones_like(QUERIES))["recall"] == 0
    assert digests.measure(Quest(2), 2, 1.0, rows, np.ones_like(QUERIES))["recall"] == 1


def test_layers_do_not_mix():
    both = digests.measure(Quest(2), 1, 1.0, np.concatenate([ROWS, -ROWS]), np.concatenate([QUERIES, QUERIES]))
    for i, rows in enumerate((ROWS, -ROWS)):
        alone = digests.measure(Quest(2), 1, 1.0, rows, QUERIES)
        assert {name: float(values[i]) for name, values in both.items()} == {k: float(v[0]) for k, v in alone.items()}


def test_the_worst_layer_and_the_median_one():
    recall = np.array([[1.0, 0.0, 0.5], [0.5, 0.5, 0.5]])  # means .75 .25 .5
    assert digests_report.worst(recall) == 0.25 and digests_report.median(recall) == 0.5
    gain = digests_report.estimate(digests_report.median, recall, recall - 0.25)
    assert (gain.value, gain.low, gain.high, gain.n) == (0.25, 0.25, 0.25, 2)  # the same texts: nothing varies


def test_claims_are_judged_where_every_arm_was_asked():
    table = dict.fromkeys([(64, "nope", "quest"), (64, "rope", "quest"), (128, "nope", "quest")])
    assert digests_report.common(table) == 64


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"digests": ("arkvole",)}, "digests=.*must be some of quest, arkvale"),
        ({"texts": ("poem",)}, "texts=.*must be some of prose, needle"),
        ({"trials": 0}, "trials=0 must be at least 1"),
        ({"prefixes": ()}, "prefixes=.*at least 1"),
        ({"checkpoint": ""}, "checkpoint='' must be a folder"),
        ({"twin": "nope"}, "twin=.*must be a rotated model"),
        ({"checkpoint": "rope"}, "twin=.*beside a checkpoint=.* that is not"),
        ({"weights_dtype": "int8"}, "weights_dtype='int8' must be float32 or bfloat16"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_sentence(twins, tmp_path, changes, message):
    paths = {name: str(twins / changes[name]) for name in ("checkpoint", "twin") if changes.get(name)}
    with pytest.raises(UserError, match=message):
        digests.main(make_config(twins, **(changes | paths)), tmp_path / "out")
    assert not (tmp_path / "out").exists()
