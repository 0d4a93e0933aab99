"""The report on folders that drivers left, what the whole run refuses, and a whole run of every driver."""

import csv
import json
import shutil

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from ml_collections import ConfigDict

from configs import all as all_config
from configs import needle as needle_config
from experiments import all as everything
from experiments import geometry, needle
from experiments.all import driver_config
from experiments.harness import report
from experiments.harness.claims import COLUMNS
from experiments.harness.runner import UserError, provenance

ANSWER = {"claim": "it works", "paper": ".9 (48B)", "rule": "x at least 0.5", "ours": "0.7", "lo": "0.6", "hi": "0.8"}


@pytest.fixture
def finished(tmp_path):
    """The folder of a driver with one claim, one table and one figure, run with two trials."""
    folder = tmp_path / "needle"
    folder.mkdir()
    config = needle_config.get_config()
    config.trials = 2
    meta = {"config": json.loads(config.to_json_best_effort()), "starts": [provenance()] * 2}
    (folder / "meta.json").write_text(json.dumps(meta))
    values = {**ANSWER, "n": "9", "agrees": "yes", "because": ""}
    (folder / "claims.csv").write_text("\n".join([",".join(COLUMNS), ",".join(values[c] for c in COLUMNS)]))
    (folder / "summary.csv").write_text("method,intact\na|b,0.5\n")
    (folder / "needle.png").write_bytes(b"a figure")
    return tmp_path


def test_report_holds_claim_table_figure_and_command(finished):
    report.write(finished, ["needle"], finished / "report.md")
    text = (finished / "report.md").read_text()
    assert "| needle | it works | .9 (48B) | x at least 0.5 | 0.7 (0.6 to 0.8, n = 9) | yes |" in text
    assert "Of 1 claims: 1 yes, 0 no, 0 can't be told." in text
    assert "| a\\|b | 0.5 |" in text
    assert "![needle](needle/needle.png)" in text
    assert "    python -m experiments.needle --config=configs/needle.py --config.trials=2\n" in text
    assert text.count(f"jax {provenance()['versions']['jax']}") == 1  # two starts of one commit: one line


def test_published_report_brings_its_figures(finished):
    path = finished / "elsewhere" / "REPORT.md"
    path.parent.mkdir()
    report.publish(finished, ["needle"], path)
    assert "![needle](figures/report/needle.png)" in path.read_text()
    assert (path.parent / "figures" / "report" / "needle.png").read_bytes() == b"a figure"
    assert (path.parent / "figures" / "report" / "needle.summary.csv").exists()


def test_overrides_reach_the_driver():
    config = all_config.get_config()
    config.overrides.needle = ConfigDict({"trials": 2})
    assert driver_config("needle", config).trials == 2
    config.overrides.needle = ConfigDict({"trails": 2})
    with pytest.raises(UserError, match="overrides.needle has trails"):
        driver_config("needle", config)
    with pytest.raises(UserError, match="drivers='noodle' is unknown; choose from needle"):
        driver_config("noodle", config)


def test_overrides_on_the_command_line_are_refused_with_what_they_look_like():
    everything.refuse_overrides(["all", "--config=configs/all.py", "--config.drivers=needle"])
    with pytest.raises(SystemExit, match="^error: --config.overrides.needle.trials=3: .*config.overrides.needle ="):
        everything.refuse_overrides(["all", "--config=configs/all.py", "--config.overrides.needle.trials=3"])


def test_a_driver_that_fails_stops_no_other_and_the_report_says_so(finished, monkeypatch, capsys):
    config, done = all_config.get_config(), []
    config.drivers = ("geometry", "needle")

    def fail(config, out):
        raise ZeroDivisionError("no rows at all")

    monkeypatch.setattr(geometry, "main", fail)
    monkeypatch.setattr(needle, "main", lambda config, out: done.append(out.name))
    with pytest.raises(UserError, match="geometry did not finish, see above"):
        everything.main(config, finished)
    assert done == ["needle"] and "ZeroDivisionError" in capsys.readouterr().out
    text = (finished / "report.md").read_text()
    assert "**geometry did not finish: no rows at all**" in text and "## needle" in text and "## geometry" not in text


def test_the_report_says_of_what_tree_the_rows_are(finished):
    meta = json.loads((finished / "needle" / "meta.json").read_text())
    starts = [
        provenance() | changes for changes in ({"commit": "abc", "dirty": True}, {"commit": "abc", "dirty": False})
    ]
    (finished / "needle" / "meta.json").write_text(json.dumps(meta | {"starts": starts}))
    report.write(finished, ["needle"], finished / "report.md")
    text = (finished / "report.md").read_text()
    assert "- commit abc with uncommitted changes; python" in text and "- commit abc; python" in text


