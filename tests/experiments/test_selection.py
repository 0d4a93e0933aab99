"""The selection driver on random twins: its tables, what it leaves out, and what it refuses."""

import csv
import json
import math
import pathlib
import shutil

import pytest

from configs import selection as selection_config
from experiments import selection
from experiments.harness import paired
from experiments.harness.rows import UserError
from experiments.harness.twins import Twin, family
from experiments.reports import needle_report, selection_report
from experiments.reports.selection_report import Reach
from experiments.trials import sheets

SMALL = dict(
    training_seeds=(0, 1), trials=2, reach_trials=2, dense_below=1e9, prefixes=(128,), block=0, ratios=(4, 16),
    methods=("sigma", "random", "nuke", "h2o", "kmeans"), merge_ratios=(2,), widths=(1, 8), width_ratios=(16,),
    arm_lengths=(128,), arm_methods=("sigma", "nuke"), arm_ratios=(8,), order_methods=("sigma", "h2o"), rank=2,
    fetch=64, batch=2, arm_batch=2, chunk=64,
)  # fmt: skip


def make_config(folder, **changes):
    config = selection_config.get_config()
    paths = {name: str(folder / arm) for name, arm in (("checkpoint", "nope"), ("twin", "rope"), ("gqa", "gqa"))}
    with config.ignore_type():
        config.update(paths | {"text": str(folder / "text.txt")} | SMALL | changes)
    return config


