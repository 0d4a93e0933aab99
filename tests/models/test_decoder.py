"""The decoder against golden logits: dense, prefill in chunks, token by token; padding, states, precision."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vestige_jax as vk
from vestige_jax import models
from vestige_jax.models.cached import MLAState

TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def prefill(kimi, spec):
    """Compiled prefill of `kimi`: (ids, state, lengths) -> (all logits, state)."""
    return jax.jit(lambda ids, state, lengths=None: kimi.prefill(spec, ids, state, lengths))


@pytest.fixture(scope="module")
def decode(kimi, spec):
    """Compiled decode of `kimi`."""
    return jax.jit(functools.partial(kimi.decode, spec))


@pytest.fixture(scope="module")
def halfway(kimi, spec, ids, prefill):
    """State after 40 tokens."""
    return prefill(ids, kimi.init_state(spec, 2), jnp.array([40, 40]))[1]


def close(actual, expected, tolerance=TOLERANCE):
    np.testing.assert_allclose(np.asarray(actual, np.float32), expected, atol=tolerance, rtol=0)


def test_dense_forward_equals_golden(kimi, ids, reference):
    """Hidden states after every block (the reference norms the last one) and logits."""
    stream = jax.jit(kimi.hidden)(ids)
    for i in range(3):
        close(stream[i], reference[f"h{i}"])
    close(kimi.norm(stream[3]), reference["h3"])
    close(kimi._logits(stream[3]), reference["logits"])


def check_split(kimi, spec, ids, reference, split, run):
    first, state = run(ids[:, :split], kimi.init_state(spec, 2))
    second, state = run(ids[:, split:], state)
    close(jnp.concatenate([first, second], axis=1), reference["logits"])
    np.testing.assert_array_equal(state.length, [83, 83])


@pytest.mark.parametrize("split", [1, 3, 40, 63, 64, 65])
def test_prefill_in_two_padded_chunks_equals_golden(kimi, spec, ids, reference, prefill, split):
    """Both chunks padded to the full length: one program serves all splits."""

    def run(part, state):
        count = part.shape[1]
        logits, state = prefill(jnp.pad(part, ((0, 0), (0, 83 - count))), state, jnp.full((2,), count))
        return logits[:, :count], state

    check_split(kimi, spec, ids, reference, split, run)


@pytest.mark.slow
@pytest.mark.parametrize("split", [1, 3, 40, 63, 64, 65])
def test_prefill_in_two_chunks_equals_golden(kimi, spec, ids, reference, prefill, split):
    """The same with chunks of exactly these shapes."""
    check_split(kimi, spec, ids, reference, split, prefill)


def test_token_by_token_decode_equals_golden(kimi, spec, ids, reference, decode):
    state, out = kimi.init_state(spec, 2), []
    for i in range(ids.shape[1]):
        logits, state, _ = decode(ids[:, i], state)
        out.append(logits)
    close(jnp.stack(out, axis=1), reference["logits"])


def test_prefill_then_decode_equals_golden(ids, reference, decode, halfway):
    """The recurrent memory that prefill leaves is the one decode reads (a transposed one is not)."""
    state = halfway
    for i in range(40, 48):
        logits, state, _ = decode(ids[:, i], state)
        close(logits, reference["logits"][:, i])


def test_last_logits_are_those_of_the_last_real_token(kimi, spec, ids, reference):
    run = jax.jit(lambda ids, state, lengths: kimi.prefill(spec, ids, state, lengths, "last")[0])
    logits = run(ids[:, :40], kimi.init_state(spec, 2), jnp.array([40, 7]))
    close(logits[0], reference["logits"][0, 39])
    close(logits[1], reference["logits"][1, 6])


def test_logits_none_computes_no_logits(kimi, spec, ids):
    text = str(jax.make_jaxpr(lambda i, s: kimi.prefill(spec, i, s, logits="none"))(ids, kimi.init_state(spec, 2)))
    shown = str(jax.make_jaxpr(lambda i, s: kimi.prefill(spec, i, s, logits="last"))(ids, kimi.init_state(spec, 2)))
    assert "f32[2,83,128]" not in text and "f32[2,128]" not in text
    assert "f32[2,83,128]" not in shown and "f32[2,128]" in shown


def test_padded_batch_equals_single_runs(kimi, spec, ids, reference, prefill, decode):
    """Mixed lengths, garbage in the padding, a sequence that is empty at first: each is as if it ran alone."""
    lengths = jnp.array([83, 21])
    garbage = jnp.where(jnp.arange(83) < lengths[:, None], ids, 127)
    logits, state = prefill(garbage, kimi.init_state(spec, 2), lengths)
    close(logits[0], reference["logits"][0])
    close(logits[1, :21], reference["logits"][1, :21])
    rows = state.caches[0].archive.rows, state.caches[0].tail.rows
    np.testing.assert_array_equal(state.length, lengths)
    assert np.all(np.asarray(rows[0][1, 16:]) == 0), "a padding row reached the archive"
    for i in range(21, 24):
        logits, state, stats = decode(jnp.array([0, ids[1, i]]), state, jnp.array([False, True]))
        close(logits[1], reference["logits"][1, i])
    np.testing.assert_array_equal(state.length, [83, 24])


def test_padding_counts_at_batch_one(kimi, spec, ids, reference, prefill, decode):
    """A mask skipped for a single sequence would let the padding into every state."""
    first, state = prefill(jnp.where(jnp.arange(83) < 5, ids[:1], 3), kimi.init_state(spec, 1), jnp.array([5]))
    close(first[0, :5], reference["logits"][0, :5])
    logits, state, _ = decode(ids[:1, 5], state)
    close(logits[0], reference["logits"][0, 5])


def test_chunk_of_length_zero_changes_nothing(kimi, spec, ids, prefill, halfway):
    _, state = prefill(ids, halfway, jnp.zeros((2,), jnp.int32))
    same = jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b, equal_nan=True)), halfway, state)
    assert all(jax.tree.leaves(same))


def test_inactive_sequence_keeps_its_state(ids, decode, halfway):
    _, state, _ = decode(ids[:, 40], halfway, jnp.array([False, True]))
    for before, after in zip(jax.tree.leaves(halfway), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(before[0], after[0])
    assert not np.array_equal(halfway.layers[0].memory[1], state.layers[0].memory[1])
    assert not np.array_equal(halfway.layers[0].window[1], state.layers[0].window[1])


def test_prompt_queries_are_the_last_64_real_ones(kimi, spec, ids, prefill):
    """Their positions, per sequence, and their rows whatever the chunking."""
    lengths = jnp.array([83, 30])
    _, whole = prefill(ids, kimi.init_state(spec, 2), lengths)
    _, first = prefill(ids, kimi.init_state(spec, 2), jnp.minimum(lengths, 40))
    rest = jnp.pad(ids[:, 40:], ((0, 0), (0, 40)))
    _, parts = prefill(rest, first, jnp.maximum(lengths - 40, 0))
    for state in (whole, parts):
        mla = state.layers[2]
        np.testing.assert_array_equal(mla.positions[0], np.arange(19, 83))
        np.testing.assert_array_equal(mla.positions[1], [-1] * 34 + list(range(30)))
        np.testing.assert_array_equal(mla.queries[1, :34], 0)
    close(parts.layers[2].queries, whole.layers[2].queries, 2e-5)
    assert np.abs(whole.layers[2].queries[1, 34:]).min(axis=(1, 2)).max() > 0


def test_observed_mass_sums_to_queries_times_heads(kimi, spec, ids):
    """Every real query of every head spends weight 1, and only on positions that are there."""
    lengths = jnp.array([40, 25])
    run = jax.jit(lambda ids, state, lengths: kimi.prefill(spec, ids, state, lengths, "none")[1])
    state = kimi.init_state(spec, 2, observe=True)
    state = run(ids[:, :20], state, jnp.minimum(lengths, 20))
    state = run(ids[:, 20:40], state, lengths - 20)
    mass = state.layers[2].seen.mass
    np.testing.assert_allclose(mass.sum(1), lengths * spec.num_heads, rtol=1e-5)
    assert mass[0, 39] > 0 and np.all(mass[0, 40:] == 0) and np.all(mass[1, 25:] == 0)


def test_forked_states_go_on_independently(kimi, spec, ids, reference, decode, halfway):
    """All of a fork is copied, memory and convolution window too."""
    both = models.fork(spec, halfway, jnp.array([1, 1]))
    logits, both, _ = decode(jnp.array([ids[1, 40], 5]), both)
    close(logits[0], reference["logits"][1, 40])
    logits, _, _ = decode(jnp.array([ids[1, 41], 5]), both)
    close(logits[0], reference["logits"][1, 41])
    assert np.abs(logits[1] - logits[0]).max() > 0.01


def test_put_take_and_reset_move_whole_sequences(kimi, spec, ids, reference, decode, halfway):
    """A slot is reused: cleared, it starts from nothing; refilled, it goes on where the sequence was."""
    single = models.take(spec, halfway, 1)
    cleared = models.reset(spec, halfway, 1)
    logits, cleared, _ = decode(jnp.array([ids[0, 40], ids[1, 0]]), cleared)
    close(logits[0], reference["logits"][0, 40])
    close(logits[1], reference["logits"][1, 0])
    back = models.put(spec, cleared, 1, single)
    np.testing.assert_array_equal(back.length, [41, 40])
    logits, _, _ = decode(jnp.array([ids[0, 41], ids[1, 40]]), back)
    close(logits[0], reference["logits"][0, 41])
    close(logits[1], reference["logits"][1, 40])


def test_reset_equals_init(kimi, spec, halfway):
    """Nothing of the old sequence stays: prompt queries, their positions, the window."""
    cleared = models.reset(spec, models.reset(spec, halfway, 0), 1)
    for before, after in zip(jax.tree.leaves(kimi.init_state(spec, 2)), jax.tree.leaves(cleared), strict=True):
        np.testing.assert_array_equal(before, after)


def test_wrong_ids_and_specs_are_refused(kimi, spec):
    with pytest.raises(ValueError, match=r"ids has shape \(3,\).*\[B, T\]"):
        kimi(jnp.zeros((3,), jnp.int32))
    with pytest.raises(ValueError, match="float32"):
        kimi(jnp.zeros((1, 3)))
    with pytest.raises(ValueError, match=r"\(1, 0\).*at least one"):
        kimi(jnp.zeros((1, 0), jnp.int32))
    with pytest.raises(ValueError, match="logits is 'lasst'"):
        kimi.prefill(spec, jnp.zeros((1, 3), jnp.int32), kimi.init_state(spec, 1), logits="lasst")
    other = models.ModelConfig(**{**vars(kimi.config), "kv_lora_rank": 32}).cache_spec(64, block=16, rank=8)
    with pytest.raises(ValueError, match=r"\(32, 8, 4, 0.2.*\(24, 8, 4, 0.2"):
        kimi.init_state(other, 1)


def test_id_outside_the_table_is_not_read_as_another(kimi):
    start = jax.jit(lambda ids: kimi.hidden(ids)[0])(jnp.array([[1, 128]]))
    assert np.isfinite(start[0, 0]).all() and np.isnan(start[0, 1]).all()


def test_model_without_mla_has_no_stats(kimi, spec):
    config = models.ModelConfig(**{**vars(kimi.config), "full_attn_layers": (), "num_hidden_layers": 1})
    model = models.Decoder(config, rngs=nnx.Rngs(0))
    prefill = jax.jit(lambda ids, state: model.prefill(spec, ids, state, logits="last"))
    logits, state = prefill(jnp.array([[1, 2, 3]]), model.init_state(spec, 1))
    again, _, stats = jax.jit(functools.partial(model.decode, spec))(jnp.array([4]), state)
    assert stats is None and state.caches == () and again.shape == logits.shape == (1, 128)
    close(again[0], jax.jit(model)(jnp.array([[1, 2, 3, 4]]))[0, 3])


def test_calibrate_reaches_every_mla_layer(kimi, spec, halfway):
    state = jax.jit(functools.partial(kimi.calibrate, spec))(halfway)
    basis = state.layers[2].cache.index.basis
    assert isinstance(state.layers[2], MLAState)
    assert np.abs(basis - np.eye(24, 8)).max() > 0.1


def test_bfloat16_stays_near_float32(golden, ids, reference):
    """Weights and activations in bfloat16, softmax, norms, gates and logits in float32."""
    low = models.load(golden / "kimi_tiny", dtype=jnp.bfloat16)
    assert low.layers[0].self_attn.q_proj.dtype == jnp.bfloat16
    rough = jax.jit(lambda ids: low.hidden(ids)[1])(ids)
    assert rough.dtype == jnp.bfloat16
    close(rough, reference["h1"], 0.08)
    assert jax.eval_shape(low, ids).dtype == jnp.float32


def test_gradients_are_finite_and_reach_every_parameter(kimi):
    graph, weights = nnx.split(kimi)
    ids = jnp.array([[1, 5, 9, 5, 5, 5, 7, 7]])
    grads = jax.jit(jax.grad(lambda w: jnp.sum(nnx.merge(graph, w)(ids) ** 2)))(weights)
    for where, grad in nnx.to_flat_state(grads):
        assert np.isfinite(grad[...]).all(), where
        # The router's bias moves a choice, which has no gradient.
        assert where[-1] == "e_score_correction_bias" or np.abs(grad[...]).max() > 0, where


def test_a_rotated_model_refuses_a_spec_that_does_not_allow_it(kimi):
    config = dataclasses.replace(kimi.config, mla_use_nope=False)
    twin = nnx.eval_shape(lambda: models.Decoder(config, rngs=nnx.Rngs(0)))
    by_hand = vk.CacheSpec(24, 8, 4, config.softmax_scale, 64, block=16, rank=8)
    with pytest.raises(ValueError, match="rotated.*allow_rope=True"):
        twin.init_state(by_hand, 1)
    twin.init_state(config.cache_spec(64, allow_rope=True, block=16, rank=8), 1)
