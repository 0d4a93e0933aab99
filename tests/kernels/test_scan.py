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
IN_PLACE, NOT_READ = "branch in place", "branch not read"  # an index 'sketch', and a balanced one
WIDER = {"40 heads": (32, 16, 40), "130 heads": (32, 16, 130)}  # digits of so many are more than registers hold at once
NARROW = [("kimi", 64, IN_PLACE), ("kimi", 64, NOT_READ), ("kimi", 96, NOT_READ), ("kimi", 128, NOT_READ),
          ("kimi", 256, NOT_READ), ("16 heads", 128, NOT_READ), ("40 heads", 64, NOT_READ), ("130 heads", 32, NOT_READ),
          ("tiny", 8, IN_PLACE)]  # fmt: skip


def scan_case(size, rank, dtype, terms, code_dtype):
    """Arguments of a scan that are the same for every kind of work, and the latent width."""
    latent, branch, heads = (SIZES | WIDER)[size]
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


def whole_steps(bits, rank):
    """Codes of few bits, every value among them: their numbers int8 [3, S, K], and as they are stored."""
    most = {8: 127, 4: 7}[bits]
    steps = np.random.default_rng(21).integers(-most, most + 1, (3, SLOTS, rank))
    low, high = steps[..., : rank // 2] & 15, steps[..., rank // 2 :] & 15
    return steps, jnp.asarray(steps, jnp.int8) if bits == 8 else jnp.asarray(low + 16 * high, jnp.uint8)


def fired_groups(margin):
    """Fired rows of every group of 128."""
    return np.pad(np.asarray(margin) >= 0, ((0, 0), (0, -SLOTS % 128))).reshape(3, -1, 128).sum(-1)


def contract(backend, monkeypatch, probe, stored, numbers, wide):
    """The scan of what is stored, at every length of work, against float64 of its (branch, code, bound, member)."""
    heads, member = probe[0].shape[1], np.asarray(numbers[-1])
    with running(backend, monkeypatch):
        scan = jax.jit(lambda *a: kernels_pallas.scan(*a, implementation=backend))
        for work in SCANS:
            threshold, length = thresholds(work, heads, wide), lengths(work)
            got = scan(*probe, threshold, *stored, length)
            close(got.margin, oracle.margins(*probe, threshold, *numbers, length), work)
            np.testing.assert_array_equal(got.fired, fired_groups(got.margin), err_msg=work)
            exists = member & (np.arange(SLOTS) < np.asarray(length)[:, None])
            expected = {"all": exists.sum(), "none": 0, "closed": 0, "empty": 0}.get(work)
            assert expected is None or np.asarray(got.fired).sum() == expected, work
            if work == "ragged":
                assert 0 < np.asarray(got.fired).sum() < exists.sum()
                same(got, scan(*probe, threshold, *stored, length))


FAST_SCAN = {(backend, ("tiny", 8), jnp.bfloat16) for backend in BACKENDS}


@pytest.mark.parametrize("backend, sized, dtype", quick(FAST_SCAN, BACKENDS, SIZED_RANKS, DTYPES))
def test_scan(backend, sized, dtype, monkeypatch):
    size, rank = sized
    code_dtype = jnp.float16 if backend == "mosaic_gpu" and size == "16 heads" else jnp.bfloat16
    terms = 2 if size == "tiny" else 1
    probe, (rows, *entry), latent = scan_case(size, rank, dtype, terms, code_dtype)
    numbers = [rows[..., latent:], *entry]
    contract(backend, monkeypatch, probe, [to_words(rows), *entry], numbers, SIZES[size][1] + rank)


FAST_NARROW = {(backend, NARROW[-1], bits, jnp.bfloat16) for backend in BACKENDS for bits in (8, 4)}
EVERY_NARROW = [  # once where rows are not read
    case
    for case in quick(FAST_NARROW, BACKENDS, NARROW, (8, 4), DTYPES)
    if case.values[1][2] == IN_PLACE or case.values[3] == jnp.bfloat16
]


@pytest.mark.parametrize("backend, narrow, bits, dtype", EVERY_NARROW)
def test_scan_of_codes_of_few_bits(backend, narrow, bits, dtype, monkeypatch):
    size, rank, form = narrow
    (branch, sketch, residual), (rows, _, *rest), latent = scan_case(size, rank, dtype, 1, jnp.bfloat16)
    steps, code = whole_steps(bits, rank)
    sketch = sketch / steps.std()
    if form == NOT_READ:
        branch, latent = branch[..., :0], rows.shape[-1]
    numbers = [rows[..., latent:], steps, *rest]
    contract(backend, monkeypatch, [branch, sketch, residual], [to_words(rows), code, *rest], numbers,
             branch.shape[-1] + rank)  # fmt: skip


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
