"""Compiles every kernel and the decode step of one MLA layer with a device's own compiler, on a machine without it.

    make aot-tpu      fetches the compiler and reports on tpu:v5e:2x2, tpu:v5p:2x2x1 and tpu:v6e:2x2
    make aot-h200

    python -m experiments.compile_report --target=tpu:v5e:2x2 [--lengths=32768,131072] [--only=size,step] [--out=DIR]

Sizes are those of Kimi Linear: latent 512, branch 64, 32 heads, bfloat16 rows, batch 1, rank 64. 'size ...' is each
kernel once at every other size that has to work, latent/branch/heads. Nothing is executed.

What the columns say, and how far to trust them:
  device_mb, temporary_mb   bytes on the device, as the compiler allocates them.
  accessed_mb               bytes accessed, as the compiler counts them. It takes a TPU kernel's word for what the
                            kernel reads, counts copies into on-chip memory and the whole of a buffer in which one row
                            is written, the body of a loop once (so little of a step in plain XLA), and of a
                            conditional the dearest branch. The H200's says nothing: empty.
  declared_mb               what the TPU kernels of a program declare, conditionals left out.
  account_mb                our own count of what has to cross the memory bus, each array once: the byte account.
  accessed_ratio, account_ratio   that of the dense step over the policy's; of plain XLA by account only.

'step dense', 'step common path' and 'step as deployed' run on the kernels, 'xla step ...' is what implementation=None
picks. 'As deployed' holds rare branches (serve dense on overflow, close a block): its counts are those of the dearest
one. The common path is the same step without them, 0.5% of the rows fetched. A step with temporaries as large as all
archived rows copies its cache, and counts as failed. Steps are those of the paper's index, or of the balanced index
named, of 128 numbers in 8 or 4 bits, on the kernels only.

What keeps the account below the published 3.9 is printed above the table: the tail, which is read whole, margins and
membership, and fetches (on a TPU of eight rows that lie together).

Rows go to compiled.jsonl, the table of a target to TARGET.csv; a run that was stopped goes on there.
"""

import csv
import importlib.metadata
import pathlib
import subprocess
import sys
from typing import Any

from absl import flags

from experiments import compilers
from experiments.harness import tables
from experiments.harness.rows import Rows, UserError, atomic
from experiments.harness.runner import make_writable

SIZES = ("device_mb", "temporary_mb", "accessed_mb", "declared_mb", "account_mb")
RATIOS = {"accessed_ratio": "accessed_mb", "account_ratio": "account_mb"}
COLUMNS = ("program", "rows", "state", "seconds", *SIZES, *RATIOS)


FACTS = ("target", "jax", "compiler")


def main(target: str, lengths: list[int], only: list[str], out: pathlib.Path) -> int:
    """Report on one target; the number of programs that did not compile, or copy the cache they are given."""
    from experiments.compilation import compile_programs, compile_sizes

    compiler = compilers.Compiler(target)
    programs = [*compile_sizes.sizes(compiler), *(p for n in lengths for p in compile_programs.every(compiler, n))]
    programs = [program for program in programs if program.name.startswith(tuple(only))]
    if not programs:
        raise UserError(f"--only={','.join(only)} names no program; names begin with size, kernel, step or xla step")
    facts = {"target": target, "jax": importlib.metadata.version("jax"), "compiler": compilers.version(target)}
    found = compile_all(compiler, programs, facts, out)
    table = [with_ratios(program, found) for program in programs]
    print(
        f"\n{target}, jax {facts['jax']}, {facts['compiler']}, batch 1, bfloat16\n\nBytes per archived row, by account:"
    )
    for n in lengths:
        for kind in (compile_programs.PAPER, *compile_programs.BALANCED):
            print(" ", compile_programs.account_line(compiler, n, kind))
    print("\n" + tables.render([row | {"state": row["state"][:60]} for row in table], COLUMNS))
    write_table(out / f"{target.replace(':', '_')}.csv", table)
    return sum(row["state"] != "compiled" for row in table)


