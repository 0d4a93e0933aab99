"""The index: its basis against numpy, its entries and its prepared queries against their equations."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vestige_jax as vj
from tests import oracle_attention as oracle
from tests.scenes import SCALE, C, H, R, scene, small_spec
from tests.sources import random_rows
from vestige_jax import index

pytestmark = pytest.mark.usefixtures("quick_compilation")

fit_basis = jax.jit(vj.fit_basis, static_argnums=1)


def uneven_queries(seed, count=60):
    """Queries [count, R] whose variance differs by direction, around a mean."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(count, R)) * np.geomspace(4, 0.1, R) @ oracle_rotation(rng) + 3).astype(np.float32)


def oracle_rotation(rng):
    return np.linalg.qr(rng.normal(size=(R, R)))[0]


def projector(basis):
    basis = np.asarray(basis, np.float64)
    return basis @ basis.T


@pytest.mark.parametrize("rank", [0, 1, 5, R])
def test_the_basis_spans_the_top_eigenvectors_of_the_covariance(rank):
    queries = uneven_queries(0)
    basis = fit_basis(queries, rank)
    assert basis.shape == (R, rank) and basis.dtype == jnp.float32
    np.testing.assert_allclose(basis.T @ basis, np.eye(rank), atol=1e-5)
    np.testing.assert_allclose(projector(basis), projector(oracle.basis(queries, rank)), atol=1e-4)


def test_the_mean_of_the_queries_does_not_matter():
    queries = uneven_queries(1)
    moved = fit_basis(queries + 5, 5)
    np.testing.assert_allclose(projector(moved), projector(fit_basis(queries, 5)), atol=1e-3)


def test_masked_queries_are_left_out():
    queries, mask = uneven_queries(2), np.arange(60) % 3 > 0
    wild = np.where(mask[:, None], queries, 1e15).astype(np.float32)
    expected = projector(oracle.basis(queries[mask], 5))
    np.testing.assert_allclose(projector(fit_basis(wild, 5, mask)), expected, atol=1e-4)


def test_too_few_samples_are_completed_by_unit_vectors_in_index_order():
    one_direction = np.zeros((2, 4), np.float32)
    one_direction[:, 1] = 3, -3
    np.testing.assert_allclose(np.abs(fit_basis(one_direction, 3)), np.eye(4)[:, [1, 0, 2]], atol=1e-6)

    queries = uneven_queries(3, count=3)  # three centred samples span two directions
    basis = np.asarray(fit_basis(queries, 5), np.float64)
    np.testing.assert_allclose(projector(basis[:, :2]), projector(oracle.basis(queries, 2)), atol=1e-4)
    for column, unit in zip((2, 3, 4), np.eye(R), strict=False):
        rest = unit - projector(basis[:, :column]) @ unit
        np.testing.assert_allclose(basis[:, column], rest / np.linalg.norm(rest), atol=1e-4)


@pytest.mark.parametrize("count", [0, 1])
def test_without_two_samples_the_basis_is_the_first_unit_vectors(count):
    basis = fit_basis(uneven_queries(4), 5, np.arange(60) < count)
    np.testing.assert_array_equal(basis, np.eye(R, 5))


