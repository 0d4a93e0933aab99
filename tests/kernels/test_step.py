"""A step on kernels is a step in plain XLA; on a TPU with rows padded to whole tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vestige_jax as vj
from tests.kernels.backends import running, tracing_for

SPEC = dict(block=64, rank=8, budget=8, fetch=64, dtype=jnp.bfloat16, sketch_dtype=jnp.bfloat16)
LENGTHS = np.array([140, 200])


def serve(implementation, **changes):
    """Append two prompts, calibrate, and decode two tokens: the outputs, the statistics and the cache."""
    spec = vj.CacheSpec(32, 16, 4, 48**-0.5, 256, implementation=implementation, **SPEC | changes)
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


@pytest.mark.parametrize("changes, code", [({}, 24), ({"rank": 0}, 16), ({"sketch_dtype": jnp.float32}, 8)])
def test_a_cache_on_a_tpu_has_the_bytes_that_are_announced(changes, code):
    """Whole tiles of rows; the branch beside the sketch, where their dtypes agree."""
    spec = vj.CacheSpec(32, 16, 4, 48**-0.5, 256, **SPEC | changes)
    with tracing_for("tpu", "TPU v6 lite"):
        cache, sizes = jax.eval_shape(lambda: vj.init(spec, 2)), spec.nbytes(2)
    assert cache.archive.words.shape == (2, 256, 128) and cache.index.code.shape == (2, 256, code)
    assert sizes["total"] == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))


@pytest.mark.slow
@pytest.mark.parametrize("backend, width", [("mosaic_tpu", 128), ("mosaic_gpu", 48)])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_step_on_kernels_is_a_step_on_a_cpu(backend, width, bits, monkeypatch):
    """With the paper's index, and with a balanced one of few bits."""
    changes = {} if bits == 16 else {"index": "balanced", "index_bits": bits, "rank": 16}
    expected, plain = serve("xla", **changes)
    with running(backend, monkeypatch):
        outputs, cache = serve(backend, **changes)
    assert cache.archive.words.shape[2] == width and plain.archive.words.shape[2] == 48
    if bits == 16:
        assert (cache.index.code.shape[2] == 16 + 8) == (backend == "mosaic_tpu") and plain.index.code.shape[2] == 8
    else:
        np.testing.assert_array_equal(cache.index.code, plain.index.code)
        assert cache.index.code.dtype.itemsize * cache.index.code.shape[2] == 16 * bits // 8
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
