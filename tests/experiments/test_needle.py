"""The needle driver on a random model: what it writes, what it refuses, and that its path is the cache's own."""

import csv
import dataclasses
import itertools
import json
import pathlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

from configs import needle as needle_config
from configs import needle_grid, needle_unseen
from experiments import needle
from experiments.harness.rows import UserError
from experiments.text import needles, vocabulary
from experiments.trials import needle_batch, serving
from vestige_jax import baselines, generation, models
from vestige_jax.spec import CacheSpec

PREFIX = 128
FIRST = ("sigma", "full_row", "norm", "random", "stride", "streaming", "h2o", "h2o_recent", "snapkv")
METHODS = ("vestige", *FIRST, "norm+recall", "random+recall")  # the others: test_serving.py
PROSE = [f"Line {i} of a text about nothing, with words like river, mountain, paper and {i * 7}." for i in range(600)]
PHRASES = ["The secret passcode for is . What is the secret passcode for ? Please write down that wears badge"] * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random checkpoint and a text of its own."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "text.txt").write_text("\n\n".join(PROSE))
    vocabulary.tokenizer(vocabulary.train(PROSE + PHRASES, 350)).save(folder)
    sizes = dict(hidden_size=16, intermediate_size=32, num_attention_heads=2, kv_lora_rank=8, v_head_dim=8)
    branch = dict(qk_nope_head_dim=8, qk_rope_head_dim=4)
    layers = dict(num_hidden_layers=2, full_attn_layers=(1,), kda_num_heads=2, kda_head_dim=8)
    config = models.ModelConfig(vocab_size=400, initializer_range=0.5, **sizes, **branch, **layers)
    make = nnx.jit(lambda: models.Decoder(config, rngs=nnx.Rngs(0)))  # one program, not one for each shape
    models.save(folder, make())
    return folder


def make_config(folder, **changes):
    config = needle_config.get_config()
    paths = dict(checkpoint=str(folder), text=str(folder / "text.txt"))
    small = dict(trials=3, prefixes=(PREFIX,), block=0, rank=2, fetch=64, batch=2, chunk=48, ratios=(1, 16))
    with config.ignore_type():
        config.update(paths | small | dict(methods=METHODS) | changes)
    return config


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """The output folder of a whole run."""
    out = tmp_path_factory.mktemp("results") / "needle"
    needle.main(make_config(folder), out)
    return out


@pytest.fixture(scope="module")
def lab(folder):
    return needle.Lab(make_config(folder))


def read(out: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]


def nll(rows, method, ratio) -> list[float]:
    return [row["nll"] for row in rows if (row["method"], row["ratio"]) == (method, ratio)]


# What a run writes


def test_a_row_for_every_trial_of_every_cell(finished):
    rows = read(finished)
    cells = [("dense", 1), *((method, ratio) for ratio in (1, 16) for method in METHODS)]
    wanted = {(PREFIX, "0.1-0.8", method, ratio, trial) for method, ratio in cells for trial in range(3)}
    keys = [tuple(row[field] for field in needle.KEY) for row in rows]
    assert set(keys) == wanted and len(keys) == len(wanted)
    for row in rows:
        assert row["intact"] == (row["nll"] - row["nll_dense"] < 1)
        assert row["dropped"] == (row["nll_dense"] >= 1)
        assert len(row["code"]) == 5 and 0.1 <= row["at"] / PREFIX < 0.8


def test_the_summary_has_the_published_columns(finished):
    with open(finished / "summary.csv", newline="") as file:
        rows = list(csv.reader(file))
    assert ",".join(rows[0]) == (
        "method,ratio,prefix,trials,dropped,intact,lo,hi,exact,attended,fetched_per_step,fire_rate,overflow"
    )
    assert [row[0] for row in rows[1:]] == ["dense", *METHODS, *METHODS]
    assert {row[3] for row in rows[1:]} == {"3"}


def test_the_other_files(finished):
    meta = json.loads((finished / "meta.json").read_text())
    assert meta["config"]["seed"] == 0 and len(meta["config"]["weights"]) == 16 and len(meta["text_hash"]) == 64
    assert (finished / "needle.png").stat().st_size > 10_000