DRIVERS = {
    "needle": dict(prefixes=(128,), block=0, ratios=(16,)),
    "branch": dict(length=64, queries=16),
    "digests": dict(prefixes=(64, 128), reach=64, queries=16, top=1),
    "geometry": dict(prefix=64, steps=4, tops=(1, 4), ratio=8, shifts=(3, 40)),
    "dividends": dict(
        length=64, ratio=8, horizons=(4, 32), window=8, kernel=3, page=4, asked=8, rank=2, calibration=16
    ),
    "selection": dict(
        training_seeds=(0, 1), reach_trials=2, prefixes=(128,), block=0, ratios=(4, 32), merge_ratios=(4,),
        widths=(1,), width_ratios=(32,), arm_lengths=(128,), arm_ratios=(8,), dense_below=1e9,
        methods=("sigma", "full_row", "random", "nuke", "h2o", "snapkv", "kvzip", "kmeans"),
        order_methods=("sigma", "h2o"),
    ),
    "recall": dict(
        reach_trials=2, dense_below=1e9, prefix=192, many=(3,), pairs=(128,), ratios=(4, 16), starved=(1,),
        rank=4, ranks=(2, 8), sequences=2, text_prefix=160, queries=70, recall_at=(1, 4), top_j=2,
        methods=("sigma", "vestige"), starved_methods=("vestige", "random+recall"), other_recalls=("random+recall",),
    ),
    "lm_cost": dict(windows=2, prefix=48, tokens=32, ratios=(8, 32)),
    "parity": dict(
        ratios=(8, 32), deployed=32, block=64, windows=2, prefix=108, tokens=24, needle_prefix=128, contexts=2,
        context=120, steps=12, clusters=2, chunk=64, other_chunk=32, batch=2, needle_batch=2, sample_batch=2,
    ),
}  # fmt: skip
"""Each driver, its sizes as small as they go."""
OF_ALL = dict(trials=2, prompts=2, rank=4, fetch=64, batch=2, arm_batch=2, chunk=64)


def small(twins, out):
    """The config of a whole run on random twins; other text is a file as well."""
    config = all_config.get_config()
    (twins / "code.txt").write_text("\n\n".join(f"def f{i}(x):\n    return x + {i}  # a river" for i in range(3000)))
    texts = {"text": str(twins / "text.txt"), "other_text": str(twins / "code.txt")}
    paths = {"checkpoint": str(twins / "nope"), "twin": str(twins / "rope"), "gqa": str(twins / "gqa")}
    for name in config.drivers:
        own = driver_config(name, config)
        changes = {k: v for k, v in (texts | paths | OF_ALL).items() if k in own}
        config.overrides[name] = ConfigDict(changes | DRIVERS[name])
    config.publish = str(out / "published" / "REPORT.md")
    return config


@pytest.fixture(scope="module")
def programs(tmp_path_factory, quick_compilation):
    """What is compiled once is not compiled again."""
    cache = {"jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs"))}
    cache |= {"jax_persistent_cache_min_compile_time_secs": 0, "jax_persistent_cache_min_entry_size_bytes": -1}
    before = {name: getattr(jax.config, name) for name in cache}
    for name, value in cache.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def whole(twins, tmp_path_factory, programs):
    """A whole run, and a second one that begins with all of needle's rows and half of geometry's."""
    first, second = (tmp_path_factory.mktemp(name) for name in ("first", "second"))
    everything.main(small(twins, first), first)
    for name in ("needle", "geometry"):
        shutil.copytree(first / name, second / name)
    lines = (first / "geometry" / "trials.jsonl").read_text().splitlines(keepends=True)
    (second / "geometry" / "trials.jsonl").write_text("".join(lines[: len(lines) // 2]) + '{"prompt": 1, "ar')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(needle.Lab, "measure", None)  # would fail if it were called
        everything.main(small(twins, second), second)
    return first, second


@pytest.mark.slow
def test_every_driver_is_in_the_report(whole):
    text = (whole[0] / "report.md").read_text()
    for name in all_config.get_config().drivers:
        assert f"\n## {name}\n" in text and f"    python -m experiments.{name} --config=configs/{name}.py" in text
        figures = sorted((whole[0] / name).glob("*.png"))
        assert figures and all(f"]({name}/{figure.name})" in text for figure in figures)
        with open(whole[0] / name / "summary.csv", newline="") as file:
            assert len(list(csv.DictReader(file))) > 3
        claims = driver_config(name, all_config.get_config()).get("claims", {})
        assert all(f"| {name} | {claim} | " in text for claim in claims)
        assert name == "needle" or claims
    assert text.count("\n| --- |") == 10  # a table of each driver, and that of the claims


@pytest.mark.slow
@pytest.mark.parametrize("name", ["branch", "digests", "geometry", "dividends"])
def test_claims_ask_for_what_is_measured(whole, name):
    """Those of the other drivers name ratios and lengths, which are smaller here."""
    with open(whole[0] / name / "claims.csv", newline="") as file:
        assert not [row for row in csv.DictReader(file) if row["because"] == "not measured with these settings"]


@pytest.mark.slow
def test_a_second_run_goes_on_and_gives_the_same_rows_and_page(whole):
    for name in all_config.get_config().drivers:
        rows = [(out / name / "trials.jsonl").read_text().splitlines() for out in whole]
        assert rows[0] == rows[1] and len(rows[0]) > 5
    pages = [(out / "report.md").read_text() for out in whole]
    assert pages[0] == pages[1]


@pytest.mark.slow
def test_the_published_page_is_the_same_and_its_figures_are_there(whole):
    folder = whole[0] / "published"
    pages = [(out / "published" / "REPORT.md").read_text() for out in whole]
    assert pages[0] == pages[1]
    linked = [part.partition(")")[0] for part in pages[0].split("](figures/")[1:]]
    assert len(linked) == len(set(linked)) > 9
    assert all((folder / "figures" / name).stat().st_size > 10_000 for name in linked)
