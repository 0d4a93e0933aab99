"""The command line, the output folder, and going on after a kill."""

import json
import subprocess
import sys

import jax
import ml_collections
import pytest

from configs import train_tiny
from experiments.harness import runner
from experiments.harness.runner import Run, UserError

CONFIG = """
import ml_collections

def get_config():
    config = ml_collections.ConfigDict()
    config.seed = 0
    config.trials = 4
    config.lr = 1e-3
    config.methods = ("dense", "sigma")
    config.ratios = (8, 32)
    config.depths = (0.1, 0.8)
    config.index = ml_collections.ConfigDict({"rank": 8})
    return config
"""
KEY = ("method", "trial")


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "tiny.py"
    path.write_text(CONFIG)
    return path


def parse(config_file, *arguments):
    return runner.parse(["driver", f"--config={config_file}", *arguments])


def config(**fields) -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict({"seed": 0, "index": {"rank": 8}, "methods": ("sigma", "norm"), **fields})


def finish(run):
    for method, trial in run.todo([(method, trial) for method in run.config.methods for trial in range(2)]):
        run.add({"method": method, "trial": trial, "nll": 0.25})


# The command line


def test_overrides_reach_nested_fields_and_lists(config_file):
    got, _ = parse(
        config_file,
        "--config.seed=7",
        "--config.index.rank=4",
        "--config.ratios=2,4,8",
        "--config.methods=norm+recall, h2o",
    )
    assert (got.seed, got.index.rank, got.ratios, got.methods) == (7, 4, (2, 4, 8), ("norm+recall", "h2o"))
    assert got.trials == 4


def test_a_list_may_be_overridden_by_one_item(config_file):
    got, _ = parse(config_file, "--config.ratios=8", "--config.methods=sigma")
    assert (got.ratios, got.methods) == ((8,), ("sigma",))


def test_whole_numbers_will_do_for_fractions(config_file):
    assert parse(config_file, "--config.depths=0,1")[0].depths == (0, 1)


def test_output_folder_is_named_after_the_config(config_file):
    assert str(parse(config_file)[1]) == "results/tiny"
    assert str(parse(config_file, "--out=elsewhere/run")[1]) == "elsewhere/run"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--config.sed=3"], "no such field: sed; Did you mean .seed."),
        (["--config.index.rnk=3"], "no such field: rnk; Did you mean .rank."),
        (["--config.seed=x"], "config.seed=x"),
        (["--config.ratios=8,x"], "--config.ratios must be a list like 8,32"),
        (["--confg=3"], "confg"),
        (["extra"], "only flags are understood, got extra"),
    ],
)
def test_what_is_not_understood_is_named(config_file, arguments, message):
    with pytest.raises(UserError, match=message):
        parse(config_file, *arguments)


def test_missing_config_flag_and_file():
    with pytest.raises(UserError, match="--config=configs/NAME.py"):
        runner.parse(["driver"])
    with pytest.raises(UserError, match="--config=no_such.py must be a config file"):
        runner.parse(["driver", "--config=no_such.py"])


def test_launch_ends_a_users_mistake_in_one_sentence(config_file):
    def main(config, out):
        raise UserError(f"no method {config.methods[0]}")

    with pytest.raises(SystemExit, match="^error: no method dense$"):
        runner.launch(main, ["driver", f"--config={config_file}"])


def test_launch_leaves_other_errors_alone(config_file):
    def main(config, out):
        raise ValueError("a fault of ours")

    with pytest.raises(ValueError, match="a fault of ours"):
        runner.launch(main, ["driver", f"--config={config_file}"])


def test_launch_answers_bad_input_in_one_sentence(config_file):
    def main(config, out):
        with runner.reading_input():
            (out / "no_such_checkpoint").read_text()

    with pytest.raises(SystemExit, match="^error: .*No such file.*no_such_checkpoint"):
        runner.launch(main, ["driver", f"--config={config_file}"])


