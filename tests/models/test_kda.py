"""Kimi Delta Attention against a float64 recurrence written from the equations, with K != V throughout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vestige_jax import models
from vestige_jax.models import kda

B, H, K, V = 2, 3, 8, 5


def naive(q, k, v, g, beta, memory):
    """One head, one token at a time, float64: decay, delta against the decayed state, update, read."""
    out = np.zeros(v.shape)
    memory = np.array(memory, np.float64)
    for b, t, h in np.ndindex(*v.shape[:3]):
        state = np.exp(g[b, t, h])[:, None] * memory[b, h]
        error = beta[b, t, h] * (v[b, t, h] - state.T @ k[b, t, h])
        memory[b, h] = state + np.outer(k[b, t, h], error)
        out[b, t, h] = memory[b, h].T @ q[b, t, h]
    return out, memory


def draw(time, seed=0, fastest=1.0):
    """Unit keys, gates in [-fastest, 0], a memory that is not empty."""
    rng = np.random.default_rng(seed)
    q, k = (rng.normal(size=(B, time, H, K)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    g = -fastest * rng.uniform(size=(B, time, H, K))
    beta, v = rng.uniform(size=(B, time, H)), rng.normal(size=(B, time, H, V))
    return q, k, v, g, beta, rng.normal(size=(B, H, K, V))


def float32(arrays):
    return [jnp.asarray(x, jnp.float32) for x in arrays]


chunked = jax.jit(kda.chunked, static_argnames="chunk")


@pytest.mark.parametrize("time", [1, 7, 8, 9, 20])
def test_chunked_equals_the_recurrence(time):
    """Whole and partial chunks, from a memory that is not empty, keys and values of different widths."""
    arrays = draw(time)
    for actual, expected in zip(chunked(*float32(arrays), chunk=8), naive(*arrays), strict=True):
        np.testing.assert_allclose(actual, expected, atol=3e-6)


def test_one_token_equals_the_recurrence():
    """A transposed state would not even have the right shape."""
    q, k, v, g, beta, memory = draw(1)
    out, after = kda.recur(*float32([q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], memory]))
    expected, expected_after = naive(q, k, v, g, beta, memory)
    np.testing.assert_allclose(out, expected[:, 0], atol=1e-6)
    np.testing.assert_allclose(after, expected_after, atol=1e-6)


def test_one_step_by_hand():
    """S = [[2], [4]], decay 1/2, k = (1, 0), v = 3, beta 1/2: the delta is (3 - 1) / 2 = 1, read by q = (1, 1)."""
    memory = jnp.array([[[[2.0], [4.0]]]])
    q, k, g = jnp.array([[[1.0, 1.0]]]), jnp.array([[[1.0, 0.0]]]), jnp.log(jnp.full((1, 1, 2), 0.5))
    out, after = kda.recur(q, k, jnp.array([[[3.0]]]), g, jnp.array([[0.5]]), memory)
    np.testing.assert_allclose(after, [[[[2.0], [2.0]]]], rtol=1e-6)
    np.testing.assert_allclose(out, [[[4.0]]], rtol=1e-6)


def test_fastest_decay_does_not_overflow():
    """A = 16, softplus up to 3, chunk 64: exp(-G) alone would reach e^3000; values and gradients stay finite."""
    arrays = draw(64, fastest=48.0)
    out, memory = chunked(*float32(arrays), chunk=64)
    expected, expected_memory = naive(*arrays)
    # A sum over 64 tokens reaches -1500 here: decays taken as differences of such sums would be off by 1e-4.
    np.testing.assert_allclose(out, expected, atol=3e-6)
    np.testing.assert_allclose(memory, expected_memory, atol=3e-6)
    short = float32([*(x[:, :16] for x in arrays[:5]), arrays[5]])
    grads = jax.jit(jax.grad(lambda *a: jnp.sum(kda.chunked(*a)[0] ** 2), argnums=range(6)))(*short)
    assert all(np.isfinite(grad).all() for grad in grads)


def test_repeated_keys_keep_their_digits():
    """The same key 64 times with beta 1 and no decay: I + A is all ones below the diagonal, whose powers explode."""
    q, k, v, g, beta, memory = draw(64)
    arrays = (q, np.broadcast_to(k[:, :1], k.shape), v, np.zeros_like(g), np.ones_like(beta), memory)
    out, _ = chunked(*float32(arrays), chunk=64)
    np.testing.assert_allclose(out, naive(*arrays)[0], atol=2e-5)


def test_padding_leaves_the_memory():
    """g = 0 and beta = 0 is how padding is passed."""
    q, k, v, g, beta, memory = draw(40)
    padded = (q, k, v, np.where(np.arange(40)[:, None, None] < 9, g, 0), np.where(np.arange(40)[:, None] < 9, beta, 0))
    _, after = chunked(*float32([*padded, memory]), chunk=16)
    _, expected = naive(*(x[:, :9] for x in (q, k, v, g, beta)), memory)
    np.testing.assert_allclose(after, expected, atol=3e-6)


def test_chunks_carry_gradients_like_the_recurrence():
    """Gradients with respect to every argument equal those through the token-by-token scan."""
    arrays = float32(draw(40))

    def scanned(q, k, v, g, beta, memory):
        def one(memory, token):
            out, memory = kda.recur(*token, memory)
            return memory, out

        tokens = tuple(jnp.swapaxes(x, 0, 1) for x in (q, k, v, g, beta))
        return jnp.swapaxes(jax.lax.scan(one, memory, tokens)[1], 0, 1)

    def loss(f):
        return jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), argnums=range(6)))

    pairs = zip(loss(lambda *a: kda.chunked(*a)[0])(*arrays), loss(scanned)(*arrays), strict=True)
    for actual, expected in pairs:
        np.testing.assert_allclose(actual, expected, atol=2e-5)


def test_last_convolution_tap_multiplies_the_current_token():
    padded = jnp.arange(1.0, 7.0).reshape(1, 6, 1, 1, 1)  # three earlier tokens 1 2 3, then 4 5 6
    taps = jnp.array([1000.0, 100.0, 10.0, 1.0]).reshape(4, 1, 1, 1)
    np.testing.assert_array_equal(kda._convolve(padded, taps).ravel(), [1234, 2345, 3456])


def test_window_is_counted_from_each_length():
    padded = jnp.arange(12.0).reshape(2, 6, 1, 1, 1)
    window = kda._tail(padded, 3, jnp.array([0, 2]))
    np.testing.assert_array_equal(window[..., 0, 0, 0], [[0, 1, 2], [8, 9, 10]])


@pytest.fixture(scope="module")
def layer(kimi):
    return kimi.layers[0].self_attn


def test_gates_have_no_lower_bound_and_use_softplus(layer):
    """g = -exp(A_log) softplus(.): a large input decays without limit (other models clamp it); beta = sigmoid(.)."""
    x = jnp.ones((1, 48)) * 1e4 * jnp.sign(layer.f_a_proj[...] @ layer.f_b_proj[...][:, 0, 0])
    g, beta = layer._gates(x)
    raw = np.einsum("bd,dk,khj->bhj", x, layer.f_a_proj[...], layer.f_b_proj[...]).astype(np.float64)
    expected = -np.exp(layer.A_log[...])[:, None] * np.logaddexp(0, raw + layer.dt_bias[...])
    np.testing.assert_allclose(g, expected, rtol=1e-4, atol=1e-4)
    assert g.min() < -1000
    np.testing.assert_allclose(beta, 0.5 + 0.5 * np.tanh(np.asarray(x @ layer.b_proj[...]) / 2), atol=1e-6)


def test_decay_parameters_and_gates_stay_float32_under_bfloat16(golden):
    """A_log, dt_bias, beta and the memory: each sits in an exponential or accumulates over the whole context."""
    low = models.load(golden / "kimi_tiny", dtype=jnp.bfloat16).layers[0].self_attn
    assert low.A_log.dtype == low.dt_bias.dtype == jnp.float32
    assert low.q_proj.dtype == low.o_norm.dtype == jnp.bfloat16
    g, beta = low._gates(jnp.ones((1, 48), jnp.bfloat16))
    assert g.dtype == beta.dtype == jnp.float32
    assert low.init_state(1).memory.dtype == jnp.float32


def test_long_decode_does_not_drift():
    """2,000 tokens of slow decay: float32 keeps the float64 answer; beta or g rounded to bfloat16 would not."""
    q, k, v, g, beta, memory = (x[:1] for x in draw(2000, fastest=0.002))
    expected, _ = naive(q, k, v, g, beta, memory)

    @jax.jit
    def run(q, k, v, g, beta, memory):
        def one(memory, token):
            out, memory = kda.recur(*token, memory)
            return memory, out

        return jax.lax.scan(one, memory, tuple(jnp.swapaxes(x, 0, 1) for x in (q, k, v, g, beta)))[1]

    def drift(g, beta):
        out = run(*float32([q, k, v, g, beta, memory]))
        return np.abs(np.swapaxes(out, 0, 1) - expected)[:, -100:].max()

    rounded = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in (g, beta)]
    exact = drift(g, beta)
    assert exact < 1e-4
    assert drift(g, rounded[1]) > 10 * exact and drift(rounded[0], beta) > 10 * exact


def test_layer_decodes_what_it_prefills(layer):
    """The layer itself, one token at a time against all at once: window and memory."""
    x = jax.random.normal(jax.random.key(0), (1, 9, 48))
    whole, end = jax.jit(lambda x, s: layer.prefill(x, s))(x, layer.init_state(1))
    state, step = layer.init_state(1), jax.jit(lambda x, s: layer.decode(x, s))
    for t in range(9):
        out, state = step(x[:, t], state)
        np.testing.assert_allclose(out, whole[:, t], atol=1e-5)
    np.testing.assert_allclose(state.memory, end.memory, atol=1e-5)
    np.testing.assert_allclose(state.window, end.window, atol=1e-6)


def test_fresh_decay_parameters_are_in_range():
    config = models.ModelConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, kv_lora_rank=4,
        qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, full_attn_layers=(), kda_num_heads=64, kda_head_dim=16,
    )  # fmt: skip
    fresh = kda.KDA(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    rate, step = np.exp(fresh.A_log[...]), np.logaddexp(0, fresh.dt_bias[...])
    assert 1 <= rate.min() < 2 and 14 < rate.max() <= 16
    assert 1e-3 * 0.999 <= step.min() < 2e-3 and 0.07 < step.max() <= 0.1 * 1.001
