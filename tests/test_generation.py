"""Serving loops on the golden checkpoint: chunked prefill, scoring, generation, their limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from vestige_jax import generation, models
from vestige_jax.generation import Sampler

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def model(golden):
    return models.load(golden / "kimi_tiny")


@pytest.fixture(scope="module")
def reference(golden):
    return load_file(golden / "kimi_tiny" / "reference.safetensors")


@pytest.fixture(scope="module")
def ids(reference):
    return jnp.asarray(reference["input_ids"], jnp.int32)


@pytest.fixture(scope="module")
def spec(model):
    """Every row is kept: results are those of dense attention."""
    return model.config.cache_spec(96, block=16, ratio=1.0, rank=8, fetch=64, dtype=jnp.float32)


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, atol=2e-4, rtol=0)


def test_prefill_gives_the_logits_after_each_prompt(model, spec, ids, reference):
    """Sequences that end in different chunks, padding behind them; one program for all chunks and lengths."""
    before = generation._prefill._cache_size()
    lengths = jnp.array([83, 40])
    logits, state = generation.prefill(model, spec, ids, lengths, chunk=32)
    close(logits[0], reference["logits"][0, 82])
    close(logits[1], reference["logits"][1, 39])
    np.testing.assert_array_equal(state.length, lengths)
    logits, _ = generation.prefill(model, spec, ids[:, :70], jnp.array([65, 1]), chunk=32)
    close(logits[0], reference["logits"][0, 64])
    close(logits[1], reference["logits"][1, 0])
    assert generation._prefill._cache_size() == before + 1


def test_prefill_continues_a_state(model, spec, ids, reference):
    _, state = generation.prefill(model, spec, ids[:, :31], chunk=32)
    logits, state = generation.prefill(model, spec, ids[:, 31:60], chunk=32, state=state)
    close(logits, reference["logits"][:, 59])
    np.testing.assert_array_equal(state.length, [60, 60])


def expected_logprobs(reference, ids, start):
    logprobs = np.asarray(jax.nn.log_softmax(reference["logits"]))[:, start:-1]
    return np.take_along_axis(logprobs, np.asarray(ids)[:, start + 1 :, None], axis=-1)[..., 0]


@pytest.fixture(scope="module")
def prompted(model, spec, ids):
    """State after 20 tokens, calibrated."""
    _, state = generation.prefill(model, spec, ids[:, :20], chunk=32)
    return generation.calibrate(model, spec, state)


def test_teacher_forcing_scores_every_token(model, spec, ids, reference, prompted):
    forced = generation.teacher_force(model, spec, prompted, ids[:, 20:])
    close(forced.logprob, expected_logprobs(reference, ids, 20))
    np.testing.assert_array_equal(forced.greedy, np.argmax(reference["logits"], -1)[:, 20:82])
    assert forced.stats.attended.shape == (62, 1, 2)
    np.testing.assert_allclose(forced.stats.attended, 1)
    np.testing.assert_array_equal(forced.state.length, [82, 82])


def test_teacher_forcing_stops_at_each_length(model, spec, ids, reference, prompted):
    """The shorter sequence is scored on its own tokens and writes nothing after them; the state can be used again."""
    for _ in range(2):
        forced = generation.teacher_force(model, spec, prompted, ids[:, 20:], jnp.array([63, 5]))
        close(forced.logprob[1, :4], expected_logprobs(reference, ids, 20)[1, :4])
        close(forced.logprob[0], expected_logprobs(reference, ids, 20)[0])
        np.testing.assert_array_equal(forced.state.length, [82, 24])


def greedy(model, prompt, steps):
    """Greedy continuation by dense forwards, padded to one shape."""
    forward, tokens = jax.jit(model), list(prompt)
    for _ in range(steps):
        padded = jnp.asarray([tokens + [0] * (40 - len(tokens))], jnp.int32)
        tokens.append(int(jnp.argmax(forward(padded)[0, len(tokens) - 1])))
    return tokens[len(prompt) :]


PROMPTS = [[5, 9, 17], list(range(30, 49))]


@pytest.fixture(scope="module")
def expected(model):
    return [greedy(model, prompt, 12) for prompt in PROMPTS]


def test_generation_equals_dense_greedy(model, spec, expected):
    """A batch of different lengths, each as if alone; stats for every step."""
    out = generation.generate(model, spec, PROMPTS, 12, eos=(), chunk=32)
    np.testing.assert_array_equal(out.tokens, expected)
    np.testing.assert_array_equal(out.lengths, [12, 12])
    np.testing.assert_array_equal(out.state.length, [15, 31])
    assert out.stats.kept.shape == (12, 1, 2)


def test_generation_stops_each_sequence_at_its_eos(model, spec, expected):
    """The end token is emitted, nothing after it is written, and the other sequence goes on."""
    stop = expected[0][3]
    first = expected[0].index(stop) + 1
    out = generation.generate(model, spec, PROMPTS, 12, eos=(stop,), chunk=32)
    other = expected[1].index(stop) + 1 if stop in expected[1] else 12
    np.testing.assert_array_equal(out.lengths, [first, other])
    np.testing.assert_array_equal(out.tokens[0, :first], expected[0][:first])
    np.testing.assert_array_equal(out.tokens[0, first:], -1)
    np.testing.assert_array_equal(out.tokens[1, :other], expected[1][:other])
    assert out.state.length[0] == 3 + first - 1


def test_generation_stops_on_the_eos_of_the_config(model, spec, monkeypatch):
    """Id 2 in this config; another id would have to be asked for."""
    asked, compiled = [], generation._generate
    monkeypatch.setattr(generation, "_generate", lambda *args: asked.append(args[3]) or compiled(*args))
    generation.generate(model, spec, PROMPTS, 12, chunk=32)
    assert asked[0][2] == model.config.eos_token_id == (2,)


def test_sampling_is_reproducible_and_follows_the_distribution():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    many = jnp.broadcast_to(logits, (4000, 4))

    def share(**options):
        draws = generation.sample(jax.random.key(0), many, Sampler(temperature=1.0, **options))
        return np.bincount(np.asarray(draws), minlength=4) / 4000

    np.testing.assert_allclose(share(), [0.5, 0.3, 0.15, 0.05], atol=0.03)
    np.testing.assert_allclose(share(top_k=2), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(share(top_p=0.6), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(share(top_p=0.5), [1, 0, 0, 0])
    np.testing.assert_array_equal(share(), share())
    assert generation.sample(jax.random.key(0), logits, Sampler()).tolist() == [0]


@pytest.mark.parametrize("options", [{"temperature": -1}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_bad_samplers_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Sampler(**options)


def test_bad_prompts_are_refused(model, spec, ids):
    with pytest.raises(ValueError, match=r"\[128\] are outside the vocabulary of 128"):
        generation.prefill(model, spec, jnp.array([[1, 128]]))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        generation.generate(model, spec, [[-1]], 2)
    for lengths in ([0, 3], [3, 84], [3], [[3, 3]]):
        with pytest.raises(ValueError, match=r"lengths=.*1\.\.83"):
            generation.prefill(model, spec, ids, jnp.array(lengths))
    with pytest.raises(ValueError, match="float32"):
        generation.prefill(model, spec, jnp.zeros((1, 3)))
    with pytest.raises(ValueError, match="chunk=0"):
        generation.prefill(model, spec, ids, chunk=0)
    with pytest.raises(ValueError, match="at least one token"):
        generation.pad([[1], []])
    with pytest.raises(ValueError, match="at least one token"):
        generation.generate(model, spec, [], 2)
    with pytest.raises(ValueError, match="steps=0"):
        generation.generate(model, spec, [[1]], 0)


def test_padding_may_hold_any_id(model, spec, ids, reference):
    """Only real tokens are checked against the vocabulary."""
    padded = jnp.where(jnp.arange(32) < 5, ids[:, :32], -100)
    logits, state = generation.prefill(model, spec, padded, jnp.array([5, 5]), chunk=32)
    clean, clean_state = generation.prefill(model, spec, ids[:, :32], jnp.array([5, 5]), chunk=32)
    np.testing.assert_array_equal(logits, clean)
    np.testing.assert_array_equal(state.length, clean_state.length)
    close(logits, reference["logits"][:, 4])


def test_full_cache_is_refused_before_anything_is_written(model, spec, ids, prompted):
    with pytest.raises(ValueError, match="capacity=96.*97"):
        generation.prefill(model, spec, jnp.ones((1, 97), jnp.int32))
    with pytest.raises(ValueError, match="capacity=96.*100"):
        generation.generate(model, spec, [[1, 2, 3]], 97)
    with pytest.raises(ValueError, match="capacity=96.*97"):
        generation.teacher_force(model, spec, prompted, jnp.ones((2, 78), jnp.int32))
    with pytest.raises(ValueError, match="capacity=96.*97"):
        generation.prefill(model, spec, jnp.ones((2, 77), jnp.int32), state=prompted)
    np.testing.assert_array_equal(prompted.length, [20, 20])  # and it was not donated