def test_traffic_of_each_kind_of_method(finished):
    for row in read(finished):
        if row["ratio"] == 1:
            assert row["attended"] == 1 and row["fetched_per_step"] == 0
        elif row["method"] == "vestige" or row["method"].endswith("+recall"):
            assert row["fire_rate"] > 0 and 0 < row["fetched_per_step"] <= PREFIX
        else:
            behind = 60  # no more than that many tokens come after the cut
            most = (PREFIX / row["ratio"] + 4 + behind) / (PREFIX + behind)
            assert row["fire_rate"] == row["fetched_per_step"] == row["overflow"] == 0 and 0 < row["attended"] <= most


def test_where_the_needle_was(finished):
    # depth < .8 of 128, and the last m = 8 rows start at 120
    lost = [row["needle_kept"] for row in read(finished) if (row["method"], row["ratio"]) == ("streaming", 16)]
    assert_array_equal(lost, np.zeros((3, 1)))
    fetched = [row["needle_fetched"] for row in read(finished) if row["ratio"] == 16 and row["fetched_per_step"] > 0]
    assert len(fetched) == 9 and np.mean(fetched) > 0.5
    assert not any(sum(row["needle_fetched"]) for row in read(finished) if row["method"] == "sigma")
    everything = [row["needle_kept"] for row in read(finished) if row["ratio"] == 1 and row["method"] != "dense"]
    assert_array_equal(everything, np.ones((3 * len(METHODS), 1)))


@pytest.mark.slow
def test_methods_that_observe_more_share_the_prefill(folder, tmp_path):
    """A second reading, moments, one budget for all layers, merged rows."""
    names = ("tova", "expected_attention", "kvzip", "kvzip_global", "kmeans", "keepkv", "nuke", "norm+recall")
    needle.main(make_config(folder, methods=names, trials=2), tmp_path / "out")
    rows = read(tmp_path / "out")
    assert len(rows) == 2 * (1 + 2 * len(names)) and np.isfinite([row["nll"] for row in rows]).all()
    for name in names:
        same = np.allclose(nll(rows, name, 1), nll(rows, "dense", 1), rtol=1e-4)
        assert same == (name != "nuke")


# A killed run goes on


