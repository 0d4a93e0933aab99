"""One contract for every backend: the kernels against float64, on every shape of work that a cache can hand them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas
from kernels_pallas import api
from kernels_pallas.words import to_words
from tests.kernels import oracle
from tests.kernels.backends import running, tracing_for

BACKENDS = ("xla", "mosaic_tpu", "mosaic_gpu")
SIZES = {"kimi": (512, 64, 32), "16 heads": (512, 64, 16), "tiny": (32, 16, 4)}  # latent, branch, heads
RANKS = {"kimi": (0, 64, 128, 192), "16 heads": (0, 64, 128, 192), "tiny": (0, 8)}
DTYPES = (jnp.bfloat16, jnp.float32)
SLOTS = 600  # not a multiple of any block
WORK = {  # lengths of a batch of three
    "ragged": (0, 131, 600),
    "short": (1, 128, 129),
    "empty": (0, 0, 0),
    "full": (600, 600, 600),
}


def quick(fast, *axes):
    """All combinations of the axes; those not in `fast` are slow."""
    return [pytest.param(*c, marks=() if c in fast else pytest.mark.slow) for c in itertools.product(*axes)]


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def close(got, want, name):
    """Equal to float32 sums of a few hundred terms; infinities in the same places and nothing NaN."""
    got = np.asarray(got, np.float64)
    assert np.array_equal(np.isinf(got), np.isinf(want)), name
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5, err_msg=name)


def same(first, second):
    """The same bits."""
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def runs(backend, dtype):
    """Whether the backend has these rows; if it does not, it must say so (see the tests of refusals)."""
    return backend != "mosaic_gpu" or dtype == jnp.bfloat16


def rows_and_query(size, dtype, slots=SLOTS, seed=0):
    latent, branch, heads = SIZES[size]
    rows = normal(seed, 3, slots, latent + branch, dtype=dtype)
    return rows, normal(seed + 1, 3, heads, latent + branch, dtype=dtype), latent, (latent + branch) ** -0.5


FAST_ATTEND = {(b, "tiny", jnp.bfloat16, "ragged") for b in BACKENDS} | {
    ("mosaic_tpu", "tiny", jnp.bfloat16, "empty"),
    ("mosaic_tpu", "tiny", jnp.float32, "ragged"),
    ("mosaic_tpu", "kimi", jnp.bfloat16, "ragged"),
    ("xla", "kimi", jnp.float32, "ragged"),
}


@pytest.mark.parametrize("backend, size, dtype, work", quick(FAST_ATTEND, BACKENDS, SIZES, DTYPES, WORK))
def test_attend(backend, size, dtype, work, monkeypatch):
    rows, query, latent, scale = rows_and_query(size, dtype)
    length = jnp.asarray(WORK[work], jnp.int32)
    live = np.arange(SLOTS) < np.asarray(length)[:, None, None]
    garbage = jnp.where(live[:, 0, :, None], rows, jnp.nan)  # what is past the length may be anything
    if not runs(backend, dtype):
        return
    with running(backend, monkeypatch):
        run = jax.jit(lambda q, w, n: kernels_pallas.attend(
            q, w, n, latent_dim=latent, scale=scale, implementation=backend))  # fmt: skip
        got = run(query, to_words(garbage if backend == "mosaic_tpu" else rows), length)
        same(got, run(query, to_words(garbage if backend == "mosaic_tpu" else rows), length))
    for name, value, want in zip(got._fields, got, oracle.attend(query, rows, live, latent, scale), strict=True):
        close(value, want, name)


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_attend_with_a_length_for_every_query(backend, monkeypatch):
    """Prefill: many queries, each sees its own prefix; rows are wider than queries, as a TPU stores them."""
    rows, _, latent, scale = rows_and_query("tiny", jnp.bfloat16)
    query = normal(5, 3, 40, rows.shape[2], dtype=jnp.bfloat16)
    length = jnp.asarray(np.random.default_rng(6).integers(0, SLOTS + 1, (3, 40)), jnp.int32)
    with running(backend, monkeypatch):
        got = jax.jit(lambda q, w, n: kernels_pallas.attend(
            q, w, n, latent_dim=latent, scale=scale, implementation=backend))(
                query, to_words(rows, 128), length)  # fmt: skip
    live = np.arange(SLOTS) < np.asarray(length)[..., None]
    for name, value, want in zip(got._fields, got, oracle.attend(query, rows, live, latent, scale), strict=True):
        close(value, want, name)


LISTS = {"ragged": (0, 1, 40), "empty": (0, 0, 0), "full": (40, 40, 40)}


@pytest.mark.parametrize(
    "backend, size, dtype, work",
    quick(
        {("xla", "tiny", jnp.bfloat16, "ragged"), ("mosaic_tpu", "tiny", jnp.bfloat16, "ragged"),
         ("mosaic_tpu", "kimi", jnp.bfloat16, "ragged"), ("mosaic_tpu", "tiny", jnp.bfloat16, "empty")},
        BACKENDS, SIZES, DTYPES, LISTS,
    ),
)  # fmt: skip
def test_attend_list(backend, size, dtype, work, monkeypatch):
    rows, query, latent, scale = rows_and_query(size, dtype)
    draw = np.random.default_rng(7)
    position = np.stack([np.sort(draw.choice(SLOTS, 40, replace=False)) for _ in range(3)]).astype(np.int32)
    count = np.asarray(LISTS[work], np.int32)
    position[np.arange(40) >= count[:, None]] = SLOTS  # as compact leaves it
    unused = np.ones((3, SLOTS, 1), bool)
    for b in range(3):
        unused[b, position[b, : count[b]]] = False
    garbage = jnp.where(unused, 1e30, rows.astype(jnp.float32)).astype(dtype)  # rows not listed may be anything finite
    if not runs(backend, dtype):
        return
    with running(backend, monkeypatch):
        run = jax.jit(lambda q, w, p, n: kernels_pallas.attend_list(
            q, w, p, n, latent_dim=latent, scale=scale, implementation=backend))  # fmt: skip
        got = run(query, to_words(garbage), position, count)
        same(got, run(query, to_words(garbage), position, count))
    listed = np.take_along_axis(np.asarray(rows, np.float64), np.minimum(position, SLOTS - 1)[..., None], 1)
    live = np.arange(40) < count[:, None, None]
    for name, value, want in zip(got._fields, got, oracle.attend(query, listed, live, latent, scale), strict=True):
        close(value, want, name)


@pytest.mark.parametrize("backend, dtype", quick({(b, jnp.bfloat16) for b in BACKENDS[:2]}, BACKENDS, DTYPES))
def test_a_fetched_row_arrives_bit_for_bit(backend, dtype, monkeypatch):
    """Attention over one row is that row: every word of it, whatever way it was moved."""
    rows, query, latent, scale = rows_and_query("kimi", dtype, slots=64)
    rows = rows * jnp.asarray(np.random.default_rng(8).choice([1e-20, 1.0, 1e20], rows.shape), dtype)
    if not runs(backend, dtype):
        return
    at = np.array([0, 13, 63])
    with running(backend, monkeypatch):
        got = jax.jit(lambda q, w, p, n: kernels_pallas.attend_list(
            q, w, p, n, latent_dim=latent, scale=scale, implementation=backend))(
                jnp.zeros_like(query), to_words(rows), at[:, None], jnp.ones(3, jnp.int32))  # fmt: skip
    want = np.asarray(rows, np.float32)[np.arange(3), at, None, :latent]
    np.testing.assert_array_equal(np.asarray(got.out), np.broadcast_to(want, got.out.shape))


def scan_case(size, rank, dtype, work, terms, code_dtype):
    latent, branch, heads = SIZES[size]
    draw = np.random.default_rng(11)
    rows = normal(12, 3, SLOTS, latent + branch, dtype=dtype)
    probe = [normal(13 + i, 3, heads, n) for i, n in enumerate((branch, rank, terms))]
    typical = (branch + rank) ** 0.5
    threshold = {"all": -1e4, "none": 1e4}.get(work, 2.5 * typical) + normal(17, 3, heads)
    threshold = jnp.where(draw.random((3, heads)) < 0.2, jnp.inf, threshold)  # closed heads
    if work == "closed":
        threshold = jnp.full_like(threshold, jnp.inf)
    length = {"empty": (0, 0, 0), "ragged": (0, 257, SLOTS)}.get(work, (SLOTS, 300, 1))
    code = normal(18, 3, SLOTS, rank, dtype=code_dtype)
    bound = jnp.abs(normal(19, 3, terms, SLOTS))
    member = jnp.asarray(draw.random((3, SLOTS)) < 0.9)
    return [*probe, threshold, rows, code, bound, member, jnp.asarray(length, jnp.int32)], latent


SCANS = ("ragged", "empty", "all", "none", "closed")
SIZED_RANKS = [(size, rank) for size in SIZES for rank in RANKS[size]]
FAST_SCAN = {(b, ("tiny", 8), jnp.bfloat16, w) for b in BACKENDS[:2] for w in ("ragged", "all", "none")} | {
    ("mosaic_gpu", ("tiny", 8), jnp.bfloat16, "ragged"),
    ("mosaic_tpu", ("kimi", 64), jnp.bfloat16, "ragged"),
    ("mosaic_tpu", ("kimi", 128), jnp.bfloat16, "ragged"),
    ("mosaic_tpu", ("tiny", 0), jnp.float32, "ragged"),
}


@pytest.mark.parametrize("backend, sized, dtype, work", quick(FAST_SCAN, BACKENDS, SIZED_RANKS, DTYPES, SCANS))
def test_scan(backend, sized, dtype, work, monkeypatch):
    if not runs(backend, dtype):
        return
    code_dtype = jnp.float16 if backend == "mosaic_gpu" and work == "all" else jnp.bfloat16
    args, latent = scan_case(*sized, dtype, work, terms=1 + (work == "ragged"), code_dtype=code_dtype)
    words = [*args[:4], to_words(args[4]), *args[5:]]
    with running(backend, monkeypatch):
        run = jax.jit(lambda *a: kernels_pallas.scan(*a, implementation=backend))
        got = run(*words)
        same(got, run(*words))
    want = oracle.margins(*args[:4], args[4][..., latent:], *args[5:])
    close(got.margin, want, "margin")
    fired = np.pad(np.asarray(got.margin) >= 0, ((0, 0), (0, -SLOTS % 128))).reshape(3, -1, 128).sum(-1)
    np.testing.assert_array_equal(got.fired, fired)
    exists = np.asarray(args[7]) & (np.arange(SLOTS) < np.asarray(args[8])[:, None])
    expected = {"all": exists.sum(), "none": 0, "closed": 0, "empty": 0}.get(work)
    if expected is not None:
        assert fired.sum() == expected


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_scan_of_an_index_that_holds_the_branch_too(backend, monkeypatch):
    """P = 0: the branch is part of the code, and rows are not read at all."""
    args, latent = scan_case("kimi", 64, jnp.bfloat16, "ragged", 1, jnp.bfloat16)
    want = oracle.margins(*args[:4], args[4][..., latent:], *args[5:])
    branch, sketch, residual, threshold, rows, code, *rest = args
    together = jnp.concatenate([rows[..., latent:], code], -1)
    with running(backend, monkeypatch):
        got = jax.jit(lambda *a: kernels_pallas.scan(*a, implementation=backend))(
            branch[..., :0], jnp.concatenate([branch, sketch], -1), residual, threshold,
            to_words(rows), together, *rest)  # fmt: skip
    close(got.margin, want, "margin")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("slots", (64, 600, 4096))
@pytest.mark.parametrize("width", (0, 1, 4, 64, 600))
@pytest.mark.parametrize("share", (0.0, 0.02, 1.0))
def test_compact(backend, slots, width, share):
    draw = np.random.default_rng(slots + width)
    margin = np.where(draw.random((3, slots)) < share, draw.random((3, slots)), -1.0).astype(np.float32)
    margin[1] = -np.inf
    margin[0, :: max(1, slots // 3)] = 0.0  # exactly at the threshold: it fires
    fired = np.pad(margin >= 0, ((0, 0), (0, -slots % 128))).reshape(3, -1, 128).sum(-1, dtype=np.int32)
    margins = kernels_pallas.Margins(jnp.asarray(margin), jnp.asarray(fired))
    device = {"mosaic_tpu": ("tpu", "TPU v5p"), "mosaic_gpu": ("gpu", "NVIDIA H200")}.get(backend, ("cpu", "cpu"))
    with tracing_for(*device):
        got = kernels_pallas.compact(margins, width, implementation=backend)
    for name, value, want in zip(got._fields, got, oracle.fetch_list(margin, width), strict=True):
        np.testing.assert_array_equal(value, want, err_msg=name)


def test_counts_set_to_zero_take_a_sequence_off_the_list():
    margins = kernels_pallas.Margins(jnp.ones((2, 512)), jnp.asarray([[128] * 4, [0] * 4], jnp.int32))
    for width in (2, 100):
        position, count, overflowed = kernels_pallas.compact(margins, width)
        np.testing.assert_array_equal(count, [width, 0])
        np.testing.assert_array_equal(overflowed, [True, False])
        np.testing.assert_array_equal(position[0], np.arange(width))
        np.testing.assert_array_equal(position[1], np.full(width, 512))


def call(implementation, dtype=jnp.uint16, slots=64, code=jnp.bfloat16):
    """One call of each entry point, traced only."""
    shape = lambda *s, d=jnp.float32: jax.ShapeDtypeStruct(s, d)  # noqa: E731
    rows, query, count = shape(1, slots, 48, d=dtype), shape(1, 4, 48), shape(1, d=jnp.int32)
    kernels = kernels_pallas
    keywords = {"latent_dim": 32, "implementation": implementation}
    yield lambda: jax.eval_shape(lambda *a: kernels.attend(*a, scale=1.0, **keywords), query, rows, count)
    yield lambda: jax.eval_shape(
        lambda *a: kernels.attend_list(*a, scale=1.0, **keywords), query, rows, shape(1, 8, d=jnp.int32), count
    )
    probe = shape(1, 4, 16), shape(1, 4, 8), shape(1, 4, 1), shape(1, 4)
    entry = shape(1, slots, 8, d=code), shape(1, 1, slots), shape(1, slots, d=bool)
    yield lambda: jax.eval_shape(lambda *a: kernels.scan(*a, **keywords), *probe, rows, *entry, count)


@pytest.mark.parametrize(
    "implementation, target, problem, reason",
    [
        ("mosaic_tpu", ("cpu", "cpu"), {}, "it needs a TPU, and this program is for a CPU"),
        ("mosaic_tpu", ("gpu", "NVIDIA H200"), {}, "it needs a TPU, and this program is for a GPU"),
        ("mosaic_tpu", ("tpu", "TPU v5p"), {"dtype": jnp.float16}, "rows are float16"),
        ("mosaic_gpu", ("cpu", "cpu"), {}, "it needs a GPU, and this program is for a CPU"),
        ("mosaic_gpu", ("gpu", "NVIDIA A100"), {}, "it needs a Hopper GPU, and this program is for NVIDIA A100"),
        ("mosaic_gpu", ("gpu", "NVIDIA H200"), {"dtype": jnp.uint32}, "rows are uint32"),
        ("triton", ("gpu", "NVIDIA H200"), {}, "'triton' is not known"),
    ],
)
def test_a_choice_that_cannot_run_raises_with_the_reason(implementation, target, problem, reason):
    with tracing_for(*target):
        for attempt in call(implementation, **problem):
            with pytest.raises(ValueError, match=reason):
                attempt()


def test_what_only_one_kernel_cannot_do_raises_for_it_alone(monkeypatch):
    with tracing_for("tpu", "TPU v5p"):
        attend, attend_list, scan = call("mosaic_tpu", slots=60, code=jnp.float16)
        attend()
        with pytest.raises(ValueError, match="60 slots"):
            attend_list()
        with pytest.raises(ValueError, match="code is float16"):
            scan()
        monkeypatch.setitem(api.AUTOMATIC, "tpu", "mosaic_tpu")
        for attempt in call(None, slots=60, code=jnp.float16):
            attempt()  # what None picks and cannot run is run by XLA


@pytest.mark.parametrize(
    "implementation, target, kernels",
    [("mosaic_tpu", ("tpu", "TPU v6 lite"), "pallas_call"), ("mosaic_gpu", ("gpu", "NVIDIA H200"), "warpgroup"),
     (None, ("tpu", "TPU v6 lite"), None), (None, ("gpu", "NVIDIA H200"), None), (None, ("cpu", "cpu"), None)],
)  # fmt: skip
def test_kernels_that_hardware_has_not_run_are_asked_for_by_name(implementation, target, kernels):
    query, rows = jnp.zeros((1, 4, 48)), jnp.zeros((1, 64, 48), jnp.uint16)
    with tracing_for(*target):
        text = str(jax.make_jaxpr(lambda: kernels_pallas.attend(
            query, rows, jnp.ones(1, int), latent_dim=32, scale=1.0, implementation=implementation))())  # fmt: skip
    assert kernels in text if kernels else not any(name in text for name in ("pallas_call", "warpgroup"))
