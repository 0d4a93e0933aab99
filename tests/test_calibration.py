"""Calibration: z, gate and basis against an example worked out by hand, plain loops in float64, and coverage."""

import dataclasses
import fractions
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vestige_jax as vj
from tests import oracle_attention as oracle
from tests.scenes import CAPACITY, C, H, R, Scene, best_scores, fill, queries_for, scene, small_spec
from tests.sources import random_rows
from vestige_jax import calibration

pytestmark = pytest.mark.usefixtures("quick_compilation")

# --- by hand


def two_way_entropy(difference):
    """Entropy in nats of the softmax over two scores that far apart."""
    p = 1 / (1 + math.exp(-difference))
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


def test_z_and_gate_of_an_example_worked_out_by_hand():
    """R = 2, P = 1, one head, scale 1, K = 1, tau = 1/2: alpha = 1/4, tau_s = 2/3.

    Rows [c_x, c_y | r]; row 0 is kept, rows 1 to 3 archived, row 4 the tail. Query [x, y | b] at position 4 scores
        row 0: b    row 1: x    row 2: 2y    row 3: 2b - 2y    row 4: -b
    so s* = |b|. x varies most and is uncorrelated with y: V = (1, 0). Hence eta is 0 for row 1 and 2 for rows 2 and 3,
    cert = 2 |y| / sqrt(R - K) = 2 |y|, and idx is x for row 1, 0 for row 2, 2b for row 3.
    """
    rows = np.array([[[0, 0, 1], [1, 0, 0], [0, 2, 0], [0, -2, 2], [0, 0, -1]]], np.float32)
    asked = [
        # x, y, b       target  z = (s* - idx) / cert
        (3, 1, 0.2),  #  row 1  -inf: 0.2 < 3, cert 0
        (-3, 1, 0.5),  # row 2  0.5 / 2 = 0.25
        (2, 2, 2.0),  #  row 2  2 / 4 = 0.5
        (-2, 2, 1.4),  # row 2  1.4 / 4 = 0.35
        (-2, -1, 0.5),  # row 3  (0.5 - 1) / 2 = -0.25
        (2, -1, 0.25),  # row 3  (0.25 - 0.5) / 2 = -0.125
        (0, 1, 1.5),  #  row 2  1.5 / 2 = 0.75
        (0, 0.1, -3),  # row 4, attended: not hard
        (0, 0.1, -4),  # row 4, attended: not hard
        (9, 9, 9),  #    position -1: ignored
    ]
    # n = 7 hard samples, k = ceil(8 * 2/3) = 6: of -inf, -.25, -.125, .25, .35, .5, .75 the sixth.
    # Their entropies fall with |b|; the quantile 1/4 of seven lies at 1.5, half way between |b| = 1.5 and 1.4.
    # Above it are five of nine samples, not more than 60%: the gate stays.
    threshold = (two_way_entropy(2 * 1.5) + two_way_entropy(2 * 1.4)) / 2
    spec = vj.CacheSpec(
        2,
        1,
        1,
        1.0,
        8,
        block=4,
        budget=1,
        sinks=0,
        rank=1,
        recall_target=0.5,
        dtype=jnp.float32,
        sketch_dtype="float16",
    )
    cache = vj.append(spec, vj.init(spec, 1), rows)
    cache = vj.keep_set(spec, cache, jnp.asarray([[True] + [False] * 7]))
    positions = np.array([[4] * 9 + [-1]])
    cache = vj.calibrate(spec, cache, np.array(asked, np.float32).reshape(1, 10, 1, 3), positions)
    np.testing.assert_allclose(np.abs(cache.index.basis), [[[1], [0]]], atol=1e-6)
    np.testing.assert_allclose(cache.calibration.z, [0.5], rtol=1e-6)
    np.testing.assert_allclose(cache.calibration.threshold, [threshold], rtol=1e-5)
    assert not cache.calibration.clamped[0] and cache.calibration.installed[0]


# --- the order statistic


