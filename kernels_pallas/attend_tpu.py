"""Flash decode for TPUs (Mosaic): a contiguous range of rows, or rows gathered by a list, in one pass (VestigeKV §3).

A block of rows is read once, as the words it is stored in, and gives every query its scores, its softmax sums and its
output. Weights stay float32: they multiply bfloat16 rows as three exact pieces stacked on the matrix unit's free rows.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import exact
from kernels_pallas.blocks import TOGETHER as GROUP
from kernels_pallas.blocks import TpuBlocks
from kernels_pallas.parts import Part
from kernels_pallas.tiles import LANES, float_dtype, floats, live_block, pad_axis, round_up

Array = jax.Array

_PEAK, _TOTAL, _SCORE = range(3)  # running sums of a query: largest score, sum of weights, sum of weights * score


def attend(query: Array, rows: Array, length: Array, *, latent_dim, scale, blocks: TpuBlocks, interpret=False) -> Part:
    """See `kernels_pallas.attend`. rows [B, S, W], W >= C; words past C are not looked at."""
    batch, queries, _ = query.shape
    query, tile = _pad_queries(query, rows, blocks)
    length = jnp.broadcast_to(length.reshape(batch, -1), (batch, queries)).astype(jnp.int32)
    length = pad_axis(length, 1, query.shape[1])
    longest = length.reshape(batch, -1, tile).max(-1)
    size = min(blocks.attend_rows, round_up(rows.shape[1], 16))
    steps = pl.cdiv(rows.shape[1], size * blocks.splits)

    def block_of(b, q, split, step, longest):
        return b, live_block(step * blocks.splits + split, longest[b, q], size), 0

    kernel = functools.partial(_range_kernel, scale=scale, latent_dim=latent_dim, splits=blocks.splits)
    of_queries = lambda b, q, split, step, longest: (b, q, 0)  # noqa: E731
    of_parts = lambda b, q, split, step, longest: (b, split, q, 0)  # noqa: E731
    out, sums = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, query.shape[1] // tile, blocks.splits, steps),
            in_specs=[
                pl.BlockSpec((None, tile, query.shape[2]), of_queries),
                pl.BlockSpec((None, tile, 1), of_queries),
                pl.BlockSpec((None, size, rows.shape[2]), block_of),
            ],
            out_specs=[
                pl.BlockSpec((None, None, tile, latent_dim), of_parts),
                pl.BlockSpec((None, None, tile, LANES), of_parts),
            ],
        ),
        out_shape=_part_shapes(batch, blocks.splits, query.shape[1], latent_dim),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"), vmem_limit_bytes=64 << 20
        ),
        cost_estimate=_cost(query, rows, batch * rows.shape[1] * (query.shape[1] // tile), latent_dim),
        name="attend",
        interpret=interpret,
    )(longest, query, length[..., None], rows)
    return _combine(out, sums, queries)


def attend_list(
    query: Array, rows: Array, position: Array, count: Array, *, latent_dim, scale, blocks: TpuBlocks, interpret=False
) -> Part:
    """See `kernels_pallas.attend_list`. A copy moves the 8 rows that lie together; `member` names one."""
    batch, queries, _ = query.shape
    query, tile = _pad_queries(query, rows, blocks)
    size = min(blocks.gather_rows, round_up(position.shape[1], 16))
    position = pad_axis(jnp.clip(position, 0, rows.shape[1] - 1), 1, round_up(position.shape[1], size))
    member = jnp.where(jnp.arange(position.shape[1]) < count[:, None], position % GROUP, -1).astype(jnp.float32)
    chunks = position.shape[1] // size

    kernel = functools.partial(_list_kernel, scale=scale, latent_dim=latent_dim, size=size)
    of_queries = lambda b, q, count: (b, q, 0)  # noqa: E731
    of_parts = lambda b, q, count: (b, 0, q, 0)  # noqa: E731
    out, sums = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, query.shape[1] // tile),
            in_specs=[
                pl.BlockSpec((None, tile, query.shape[2]), of_queries),
                pl.BlockSpec((None, 1, position.shape[1]), lambda b, q, c: (b, 0, 0), memory_space=pltpu.SMEM),
                pl.BlockSpec((None, chunks, 1, size), lambda b, q, count: (b, 0, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[
                pl.BlockSpec((None, None, tile, latent_dim), of_parts),
                pl.BlockSpec((None, None, tile, LANES), of_parts),
            ],
            scratch_shapes=[
                pltpu.VMEM((2, size, GROUP, rows.shape[2]), rows.dtype),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=_part_shapes(batch, 1, query.shape[1], latent_dim),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=64 << 20),
        cost_estimate=_cost(query, rows, position.size * GROUP * (query.shape[1] // tile), latent_dim),
        name="attend_list",
        interpret=interpret,
    )(count.astype(jnp.int32), query, position[:, None], member.reshape(batch, chunks, 1, size), rows)
    return _combine(out, sums, queries)


def _range_kernel(longest, query, length, rows, out, sums, *, scale, latent_dim, splits):
    size = rows.shape[0]
    step = pl.program_id(3)
    start = (step * splits + pl.program_id(2)) * size
    end = longest[pl.program_id(0), pl.program_id(1)]

    @pl.when(step == 0)
    def _():
        _clear(out, sums)

    @pl.when(start < end)
    def _():
        slot = start + lax.broadcasted_iota(jnp.int32, (size, 1), 0)
        words = jnp.where(slot < end, rows[...], jnp.zeros((), rows.dtype))  # what lies past the end may be anything
        live = start + lax.broadcasted_iota(jnp.int32, (1, size), 1) < length[...]
        _fold(query[...], floats(words), live, out, sums, scale, latent_dim)

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        _finish(out, sums)


def _list_kernel(count, query, position, member, rows, out, sums, buffer, arrived, *, scale, latent_dim, size):
    b = pl.program_id(0)
    chunks = pl.cdiv(count[b], size)
    width = rows.shape[2]

    def copy(chunk, slot, i):
        group = position[0, chunk * size + i] // GROUP
        source = rows.at[b, pl.ds(pl.multiple_of(group * GROUP, GROUP), GROUP), :]
        return pltpu.make_async_copy(source, buffer.at[slot, i], arrived.at[slot])

    def listed(chunk):
        return jnp.minimum(count[b] - chunk * size, size)

    def start(chunk, slot):
        lax.fori_loop(0, listed(chunk), lambda i, _: copy(chunk, slot, i).start(), None)

    _clear(out, sums)

    @pl.when(chunks > 0)
    def _():
        start(0, 0)

    def one_chunk(chunk, _):
        slot = chunk % 2

        @pl.when(chunk + 1 < chunks)
        def _():
            start(chunk + 1, 1 - slot)

        lax.fori_loop(0, listed(chunk), lambda i, _: copy(chunk, slot, i).wait(), None)
        arrived_rows = lax.broadcasted_iota(jnp.int32, (size * GROUP, 1), 0) < GROUP * listed(chunk)
        words = buffer[slot].reshape(size * GROUP, width)
        block = jnp.where(arrived_rows, words, jnp.zeros((), words.dtype))
        _fold(query[...], floats(block), _picked(member[chunk]), out, sums, scale, latent_dim)

    lax.fori_loop(0, chunks, one_chunk, None)
    _finish(out, sums)


def _picked(member: Array) -> Array:
    """bool [1, 8 * n]: of each of n groups of 8 rows the one that member [1, n] names, none where it is -1."""
    size = member.shape[1]
    lane = lax.broadcasted_iota(jnp.int32, (size, size * GROUP), 1)
    owner = lax.broadcasted_iota(jnp.int32, (size, size * GROUP), 0)
    spread = (lane // GROUP == owner).astype(jnp.bfloat16)  # repeats every entry 8 times; small integers are exact
    named = exact.dot(jnp.broadcast_to(member, (16, size)), spread, (1, 0))[:1]
    return named == (lane[:1] % GROUP).astype(jnp.float32)


def _clear(out, sums):
    lane = lax.broadcasted_iota(jnp.int32, sums.shape, 1)
    sums[...] = jnp.where(lane == _PEAK, -jnp.inf, 0.0)
    out[...] = jnp.zeros_like(out)


def _fold(query, block, live, out, sums, scale, latent_dim):
    """Add the rows of a block [S, W], live [1 or Q, S], to the running sums of query [Q, W]."""
    score = scale * exact.dot(query, block, (1, 1))
    score = jnp.where(live, score, -jnp.inf)
    old = _column(sums, _PEAK)
    peak = jnp.maximum(old, score.max(1, keepdims=True))
    floor = jnp.where(peak == -jnp.inf, 0.0, peak)  # no row yet: weights exp(-inf) = 0, never NaN
    weight = jnp.exp(score - floor)
    keep = jnp.exp(old - floor)
    total = keep * _column(sums, _TOTAL) + weight.sum(1, keepdims=True)
    moment = keep * _column(sums, _SCORE) + jnp.where(live, weight * score, 0.0).sum(1, keepdims=True)
    stacked = exact.stack(weight, block.dtype, 0)
    product = exact.collapse(exact.dot(stacked, block[:, :latent_dim], (1, 0)), weight.shape[0])
    out[...] = keep * out[...] + product
    _store(sums, peak, total, moment)


def _finish(out, sums):
    """The sums become the part's lse, peak and mean; the output is divided by the sum of weights."""
    peak, total = _column(sums, _PEAK), _column(sums, _TOTAL)
    share = 1.0 / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    out[...] = share * out[...]
    _store(sums, peak, peak + jnp.log(total), share * _column(sums, _SCORE))


