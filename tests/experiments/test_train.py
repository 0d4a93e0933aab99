import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import train_tiny
from experiments import train
from experiments.harness import runner
from vestige_jax.models import Tokenizer, load

STEPS = 30


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """Every run here compiles the same few programs."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    words = "the cache keeps rows of a block and attends what can matter to a query ".split()
    rng = np.random.default_rng(0)
    for name in range(60):
        (folder / f"{name}.txt").write_text(" ".join(rng.choice(words, 300)))
    return folder


def toy_config(text, repository, folder):
    """A run of seconds."""
    config = train_tiny.get_config()
    config.tokenizer = str(repository / config.tokenizer)
    config.checkpoint = str(folder / "checkpoint")
    config.text = str(text)
    config.phases = ((64, 2, STEPS, 1.0),)
    config.rate, config.warmup = 1e-2, 2
    config.log_every = 1
    config.save_every = 10
    config.check_every, config.checks, config.check_trials = 20, ((128, 1, "passcode"),), 1
    config.final_checks, config.final_trials = ((128, 1, "passcode"),), 2
    # One MLA layer: how a run goes does not depend on the model, and the update of a KDA layer compiles for long.
    config.model.update(hidden_size=16, intermediate_size=16, num_hidden_layers=1, kv_lora_rank=8)
    config.model.linear_attn_config.update(kda_layers=(), full_attn_layers=(1,))
    return config


@pytest.fixture
def toy(text, tmp_path, repository):
    return toy_config(text, repository, tmp_path)


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory, repository):
    """The folder of an uninterrupted run: out/ and checkpoint/."""
    folder = tmp_path_factory.mktemp("finished")
    train.main(toy_config(text, repository, folder), folder / "out")
    return folder


def weights(folder):
    return jax.tree.leaves(train.nnx.state(load(folder)))


def rows(out):
    lines = [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in lines]


def test_training_lowers_the_loss(finished):
    losses = [row["loss"] for row in rows(finished / "out") if row["kind"] == "train"]
    assert len(losses) == STEPS
    assert losses[0] > 6.5
    assert np.mean(losses[-5:]) < losses[0] - 1.5


def test_a_killed_run_ends_as_an_uninterrupted_one(finished, toy, tmp_path, monkeypatch):
    class Killed(train.Trainer):
        def batch(self, step):
            if step == 17:  # seven steps after the last saved one
                raise KeyboardInterrupt
            return super().batch(step)

    with monkeypatch.context() as patch:
        patch.setattr(train, "Trainer", Killed)
        with pytest.raises(KeyboardInterrupt):
            train.main(toy, tmp_path / "out")
    assert len(rows(tmp_path / "out")) == 17
    train.main(toy, tmp_path / "out")
    for a, b in zip(weights(finished / "checkpoint"), weights(toy.checkpoint), strict=True):
        np.testing.assert_array_equal(a, b)
    assert rows(tmp_path / "out") == rows(finished / "out")


def test_the_checkpoint_says_what_it_is(finished, text):
    folder = finished / "checkpoint"
    facts = json.loads((folder / "training.json").read_text())
    assert facts["command"].startswith("python -m experiments.train")
    assert facts["text_hash"] == train.corpus.load(str(text)).hash
    assert [row["prefix"] for row in facts["validation"]] == [128]
    card = (folder / "README.md").read_text()
    for part in (facts["text_hash"], facts["command"], "What it cannot do", "| 128 | 1 | passcode | 2 |"):
        assert part in card
    assert (folder / "loss.png").stat().st_size > 1000
    assert Tokenizer.load(folder).vocab_size == load(folder).config.vocab_size


def test_the_twin_differs_in_the_rotation_alone(toy):
    plain = train.Trainer(toy)
    toy.rope = True
    twin = train.Trainer(toy)
    assert not plain.model_config.rotated
    assert twin.model_config.rotated
    assert train.dataclasses.replace(twin.model_config, mla_use_nope=True) == plain.model_config
    for a, b in zip(plain.batch(3), twin.batch(3), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(jax.tree.leaves(plain.init()), jax.tree.leaves(twin.init()), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_gqa_twin_differs_in_the_attention_alone(toy):
    toy.model.num_hidden_layers = 2
    toy.model.linear_attn_config.update(kda_layers=(1,), full_attn_layers=(2,))
    plain = train.Trainer(toy)
    toy.attention = "gqa"
    twin = train.Trainer(toy)
    assert twin.model_config.grouped and not twin.model_config.rotated
    for a, b in zip(plain.batch(3), twin.batch(3), strict=True):
        np.testing.assert_array_equal(a, b)
    start, other = (dict(train.nnx.to_flat_state(trainer.init().params)) for trainer in (plain, twin))
    for path, leaf in start.items():
        if path[:3] != ("layers", 1, "self_attn"):
            np.testing.assert_array_equal(leaf[...], other.pop(path)[...])
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert set(other) == {("layers", 1, "self_attn", name) for name in names}
    np.testing.assert_allclose(other["layers", 1, "self_attn", "o_proj"][...].std(), 0.35 / 8, rtol=0.1)


@pytest.mark.parametrize("attention, rope, match", [("linear", False, "mla or gqa"), ("gqa", True, "rope=True")])
def test_attention_that_is_not_there_is_named(toy, attention, rope, match):
    toy.attention, toy.rope = attention, rope
    with pytest.raises(runner.UserError, match=match):
        train.Trainer(toy)


def test_batches_follow_the_phases(toy):
    toy.phases = ((64, 2, 4, 1.0), (96, 1, STEPS - 4, 0.5))
    trainer = train.Trainer(toy)
    assert trainer.batch(3)[0].shape == (2, 65)
    assert trainer.batch(4)[0].shape == (1, 97)
    assert not np.array_equal(trainer.batch(2)[0], trainer.batch(3)[0])
    with pytest.raises(ValueError, match="step"):
        trainer.batch(STEPS)


def test_loss_weights_and_its_parts_by_hand():
    logits = jnp.log(jnp.array([[[0.5, 0.5], [0.25, 0.75], [0.1, 0.9]]]))
    loss, seen = train.weighted_nll(logits, jnp.array([[0, 0, 1]]), jnp.array([[0.1, 1.0, 0.1]]))
    a, b, c = np.log(2), np.log(4), -np.log(0.9)
    np.testing.assert_allclose(loss, (0.1 * a + b + 0.1 * c) / 1.2, rtol=1e-6)
    np.testing.assert_allclose(seen["answer"], b, rtol=1e-6)
    np.testing.assert_allclose(seen["text"], (a + c) / 2, rtol=1e-6)


def test_the_check_reads_the_answer_where_it_is(toy):
    trainer = train.Trainer(toy)
    state = trainer.init()
    trial = train.needles.trial(trainer.prose, 0, prefix=128, split="validation")
    nll, exact = trainer._trial(state, trial)
    forward = jax.jit(lambda params, ids: train.nnx.merge(trainer.graph, params)(ids))
    logits = forward(state.params, trial.ids[None])[0, -6:-1]
    expected = -jax.nn.log_softmax(logits)[jnp.arange(5), trial.answer].sum()
    np.testing.assert_allclose(nll, expected, rtol=1e-5)
    assert exact == bool((logits.argmax(-1) == trial.answer).all())


def test_a_loss_that_is_not_finite_stops_the_run():
    seen = {"loss": jnp.array(1.0), "gradient": jnp.array(jnp.nan)}
    with pytest.raises(runner.UserError, match="--config.rate"):
        train.check_finite(3, {name: float(value) for name, value in seen.items()})
    train.check_finite(3, {"loss": 1.0})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"warmup": 99}, "warmup=99"),
        ({"tokenizer": "nowhere"}, "nowhere"),
        ({"text": "nowhere.txt"}, "nowhere.txt"),
        ({"phases": ((20, 2, STEPS, 1.0),)}, "length=21"),
        ({"checks": ((128, 1, "riddle"),)}, "riddle"),
        ({"final_checks": ((128, 30, "passcode"),)}, "needles=30"),
        ({"checkpoint": "/dev/null/folder"}, "the folder /dev/null/folder .*--config.checkpoint"),
        ({"warmup": 0}, "warmup=0"),
        ({"save_every": 0}, "save_every=0"),
        ({"log_every": -1}, "log_every=-1"),
        ({"check_every": 0}, "check_every=0"),
        ({"check_trials": 0}, "check_trials=0"),
        ({"final_trials": 0}, "final_trials=0"),
        ({"seed": -1}, "seed=-1"),
        ({"rate": -1.0}, "rate=-1.0 has to be a number above 0"),
        ({"rate": float("nan")}, "rate=nan"),
        ({"clip": 0.0}, "clip=0.0"),
        ({"b2": 1.0}, "b2=1.0 has to lie in 0..1"),
        ({"decay": -0.1}, "decay=-0.1 has to be a number of at least 0"),
        ({"final": 1.5}, "final=1.5 has to lie in 0..1"),
        ({"text_weight": -1.0}, "text_weight=-1.0"),
        ({"embedding": 0.0}, "embedding=0.0"),
        ({"needles": (5, 2)}, r"needles=\(5, 2\)"),
        ({"phases": ()}, "phases="),
        ({"phases": ((64, 2, 0, 1.0),)}, r"phases holds \(64, 2, 0, 1.0\)"),
        ({"phases": ((64, 0, STEPS, 1.0),)}, "phases holds"),
        ({"phases": ((64, 2, STEPS),)}, "phases holds"),
        ({"phases": ((64, 2, STEPS, 1.5),)}, "share in 0..1"),
        ({"phases": (64, 2, STEPS, 1.0)}, "phases holds 64"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_sentence_before_it_starts(toy, change, message):
    toy.update(change)
    with pytest.raises(runner.UserError, match=message):
        train.Trainer(toy)


def test_the_committed_model_still_answers(repository):
    folder = repository / "vestige_jax" / "checkpoints" / "tiny_nope"
    graph, params = train.nnx.split(load(folder))
    prose = train.needles.Prose(train.corpus.load(), Tokenizer.load(folder))
    read = jax.jit(lambda ids, start: train.answer_nll(graph, params, ids, start))
    for index in range(4):
        trial = train.needles.trial(prose, index, prefix=704, split="validation")
        nll, exact = read(np.pad(trial.ids, (0, 768 - len(trial.ids)))[None], 704 + len(trial.question))
        assert nll < 0.1
        assert exact
