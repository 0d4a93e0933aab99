"""The laws the method rests on, as properties of the library's own numbers, on rows of every source."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas
import vestige_jax as vj
from kernels_pallas import Part
from tests import oracle_attention as oracle
from tests.scenes import attend_chunk, both_parts, small_spec
from tests.sources import SOURCES
from vestige_jax import index

pytestmark = pytest.mark.usefixtures("quick_compilation")

LENGTH, CLOSED = 75, 64
every_source = pytest.mark.parametrize("name", sorted(SOURCES))
few = hypothesis.settings(max_examples=8)
seeds = st.integers(0, 10**6)


def law_spec(name, **changes):
    source = SOURCES[name]
    sizes = {n: getattr(source, n) for n in ("latent_dim", "branch_dim", "num_heads", "scale")}
    return small_spec(**(sizes | changes))


def filled(spec, rows):
    """A cache of one sequence holding rows [n, C]."""
    padded = np.zeros((1, spec.capacity, spec.row_dim), np.float32)
    padded[0, : len(rows)] = rows
    return vj.append(spec, vj.init(spec, 1), padded, jnp.asarray([len(rows)]))


def drawn(name, seed, count=LENGTH):
    """Rows [count, C] and one query a head [H, C]."""
    rng, source = np.random.default_rng(seed), SOURCES[name]
    return rng, source.rows(rng, count), source.queries(rng)


def dense(spec, rows, query):
    """What the library makes of dense attention: out [H, R]."""
    return np.asarray(both_parts(spec, filled(spec, rows), jnp.asarray(query)[None])[1].out[0])


# --- L1: the order of slots does not matter


@every_source
@few
@hypothesis.given(seed=seeds)
def test_l1_permuting_rows_leaves_dense_attention_as_it_was(name, seed):
    rng, rows, query = drawn(name, seed)
    spec = law_spec(name)
    np.testing.assert_allclose(
        dense(spec, rng.permutation(rows), query), dense(spec, rows, query), rtol=1e-5, atol=1e-5
    )


@every_source
@few
@hypothesis.given(seed=seeds)
def test_l1_permuting_rows_within_their_tiers_leaves_recall_as_it_was(name, seed):
    rng, rows, query = drawn(name, seed)
    spec = law_spec(name)
    kept = rng.random(spec.archive_rows) < 0.2
    order = np.concatenate([rng.permutation(CLOSED), CLOSED + rng.permutation(LENGTH - CLOSED)])
    moved = np.zeros_like(kept)
    moved[:CLOSED] = kept[order[:CLOSED]]
    one, other = (
        vj.attend(spec, vj.keep_set(spec, filled(spec, r), jnp.asarray(k)[None]), query[None])
        for r, k in [(rows, kept), (rows[order], moved)]
    )
    np.testing.assert_allclose(one[0], other[0], rtol=1e-5, atol=1e-5)
    assert one[1].fired == other[1].fired


# --- C1: the order of rows by score does not depend on when they are asked for


def rotate(branch, position, base=10.0):
    """Rotary embedding of interleaved pairs of branch [..., P] at position [...]."""
    pairs = branch.reshape(*branch.shape[:-1], -1, 2)
    angle = np.asarray(position)[..., None] * base ** (-np.arange(pairs.shape[-2]) / pairs.shape[-2])
    cos, sin, (even, odd) = np.cos(angle), np.sin(angle), np.moveaxis(pairs, -1, 0)
    turned = np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(branch.shape).astype(np.float32)


def rotated(rows, position, latent_dim):
    return np.concatenate([rows[..., :latent_dim], rotate(rows[..., latent_dim:], position)], axis=-1)


def weights_at(spec, rows, query, seen=LENGTH // 2):
    """Softmax weight the library gives the first `seen` rows when `query` [C] is asked after all of `rows`."""
    asked = np.broadcast_to(query, (1, 1, spec.num_heads, spec.row_dim))
    return np.asarray(attend_chunk(spec, filled(spec, rows[:-1]), asked, rows[None, -1:])[1][0, :seen])


def order_changes(before, after):
    """Pairs of rows, clearly apart both times, that swapped."""
    apart = [np.subtract.outer(np.log(w), np.log(w)) for w in (before, after)]
    clear = (np.abs(apart[0]) > 1e-3) & (np.abs(apart[1]) > 1e-3)
    return int((clear & (np.sign(apart[0]) != np.sign(apart[1]))).sum()) // 2


@every_source
@few
@hypothesis.given(seed=seeds, longer=st.sampled_from([1.0, 0.5, 1.5]))
def test_c1_rows_keep_their_order_for_a_query_direction_at_any_time(name, seed, longer):
    _, rows, query = drawn(name, seed)
    spec, query = law_spec(name), query[0] / np.linalg.norm(query[0]) * 4
    soon, late = weights_at(spec, rows[: LENGTH // 2 + 1], query), weights_at(spec, rows, longer * query)
    assert order_changes(soon, late) == 0
    exact = oracle.scores(query[None], rows[: LENGTH // 2], spec.scale)[0]
    assert order_changes(np.exp(exact), late) == 0


@every_source
@few
@hypothesis.given(seed=seeds)
def test_c1_fails_under_rotation_a_fixed_query_orders_rows_anew_at_a_later_time(name, seed):
    _, rows, query = drawn(name, seed)
    spec, query = law_spec(name), query[0] / np.linalg.norm(query[0]) * 4
    cached = rotated(rows, np.arange(LENGTH), spec.latent_dim)
    soon, late = (
        weights_at(spec, cached[:n], rotated(query, n - 1, spec.latent_dim)) for n in (LENGTH // 2 + 1, LENGTH)
    )
    assert order_changes(soon, late) > 0


@every_source
@few
@hypothesis.given(seed=seeds)
def test_l1_fails_under_rotation_rows_placed_elsewhere_give_another_output(name, seed):
    rng, rows, query = drawn(name, seed)
    spec, order = law_spec(name), rng.permutation(LENGTH)
    place = functools.partial(rotated, position=np.arange(LENGTH), latent_dim=spec.latent_dim)
    asked = rotated(query, LENGTH, spec.latent_dim)
    here, elsewhere = dense(spec, place(rows), asked), dense(spec, place(rows[order]), asked)
    assert np.abs(here - elsewhere).max() > 1e-3
    # permuting rows that are already rotated proves nothing
    np.testing.assert_allclose(dense(spec, place(rows)[order], asked), here, rtol=1e-5, atol=1e-5)


# --- L2: the certificate of the index


@functools.partial(jax.jit, static_argnums=0)
def index_score(spec, basis, rows, query):
    """Index scores without their bound [H, n], its two terms [H, n, 2], what the entries say of it [2, n], sketches."""
    code, bound = index.encode(spec, basis[None], rows[None])
    probe = index.prepare(spec, basis[None], query[None])
    einsum = functools.partial(jnp.einsum, precision="highest")
    known = einsum("hp,np->hn", probe.branch[0], rows[:, spec.latent_dim :])
    known += einsum("hk,nk->hn", probe.sketch[0], code[0].astype(jnp.float32))
    return known, einsum("he,en->hne", probe.residual[0], bound[0]), bound[0], code[0].astype(jnp.float32)


def random_basis(rng, width, rank):
    return np.linalg.qr(rng.normal(size=(width, width)))[0][:, :rank].astype(np.float32)


@every_source
@pytest.mark.parametrize("rank, sketch_dtype", [(0, "float32"), (5, "float32"), (5, "float16"), (11, "bfloat16")])
@few
@hypothesis.given(
    seed=seeds, query_size=st.sampled_from([1e-3, 1.0, 1e3]), row_size=st.sampled_from([1e-2, 1.0, 100.0])
)
def test_l2_no_score_is_further_from_its_index_than_the_certificate(
    name, rank, sketch_dtype, seed, query_size, row_size
):
    rng, rows, query = drawn(name, seed, count=40)
    spec = law_spec(name, rank=rank, sketch_dtype=sketch_dtype, bound="sound")
    rows, query, basis = row_size * rows, query_size * query, random_basis(rng, spec.latent_dim, rank)
    known, terms, bound, code = index_score(spec, basis, rows, query)
    off = np.abs(oracle.scores(query, rows, spec.scale) - known)
    assert np.all(off <= terms.sum(-1))  # with the rounding of sketches and of float32
    content, wide = rows[:, : spec.latent_dim].astype(np.float64), basis.astype(np.float64)
    sketch_error = np.linalg.norm(content @ wide - code, axis=1)
    lengths = np.linalg.norm(query[:, : spec.latent_dim] @ wide, axis=1)
    exact = terms[..., 0] + spec.scale * np.outer(lengths, sketch_error)
    slack = 2e-6 * spec.scale * np.outer(np.linalg.norm(query, axis=1), np.linalg.norm(rows, axis=1))
    assert np.all(off <= exact + slack)
    np.testing.assert_allclose(
        bound[0], np.linalg.norm(content - content @ wide @ wide.T, axis=1), rtol=1e-3, atol=1e-5 * row_size
    )


def test_l2_the_certificate_is_attained_by_a_query_along_what_the_index_misses():
    rng, rows, query = drawn("random", 0, count=40)
    spec, basis = law_spec("random", bound="sound"), random_basis(rng, 12, 5)
    missed = rows[7, :12] - rows[7, :12] @ basis @ basis.T
    query[:] = 0
    query[:, :12] = missed
    known, terms, _, _ = index_score(spec, basis, rows, query)
    off = oracle.scores(query, rows, spec.scale) - known
    np.testing.assert_allclose(off[:, 7], terms[:, 7, 0], rtol=1e-5)


# --- L3, the token certificate, and Prop. 1


@every_source
@few
@hypothesis.given(seed=seeds, size=st.sampled_from([0.5, 2.0, 6.0]))
def test_l3_the_mass_left_behind_is_at_most_n_exp_minus_tau(name, seed, size):
    rng, rows, query = drawn(name, seed)
    spec = law_spec(name)
    cache = filled(spec, rows)
    tier = np.asarray(vj.where(spec, cache))[0, :LENGTH]
    query[0] = size * rows[rng.choice(np.flatnonzero(tier == oracle.KEPT))]
    near, full = both_parts(spec, cache, jnp.asarray(query)[None])
    leak = 1 - np.exp(np.asarray(near.lse - full.lse, np.float64)[0])
    scores = oracle.scores(query, rows, spec.scale)
    away = tier == oracle.ARCHIVED
    tau = scores[:, ~away].max(1) - scores[:, away].max(1)
    bound = away.sum() * np.exp(-tau)
    assert np.all(leak <= bound * (1 + 1e-4) + 1e-6)
    moved = np.linalg.norm(near.out[0] - full.out[0], axis=1)
    assert np.all(moved <= 2 * bound * np.linalg.norm(rows[:, : spec.latent_dim], axis=1).max() + 1e-5)


def test_l3_is_attained_by_rows_that_all_score_the_same():
    spec = law_spec("random")
    rows, query = np.zeros((LENGTH, 16), np.float32), np.zeros((3, 16), np.float32)
    rows[:, 0], query[:, 0] = 1.0, 1 / spec.scale
    near, full = both_parts(spec, filled(spec, rows), jnp.asarray(query)[None])
    away = int((np.asarray(vj.where(spec, filled(spec, rows))) == oracle.ARCHIVED).sum())
    np.testing.assert_allclose(1 - np.exp(near.lse - full.lse), away / LENGTH, rtol=1e-5)


@functools.partial(jax.jit, static_argnums=0)
def score_of(spec, query, row):
    """The library's score of one row a query: query, row [n, C] -> [n]."""
    part = kernels_pallas.attend(
        query[:, None], row[:, None], jnp.ones(len(row), jnp.int32), latent_dim=spec.latent_dim, scale=spec.scale
    )
    return part.peak[:, 0]


