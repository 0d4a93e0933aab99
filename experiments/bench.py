"""Time of a decode step with the policy and dense, of its stages, of closing blocks, and of a whole model per token.

Writes trials.jsonl (a row per program), summary.csv, programs.csv, claims.csv, meta.json and bench.png.
"""

import collections
import dataclasses
import functools
import itertools
import pathlib
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import ml_collections
import numpy as np

import kernels_pallas
from configs import bench as bench_config
from experiments.benchmark import bench_account, bench_model, bench_programs, bench_report, bench_scene, bench_stages
from experiments.benchmark.bench_clock import Program, alternate, device_name, machine, memory, spread
from experiments.benchmark.bench_scene import Scene
from experiments.harness import checkpoints
from experiments.harness.runner import Run, launch, make_writable, reading_input
from experiments.trials import checks
from vestige_jax import init, models, step
from vestige_jax.spec import CacheSpec

KEY = ("group", "program", "dtype", "batch", "length")
NAMES = {"machine": ("copy", "matmul"), "stage": bench_stages.STAGES, "block": bench_stages.BLOCKS,
         "prefill": bench_stages.PREFILL, "model": bench_model.NAMES}  # fmt: skip


def main(config: ml_collections.ConfigDict, out: pathlib.Path) -> None:
    bench, start = Bench(config), time.monotonic()
    if config.publish:
        make_writable(pathlib.Path(config.publish), "--config.publish")
    print(bench.opening())
    with Run(out, bench.identity, key=KEY, seeds=[config.seed]) as run:
        for key in run.todo(bench.plan(), label="bench"):
            if config.minutes and len(run.rows) and time.monotonic() - start > 60 * config.minutes:
                print(f"\nstopped after {config.minutes:g} minutes: the same command goes on where this run ended")
                break
            for row in bench.measure(key):
                run.add(row)
        bench_report.write(run, bench.identity)
        if config.publish:
            bench_report.publish(run, pathlib.Path(config.publish), bench.identity.device)


