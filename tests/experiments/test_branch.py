"""Branch anatomy: its numbers from the equations, row by row, and a whole run on random twins."""

import csv
import json

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from configs import branch as branch_config
from experiments import branch
from experiments.harness.rows import UserError

R, P, T, H = 3, 2, 9, 2


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly(quick_compilation):
    """All of this module."""


def reference(rows, queries, positions):
    """Loops over queries and heads, numpy throughout."""
    kept = {"branch": [], "content": []}
    covariance = variance = 0.0
    ranks = []
    for at, asked in zip(positions, queries, strict=True):
        for query in asked:
            content, part = rows[: at + 1, :R] @ query[:R], rows[: at + 1, R:] @ query[R:]
            best = np.argmax(content + part)
            kept["branch"].append(np.argmax(part) == best)
            kept["content"].append(np.argmax(content) == best)
            ranks.append((part > part[best]).sum())
            moments = np.cov(part, content + part, bias=True)
            covariance, variance = covariance + moments[0, 1], variance + moments[1, 1]
    norms = np.linalg.norm(rows[:, R:], axis=1).mean() / np.linalg.norm(rows[:, :R], axis=1).mean()
    rank = np.quantile(ranks, 0.9)
    return np.mean(kept["branch"]), np.mean(kept["content"]), covariance / variance, rank, norms


def test_every_quantity_is_its_equation():
    rng = np.random.default_rng(0)
    rows, queries = rng.normal(size=(2, T, R + P)), rng.normal(size=(2, 4, H, R + P))
    positions = np.array([3, 5, 6, 8])
    arrays = (jnp.asarray(x, jnp.float32) for x in (rows, queries))
    found = branch.measure(R, *arrays, jnp.asarray(positions))
    for layer in range(2):
        wanted = reference(rows[layer], queries[layer], positions)
        assert_allclose([found[name][layer] for name in branch.QUANTITIES], wanted, rtol=1e-5)


def test_scores_by_hand():
    """One query [content 1, branch 1]: scores 3, 2, 2; branch 0, 2, 1; the last row is not seen yet."""
    rows = jnp.array([[[3.0, 0.0], [0.0, 2.0], [1.0, 1.0], [9.0, 9.0]]])
    found = branch.measure(1, rows, jnp.ones((1, 1, 1, 2)), jnp.array([2]))
    found = {name: float(value[0]) for name, value in found.items()}
    assert found["top-1 by branch"] == 0 and found["top-1 by content"] == 1
    assert found["rank by branch, p90"] == 2
    assert_allclose(found["score variance by branch"], -1.5, rtol=1e-6)  # cov(branch, s) = -1/3, var(s) = 2/9


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("results") / "branch"
    branch.main(tiny(branch_config.get_config(), length=64, queries=16), out)
    return out


def test_a_run_has_a_row_for_everything(finished):
    rows = [json.loads(line) for line in (finished / "trials.jsonl").read_text().splitlines()]
    keys = {(row["prompt"], row["arm"], row["layer"], row["quantity"]) for row in rows}
    each = {(p, a, i, q) for p in range(2) for a in ("nope", "rope") for i in (0, 1) for q in branch.QUANTITIES}
    assert keys == each | {(-1, arm, layer, branch.WEIGHTS) for arm in ("nope", "rope") for layer in (0, 1)}
    assert (finished / "branch.png").stat().st_size > 1000
    with open(finished / "claims.csv", newline="") as file:
        verdicts = list(csv.DictReader(file))
    assert {row["claim"] for row in verdicts} == set(branch_config.get_config().claims)
    assert all(row["agrees"] in ("yes", "no", "can't be told") for row in verdicts)


def test_a_finished_run_measures_nothing(finished, tiny, monkeypatch, capsys):
    monkeypatch.setattr(branch.dissection, "dissect", None)
    before = (finished / "summary.csv").read_text()
    branch.main(tiny(branch_config.get_config(), length=64, queries=16), finished)
    assert (finished / "summary.csv").read_text() == before
    shown = capsys.readouterr().out
    assert "0.9869 (Base s11)" in shown and "3.482 (layers 3, 7, 11, 15, 19, 23, 26, Base s11)" in shown


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(prompts=0), "prompts=0 must be at least 1"),
        (dict(queries=33), "queries=33 must be at least 1 and at most 32"),
        (dict(kind="verse"), "kind='verse' is unknown; choose one of prose, needle"),
        (dict(checkpoint=""), "checkpoint='' must be a folder"),
        (dict(twin="no/such"), "twin='no/such' must be a folder with a config.json"),
        (dict(weights_dtype="int8"), "weights_dtype='int8'"),
    ],
)
def test_what_cannot_be_run(tiny, tmp_path, changes, message):
    config = tiny(branch_config.get_config(), **(dict(length=64, queries=16) | changes))
    with pytest.raises(UserError, match=message):
        branch.main(config, tmp_path / "out")
    assert not (tmp_path / "out").exists()
