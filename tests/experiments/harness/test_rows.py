"""Rows and files survive a kill at any byte."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.harness.rows import Rows, UserError, atomic, write_json

KEY = ("method", "trial")


def open_rows(folder) -> Rows:
    return Rows(folder / "trials.jsonl", KEY)


def test_a_row_is_on_disk_before_the_file_is_closed(tmp_path):
    rows = open_rows(tmp_path)
    rows.add({"method": "sigma", "trial": 0, "nll": 0.5})
    assert json.loads((tmp_path / "trials.jsonl").read_text()) == {"method": "sigma", "trial": 0, "nll": 0.5}


def test_rows_are_read_back_in_order(tmp_path):
    first = open_rows(tmp_path)
    first.add({"method": "sigma", "trial": 1})
    first.add({"method": "norm", "trial": 0})
    first.close()
    second = open_rows(tmp_path)
    assert [row["method"] for row in second] == ["sigma", "norm"]
    assert second.done("sigma", 1) and second.done("norm", 0)
    assert not second.done("sigma", 0)


def test_every_cut_of_the_last_line_is_dropped_and_rewritten(tmp_path):
    path = tmp_path / "trials.jsonl"
    whole = '{"method": "sigma", "trial": 0}\n'
    last = '{"method": "sigma", "trial": 1}\n'
    for cut in range(len(last)):
        path.write_text(whole + last[:cut])
        rows = open_rows(tmp_path)
        assert len(rows) == 1 and not rows.done("sigma", 1)
        rows.add({"method": "sigma", "trial": 1})
        rows.close()
        assert path.read_text() == whole + last


def test_a_broken_line_inside_is_named(tmp_path):
    (tmp_path / "trials.jsonl").write_text('{"method": "sigma", "trial": 0}\n{"meth\n{"method": "sigma", "trial": 1}\n')
    with pytest.raises(UserError, match=r"trials\.jsonl line 2"):
        open_rows(tmp_path)


@pytest.mark.parametrize("line", ['{"method": "sigma"}', "[1, 2]"])
def test_a_line_that_is_no_row_is_named(tmp_path, line):
    (tmp_path / "trials.jsonl").write_text('{"method": "sigma", "trial": 0}\n' + line + "\n")
    with pytest.raises(UserError, match=r"trials\.jsonl line 2 is no row of method, trial"):
        Rows(tmp_path / "trials.jsonl", ("method", "trial"))


def test_a_key_is_added_once(tmp_path):
    rows = open_rows(tmp_path)
    rows.add({"method": "sigma", "trial": 0})
    with pytest.raises(ValueError, match="is in .* already"):
        rows.add({"method": "sigma", "trial": 0})


def test_a_row_without_its_key_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"lacks its key fields \['trial'\]"):
        open_rows(tmp_path).add({"method": "sigma"})


def test_a_question_with_another_key_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a key has the fields"):
        open_rows(tmp_path).done("sigma")


@pytest.mark.parametrize("value", [math.nan, math.inf, np.float32("nan")])
def test_numbers_that_are_not_finite_are_refused(tmp_path, value):
    rows = open_rows(tmp_path)
    with pytest.raises(ValueError, match="finite"):
        rows.add({"method": "sigma", "trial": 0, "nll": value})
    assert (tmp_path / "trials.jsonl").read_text() == ""


def test_arrays_and_their_scalars_become_plain(tmp_path):
    rows = open_rows(tmp_path)
    rows.add({"method": "sigma", "trial": np.int64(3), "kept": jnp.array([True, False]), "nll": np.float32(0.5)})
    assert rows.done("sigma", 3)
    assert list(rows) == [{"method": "sigma", "trial": 3, "kept": [True, False], "nll": 0.5}]


def test_atomic_replaces_whole_files_only(tmp_path):
    path = tmp_path / "summary.csv"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    with atomic(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.csv"]


def test_json_is_replaced_and_not_broken_by_what_cannot_be_written(tmp_path):
    path = tmp_path / "meta.json"
    write_json(path, {"a": (1, 2)})
    with pytest.raises(TypeError, match="object cannot be written as JSON"):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": [1, 2]}
