"""A step on kernels is a step in plain XLA; on a TPU with rows padded to whole tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vestige_jax as vj
from tests.kernels.backends import running

SPEC = dict(block=64, rank=8, budget=8, fetch=64, dtype=jnp.bfloat16, sketch_dtype=jnp.bfloat16)
LENGTHS = np.array([140, 200])


def serve(implementation):
    """Append two prompts, calibrate, and decode two tokens: the outputs, the statistics and the cache."""
    spec = vj.CacheSpec(32, 16, 4, 48**-0.5, 256, implementation=implementation, **SPEC)
    draw = np.random.default_rng(0)
    rows, queries = draw.normal(size=(2, 200, 48)), draw.normal(size=(2, 66, 4, 48))
    cache = vj.append(spec, vj.init(spec, 2), jnp.asarray(rows), jnp.asarray(LENGTHS))
    positions = jnp.asarray(LENGTHS)[:, None] - 64 + jnp.arange(64)
    cache = vj.calibrate(spec, cache, jnp.asarray(2 * queries[:, :64]), positions)
    outputs = []
    for i in (64, 65):
        out, stats, cache = vj.step(spec, cache, jnp.asarray(2 * queries[:, i]), jnp.asarray(rows[:, i]))
        outputs.append((out, stats))
    return jax.device_get((outputs, cache))


@pytest.mark.slow
@pytest.mark.parametrize("backend, width", [("mosaic_tpu", 128), ("mosaic_gpu", 48)])
def test_a_step_on_kernels_is_a_step_on_a_cpu(backend, width, monkeypatch):
    expected, plain = serve("xla")
    with running(backend, monkeypatch):
        outputs, cache = serve(backend)
    assert cache.archive.words.shape[2] == width and plain.archive.words.shape[2] == 48
    for part in ("tail", "tier1", "archive"):
        words = np.asarray(getattr(cache, part).words)
        np.testing.assert_array_equal(words[..., :48], getattr(plain, part).words, err_msg=part)
        assert not words[..., 48:].any()
    fetched = 0
    for (out, stats), (want, wanted) in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-4)
        for name in ("kept", "fired", "fetched", "overflowed", "clamped"):
            np.testing.assert_array_equal(getattr(stats, name), getattr(wanted, name), err_msg=name)
        fetched += wanted.fetched.sum()
    assert fetched > 0  # else this test shows nothing of tier 2
