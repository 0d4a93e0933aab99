"""sigma, the high-frequency energy of the branch, and the public keep set (VestigeKV §2)."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vestige_jax as vj
from tests import oracle

METHODS = ("fft", "projection")


def signal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("block", "kappa", "width"), [(8, 1, 4), (9, 4, 1), (4096, 16, 4)])
def test_both_methods_equal_the_float64_oracle(method, block, kappa, width):
    branch = signal(0, 2 * block, width)
    got = vj.sigma(branch, block=block, kappa=kappa, method=method)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, oracle.sigma(branch, block, kappa), rtol=1e-5, atol=1e-5)


def test_leading_axes_are_independent():
    branch = signal(1, 2, 3, 16, 4)
    got = vj.sigma(branch, block=8, kappa=2)
    assert got.shape == (2, 3, 16)
    for index in np.ndindex(2, 3):
        np.testing.assert_allclose(got[index], oracle.sigma(branch[index], 8, 2), rtol=1e-5)


def test_each_block_is_filtered_on_its_own():
    branch = signal(2, 16, 4)
    changed = branch.copy()
    changed[8:] = 100
    np.testing.assert_array_equal(vj.sigma(branch, block=8, kappa=2)[:8], vj.sigma(changed, block=8, kappa=2)[:8])


@pytest.mark.parametrize("method", METHODS)
def test_a_hand_computed_block(method):
    """With one bin the low-pass is the mean: sigma is the distance to it."""
    branch = np.array([[1.0, 0.0], [3.0, 0.0], [2.0, 4.0], [2.0, -4.0]], np.float32)  # mean (2, 0)
    np.testing.assert_allclose(vj.sigma(branch, block=4, kappa=1, method=method), [1, 1, 4, 4], atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_signals_within_the_lowest_bins_have_no_energy(method):
    """Channel 0 is the constant signal; channel 15 is the last bin that the low-pass keeps."""
    branch = np.cos(2 * np.pi * np.outer(np.arange(128), np.arange(16)) / 128 + 0.3).astype(np.float32)
    assert np.abs(vj.sigma(branch, block=128, kappa=16, method=method)).max() < 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_the_first_bin_above_the_low_pass_keeps_all_its_energy(method):
    wave = np.cos(2 * np.pi * 16 * np.arange(128) / 128).astype(np.float32)[:, None]
    np.testing.assert_allclose(vj.sigma(wave, block=128, kappa=16, method=method), np.abs(wave[:, 0]), atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_input_is_filtered_in_float32(method):
    branch = signal(3, 64, 4).astype(jnp.bfloat16)
    got = vj.sigma(jnp.asarray(branch), block=64, kappa=4, method=method)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, oracle.sigma(branch, 64, 4), rtol=1e-5, atol=1e-5)


def test_default_kappa_is_16_bins_in_proportion_to_the_block():
    def bins(block):
        return vj.CacheSpec(4, 2, 1, 1.0, 100, block=block, sinks=0, rank=1).lowpass_bins

    expected = {4096: 16, 2048: 8, 8192: 32, 512: 2, 256: 1, 384: 2, 383: 1, 8: 1, 2: 1}  # 384 / 256 = 1.5 rounds up
    assert {block: bins(block) for block in expected} == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(method="dct"), r"method='dct'.*fft.*projection"),
        (dict(kappa=0), r"kappa=0.*block=8"),
        (dict(kappa=5), r"kappa=5.*block=8"),  # 2 * 5 - 1 = 9
        (dict(branch=np.zeros((7, 2), np.float32)), r"branch.*7 rows.*block=8"),
        (dict(branch=np.zeros(8, np.float32)), r"branch.*\(8,\).*S, P"),
        (dict(branch=np.zeros((8, 2), np.int32)), r"branch.*int32"),
    ],
)
def test_a_bad_argument_of_sigma_is_named(change, message):
    arguments = dict(branch=np.zeros((8, 2), np.float32), block=8, kappa=2) | change
    with pytest.raises(ValueError, match=message):
        vj.sigma(arguments.pop("branch"), **arguments)


# keep


def kept(scores, **options):
    """Positions kept of these closed rows, when unclosed ones with tempting scores follow."""
    padded = jnp.asarray([*scores, *[99] * (20 - len(scores))], jnp.float32)
    return np.flatnonzero(vj.keep(padded, len(scores), **options)).tolist()


def test_keep_holds_the_sinks_and_the_best_of_the_others():
    assert kept([0, 0, 5, 1, 9, 2, 7, 3], ratio=0.25, sinks=2) == [0, 1, 4, 6]


def test_a_sink_takes_no_place_of_the_others_however_high_its_score():
    assert kept([9, 1, 2, 3], budget=1, ratio=None, sinks=1) == [0, 3]


def test_ties_go_to_the_lower_position():
    assert kept([1, 2, 2, 2, 1, 2], budget=2, ratio=None, sinks=0) == [1, 2]
    assert kept([0] * 8, ratio=0.25, sinks=1) == [0, 1, 2]


def test_rows_past_closed_are_not_kept_whatever_their_score():
    scores = jnp.asarray([1, 2, 3, 9, 9], jnp.float32)
    assert vj.keep(scores, 3, ratio=None, budget=2, sinks=0).tolist() == [False, True, True, False, False]


def test_fewer_closed_rows_than_sinks_are_all_kept_and_nothing_else():
    assert kept([1, 2], ratio=1.0, sinks=3) == [0, 1]
    assert kept([], ratio=1.0, sinks=3) == []


def test_at_least_one_row_is_kept_besides_the_sinks():
    assert kept([3, 1, 2, 1], ratio=1 / 32, sinks=0) == [0]


def test_the_ratio_rounds_half_up():
    assert len(kept(range(10), ratio=0.25, sinks=0)) == 3  # 2.5 + 0.5
    assert len(kept(range(9), ratio=0.25, sinks=0)) == 2  # 2.25 + 0.5


def test_ratio_one_keeps_all():
    assert kept(range(5), ratio=1.0, sinks=2) == [0, 1, 2, 3, 4]


def test_a_budget_beyond_the_rows_keeps_all():
    assert kept([1, 2, 3], budget=10, ratio=None, sinks=1) == [0, 1, 2]


def test_negative_scores_are_ranked_like_any_other():
    assert kept([-5, -1, -3], budget=1, ratio=None, sinks=0) == [1]


def test_a_row_scored_minus_infinity_comes_last_but_takes_a_free_place():
    worst = -np.inf
    assert kept([worst, worst, worst, 1, worst], budget=3, ratio=None, sinks=1) == [0, 1, 2, 3]


def test_keep_takes_leading_axes_and_a_count_for_each():
    scores = signal(4, 2, 3, 12)
    closed = np.array([[12, 5, 0], [1, 8, 11]])
    got = vj.keep(scores, jnp.asarray(closed), ratio=0.3, sinks=1)
    assert got.shape == scores.shape and got.dtype == bool
    for index in np.ndindex(2, 3):
        assert np.flatnonzero(got[index]).tolist() == oracle.keep(scores[index][: closed[index]], ratio=0.3, sinks=1)


@given(
    scores=st.lists(st.integers(-2, 2), max_size=20),
    sinks=st.sampled_from([0, 1, 5]),
    ratio=st.sampled_from([0.05, 0.5, 1.0]),
)
def test_keep_equals_the_oracle_with_many_ties(scores, sinks, ratio):
    assert kept(scores, ratio=ratio, sinks=sinks) == oracle.keep(scores, ratio=ratio, sinks=sinks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(ratio=0.0), r"ratio=0\.0.*\(0, 1\]"),
        (dict(ratio=1.5), r"ratio=1\.5.*\(0, 1\]"),
        (dict(ratio=float("nan")), r"ratio=nan.*\(0, 1\]"),
        (dict(ratio=0.5, budget=3), r"ratio=0\.5.*budget=3"),
        (dict(ratio=None), r"ratio=None.*budget=None"),
        (dict(ratio=None, budget=0), r"budget=0"),
        (dict(ratio=0.5, sinks=-1), r"sinks=-1"),
    ],
)
def test_a_bad_option_of_keep_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        vj.keep(jnp.zeros(4), jnp.asarray(4), **(dict(sinks=0) | options))


@pytest.mark.parametrize(
    ("scores", "closed", "message"),
    [
        (np.zeros((2, 4)), [4], r"closed has shape \(1,\); expected the leading axes of sigma \[\.\.\., S\] = \(2,\)"),
        (np.zeros((2, 4)), 4, r"closed has shape \(\); expected .* = \(2,\)"),
        (np.zeros(4), [4], r"closed has shape \(1,\); expected .* = \(\)"),
        (np.zeros(()), 4, r"sigma has shape \(\); expected \[\.\.\., S\]"),
        (np.zeros(4), 4.0, r"closed has dtype float32; expected integers"),
    ],
)
def test_a_bad_array_of_keep_is_named(scores, closed, message):
    with pytest.raises(ValueError, match=message):
        vj.keep(scores, closed, ratio=0.5, sinks=0)
