"""Calibration from decode queries: when it is installed, from what, and that it stays."""

import functools

import jax
import numpy as np
import pytest

import vestige_jax as vj
from tests import oracle_attention as oracle
from tests.scenes import C, H, R, Scene, fill, queries_for, small_spec
from tests.sources import random_rows

pytestmark = pytest.mark.usefixtures("quick_compilation")


class Decoded:
    """64 steps of a cache that calibrates itself: sequence 0 asks hard queries at every step, 1 never asks a hard one,

    2 does as 0 but rests at every other step.
    """

    def __init__(self):
        self.spec = small_spec(capacity=144, calibration="decode")
        rng = np.random.default_rng(50)
        start = fill(self.spec, random_rows(rng, 3, 144), (70, 37, 70))
        self.rows = random_rows(rng, 64, 3)
        self.queries = np.stack([queries_for(rng, start.rows[b, :37], 64, H) for b in range(3)], axis=1)
        self.queries[rng.random((64, 3, H)) < 0.3] = 40 * start.rows[0, 0]  # not all are hard
        self.queries[:, 1] = 40 * start.rows[1, 0] + rng.normal(size=(64, H, C))  # a sink, hence kept
        self.active = np.ones((64, 3), bool)
        self.active[::2, 2] = False
        self.scenes = self._run(start)

    def _run(self, start):
        """The scene before the first step and after each."""

        def body(cache, given):
            _, _, cache = vj.step(self.spec, cache, *given)
            return cache, cache

        given = (self.queries, self.rows, self.active)
        _, caches = jax.jit(functools.partial(jax.lax.scan, body))(start.cache, given)
        scenes, rows, lengths = [start], start.rows.copy(), np.array(start.lengths)
        for t in range(64):
            rows[np.arange(3), lengths] = np.where(self.active[t, :, None], self.rows[t], np.nan)
            lengths = lengths + self.active[t]
            cache = jax.tree.map(lambda x, t=t: x[t], caches)
            scenes.append(Scene(self.spec, cache, rows, tuple(int(n) for n in lengths)))
        return scenes

    def installed(self, b):
        """Step after which sequence b is calibrated, 1 for the first."""
        return next(t for t, scene in enumerate(self.scenes) if scene.cache.calibration.installed[b])

    def seen(self, b, steps):
        """Queries and positions of sequence b's active steps among the first `steps`."""
        active = np.flatnonzero(self.active[:steps, b])
        return self.queries[active, b], self.scenes[0].lengths[b] + np.arange(len(active))

    def expected(self, b, steps):
        """z, threshold and clamped by plain loops, with basis and tiers as they are after that step."""
        found = oracle.samples(
            self.scenes[steps].sequence(b), *self.seen(b, steps), latent_dim=R, scale=self.spec.scale,
            sketch_dtype=self.spec.sketch_dtype,
        )  # fmt: skip
        return oracle.calibrated(found)


@pytest.fixture(scope="module")
def decoded():
    return Decoded()


def test_until_enough_hard_queries_came_the_index_is_provisional(decoded):
    for scene_ in decoded.scenes[: decoded.installed(0)]:
        held = scene_.cache.calibration
        assert held.z[0] == 8 and held.threshold[0] == -np.inf and held.clamped[0]
        np.testing.assert_array_equal(scene_.cache.index.basis[0], np.eye(R, 5))


def test_decode_queries_calibrate_at_the_first_of_8_16_32_64_steps_with_enough_hard_ones(decoded):
    step = decoded.installed(0)
    too_few = [decoded.expected(0, t)[2] for t in (8, 12, 16)]
    assert too_few == [True, False, False], "the scene should have too few at step 8, and enough from step 12"
    assert step == 16
    z, threshold, _ = decoded.expected(0, 16)
    held = decoded.scenes[16].cache.calibration
    np.testing.assert_allclose(held.z[0], z, rtol=2e-4)
    np.testing.assert_allclose(held.threshold[0], threshold, rtol=1e-4)
    queries, _ = decoded.seen(0, 16)
    basis, expected = decoded.scenes[16].sequence(0).basis, oracle.basis(queries.reshape(-1, C)[:, :R], 5)
    np.testing.assert_allclose(basis @ basis.T, expected @ expected.T, atol=1e-3)


def test_steps_are_counted_by_sequence_and_only_while_active(decoded):
    step = decoded.installed(2)
    assert decoded.active[:step, 2].sum() in (8, 16, 32) and decoded.active[step - 1, 2]
    z, threshold, clamped = decoded.expected(2, step)
    assert not clamped
    np.testing.assert_allclose(decoded.scenes[step].cache.calibration.z[2], z, rtol=2e-4)
    np.testing.assert_allclose(decoded.scenes[step].cache.calibration.threshold[2], threshold, rtol=1e-4)


def test_after_64_decode_queries_the_index_is_installed_in_any_case(decoded):
    assert decoded.installed(1) == 64
    held, basis = decoded.scenes[64].cache.calibration, decoded.scenes[64].sequence(1).basis
    assert held.clamped[1] and held.z[1] == 8 and held.threshold[1] == -np.inf
    expected = oracle.basis(decoded.queries[:, 1].reshape(-1, C)[:, :R], 5)
    np.testing.assert_allclose(basis @ basis.T, expected @ expected.T, atol=1e-3)


def test_once_installed_nothing_changes_but_the_index_of_new_blocks(decoded):
    first, last = decoded.scenes[16], decoded.scenes[64]
    assert last.cache.archive.closed[0] > first.cache.archive.closed[0]
    for name in ("z", "threshold", "clamped", "count"):
        assert getattr(last.cache.calibration, name)[0] == getattr(first.cache.calibration, name)[0]
    np.testing.assert_array_equal(last.cache.index.basis[0], first.cache.index.basis[0])
    sequence = last.sequence(0)
    closed = int(last.cache.archive.closed[0])
    np.testing.assert_allclose(
        last.cache.index.code[0, :closed], sequence.rows[:closed, :R] @ sequence.basis, atol=1e-5
    )