@pytest.mark.parametrize("target, level", [(0.9, (18, 19)), (0.8, (8, 9)), (0.95, (38, 39)), (0.5, (2, 3))])
def test_z_is_the_kth_smallest_for_every_number_of_hard_samples(target, level):
    spec, most = small_spec(recall_target=target, z_max=1e6), 400
    rng = np.random.default_rng(0)
    hard = np.arange(most) < np.arange(most + 1)[:, None]  # n of them in row n
    need = np.where(hard, np.arange(most), -5.0).astype(np.float32)  # the others are easier, and don't count
    order = rng.permutation(most)
    z, clamped = calibration.conformal_z(jnp.asarray(need[:, order]), jnp.asarray(hard[:, order]), spec)
    for n in range(most + 1):
        k = math.ceil((n + 1) * fractions.Fraction(*level))
        assert clamped[n] == (k > n)
        assert z[n] == (1e6 if k > n else k - 1)


def test_z_is_at_most_z_max_and_then_not_clamped():
    need, hard = jnp.full((1, 30), 11.0), jnp.ones((1, 30), bool)
    z, clamped = calibration.conformal_z(need, hard, small_spec())
    assert z[0] == 8.0 and not clamped[0]


def test_a_z_of_minus_infinity_fires_nothing_but_stays_a_number():
    need, hard = jnp.full((1, 30), -jnp.inf), jnp.ones((1, 30), bool)
    z, _ = calibration.conformal_z(need, hard, small_spec())
    assert np.isfinite(z[0]) and z[0] < -1e20 and z[0] * 0.0 == 0


@pytest.mark.parametrize("count", [1, 2, 19, 20, 21, 40, 63])
def test_the_gate_quantile_is_numpys(count):
    rng = np.random.default_rng(count)
    values, mask = rng.normal(size=(4, 64)).astype(np.float32), np.argsort(rng.random((4, 64))) < count
    for quantile in (0.05, 0.25, 0.5):
        got = calibration.masked_quantile(jnp.asarray(values), jnp.asarray(mask), quantile)
        expected = [np.quantile(v[m], quantile) for v, m in zip(values, mask, strict=True)]
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def gate_of(hard_entropies, easy_entropies, clamped=False):
    entropy = jnp.asarray([[*hard_entropies, *easy_entropies, 99.0]], jnp.float32)  # the last is masked out
    hard = np.arange(entropy.shape[1]) < len(hard_entropies)
    none = jnp.zeros_like(entropy)
    mask = jnp.asarray([[True] * (entropy.shape[1] - 1) + [False]])
    samples = calibration.Samples(
        mask, none, none.astype(int), entropy, jnp.where(hard, 1.0, -1.0)[None], none.astype(int)
    )
    np.testing.assert_array_equal(samples.hard[0], hard)
    return float(calibration.gate_threshold(samples, jnp.asarray([clamped]), small_spec())[0])


def test_the_gate_stays_when_it_passes_exactly_sixty_percent():
    hard = 1 + np.arange(19.0)  # quantile 0.05 of 19 lies at 0.9 between the first two: 18 pass
    assert gate_of(hard, np.zeros(11)) == pytest.approx(1.9)  # 18 of 30
    assert gate_of(hard, np.zeros(10)) == -np.inf  # 18 of 29


def test_the_gate_is_open_when_hard_samples_are_too_few():
    assert gate_of(1 + np.arange(19.0), np.zeros(30)) == pytest.approx(1.9)
    assert gate_of(1 + np.arange(19.0), np.zeros(30), clamped=True) == -np.inf


# --- whole calibrations against the oracle


def calibrated(here: Scene, queries, positions) -> Scene:
    return here._replace(cache=vj.calibrate(here.spec, here.cache, queries, positions))


