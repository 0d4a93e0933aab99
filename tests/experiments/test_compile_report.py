"""The compile report with a compiler that is told what to say."""

import csv
import importlib.metadata

import jax
import pytest

from experiments import compile_report, compilers
from experiments.compilation import compile_programs, compile_sizes
from experiments.harness.rows import UserError
from tests.kernels.backends import tracing_for

ROWS = 8192
KIND = {"tpu": ("tpu", "TPU v5 lite"), "cuda": ("gpu", "NVIDIA H200")}


class Told:
    """A compiler that refuses some programs, and traces none."""

    def __init__(self, target):
        self.platform = "tpu" if target.startswith("tpu") else "cuda"
        self.compiled = []

    def tracing(self):
        return tracing_for(*KIND[self.platform])

    def shapes(self, function, *arguments):
        with self.tracing():
            return jax.eval_shape(function, *arguments)

    def compile(self, function, *arguments, donate=()):
        width = len(jax.tree.leaves(arguments))
        if width == Told.refused:
            raise NotImplementedError("no such\n instruction")
        return compilers.Compiled(1.0, 3_000_000, 0, None if self.platform == "cuda" else 1_000_000 * width, None)


@pytest.fixture
def told(monkeypatch):
    monkeypatch.setattr(compilers, "Compiler", Told)
    monkeypatch.setattr(compilers, "version", lambda target: "told 1.0")
    Told.refused = None


def table(folder, target):
    with open(folder / f"{target.replace(':', '_')}.csv", encoding="utf-8") as file:
        return {row["program"]: row for row in csv.DictReader(file)}


def test_every_program_has_a_row_and_steps_have_ratios(told, tmp_path, capsys):
    assert compile_report.main("tpu:v5e:2x2", [ROWS], [""], tmp_path) == 0
    found = table(tmp_path, "tpu:v5e:2x2")
    assert {row["state"] for row in found.values()} == {"compiled"} and len(found) == 16 + 52 + 10 + 2 * 4
    step = found["step common path"]
    assert (step["target"], step["jax"], step["compiler"]) == (
        "tpu:v5e:2x2", importlib.metadata.version("jax"), "told 1.0")  # fmt: skip
    assert step["temporary_mb"] == "0" and step["device_mb"] == "3"
    dense, policy = (float(found[f"step {name}"]["account_mb"]) for name in ("dense", "common path"))
    assert float(step["account_ratio"]) == pytest.approx(dense / policy, rel=1e-4) and dense > policy
    assert step["accessed_ratio"] == "1"
    narrow = [float(found[f"step common path, balanced 128 x {bits} bits"]["account_mb"]) for bits in (8, 4)]
    assert policy > narrow[0] > narrow[1]
    assert found["xla step common path"]["accessed_ratio"] == "" and found["xla step common path"]["account_ratio"]
    assert found["step dense"]["account_ratio"] == found["kernel attend, tier 1"]["account_ratio"] == ""
    printed = capsys.readouterr().out
    assert f"{ROWS} rows, sketch 64 x 16 bits: dense" in printed and "tier 1 " in printed


def test_a_compiler_that_says_no_bytes_leaves_the_cell_empty(told, tmp_path):
    assert compile_report.main("h200", [ROWS], ["step"], tmp_path) == 0
    step = table(tmp_path, "h200")["step common path"]
    assert step["accessed_mb"] == step["accessed_ratio"] == "" and float(step["account_ratio"]) > 1


def test_an_error_is_printed_counted_and_tried_again(told, tmp_path, capsys):
    Told.refused = 2  # the kernel compact: margins and counts
    assert compile_report.main("h200", [ROWS], ["kernel"], tmp_path) == 3
    assert "NotImplementedError: no such instruction" in capsys.readouterr().out
    assert table(tmp_path, "h200")["kernel compact, 64"]["state"].startswith("NotImplementedError")
    Told.refused = None
    assert compile_report.main("h200", [ROWS], ["kernel"], tmp_path) == 0
    assert capsys.readouterr().out.count("rows: compiled") == 3


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--target=tpu"], "--target=tpu is not known"),
        ([], "say --target"),
        (["--target=h200", "more"], "say --target"),
        (["--target=h200", "--lengths=5"], "--lengths=5 must be multiples of 4096"),
        (["--target=h200", "--lengths=abc,4096"], "--lengths=abc,4096 must be multiples"),
        (["--target=h200", "--lengths="], "--lengths= must be"),
        (["--target=h200", f"--out={__file__}"], "cannot write in the folder .*test_compile_report.py .*--out"),
    ],
)
def test_a_command_line_that_cannot_be_meant(arguments, message):
    with pytest.raises(UserError, match=message):
        compile_report.launch(["compile_report", *arguments])


def test_a_target_is_named_before_a_compiler_is_missed(tmp_path, monkeypatch):
    monkeypatch.setattr(compilers, "FOLDER", tmp_path)  # no compiler has been fetched
    monkeypatch.setattr(compilers, "installed", lambda name: False)
    with pytest.raises(UserError, match="--target=tpu:v9 is not known; known are h200, .*tpu:v6e:2x2"):
        compile_report.launch(["compile_report", "--target=tpu:v9"])


def test_a_step_that_copies_its_cache_has_failed(told, tmp_path, capsys, monkeypatch):
    made = compilers.Compiled(1.0, 90_000_000, 80_000_000, None, None)
    monkeypatch.setattr(Told, "compile", lambda self, *_, **__: made)
    assert compile_report.main("h200", [ROWS], ["step", "kernel compact, 64"], tmp_path) == 7
    assert "copies the cache: 80 MB of temporaries beside 14 MB" in capsys.readouterr().out


def test_names_that_begin_no_program(told, tmp_path):
    with pytest.raises(UserError, match="--only=warp names no program"):
        compile_report.main("h200", [ROWS], ["warp"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["tpu:v5e:2x2", "h200"])
def test_every_program_can_be_traced_for_its_device(target):
    compiler = Told(target)
    for program in (*compile_sizes.sizes(compiler), *compile_programs.every(compiler, ROWS)):
        function, arguments, _ = program.build()
        with compiler.tracing():
            assert jax.eval_shape(function, *arguments) is not None, program.name