def test_a_killed_run_goes_on_where_it_ended(folder, finished, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    lines = (finished / "trials.jsonl").read_text().splitlines(keepends=True)
    (out / "meta.json").write_text((finished / "meta.json").read_text())
    (out / "trials.jsonl").write_text("".join(lines[:-3]) + lines[-3][:40])
    served = count_calls(monkeypatch, generation, "teacher_force")
    needle.main(make_config(folder), out)
    assert served == [1, 1, 1]  # the last batch lacks three cells of one trial
    before, after = read(finished), read(out)
    assert [row["method"] for row in after] == [row["method"] for row in before]
    assert_allclose([row["nll"] for row in after], [row["nll"] for row in before], rtol=1e-4)


def test_a_finished_run_computes_nothing(folder, finished, monkeypatch):
    before = read(finished)
    served = count_calls(monkeypatch, generation, "prefill")
    needle.main(make_config(folder), finished)
    assert not served and read(finished) == before


def count_calls(monkeypatch, module, name) -> list[int]:
    calls, original = [], getattr(module, name)

    def counted(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, counted)
    return calls


# One path


def test_dense_is_the_dense_forward_of_the_model(lab, finished):
    known = {row["trial"]: row for row in read(finished) if row["method"] == "dense"}
    forward = nnx.jit(lambda model, ids: model(ids))
    for batch in lab.batches:
        for (_, number), trial in zip(batch.places, batch.trials, strict=False):
            ids = np.pad(trial.ids, (0, PREFIX + batch.longest - len(trial.ids)))  # one shape; what is behind is unseen
            logits = jax.nn.log_softmax(forward(lab.cells.model, jnp.asarray(ids)[None])[0])
            answer = np.arange(len(trial.ids) - len(trial.answer), len(trial.ids))
            loss = -logits[answer - 1, trial.ids[answer]].sum()
            assert_allclose(known[number]["nll"], loss, rtol=1e-4)


def test_with_every_row_kept_a_method_is_dense(finished):
    rows = read(finished)
    for method in METHODS:
        assert_allclose(nll(rows, method, 1), nll(rows, "dense", 1), rtol=1e-5)


def test_the_path_is_the_one_of_the_cache_itself(lab, finished):
    """A cache made for ratio 16, that ranks its own rows, gives what the driver has from its shared state."""
    batch = lab.batches[0]
    spec = dataclasses.replace(lab.specs[PREFIX], ratio=1 / 16)
    _, state = generation.prefill(lab.cells.model, spec, jnp.asarray(batch.ids), chunk=48, observe=True)
    seeds = jnp.zeros((1, 2), jnp.uint32)
    selected = serving.compress(spec, state, baselines.method("sigma"), 8, seeds)
    assert_array_equal(selected.caches[0].archive.kept, state.caches[0].archive.kept)

    state = generation.calibrate(lab.cells.model, spec, state)
    tokens, lengths = jnp.asarray(batch.tokens), jnp.asarray(batch.lengths)
    forced = generation.teacher_force(lab.cells.model, spec, state, tokens, lengths)
    answer = needle_batch.answered(batch, forced)["nll"]
    assert_allclose(nll(read(finished), "vestige", 16)[:2], answer, rtol=1e-5)
    assert abs(answer - nll(read(finished), "dense", 1)[:2]).min() > 1e-3  # so that the comparison can fail
    assert abs(answer - nll(read(finished), "norm+recall", 16)[:2]).min() > 1e-3


@pytest.mark.parametrize("name", METHODS)
def test_every_method_holds_the_same_number_of_rows(lab, name):
    method = lab.methods[name]
    spec = serving.served(lab.specs[PREFIX], method)
    state = lab.cells.prefill(lab.specs[PREFIX], lab.batches[0])
    state = serving.compress(spec, state, method, 8, jnp.zeros((1, 2), jnp.uint32))
    assert_array_equal(state.caches[0].tier1.count, [8 + 4] * 2)


def test_random_differs_by_trial_and_layer():
    same = dict(places=(("0-1", 3), ("0-1", 4)), prefix=64, trials=[SimpleNamespace(span=(9, 12))] * 2)
    batch = needle_batch.Batch(**same, longest=5)
    seeds = needle_batch.seeds(batch, 0, layers=2)
    assert seeds.shape == (2, 2) and len(set(seeds.ravel())) == 4
    assert_array_equal(seeds, needle_batch.seeds(batch, 0, layers=2))
    assert not (seeds == needle_batch.seeds(batch, 1, layers=2)).any()


# Pieces


def test_methods_are_served_under_specs_of_one_layout():
    spec = CacheSpec(8, 4, 2, 0.3, 200, block=128, rank=2)
    dense, alone, both = (serving.served(spec, baselines.method(name)) for name in ("dense", "sigma", "vestige"))
    assert (dense.recall, dense.activation) == ("none", 201)  # longer than a sequence can be: always dense
    assert alone == dataclasses.replace(spec, recall="none")
    assert both == spec


@pytest.mark.slow
def test_recall_by_pages(folder, tmp_path):
    """floor(64 / 16) pages of 16 rows, or two of 32, less what tier 1 holds of them."""
    needle.main(make_config(folder, methods=("sigma+quest", "random+arkvale_mean"), ratios=(16,), trials=2), tmp_path)
    rows = [row for row in read(tmp_path) if row["method"] != "dense"]
    assert len(rows) == 4
    for row in rows:
        assert 32 <= row["fetched_per_step"] <= 64 and row["fire_rate"] == 1 and row["overflow"] == 0
        assert row["attended"] < 1


# The grid and the configs


def test_a_grid_writes_a_heat_map_for_each_method(folder, finished, tmp_path):
    before = read(finished)  # its needles, other depths: no shape is new
    changes = dict(depths=(0.0, 0.3, 0.6, 1.0), trials=1, methods=("vestige", "sigma"))
    needle.main(make_config(folder, **changes), tmp_path)
    with open(tmp_path / "grid.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    cells = itertools.product(("vestige", "sigma"), ("0-0.3", "0.3-0.6", "0.6-1"))
    assert [(row["method"], row["depth"]) for row in rows][3:9] == list(cells)
    maps = {f"grid-{method}-{ratio}.png" for method in ("vestige", "sigma") for ratio in (1, 16)}
    assert {path.name for path in tmp_path.glob("*.png")} == {"needle.png", *maps}
    depths = {row["depth"]: row["at"] / PREFIX for row in read(tmp_path)}
    assert depths["0-0.3"] < 0.3 <= depths["0.3-0.6"] < 0.6 <= depths["0.6-1"]
    assert {row["trial"]: row["code"] for row in read(tmp_path)} == {row["trial"]: row["code"] for row in before}


def test_configs():
    main = needle_config.get_config()
    assert main.prefixes == (4096,) and main.block == 4096 and main.ratios == (8, 32, 128) and main.trials == 24
    assert main.fetch <= 1024 and main.rank <= 8
    assert needle_unseen.get_config().template in needles.UNSEEN
    grid = needle_grid.get_config()
    assert not grid.block and len(grid.depths) == 11 and len(grid.prefixes) > 1


# What it refuses


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"methods": ("sigma", "h3o")}, "method 'h3o' is unknown; choose from dense, vestige, sigma"),
        ({"template": "riddle"}, "template='riddle' is unknown"),
        ({"prefixes": (PREFIX,), "block": 96}, "prefixes=128 must be a multiple of block=96"),
        ({"prefixes": (PREFIX,), "block": 16}, "block=16 must be longer than the"),
        ({"trials": 0}, "trials=0 must be at least 1"),
        ({"ratios": (0,)}, "ratios=.*at least 1"),
        ({"depths": (0.5,)}, "depths=.*two edges"),
        ({"depths": (0.8, 0.1)}, "depths=.*rising"),
        ({"prefixes": (0,)}, "prefixes=.*numbers of tokens"),
        ({"ratios": (100000,)}, "ratios=.*shortest"),
        ({"methods": ()}, "methods=.*at least one"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"needles": 100000}, "needles=100000 do not fit"),
        ({"checkpoint": ""}, "checkpoint='' must be a folder"),
        ({"rows_dtype": "int8"}, "rows_dtype='int8' must be float32 or bfloat16"),
        ({"rank": 9}, "rank=9 must be at most latent_dim=8"),
        ({"methods": ("sigma_pca8",)}, "width=8 must be at most branch_dim=4"),
        ({"text": "no/such/file"}, "no/such/file.*does not exist"),
        ({"checkpoint": "no/such/folder"}, "checkpoint='no/such/folder' must be a folder with a config.json"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_sentence(folder, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        needle.main(make_config(folder, **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def copied(folder, tmp_path) -> pathlib.Path:
    new = tmp_path / "model"
    new.mkdir()
    for path in folder.iterdir():
        (new / path.name).write_bytes(path.read_bytes())
    return new


def test_a_truncated_checkpoint(folder, tmp_path):
    new = copied(folder, tmp_path)
    weights = new / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="model.safetensors.*truncated"):
        needle.Lab(make_config(new))


def test_a_rotated_branch_needs_the_flag_that_allows_it(folder, tmp_path):
    new = copied(folder, tmp_path)
    raw = json.loads((new / "config.json").read_text())
    (new / "config.json").write_text(json.dumps(raw | {"mla_use_nope": False}))
    with pytest.raises(UserError, match="allow_rope=True"):
        needle.Lab(make_config(new))
    assert needle.Lab(make_config(new, allow_rope=True)).specs


def test_a_results_folder_of_another_config_or_model(folder, finished, tmp_path):
    with pytest.raises(UserError, match="made by another run.*seed: 0, now 1"):
        needle.main(make_config(folder, seed=1), finished)
    new = copied(folder, tmp_path)
    weights = bytearray((new / "model.safetensors").read_bytes())
    weights[-4] ^= 1  # the lowest bit of the last weight
    (new / "model.safetensors").write_bytes(weights)
    with pytest.raises(UserError, match="weights"):
        needle.main(make_config(new), finished)


def test_an_output_folder_that_cannot_be_written(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write in the folder"):
        needle.main(make_config(folder), tmp_path / "file" / "out")