def test_help_names_the_flags(capsys):
    runner.launch(lambda config, out: pytest.fail("main was called"), ["driver", "--help"])
    assert "--config.NAME=VALUE" in capsys.readouterr().out


# The output folder


def test_meta_says_what_was_run(tmp_path):
    with Run(tmp_path / "run", config(), key=KEY, text="abc", seeds=[11, 12]) as run:
        assert json.loads((tmp_path / "run" / "meta.json").read_text())["starts"] == []  # nothing was made yet
        run.add({"method": "sigma", "trial": 1, "nll": 0.5})
        meta = json.loads((tmp_path / "run" / "meta.json").read_text())
    assert meta["config"] == {"seed": 0, "index": {"rank": 8}, "methods": ["sigma", "norm"]}
    assert (meta["text_hash"], meta["seeds"]) == ("abc", [11, 12])
    [start] = meta["starts"]
    assert start["versions"]["jax"] == jax.__version__
    assert start["versions"]["python"] == sys.version.split()[0]
    assert set(start["versions"]) == {"python", "jax", "jaxlib", "flax", "numpy", "vestige_jax"}
    assert start["device"] == {"platform": "cpu", "kind": jax.devices()[0].device_kind, "count": jax.device_count()}
    assert start["commit"] is None or len(start["commit"]) == 40


def test_config_hash_depends_on_values_and_not_on_their_order():
    one = runner.identity(ml_collections.ConfigDict({"a": 1, "b": 2}), "", ())["config_hash"]
    assert one == runner.identity(ml_collections.ConfigDict({"b": 2, "a": 1}), "", ())["config_hash"]
    assert one != runner.identity(ml_collections.ConfigDict({"a": 1, "b": 3}), "", ())["config_hash"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"config": config(seed=1)}, r"config\.seed: 0, now 1"),
        ({"config": config(index={"rank": 4})}, r"config\.index\.rank: 8, now 4"),
        ({"config": config(extra=1)}, r"config\.extra: absent, now 1"),
        ({"text": "other"}, "text_hash: abc, now other"),
        ({"seeds": [2]}, r"seeds: \[1\], now \[2\]"),
    ],
)
def test_a_folder_of_another_run_is_refused_and_left_alone(tmp_path, change, message):
    same = {"config": config(), "text": "abc", "seeds": [1]}

    def start(config, **facts):
        return Run(tmp_path, config, key=KEY, **facts)

    with start(**same) as run:
        run.add({"method": "sigma", "trial": 1, "nll": 0.5})
        before = (tmp_path / "meta.json").read_text()
    with pytest.raises(UserError, match=message + ".*choose another --out"):
        start(**{**same, **change})
    assert (tmp_path / "meta.json").read_text() == before


def test_rows_of_unknown_origin_are_refused(tmp_path):
    (tmp_path / "trials.jsonl").write_text('{"method": "sigma", "trial": 1}\n')
    with pytest.raises(UserError, match="no meta.json"):
        Run(tmp_path, config(), key=KEY)


def test_a_start_that_made_no_row_leaves_the_folder_to_another(tmp_path):
    with Run(tmp_path, config(), key=KEY):
        pass
    with Run(tmp_path, config(seed=1), key=KEY) as run:
        run.add({"method": "sigma", "trial": 1, "nll": 0.5})
    assert json.loads((tmp_path / "meta.json").read_text())["config"]["seed"] == 1


@pytest.mark.parametrize("text", ['{"config"', "{}", "[1]"])
def test_a_damaged_meta_is_named(tmp_path, text):
    with Run(tmp_path, config(), key=KEY) as run:
        run.add({"method": "sigma", "trial": 1, "nll": 0.5})
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(UserError, match="meta.json is damaged.*choose another --out"):
        Run(tmp_path, config(), key=KEY)


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_launch_looks_at_the_output_folder_first(config_file, tmp_path, out):
    (tmp_path / "file").write_text("in the way")
    arguments = ["driver", f"--config={config_file}", f"--out={tmp_path / out}"]
    with pytest.raises(SystemExit, match="^error: --out=.*must be a folder"):
        runner.launch(lambda config, out: pytest.fail("main was called"), arguments)


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_a_folder_that_cannot_be_written_is_refused(tmp_path, out):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot write in the folder .*choose another --out"):
        Run(tmp_path / out, config(), key=KEY)