@hypothesis.given(seed=st.integers(0, 10**6), count=st.integers(0, 60), size=st.sampled_from([1e-6, 1.0, 1e6]))
def test_the_basis_is_orthonormal_whatever_the_samples(seed, count, size):
    rng = np.random.default_rng(seed)
    directions = rng.integers(1, R + 1)
    queries = size * rng.normal(size=(60, directions)) @ rng.normal(size=(directions, R))
    for rank in (5, R):
        basis = fit_basis(queries.astype(np.float32), rank, np.arange(60) < count)
        np.testing.assert_allclose(basis.T @ basis, np.eye(rank), atol=2e-5)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((np.ones((9, R), "f"), R + 1), rf"rank={R + 1} must lie in \[0, R={R}\]"),
        ((np.ones((9, R), "f"), -1), "rank=-1"),
        ((np.ones(R, "f"), 1), r"queries has shape \(12,\)"),
        ((np.ones((9, R), "f"), 1, np.ones(8, bool)), r"mask has shape \(8,\)"),
    ],
)
def test_bad_arguments_of_fit_basis_raise(arguments, words):
    with pytest.raises(ValueError, match=words):
        vj.fit_basis(*arguments)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_closed_rows_have_the_entries_of_the_provisional_index(dtype):
    here = scene(5, dtype=dtype)
    for b, closed in enumerate([64, 32, 0]):
        latent = here.sequence(b).rows[:closed, :R]
        np.testing.assert_allclose(here.cache.index.code[b, :closed], latent[:, :5], atol=1e-6)
        np.testing.assert_allclose(
            here.cache.index.bound[b, 0, :closed], np.linalg.norm(latent[:, 5:], axis=1), rtol=1e-5
        )


def encode(spec, basis, rows):
    code, bound = index.encode(spec, jnp.asarray(basis, jnp.float32)[None], jnp.asarray(rows, spec.dtype)[None])
    return np.asarray(code[0], np.float64), np.asarray(bound[0], np.float64)


@pytest.mark.parametrize("sketch_dtype", ["float16", "bfloat16", "float32"])
def test_a_sketch_is_the_projection_rounded_once_to_its_dtype(sketch_dtype):
    rng = np.random.default_rng(6)
    basis, rows = oracle_rotation(rng)[:, :5], random_rows(rng, 40)
    code, _ = encode(small_spec(sketch_dtype=sketch_dtype), basis, rows)
    exact = rows[:, :R].astype(np.float64) @ basis
    half_ulp = 0.5 * float(jnp.finfo(sketch_dtype).eps)
    assert np.all(np.abs(code - exact) <= half_ulp * np.abs(exact) * 1.001 + 1e-6)


def test_a_small_eta_of_a_long_row_is_accurate():
    rng = np.random.default_rng(7)
    rotation = oracle_rotation(rng)
    rows = np.zeros((20, C))
    rows[:, :R] = 100 * rng.normal(size=(20, 5)) @ rotation[:, :5].T + 0.01 * rotation[:, 7]
    _, bound = encode(small_spec(), rotation[:, :5], rows)
    np.testing.assert_allclose(bound[0], 0.01, rtol=0.02)  # a difference of squares would be off by its square root


def test_a_sketch_beyond_the_range_of_its_dtype_stays_finite_and_its_error_is_in_the_sound_bound():
    rows = np.zeros((1, C))
    rows[0, 0] = 1e6
    code, bound = encode(small_spec(sketch_dtype="float16", bound="sound"), np.eye(R, 5), rows)
    np.testing.assert_array_equal(code[0], [65504, 0, 0, 0, 0])
    assert bound[1, 0] >= 1e6 - 65504


@pytest.mark.parametrize("rank", [0, 5, R])
def test_a_prepared_query_holds_scale_and_the_missed_length(rank):
    rng = np.random.default_rng(8)
    spec, basis, query = small_spec(rank=rank), oracle_rotation(rng)[:, :rank], random_rows(rng, 1, H)
    probe = index.prepare(spec, jnp.asarray(basis, jnp.float32)[None], jnp.asarray(query))
    content = query[0, :, :R]
    missed = (
        np.linalg.norm(content - content @ basis @ basis.T, axis=1) / np.sqrt(R - rank) if rank < R else np.zeros(H)
    )
    np.testing.assert_allclose(probe.branch[0], SCALE * query[0, :, R:], atol=1e-6)
    np.testing.assert_allclose(probe.sketch[0], SCALE * content @ basis, atol=1e-6)
    np.testing.assert_allclose(probe.residual[0, :, 0], SCALE * missed, atol=1e-6)
