"""The report on folders that drivers left, and what the whole run refuses."""

import json

import pytest
from ml_collections import ConfigDict

from configs import all as all_config
from configs import needle as needle_config
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
    assert "![needle](figures/needle.png)" in path.read_text()
    assert (path.parent / "figures" / "needle.png").read_bytes() == b"a figure"
    assert (path.parent / "figures" / "needle.summary.csv").exists()


def test_overrides_reach_the_driver():
    config = all_config.get_config()
    config.overrides.needle = ConfigDict({"trials": 2})
    assert driver_config("needle", config).trials == 2
    config.overrides.needle = ConfigDict({"trails": 2})
    with pytest.raises(UserError, match="overrides.needle has trails"):
        driver_config("needle", config)
    with pytest.raises(UserError, match="drivers='noodle' is unknown; choose from needle"):
        driver_config("noodle", config)
