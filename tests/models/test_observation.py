"""Statistics of prompt queries, added up chunk by chunk, against numpy over all of them at once."""

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import vestige_jax as vk
from vestige_jax.models.observation import Chunk, Rereading, nothing_seen

SPEC = vk.CacheSpec(2, 1, 2, 0.5, 12, block=4, kappa=1, rank=1)
LENGTHS = (9, 4)


def chunks(size, mean=0.0):
    """Ragged prompts of LENGTHS in chunks of `size`, NaN where there is padding; and all queries and values."""
    rng = np.random.default_rng(0)
    queries, values = rng.normal(size=(2, 12, 2, 3)) + mean, rng.uniform(size=(2, 12, 2))
    real = np.arange(12) < np.array(LENGTHS)[:, None]
    padded = np.where(real[..., None, None], queries, np.nan)
    made = []
    for start in range(0, 12, size):
        part = slice(start, start + size)
        positions = jnp.asarray(np.tile(np.arange(12)[part], (2, 1)), jnp.int32)
        floats = [jnp.asarray(x, jnp.float32) for x in (padded[:, part], values[:, part], np.full((2, 12), 0.5))]
        made.append(Chunk(floats[0], positions, jnp.asarray(real[:, part]), *floats[1:]))
    return made, queries, values


@pytest.mark.parametrize("size", [3, 5, 12])
def test_moments_are_those_of_all_real_queries(size):
    made, queries, values = chunks(size)
    seen = nothing_seen(SPEC, 2)
    for chunk in made:
        seen = seen.after(chunk)
    assert seen.asked.tolist() == list(LENGTHS)
    for b, length in enumerate(LENGTHS):
        for h in range(2):
            asked = queries[b, :length, h]
            assert_allclose(seen.mean[b, h], asked.mean(0), atol=1e-6)
            assert_allclose(seen.covariance[b, h], np.cov(asked.T, bias=True), atol=1e-5)
        assert_allclose(seen.values[b, :length], values[b, :length], rtol=1e-6)
        assert_array_equal(seen.values[b, length:], 0)
    assert_allclose(seen.mass, 0.5 * len(made))


def test_a_covariance_does_not_drown_in_a_large_mean():
    # Squares of 1000 leave float32 some 0.1 of precision; the covariance is about 1.
    seen = nothing_seen(SPEC, 2)
    made, queries, _ = chunks(3, mean=1000.0)
    for chunk in made:
        seen = seen.after(chunk)
    assert_allclose(seen.covariance[0, 1], np.cov(queries[0, :9, 1].T, bias=True), atol=1e-3)


def test_nothing_asked_is_no_division_by_zero():
    seen = nothing_seen(SPEC, 2)
    assert_array_equal(seen.covariance, np.zeros((2, 2, 3, 3)))
    nobody = chunks(12)[0][0]._replace(real=jnp.zeros((2, 12), bool))
    assert_array_equal(seen.after(nobody).mean, np.zeros((2, 2, 3)))


def test_a_second_reading_keeps_the_largest_weight():
    chunk = chunks(12)[0][0]
    reader = Rereading(jnp.zeros((2, 12)))
    for weight in ([0.25] * 12, np.linspace(0, 1, 12)):
        reader = reader.after(chunk._replace(received=jnp.broadcast_to(jnp.asarray(weight, jnp.float32), (2, 12))))
    assert_allclose(reader.peak[0], np.maximum(0.25, np.linspace(0, 1, 12)), rtol=1e-6)
