"""The programs of the compile report: every kernel, and the decode step of one MLA layer, at Kimi Linear's sizes."""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

import kernels_pallas
import vestige_jax as vj
from experiments.compilation import byte_account as account
from experiments.compilers import Compiler
from kernels_pallas import words
from vestige_jax import attention, index, recall

LATENT, BRANCH, HEADS, RANK, BLOCK = 512, 64, 32, 64, 4096
FETCHED = 0.005  # share of the archive that a typical step fetches
KERNELS = {"tpu": "mosaic_tpu", "cuda": "mosaic_gpu"}
PAPER = ("sketch", RANK, 16)  # kind of index, rank and bits of a code
BALANCED = (("balanced", 2 * RANK, 8), ("balanced", 2 * RANK, 4))  # of as many numbers as the branch and the sketch


@dataclasses.dataclass(frozen=True)
class Program:
    """One line of the report."""

    name: str
    rows: int
    build: Callable[[], tuple]  # function, arguments and what is donated
    moved: int | None = None  # bytes by the account; None: it makes none
    dense: str | None = None  # the program that its bytes are compared with
    cache: int | None = None  # bytes of the rows that a step may not copy


def every(compiler: Compiler, rows: int) -> Iterator[Program]:
    """Kernels and steps over `rows` archived rows."""
    yield from kernels(compiler, rows)
    yield from steps(compiler, rows, KERNELS[compiler.platform], "step")
    yield from steps(compiler, rows, None, "xla step")
    for index_kind in BALANCED:
        yield from narrow_kernels(compiler, rows, index_kind[2])
        yield from policy_steps(compiler, rows, KERNELS[compiler.platform], "step", index_kind)


