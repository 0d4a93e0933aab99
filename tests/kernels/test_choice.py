"""Which implementation runs where: by name only, and never one in the place of another."""

import functools

import jax
import jax.numpy as jnp
import pytest

import kernels_pallas
from kernels_pallas import api
from tests.kernels.backends import tracing_for


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
    "implementation, target, heads, code, reason",
    [("mosaic_tpu", ("tpu", "TPU v5p"), 4, (6, jnp.uint8), "rank 12 is no multiple of 8"),
     ("mosaic_tpu", ("tpu", "TPU v5p"), 4, (6, jnp.float16), "code is float16"),
     ("mosaic_tpu", ("tpu", "TPU v4"), 4, (16, jnp.int8), "a TPU v4 multiply no int8"),
     ("mosaic_gpu", ("gpu", "NVIDIA H200"), 4, (264, jnp.int8), "a code of 264 is wider than one copy"),
     ("mosaic_gpu", ("gpu", "NVIDIA H200"), 4, (144, jnp.uint8), "rank 288 are too wide"),
     ("mosaic_gpu", ("gpu", "NVIDIA H200"), 4, (6, jnp.float32), "code is float32"),
     ("mosaic_gpu", ("gpu", "NVIDIA H200"), 260, (32, jnp.int8), "260 heads are more than one copy moves"),
     ("mosaic_gpu", ("gpu", "NVIDIA H200"), 256, (144, jnp.bfloat16), "need 294912 bytes of shared memory")],
)  # fmt: skip
def test_codes_that_a_kernel_cannot_multiply_raise(implementation, target, heads, code, reason):
    shape = lambda *s, d=jnp.float32: jax.ShapeDtypeStruct(s, d)  # noqa: E731
    rank = 2 * code[0] if code[1] == jnp.uint8 else code[0]
    probe = shape(1, heads, 0), shape(1, heads, rank), shape(1, heads, 1), shape(1, heads)
    entry = shape(1, 64, code[0], d=code[1]), shape(1, 1, 64), shape(1, 64, d=bool)
    arguments = (*probe, shape(1, 64, 48, d=jnp.uint16), *entry, shape(1, d=jnp.int32))
    scan = functools.partial(kernels_pallas.scan, implementation=implementation)
    with tracing_for(*target), pytest.raises(ValueError, match=reason):
        jax.eval_shape(scan, *arguments)


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


def test_tpu_kernels_read_rows_where_they_lie():
    """Else a compiler with room on chip copies the whole archive there, for the few rows that are fetched."""
    shape = lambda *s, d=jnp.float32: jax.ShapeDtypeStruct(s, d)  # noqa: E731
    rows, query, count = shape(1, 64, 48, d=jnp.uint16), shape(1, 4, 48), shape(1, d=jnp.int32)
    keywords = {"latent_dim": 32, "implementation": "mosaic_tpu"}
    calls = [
        (kernels_pallas.attend, (query, rows, count), {"scale": 1.0}, 1),
        (kernels_pallas.attend_list, (query, rows, shape(1, 8, d=jnp.int32), count), {"scale": 1.0}, 1),
        (kernels_pallas.scan, (shape(1, 4, 16), shape(1, 4, 8), shape(1, 4, 1), shape(1, 4), rows,
                               shape(1, 64, 8, d=jnp.bfloat16), shape(1, 1, 64), shape(1, 64, d=bool), count), {}, 3),
    ]  # fmt: skip
    with tracing_for("tpu", "TPU v6 lite"):
        for call_, arguments, more, kept in calls:
            text = str(jax.make_jaxpr(functools.partial(call_, **keywords, **more))(*arguments))
            assert text.count("with_memory_space_constraint") == kept, call_.__name__


@pytest.mark.parametrize(
    "kernel, target", [("mosaic_tpu", ("tpu", "TPU v6 lite")), ("mosaic_gpu", ("gpu", "NVIDIA H200"))]
)
def test_the_gather_is_part_of_the_kernel(kernel, target):
    query, rows, position = jnp.zeros((1, 4, 48)), jnp.zeros((1, 64, 48), jnp.uint16), jnp.zeros((1, 8), int)
    with tracing_for(*target):
        text = str(jax.make_jaxpr(lambda: kernels_pallas.attend_list(
            query, rows, position, jnp.ones(1, int), latent_dim=32, scale=1.0, implementation=kernel))())  # fmt: skip
    assert " gather[" not in text


def test_rows_too_wide_for_a_gpu_to_gather_raise():
    query, rows = jnp.zeros((1, 4, 592)), jnp.zeros((1, 64, 592), jnp.uint16)
    with tracing_for("gpu", "NVIDIA H200"), pytest.raises(ValueError, match="rows of 592 leave no room"):
        kernels_pallas.attend_list(
            query, rows, jnp.zeros((1, 8), int), jnp.ones(1, int), latent_dim=512, scale=1.0,
            implementation="mosaic_gpu",
        )  # fmt: skip
