"""The balanced index and codes of few bits: optimal, sound for every row and query, and served end to end."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vestige_jax as vj
from kernels_pallas import codes, exact, unpack
from tests.kernels import oracle
from tests.scenes import C, H, R, fill, queries_for, scene, small_spec
from tests.sources import random_rows
from vestige_jax import balanced, calibration, index, recall

pytestmark = pytest.mark.usefixtures("quick_compilation")

KINDS = [("balanced", 16), ("balanced", 8), ("balanced", 4), ("sketch", 8), ("sketch", 4)]
LENGTHS = (70, 37, 9)
fit = jax.jit(balanced.fit, static_argnums=3)


def anisotropic(rng, count):
    """Samples [count, C] whose directions have very different variances, in no common basis."""
    rotation = np.linalg.qr(rng.normal(size=(C, C)))[0]
    return (rng.normal(size=(count, C)) * np.geomspace(3, 0.05, C) @ rotation).astype(np.float32)


def fitted(queries, rows, shrinkage=1e-4):
    covariance = np.cov(rows, rowvar=False, bias=True).astype(np.float32)
    return fit(jnp.asarray(queries)[None], jnp.ones((1, len(queries)), bool), jnp.asarray(covariance)[None], shrinkage)


# The maps


def test_the_maps_are_inverse_and_diagonalise_both_moments():
    """A B^T = I, and A^T Sigma_q A = B^T Sigma_c B = S: both sides see the same spread in each dimension."""
    rng = np.random.default_rng(0)
    queries, rows = anisotropic(rng, 400), anisotropic(rng, 300)
    pair = fitted(queries, rows, shrinkage=1e-6)
    a, b = np.asarray(pair.query[0], np.float64), np.asarray(pair.row[0], np.float64)
    np.testing.assert_allclose(a @ b.T, np.eye(C), atol=2e-5)
    asked = a.T @ (queries.T @ queries / 400) @ a / np.trace(queries.T @ queries / 400)
    stored = b.T @ np.cov(rows, rowvar=False, bias=True) @ b / np.trace(np.cov(rows, rowvar=False, bias=True))
    np.testing.assert_allclose(asked, np.diag(np.diag(asked)), atol=1e-4 * asked.max())
    np.testing.assert_allclose(stored, np.diag(np.diag(stored)), atol=1e-4 * stored.max())
    np.testing.assert_allclose(asked, stored, atol=1e-3 * asked.max())
    assert np.all(np.diff(np.diag(stored)) < 0)


def test_no_rank_k_maps_have_a_smaller_squared_error_of_the_scores():
    """The scores of K dimensions against the best rank-K matrix of all the scores, from numpy's SVD."""
    rng = np.random.default_rng(1)
    queries, rows = anisotropic(rng, 300), anisotropic(rng, 200)
    rows -= rows.mean(0)
    scores = queries.astype(np.float64) @ rows.T.astype(np.float64)
    values = np.linalg.svd(scores, compute_uv=False)
    pair = fitted(queries, rows, shrinkage=1e-7)
    for rank in (2, 6, 11):
        approximate = queries @ np.asarray(pair.query[0, :, :rank]) @ (rows @ np.asarray(pair.row[0, :, :rank])).T
        assert np.sum((scores - approximate) ** 2) == pytest.approx(np.sum(values[rank:] ** 2), rel=0.01)


def test_masked_queries_are_left_out_and_moments_of_nothing_are_the_identity():
    rng = np.random.default_rng(2)
    queries, rows = anisotropic(rng, 60), anisotropic(rng, 50)
    wild = np.concatenate([queries, np.full((5, C), 1e6, np.float32)])
    mask = np.arange(65) < 60
    covariance = jnp.asarray(np.cov(rows, rowvar=False), jnp.float32)[None]
    masked = fit(jnp.asarray(wild)[None], jnp.asarray(mask)[None], covariance, 0.01)
    alone = fit(jnp.asarray(queries)[None], jnp.ones((1, 60), bool), covariance, 0.01)
    np.testing.assert_allclose(masked.query, alone.query, atol=1e-5)
    nothing = fit(jnp.zeros((1, 4, C)), jnp.zeros((1, 4), bool), jnp.zeros((1, C, C)), 0.01)
    product = np.asarray(nothing.query[0]) @ np.asarray(nothing.row[0]).T
    np.testing.assert_allclose(product, np.eye(C), atol=1e-6)
    assert np.isfinite(nothing.error).all()


# Codes


