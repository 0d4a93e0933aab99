"""The parity driver on a random model: the path is the cache's own, and the quantities are worked out by hand."""

import csv
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose

from configs import parity as parity_config
from experiments import parity
from experiments.harness.rows import UserError
from experiments.reports import parity_report
from experiments.trials.parity_parts import CHUNKS, DENSE, DTYPE, RESAMPLED, TEXT

TOKENS, STEPS = 24, 12


@pytest.fixture(scope="module")
def make_config(twins):
    def make(**changes):
        config = parity_config.get_config()
        small = dict(ratios=(1, 16), deployed=16, block=64, rank=2, fetch=64, chunk=48, other_chunk=32)
        small |= dict(rows_dtype="float32", weights_dtype="float32", other_rows_dtype="bfloat16", clusters=2)
        small |= dict(windows=2, prefix=108, tokens=TOKENS, batch=2, trials=2, needle_prefix=128, needle_batch=2)
        small |= dict(contexts=2, context=120, steps=STEPS, sample_batch=2)
        paths = dict(checkpoint=str(twins / "nope"), text=str(twins / "text.txt"))
        with config.ignore_type():
            config.update(paths | small | changes)
        return config

    return make


@pytest.fixture(scope="module")
def finished(make_config, tmp_path_factory, quick_compilation):
    out = tmp_path_factory.mktemp("results") / "parity"
    parity.main(make_config(), out)
    return out


def read(out, part: str | None = None, side: str | None = None, ratio: int | None = None) -> list[dict]:
    rows = [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]
    wanted = {"part": part, "side": side, "ratio": ratio}
    return [row for row in rows if all(value in (None, row[name]) for name, value in wanted.items())]


