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


def kernels(compiler: Compiler, rows: int) -> Iterator[Program]:
    """Every kernel at the sizes of a step."""
    name = KERNELS[compiler.platform]
    spec, size = _spec(compiler, rows, name), _layout(compiler)
    width = _cache(compiler, rows, name).archive.words.shape[2]
    word = functools.partial(_shape, 1, dtype=jnp.uint16)
    query, count = _shape(1, HEADS, LATENT + BRANCH, dtype=jnp.bfloat16), _shape(1, dtype=jnp.int32)
    keywords = {"latent_dim": LATENT, "scale": spec.scale, "implementation": name}

    def attend(slots):
        return functools.partial(kernels_pallas.attend, **keywords), (query, word(slots, width), count), ()

    def attend_list(fetched):
        arguments = (query, word(rows, width), _shape(1, fetched, dtype=jnp.int32), count)
        return functools.partial(kernels_pallas.attend_list, **keywords), arguments, ()

    def scan(branch, rank):
        probe = [_shape(1, HEADS, n) for n in (branch, rank, 1)]
        entry = _shape(1, rows, rank, dtype=spec.index_dtype), _shape(1, 1, rows), _shape(1, rows, dtype=bool)
        arguments = (*probe, _shape(1, HEADS), word(rows, width), *entry, count)
        return functools.partial(kernels_pallas.scan, latent_dim=LATENT, implementation=name), arguments, ()

    def compact(fetched):
        margins = kernels_pallas.Margins(_shape(1, rows), _shape(1, -(-rows // 128), dtype=jnp.int32))
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


def steps(compiler: Compiler, rows: int, implementation: str | None, name: str) -> Iterator[Program]:
    """The whole decode step of one layer: dense, the policy's common path, and the policy as deployed."""
    spec, size = _spec(compiler, rows, implementation), _layout(compiler)
    if implementation is None:
        size = dataclasses.replace(size, together=1, passes=3)
    archive = spec.archive_rows
    moved = account.policy(size, archive=archive, tier1=spec.tier1_slots, tail=BLOCK, fetched=_fetched(spec))
    query, row = (_shape(1, *n, LATENT + BRANCH, dtype=jnp.bfloat16) for n in ((HEADS,), ()))
    kept = archive * size.row

    def build(function):
        return functools.partial(function, spec), (_cache(compiler, rows, implementation), query, row), (0,)

    dense = f"{name} dense"
    yield Program(dense, rows, lambda: build(_dense_step), account.dense(size, archive=archive, tail=BLOCK), cache=kept)
    yield Program(f"{name} common path", rows, lambda: build(_common_step), sum(moved.values()), dense, kept)
    yield Program(f"{name} as deployed", rows, lambda: build(vj.step), cache=kept)


def account_line(compiler: Compiler, rows: int) -> str:
    """Where the bytes of a step go, per archived row: dense beside the policy, with kernels."""
    spec, size = _spec(compiler, rows, KERNELS[compiler.platform]), _layout(compiler)
    archive = spec.archive_rows
    parts = account.policy(size, archive=archive, tier1=spec.tier1_slots, tail=BLOCK, fetched=_fetched(spec))
    whole, policy = account.dense(size, archive=archive, tail=BLOCK), sum(parts.values())
    each = ", ".join(f"{name} {moved / archive:.0f}" for name, moved in parts.items())
    return (
        f"{rows} rows: dense {whole / archive:.0f}; policy {policy / archive:.0f} ({each}); ratio {whole / policy:.2f}"
    )


def _fetched(spec) -> int:
    return round(FETCHED * spec.archive_rows)


def _dense_step(spec, cache, query, row):
    cache = _write(cache, row)
    return attention.dense(spec, cache, query).out, cache


def _common_step(spec, cache, query, row):
    """`vestige_jax.step` when no block closes and what fired fits: written from the same pieces."""
    cache = _write(cache, row)
    part = attention.attended(spec, cache, query)
    probe = index.prepare(spec, cache.index.basis, query)
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
def _spec(compiler, rows, implementation):
    sketch = jnp.bfloat16 if compiler.platform == "tpu" else jnp.float16
    scale = (2 * BRANCH + BRANCH) ** -0.5  # 128 + 64 dimensions of a key head
    return vj.CacheSpec(
        LATENT, BRANCH, HEADS, scale, rows + BLOCK, rank=RANK, sketch_dtype=sketch, implementation=implementation
    )


@functools.cache
def _cache(compiler, rows, implementation):
    return compiler.shapes(lambda: vj.init(_spec(compiler, rows, implementation), 1))


def _layout(compiler) -> account.Layout:
    return account.layout(compiler.platform, LATENT, BRANCH, RANK)


def _shape(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)