@every_source
@few
@hypothesis.given(seed=seeds, size=st.sampled_from([1e-3, 0.1, 3.0]))
def test_3c_a_row_replaced_by_one_nearby_scores_within_its_distance(name, seed, size):
    rng, rows, _ = drawn(name, seed)
    spec = law_spec(name)
    query = np.concatenate([SOURCES[name].queries(rng)[0:1] for _ in rows])
    moves = size * rng.normal(size=rows.shape)
    moves[0] = size * query[0] / np.linalg.norm(query[0])  # the worst direction
    other = (rows + moves).astype(np.float32)
    moved = np.abs(np.asarray(score_of(spec, query, other) - score_of(spec, query, rows), np.float64))
    distance = np.linalg.norm(other.astype(np.float64) - rows, axis=1)
    certificate = spec.scale * np.linalg.norm(query, axis=1) * distance
    rounding = 2e-6 * spec.scale * np.linalg.norm(query, axis=1) * np.linalg.norm(rows, axis=1)
    assert np.all(moved <= certificate + rounding)
    np.testing.assert_allclose(moved[0], certificate[0], rtol=0.02, atol=2 * rounding[0])


@functools.partial(jax.jit, static_argnums=0)
def part_over(spec, query, rows, count):
    return kernels_pallas.attend(query[None], rows, count[None], latent_dim=spec.latent_dim, scale=spec.scale)


@every_source
@few
@hypothesis.given(seed=seeds, copies=st.integers(2, 30))
def test_prop_1_copies_of_a_row_are_one_row_with_the_log_of_their_number(name, seed, copies):
    rng, rows, query = drawn(name, seed, count=20)
    spec, where = law_spec(name), rng.integers(20)
    buffer = np.zeros((1, 50, spec.row_dim), np.float32)
    buffer[0, :20], buffer[0, 20 : 19 + copies] = rows, rows[where]
    all_copies, others, single = (
        part_over(spec, query, r, jnp.asarray(n))
        for r, n in [(buffer, 19 + copies), (np.delete(buffer, where, axis=1), 19), (rows[None, where : where + 1], 1)]
    )
    merged = kernels_pallas.merge(others, Part(single.out, single.lse + np.log(copies), single.peak, single.mean))
    np.testing.assert_allclose(merged.out, all_copies.out, atol=1e-5)
    np.testing.assert_allclose(merged.lse, all_copies.lse, atol=1e-5)
