"""Compiles every kernel and the decode step of one MLA layer with a device's own compiler, on a machine without it.

    make aot-tpu      fetches the compiler and reports on tpu:v5e:2x2, tpu:v5p:2x2x1 and tpu:v6e:2x2
    make aot-h200

    python -m experiments.compile_report --target=tpu:v5e:2x2 [--lengths=32768,131072] [--only=kernel|step] [--out=DIR]

Sizes are those of Kimi Linear: latent 512, branch 64, 32 heads, bfloat16 rows, batch 1, rank 64. Per program: compiled
or the error, bytes on the device, temporary bytes, and bytes accessed as the compiler counts them: with copies into
on-chip memory, and of a TPU kernel what it declares. `kernels_mb` is what its kernels declare, alone, at full length;
`ratio` is that of the dense step over the policy's. H200 kernels declare nothing: there the columns leave them out.

The step as deployed holds rare branches (serve dense on overflow, close a block), of which the compiler counts the
dearest; 'common path' is the same step without them, .5% of the rows fetched. Rows go to compiled.jsonl; a run that
was stopped goes on there.
"""

import functools
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from absl import flags

from experiments import compilers, tables
from experiments.rows import Rows, UserError

LATENT, BRANCH, HEADS, RANK = 512, 64, 32, 64
FETCHED = 0.005  # share of the archive that a typical step fetches
COLUMNS = ("program", "rows", "state", "seconds", "device_mb", "temporary_mb", "accessed_mb", "kernels_mb", "ratio")


class Program(NamedTuple):
    """One line of the report."""

    name: str
    rows: int
    build: Callable[[], tuple]  # function, arguments and what is donated
    dense: str | None = None  # the program that its bytes are compared with


def main(target: str, lengths: list[int], only: str, out: pathlib.Path) -> int:
    """Report on one target; the number of programs that did not compile."""
    compiler = compilers.Compiler(target)
    out.mkdir(parents=True, exist_ok=True)
    rows = Rows(out / "compiled.jsonl", key=("target", "jax", "program", "rows"))
    import jax

    programs = [p for n in lengths for p in (*kernels(compiler, n), *steps(compiler, n)) if p.name.startswith(only)]
    failed = {}
    for program in programs:
        if not rows.done(target, jax.__version__, program.name, program.rows):
            row = {"target": target, "jax": jax.__version__} | report(compiler, program)
            if row["state"] == "compiled":
                rows.add(row)
            else:  # not kept: the next run tries again
                failed[tuple(row[k] for k in rows.key)] = row
            print(tables.render([row], ("program", "rows", "state", "seconds")).splitlines()[-1], flush=True)
    wanted = {(target, jax.__version__, p.name, p.rows) for p in programs}
    found = failed | {key: row for row in rows if (key := tuple(row[k] for k in rows.key)) in wanted}
    rows.close()
    print(f"\n{target}, jax {jax.__version__}, batch 1, bfloat16\n")
    print(tables.render([with_ratio(p, found, target, jax.__version__) for p in programs], COLUMNS))
    return len(failed)


def report(compiler: compilers.Compiler, program: Program) -> dict[str, Any]:
    """Compile one program."""
    row = {"program": program.name, "rows": program.rows}
    try:
        function, arguments, donate = program.build()
        made = compiler.compile(function, *arguments, donate=donate)
    except Exception as error:  # whatever a compiler says is a result here
        return row | {"state": " ".join(f"{type(error).__name__}: {error}".split())[:400]}
    sizes = {"device": made.device_bytes, "temporary": made.temporary_bytes, "accessed": made.bytes_accessed}
    if made.declared_bytes:
        sizes["kernels"] = made.declared_bytes
    return row | {"state": "compiled", "seconds": made.seconds} | {f"{k}_mb": v / 1e6 for k, v in sizes.items()}


def with_ratio(program: Program, found: dict, target: str, version: str) -> dict[str, Any]:
    """The program's row, beside the dense program of the same length."""
    row = found[target, version, program.name, program.rows]
    dense = found.get((target, version, program.dense, program.rows), {})
    ratio = dense["kernels_mb"] / row["kernels_mb"] if row.get("kernels_mb") and dense.get("kernels_mb") else None
    return row | {"ratio": ratio, "state": row["state"][:60]}


