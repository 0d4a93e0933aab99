"""The recall driver on a random model: its tables, resuming, and what it refuses."""

import csv
import json
import pathlib
import shutil

import numpy as np
import pytest

from configs import recall as recall_config
from experiments import recall
from experiments.harness import paired
from experiments.harness.rows import UserError
from experiments.reports import recall_report

SMALL = dict(
    trials=2, reach_trials=2, dense_below=1e9, prefix=192, many=(3,), pairs=(128,), ratios=(4, 16), starved=(1,),
    rank=4, ranks=(2, 8), fetch=64, batch=2, chunk=64, sequences=2, text_prefix=160, queries=70, recall_at=(1, 4),
    top_j=2, methods=("sigma", "vestige"), starved_methods=("vestige", "random+recall"),
    other_recalls=("random+recall",),
)  # fmt: skip


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "code.txt"
    path.write_text("\n\n".join(f"def f{i}(x):\n    return x + {i}  # a river of paper" for i in range(3000)))
    return path


@pytest.fixture(scope="module")
def make_config(twins, code):
    def make(**changes):
        config = recall_config.get_config()
        paths = dict(checkpoint=str(twins / "nope"), text=str(twins / "text.txt"), other_text=str(code))
        with config.ignore_type():
            config.update(paths | SMALL | changes)
        return config

    return make


