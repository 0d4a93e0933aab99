"""From margins to the list of rows to fetch: every length of list, on every device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas
from tests.kernels import oracle
from tests.kernels.backends import tracing_for

pytestmark = pytest.mark.usefixtures("quick_compilation")

DEVICES = {"xla": ("cpu", "cpu"), "mosaic_tpu": ("tpu", "TPU v5p"), "mosaic_gpu": ("gpu", "NVIDIA H200")}


def drawn(slots, share, seed):
    """Margins of three sequences: `share` of the rows fire, none at all, and exactly at the threshold."""
    draw = np.random.default_rng(seed)
    margin = np.where(draw.random((3, slots)) < share, draw.random((3, slots)), -1.0).astype(np.float32)
    margin[1] = -np.inf
    margin[0, :: max(1, slots // 3)] = 0.0
    fired = np.pad(margin >= 0, ((0, 0), (0, -slots % 128))).reshape(3, -1, 128).sum(-1, dtype=np.int32)
    return margin, kernels_pallas.Margins(jnp.asarray(margin), jnp.asarray(fired))


SIZES = [(64, 0), (64, 4), (600, 4), (600, 64), (600, 600), (4096, 1), (4096, 64)]
CASES = [(backend, *size) for backend in ("xla", "mosaic_tpu") for size in SIZES] + [("mosaic_gpu", 600, 4)]
CASES += [("xla", 70_000, width) for width in (3, 256, 600, 4096)]  # a CPU lists the few that fired piece by piece


@pytest.mark.parametrize("backend, slots, width", CASES)
def test_compact(backend, slots, width):
    compact = jax.jit(functools.partial(kernels_pallas.compact, width=width, implementation=backend))
    for share in (0.0, 0.007, 0.02, 1.0):
        margin, margins = drawn(slots, share, slots + width)
        with tracing_for(*DEVICES[backend]):
            got = compact(margins)
        for name, value, want in zip(got._fields, got, oracle.fetch_list(margin, width), strict=True):
            np.testing.assert_array_equal(value, want, err_msg=f"{name}, {share}")


def test_counts_set_to_zero_take_a_sequence_off_the_list():
    margins = kernels_pallas.Margins(jnp.ones((2, 512)), jnp.asarray([[128] * 4, [0] * 4], jnp.int32))
    for width in (2, 100):
        position, count, overflowed = kernels_pallas.compact(margins, width)
        np.testing.assert_array_equal(count, [width, 0])
        np.testing.assert_array_equal(overflowed, [True, False])
        np.testing.assert_array_equal(position[0], np.arange(width))
        np.testing.assert_array_equal(position[1], np.full(width, 512))


def test_a_short_list_looks_only_into_groups_that_fired():
    """Margins of groups whose count is 0 are not looked at: no second pass is made over the rows."""
    margin, margins = drawn(4096, 0.0, 0)
    count = np.asarray(margins.fired)
    margins = margins._replace(margin=jnp.where(np.repeat(count, 128, axis=1) > 0, margin, jnp.nan))
    got = kernels_pallas.compact(margins, 4)
    np.testing.assert_array_equal(got.position, oracle.fetch_list(margin, 4)[0])
