"""The scan of the index for TPUs (Mosaic): every archived row's best margin over the heads (VestigeKV §3).

Scores of a block of rows live and die in registers: what leaves is one margin a row and the fired count of every 128.
The branch is read in place where it lies within one tile column of a row. A code narrower than a tile is read
transposed, which is how a TPU lays it out: no byte of padding is read.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import exact, unpack
from kernels_pallas.blocks import TpuBlocks
from kernels_pallas.tiles import LANES, float_dtype, floats, live_block, pad_axis, round_up, stay

Array = jax.Array

_STRIP = 256  # rows whose scores are held at once: 128 x 256 of them, 32 heads' digits, still fit in registers


def scan(
    branch, sketch, residual, threshold, rows, code, bound, member, length, *, blocks: TpuBlocks, latent_dim: int,
    interpret=False,
) -> tuple[Array, Array]:  # fmt: skip
    """See `kernels_pallas.scan`: margin float32 [B, S] and fired int32 [B, ceil(S / 128)]."""
    batch, heads, width = branch.shape
    slots = rows.shape[1]
    size = min(blocks.scan_rows, round_up(slots, LANES))
    steps, groups = pl.cdiv(slots, size), pl.cdiv(slots, LANES)
    padded = round_up(heads, 16)

    def block_of(b, step, length):
        return live_block(step, length[b], size)

    operands, specs = [], []

    def add(array, shape, place):
        operands.append(array)
        specs.append(pl.BlockSpec((None, *shape), place))

    def add_probe(array):
        add(array, array.shape[1:], lambda b, step, length: (b, 0, 0))

    lanes = _window(latent_dim, width, rows.shape[2])
    if width:
        add_probe(_stacked(branch, padded, float_dtype(rows)))
        add(stay(rows), (size, lanes[1]), lambda b, step, length: (b, block_of(b, step, length), lanes[0]))
    across = code.shape[2] % LANES != 0
    if code.shape[2]:
        if unpack.narrow(code):
            unit, digits = exact.digits(pad_axis(unpack.tpu_query(sketch, code), 1, padded))
            add_probe(jnp.concatenate(digits, 1))
            add_probe(unit[..., None])
        else:
            add_probe(_stacked(sketch, padded, code.dtype))
        if across:
            code = jnp.swapaxes(code, 1, 2)
            add(stay(code), (code.shape[1], size), lambda b, step, length: (b, 0, block_of(b, step, length)))
        else:
            add(stay(code), (size, code.shape[2]), lambda b, step, length: (b, block_of(b, step, length), 0))
    add_probe(pad_axis(residual, 1, padded))
    add_probe(jnp.pad(threshold, ((0, 0), (0, padded - heads)), constant_values=jnp.inf)[..., None])
    add(stay(bound), (bound.shape[1], size), lambda b, step, length: (b, 0, block_of(b, step, length)))
    add(member.astype(jnp.int8)[:, None], (1, size), lambda b, step, length: (b, 0, block_of(b, step, length)))

    def out_spec(lanes):
        return pl.BlockSpec((None, size // LANES, lanes), lambda b, step, length: (b, step, 0))

    read = (lanes[1] * rows.dtype.itemsize if width else 0) + code.size * code.dtype.itemsize // (batch * slots)
    row_bytes = read + 4 * bound.shape[1] + 1 + 4  # with bounds, membership and the margin written
    offset = latent_dim - lanes[0] * lanes[1]
    kernel = functools.partial(
        _kernel, heads=padded, branch=slice(offset, offset + width), across=across, has_branch=bool(width),
        has_code=bool(code.size), narrow=unpack.narrow(code),
    )  # fmt: skip
    margin, fired = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(batch, steps), in_specs=specs, out_specs=[out_spec(LANES), out_spec(1)]
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, groups, LANES), jnp.float32),
            jax.ShapeDtypeStruct((batch, groups, 1), jnp.int32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=64 << 20),
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * slots * heads * (width + sketch.shape[2] + residual.shape[2]),
            bytes_accessed=batch * slots * row_bytes,
            transcendentals=0,
        ),
        name="scan",
        interpret=interpret,
    )(length.astype(jnp.int32), *operands)
    return margin.reshape(batch, -1)[:, :slots], fired[..., 0]


def _window(start: int, width: int, row_width: int) -> tuple[int, int]:
    """The lanes of a row to read for its branch, as a block index and a width: one tile column, or the whole row."""
    if row_width <= LANES or start // LANES != (start + width - 1) // LANES:
        return 0, row_width
    return start // LANES, LANES


def _stacked(query: Array, padded: int, dtype) -> Array:
    return exact.stack(pad_axis(query, 1, padded), dtype, 1)


def _kernel(length, *refs, heads, branch, across, has_branch, has_code, narrow):
    refs = list(refs)
    score_parts = []

    def add_part(stacked, numbers, axis, unit=None):
        def part(g):
            score = exact.collapse(exact.dot(stacked[...], numbers(g), (1, axis)), heads)
            return score if unit is None else unit[...] * score

        score_parts.append(part)

    if has_branch:
        query, rows = refs[:2]
        refs = refs[2:]
        add_part(query, lambda g: floats(rows[g, :])[:, branch], 1)
    if has_code:
        sketch, *unit, code = refs[: 3 if narrow else 2]
        refs = refs[3 if narrow else 2 :]
        axis = 0 if across else 1
        at = (lambda g: code[:, g]) if across else (lambda g: code[g, :])
        add_part(sketch, lambda g: unpack.tpu_numbers(at(g), axis), axis, *unit)
    residual, threshold, bound, member, margin, fired = refs
    size = member.shape[1]
    start = pl.program_id(1) * size
    end = length[pl.program_id(0)]

    @pl.when(start >= end)
    def _():
        margin[...] = jnp.full(margin.shape, -jnp.inf, jnp.float32)
        fired[...] = jnp.zeros(fired.shape, jnp.int32)

    @pl.when(start < end)
    def _():
        for first in range(0, size, _STRIP):
            g = slice(first, min(first + _STRIP, size))
            score = jnp.zeros((heads, g.stop - first), jnp.float32)
            for part in score_parts:
                score += part(g)
            for e in range(bound.shape[0]):
                score += residual[:, e : e + 1] * bound[e : e + 1, g]
            best = (score - threshold[...]).max(0, keepdims=True)
            slot = start + first + lax.broadcasted_iota(jnp.int32, best.shape, 1)
            may = member[:, g].astype(jnp.int32) != 0  # a TPU v4 compares no bytes
            best = jnp.where((slot < end) & may, best, -jnp.inf)
            for i in range(first // LANES, g.stop // LANES):
                group = best[:, i * LANES - first : (i + 1) * LANES - first]
                margin[i : i + 1, :] = group
                fired[i : i + 1, :] = (group >= 0).astype(jnp.int32).sum(1, keepdims=True)
