import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import train_tiny
from experiments import runner, train
from vestige_jax.models import Tokenizer, load

STEPS = 6


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    words = "the cache keeps rows of a block and attends what can matter to a query ".split()
    rng = np.random.default_rng(0)
    for name in range(60):
        (folder / f"{name}.txt").write_text(" ".join(rng.choice(words, 300)))
    return folder


@pytest.fixture
def toy(text, tmp_path, repository):
    """A config that trains in seconds."""
    config = train_tiny.get_config()
    config.tokenizer = str(repository / config.tokenizer)
    config.checkpoint = str(tmp_path / "checkpoint")
    config.text = str(text)
    config.phases = ((64, 2, 4, 1.0), (96, 1, STEPS - 4, 0.5))
    config.warmup = 2
    config.log_every = config.save_every = 2
    config.check_every, config.check_lengths, config.check_trials = 4, (128,), 1
    config.final_lengths, config.final_trials = (128,), 2
    config.model.update(hidden_size=16, intermediate_size=16, num_hidden_layers=2, kv_lora_rank=8)
    config.model.linear_attn_config.update(kda_layers=(1,), full_attn_layers=(2,), num_heads=2, head_dim=8)
    return config


def weights(folder):
    return jax.tree.leaves(train.nnx.state(load(folder)))


def rows(out):
    lines = [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in lines]


def test_a_killed_run_ends_as_an_uninterrupted_one(toy, tmp_path, monkeypatch):
    train.main(toy, tmp_path / "whole")
    whole = weights(toy.checkpoint)

    class Killed(train.Trainer):
        def batch(self, step):
            if step == 5:  # one step after the last saved one
                raise KeyboardInterrupt
            return super().batch(step)

    monkeypatch.setattr(train, "Trainer", Killed)
    with pytest.raises(KeyboardInterrupt):
        train.main(toy, tmp_path / "cut")
    monkeypatch.undo()
    train.main(toy, tmp_path / "cut")
    for a, b in zip(whole, weights(toy.checkpoint), strict=True):
        np.testing.assert_array_equal(a, b)
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")


def test_the_checkpoint_says_what_it_is(toy, tmp_path):
    train.main(toy, tmp_path / "out")
    folder = tmp_path / "checkpoint"
    facts = json.loads((folder / "training.json").read_text())
    assert facts["command"].startswith("python -m experiments.train")
    assert facts["text_hash"] == train.corpus.load(toy.text).hash
    assert [row["prefix"] for row in facts["validation"]] == [128]
    card = (folder / "README.md").read_text()
    for part in (facts["text_hash"], facts["command"], "What it cannot do", "| 128 | 2 |"):
        assert part in card
    assert (folder / "loss.png").stat().st_size > 1000
    tokenizer = Tokenizer.load(folder)
    assert load(folder)(jnp.array([tokenizer.encode("some text")])).shape[-1] == tokenizer.vocab_size


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


def test_batches_follow_the_phases(toy):
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
    logits = trainer.model(state)(trial.ids[None])[0, -6:-1]
    expected = -jax.nn.log_softmax(logits)[jnp.arange(5), trial.answer].sum()
    np.testing.assert_allclose(nll, expected, rtol=1e-5)
    assert exact == bool((logits.argmax(-1) == trial.answer).all())


def test_training_lowers_the_loss(toy, tmp_path):
    toy.phases = ((64, 4, 40, 1.0),)
    toy.log_every = 1
    toy.rate = 1e-2
    toy.check_every = 1000
    train.main(toy, tmp_path / "out")
    losses = [row["loss"] for row in rows(tmp_path / "out") if row["kind"] == "train"]
    assert len(losses) == 40
    assert losses[0] > 6.5
    assert np.mean(losses[-5:]) < losses[0] - 2


def test_a_loss_that_is_not_finite_stops_the_run(toy, tmp_path):
    toy.rate = 1e30
    toy.log_every = 1
    with pytest.raises(runner.UserError, match="--config.rate"):
        train.main(toy, tmp_path / "out")