class Bench:
    """The programs of a config, group by group. Raises UserError for a config that cannot be run."""

    def __init__(self, config: ml_collections.ConfigDict):
        with reading_input():
            self.config = resolved(config)
            _check(self.config)
            self.places, self.left_out = self._places()
            self.specs = {place: self._spec(*place[::2]) for place in self.places}
            _check_kernels(dict.fromkeys((*self.specs.values(), *self._balanced())))
            _check_model(self.config)
            self.identity = self.config.copy_and_resolve_references()
            with self.identity.unlocked():
                del self.identity.minutes, self.identity.publish  # they decide no row
                self.identity.device = device_name()
                folder = config.checkpoint and checkpoints.checkpoint_folder(config.checkpoint)
                self.identity.weights = checkpoints.fingerprint(folder) if folder else ""
        self.kinds = {f"balanced {bits}": bits for bits in config.balanced_bits}
        self._scene: tuple[tuple, dict[str, Scene]] | None = None

    def opening(self) -> str:
        left = [f"{dtype} batch {batch} at {length}" for dtype, batch, length in self.left_out]
        return "\n".join([device_name(), *([f"left out, too large for the memory: {', '.join(left)}"] if left else [])])

    def plan(self) -> Iterator[tuple]:
        """The key of every row."""
        yield from (("machine", name, "-", 0, 0) for name in NAMES["machine"])
        for dtype, batch, length in self.places:
            closely = batch in self.config.stage_batches
            names = NAMES | {"step": bench_programs.names(dtype)}
            if closely:
                names["step"] += tuple(self.kinds)
                names["stage"] += tuple(f"scan {kind}" for kind in self.kinds)
            for group in ("step", "stage", "block", "prefill") if closely else ("step",):
                yield from ((group, name, dtype, batch, length) for name in names[group])
        if self.config.checkpoint:
            yield from (
                ("model", *key)
                for key in itertools.product(NAMES["model"], ["float32"], [1], self.config.model_lengths)
            )

    def measure(self, key: tuple) -> Iterator[dict[str, Any]]:
        """The rows of all programs that are timed together with this one."""
        group, _, *place = key
        seen: dict[str, list] = collections.defaultdict(list)
        programs = self._programs(group, tuple(place), seen)
        times = alternate(programs, rounds=self.config.rounds, seconds=self.config.seconds)
        for program in programs:
            samples = times[program.name]
            row = dict(zip(KEY, (group, program.name, *place), strict=True)) | spread(samples)
            row |= {"samples": len(samples), "bytes": program.bytes, "flops": program.flops}
            for name, other in yardsticks(times).items():
                row |= ratio(samples / times[other], f"over_{name}")
            if program.name in seen:
                row |= traffic(seen[program.name])
            if group == "step" and program.name in seen:
                row |= bench_account.policy(self._scene[1][program.name], row["fetched"])
            yield row

    def _programs(self, group: str, place: tuple, seen: dict[str, list]) -> list[Program]:
        if group == "machine":
            return machine(self.config.copy_mebibytes, self.config.matmul_side)
        if group == "model":
            return bench_model.programs(self.config, place[2], seen["policy"])
        scenes, inner = self._build(place), self.config.inner
        scene, others = scenes["policy"], {kind: scenes[kind] for kind in self.kinds if kind in scenes}
        if group == "step":
            steps = bench_programs.steps(scene, inner, seen["policy"])
            return steps + [bench_programs.policy(kind, o, inner, seen[kind]) for kind, o in others.items()]
        if group == "stage":
            stages = bench_stages.stages(scene, inner)
            return stages + [bench_stages.scan(f"scan {kind}", other, inner) for kind, other in others.items()]
        return {"block": bench_stages.blocks, "prefill": bench_stages.prefill}[group](scene)

    def _build(self, place: tuple) -> dict[str, Scene]:
        """The scenes of a place by the name of their step: "policy", of the paper's index, and others."""
        if self._scene is None or self._scene[0] != place:
            self._scene = None
            config, (_, batch, length) = self.config, place
            scene = bench_scene.build(self.specs[place], batch, length, config.tail, config.fired, config.seed)
            kinds = self.kinds if batch in config.stage_batches else {}
            self._scene = (
                place,
                {"policy": scene}
                | {
                    kind: bench_scene.reindexed(
                        scene, config.fired, index="balanced", rank=config.balanced_rank, index_bits=bits
                    )
                    for kind, bits in kinds.items()
                },
            )
        return self._scene[1]

    def _places(self) -> tuple[list[tuple], list[tuple]]:
        """(dtype, batch, closed rows) that fit in the memory, and those that don't."""
        room = self.config.memory * memory()
        all_ = list(itertools.product(self.config.dtypes, self.config.batches, self.config.lengths))
        fits = [place for place in all_ if self._bytes(*place) <= room]
        if not fits:
            raise ValueError(
                f"memory={self.config.memory}: not even {all_[0]} fits into that share of {memory() >> 20} MiB"
            )
        return fits, [place for place in all_ if place not in fits]

    def _bytes(self, dtype: str, batch: int, length: int) -> int:
        """A cache, and the same rows as a plain array."""
        spec = self._spec(dtype, length)
        return spec.nbytes(batch)["total"] + batch * length * spec.row_dim * spec.dtype.itemsize

    def _balanced(self) -> Iterator[CacheSpec]:
        """The specs of the indexes that are timed beside the paper's, one of each."""
        for bits in self.config.balanced_bits:
            with checks.naming(self.config, rank="balanced_rank", index_bits="balanced_bits"):
                kind = dict(index="balanced", rank=self.config.balanced_rank, index_bits=bits)
                yield dataclasses.replace(self.specs[self.places[0]], **kind)

    def _spec(self, dtype: str, length: int) -> CacheSpec:
        config = self.config
        return CacheSpec(
            config.latent_dim, config.branch_dim, config.heads, (3 * config.branch_dim) ** -0.5, length + config.block,
            block=config.block, rank=config.rank, fetch=config.fetch, dtype=checkpoints.dtype("dtypes", dtype),
            implementation=config.implementation or None,
        )  # fmt: skip