@hypothesis.given(st.lists(st.integers(-8, 7), min_size=2, max_size=32).filter(lambda x: len(x) % 2 == 0))
def test_packed_codes_come_back(values):
    values = jnp.asarray(values, jnp.int8)
    assert codes.pack(values).shape == (len(values) // 2,)
    np.testing.assert_array_equal(codes.unpack(codes.pack(values)), values)


def test_packing_by_hand():
    """-1 = 0xF in the low half, 7 in the high one; then 3 and -8 = 0x8."""
    np.testing.assert_array_equal(codes.pack(jnp.asarray([-1, 3, 7, -8], jnp.int8)), [0x7F, 0x83])


@pytest.mark.parametrize(("kind", "bits"), KINDS)
def test_no_closed_row_is_clipped_and_none_is_off_by_more_than_half_a_step(kind, bits):
    here = calibrated(kind, bits)
    projected, _ = index.project(here.spec, here.cache.index.basis, here.cache.archive.rows[..., :C])
    stored = np.asarray(codes.to_float32(here.cache.index.code), np.float64)
    for b, closed in enumerate((64, 32, 0)):
        if bits == 16:
            continue
        step = np.asarray(here.cache.index.step[b], np.float64)
        off = np.abs(stored[b, :closed] * step - np.asarray(projected[b, :closed]))
        assert np.all(off <= 0.5001 * step + 1e-5)
        if closed:
            assert np.all(np.abs(stored[b, :closed]).max(0) == codes.largest(bits))


@functools.cache
def calibrated(kind, bits, bound="calibrated", **changes):
    """A filled cache with an index fitted to queries that look for its rows."""
    rank = 6 if kind == "balanced" else 4
    here = scene(3, index=kind, index_bits=bits, rank=rank, bound=bound, **changes)
    return recalibrated(here)


def recalibrated(here, seed=4, count=24):
    rng = np.random.default_rng(seed)
    queries = np.stack([queries_for(rng, here.rows[b, : here.lengths[b]], count, H) for b in range(3)])
    positions = np.stack([np.sort(rng.integers(0, n, count)) for n in here.lengths]).astype(np.int32)
    return here._replace(cache=vj.calibrate(here.spec, here.cache, jnp.asarray(queries), jnp.asarray(positions)))


@pytest.mark.parametrize(("kind", "bits"), [*KINDS, ("sketch", 16)])
@hypothesis.given(
    seed=st.integers(0, 10**6), size=st.sampled_from([1e-2, 1.0, 50.0]), far=st.sampled_from([0.1, 1.0, 20.0])
)
@hypothesis.settings(max_examples=12)
def test_the_certificate_holds_for_every_row_and_query(kind, bits, seed, size, far):
    """Sound mode: |score - index score| <= bound for unseen queries and rows, clipped or not."""
    here, rng = calibrated(kind, bits, "sound"), np.random.default_rng(seed)
    spec, held = here.spec, here.cache.index
    rows = np.stack([far * random_rows(rng, 16) for _ in range(3)]).astype(np.float32)
    query = (size * rng.normal(size=(3, H, C))).astype(np.float32)
    code, bound = index.encode(spec, held.basis, jnp.asarray(rows), held.step)
    probe = index.prepare(spec, held.basis, jnp.asarray(query), held.step)
    without = probe._replace(residual=jnp.zeros_like(probe.residual))
    known = np.asarray(recall.probe_scores(without, jnp.asarray(rows), code, bound), np.float64)
    allowed = np.einsum("bqe,bes->bqs", np.asarray(probe.residual, np.float64), np.asarray(bound, np.float64))
    exact = spec.scale * np.einsum("bqc,bsc->bqs", query.astype(np.float64), rows.astype(np.float64))
    assert np.all(np.abs(exact - known) <= allowed)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_sound_bound_counts_what_digits_leave_out_of_a_query(bits):
    """Kernels write a query in digits of its largest number: here that of a dimension of which no row has anything."""
    spec, rng = small_spec(index="balanced", index_bits=bits, rank=8, bound="sound"), np.random.default_rng(7)
    basis, step = balanced.unit(1, C), jnp.asarray([[1e5, *[1.0] * 7]])
    rows, query = np.zeros((1, 40, C), np.float32), np.zeros((1, H, C), np.float32)
    rows[..., 1:8] = rng.integers(-7, 8, (1, 40, 7))  # whole steps: nothing is rounded
    query[..., 0], query[..., 1:8] = 10.0, rng.normal(size=(1, H, 7))
    code, bound = index.encode(spec, basis, jnp.asarray(rows), step)
    probe = index.prepare(spec, basis, jnp.asarray(query), step)
    unit, digits = exact.digits(jnp.concatenate(unpack.gpu_queries(probe.sketch, code), -1))
    upper = np.where((bits == 4) & (np.arange(8) >= 4), 16, 1)
    kept = oracle.whole(digits) * np.asarray(unit, np.float64)[..., None] * upper
    numbers = np.asarray(codes.to_float32(code), np.float64)
    missed = np.abs(np.einsum("bqk,bsk->bqs", kept - np.asarray(probe.sketch, np.float64), numbers))
    allowed = np.einsum("bqe,bes->bqs", np.asarray(probe.residual, np.float64), np.asarray(bound, np.float64))
    assert np.all(missed <= allowed) and missed.max() > 1e-6 * spec.scale * np.linalg.norm(query[0, 0])


def test_rows_of_later_blocks_are_clipped_and_the_bound_says_by_how_much():
    here = calibrated("balanced", 8)
    spec, held = here.spec, here.cache.index
    far = jnp.asarray(np.stack([100 * here.rows[b, :4] for b in range(3)]))
    code, bound = index.encode(spec, held.basis, far, held.step)
    projected, eta = index.project(spec, held.basis, far)
    over = np.maximum(np.abs(projected) - 127 * np.asarray(held.step)[:, None], 0)
    assert np.abs(code).max() == 127 and over[0].max() > 0
    np.testing.assert_allclose(bound[:, 0], eta + np.linalg.norm(over, axis=-1), rtol=1e-5)


# Served


@pytest.mark.parametrize(("kind", "bits"), KINDS)
def test_the_calibrated_share_of_hard_queries_finds_its_row(kind, bits):
    """On the calibration queries themselves at least tau_s of the hard ones fire their target, as the sketch does."""
    here = calibrated(kind, bits)
    rng = np.random.default_rng(4)
    query = np.stack([queries_for(rng, here.rows[b, : here.lengths[b]], 24, H) for b in range(3)])
    at = np.stack([np.sort(rng.integers(0, n, 24)) for n in here.lengths]).astype(np.int32)
    flat, position = jnp.asarray(query.reshape(3, -1, C)), jnp.repeat(jnp.asarray(at), H, axis=1)
    samples = calibration.observe(here.spec, here.cache, flat, position)
    need = calibration.required_z(here.spec, here.cache, flat, samples)
    hard = np.asarray(samples.hard[0])
    fires = np.asarray(need[0] <= here.cache.calibration.z[0])
    assert hard.sum() >= 18 and not here.cache.calibration.clamped[0]
    assert fires[hard].mean() >= 18 / 19 - 1e-9


@pytest.mark.parametrize(("kind", "bits"), KINDS)
def test_attention_is_exact_over_what_was_fetched(kind, bits):
    here = calibrated(kind, bits, trace=True)
    rng = np.random.default_rng(9)
    query = np.stack([queries_for(rng, here.rows[b, : here.lengths[b]], H) for b in range(3)])
    out, stats = vj.attend(here.spec, here.cache, jnp.asarray(query))
    tier = np.asarray(vj.where(here.spec, here.cache))
    assert stats.fetched[0] > 0
    for b, count in enumerate(here.lengths):
        used = (tier[b, :count] == 1) | (tier[b, :count] == 2)
        archived = min(count, stats.rows.shape[1])
        used[:archived] |= np.asarray(stats.rows[b, :archived])
        rows = here.rows[b, :count][used].astype(np.float64)
        score = here.spec.scale * query[b].astype(np.float64) @ rows.T
        weight = np.exp(score - score.max(-1, keepdims=True))
        exact = weight @ rows[:, :R] / weight.sum(-1, keepdims=True)
        np.testing.assert_allclose(out[b], exact, atol=2e-5)


@pytest.mark.parametrize(("kind", "bits"), [("balanced", 4), ("balanced", 16)])
def test_a_ragged_batch_is_its_sequences_one_by_one(kind, bits):
    here = calibrated(kind, bits)
    for b in range(3):
        alone = fill(here.spec, here.rows[b : b + 1], here.lengths[b : b + 1])
        rng = np.random.default_rng(4)
        queries = np.stack([queries_for(rng, here.rows[i, : here.lengths[i]], 24, H) for i in range(3)])[b : b + 1]
        positions = np.stack([np.sort(rng.integers(0, n, 24)) for n in here.lengths]).astype(np.int32)[b : b + 1]
        cache = vj.calibrate(here.spec, alone.cache, jnp.asarray(queries), jnp.asarray(positions))
        np.testing.assert_allclose(cache.calibration.z, here.cache.calibration.z[b : b + 1], rtol=2e-2, atol=2e-2)
        np.testing.assert_allclose(cache.index.basis.error, here.cache.index.basis.error[b : b + 1], atol=1e-4)


@pytest.mark.parametrize(("kind", "bits"), [("balanced", 16), ("balanced", 4), ("sketch", 8)])
def test_rows_spread_over_a_mesh_axis_get_the_index_of_all_of_them(kind, bits):
    """Two devices with two blocks each against one with four: the same maps everywhere, and the same codes."""
    spec, rng = small_spec(index=kind, index_bits=bits, rank=6), np.random.default_rng(2)
    rows = random_rows(rng, 64)[None]
    rows[:, 32:] *= 3  # neither half has the moments of the whole
    query = jnp.asarray(queries_for(rng, rows[0], 24, H).reshape(1, -1, C))
    refit = functools.partial(calibration.refit, spec, query=query, mask=jnp.ones(query.shape[:2], bool))
    whole = jax.jit(refit)(fill(spec, rows, (64,)).cache).index
    halves = jax.tree.map(lambda *x: jnp.stack(x), *(fill(spec, rows[:, i : i + 32], (32,)).cache for i in (0, 32)))
    spread = jax.jit(jax.vmap(functools.partial(refit, axis="context"), axis_name="context"))(halves).index

    jax.tree.map(lambda part: np.testing.assert_array_equal(part[0], part[1]), (spread.basis, spread.step))
    np.testing.assert_allclose(spread.step[0], whole.step, rtol=1e-3)
    held = np.concatenate([np.asarray(codes.to_float32(spread.code[i]))[:, :32] for i in (0, 1)], axis=1)
    atol = 1.01 if bits < 16 else 1e-2 * np.abs(held).max()  # a number between two codes may go either way
    np.testing.assert_allclose(held, np.asarray(codes.to_float32(whole.code))[:, :64], atol=atol)


def test_calibration_from_decode_queries():
    """The 64th decode query installs an index fitted to queries and rows; blocks that close later use it."""
    spec = small_spec(index="balanced", index_bits=8, rank=6, calibration="decode", capacity=180, block=32)
    rng = np.random.default_rng(5)
    rows = random_rows(rng, 1, 64)
    cache = vj.append(spec, vj.init(spec, 1), jnp.asarray(rows))
    step = jax.jit(vj.step, static_argnums=0)
    for _ in range(70):
        query = jnp.asarray(queries_for(rng, rows[0], H))[None]
        _, stats, cache = step(spec, cache, query, jnp.asarray(random_rows(rng, 1)))
    assert bool(cache.calibration.installed[0]) and int(stats.fault[0]) == 0
    assert not np.array_equal(cache.index.basis.query[0], np.eye(C))
    code, bound = index.encode(spec, cache.index.basis, cache.archive.rows[..., :C], cache.index.step)
    closed = int(cache.archive.closed[0])
    assert closed == 128
    np.testing.assert_array_equal(cache.index.code[0, :closed], code[0, :closed])
    np.testing.assert_allclose(cache.index.bound[0, :, :closed], bound[0, :, :closed], rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"index": "balanced", "rank": 0}, "rank=0 of a balanced index must lie in 1"),
        ({"index": "balanced", "rank": C + 1}, f"rank={C + 1} of a balanced index"),
        ({"index": "other"}, "index='other' is not available; choose from"),
        ({"index_bits": 5}, "index_bits=5"),
        ({"index_bits": 4.0}, "index_bits=4.0"),
        ({"index_bits": 4, "rank": 5}, "rank=5 must be even"),
        ({"shrinkage": 0.0}, "shrinkage=0.0 must be a positive"),
    ],
)
def test_bad_choices(changes, words):
    with pytest.raises(ValueError, match=words):
        small_spec(**changes)


@pytest.mark.parametrize(("kind", "bits"), [*KINDS, ("sketch", 16)])
def test_counted_bytes_are_the_allocated_ones(kind, bits):
    spec = dataclasses.replace(small_spec(), index=kind, index_bits=bits, rank=4)
    cache = jax.eval_shape(lambda: vj.init(spec, 2))
    bytes_of = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    assert spec.nbytes(2)["index"] == bytes_of(cache.index)
