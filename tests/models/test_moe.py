"""Router and experts: the bias only chooses, and sorting tokens into expert blocks changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vestige_jax.models import moe

SCORES = jnp.array([[0.6, 0.5, 0.4, 0.1]])
BIAS = jnp.array([0.0, 0.0, 0.3, 0.0])


def test_bias_chooses_but_does_not_weigh():
    """Biased scores .6 .5 .7 .1 choose experts 2 and 0; their own scores .4 and .6 weigh, times 2.446."""
    weights, experts = moe.route(SCORES, BIAS, 2, renormalize=True, scaling=2.446)
    np.testing.assert_array_equal(experts, [[2, 0]])
    np.testing.assert_allclose(weights, [[0.4 * 2.446, 0.6 * 2.446]], rtol=1e-6)


def test_parity_flag_reproduces_the_aliasing_of_the_original_code():
    weights, experts = moe.route(SCORES, BIAS, 2, renormalize=True, scaling=1.0, biased=True)
    np.testing.assert_array_equal(experts, [[2, 0]])
    np.testing.assert_allclose(weights, [[0.7 / 1.3, 0.6 / 1.3]], rtol=1e-6)


def test_parity_flag_is_off_by_default(kimi):
    assert kimi.config.biased_router_weights is False and kimi.layers[1].block_sparse_moe.biased is False


def test_weights_without_renormalisation():
    weights, _ = moe.route(SCORES, BIAS, 2, renormalize=False, scaling=2.0)
    np.testing.assert_allclose(weights, [[0.8, 1.2]], rtol=1e-6)


def reference(x, experts, w1, w2, w3):
    """Every row through its own expert's kernels, gathered."""
    gate, up = np.einsum("nd,ndf->nf", x, w1[experts]), np.einsum("nd,ndf->nf", x, w3[experts])
    return np.einsum("nf,nfd->nd", gate / (1 + np.exp(-gate)) * up, w2[experts])


@pytest.mark.parametrize(
    "experts",
    [[0], [4], [0, 1, 2, 3, 4] * 8, [3] * 41, [4] * 8 + [0] * 8, [4] * 9 + [0] * 7, [2, 0, 2, 4, 0, 2, 2, 2, 2, 2, 2]],
    ids=["one", "one-last", "even", "all-in-one", "full-blocks", "block-and-one", "mixed"],
)
def test_blocks_of_rows_equal_gathered_kernels(experts):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(len(experts), 6)).astype(np.float32)
    w1, w2, w3 = (rng.normal(size=s).astype(np.float32) for s in ((5, 6, 7), (5, 7, 6), (5, 6, 7)))
    out = jax.jit(moe._grouped)(x, jnp.array(experts), w1, w2, w3)
    np.testing.assert_allclose(out, reference(x, np.array(experts), w1, w2, w3), atol=2e-5)


def test_memory_follows_rows_not_rows_times_experts():
    """256 experts, 512 rows: no intermediate as large as [experts, rows, width]."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 64), (256, 64, 32), (256, 32, 64), (256, 64, 32))]
    ids = jax.ShapeDtypeStruct((512,), jnp.int32)
    compiled = jax.jit(moe._grouped).lower(shapes[0], ids, *shapes[1:]).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 256 * 512 * 64 * 4 / 8


def test_a_token_does_not_see_its_neighbours(kimi):
    """Bit for bit: what makes padding and chunking harmless in the feed-forward part."""
    layer = kimi.layers[1].block_sparse_moe
    x = jax.random.normal(jax.random.key(0), (1, 12, 48))
    run = jax.jit(lambda x: layer(x))
    np.testing.assert_allclose(run(x)[:, :5], run(x.at[:, 5:].set(7.0))[:, :5], rtol=0, atol=0)