def kernels(compiler: Compiler, rows: int) -> Iterator[Program]:
    """Every kernel at the sizes of a step."""
    name = KERNELS[compiler.platform]
    spec, size = _spec(compiler, rows, name), _layout(compiler)
    width = _cache(compiler, rows, name).archive.words.shape[2]
    word = functools.partial(shape, 1, dtype=jnp.uint16)
    query, count = shape(1, HEADS, LATENT + BRANCH, dtype=jnp.bfloat16), shape(1, dtype=jnp.int32)
    keywords = {"latent_dim": LATENT, "scale": spec.scale, "implementation": name}

    def attend(slots):
        return functools.partial(kernels_pallas.attend, **keywords), (query, word(slots, width), count), ()

    def attend_list(fetched):
        arguments = (query, word(rows, width), shape(1, fetched, dtype=jnp.int32), count)
        return functools.partial(kernels_pallas.attend_list, **keywords), arguments, ()

    def scan(branch, rank):
        return _scan(compiler, rows, branch, rank, (rank, spec.index_dtype))

    def compact(fetched):
        margins = kernels_pallas.Margins(shape(1, rows), shape(1, -(-rows // 128), dtype=jnp.int32))
        return functools.partial(kernels_pallas.compact, width=fetched, implementation=name), (margins,), ()

    tier1, in_place = spec.tier1_slots, account.scan_in_place(size, rows)
    yield Program("kernel attend, all rows", rows, lambda: attend(rows), account.attend(size, rows))
    yield Program("kernel attend, tier 1", rows, lambda: attend(tier1), account.attend(size, tier1))
    yield Program("kernel scan, branch in place", rows, lambda: scan(BRANCH, RANK), in_place)
    copied = Program("kernel scan, branch copied beside the sketch", rows, lambda: scan(0, BRANCH + RANK))
    yield dataclasses.replace(copied, moved=account.scan(size, rows))
    for n in spec.fetch_widths[1:]:
        moved = account.fetch(size, n)
        yield Program(f"kernel attend_list, {n}", rows, functools.partial(attend_list, n), moved)
        yield Program(f"kernel compact, {n}", rows, functools.partial(compact, n), account.compact(rows, n))


def narrow_kernels(compiler: Compiler, rows: int, bits: int) -> Iterator[Program]:
    """The scan of codes of 8 or 4 bits without a branch, as many numbers as a sketch has and twice as many."""
    for rank in (RANK, 2 * RANK):
        stored = (rank, jnp.int8) if bits == 8 else (rank // 2, jnp.uint8)
        moved = account.scan(_layout(compiler, ("balanced", rank, bits)), rows)
        build = functools.partial(_scan, compiler, rows, 0, rank, stored)
        yield Program(f"kernel scan, {bits} bits, rank {rank}", rows, build, moved)


def _scan(compiler, rows, branch, rank, code):
    name = KERNELS[compiler.platform]
    probe = [shape(1, HEADS, n) for n in (branch, rank, 1)]
    entry = shape(1, rows, code[0], dtype=code[1]), shape(1, 1, rows), shape(1, rows, dtype=bool)
    stored = shape(1, rows, _cache(compiler, rows, name).archive.words.shape[2], dtype=jnp.uint16)
    arguments = (*probe, shape(1, HEADS), stored, *entry, shape(1, dtype=jnp.int32))
    return functools.partial(kernels_pallas.scan, latent_dim=LATENT, implementation=name), arguments, ()


def steps(compiler: Compiler, rows: int, implementation: str | None, name: str) -> Iterator[Program]:
    """The whole decode step of one layer: dense, the policy's common path, and the policy as deployed."""
    spec, size = _spec(compiler, rows, implementation), _layout(compiler)
    kept, moved = spec.archive_rows * size.row, account.dense(size, archive=spec.archive_rows, tail=BLOCK)
    build = functools.partial(_step, compiler, rows, implementation, PAPER, _dense_step)
    yield Program(f"{name} dense", rows, build, moved, cache=kept)
    yield from policy_steps(compiler, rows, implementation, name, PAPER)


def policy_steps(
    compiler: Compiler, rows: int, implementation: str | None, name: str, index_kind: tuple[str, int, int]
) -> Iterator[Program]:
    """The step with an index of this kind, rank and bits."""
    spec, size = _spec(compiler, rows, implementation, index_kind), _layout(compiler, index_kind)
    if implementation is None:
        size = dataclasses.replace(size, together=1, passes=3)
    build = functools.partial(_step, compiler, rows, implementation, index_kind)
    moved, kept = sum(_moved(spec, size).values()), spec.archive_rows * size.row
    which = "" if index_kind == PAPER else ", {} {} x {} bits".format(*index_kind)
    common = functools.partial(build, _common_step)
    yield Program(f"{name} common path{which}", rows, common, moved, f"{name} dense", kept)
    yield Program(f"{name} as deployed{which}", rows, functools.partial(build, vj.step), cache=kept)


def _step(compiler, rows, implementation, index_kind, function):
    query, row = (shape(1, *n, LATENT + BRANCH, dtype=jnp.bfloat16) for n in ((HEADS,), ()))
    spec = _spec(compiler, rows, implementation, index_kind)
    return functools.partial(function, spec), (_cache(compiler, rows, implementation, index_kind), query, row), (0,)


def account_line(compiler: Compiler, rows: int, index_kind: tuple[str, int, int] = PAPER) -> str:
    """Where the bytes of a step go, per archived row: dense beside the policy, with kernels."""
    spec, size = _spec(compiler, rows, KERNELS[compiler.platform], index_kind), _layout(compiler, index_kind)
    archive, parts = spec.archive_rows, _moved(spec, size)
    whole, policy = account.dense(size, archive=archive, tail=BLOCK), sum(parts.values())
    each = ", ".join(f"{name} {moved / archive:.0f}" for name, moved in parts.items())
    return (
        f"{rows} rows, {index_kind[0]} {index_kind[1]} x {index_kind[2]} bits: "
        f"dense {whole / archive:.0f}; policy {policy / archive:.0f} ({each}); ratio {whole / policy:.2f}"
    )


def _moved(spec, size) -> dict[str, int]:
    """What the policy's step reads, by part, with the typical share of fetched rows."""
    return account.policy(size, archive=spec.archive_rows, tier1=spec.tier1_slots, tail=BLOCK, fetched=_fetched(spec))


def _fetched(spec) -> int:
    return round(FETCHED * spec.archive_rows)


def _dense_step(spec, cache, query, row):
    cache = _write(cache, row)
    return attention.dense(spec, cache, query).out, cache


def _common_step(spec, cache, query, row):
    """`vestige_jax.step` when no block closes and what fired fits: written from the same pieces."""
    cache = _write(cache, row)
    part = attention.attended(spec, cache, query)
    probe = index.prepare(spec, cache.index.basis, query, cache.index.step)
    probe = probe._replace(residual=cache.calibration.z[:, None, None] * probe.residual)
    threshold = jnp.where(recall.gate(cache, part), part.peak, jnp.inf)
    margins = recall.scan(spec, cache, probe, threshold)
    fetched = kernels_pallas.compact(margins, _fetched(spec), implementation=spec.implementation)
    found = attention.over_list(spec, query, cache.archive.words, fetched.position, fetched.count)
    return kernels_pallas.merge(part, found).out, cache


def _write(cache, row):
    stored = words.to_words(row, cache.tail.words.shape[2])
    tail = words.set_row(cache.tail.words, stored, cache.tail.length)
    return dataclasses.replace(cache, tail=dataclasses.replace(cache.tail, words=tail, length=cache.tail.length + 1))


@functools.cache
def _spec(compiler, rows, implementation, index_kind=PAPER):
    kind, rank, bits = index_kind
    scale = (2 * BRANCH + BRANCH) ** -0.5  # 128 + 64 dimensions of a key head
    return vj.CacheSpec(
        LATENT, BRANCH, HEADS, scale, rows + BLOCK, rank=rank, index=kind, index_bits=bits,
        sketch_dtype=jnp.bfloat16 if compiler.platform == "tpu" else jnp.float16, implementation=implementation,
    )  # fmt: skip


@functools.cache
def _cache(compiler, rows, implementation, index_kind=PAPER):
    return compiler.shapes(lambda: vj.init(_spec(compiler, rows, implementation, index_kind), 1))


def _layout(compiler, index_kind=PAPER) -> account.Layout:
    kind, rank, bits = index_kind
    return account.layout(compiler.platform, LATENT, BRANCH, rank, kind=kind, bits=bits)


def shape(*sizes, dtype="float32") -> jax.ShapeDtypeStruct:
    """An array that a program is compiled for."""
    return jax.ShapeDtypeStruct(sizes, dtype)
