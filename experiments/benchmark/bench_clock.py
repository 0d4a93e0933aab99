"""A stopwatch for programs that are compared: they take turns in one process, after each has run once to warm up."""

import functools
import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ENOUGH = 2e-3  # seconds that one sample should take at least; shorter programs are called several times a sample
MOST_CALLS = 50


class Program(NamedTuple):
    """Something to time. `call` starts it once and returns what to wait for; it makes `inner` steps."""

    name: str
    call: Callable[[], Any]
    bytes: int = 0  # counted, not measured: what a step has to read and write
    flops: int = 0  # multiplications and additions of the matrix products
    inner: int = 1


def alternate(programs: Sequence[Program], *, rounds: int, seconds: float) -> dict[str, np.ndarray]:
    """Seconds per step of every program, one sample a round, in an order of the round's own.

    Before each sample its program runs once untimed, as steps of a generation follow each other: what another one left
    of caches and memory counts for none. (Behind two einsums over all rows a step takes some 40% longer.)
    At least 3 rounds and at most `rounds`; no new one once `seconds` have passed.
    """
    calls = {program.name: _calls(program) for program in programs}
    samples = {program.name: [] for program in programs}
    start = time.perf_counter()
    for i in range(rounds):
        if i >= 3 and time.perf_counter() - start > seconds:
            break
        for turn in np.random.default_rng(i).permutation(len(programs)):
            program = programs[turn]
            n = calls[program.name]
            jax.block_until_ready(program.call())
            samples[program.name].append(_timed(program, n) / (n * program.inner))
    return {name: np.asarray(values) for name, values in samples.items()}


def _calls(program: Program) -> int:
    """How often to call the program for one sample. Compiles it and warms it up."""
    _timed(program, 1)
    return min(MOST_CALLS, max(1, math.ceil(ENOUGH / _timed(program, 1))))


def _timed(program: Program, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        result = program.call()
    jax.block_until_ready(result)
    return time.perf_counter() - start


def spread(values: np.ndarray, name: str = "ms", scale: float = 1e3) -> dict[str, float]:
    """Median and quartiles, in columns called after `name`."""
    low, middle, high = np.percentile(values, (25, 50, 75)) * scale
    return {name: float(middle), f"{name}_lo": float(low), f"{name}_hi": float(high)}


def machine(mebibytes: int, side: int) -> list[Program]:
    """What the device can do: copy a large array (read and written), multiply two float32 matrices."""
    large = jnp.zeros(mebibytes << 18, jnp.uint32)
    matrix = jnp.ones((side, side), jnp.float32)
    return [
        Program("copy", functools.partial(_flip, large), bytes=2 * large.nbytes),
        Program("matmul", functools.partial(_multiply, matrix, matrix), flops=2 * side**3),
    ]


_flip = jax.jit(lambda x: x ^ 1)
_multiply = jax.jit(lambda a, b: jnp.matmul(a, b, precision="highest"))


def device_name() -> str:
    """The device as a person would name it: an accelerator's kind, or the processor and how many it has of it."""
    device = jax.devices()[0]
    return device.device_kind if device.platform != "cpu" else f"{_processor()}, {_cores()} cores"


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    import platform

    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.M) if info.exists() else None
    name = found[1] if found else platform.processor() or platform.machine()
    return re.sub(r"\((R|TM)\)|\bCPU\b", "", name).replace("  ", " ").strip()


def memory() -> int:
    """Bytes that the device has for arrays, as far as it says; on a CPU, what the machine has free now."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    info = Path("/proc/meminfo")
    found = re.search(r"^MemAvailable:\s*(\d+) kB", info.read_text(), re.M) if info.exists() else None
    return int(found[1]) << 10 if found else 8 << 30