def _column(sums, i):
    return sums[:, i : i + 1]


def _store(sums, *columns):
    lane = lax.broadcasted_iota(jnp.int32, sums.shape, 1)
    value = jnp.zeros(sums.shape, jnp.float32)
    for i, column in enumerate(columns):
        value = jnp.where(lane == i, column, value)
    sums[...] = value


def _pad_queries(query: Array, rows: Array, blocks: TpuBlocks) -> tuple[Array, int]:
    """Queries in the row dtype, as wide as rows and padded to whole tiles; and how many are attended at once."""
    query = query.astype(float_dtype(rows))
    tile = min(blocks.attend_queries, round_up(query.shape[1], 16))
    return pad_axis(pad_axis(query, 1, round_up(query.shape[1], tile)), 2, rows.shape[2]), tile


def _part_shapes(batch, splits, queries, latent_dim):
    return [
        jax.ShapeDtypeStruct((batch, splits, queries, latent_dim), jnp.float32),
        jax.ShapeDtypeStruct((batch, splits, queries, LANES), jnp.float32),
    ]


def _cost(query: Array, rows: Array, read: int, latent_dim: int) -> pl.CostEstimate:
    """What the compiler is told: `read` rows, all of them live."""
    tile = query.shape[1]
    return pl.CostEstimate(
        flops=2 * read * tile * (query.shape[2] + latent_dim),
        bytes_accessed=read * rows.shape[2] * rows.dtype.itemsize + query.size * (query.dtype.itemsize + 4),
        transcendentals=read * tile,
    )


def _combine(out: Array, sums: Array, queries: int) -> Part:
    """The parts of the splits [B, splits, Q, ...] as one."""
    out, sums = out[:, :, :queries], sums[:, :, :queries]
    peak, lse, mean = sums[..., 0], sums[..., 1], sums[..., 2]
    if out.shape[1] == 1:
        return Part(out[:, 0], lse[:, 0], peak[:, 0], mean[:, 0])
    whole = jax.nn.logsumexp(lse, axis=1)
    share = jnp.exp(lse - jnp.where(whole == -jnp.inf, 0.0, whole)[:, None])
    return Part((share[..., None] * out).sum(1), whole, peak.max(1), (share * mean).sum(1))
