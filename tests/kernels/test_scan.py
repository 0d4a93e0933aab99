"""One contract for every backend: the margins of the scan and the counts beside them, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas
from kernels_pallas.words import to_words
from tests.kernels import oracle
from tests.kernels.backends import running
from tests.kernels.cases import BACKENDS, DTYPES, SIZES, SLOTS, close, normal, quick, same

pytestmark = pytest.mark.usefixtures("quick_compilation")

SCANS = ("ragged", "empty", "all", "none", "closed")
RANKS = {"kimi": (0, 64, 128, 192), "16 heads": (0, 64, 128, 192), "tiny": (0, 8)}
SIZED_RANKS = [(size, rank) for size in SIZES for rank in RANKS[size]]


def scan_case(size, rank, dtype, terms, code_dtype):
    """Arguments of a scan that are the same for every kind of work, and the latent width."""
    latent, branch, heads = SIZES[size]
    probe = [normal(13 + i, 3, heads, n) for i, n in enumerate((branch, rank, terms))]
    rows = normal(12, 3, SLOTS, latent + branch, dtype=dtype)
    code, bound = normal(18, 3, SLOTS, rank, dtype=code_dtype), jnp.abs(normal(19, 3, terms, SLOTS))
    member = jnp.asarray(np.random.default_rng(11).random((3, SLOTS)) < 0.9)
    return probe, [rows, code, bound, member], latent


def thresholds(work, heads, wide):
    """float32 [3, H]: by how much scores of `wide` numbers have to stand out; some heads are closed, or all."""
    typical = {"all": -1e4, "none": 1e4, "closed": np.inf}.get(work, 2.5 * wide**0.5) + normal(17, 3, heads)
    return jnp.where(np.random.default_rng(20).random((3, heads)) < 0.2, jnp.inf, typical)


def lengths(work):
    return jnp.asarray({"empty": (0, 0, 0), "ragged": (0, 257, SLOTS)}.get(work, (SLOTS, 300, 1)), jnp.int32)


def fired_groups(margin):
    """Fired rows of every group of 128."""
    return np.pad(np.asarray(margin) >= 0, ((0, 0), (0, -SLOTS % 128))).reshape(3, -1, 128).sum(-1)


FAST_SCAN = {(backend, ("tiny", 8), jnp.bfloat16) for backend in BACKENDS}


@pytest.mark.parametrize("backend, sized, dtype", quick(FAST_SCAN, BACKENDS, SIZED_RANKS, DTYPES))
def test_scan(backend, sized, dtype, monkeypatch):
    size, rank = sized
    code_dtype = jnp.float16 if backend == "mosaic_gpu" and size == "16 heads" else jnp.bfloat16
    terms = 2 if size == "tiny" else 1
    probe, entry, latent = scan_case(size, rank, dtype, terms, code_dtype)
    stored = [to_words(entry[0]), *entry[1:]]
    heads = SIZES[size][2]
    with running(backend, monkeypatch):
        scan = jax.jit(lambda *a: kernels_pallas.scan(*a, implementation=backend))
        for work in SCANS:
            threshold, length = thresholds(work, heads, SIZES[size][1] + rank), lengths(work)
            got = scan(*probe, threshold, *stored, length)
            want = oracle.margins(*probe, threshold, entry[0][..., latent:], *entry[1:], length)
            close(got.margin, want, work)
            np.testing.assert_array_equal(got.fired, fired_groups(got.margin), err_msg=work)
            exists = np.asarray(entry[3]) & (np.arange(SLOTS) < np.asarray(length)[:, None])
            expected = {"all": exists.sum(), "none": 0, "closed": 0, "empty": 0}.get(work)
            assert expected is None or np.asarray(got.fired).sum() == expected, work
            if work == "ragged":
                assert 0 < np.asarray(got.fired).sum() < exists.sum()
                same(got, scan(*probe, threshold, *stored, length))


@pytest.mark.parametrize("backend", ["xla", *(pytest.param(b, marks=pytest.mark.slow) for b in BACKENDS[1:])])
def test_scan_of_an_index_that_holds_the_branch_too(backend, monkeypatch):
    """P = 0: the branch is part of the code, and rows are not read at all."""
    (branch, sketch, residual), entry, latent = scan_case("kimi", 64, jnp.bfloat16, 1, jnp.bfloat16)
    rows, code, *rest = entry
    threshold, length = thresholds("ragged", 32, 128), lengths("ragged")
    together = jnp.concatenate([rows[..., latent:], code], -1)
    with running(backend, monkeypatch):
        got = jax.jit(lambda *a: kernels_pallas.scan(*a, implementation=backend))(
            branch[..., :0], jnp.concatenate([branch, sketch], -1), residual, threshold,
            to_words(rows), together, *rest, length)  # fmt: skip
    close(got.margin, oracle.margins(branch, sketch, residual, threshold, rows[..., latent:], code, *rest, length), "")