@pytest.mark.slow
def test_every_side_of_every_part_and_the_files(finished):
    text = [(DENSE, 1), (CHUNKS, 1), ("vestige", 1), ("vestige", 16), (DTYPE, 1)]
    needle = [(DENSE, 1), *((side, ratio) for ratio in (1, 16) for side in ("sigma", "vestige"))]
    sampled = [(TEXT, 1), (DENSE, 1), (RESAMPLED, 1), ("vestige", 16)]
    wanted = [("text", *place) for place in text] + [("needle", *place) for place in needle]
    wanted += [("samples", *place) for place in sampled]
    keys = [tuple(row[field] for field in parity.KEY) for row in read(finished)]
    assert sorted(keys) == sorted((*place, trial) for place in wanted for trial in range(2))
    with open(finished / "summary.csv", newline="") as file:
        quantities = {line["quantity"] for line in csv.DictReader(file)}
    assert {"median |dNLL|", "bits per byte", "intact"} < quantities
    assert {f"MAUVE on own hidden states, against {side}" for side in (TEXT, DENSE)} < quantities
    with open(finished / "claims.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == len(parity_config.get_config().claims)
    assert all((finished / name).stat().st_size > 10_000 for name in ("parity.png", "parity-needles.png"))


@pytest.mark.slow
def test_dense_is_the_forward_pass_in_any_chunks_and_a_cache_that_keeps_all_is_dense(finished, make_config):
    lab = parity.Lab(make_config())
    (batch,) = lab.batches["text"]
    forward = nnx.jit(lambda model, ids: model(ids))
    for row in read(finished, "text", DENSE):
        trial = batch.trials[row["trial"]]
        logits = jax.nn.log_softmax(forward(lab.cells.model, jnp.asarray(trial.ids)[None])[0])
        at = np.arange(109, 108 + TOKENS)
        assert_allclose(row["nll"], -logits[at - 1, trial.ids[at]], rtol=1e-3, atol=1e-4)
        assert row["attended"] == 1
    nll = {side: np.array([row["nll"] for row in read(finished, "text", *side)]) for side in _SIDES}
    assert np.abs(nll[CHUNKS, 1] - nll[DENSE, 1]).max() < 1e-3
    assert np.abs(nll["vestige", 1] - nll[DENSE, 1]).max() < 1e-3
    assert np.abs(nll["vestige", 16] - nll[DENSE, 1]).max() > 1e-3
    assert np.abs(nll[DTYPE, 1] - nll[DENSE, 1]).max() > 1e-3


_SIDES = [(DENSE, 1), (CHUNKS, 1), (DTYPE, 1), ("vestige", 1), ("vestige", 16)]


@pytest.mark.slow
def test_blocks_close_in_the_prefix_and_behind_it(make_config):
    """64 rows of the prefix of 108 are closed, and 64 more when the 20th of the 23 steps is done."""
    lab = parity.Lab(make_config())
    (batch,), text = lab.batches["text"], lab.parts["text"]
    spec = text.spec(16)
    parts = parity.parity_parts
    _, state = parts.generation.prefill(lab.cells.model, spec, jnp.asarray(batch.ids), chunk=48)
    assert [int(n) for n in state.caches[0].archive.closed] == [64, 64]
    state = parts.generation.calibrate(lab.cells.model, spec, state)
    forced = parts.generation.teacher_force(lab.cells.model, spec, state, jnp.asarray(batch.tokens))
    assert [int(n) for n in forced.state.caches[0].archive.closed] == [128, 128]
    assert [int(n) for n in forced.state.caches[0].tier1.count] == [8 + 4] * 2
    kept = np.asarray(forced.stats.kept)[:, 0, 0]
    assert list(kept) == [4 + 4] * 20 + [8 + 4] * 3


@pytest.mark.slow
def test_samples_are_fixed_by_their_keys_and_read_behind_the_cut(finished, make_config):
    lab = parity.Lab(make_config())
    (batch,) = lab.batches["samples"]
    again = list(lab.measure(("samples", RESAMPLED, 1, 0)))
    assert [row["tokens"].tolist() for row in again] == [r["tokens"] for r in read(finished, "samples", RESAMPLED)]
    assert read(finished, "samples", DENSE)[0]["tokens"] != read(finished, "samples", RESAMPLED)[0]["tokens"]
    for row, trial in zip(read(finished, "samples", TEXT), batch.trials, strict=True):
        hidden = lab.cells.model.norm(lab.cells.model.hidden(jnp.asarray(trial.ids)[None])[-1])
        assert_allclose(row["features"], hidden[0, 120:].mean(0), rtol=1e-3, atol=1e-4)
        assert len(row["tokens"]) == STEPS


@pytest.mark.slow
def test_a_killed_run_goes_on_and_a_finished_one_computes_nothing(finished, make_config, tmp_path, monkeypatch):
    lines = (finished / "trials.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "meta.json").write_text((finished / "meta.json").read_text())
    (tmp_path / "trials.jsonl").write_text("".join(lines[:-5]) + lines[-5][:30])
    parity.main(make_config(), tmp_path)
    assert [row["tokens"] for row in read(tmp_path, "samples")] == [row["tokens"] for row in read(finished, "samples")]
    monkeypatch.setattr(parity.parity_parts.generation, "prefill", None)
    parity.main(make_config(), tmp_path)
    assert (tmp_path / "summary.csv").read_text().count("\n") == (finished / "summary.csv").read_text().count("\n")


# Pieces


def test_gaps_by_hand():
    """|difference| 0.1 0.3 0.2 0.4 -> median 0.25; 0.4 nats less, of 20 bytes."""

    def rows(*losses):
        return [dict(trial=i, nll=list(nll), bytes=10) for i, nll in enumerate(losses)]

    cells = {(DENSE, 1): rows((1.0, 2.0), (3.0, 4.0)), ("vestige", 8): rows((0.9, 2.3), (2.8, 3.6))}
    lines = {line.name: line.estimate for line in parity_report.text(cells)}
    assert lines["median |dNLL|, vestige, 8x"].value == pytest.approx(0.25)
    assert lines["bits per byte, dense, 1x"].value == pytest.approx(10 / 20 / math.log(2))
    assert lines["delta bits per byte, vestige, 8x"].value == pytest.approx(-0.4 / 20 / math.log(2))


def test_the_policy_is_held_against_the_larger_floor():
    gaps = np.array([[[0.4, 0.4, 0.6], [0.1, 0.1, 0.1], [0.2, 0.2, 0.9]]])
    assert parity_report.over_floor(gaps) == pytest.approx(0.4 / 0.2)


def parts(contexts=4, ratios=(8, 32, 128, 512), dropped=False):
    """Rows in which recall brings back every needle but the first half."""
    near, far = [1.0, 0.0], [0.0, 1.0]
    text = [DENSE, CHUNKS, DTYPE]
    verdicts = {"sigma": lambda i: i % 2, "vestige": lambda i: True}
    text_rows = [dict(trial=i, nll=[1.0, 2.0], bytes=9) for i in range(2)]
    needles = {
        (side, ratio): [dict(trial=i, intact=bool(kept(i)), dropped=dropped) for i in range(4)]
        for side, kept in verdicts.items()
        for ratio in ratios
    }
    samples = [(TEXT, 1), (DENSE, 1), (RESAMPLED, 1), ("vestige", 32)]
    return {
        "text": {place: text_rows for place in [*((side, 1) for side in text), *(("vestige", r) for r in ratios)]},
        "needle": {(DENSE, 1): [dict(trial=i, intact=True, dropped=dropped) for i in range(4)], **needles},
        "samples": {
            place: [
                dict(trial=i, features=far if place[0] == "vestige" else (near, far)[i % 2]) for i in range(contexts)
            ]
            for place in samples
        },
    }


def test_needles_and_samples_by_hand():
    """Half of the needles are restored. Two clusters: halves against halves is 1, against one cluster alone less."""
    cells = parts()
    lines = [*parity_report.text(cells["text"]), *parity_report.needle(cells["needle"])]
    lines += parity_report.samples(cells["samples"], 2)
    found = parity_report.measured(lines, cells, 2)
    assert found["intact, sigma, 512x"].value == 0.5 and found["intact, vestige, 512x"].low > 0.5
    assert found["restored by recall, 512x"].value == 0.5
    again = found["MAUVE on own hidden states, against text, dense again, 1x"].value
    policy = found["MAUVE on own hidden states, against text, vestige, 32x"].value
    assert again == pytest.approx(1) and policy < 0.8
    assert found["MAUVE lost against text"].value == pytest.approx(again - policy)
    assert {claim.quantity for claim in parity_config.get_config().claims.values()} <= set(found)


def test_where_dense_fails_nothing_can_be_told():
    cells = parts(dropped=True)
    (line, *_) = parity_report.needle(cells["needle"])
    assert line.estimate.unusable == "dense fails on 4 of 4 trials"
    assert "restored by recall, 512x" not in dict(parity_report._paired(cells, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefix": 60}, "prefix=60 and tokens=24 must reach over a block=64 each"),
        ({"tokens": 20}, "prefix=108 and tokens=20 must reach over a block=64 each"),
        ({"context": 100}, "context=100 and steps=12 must reach over a block=64 each"),
        ({"other_chunk": 48}, "other_chunk=48 must differ from chunk=48"),
        ({"other_rows_dtype": "float32"}, "other_rows_dtype='float32' or other_weights_dtype must be another dtype"),
        ({"other_rows_dtype": "int8"}, "other_rows_dtype='int8' must be float32 or bfloat16"),
        ({"needle_prefix": 100}, "must be a multiple of block=64"),
        ({"ratios": (200,)}, "ratios=.* must lie between 1 and the 128 tokens"),
        ({"clusters": 9}, "clusters=9 must be at most four times contexts=2"),
        ({"temperature": -1.0}, "temperature=-1.0 must be at least 0"),
        ({"contexts": 10**5}, "windows of 132 tokens need"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_sentence(make_config, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        parity.main(make_config(**changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()