def kernels(compiler: compilers.Compiler, rows: int) -> Iterator[Program]:
    """Every kernel at the sizes of a step over `rows` archived rows."""
    import jax.numpy as jnp

    import kernels_pallas

    word = functools.partial(_shape, dtype=jnp.uint16)
    spec, cache = _spec(compiler, rows), _cache(compiler, rows)
    width = cache.archive.words.shape[2]
    query, count = _shape(1, HEADS, LATENT + BRANCH, dtype=jnp.bfloat16), _shape(1, dtype=jnp.int32)
    keywords = {"latent_dim": LATENT, "scale": spec.scale}

    def attend(slots):
        return functools.partial(kernels_pallas.attend, **keywords), (query, word(1, slots, width), count), ()

    def attend_list(fetched):
        position = _shape(1, fetched, dtype=jnp.int32)
        arguments = (query, word(1, rows, width), position, count)
        return functools.partial(kernels_pallas.attend_list, **keywords), arguments, ()

    def scan(branch, rank):
        probe = [_shape(1, HEADS, n) for n in (branch, rank, 1)]
        entry = _shape(1, rows, rank, dtype=jnp.bfloat16), _shape(1, 1, rows), _shape(1, rows, dtype=bool)
        arguments = (*probe, _shape(1, HEADS), word(1, rows, width), *entry, count)
        return functools.partial(kernels_pallas.scan, latent_dim=LATENT), arguments, ()

    def compact(fetched):
        margins = kernels_pallas.Margins(_shape(1, rows), _shape(1, -(-rows // 128), dtype=jnp.int32))
        return functools.partial(kernels_pallas.compact, width=fetched), (margins,), ()

    yield Program("kernel attend, all rows", rows, lambda: attend(rows))
    yield Program("kernel attend, tier 1", rows, lambda: attend(spec.tier1_rows))
    yield Program("kernel scan, branch in place", rows, lambda: scan(BRANCH, RANK))
    yield Program("kernel scan, branch copied beside the sketch", rows, lambda: scan(0, BRANCH + RANK))
    for fetched in spec.fetch_widths[1:]:
        yield Program(f"kernel attend_list, {fetched}", rows, functools.partial(attend_list, fetched))
        yield Program(f"kernel compact, {fetched}", rows, functools.partial(compact, fetched))


def steps(compiler: compilers.Compiler, rows: int) -> Iterator[Program]:
    """The whole decode step of one layer: dense, the policy's common path, and the policy as deployed."""
    import jax.numpy as jnp

    import vestige_jax as vj

    spec = _spec(compiler, rows)
    query, row = (_shape(1, *n, LATENT + BRANCH, dtype=jnp.bfloat16) for n in ((HEADS,), ()))

    def build(function):
        return functools.partial(function, spec), (_cache(compiler, rows), query, row), (0,)

    yield Program("step dense", rows, lambda: build(_dense_step))
    yield Program("step common path", rows, lambda: build(_common_step), dense="step dense")
    yield Program("step as deployed", rows, lambda: build(vj.step))


def _write(cache, row):
    import dataclasses

    from kernels_pallas import words

    stored = words.to_words(row, cache.tail.words.shape[2])
    tail = words.set_row(cache.tail.words, stored, cache.tail.length)
    return dataclasses.replace(cache, tail=dataclasses.replace(cache.tail, words=tail, length=cache.tail.length + 1))


def _dense_step(spec, cache, query, row):
    from vestige_jax import attention

    cache = _write(cache, row)
    return attention.dense(spec, cache, query).out, cache


def _common_step(spec, cache, query, row):
    """`vestige_jax.step` when no block closes and what fired fits: written from the same pieces."""
    import jax.numpy as jnp

    import kernels_pallas
    from vestige_jax import attention, index, recall

    cache = _write(cache, row)
    part = attention.attended(spec, cache, query)
    probe = index.prepare(spec, cache.index.basis, query)
    probe = probe._replace(residual=cache.calibration.z[:, None, None] * probe.residual)
    threshold = jnp.where(recall.gate(cache, part), part.peak, jnp.inf)
    fetched = kernels_pallas.compact(recall.scan(spec, cache, probe, threshold), round(FETCHED * spec.archive_rows))
    found = attention.over_list(spec, query, cache.archive.words, fetched.position, fetched.count)
    return kernels_pallas.merge(part, found).out, cache


@functools.cache
def _spec(compiler, rows):
    import jax.numpy as jnp

    import vestige_jax as vj

    sketch = jnp.bfloat16 if compiler.platform == "tpu" else jnp.float16
    scale = (2 * BRANCH + BRANCH) ** -0.5  # 128 + 64 dimensions of a key head
    return vj.CacheSpec(LATENT, BRANCH, HEADS, scale, rows + 4096, rank=RANK, sketch_dtype=sketch)


@functools.cache
def _cache(compiler, rows):
    import vestige_jax as vj

    return compiler.shapes(lambda: vj.init(_spec(compiler, rows), 1))


def _shape(*shape, dtype="float32"):
    import jax

    return jax.ShapeDtypeStruct(shape, dtype)


def launch(argv: list[str]) -> int:
    """Read the command line, then compile in a process whose environment the compiler needs."""
    values = flags.FlagValues()
    flags.DEFINE_string("target", None, "tpu:v5e:2x2, tpu:v5p:2x2x1, tpu:v6e:2x2 or h200", flag_values=values)
    flags.DEFINE_list("lengths", "32768,131072,524288", "archived rows, multiples of 4096", flag_values=values)
    flags.DEFINE_string("only", "", "programs whose name begins so: kernel or step", flag_values=values)
    flags.DEFINE_string("out", "results/compile_report", "output folder", flag_values=values)
    flags.DEFINE_bool("inside", False, "set by this program for the process it starts", flag_values=values)
    try:
        rest = values(argv)[1:]
        lengths = [int(n) for n in values.lengths]
    except (flags.Error, ValueError) as error:
        raise UserError(str(error)) from None
    if rest or values.target is None or any(n <= 0 or n % 4096 for n in lengths):
        raise UserError("say --target=tpu:v5e:2x2 (or h200), and lengths that are multiples of 4096")
    name = compilers.platform(values.target)
    if not values.inside:
        command = [sys.executable, "-m", "experiments.compile_report", *argv[1:], "--inside"]
        return subprocess.run(command, env=compilers.environment(name)).returncode
    return min(main(values.target, lengths, values.only, pathlib.Path(values.out)), 99)


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        sys.exit((__doc__ or "").strip())
    try:
        sys.exit(launch(sys.argv))
    except UserError as error:
        sys.exit(f"error: {error}")