def assert_calibrated(here: Scene, queries, positions):
    """z, gate and clamped of the scene's cache are those of plain loops. Returns the number of hard samples of each."""
    held, counts = here.cache.calibration, []
    for b in range(len(here.lengths)):
        found = oracle.samples(
            here.sequence(b), oracle.rounded(queries[b], here.spec.dtype), positions[b], latent_dim=R,
            scale=here.spec.scale, sketch_dtype=here.spec.sketch_dtype,
        )  # fmt: skip
        z, threshold, clamped = oracle.calibrated(found, tau=here.spec.recall_target, z_max=here.spec.z_max)
        np.testing.assert_allclose(held.z[b], z, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(held.threshold[b], threshold, rtol=1e-4)
        assert held.clamped[b] == clamped
        counts.append(sum(s.hard for s in found))
    return counts


COUNT = 32


def prompt_queries(here, seed, easy=0.0):
    """COUNT queries a sequence, each at some position of its second half; a share looks for attended rows alone."""
    rng = np.random.default_rng(seed)
    queries, positions = np.zeros((3, COUNT, H, C), np.float32), np.zeros((3, COUNT), int)
    for b, n in enumerate(here.lengths):
        queries[b] = queries_for(rng, here.rows[b, :n], COUNT, H)
        positions[b] = rng.integers(n // 2, n, COUNT)
        is_easy = rng.random((COUNT, H)) < easy
        queries[b][is_easy] = 8 * here.rows[b, 0]  # a sink, hence kept
    return queries, positions


@pytest.mark.parametrize("source", ["random", "correlated"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_z_gate_and_clamped_are_those_of_plain_loops(source, dtype):
    here = scene(1, source, dtype=dtype, sketch_dtype=dtype)
    queries, positions = prompt_queries(here, 1)
    counts = assert_calibrated(calibrated(here, queries, positions), queries, positions)
    assert counts[0] >= 18 and counts[2] == 0


def test_a_gate_below_its_ceiling_is_installed():
    here = scene(2)
    queries, positions = prompt_queries(here, 2, easy=0.6)
    here = calibrated(here, queries, positions)
    assert assert_calibrated(here, queries, positions)[0] >= 18
    assert np.isfinite(here.cache.calibration.threshold[0])


def test_the_basis_is_fitted_to_the_content_of_all_heads_of_the_queries_that_count():
    here = scene(3)
    queries, positions = prompt_queries(here, 3)
    positions[:, ::4] = -1
    queries[:, ::4] *= 1000
    here = calibrated(here, queries, positions)
    for b in range(3):
        content = queries[b][positions[b] >= 0].reshape(-1, C)[:, :R]
        basis = np.asarray(here.cache.index.basis[b], np.float64)
        expected = oracle.basis(content, 5)
        np.testing.assert_allclose(basis @ basis.T, expected @ expected.T, atol=1e-3)


def test_queries_at_position_minus_one_change_nothing():
    here = scene(4)
    queries, positions = prompt_queries(here, 4)
    positions[:, ::4] = -1
    clean, wild = queries.copy(), queries.copy()
    clean[:, ::4], wild[:, ::4] = 0, 1e15
    one, other = (calibrated(here, q, positions).cache for q in (clean, wild))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), one.calibration, other.calibration
    )
    assert_calibrated(here._replace(cache=other), wild, positions)


def test_with_every_query_ignored_the_index_is_the_provisional_one():
    here = scene(5)
    queries, positions = prompt_queries(here, 5)
    cache = calibrated(here, queries, np.full_like(positions, -1)).cache
    np.testing.assert_array_equal(cache.index.basis, np.broadcast_to(np.eye(R, 5), (3, R, 5)))
    np.testing.assert_array_equal(cache.calibration.z, 8)
    np.testing.assert_array_equal(cache.calibration.threshold, -np.inf)
    assert np.all(cache.calibration.clamped)


def test_a_query_sees_no_row_after_its_position():
    here = scene(6)
    queries, _ = prompt_queries(here, 6)
    positions = np.tile(np.arange(COUNT) % 9, (3, 1))
    future = here.rows.copy()
    future[:, 9:] = 50 * future[:, 9:]  # would be every query's target
    later = fill(here.spec, future, here.lengths)
    later = later._replace(cache=vj.keep_set(here.spec, later.cache, here.cache.archive.kept))
    one, other = (calibrated(s, queries, positions).cache.calibration for s in (here, later))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), one, other)


def test_a_querys_own_row_counts_as_tail_although_it_is_archived():
    here = scene(7)
    archived = np.flatnonzero(np.asarray(vj.where(here.spec, here.cache))[0] == oracle.ARCHIVED)[-COUNT:]
    looking = np.broadcast_to(10 * here.rows[:, archived, None], (3, COUNT, H, C)).copy()
    looking[1:] = here.rows[1:, :1, None]  # the other sequences: whatever
    own, others = np.tile(archived, (3, 1)), np.full((3, COUNT), 69)
    assert calibrated(here, looking, own).cache.calibration.clamped[0], "no query should be hard"
    now = calibrated(here, looking, others)
    assert not now.cache.calibration.clamped[0], "asked elsewhere, they are"
    assert_calibrated(now, looking, others)
    assert_calibrated(calibrated(here, looking, own), looking, own)