def _check_kernels(specs: Iterable[CacheSpec]) -> None:
    """Kernels that are asked for by name say what they cannot run while a step is traced."""
    for spec in specs:
        if spec.implementation not in (None, "xla"):
            kernels_pallas.resolve(spec.implementation)
            cache = jax.eval_shape(functools.partial(init, spec, 1))
            query, row = (jax.ShapeDtypeStruct((1, *n, spec.row_dim), spec.dtype) for n in ((spec.num_heads,), ()))
            jax.eval_shape(functools.partial(step, spec), cache, query, row)


def _check_model(config: ml_collections.ConfigDict) -> None:
    """The whole model's checkpoint is there, and its specs can be made."""
    if config.checkpoint:
        checks.checkpoint(config.checkpoint)
        sizes = models.ModelConfig.from_json(checkpoints.checkpoint_folder(config.checkpoint))
        for length in config.model_lengths:
            try:
                bench_model.specs(sizes, length)
            except ValueError as error:
                where = f"checkpoint={config.checkpoint!r} at model_lengths={length}"
                raise ValueError(f"{where} cannot be timed: {error}") from error


def traffic(seen: list) -> dict[str, Any]:
    """Archived rows that fired and were fetched in the policy's steps: mean, least, most of the steps and sequences."""

    def all_of(name):
        return np.concatenate([np.asarray(getattr(stats, name)).ravel() for stats in seen])

    fired = all_of("fired")
    row = {"fired": float(fired.mean()), "fired_least": int(fired.min()), "fired_most": int(fired.max())}
    return row | {name: float(all_of(name).mean()) for name in ("fetched", "overflowed")} | {"steps": len(fired)}


def yardsticks(times: dict[str, np.ndarray]) -> dict[str, str]:
    """What the programs of a group are divided by, round by round: each policy, and the faster einsum."""
    einsums = [name for name in bench_programs.EINSUM if name in times]
    found = {name.replace(" ", "_"): name for name in times if name == "policy" or name.startswith("balanced")}
    return found | ({"einsum": min(einsums, key=lambda name: np.median(times[name]))} if einsums else {})


def ratio(values: np.ndarray, name: str) -> dict[str, float]:
    """Median and quartiles, and a 95% interval of the median from order statistics: no assumption on how times fall."""
    ordered, n = np.sort(values), len(values)
    low = max(0, int(np.floor((n - 1.96 * np.sqrt(n)) / 2)))
    return spread(values, name, 1.0) | {f"{name}_from": float(ordered[low]), f"{name}_to": float(ordered[n - 1 - low])}


def resolved(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """The config with what it leaves to the device filled in."""
    config, cpu = config.copy_and_resolve_references(), jax.default_backend() == "cpu"
    config.lengths = config.lengths or ((4096, 8192, 32768, 131072) if cpu else (8192, 32768, 131072, 524288))
    config.batches = config.batches or ((1, 4) if cpu else (1, 4, 16))
    config.inner = config.inner or (1 if cpu else 32)
    config.ahead_at = config.ahead_at or (32768 if cpu else 131072)
    config.balanced_rank = config.balanced_rank or config.rank + config.branch_dim
    return config


def _check(config: ml_collections.ConfigDict) -> None:
    checks.distinct(config, "lengths", "batches", "dtypes", "balanced_bits", "model_lengths")
    if config.block < 1:
        raise ValueError(f"block={config.block} must be at least 1")
    wrong = [n for n in config.lengths if n < 1 or n % config.block]
    if wrong:
        raise ValueError(f"lengths={config.lengths} must be multiples of block={config.block}, {wrong} are not")
    if not 0 <= config.tail < config.block - 1:
        raise ValueError(f"tail={config.tail} must lie in [0, block - 1), or every step closes a block")
    for name in ("fired", "memory"):
        if not 0 < config[name] < 1:
            raise ValueError(f"{name}={config[name]} must lie between 0 and 1")
    least = dict(seed=0, rounds=1, seconds=0, inner=1, copy_mebibytes=1, matmul_side=1, minutes=0, ahead_at=1)
    for name, bound in least.items():
        if not config[name] >= bound:
            raise ValueError(f"{name}={config[name]} must be at least {bound}")
    for name, bound in dict(batches=1, stage_batches=1, model_lengths=2).items():
        if not all(value >= bound for value in config[name]):
            raise ValueError(f"{name}={config[name]} must be numbers of at least {bound}")


if __name__ == "__main__":
    launch(main, like=bench_config)