def read(out: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(make_config, tmp_path_factory):
    out = tmp_path_factory.mktemp("results") / "recall"
    recall.main(make_config(), out)
    return out


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
class TestRun:
    def test_a_row_for_every_cell_of_every_table(self, finished):
        rows = read(finished)
        cells = {(row["workload"], row["table"], row["variant"], row["method"], row["ratio"]) for row in rows}
        wanted = set()
        for workload in ("1 needle", "3 needles", "pairs"):
            wanted |= {(workload, table, "base", "dense", 1) for table in ("reach", "recovery")}
            wanted |= {
                (workload, "recovery", "base", name, ratio) for name in ("sigma", "vestige") for ratio in (4, 16)
            }
            wanted |= {(workload, "starved", "fetch=1", name, 4) for name in ("vestige", "random+recall")}
            wanted |= {(f"{workload} > answers", "held out", "base", "vestige", 4)}
        knobs = ("rank=2", "rank=8", "sound", "gate off")
        wanted |= {("1 needle", "knobs", variant, "vestige", 4) for variant in (*knobs, "top_j=2")}
        for first in ("prose", "code"):
            wanted |= {(f"{first} > {second}", "held out", "base", "vestige", 4) for second in ("prose", "code")}
        wanted |= {("prose > prose", "held out", variant, "vestige", 4) for variant in knobs}
        wanted |= {("prose > prose", "held out", "base", "random+recall", 4)}
        assert cells == wanted and len(rows) == 2 * len(wanted)

    def test_what_is_counted_of_held_out_queries(self, finished):
        rows = [row for row in read(finished) if row["table"] == "held out"]
        for row in rows:
            queries, hard, recalled, covered = (np.array(row[n]) for n in ("queries", "hard", "recalled", "covered"))
            assert (covered <= recalled).all() and (recalled <= hard).all() and (hard <= queries).all()
            assert (np.array(row["rows"]) <= np.array(row["steps"]) * row["archived"]).all()
            if row["workload"] == "prose > prose":
                assert row["steps"] == [70, 70] and row["queries"] == [140, 140] and row["archived"] == 160 - 40 - 4
        answers = [row for row in rows if row["workload"] == "1 needle > answers"]
        assert all(row["steps"] == [5, 5] for row in answers)  # five digits

    def test_the_sound_bound_misses_nothing_and_full_rank_is_exact(self, finished):
        rows = [row for row in read(finished) if row["workload"] == "prose > prose"]
        for row in (row for row in rows if row["variant"] == "sound"):
            assert row["covered"] == row["hard"] and sum(row["hard"]) > 0
        for row in (row for row in rows if row["variant"] == "rank=8"):
            assert sum(row["top1"]) >= 0.9 * sum(row["hard"]) > 0  # but for the sketch's rounding

    def test_an_open_gate_fires_no_less(self, finished):
        rows = [row for row in read(finished) if (row["workload"], row["method"]) == ("prose > prose", "vestige")]
        rows = {(row["variant"], row["trial"]): row for row in rows}
        for trial in range(2):
            gated, opened = rows["base", trial], rows["gate off", trial]
            assert opened["open"] == opened["queries"] and sum(opened["rows"]) >= sum(gated["rows"])

    def test_the_other_files(self, finished):
        with open(finished / "summary.csv", newline="") as file:
            assert tuple(next(csv.reader(file))) == recall_report.COLUMNS
        with open(finished / "claims.csv", newline="") as file:
            assert {row["claim"] for row in csv.DictReader(file)} == set(recall_config.CLAIMS)
        assert {path.name for path in finished.glob("*.png")} == {"recall.png", "recall-starved.png"}

    def test_a_killed_run_goes_on_where_it_ended(self, make_config, finished, tmp_path):
        out = tmp_path / "out"
        shutil.copytree(finished, out)
        lines = (out / "trials.jsonl").read_text().splitlines(keepends=True)
        (out / "trials.jsonl").write_text("".join(lines[:-3]) + lines[-3][:50])
        recall.main(make_config(), out)
        assert read(out) == read(finished)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"methods": ("sigma", "h3o")}, "method 'h3o' is unknown"),
        ({"ratios": (1000,)}, "ratios=.*shortest prefix"),
        ({"starved": (0,)}, "starved=.*at least 1"),
        ({"queries": 160}, "queries=160 must be fewer than text_prefix=160"),
        ({"sequences": 0}, "sequences=0 must be at least 1"),
        ({"pairs": (16,), "ratios": (4,)}, "prefix=16 has no line"),
        ({"many": (1000,)}, "needles=1000 do not fit"),
        ({"rank": 9}, "rank=9 must be at most latent_dim=8"),
        ({"checkpoint": ""}, "checkpoint='' must be a folder"),
        ({"checkpoint": "nowhere"}, "checkpoint='nowhere' must be a folder with a config.json"),
        ({"ranks": (2, 99)}, r"ranks=\(2, 99\) cannot be run: rank=99 must be at most latent_dim=8"),
        ({"top_j": -1}, "top_j=-1"),
        ({"dense_below": float("nan")}, "dense_below=nan must be above 0"),
        ({"methods": ("vestige", "vestige")}, "methods=.* must be different values, 'vestige' is there twice"),
        ({"ratios": (4, 4)}, r"ratios=\(4, 4\) must be different"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_sentence(make_config, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        recall.main(make_config(**changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# The report


def heard(variant, trial, **counts):
    facts = dict(table="held out", workload="prose > prose", prefix=128, variant=variant, method="vestige", ratio=32)
    names = ("queries", "hard", "covered", "recalled", "open", "open_hard", "fires", "steps", "steps_fired", "rows")
    same = {name: [10, 10] for name in names} | {"archived": 100, "trial": trial, "top1": [1, 1], "top4": [2, 2]}
    return facts | same | counts


def test_coverage_is_pooled_over_layers_and_drawn_by_sequence():
    rows = [heard("base", 0, covered=[9, 10]), heard("base", 1, covered=[5, 6], hard=[10, 10])]
    found = paired.ratio(rows, "covered", "hard")
    assert (found.value, found.n) == (0.75, 2)
    assert (found.low, found.high) == (0.55, 0.95)  # two sequences: one of them, or both
    assert paired.ratio([heard("base", 0, hard=[0, 0])], "covered", "hard").unusable == "no query was hard"


def test_rows_of_one_rank_over_those_of_another():
    low = [heard("rank=2", i, rows=[30, 30]) for i in range(3)]
    high = [heard("rank=8", i, rows=[10, 10]) for i in range(3)]
    assert paired.quotient(low, high, "rows", "steps").value == 3
    assert paired.quotient(low, [], "rows", "steps").value is None


def test_a_published_rank_stands_beside_the_same_share_of_ours():
    config = recall_config.get_config()
    same = {f"top{j}": [1, 1] for j in config.recall_at}
    rows = [heard("rank=4", 0, **same), heard("rank=2", 0, **same), heard("base", 0, **same)]
    found = [cell["published"] for cell in recall_report.summarise(rows, config, 32)]
    assert found == ["rank 64 of 512: fire rate 0.028, rows 15.2, hard recall 0.95", None, None]


def test_every_claim_on_held_out_text_is_about_something_that_is_measured():
    config = recall_config.get_config()
    variants = ["base", "sound", "gate off", *(f"rank={rank}" for rank in config.ranks)]
    found = recall_report.estimates([heard(v, i) for v in variants for i in range(2)], {}, config)
    wanted = [claim.quantity for claim in config.claims.values()]
    wanted = [quantity for quantity in wanted if "prose" in quantity or "rank=" in quantity]
    assert len(wanted) == 7 and all(found[quantity].value is not None for quantity in wanted)
    assert found["share of the archive, prose > prose, sound, vestige"].value == 0.01  # 1 row a step of 100


def test_every_claim_on_needles_is_about_something_that_is_measured():
    config = recall_config.get_config()
    kinds = {"1 needle": "single", "30 needles": "many", "pairs": "pairs"}
    facts = dict(prefix=128, dropped=False, intact=True, fetched_per_step=1.0)
    cells = [("recovery", "base", name, ratio) for name in config.methods for ratio in config.ratios]
    cells += [
        ("starved", f"fetch={f}", name, config.ratios[0]) for f in config.starved for name in config.starved_methods
    ]
    rows = [
        facts | dict(workload=w, table=t, variant=v, method=m, ratio=r, trial=i)
        for w in kinds
        for t, v, m, r in cells
        for i in range(2)
    ]
    rows += [heard("base", i) | {"workload": f"{workload} > answers"} for workload in kinds for i in range(2)]
    found = recall_report.estimates(rows, kinds, config)
    for claim in config.claims.values():
        if "prose" not in claim.quantity and "rank=" not in claim.quantity:
            assert found[claim.quantity].value is not None, claim.quantity
