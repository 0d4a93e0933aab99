"""One contract for every backend: attention over a range and over a list, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas
from kernels_pallas.words import to_words
from tests.kernels import oracle
from tests.kernels.backends import running
from tests.kernels.cases import (
    BACKENDS,
    DTYPES,
    SIZES,
    SLOTS,
    normal,
    parts_close,
    quick,
    rows_and_query,
    same,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

WORK = {  # lengths of a batch of three
    "ragged": (0, 131, 600),
    "short": (1, 128, 129),
    "empty": (0, 0, 0),
    "full": (600, 600, 600),
}


def attending(backend, latent, scale):
    return jax.jit(
        lambda query, words, length: kernels_pallas.attend(
            query, words, length, latent_dim=latent, scale=scale, implementation=backend
        )
    )


def listing(backend, latent, scale):
    return jax.jit(
        lambda query, words, position, count: kernels_pallas.attend_list(
            query, words, position, count, latent_dim=latent, scale=scale, implementation=backend
        )
    )


FAST_RANGE = {(backend, "tiny", jnp.bfloat16) for backend in BACKENDS[:2]}


@pytest.mark.parametrize("backend, size, dtype", quick(FAST_RANGE, BACKENDS, SIZES, DTYPES))
def test_attend(backend, size, dtype, monkeypatch):
    rows, query, latent, scale = rows_and_query(size, dtype)
    anything = jnp.nan if backend == "mosaic_tpu" else 1e30  # a TPU pads blocks with what lies in memory
    with running(backend, monkeypatch):
        attend = attending(backend, latent, scale)
        for work, length in WORK.items():
            live = np.arange(SLOTS) < np.asarray(length)[:, None, None]
            words = to_words(jnp.where(live[:, 0, :, None], rows, jnp.asarray(anything, dtype)))
            got = attend(query, words, jnp.asarray(length, jnp.int32))
            parts_close(got, oracle.attend(query, rows, live, latent, scale), work)
            if work == "ragged":
                same(got, attend(query, words, jnp.asarray(length, jnp.int32)))


@pytest.mark.parametrize("backend", ["xla", *(pytest.param(b, marks=pytest.mark.slow) for b in BACKENDS[1:])])
def test_attend_with_a_length_for_every_query(backend, monkeypatch):
    """Prefill: many queries, each sees its own prefix; rows are wider than queries, as a TPU stores them."""
    rows, _, latent, scale = rows_and_query("tiny", jnp.bfloat16)
    query = normal(5, 3, 40, rows.shape[2], dtype=jnp.bfloat16)
    length = jnp.asarray(np.random.default_rng(6).integers(0, SLOTS + 1, (3, 40)), jnp.int32)
    with running(backend, monkeypatch):
        got = attending(backend, latent, scale)(query, to_words(rows, 128), length)
    live = np.arange(SLOTS) < np.asarray(length)[..., None]
    parts_close(got, oracle.attend(query, rows, live, latent, scale), "prefill")


LISTED = 72
LISTS = {"ragged": (0, 1, LISTED), "empty": (0, 0, 0), "full": (LISTED, LISTED, LISTED)}
FAST_LIST = {(backend, "tiny", jnp.bfloat16) for backend in BACKENDS}


@pytest.mark.parametrize("backend, size, dtype", quick(FAST_LIST, BACKENDS, SIZES, DTYPES))
def test_attend_list(backend, size, dtype, monkeypatch):
    rows, query, latent, scale = rows_and_query(size, dtype)
    draw = np.random.default_rng(7)
    chosen = np.stack([np.sort(draw.choice(SLOTS, LISTED, replace=False)) for _ in range(3)]).astype(np.int32)
    with running(backend, monkeypatch):
        attend_list = listing(backend, latent, scale)
        for work, count in LISTS.items():
            live = np.arange(LISTED) < np.asarray(count)[:, None]
            position = np.where(live, chosen, SLOTS)  # as compact leaves it
            unused = ~(np.arange(SLOTS) == position[..., None]).any(1)
            words = to_words(jnp.where(unused[..., None], jnp.asarray(1e30, dtype), rows))  # finite, but anything
            got = attend_list(query, words, position, np.asarray(count, np.int32))
            listed = np.take_along_axis(np.asarray(rows, np.float64), chosen[..., None], 1)
            parts_close(got, oracle.attend(query, listed, live[:, None], latent, scale), work)
            if work == "ragged":
                same(got, attend_list(query, words, position, np.asarray(count, np.int32)))


@pytest.mark.parametrize("backend, dtype", quick({("xla", jnp.bfloat16)}, BACKENDS, DTYPES))
def test_a_fetched_row_arrives_bit_for_bit(backend, dtype, monkeypatch):
    """Attention over one row is that row: every word of it, whatever way it was moved."""
    rows, query, latent, scale = rows_and_query("kimi", dtype, slots=64)
    rows = rows * jnp.asarray(np.random.default_rng(8).choice([1e-20, 1.0, 1e20], rows.shape), dtype)
    at = np.array([0, 13, 63])
    with running(backend, monkeypatch):
        got = listing(backend, latent, scale)(
            jnp.zeros_like(query), to_words(rows), at[:, None], jnp.ones(3, jnp.int32)
        )
    want = np.asarray(rows, np.float32)[np.arange(3), at, None, :latent]
    np.testing.assert_array_equal(np.asarray(got.out), np.broadcast_to(want, got.out.shape))


@pytest.mark.parametrize("backend", ["xla", pytest.param("mosaic_gpu", marks=pytest.mark.slow)])
def test_a_list_in_any_order_counts_what_it_names_twice_twice(backend, monkeypatch):
    """And rows need not end with a whole group of 8, nor the list with a whole block; a TPU wants the former."""
    rows, query, latent, scale = rows_and_query("tiny", jnp.bfloat16, slots=61)
    position = np.array([[60, 59, 60, 3, 3, 17], [0, 1, 2, 3, 4, 5], [60, 0, 60, 0, 9, 9]], np.int32)
    with running(backend, monkeypatch):
        got = listing(backend, latent, scale)(query, to_words(rows), position, jnp.asarray([6, 5, 3], jnp.int32))
    live = np.arange(6) < np.array([[6], [5], [3]])
    listed = np.take_along_axis(np.asarray(rows, np.float64), position[..., None], 1)
    parts_close(got, oracle.attend(query, listed, live[:, None], latent, scale), "any order")
