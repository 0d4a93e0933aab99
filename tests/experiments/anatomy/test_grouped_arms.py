"""The drivers of the probe on attention without a content score: grouped queries as rows of values and keys."""

import json

import numpy as np
import pytest
from flax import nnx

from configs import branch as branch_config
from configs import dividends as dividends_config
from configs import geometry as geometry_config
from experiments import branch, dividends, geometry
from experiments.text import vocabulary
from tests.experiments.conftest import PHRASES, PROSE
from vestige_jax import models

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grouped")
    sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4)
    layers = dict(num_hidden_layers=2, full_attn_layers=(0, 1), kda_num_heads=2, kda_head_dim=8)
    config = models.ModelConfig(400, **sizes, **layers, initializer_range=0.5, model_type="kimi_linear_gqa")
    models.save(folder, nnx.jit(lambda: models.Decoder(config, rngs=nnx.Rngs(0)))())
    vocabulary.tokenizer(vocabulary.train(PROSE + PHRASES, 350)).save(folder)
    return str(folder)


def run(driver, config, out):
    driver.main(config, out)
    rows = [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]
    return {row["quantity"]: row["value"] for row in rows if row["prompt"] == 0 and row["layer"] == 0}, rows


def test_branch(tiny, grouped, tmp_path):
    config = tiny(branch_config.get_config(), checkpoint=grouped, twin="", length=64, queries=16)
    found, rows = run(branch, config, tmp_path / "branch")
    assert found["top-1 by branch"] == 1 and abs(found["score variance by branch"] - 1) < 1e-5
    assert {row["quantity"] for row in rows} == set(branch.QUANTITIES)  # no projection into a latent: no ratio


def test_dividends(tiny, grouped, tmp_path):
    small = dict(length=64, ratio=8, horizons=(4, 32), window=8, kernel=3, page=4, asked=8, rank=2, calibration=16)
    config = tiny(dividends_config.get_config(), checkpoint=grouped, twin="", **small)
    found, _ = run(dividends, config, tmp_path / "dividends")
    assert found["sketch residual"] == 0 and np.isfinite(list(found.values())).all()


def test_geometry_turns_no_keys(tiny, grouped, tmp_path):
    small = dict(prefix=48, steps=4, tops=(1, 4), ratio=8, shifts=(3, 40), tolerances=(0.0, 0.5))
    config = tiny(geometry_config.get_config(), checkpoint=grouped, twin="", **small)
    found, rows = run(geometry, config, tmp_path / "geometry")
    assert {row["arm"] for row in rows} == {"nope"} and found["overlap at +40"] == 1