# Rows


def test_todo_skips_what_is_done(tmp_path):
    with Run(tmp_path, config(), key=KEY) as run:
        run.add({"method": "sigma", "trial": 1, "nll": 0.5})
        assert list(run.todo([("sigma", 0), ("sigma", 1), ("norm", 0)])) == [("sigma", 0), ("norm", 0)]


def test_what_comes_with_another_row_is_not_asked_for_and_stays_as_it_is(tmp_path):
    with Run(tmp_path, config(), key=KEY) as run:
        asked = []
        for method, trial in run.todo([("sigma", 0), ("sigma", 1), ("norm", 0)]):
            asked.append((method, trial))
            for other in range(2):  # a batch of two
                run.add({"method": method, "trial": other, "nll": float(trial)})
        run.add({"method": "sigma", "trial": 1, "nll": 9.0})
        assert asked == [("sigma", 0), ("norm", 0)] and {row["nll"] for row in run.rows} == {0.0}
    assert len((tmp_path / "trials.jsonl").read_text().splitlines()) == 4


def test_a_second_start_adds_nothing_and_made_nothing(tmp_path):
    for _ in range(2):
        with Run(tmp_path, config(), key=KEY) as run:
            finish(run)
    assert len((tmp_path / "trials.jsonl").read_text().splitlines()) == 4
    assert len(json.loads((tmp_path / "meta.json").read_text())["starts"]) == 1


KILLED = """
import os, sys
from experiments.harness import runner

def main(config, out):
    with runner.Run(out, config, key=("trial",)) as run:
        for (trial,) in run.todo([(i,) for i in range(config.trials)]):
            if trial == 2 and not run.path("again").exists():
                run.path("again").touch()
                with open(run.path("trials.jsonl"), "a") as file:
                    file.write('{"tri')
                os._exit(9)
            run.add({"trial": trial, "start": len(run.rows)})

runner.launch(main)
"""


def test_a_killed_process_goes_on_where_it_stopped(tmp_path, config_file, repository):
    def start():
        command = [sys.executable, "-c", KILLED, f"--config={config_file}", f"--out={tmp_path / 'run'}"]
        return subprocess.run(command, cwd=repository, capture_output=True, text=True)

    def rows():
        return (tmp_path / "run" / "trials.jsonl").read_text().splitlines()

    assert start().returncode == 9
    kept = rows()[:2]
    assert len(rows()) == 3 and rows()[2] == '{"tri'
    second = start()
    assert second.returncode == 0, second.stderr
    assert rows()[:2] == kept
    assert [json.loads(row)["trial"] for row in rows()] == [0, 1, 2, 3]


def test_csv_holds_the_columns_asked_for(tmp_path):
    with Run(tmp_path, config(), key=KEY) as run:
        rows = [{"method": "sigma", "intact": 1 / 3, "lo": None, "more": 1}]
        run.write_csv("summary.csv", rows, ("method", "intact", "lo"))
    assert (tmp_path / "summary.csv").read_text() == "method,intact,lo\nsigma,0.333333,\n"


def test_a_config_of_another_driver_is_refused(config_file, capsys):
    with pytest.raises(SystemExit, match="no config of this driver, it lacks .*phases.*configs/train_tiny.py"):
        runner.launch(lambda *_: pytest.fail("main was called"), ["driver", f"--config={config_file}"], like=train_tiny)


def test_a_config_that_is_no_python_file_is_refused(tmp_path):
    (tmp_path / "notes.md").write_text("# some notes, not Python\nplain words\n")
    with pytest.raises(runner.UserError, match="must be a Python file"):
        runner.parse(["driver", f"--config={tmp_path / 'notes.md'}"])
