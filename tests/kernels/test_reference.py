"""The two passes over rows, in plain XLA: examples worked out by hand, and plain loops in float64."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas
from kernels_pallas import blocks, reference
from kernels_pallas.words import to_words, widened
from tests import oracle_attention as oracle

pytestmark = pytest.mark.usefixtures("quick_compilation")

LATENT, BRANCH, WIDTH = 5, 2, 7
SIZES = [1, 3, 2 * blocks.XLA.least + 37]  # the last needs three passes, the third overlapping the second

attend = jax.jit(kernels_pallas.attend, static_argnames=("latent_dim", "scale"))
scan = jax.jit(lambda *args, **kwargs: kernels_pallas.scan(*args, **kwargs).margin)
mass = jax.jit(reference.mass, static_argnames="scale")


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_attention_worked_out_by_hand():
    # scores ln 3 and 0: weights 3/4 and 1/4
    rows = jnp.asarray([[[8.0, 0.0, 1.0], [0.0, 4.0, 0.0]]])
    query = jnp.asarray([[[0.0, 0.0, 2 * math.log(3)]]])
    part = attend(query, rows, jnp.asarray([2]), latent_dim=2, scale=0.5)
    np.testing.assert_allclose(part.out, [[[6.0, 1.0]]], rtol=1e-6)
    np.testing.assert_allclose(part.lse, [[math.log(4)]], rtol=1e-6)
    np.testing.assert_allclose(part.peak, [[math.log(3)]], rtol=1e-6)
    np.testing.assert_allclose(part.mean, [[0.75 * math.log(3)]], rtol=1e-6)


def test_a_margin_worked_out_by_hand():
    # head 0: 2*3 + 1*4 + 0.5*2 - 10 = 1;  head 1: -1*3 + 0*4 + 1*2 - (-3) = 2
    margin = scan(
        branch=jnp.asarray([[[2.0], [-1.0]]]), sketch=jnp.asarray([[[1.0], [0.0]]]),
        residual=jnp.asarray([[[0.5], [1.0]]]), threshold=jnp.asarray([[10.0, -3.0]]),
        rows=jnp.asarray([[[9.0, 3.0]]]), code=jnp.asarray([[[4.0]]]), bound=jnp.asarray([[[2.0]]]),
        member=jnp.asarray([[True]]), length=jnp.asarray([1]),
    )  # fmt: skip
    np.testing.assert_array_equal(margin, [[2.0]])


@pytest.mark.parametrize("slots", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attend_is_brute_force_over_the_first_rows_of_a_buffer(slots, dtype):
    lengths = np.minimum([0, 1, slots - 1, slots, blocks.XLA.least, blocks.XLA.least + 1], slots)
    query, rows = draw(1, 6, 2, WIDTH), draw(2, 6, slots, WIDTH)
    part = attend(query, to_words(jnp.asarray(rows, dtype)), jnp.asarray(lengths), latent_dim=LATENT, scale=0.7)
    for b, n in enumerate(lengths):
        exact = oracle.attention(
            oracle.rounded(query[b], dtype), oracle.rounded(rows[b, :n], dtype), LATENT, np.float32(0.7)
        )
        np.testing.assert_allclose(part.out[b], exact.out, atol=1e-5)
        np.testing.assert_allclose(part.lse[b], exact.lse, atol=1e-5)
        np.testing.assert_allclose(part.peak[b], exact.peak, atol=1e-5)
        if n:
            np.testing.assert_allclose(part.lse[b] - part.mean[b], exact.entropy, atol=1e-5)


def test_every_query_may_have_its_own_length():
    query, rows, lengths = draw(3, 1, 4, WIDTH), draw(4, 1, 9, WIDTH), [0, 9, 4, 1]
    part = attend(query, rows, jnp.asarray([lengths]), latent_dim=LATENT, scale=0.7)
    for i, n in enumerate(lengths):
        np.testing.assert_allclose(
            part.out[0, i], oracle.attention(query[0, i : i + 1], rows[0, :n], LATENT, 0.7).out[0], atol=1e-5
        )


def test_what_lies_past_the_length_is_never_seen():
    query, rows, lengths = draw(5, 2, 2, WIDTH), draw(6, 2, 9, WIDTH), jnp.asarray([4, 0])
    dirty = rows.copy()
    dirty[0, 4:] = dirty[1] = 1e30
    clean = attend(query, rows, lengths, latent_dim=LATENT, scale=0.7)
    jax.tree.map(np.testing.assert_array_equal, attend(query, dirty, lengths, latent_dim=LATENT, scale=0.7), clean)


@pytest.mark.parametrize("slots", SIZES)
def test_mass_is_the_column_sum_of_the_softmax(slots):
    query, rows = draw(7, 2, 3, WIDTH), draw(8, 2, slots, WIDTH)
    lengths = np.array([slots, max(slots - 2, 1)])
    lse = attend(query, rows, jnp.asarray(lengths), latent_dim=LATENT, scale=0.7).lse
    got = mass(query, to_words(jnp.asarray(rows)), jnp.asarray(lengths), lse, scale=0.7)
    for b, n in enumerate(lengths):
        np.testing.assert_allclose(
            got[b, :n], oracle.softmax(oracle.scores(query[b], rows[b, :n], 0.7)).sum(0), atol=1e-5
        )
        np.testing.assert_array_equal(got[b, n:], 0)


@pytest.mark.parametrize("slots", SIZES)
@pytest.mark.parametrize("terms", [1, 2])
def test_scan_is_the_best_margin_over_heads(slots, terms):
    rank, lengths = 3, [slots, max(slots - 2, 1), 0]
    branch, sketch, residual = draw(9, 3, 2, BRANCH), draw(10, 3, 2, rank), draw(11, 3, 2, terms)
    threshold = draw(12, 3, 2)
    threshold[1, 0] = np.inf  # a closed head
    rows, code = draw(13, 3, slots, WIDTH), draw(14, 3, slots, rank).astype(np.float16)
    bound, member = np.abs(draw(15, 3, terms, slots)), draw(16, 3, slots) > 0
    got = np.asarray(
        scan(
            branch, sketch, residual, threshold, to_words(jnp.asarray(rows)), code, bound, member, jnp.asarray(lengths)
        )
    )
    assert got.shape == (3, slots) and not np.isnan(got).any()
    for b, n in enumerate(lengths):
        score = branch[b] @ rows[b, :, -BRANCH:].T + sketch[b] @ code[b].astype(np.float64).T + residual[b] @ bound[b]
        margin = np.where(member[b] & (np.arange(slots) < n), (score - threshold[b][:, None]).max(0), -np.inf)
        np.testing.assert_allclose(got[b], margin, atol=2e-5)


def test_with_every_head_closed_nothing_can_fire():
    margin = scan(
        draw(9, 1, 2, BRANCH), draw(10, 1, 2, 3), draw(11, 1, 2, 1), np.full((1, 2), np.inf, np.float32),
        draw(13, 1, 4, WIDTH), draw(14, 1, 4, 3), draw(15, 1, 1, 4), np.ones((1, 4), bool), jnp.asarray([4]),
    )  # fmt: skip
    np.testing.assert_array_equal(margin, -np.inf)


def test_a_buffer_without_slots_gives_the_empty_part():
    part = attend(draw(1, 2, 3, WIDTH), draw(2, 2, 0, WIDTH), jnp.zeros(2, int), latent_dim=LATENT, scale=0.7)
    jax.tree.map(np.testing.assert_array_equal, part, kernels_pallas.empty(2, 3, LATENT))


def test_an_implementation_that_cannot_run_here_is_refused():
    with pytest.raises(ValueError, match="implementation='mosaic_tpu' cannot run"):
        kernels_pallas.attend(
            draw(1, 1, 1, WIDTH), draw(2, 1, 1, WIDTH), jnp.ones(1, int), latent_dim=LATENT, scale=1.0,
            implementation="mosaic_tpu",
        )  # fmt: skip


def test_many_queries_that_read_longer_chunks_see_the_same_rows():
    rows, query = draw(40, 1, blocks.XLA.rows + 37, WIDTH), draw(41, 1, blocks.XLA.few + 2, WIDTH)
    length = jnp.asarray([blocks.XLA.rows + 20])
    together = attend(query, rows, length, latent_dim=LATENT, scale=0.3)
    for part in (slice(2), slice(2, None)):
        few = attend(query[:, part], rows, length, latent_dim=LATENT, scale=0.3)
        for value, want in zip(few, together, strict=True):
            np.testing.assert_allclose(value, want[:, part], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("room", [32, 64, 512])  # sequences one after another, together, and in long chunks
def test_however_chunks_are_cut_the_same_rows_are_seen(room, monkeypatch):
    rows, query, lengths = draw(50, 6, 101, WIDTH), draw(51, 6, 2, WIDTH), jnp.asarray([0, 1, 31, 64, 100, 101])
    code, bound, member = draw(52, 6, 101, 3), draw(53, 6, 1, 101), draw(54, 6, 101) > 0
    probe = draw(55, 6, 2, BRANCH), draw(56, 6, 2, 3), draw(57, 6, 2, 1), draw(58, 6, 2)

    def both():
        part = jax.jit(lambda: kernels_pallas.attend(query, rows, lengths, latent_dim=LATENT, scale=0.7))()
        return part, jax.jit(lambda: kernels_pallas.scan(*probe, rows, code, bound, member, lengths).margin)()

    want = both()
    monkeypatch.setattr(blocks, "XLA", dataclasses.replace(blocks.XLA, numbers=WIDTH * room, least=8))
    jax.tree.map(lambda got, wanted: np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5), both(), want)


def test_widened_rows_are_the_same_numbers():
    bits = np.arange(1 << 16, dtype=np.uint16)
    bits = bits[np.isfinite(bits.view(jnp.bfloat16))]
    want = bits.view(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(widened(jnp.asarray(bits)), want)
    for rows in (want, want.view(np.uint32), want.astype(jnp.bfloat16)):
        np.testing.assert_array_equal(widened(jnp.asarray(rows)), want)
