"""The scan of the index for Hopper GPUs (Mosaic GPU): every archived row's best margin over the heads (VestigeKV §3).

A block of rows is the left operand of the tensor cores and the heads are the right one. Products of floats, branch and
code, add up in one accumulator, each with the three exact pieces of the float32 query. Codes of few bits are whole
numbers and meet its int8 digits. What leaves the chip is one margin a row. The branch is read in place: a copy engine
moves 64 of a row's 576 numbers as cheaply as all. Blocks are multiplied as they lie in shared memory, codes of 4 bits
once they are unpacked there.
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

_DEPTH = 32  # bytes of a row that one tensor-core instruction sums over
_COLUMNS = 128  # of whole sums that registers hold at once: digits of all heads


def scan(
    branch, sketch, residual, threshold, rows, code, bound, member, length, *, blocks: GpuBlocks, latent_dim: int
) -> Array:  # fmt: skip
    """See `kernels_pallas.scan`: margin float32 [B, S]."""
    batch, heads, width = branch.shape
    slots = rows.shape[1]
    size, padded = blocks.scan_rows, round_up(heads, 32)  # a copy moves multiples of 128 bytes
    rows = lax.bitcast_convert_type(rows, float_dtype(rows))
    threshold = jnp.pad(threshold, ((0, 0), (0, padded - heads)), constant_values=jnp.inf)
    slopes = jnp.swapaxes(pad_axis(residual, 1, padded), 1, 2)
    units, probes, sources = [], [], []

    def add(parts, source, start, depth):
        probes.extend(parts)
        wide = pad_axis(source, 2, max(start + depth, source.shape[2]))  # a copy, of rows that are no whole depths
        sources.append((pad_axis(wide, 1, round_up(slots, size)), start, depth))

    narrow = unpack.narrow(code)
    floats = [(branch, rows, latent_dim), *([] if narrow else [(sketch, code, 0)])]
    floats = [entry for entry in floats if entry[0].shape[2]]
    if floats:
        units.append(_unit(jnp.concatenate([query for query, *_ in floats], -1), padded))
    for query, source, start in floats:
        depth = round_up(query.shape[2], _DEPTH // source.dtype.itemsize)
        query = pad_axis(pad_axis(query, 1, padded), 2, depth) / units[0][..., None]
        add([_stacked(exact.pieces(query, source.dtype))], source, start, depth)
    if narrow and code.shape[2]:
        depth = round_up(code.shape[2], _DEPTH)
        parts = [pad_axis(pad_axis(part, 1, padded), 2, depth) for part in unpack.gpu_queries(sketch, code)]
        unit, digits = exact.digits(jnp.concatenate(parts, -1))
        units.append(unit)
        add(jnp.split(_stacked(digits), len(parts), axis=-1), code, 0, depth)
    heads_only = jnp.concatenate([jnp.stack([*units, threshold], 1), slopes], 1)

    steps = pl.cdiv(slots, size)
    ctas = max(1, min(steps, blocks.scan_ctas // batch))
    kernel = functools.partial(_kernel, sources=[s[1:] for s in sources], size=size, ctas=ctas, stages=blocks.stages)
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


def _stacked(parts: tuple[Array, ...]) -> Array:
    """Pieces or digits of a query [B, H, K], one below another. (One more axis is more than a copy can stride over.)"""
    return jnp.concatenate(parts, 1)


def _kernel(length, *refs, sources, size, ctas, stages):
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
        by_head = [spread(load(column.at[i], COLUMN), 1) for i in range(column.shape[0])]
        *units, limit = by_head[: len(by_head) - terms]
        slopes = by_head[len(by_head) - terms :]

        @pl.loop(0, mine)
        def _(j):
            slot = lax.rem(j, stages)
            plgpu.barrier_wait(arrived.at[slot])

            operands = [o for buffer in buffers for o in _operands(buffer.at[slot], scratch)]
            scores = _scores(list(zip(queries, operands, strict=True)), size, heads)
            misses = [spread(load(bounds.at[slot, e], ROW), 0) for e in range(terms)]
            score = sum(a * b for a, b in zip([*units, *slopes], [*scores, *misses], strict=True))
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
        [tiled((stages, size, s[1]), tile.dtype) for tile, s in zip(tiles, sources, strict=True)],
        plgpu.SMEM((stages, terms, size), jnp.float32),
        plgpu.SMEM((stages, size), jnp.int8),
        plgpu.Barrier(num_arrivals=len(sources) + 2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=n + 1),
        [tiled((size, p.shape[2]), jnp.int8) for p in probes[-2:] if unpack.packed(tiles[-1])],
    )


def _operands(block, scratch) -> list:
    """What the tensor cores multiply of a block in shared memory: the block itself, or its codes of 4 bits unpacked."""
    if not unpack.packed(block):
        return [block]
    for place, values in zip(scratch, unpack.gpu_numbers(block), strict=True):
        place[...] = values
    plgpu.commit_smem()
    return scratch


def _scores(pairs, size: int, heads: int) -> list[Array]:
    """Scores [S, H] of queries and blocks, in units of a head: of floats and of whole numbers, where there are any."""
    floats, whole = ([pair for pair in pairs if (pair[0].dtype == jnp.int8) == is_whole] for is_whole in (False, True))
    add_up = ((_sum, floats), (_sum_of_digits, whole))
    return [function(some, size, heads) for function, some in add_up if some]


def _sum(pairs, size: int, heads: int) -> Array:
    """Products of the pieces of queries [3 * H, K] with blocks [S, K], all added up: float32 [S, H]."""

    def products(total):
        for query, block in pairs:
            for first in range(0, query.shape[0], heads):
                plgpu.wgmma(total, block, transposed(query.at[pl.ds(first, heads)]))
        return total[...]

    return pl.run_scoped(products, plgpu.ACC((size, heads), jnp.float32))


def _sum_of_digits(pairs, size: int, heads: int) -> Array:
    """The same of int8 digits [4 * H, K] with whole numbers: sums are exact, and digits meet in float32."""
    columns = heads * max(1, _COLUMNS // heads)
    total = 0.0
    for first in range(0, pairs[0][0].shape[0], columns):

        def products(total, first=first):
            for query, block in pairs:
                plgpu.wgmma(total, block, transposed(query.at[pl.ds(first, columns)]))
            return total[...]

        sums = pl.run_scoped(products, plgpu.ACC((size, columns), jnp.int32))
        for start in range(0, columns, heads):
            total = exact.BASE * total + sums[:, start : start + heads].astype(jnp.float32)
    return total