def compile_all(compiler, programs, facts, out: pathlib.Path) -> dict[tuple, dict[str, Any]]:
    """Compile what compiled.jsonl does not hold; the row of every program, by name and rows."""
    known = Rows(out / "compiled.jsonl", key=(*FACTS, "program", "rows"))
    failed = []
    for program in programs:
        if known.done(*facts.values(), program.name, program.rows):
            continue
        row = facts | report(compiler, program)
        print(f"{program.name}, {program.rows} rows: {row['state']}", flush=True)
        if row["state"] == "compiled":
            known.add(row)
        else:  # not kept: the next run tries again
            failed.append(row)
    known.close()
    mine = [row for row in (*known, *failed) if all(row[key] == value for key, value in facts.items())]
    return {(row["program"], row["rows"]): row for row in mine}


def report(compiler: compilers.Compiler, program) -> dict[str, Any]:
    """Compile one program."""
    row = {"program": program.name, "rows": program.rows}
    try:
        function, arguments, donate = program.build()
        made = compiler.compile(function, *arguments, donate=donate)
    except Exception as error:  # whatever a compiler says is a result here
        return row | {"state": " ".join(f"{type(error).__name__}: {error}".split())[:400]}
    state = "compiled"
    if program.cache and made.temporary_bytes > program.cache:
        state = (
            f"copies the cache: {made.temporary_bytes / 1e6:.0f} MB of temporaries beside {program.cache / 1e6:.0f} MB"
        )
    counts = (made.device_bytes, made.temporary_bytes, made.bytes_accessed, made.declared_bytes, program.moved)
    sizes = {name: None if count is None else count / 1e6 for name, count in zip(SIZES, counts, strict=True)}
    return row | {"state": state, "seconds": made.seconds} | sizes


def with_ratios(program, found: dict[tuple, dict[str, Any]]) -> dict[str, Any]:
    """The program's row, beside the dense program of the same length."""
    row = dict.fromkeys((*FACTS, *COLUMNS)) | found[program.name, program.rows]
    dense = found.get((program.dense, program.rows), {})
    for ratio, size in RATIOS.items():
        counted = size == "account_mb" or not program.name.startswith("xla")  # loops: their bodies are counted once
        if counted and row[size] and dense.get(size) is not None:
            row[ratio] = dense[size] / row[size]
    return row


def write_table(path: pathlib.Path, table: list[dict[str, Any]]) -> None:
    """The table with all its facts, as a file of its own."""
    with atomic(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*FACTS, *COLUMNS))
        for row in table:
            values = (row[column] for column in (*FACTS, *COLUMNS))
            writer.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in values])


def read_lengths(values: list[str]) -> list[int]:
    """The numbers of --lengths. Raises UserError for what is none, or no multiple of 4096."""
    lengths = [int(value) if value.strip().isdecimal() else 0 for value in values]
    if not lengths or any(n < 4096 or n % 4096 for n in lengths):
        raise UserError(f"--lengths={','.join(values)} must be multiples of 4096, like 32768,131072")
    return lengths


def launch(argv: list[str]) -> int:
    """Read the command line, then compile in a process whose environment the compiler needs."""
    values = flags.FlagValues()
    flags.DEFINE_string("target", None, "tpu:v5e:2x2, tpu:v5p:2x2x1, tpu:v6e:2x2 or h200", flag_values=values)
    flags.DEFINE_list("lengths", "32768,131072,524288", "archived rows, multiples of 4096", flag_values=values)
    flags.DEFINE_list("only", "size,kernel,step,xla step", "programs whose names begin so", flag_values=values)
    flags.DEFINE_string("out", "results/compile_report", "output folder", flag_values=values)
    flags.DEFINE_bool("inside", False, "set by this program for the process it starts", flag_values=values)
    try:
        rest = values(argv)[1:]
    except flags.Error as error:
        raise UserError(str(error)) from None
    if rest or values.target is None:
        raise UserError("say --target=tpu:v5e:2x2 (or h200), and nothing but flags")
    lengths, out = read_lengths(values.lengths), pathlib.Path(values.out)
    name = compilers.platform(values.target)
    make_writable(out)
    if not values.inside:
        command = [sys.executable, "-m", "experiments.compile_report", *argv[1:], "--inside"]
        return subprocess.run(command, env=compilers.environment(name)).returncode
    return min(main(values.target, lengths, values.only, out), 99)


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        sys.exit((__doc__ or "").strip())
    try:
        sys.exit(launch(sys.argv))
    except UserError as error:
        sys.exit(f"error: {error}")
