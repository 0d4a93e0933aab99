"""The language-model cost on a random model: its path is the model's own, and its arithmetic is that of the paper."""

import csv
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose

from configs import lm_cost as lm_cost_config
from experiments import lm_cost
from experiments.harness.rows import UserError
from experiments.reports import lm_cost_report
from experiments.text import windows

PREFIX, TOKENS = 48, 32
METHODS = ("vestige", "sigma", "streaming")


@pytest.fixture(scope="module")
def make_config(twins):
    def make(**changes):
        config = lm_cost_config.get_config()
        paths = dict(checkpoint=str(twins / "nope"), text=str(twins / "text.txt"))
        small = dict(windows=3, prefix=PREFIX, tokens=TOKENS, ratios=(1, 8), rank=2, fetch=64, batch=2, chunk=32)
        with config.ignore_type():
            config.update(paths | small | changes)
        return config

    return make


@pytest.fixture(scope="module")
def finished(make_config, tmp_path_factory, quick_compilation):
    out = tmp_path_factory.mktemp("results") / "lm_cost"
    lm_cost.main(make_config(), out)
    return out


def read(out) -> list[dict]:
    return [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]


def nats(rows, method, ratio) -> list[float]:
    return [row["nats"] for row in rows if (row["method"], row["ratio"]) == (method, ratio)]


@pytest.mark.slow
def test_a_row_for_every_window_of_every_cell_and_the_files(finished):
    cells = [("dense", 1), *((method, ratio) for ratio in (1, 8) for method in METHODS)]
    keys = [tuple(row[field] for field in lm_cost.KEY) for row in read(finished)]
    assert sorted(keys) == sorted((method, ratio, window) for method, ratio in cells for window in range(3))
    with open(finished / "summary.csv", newline="") as file:
        summary = list(csv.DictReader(file))
    assert [(line["method"], int(line["ratio"])) for line in summary] == cells
    assert summary[0]["delta"] == "" and all(float(line["lo"]) <= float(line["hi"]) for line in summary[1:])
    with open(finished / "claims.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == len(lm_cost_config.get_config().claims)
    assert (finished / "lm_cost.png").stat().st_size > 10_000


@pytest.mark.slow
def test_dense_is_the_forward_pass_and_so_is_a_cache_that_keeps_every_row(finished, make_config):
    lab, rows = lm_cost.Lab(make_config()), read(finished)
    forward, known = nnx.jit(lambda model, ids: model(ids)), nats(rows, "dense", 1)
    for batch in lab.batches:
        for (_, window), trial in zip(batch.places, batch.trials, strict=False):
            logits = jax.nn.log_softmax(forward(lab.cells.model, jnp.asarray(trial.ids)[None])[0])
            at = np.arange(PREFIX + 1, PREFIX + TOKENS)  # the token at the cut is the prefix's to predict
            assert_allclose(known[window], -logits[at - 1, trial.ids[at]].sum(), rtol=1e-4)
    for method in METHODS:
        assert_allclose(nats(rows, method, 1), known, rtol=1e-5)
        assert np.abs(np.subtract(nats(rows, method, 8), known)).min() > 1e-3


@pytest.mark.slow
def test_what_each_method_attends(finished):
    for row in read(finished):
        assert row["tokens"] == TOKENS - 1
        steps = np.arange(1, TOKENS)
        if row["ratio"] == 8 and row["method"] != "vestige":  # 6 rows, 4 sinks and what came since
            assert row["attended"] == pytest.approx(np.mean((6 + 4 + steps) / (PREFIX + steps)), rel=1e-5)
            assert row["fetched_per_step"] == row["overflow"] == 0
        if row["ratio"] == 8 and row["method"] == "vestige":
            assert row["fetched_per_step"] > 0 and row["attended"] < 1


@pytest.mark.slow
def test_a_killed_run_goes_on_and_a_finished_one_computes_nothing(finished, make_config, tmp_path, monkeypatch):
    lines = (finished / "trials.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "meta.json").write_text((finished / "meta.json").read_text())
    (tmp_path / "trials.jsonl").write_text("".join(lines[:-1]) + lines[-1][:30])
    lm_cost.main(make_config(), tmp_path)
    assert_allclose(nats(read(tmp_path), "streaming", 8), nats(read(finished), "streaming", 8), rtol=1e-4)
    monkeypatch.setattr(lm_cost.generation, "teacher_force", None)
    lm_cost.main(make_config(), tmp_path)


# Pieces


def test_costs_of_two_windows_by_hand():
    """12 and 8 nats over 10 and 6 of dense, 4 tokens of 8 bytes each: 4 nats over 8 tokens and 16 bytes."""
    same = dict(tokens=4, bytes=8)
    dense = [dict(method="dense", ratio=1, window=i, nats=n) | same for i, n in enumerate((10.0, 6.0))]
    rows = [dict(method="sigma", ratio=8, window=i, nats=n) | same for i, n in enumerate((12.0, 8.0))]
    better = [dict(method="vestige", ratio=8, window=i, nats=n) | same for i, n in enumerate((11.0, 6.0))]
    cells = lm_cost_report.collect(dense + rows + better)
    assert lm_cost_report.nats_per_token(cells["sigma", 8]) == pytest.approx(4 / 8)
    assert lm_cost_report.bits_per_byte(cells["sigma", 8]) == pytest.approx(4 / 16 / math.log(2))
    found = lm_cost_report.measured(cells)
    assert found["delta CE, sigma, 8x"].value == found["delta CE, sigma, 8x"].low == pytest.approx(0.5)
    saved = found["saved by recall, 8x"]
    assert (saved.value, saved.low, saved.high) == pytest.approx((3 / 8, 1 / 4, 2 / 4))


def test_the_claims_are_about_what_is_measured():
    config = lm_cost_config.get_config()
    places = [("dense", 1), *((method, ratio) for method in config.methods for ratio in config.ratios)]
    measured = lm_cost_report.measured({place: np.ones((2, 4)) for place in places})
    assert {claim.quantity for claim in config.claims.values()} <= set(measured)


def test_windows_share_no_text_and_follow_the_seed(make_config):
    lab = lm_cost.Lab(make_config())
    prose = lab.cells.prose
    ids = windows.draw(prose, seed=0, count=5, length=40)
    assert (ids[:, 0] == prose.bos).all() and ids.shape == (5, 40)
    longer = windows.draw(prose, seed=0, count=7, length=40)
    assert (longer[:5] == ids).all() and not (windows.draw(prose, seed=1, count=5, length=40) == ids).all()
    text = prose.encoder.decode(ids[0, 1:])
    assert windows.nbytes(prose, ids[0, 1:]) == len(text.encode())
    with pytest.raises(ValueError, match="windows of 40 tokens need"):
        windows.draw(prose, seed=0, count=10**6, length=40)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"windows": 1}, "windows=1 must be at least 2"),
        ({"ratios": (0,)}, "ratios=.* must lie between 1 and the 48 tokens"),
        ({"ratios": (64,)}, "ratios=.* must lie between 1 and the 48 tokens"),
        ({"block": 32}, "prefix=48 must be a multiple of block=32"),
        ({"tokens": 49}, "tokens=49 must be at most block=48"),
        ({"methods": ()}, "methods=.*at least one"),
        ({"methods": ("sigmaa",)}, "method 'sigmaa' is unknown"),
        ({"rows_dtype": "int8"}, "rows_dtype='int8' must be float32 or bfloat16"),
        ({"windows": 10**5}, "windows of 80 tokens need"),
        ({"checkpoint": ""}, "checkpoint='' must be a folder"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_sentence(make_config, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        lm_cost.main(make_config(**changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()
