"""What every test of the contract shares: sizes, draws, and what counts as equal."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

BACKENDS = ("xla", "mosaic_tpu", "mosaic_gpu")
SIZES = {"kimi": (512, 64, 32), "16 heads": (512, 64, 16), "tiny": (32, 16, 4)}  # latent, branch, heads
DTYPES = (jnp.bfloat16, jnp.float32)
SLOTS = 600  # not a multiple of any block


def quick(fast, *axes):
    """All combinations of the axes, backend first and dtype last; those not in `fast` are slow.

    The GPU kernels have no float32 rows, and say so (see test_choice).
    """
    every = [c for c in itertools.product(*axes) if (c[0], c[-1]) != ("mosaic_gpu", jnp.float32)]
    return [pytest.param(*c, marks=() if c in fast else pytest.mark.slow) for c in every]


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def rows_and_query(size, dtype, slots=SLOTS, seed=0):
    """Rows [3, S, C] and queries [3, H, C] of a batch of three, the latent width, and the scale."""
    latent, branch, heads = SIZES[size]
    rows = normal(seed, 3, slots, latent + branch, dtype=dtype)
    return rows, normal(seed + 1, 3, heads, latent + branch, dtype=dtype), latent, (latent + branch) ** -0.5


def close(got, want, name):
    """Equal to float32 sums of a few hundred terms; infinities in the same places and nothing NaN."""
    got = np.asarray(got, np.float64)
    assert np.array_equal(np.isinf(got), np.isinf(want)), name
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5, err_msg=name)


def parts_close(got, want, work):
    for name, value, wanted in zip(got._fields, got, want, strict=True):
        close(value, wanted, f"{name}, {work}")


def same(first, second):
    """The same bits."""
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
