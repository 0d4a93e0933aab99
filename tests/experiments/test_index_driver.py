"""The index driver on random twins: its tables, resuming, what it counts, and what it refuses."""

import csv
import json
import shutil

import numpy as np
import pytest

from configs import index as index_config
from experiments import index
from experiments.harness import paired
from experiments.harness.rows import UserError
from experiments.reports import index_report
from experiments.text import corpus, needles
from experiments.trials import index_ablations, index_grid, index_workloads
from experiments.trials.index_grid import Kind
from vestige_jax import models
from vestige_jax.spec import CacheSpec

SMALL = dict(
    trials=2, reach_trials=2, dense_below=1e9, prefix=192, many=(3,), pairs=(192,), tokens=32, ratios=(4,), batch=2,
    chunk=64, fetch=64, paper_rank=4, candidate_rank=8, sketch_ranks=(), balanced_ranks=(), bits=(16,),
    ablation_texts=2, fit_queries=32, calibration_queries=(16,), calibration_rows=(48,), ages=(4,), shrinkages=(0.1,),
    old_fit=96, old_prefixes=(288,), old_texts=1, training_seeds=(0, 1),
)  # fmt: skip
QUICK = dict(workloads=("many", "prose > code"))
KINDS = [("sketch", 4, 16, 0.9), ("balanced", 8, 4, 0.95),  # the reference, the candidate, its other width
         ("balanced", 8, 16, 0.95), ("sketch", 4, 16, 0.95)]  # and the reference at its target  # fmt: skip
WORKLOADS = ("3 needles", "prose > code")


@pytest.fixture(scope="module")
def make_config(twins, tmp_path_factory):
    code = tmp_path_factory.mktemp("text") / "code.txt"
    code.write_text("\n\n".join(f"def f{i}(x):\n    return x + {i}  # a river of paper" for i in range(3000)))
    paths = dict(checkpoint=str(twins / "nope"), twin=str(twins / "rope"), text=str(twins / "text.txt"))

    def make(**changes):
        config = index_config.get_config()
        with config.ignore_type():
            config.update(paths | dict(other_text=str(code)) | SMALL | changes)
        return config

    return make


def texts_of(config):
    return {"prose": config.text, "code": config.other_text}


def read(out):
    return [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]


