"""Sets of best rows, and classes of near copies, on arrays that can be worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from experiments.anatomy import orders


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly(quick_compilation):
    """All of this module."""


def test_the_best_rows_and_ties():
    assert_array_equal(orders.top(jnp.array([[1.0, 3, 2, 3], [5, 5, 5, 5]]), 2), [[0, 1, 0, 1], [1, 1, 0, 0]])


def test_overlap_is_a_share_of_the_best():
    one = jnp.array([4.0, 3, 2, 1])
    assert_allclose(orders.overlap(one, jnp.array([[9.0, 1, 5, 3], [1, 2, 3, 4], [4, 3, 2, 1]]), 2), [0.5, 0, 1])


classes = jax.jit(orders.classes)
ROWS = jnp.array([[10.0, 0], [10.5, 0], [11.2, 0], [10, 0], [0, 1], [0, 1.04]])


def test_a_row_joins_the_first_leader_that_is_near():
    joined = classes(ROWS, jnp.array([0.0, 0.05, 0.1]))
    assert_array_equal(joined[0], [0, 1, 2, 0, 4, 5])
    # Row 2 is near row 1 at .05 but that one does not lead; near row 0 only at .12.
    assert_array_equal(joined[1], [0, 0, 2, 0, 4, 4])
    assert_array_equal(joined[2], [0, 0, 2, 0, 4, 4])
    assert_allclose(orders.distinct(joined), [5 / 6, 3 / 6, 3 / 6])
    assert_allclose(orders.shared(joined), [2 / 6, 5 / 6, 5 / 6])


def test_tolerance_is_relative_to_the_leader():
    rows = jnp.array([[1.0, 0], [2.0, 0]])  # a distance of 1: all of the first, half of the second
    assert_array_equal(classes(rows, jnp.array([0.6])), [[0, 1]])
    assert_array_equal(classes(rows[::-1], jnp.array([0.6])), [[0, 0]])


def test_classes_against_a_loop():
    rows = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    tolerances = (0.3, 0.9)
    for tolerance, joined in zip(tolerances, classes(rows, jnp.array(tolerances)), strict=True):
        leaders = []
        for i, row in enumerate(rows):
            near = [a for a in leaders if np.linalg.norm(rows[a] - row) <= tolerance * np.linalg.norm(rows[a])]
            leaders += [] if near else [i]
            assert joined[i] == (near[0] if near else i)
        assert 1 < len(leaders) < 40