def test_queries_are_rounded_to_the_row_dtype_before_anything_else():
    here = scene(1, dtype="bfloat16", sketch_dtype="bfloat16")
    queries, positions = prompt_queries(here, 8)
    fine = calibrated(here, queries, positions).cache
    coarse = calibrated(here, oracle.rounded(queries, "bfloat16").astype(np.float32), positions).cache
    jax.tree.map(np.testing.assert_array_equal, fine, coarse)


def test_a_block_closed_after_calibration_is_indexed_with_the_fitted_basis():
    here = scene(9, lengths=(40, 37, 9))
    here = calibrated(here, *prompt_queries(here, 9))
    more = np.zeros((3, CAPACITY, C), np.float32)
    more[:, :30] = random_rows(np.random.default_rng(9), 3, 30)
    cache = vj.append(here.spec, here.cache, more, jnp.asarray([30, 30, 30]))
    np.testing.assert_array_equal(cache.index.basis, here.cache.index.basis)
    np.testing.assert_array_equal(cache.calibration.z, here.cache.calibration.z)
    rebuilt = jax.jit(calibration.rebuild, static_argnums=0)(here.spec, cache, cache.index.basis)
    np.testing.assert_allclose(cache.index.code, rebuilt.index.code, atol=1e-6)
    np.testing.assert_allclose(cache.index.bound, rebuilt.index.bound, atol=1e-6)
    for b, n in enumerate((40, 37, 9)):
        latent = np.vstack([here.rows[b, :n], more[b, :30]])[: (n + 30) // 16 * 16, :R].astype(np.float64)
        basis = np.asarray(cache.index.basis[b], np.float64)
        np.testing.assert_allclose(cache.index.code[b, : len(latent)], latent @ basis, atol=1e-5)


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda q, p: (q[..., :15], p), r"queries has shape \(3, 32, 3, 15\)"),
        (lambda q, p: (q, p[:, :5]), r"positions has shape \(3, 5\)"),
        (lambda q, p: (q, p.astype(float)), "positions has dtype float"),
        (lambda q, p: (q * np.nan, p), "queries holds NaN"),
    ],
)
def test_bad_arguments_of_calibrate_raise(spoil, words):
    here = scene(1)
    with pytest.raises(ValueError, match=words):
        vj.calibrate(here.spec, here.cache, *spoil(*prompt_queries(here, 1)))


# --- coverage


def test_coverage_on_exchangeable_hard_samples_is_what_conformal_prediction_promises():
    """3500 sequences, each calibrated on 40 queries; a 41st from the same distribution is served.

    Given n hard calibration samples, its best row is fetched with probability k / (n + 1). K = 0 keeps the basis, and
    with it exchangeability, out of the calibration queries' hands.
    """
    draws, rng = 3500, np.random.default_rng(60)
    spec = vj.CacheSpec(
        4,
        2,
        1,
        1.0,
        20,
        block=8,
        budget=2,
        sinks=1,
        rank=0,
        fetch=16,
        z_max=1e6,
        dtype=jnp.float32,
        sketch_dtype="float32",
    )
    cache = vj.append(spec, vj.init(spec, draws), rng.normal(size=(draws, 18, 6)).astype(np.float32))
    queries = rng.normal(size=(draws, 41, 1, 6)).astype(np.float32)
    cache = vj.calibrate(spec, cache, queries[:, :40], np.full((draws, 40), 17))
    held = cache.calibration
    cache = dataclasses.replace(cache, calibration=dataclasses.replace(held, threshold=jnp.full(draws, -jnp.inf)))

    observe = jax.jit(calibration.observe, static_argnums=0)
    hard = np.asarray(observe(spec, cache, queries[:, :, 0], jnp.full((draws, 41), 17)).hard)
    count = hard[:, :40].sum(1)
    counts = hard[:, 40] & ~np.asarray(held.clamped)
    assert counts.sum() >= 2000
    reached, best = best_scores(spec, cache, queries[:, 40])
    covered = np.asarray(reached >= best - 1e-5)[:, 0]
    promised = np.ceil((count + 1) * 18 / 19 - 1e-9) / (count + 1)
    excess = (covered - promised)[counts]
    error = excess.std() / math.sqrt(len(excess))
    assert abs(excess.mean()) < 3 * error or covered[counts].mean() > 18 / 19, (excess.mean(), error)
    assert abs(excess.mean()) < 5 * error, "covering far more than promised would be waste"
