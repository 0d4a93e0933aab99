"""Small parts that the kernels are made of."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import blocks, exact
from kernels_pallas.tiles import live_block
from tests.kernels import oracle

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("dtype, low, high", [(jnp.bfloat16, -60, 60), (jnp.float16, -1, 15)])
def test_three_pieces_add_up_to_a_float32(dtype, low, high):
    """Exactly for bfloat16; for float16 to 2^-29 of 2^15, where its exponents end."""
    draw = np.random.default_rng(0)
    x = (draw.normal(size=4000) * 2.0 ** draw.integers(low, high, 4000)).astype(np.float32)
    x = np.clip(x, -(2.0**15), 2.0**15) if dtype == jnp.float16 else x
    pieces = exact.pieces(jnp.asarray(x), dtype)
    assert all(piece.dtype == dtype for piece in pieces)
    total = sum(np.asarray(piece, np.float64) for piece in pieces)
    if dtype == jnp.bfloat16:
        np.testing.assert_array_equal(total, x)
    else:
        np.testing.assert_allclose(total, x, rtol=0, atol=2.0 ** (15 - 29))


def test_products_of_stacked_pieces_are_products_in_float32():
    draw = np.random.default_rng(1)
    query, rows = draw.normal(size=(4, 64)).astype(np.float32), jnp.asarray(draw.normal(size=(50, 64)), jnp.bfloat16)
    got = exact.collapse(exact.dot(exact.stack(jnp.asarray(query), jnp.bfloat16, 0), rows, (1, 1)), 4)
    want = query.astype(np.float64) @ np.asarray(rows, np.float64).T
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spread", [0, 8, 40])
def test_four_digits_write_a_float32(spread):
    """To 2^-30 of the largest number of its vector, also where that is as large as any with its exponent."""
    draw = np.random.default_rng(2)
    x = (draw.normal(size=(300, 24)) * 2.0 ** draw.integers(-spread, spread + 1, (300, 24))).astype(np.float32)
    x[:100, 0] = (
        np.nextafter(np.float32(2.0), np.float32(0)) * draw.choice([-1, 1], 100) * 2.0 ** draw.integers(30, 60, 100)
    )
    x[-1], x[-2] = 0, np.float32(1e-40)
    unit, digits = exact.digits(jnp.asarray(x))
    assert all(digit.dtype == jnp.int8 for digit in digits)
    error = np.abs(oracle.whole(digits) * np.asarray(unit, np.float64)[:, None] - x).max(1)
    assert (error <= 2.0**-30 * np.maximum(np.abs(x).max(1), 2.0**-90)).all()


def test_digits_of_what_is_no_number_have_no_unit():
    unit, _ = exact.digits(jnp.asarray([[1.0, jnp.nan], [jnp.inf, 0.0], [1.0, 2.0]]))
    np.testing.assert_array_equal(np.isnan(unit), [True, True, False])


def test_products_of_digits_are_products_in_float32():
    draw = np.random.default_rng(3)
    query, code = draw.normal(size=(4, 64)).astype(np.float32), draw.integers(-127, 128, (50, 64))
    unit, digits = exact.digits(jnp.asarray(query))
    products = exact.dot(jnp.concatenate(digits), jnp.asarray(code, jnp.int8), (1, 1))
    assert products.dtype == jnp.int32
    got = unit[:, None] * exact.collapse(products, 4)
    np.testing.assert_allclose(got, query.astype(np.float64) @ code.T, rtol=2e-7, atol=2e-4)


def test_a_block_past_the_end_is_the_last_one_again():
    """The pipeline of a TPU kernel copies a block when its index changes: what is past the length costs nothing."""
    steps = jnp.arange(6)
    for length, wanted in (
        (0, [0] * 6),
        (1, [0] * 6),
        (128, [0] * 6),
        (129, [0, 1, 1, 1, 1, 1]),
        (768, list(range(6))),
    ):
        np.testing.assert_array_equal(live_block(steps, jnp.int32(length), 128), wanted)


def test_chunks_of_plain_xla_on_a_cpu():
    """(sequences at once, slots of a chunk and of what is left over) at Kimi's sizes."""
    assert blocks.xla_chunks(1, 4096, 576, 32) == (1, (1024, 128))
    assert blocks.xla_chunks(1, 32768, 130, 32) == (1, (4096, 128))
    assert blocks.xla_chunks(16, 4096, 576, 32) == (1, (1024, 128))  # one after another
    assert blocks.xla_chunks(16, 4096, 48, 32) == (16, (512, 128))  # narrow rows: together
    assert blocks.xla_chunks(1, 64, 576, 32) == (1, (64,))
    assert blocks.xla_chunks(1, 1028, 576, 32) == (1, (1028,))  # too little is left over
    assert blocks.xla_chunks(4, 4096, 576, 4096) == (4, (1024,))  # many queries


def test_blocks_of_a_device():
    assert blocks.tpu_blocks("TPU v5p", row_bytes=1280).splits == 2
    assert blocks.tpu_blocks("TPU v6 lite", row_bytes=1280) == blocks.TpuBlocks()
    assert blocks.tpu_blocks("TPU v9", row_bytes=1 << 20).attend_rows == 128  # wide rows: fewer at once