def read(out: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(twins, tmp_path_factory):
    out = tmp_path_factory.mktemp("results") / "selection"
    selection.main(make_config(twins), out)
    return out


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
class TestRun:
    def test_a_row_for_every_cell_of_every_table(self, finished):
        wanted = {
            ("methods", "nope", "dense", 1),
            ("methods", "nope", "kmeans", 2),
            ("methods", "nope", "sigma_pca1", 16),
        }
        wanted |= {("methods", "nope", name, ratio) for name in ("sigma", "random", "nuke", "h2o") for ratio in (4, 16)}
        for arm in ("nope", "rope"):
            wanted |= {("reach", arm, "dense", 1), ("arms", arm, "dense", 1)}
            wanted |= {("arms", arm, name, 8) for name in ("sigma", "nuke")}
        wanted |= {("arms", "nope", "h2o", 8)}  # the order is compared with grouped-query attention
        rows = read(finished)
        assert {(row["table"], row["checkpoint"], row["method"], row["ratio"]) for row in rows} == wanted
        assert len(rows) == 2 * len(wanted) and all(len(row["weights"]) == 16 for row in rows)

    def test_arms_are_shown_the_same_needles_and_validation_other_ones(self, finished):
        rows = read(finished)
        codes = {
            place: [
                row["code"] for row in rows if (row["table"], row["checkpoint"], row["method"]) == (*place, "dense")
            ]
            for place in (("methods", "nope"), ("arms", "nope"), ("arms", "rope"), ("reach", "nope"))
        }
        assert codes["arms", "nope"] == codes["arms", "rope"] == codes["methods", "nope"]
        assert not set(codes["reach", "nope"]) & set(codes["arms", "nope"])

    def test_the_other_files(self, finished):
        with open(finished / "summary.csv", newline="") as file:
            summary = list(csv.DictReader(file))
        assert tuple(summary[0]) == selection_report.COLUMNS
        absent = {row["checkpoint"]: row["note"] for row in summary if row["note"]}
        assert set(absent) == {"nope_1", "rope_1", "gqa"}
        assert "--config.seed=1 --config.rope=True" in absent["rope_1"] and "attention=gqa" in absent["gqa"]
        with open(finished / "claims.csv", newline="") as file:
            claims = list(csv.DictReader(file))
        assert {row["claim"] for row in claims} == set(selection_config.CLAIMS)
        assert {path.name for path in finished.glob("*.png")} == {"selection.png", "selection-arms.png"}

    def test_a_killed_run_goes_on_where_it_ended(self, twins, finished, tmp_path):
        out = tmp_path / "out"
        shutil.copytree(finished, out)
        lines = (out / "trials.jsonl").read_text().splitlines(keepends=True)
        (out / "trials.jsonl").write_text("".join(lines[:-3]) + lines[-3][:50])
        selection.main(make_config(twins), out)
        assert [row["nll"] for row in read(out)] == pytest.approx([row["nll"] for row in read(finished)], rel=1e-4)

    def test_a_checkpoint_that_was_trained_anew_is_refused(self, twins, finished, tmp_path):
        out = tmp_path / "out"
        shutil.copytree(finished, out)
        text = (out / "trials.jsonl").read_text()
        weights = next(row["weights"] for row in read(out) if row["checkpoint"] == "rope")
        (out / "trials.jsonl").write_text(text.replace(weights, "0" * 16))
        with pytest.raises(UserError, match="rows of another rope"):
            selection.main(make_config(twins), out)

    def test_recall_adds_the_second_tier(self, twins, tmp_path):
        changes = dict(recall="certified", methods=("sigma",), widths=(1,), twin="", gqa="", arm_methods=("sigma",))
        selection.main(make_config(twins, **changes), tmp_path)
        rows = [row for row in read(tmp_path) if row["table"] == "methods"]
        assert {row["method"] for row in rows} == {"dense", "sigma", "sigma+recall", "sigma_pca1", "sigma_pca1+recall"}
        assert max(row["fetched_per_step"] for row in rows if row["method"] == "sigma+recall") > 0


# Which checkpoints


def test_the_family_of_a_config(twins):
    found = {twin.name: (twin.arm, twin.seed, bool(twin.weights)) for twin in selection_twins(twins)}
    assert list(found) == ["rope", "rope_1", "nope", "nope_1", "gqa"]
    assert found["rope"] == ("rope", 0, True) and found["nope_1"] == ("nope", 1, False)
    assert list(t.name for t in selection_twins(twins, twin="", gqa="", training_seeds=(0,))) == ["nope"]
    with pytest.raises(ValueError, match="told apart by the folder's name"):
        selection_twins(twins, twin=str(twins / "nope"))
    with pytest.raises(ValueError, match="training_seeds"):
        selection_twins(twins, training_seeds=(-1,))


def selection_twins(folder, **changes):
    return family(make_config(folder, **changes))


# The columns of a config


def test_mergers_have_ratios_of_their_own_and_widths_stop_at_the_branch(twins):
    columns = selection._columns(make_config(twins))
    assert columns["methods"][0] == ("dense", 1)
    assert ("kmeans", 2) in columns["methods"] and ("kmeans", 4) not in columns["methods"]
    assert [selection._width(name) for name in ("sigma_pca8", "sigma_pca8+recall", "sigma", "snapkv_w64")] == [
        8,
        8,
        0,
        0,
    ]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"methods": ("sigma", "h3o")}, "method 'h3o' is unknown"),
        ({"recall": "h3o"}, "recall='h3o' is unknown; choose from none, certified, quest"),
        ({"ratios": (4, 4)}, r"ratios=\(4, 4\) must be different values"),
        ({"methods": ("sigma", "sigma")}, "methods=.* must be different values, 'sigma' is there twice"),
        ({"dense_below": -5.0}, "dense_below=-5.0 must be above 0"),
        ({"training_seeds": (7,)}, r"training_seeds=\(7,\) must hold 0"),
        ({"ratios": (1000,)}, "ratios=.*shortest of prefixes"),
        ({"arm_ratios": (0,)}, "arm_ratios=.*between 1"),
        ({"arm_lengths": ()}, "arm_lengths=.*numbers of tokens"),
        ({"trials": 0}, "trials=0 must be at least 1"),
        ({"arm_methods": ()}, "at least one"),
        ({"checkpoint": "no/such/folder"}, "checkpoint='no/such/folder' must be a folder with a config.json"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_sentence(twins, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        selection.main(make_config(twins, **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_missing_is_named_before_anything_is_measured(twins, tmp_path, monkeypatch, capsys):
    def stop(*_):
        raise InterruptedError

    monkeypatch.setattr(sheets.Sheet, "fill", stop)
    with pytest.raises(InterruptedError):
        selection.main(make_config(twins, twin="no/twin"), tmp_path / "out")
    said = capsys.readouterr().out
    assert "not there, left out: no/twin; made by: python -m experiments.train" in said and "nope_1; made by" in said


# The report


def row(table, checkpoint, method, ratio, trial, intact, dropped=False):
    facts = dict(table=table, checkpoint=checkpoint, prefix=128, method=method, ratio=ratio, trial=trial)
    means = dict.fromkeys(needle_report.MEANS, 0.5)
    return facts | means | dict(intact=intact, dropped=dropped, exact=intact, nll=1.0 - intact, nll_dense=0.0)


def measured(twins, rows, **changes):
    config = make_config(twins, prefixes=(128,), ratios=(32,), arm_ratios=(32,), **changes)
    names = {"nope": "nope", "nope_1": "nope", "rope": "rope", "gqa": "gqa"}
    found = [Twin(arm, name, int("_" in name), "x" * 16) for name, arm in names.items()]
    return selection_report.Measured(rows, config, found), config


def test_the_dual_arm_pools_the_seeds_that_dense_answers(twins):
    rows = [row("arms", "nope", "sigma", 32, i, True) for i in range(24)]
    rows += [row("arms", "nope_1", "sigma", 32, i, False, dropped=i < 5) for i in range(24)]  # unusable: left out
    rows += [row("arms", "rope", "sigma", 32, i, i < 6) for i in range(24)]
    rows += [row("arms", "rope", "nuke", 32, i, i < 6) for i in range(24)]
    found = selection_report.estimates(*measured(twins, rows))
    assert (found["nope, sigma, 32x"].value, found["nope, sigma, 32x"].n) == (1, 24)
    assert found["nope over rope, 32x"].value == 0.75
    assert found["rope over its floor, 32x"].value == found["rope over its floor, 32x"].high == 0
    assert found["gqa, sigma over the best observer, 32x"].value is None


def test_sigma_is_compared_with_whatever_observer_keeps_the_most(twins):
    rows = [row("methods", "nope", "sigma", 32, i, i < 20) for i in range(24)]
    rows += [row("methods", "nope", "h2o", 32, i, False) for i in range(24)]
    rows += [row("methods", "nope", "tova", 32, i, i < 8) for i in range(24)]
    rows += [row("methods", "nope", "sigma_pca1", 16, i, i < 4) for i in range(24)]
    rows += [row("methods", "nope", "sigma", 16, i, i < 24) for i in range(24)]
    found = selection_report.estimates(*measured(twins, rows))
    assert found["sigma over the best observer, 32x"].value == 0.5
    assert found["full branch over its narrowest part, 16x"].value == pytest.approx(20 / 24)
    assert math.isclose(found["sigma, 32x"].value, 20 / 24)


def test_every_claim_is_about_something_that_is_measured(twins):
    config = selection_config.get_config()
    names = [*config.methods, *(f"sigma_pca{width}" for width in config.widths)]
    cells = {(name, ratio) for name in names for ratio in (*config.ratios, *config.merge_ratios)}
    rows = [row("methods", "nope", name, ratio, i, True) for name, ratio in sorted(cells) for i in range(2)]
    for arm in ("nope", "rope", "gqa"):
        methods = {*config.arm_methods, *config.order_methods}
        rows += [row("arms", arm, m, r, i, True) for m in sorted(methods) for r in config.arm_ratios for i in range(2)]
    found = [Twin(arm, arm, 0, "x" * 16) for arm in ("nope", "rope", "gqa")]
    config.prefixes = (128,)
    found = selection_report.estimates(selection_report.Measured(rows, config, found), config)
    for claim in config.claims.values():
        assert found[claim.quantity].value is not None, claim.quantity


def test_a_trial_is_dropped_by_the_bound_of_the_config():
    assert sheets.judge({"nll": 1.4}, 0.5, 1.0) == {"nll": 1.4, "nll_dense": 0.5, "intact": True, "dropped": False}
    assert not sheets.judge({"nll": 1.6}, 0.5)["intact"] and sheets.judge({"nll": 0.1}, 1.0)["dropped"]
    assert sheets.judge({"nll": 1.6}, 1.2, 1.0)["dropped"] and not sheets.judge({"nll": 1.6}, 1.2, 2.0)["dropped"]
    assert not sheets.answers([row("reach", "nope", "dense", 1, i, True, dropped=i < 3) for i in range(24)])
    assert sheets.answers([row("reach", "nope", "dense", 1, i, True, dropped=i < 2) for i in range(24)])


def test_a_checkpoint_without_cells_says_why(twins):
    found, _ = measured(twins, [])
    notes = {
        row["checkpoint"]: row["note"] for row in selection_report._absent(found, Reach(128, {"nope": 128, "rope": 0}))
    }
    assert notes["rope"] == "dense answers at no length" and "nope" not in notes
    assert paired.nothing("why").unusable == "why"
