"""Flash decode for Hopper GPUs (Mosaic GPU): a range of rows, or rows gathered by a list, in one pass (VestigeKV §3).

A thread block takes every n-th block of rows. One warpgroup brings rows into shared memory; two others each score them
with every query and keep the output of one half of the latent. A tensor core works on 64 queries at a time and a decode
step has at most 32: they are there twice, and their weights once as the high and once as the low piece of a float32.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import exact
from kernels_pallas.blocks import GpuBlocks
from kernels_pallas.hopper import ROW, TILE, swizzle, tiled, transposed
from kernels_pallas.parts import Part
from kernels_pallas.sources_gpu import Listed, Range, listed
from kernels_pallas.tiles import float_dtype, pad_axis, round_up

Array = jax.Array

QUERIES = 32  # attended at once, half of what a tensor core takes
_TILE = 2 * QUERIES
_WORKERS = 2  # warpgroups that compute; one more copies
_STRIP = 64  # columns of the output that are multiplied at once: what fits into registers beside the output


def attend(query: Array, rows: Array, length: Array, *, latent_dim, scale, blocks: GpuBlocks) -> Part:
    """See `kernels_pallas.attend`; rows [B, S, C] are bfloat16 or its words."""
    size = blocks.attend_rows
    rows = lax.bitcast_convert_type(rows, float_dtype(rows))
    rows = pad_axis(rows, 1, max(size, round_up(rows.shape[1], TILE)))  # a copy, of a buffer of broken groups
    length = jnp.broadcast_to(length.reshape(len(query), -1), query.shape[:2])
    most = blocks.attend_ctas
    return _run(query, Range(rows), length, size, most, latent_dim=latent_dim, scale=scale, blocks=blocks)


def attend_list(
    query: Array, rows: Array, position: Array, count: Array, *, latent_dim, scale, blocks: GpuBlocks
) -> Part:
    """See `kernels_pallas.attend_list`; rows as in `attend`."""
    size = blocks.gather_rows
    length = jnp.broadcast_to(count[:, None], query.shape[:2])
    source = listed(rows, position, size)
    most = blocks.gather_splits
    return _run(query, source, length, size, most, latent_dim=latent_dim, scale=scale, blocks=blocks)


def _run(
    query: Array, source: Range | Listed, length: Array, size: int, most: int, *, latent_dim, scale, blocks
) -> Part:
    """Attend the first length [B, Q] slots of a source, `size` of them at once, in at most `most` parts."""
    batch, queries, _ = query.shape
    tiles = pl.cdiv(queries, QUERIES)
    query = pad_axis(pad_axis(query.astype(source.rows.dtype), 1, tiles * QUERIES), 2, source.width)
    query = jnp.tile(query.reshape(batch, tiles, 1, QUERIES, -1), (1, 1, 2, 1, 1)).reshape(batch, tiles, _TILE, -1)
    length = pad_axis(length.astype(jnp.int32), 1, tiles * QUERIES).reshape(batch, tiles, QUERIES)
    splits = max(1, min(pl.cdiv(source.slots, size), blocks.attend_ctas // (batch * tiles), most))

    lead = (batch, tiles, splits)
    strip = min(_STRIP, latent_dim // _WORKERS)  # each leaves the chip in one piece: whole cache lines
    out, sums = plgpu.kernel(
        functools.partial(
            _kernel,
            kind=type(source),
            latent_dim=latent_dim,
            scale=scale,
            size=size,
            splits=splits,
            stages=blocks.stages,
            registers=blocks.register_operands,
        ),  # fmt: skip
        out_type=[
            jax.ShapeDtypeStruct((*lead, latent_dim // strip, _TILE, strip), jnp.float32),
            jax.ShapeDtypeStruct((*lead, 3, _TILE), jnp.float32),
        ],
        grid=(splits, tiles, batch),
        grid_names=("split", "tile", "batch"),
        num_threads=_WORKERS + 1,
        thread_name="warpgroup",
    )(length.max(-1), jnp.tile(length, (1, 1, 2)), query, *source)
    return _combine(out, sums, queries)


def _kernel(longest, length, query, *refs, kind, latent_dim, scale, size, splits, stages, registers):
    source, (out, sums) = kind(*refs[:-2]), refs[-2:]
    width, dtype = source.width, source.rows.dtype
    split, tile, b = (lax.axis_index(name) for name in ("split", "tile", "batch"))
    group = lax.axis_index("warpgroup")
    live = pl.cdiv(longest[b, tile], size)
    mine = pl.cdiv(jnp.maximum(live - split, 0), splits)  # blocks split, split + splits, ... with a row
    half = latent_dim // _WORKERS
    swizzled = swizzle(dtype, width, half, size)
    strip = min(_STRIP, half)
    columns = [pl.ds(pl.multiple_of(group * half + i, strip), strip) for i in range(0, half, strip)]

    def place(j):  # the slots of a block begin at `first`; the last block is moved back to end where the rows do
        first = (split + j * splits) * size
        return first, jnp.minimum(first, source.slots - size)

    def body(queries, buffers, lengths, arrived, free, ready, scratch, *spare):
        @pl.when(group == _WORKERS)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            source.bring(b, lambda j: place(j)[1], mine, buffers, swizzled, arrived, free, *scratch)

        @pl.when(group < _WORKERS)
        def _():
            plgpu.set_max_registers(232, action="increase")

            @pl.when(group == 0)
            def _():
                plgpu.copy_gmem_to_smem(query.at[b, tile], queries, ready)
                plgpu.copy_gmem_to_smem(length.at[b, tile], lengths, ready)

            plgpu.barrier_wait(ready)
            own = plgpu.layout_cast(lengths[...], ROW)
            low = plgpu.broadcasted_iota(jnp.int32, (_TILE, size), 0, layout=plgpu.Layout.WGMMA) >= QUERIES

            def fold(j, carry):
                acc, peak, total, moment = carry
                slot = lax.rem(j, stages)
                plgpu.barrier_wait(arrived.at[slot])

                def products(result):
                    plgpu.wgmma(result, queries, transposed(buffers.at[slot]))
                    return result[...]

                score = scale * pl.run_scoped(products, plgpu.ACC((_TILE, size), jnp.float32))
                first, start = place(j)
                slots = start + plgpu.broadcasted_iota(jnp.int32, (_TILE, size), 1, layout=plgpu.Layout.WGMMA)
                seen = (slots >= first) & (slots < _across(own, score))
                score = jnp.where(seen, score, -jnp.inf)
                new = jnp.maximum(peak, score.max(1))
                floor = jnp.where(new == -jnp.inf, 0.0, new)  # no row yet: weights exp(-inf) = 0, never NaN
                weight = jnp.exp(score - _across(floor, score))
                keep = jnp.exp(peak - floor)
                total = keep * total + weight.sum(1)
                moment = keep * moment + jnp.where(seen, weight * score, 0.0).sum(1)
                high = exact.truncate(weight)
                piece = jnp.where(low, weight - high, high).astype(jnp.bfloat16)

                if spare:
                    spare[0][group] = piece
                    plgpu.commit_smem()
                    piece = spare[0].at[group]

                def outputs(piece, lanes, result):
                    plgpu.wgmma(result, piece, buffers.at[slot, :, lanes])
                    return result[...]

                product = plgpu.ACC((_TILE, strip), jnp.float32)
                strips = [pl.run_scoped(functools.partial(outputs, piece, at), product) for at in columns]
                acc = [_across(keep, old) * old + added for old, added in zip(acc, strips, strict=True)]
                plgpu.barrier_arrive(free.at[slot])
                return acc, new, total, moment

            nothing = plgpu.layout_cast(jnp.full((_TILE,), -jnp.inf, jnp.float32), ROW)
            zero = plgpu.layout_cast(jnp.zeros((_TILE,), jnp.float32), ROW)
            acc = [plgpu.layout_cast(jnp.zeros((_TILE, strip), jnp.float32), plgpu.Layout.WGMMA) for _ in columns]
            acc, peak, total, moment = lax.fori_loop(0, mine, fold, (acc, nothing, zero, zero))
            for i, value in enumerate(acc):
                out[b, tile, split, group * len(acc) + i] = value

            @pl.when(group == 0)
            def _():
                for i, value in enumerate((peak, total, moment)):
                    sums[b, tile, split, i] = value

    pl.run_scoped(
        body,
        tiled((_TILE, width), dtype, swizzled),
        tiled((stages, size, width), dtype, swizzled),
        plgpu.SMEM((_TILE,), jnp.int32),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_arrivals=_WORKERS, num_barriers=stages),
        plgpu.Barrier(num_arrivals=2),
        source.scratch(stages, size),
        *([tiled((_WORKERS, _TILE, size), dtype, swizzled)] if not registers else []),
        collective_axes="warpgroup",
    )


def _across(x, like):
    return lax.broadcast_in_dim(x, like.shape, [0])


def _combine(out: Array, sums: Array, queries: int) -> Part:
    """The splits of every tile as one part; the two pieces of the weights, 32 rows apart, are added up."""
    batch, tiles, splits = out.shape[:3]
    out = jnp.moveaxis(out, 3, 4).reshape(batch, tiles, splits, 2, QUERIES, -1).sum(3)
    peak, total, moment = (sums[:, :, :, i, :QUERIES] for i in range(3))
    whole = peak.max(2, keepdims=True)
    share = jnp.exp(peak - jnp.where(whole == -jnp.inf, 0.0, whole))
    total = (share * total).sum(2)
    scaled = 1.0 / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    flat = lambda x: x.reshape(batch, tiles * QUERIES, *x.shape[3:])[:, :queries]  # noqa: E731
    return Part(
        flat(scaled[..., None] * (share[..., None] * out).sum(2)),
        flat(whole[:, :, 0] + jnp.log(total)),
        flat(whole[:, :, 0]),
        flat(scaled * (share * moment).sum(2)),
    )