def table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def finished(make_config, tmp_path_factory):
    out = tmp_path_factory.mktemp("results") / "index"
    index.main(make_config(**QUICK), out)
    return out


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
class TestRun:
    def test_a_row_for_every_index_on_every_workload_of_both_arms(self, finished):
        rows = [row for row in read(finished) if row["kind"] != "ablation" and "reach" not in row["workload"]]
        place = ("arm", "workload", "index", "rank", "bits", "target", "ratio")
        cells = {tuple(row[field] for field in place) for row in rows}
        columns = [("dense", 0, 16, 0.9, 1), *((*kind, 4) for kind in KINDS)]
        wanted = {(arm, work, *column) for arm in ("nope", "rope") for work in WORKLOADS for column in columns}
        assert cells == wanted and len(rows) == 2 * len(wanted)

    def test_what_is_counted(self, finished):
        for row in (row for row in read(finished) if row["index"] in ("sketch", "balanced") and row["bits"] <= 16):
            hard, covered, recalled = (np.array(row[name]) for name in ("hard", "covered", "recalled"))
            assert (covered <= recalled).all() and (recalled <= hard).all()
            if row["kind"] == "ablation":
                continue
            read_ = row["bytes_per_row"] - Kind(row["index"], row["rank"], row["bits"]).nbytes(4, 2)
            kept = 24 * (row["prefix"] // 4 + 4) / row["prefix"]  # 12 numbers of 2 bytes, a quarter and 4 sinks
            assert read_ == pytest.approx(kept + 24 * row["fetched_per_step"] / row["prefix"])
            assert row["bytes_ratio"] == pytest.approx(row["bytes_per_row"] / 24)

    def test_text_is_intact_by_the_token(self, finished):
        rows = [row for row in read(finished) if row["workload"] == "prose > code"]
        assert rows and all(row["scored"] == 31 and not row["dropped"] for row in rows)
        assert all(row["intact"] == (row["nll"] - row["nll_dense"] < 0.02 * 31) for row in rows)

    def test_the_other_files(self, finished):
        summary, wanted = table(finished / "summary.csv"), "workload index rank bits ratio trials intact lo hi"
        assert set(wanted.split()) <= set(summary[0])
        assert {"hard_recall", "fetched_per_step", "overflow", "bytes_per_row", "bytes_ratio"} <= set(summary[0])
        assert len(summary) == 2 * len(WORKLOADS) * (1 + len(KINDS))
        trainings = table(finished / "trainings.csv")
        assert len(trainings) == 2 * len(WORKLOADS) * 2  # one training of each arm; the reference and the candidate
        of_each = ("arm", "workload", "index", "target", "trials", "hard_recall", "bytes_per_row")
        assert all([row[name] for name in of_each] in [[cell[name] for name in of_each] for cell in summary]
                   for row in trainings)  # fmt: skip
        assert {row["claim"] for row in table(finished / "claims.csv")} == set(index_config.claims())
        told = [row for row in table(finished / "claims.csv") if row["claim"].startswith(("many", "prose > code"))]
        assert len(told) == 12 and all(row["ours"] for row in told if "half the bytes" in row["claim"])
        names = {row["variant"] for row in table(finished / "ablations.csv")}
        assert {"sketch", "query-only", "row-only", "fitted at 1/4", "48 rows", "one basis for all layers"} <= names
        assert {"balanced, row", "fitted at 96 tokens"} <= names
        assert (finished / "index.png").stat().st_size > 10_000

    def test_a_killed_run_goes_on_where_it_ended(self, make_config, finished, tmp_path):
        out = tmp_path / "out"
        shutil.copytree(finished, out)
        lines = (out / "trials.jsonl").read_text().splitlines(keepends=True)
        (out / "trials.jsonl").write_text("".join(lines[:-2]) + lines[-2][:50])
        index.main(make_config(**QUICK), out)
        assert read(out) == read(finished)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"workloads": ("cats",)}, "workloads='cats' is unknown"),
        ({"workloads": ()}, "workloads=.*must name one of"),
        ({"ratios": (1000,)}, "ratios=.*shortest of prefix=192"),
        ({"tokens": 190}, "tokens=190 must be fewer than prefix=192"),
        ({"trials": 0}, "trials=0 must be at least 1"),
        ({"sketch_ranks": (9,)}, r"sketch_ranks=\(9,\) cannot be run: rank=9 must be at most latent_dim=8"),
        ({"balanced_ranks": (13,), "bits": (16,)}, "balanced_ranks=.* rank=13 of a balanced index must lie in 1..12"),
        ({"balanced_ranks": (7,), "bits": (4,)}, "balanced_ranks=.* rank=7 must be even for index_bits=4"),
        ({"bits": (5,)}, r"bits=\(5,\) cannot be run: index_bits=5 is not available"),
        ({"paper_rank": 9}, "paper_rank=9 cannot be run"),
        ({"candidate_target": 1.0}, "candidate_target=1.0 cannot be run"),
        ({"checkpoint": "nowhere"}, "checkpoint='nowhere' must be a folder with a config.json"),
        ({"checkpoint": ""}, "checkpoint='' must be a folder"),
        ({"training_seeds": (7,)}, r"training_seeds=\(7,\) must hold 0"),
        ({"training_seeds": (0, -1)}, "training_seeds=.*at least 0"),
        ({"within": -1.0}, "within=-1.0 must be above 0"),
        ({"dense_below": -5.0}, "dense_below=-5.0 must be above 0"),
        ({"ratios": (8, 8)}, r"ratios=\(8, 8\) must be different values, 8 is there twice"),
        ({"pairs": (), "ratios": (1000,)}, "ratios=.*shortest of prefix=192"),
        ({"old_prefixes": (300,)}, "old_prefixes=300 must be a multiple of old_fit=96"),
        ({"calibration_queries": (500,)}, "calibration_queries=500 must be at most prefix=192"),
        ({"ages": (0,)}, "ages=0 must be at least 1"),
        ({"fit_queries": 500}, "fit_queries=500 must be at most prefix=192"),
        ({"calibration_rows": (50,)}, "calibration_rows=50 must divide prefix=192"),
        ({"shrinkages": (0.1, -1.0)}, "shrinkages=-1.0 must be above 0"),
        ({"many": (0,)}, "many=0 must be at least 1"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_sentence(make_config, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        index.main(make_config(**changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_missing_is_named_before_anything_is_measured(make_config, tmp_path, monkeypatch, capsys):
    def stop(*_):
        raise InterruptedError

    monkeypatch.setattr(index.Lab, "answered", stop)
    with pytest.raises(InterruptedError):
        index.main(make_config(twin="no/twin"), tmp_path / "out")
    said = capsys.readouterr().out
    assert [f"not there, left out: no/twin{seed}; made by: python -m" in said for seed in ("", "_1")] == [True, True]
    assert "nope_1; made by: python -m experiments.train" in said


@pytest.mark.parametrize("kind", index_workloads.KINDS)
def test_every_workload_has_its_prefix_and_something_behind_it(make_config, twins, kind):
    config, encoder = make_config(), models.Tokenizer.load(twins / "nope")
    texts = {name: needles.Prose(corpus.load(path), encoder) for name, path in texts_of(config).items()}
    [workload] = index_workloads.candidates(config)[kind]
    [batch] = index_workloads.batches(workload, texts, config, count=2, split="test")
    assert batch.ids.shape == (2, 192) and (batch.ids[:, 0] == texts["prose"].bos).all()
    assert batch.longest % 8 == 0 and batch.answers.any(1).all()
    if workload.text:
        assert (batch.lengths == 32).all() and (batch.answers.sum(1) == 31).all()
        assert [b"return" in encoder.encoding.decode_bytes(ids[1:].tolist()) for ids in batch.ids] == [
            kind.startswith("code")
        ] * 2


def test_bytes_of_the_published_index_and_of_a_balanced_one():
    assert Kind("sketch", 64, 16).nbytes(branch=64, number=2) == 260  # the published certificate scan
    assert Kind("sketch", 8, 16).nbytes(branch=16, number=2) == 52
    assert [Kind("balanced", 24, bits).nbytes(16, 2) for bits in (16, 8, 4)] == [52, 28, 16]


def test_the_reference_and_the_candidate_are_measured_whatever_the_grid():
    config = index_config.get_config()
    assert index_grid.kinds(config)[:2] == [Kind("sketch", 8, 16), Kind("balanced", 24, 4, 0.95)]
    kinds = index_grid.kinds(config)
    assert len(kinds) == 12 + 3 + 1  # and only once: the candidate's target at each width of code, and for the paper's
    assert kinds[-1] == Kind("sketch", 8, 16, 0.95)


# The ablations


class TestAblations:
    """Rows and queries that live in two directions, apart; what queries ask is small in the rows."""

    @pytest.fixture
    def spec(self):
        return CacheSpec(8, 4, 2, 0.3, 96, block=64, ratio=1 / 8, rank=0, dtype="float32")

    @pytest.fixture
    def layer(self):
        rng = np.random.default_rng(0)
        rows = rng.normal(size=(96, 12)) * np.linspace(3, 0.1, 12)
        queries = rng.normal(size=(96, 2, 12)) * np.linspace(0.1, 3, 12)[rng.permutation(12)]
        attended = (np.arange(96) % 8 == 0) | (np.arange(96) >= 64)
        return index_ablations.Layer(rows.astype(np.float32), queries.astype(np.float32), attended)

    @pytest.mark.parametrize("fitted_to", ["sketch", "query-only", "row-only", "balanced, content", "balanced, row"])
    def test_every_pair_of_maps_keeps_scores_and_bounds_them(self, spec, layer, fitted_to):
        variant = index_ablations.Variant("x", fitted_to)
        queries, rows = layer.queries.reshape(-1, 12), layer.rows
        covariance = np.cov(rows, rowvar=False).astype(np.float32)
        a, b = index_ablations.fit(spec, variant, queries, covariance)
        np.testing.assert_allclose(a @ b.T, np.eye(12), atol=1e-4)
        known, bound = index_ablations._scores(spec, (a, b), 6, queries, rows)
        missed = np.abs(spec.scale * queries @ rows.T - known)
        assert (missed <= bound * np.sqrt(6) + 1e-4).all() and missed.max() > 1e-3

    def test_a_balanced_index_misses_least_of_all(self, spec, layer):
        queries, rows = layer.queries.reshape(-1, 12), layer.rows
        rows = rows - rows.mean(0)
        covariance = np.cov(rows, rowvar=False).astype(np.float32)
        missed = {}
        for name in ("sketch", "query-only", "row-only", "balanced, content", "balanced, row"):
            maps = index_ablations.fit(spec, index_ablations.Variant("x", name, shrinkage=1e-4), queries, covariance)
            known, _ = index_ablations._scores(spec, maps, 6, queries, rows)
            missed[name] = float(((spec.scale * queries @ rows.T - known) ** 2).mean())
        assert min(missed, key=missed.get) == "balanced, row"

    @pytest.mark.parametrize("allowance", ["z", "z per head", "margin"])
    def test_what_is_allowed_finds_the_rows_it_was_fitted_to(self, spec, layer, allowance):
        variant = index_ablations.Variant("x", allowance=allowance)
        seen = index_ablations.look(spec, layer, 32, 64)
        queries = layer.queries.reshape(-1, 12)
        maps = index_ablations.fit(spec, variant, queries, np.cov(layer.rows, rowvar=False).astype(np.float32))
        allowed = index_ablations._allowance(spec, variant, maps, 3, layer, seen)
        known, bound = index_ablations._scores(spec, maps, 3, seen.queries, layer.rows)
        unit = np.ones_like(bound) if allowance == "margin" else bound
        fires = known + np.tile(allowed, 32)[:, None] * unit >= seen.peak[:, None] - 1e-5
        found = np.take_along_axis(fires, seen.target[:, None], 1)[:, 0].reshape(32, spec.num_heads)
        hard = seen.hard.reshape(32, spec.num_heads)
        assert (len(set(allowed)) > 1) == (allowance == "z per head")
        for head in range(spec.num_heads) if allowance == "z per head" else ():
            assert found[hard[:, head], head].mean() >= 0.9
        assert found[hard].mean() >= 0.9 and not fires[seen.archived].all()

    def test_all_dimensions_find_every_hard_row(self, spec, layer):
        counts = index_ablations.measure(spec, index_ablations.Variant("x"), [layer], 12)
        assert counts["hard"][0] > 0 and counts["steps"] == [32] and counts["queries"] == [64]
        assert counts["covered"][0] >= counts["hard"][0] - 1  # float32 may turn a tie
        assert counts["covered"][0] <= counts["recalled"][0] <= counts["hard"][0]


# The report


def row(index_, rank, bits, trial, checkpoint="a", **changes):
    place = dict(arm="nope", workload="1 needle", kind="single", index=index_, rank=rank, bits=bits, ratio=32)
    place["target"] = 0.95 if index_ == "balanced" else 0.9
    counts = dict(hard=[4, 6], recalled=[3, 6], rows=[8, 8], steps=[4, 4])
    cost = dict(bytes_per_row=60.0, bytes_ratio=0.6, fetched_per_step=2.0, overflow=0.0)
    judged = dict(nll=0.1, nll_dense=0.0, intact=True, dropped=False, scored=5)
    return place | counts | cost | judged | dict(trial=trial, checkpoint=checkpoint) | changes


def test_claims_compare_the_candidate_with_the_paper_trial_by_trial():
    config = index_config.get_config()
    rows = [row("sketch", 8, 16, i, c) for c in "ab" for i in range(4)]
    rows += [row("balanced", 24, 4, i, c, bytes_per_row=24.0, recalled=[4, 6]) for c in "ab" for i in range(4)]
    found = index_report.estimates(rows, config)
    over, recall = (found[f"{name} the paper's, single, nope"] for name in ("bytes over", "hard recall less"))
    assert over.value == over.low == over.high == pytest.approx(0.4) and over.n == 8
    assert recall.value == pytest.approx(0.1)
    assert found["intact less the paper's, single, nope"].value == 0
    wanted = {claim.quantity for claim in config.claims.values() if claim.quantity.endswith("single, nope")}
    assert wanted == set(found)


def test_a_comparison_needs_a_hard_query_and_the_same_trials():
    config = index_config.get_config()
    none = dict(hard=[0, 0], recalled=[0, 0])
    rows = [row("sketch", 8, 16, i, **none) for i in range(2)] + [row("balanced", 24, 4, i) for i in range(2)]
    found = index_report.estimates(rows, config)
    assert found["hard recall less the paper's, single, nope"].unusable == "no query was hard"
    found = index_report.estimates(rows[:-1], config)
    assert "not the same trials" in found["bytes over the paper's, single, nope"].unusable


def test_a_cell_pools_its_checkpoints():
    [cell] = index_report.summarise([row("sketch", 8, 16, i, c, intact=i > 0) for c in "ab" for i in range(4)])
    assert (cell["checkpoints"], cell["trials"], cell["intact"], cell["hard"]) == (2, 8, 0.75, 80)
    assert cell["hard_recall"] == 0.9 and cell["fired_per_step"] == 2
    assert cell["lo"] == paired.share([row("sketch", 8, 16, i, intact=i > 1) for i in range(8)]).low
