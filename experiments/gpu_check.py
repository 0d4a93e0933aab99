"""Everything that only a Hopper GPU can tell, in less than eight minutes.

    make gpu-check                                the python on the path, jax[cuda13] and the drivers' packages in it
    python -m experiments.gpu_check [--out=DIR]

On the GPU itself: the contract of the kernels (tests/kernels), the compile report by its own compiler, and the
benchmark with the Mosaic kernels and with plain XLA. One part's failure does not hide the others. What was measured
goes to experiments/figures/bench_<device>*, logs to results/gpu_check. Targets there: scan and attend at 70% of the
measured copy bandwidth or more, the step at least 3 times ahead of dense at 128k.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from experiments.harness.rows import UserError

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODULES = ("jax", "flax", "pytest", "hypothesis", "ml_collections", "absl", "matplotlib", "tqdm")
PROBE = "import jax; d = jax.devices()[0]; print(d.platform, d.device_kind, sep='|')"
BENCH = ("-m", "experiments.bench", "--config=configs/bench.py", "--config.dtypes=bfloat16", "--config.batches=1,16",
         "--config.lengths=32768,131072,524288", "--config.seconds=1", "--config.model_lengths=4096")  # fmt: skip


class Part(NamedTuple):
    """One command of the check."""

    name: str
    command: tuple[str, ...]
    seconds: int  # it is stopped after that


def parts(out: pathlib.Path) -> list[Part]:
    figures, report = ROOT / "experiments" / "figures", out / "compile_report"

    def bench(name, implementation, minutes, *more):
        chosen = f"--config.implementation={implementation}"
        limit = f"--config.minutes={minutes}"
        return Part(name, (*BENCH, chosen, limit, f"--out={out / name}", *more), int(60 * (minutes + 0.8)))

    return [
        Part("contract", ("-m", "pytest", "-q", "tests/kernels", "-k", "mosaic_gpu"), 100),
        bench("bench_mosaic_gpu", "mosaic_gpu", 1.7, f"--config.publish={figures}"),
        Part(
            "report", ("-m", "experiments.compile_report", "--target=h200", "--lengths=131072", f"--out={report}"), 70
        ),
        bench("bench_xla", "xla", 0.7),
    ]


def main(out: pathlib.Path, probe: Sequence[str] = (sys.executable, "-c", PROBE)) -> int:
    """The exit status: 0 if every part passed, 1 if one did not, 2 if this machine cannot run the check.

    Raises UserError where nothing can be written.
    """
    problem = missing(probe)
    if problem:
        print(f"gpu-check cannot run here: {problem}")
        return 2
    from experiments.harness.runner import make_writable  # it imports what may have been missing

    make_writable(out)
    results = [run(part, out) for part in parts(out.resolve())]
    print("\n" + "\n".join(results))
    return int(any(not line.startswith("passed") for line in results))


def missing(probe: Sequence[str]) -> str | None:
    """What this machine lacks, in one sentence; None if it has everything."""
    absent = [name for name in MODULES if importlib.util.find_spec(name) is None]
    if absent:
        return f"the packages {', '.join(absent)} are missing: pip install '.[cuda13,dev]'"
    try:
        found = subprocess.run(probe, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return "jax did not say within two minutes which devices it sees"
    if found.returncode:
        return f"jax finds no device: {(found.stderr.strip().splitlines() or ['no reason given'])[-1]}"
    platform, kind = found.stdout.strip().splitlines()[-1].split("|")
    if platform != "gpu":
        return f"it needs an NVIDIA Hopper GPU and jax[cuda13], and jax sees {platform} ({kind}) only"
    return (
        None if any(name in kind for name in ("H100", "H200", "H20", "H800", "GH200")) else f"{kind} is no Hopper GPU"
    )


def run(part: Part, out: pathlib.Path) -> str:
    """Runs a part, its output on the screen and in a log; the line that says how it went."""
    print(f"\n== {part.name}: python {' '.join(part.command)}", flush=True)
    start, log = time.monotonic(), out / f"{part.name}.log"
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with open(log, "w") as file:
        try:
            done = subprocess.run([sys.executable, *part.command], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
                                  timeout=part.seconds, env=environment)  # fmt: skip
            how = "passed" if done.returncode == 0 else f"FAILED with status {done.returncode}"
        except subprocess.TimeoutExpired:
            how = f"FAILED: stopped after {part.seconds} s"
    print("\n".join(log.read_text(errors="replace").splitlines()[-60:]))
    return f"{how}  {part.name}, {time.monotonic() - start:.0f} s, {log}"


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        sys.exit((__doc__ or "").strip())
    chosen = [a.removeprefix("--out=") for a in sys.argv[1:] if a.startswith("--out=")]
    if len(chosen) != len(sys.argv[1:]):
        sys.exit("error: only --out=DIR is understood")
    try:
        sys.exit(main(pathlib.Path(chosen[-1] if chosen else "results/gpu_check")))
    except UserError as error:
        sys.exit(f"error: {error}")
