"""The scan of the index for Hopper GPUs (Mosaic GPU): every archived row's best margin over the heads (VestigeKV §3).

A block of rows is the left operand of the tensor cores and the heads are the right one, so that every product of a row
adds up in one accumulator: branch and code, each with the three exact pieces of the float32 query. What leaves the chip
is one margin a row. The branch is read in place: a copy engine moves 64 of a row's 576 numbers as cheaply as all.
Floats go to the tensor cores as they lie in shared memory, codes of few bits from registers, where they are unpacked.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import exact, unpack
from kernels_pallas.blocks import GpuBlocks
from kernels_pallas.hopper import COLUMN, ROW, load, tiled, transposed
from kernels_pallas.tiles import float_dtype, pad_axis, round_up

Array = jax.Array

_DEPTH = 16  # numbers that one tensor-core instruction sums over; bytes that a copy moves


def scan(
    branch, sketch, residual, threshold, rows, code, bound, member, length, *, blocks: GpuBlocks, latent_dim: int
) -> Array:  # fmt: skip
    """See `kernels_pallas.scan`: margin float32 [B, S]."""
    batch, heads, width = branch.shape
    slots = rows.shape[1]
    size, padded = blocks.scan_rows, round_up(heads, 32)  # a copy moves multiples of 128 bytes
    rows = lax.bitcast_convert_type(rows, float_dtype(rows))
    threshold = jnp.pad(threshold, ((0, 0), (0, padded - heads)), constant_values=jnp.inf)
    unit = _unit(jnp.concatenate([branch, sketch], -1), padded)
    slopes = jnp.swapaxes(pad_axis(residual, 1, padded), 1, 2)
    heads_only = jnp.concatenate([unit[:, None], threshold[:, None], slopes], 1)
    probes, sources = [], []
    for query, source, start in ((branch, rows, latent_dim), (sketch, code, 0)):
        if query.shape[2]:
            parts = unpack.gpu_queries(query, source)
            depth = round_up(parts[0].shape[2], _DEPTH)
            for part in parts:
                part = pad_axis(pad_axis(part, 1, padded), 2, depth) / unit[..., None]
                probes.append(_pieces(part, unpack.operand_dtype(source)))
            wide = pad_axis(source, 2, max(start + depth, source.shape[2]))  # a copy, of tiny sizes only
            sources.append((pad_axis(wide, 1, round_up(slots, size)), start, depth))

    steps = pl.cdiv(slots, size)
    ctas = max(1, min(steps, blocks.scan_ctas // batch))
    kernel = functools.partial(
        _kernel, sources=[s[1:] for s in sources], size=size, ctas=ctas, stages=blocks.stages,
        registers=blocks.register_operands,
    )  # fmt: skip
    margin = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((batch, steps * size), jnp.float32),
        grid=(ctas, batch),
        grid_names=("cta", "batch"),
    )(
        length.astype(jnp.int32), *probes, heads_only, *(s[0] for s in sources),
        pad_axis(bound, 2, steps * size), pad_axis(member.astype(jnp.int8), 1, steps * size),
    )  # fmt: skip
    return margin[:, :slots]


def _unit(query: Array, padded: int) -> Array:
    """A power of two a head, float32 [B, H]: divided by it a query is below 2^15, and its pieces are normal float16."""
    _, exponent = jnp.frexp(jnp.abs(pad_axis(query, 1, padded)).max(-1))
    return jnp.ldexp(jnp.float32(1), jnp.maximum(exponent, -100) - 15)


def _pieces(query: Array, dtype) -> Array:
    """Three arrays of dtype that add up to the float32 query, to 2^-29 of its head's largest, one below another:
    [B, 3 * H, K]. (One more axis is more than a copy can stride over.)
    """
    return jnp.concatenate(exact.pieces(query, dtype), 1)


def _kernel(length, *refs, sources, size, ctas, stages, registers):
    n = len(refs) - len(sources) - 4
    probes, heads_only, tiles, (bound, member, margin) = refs[:n], refs[n], refs[n + 1 : -3], refs[-3:]
    heads, terms = heads_only.shape[2], bound.shape[1]
    b, cta = lax.axis_index("batch"), lax.axis_index("cta")
    live = pl.cdiv(length[b], size)  # blocks with a row
    mine = pl.cdiv(jnp.maximum(live - cta, 0), ctas)

    def at(j):
        return pl.ds((cta + j * ctas) * size, size)

    def body(queries, column, buffers, bounds, may, arrived, ready, scratch):
        def fetch(j):
            slot = lax.rem(j, stages)
            for tile, buffer, (start, width) in zip(tiles, buffers, sources, strict=True):
                plgpu.copy_gmem_to_smem(tile.at[b, at(j), pl.ds(start, width)], buffer.at[slot], arrived.at[slot])
            plgpu.copy_gmem_to_smem(bound.at[b, :, at(j)], bounds.at[slot], arrived.at[slot])
            plgpu.copy_gmem_to_smem(member.at[b, at(j)], may.at[slot], arrived.at[slot])

        for probe, query in zip(probes, queries, strict=True):
            plgpu.copy_gmem_to_smem(probe.at[b], query, ready)
        plgpu.copy_gmem_to_smem(heads_only.at[b], column, ready)
        for j in range(stages):
            pl.when(j < mine)(functools.partial(fetch, jnp.int32(j)))
        spread = lambda x, axis: lax.broadcast_in_dim(x, (size, heads), [axis])  # noqa: E731
        plgpu.barrier_wait(ready)
        scale, limit, *slopes = (spread(load(column.at[i], COLUMN), 1) for i in range(2 + terms))

        @pl.loop(0, mine)
        def _(j):
            slot = lax.rem(j, stages)
            plgpu.barrier_wait(arrived.at[slot])

            operands = [o for buffer in buffers for o in _operands(buffer.at[slot], scratch)]

            def products(total):
                for query, operand in zip(queries, operands, strict=True):
                    for first in range(0, query.shape[0], heads):
                        plgpu.wgmma(total, operand, transposed(query.at[pl.ds(first, heads)]))
                return total[...]

            score = scale * pl.run_scoped(products, plgpu.ACC((size, heads), jnp.float32))
            for e, slope in enumerate(slopes):
                score += slope * spread(load(bounds.at[slot, e], ROW), 0)
            best = (score - limit).max(1)
            fires = load(may.at[slot], ROW).astype(jnp.int32) != 0
            plgpu.commit_smem()  # every warp has read its share: the copy engine may overwrite it
            pl.when(j + stages < mine)(functools.partial(fetch, j + stages))
            slots = (cta + j * ctas) * size + plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=ROW)
            margin[b, at(j)] = jnp.where(fires & (slots < length[b]), best, -jnp.inf)

        @pl.loop(mine, pl.cdiv(margin.shape[1] // size - cta, ctas))
        def _(j):
            margin[b, at(j)] = plgpu.layout_cast(jnp.full((size,), -jnp.inf, jnp.float32), ROW)

    pl.run_scoped(
        body,
        [tiled(probe.shape[1:], probe.dtype) for probe in probes],
        plgpu.SMEM(heads_only.shape[1:], jnp.float32),
        [_buffer(tile, (stages, size, s[1])) for tile, s in zip(tiles, sources, strict=True)],
        plgpu.SMEM((stages, terms, size), jnp.float32),
        plgpu.SMEM((stages, size), jnp.int8),
        plgpu.Barrier(num_arrivals=len(sources) + 2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=n + 1),
        [tiled((size, p.shape[2]), p.dtype) for p in probes[-2:] if unpack.narrow(tiles[-1]) and not registers],
    )


def _buffer(tile, shape: tuple[int, ...]):
    """Shared memory for blocks of a source: swizzled, unless they are narrow codes of which no swizzle is made."""
    return plgpu.SMEM(shape, tile.dtype) if shape[-1] * tile.dtype.itemsize % 32 else tiled(shape, tile.dtype)


def _operands(block, scratch) -> list:
    """What the tensor cores multiply of a block: the block itself, or its codes unpacked, by way of scratch if any."""
    if not unpack.narrow(block):
        return [block]
    numbers = unpack.gpu_numbers(block)
    if not scratch:
        return numbers
    places = scratch[-len(numbers) :]
    for place, values in zip(places, numbers, strict=True):
        place[...] = values
    plgpu.commit_smem()
    return places
