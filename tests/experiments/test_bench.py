"""The benchmark's bookkeeping: whose turn it is, what is counted, what the tables say. Nothing here is timed."""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from configs import bench as bench_config
from experiments import bench, gpu_check
from experiments.benchmark import bench_account, bench_clock, bench_programs, bench_report, bench_scene
from experiments.benchmark.bench_clock import Program
from experiments.harness.rows import UserError
from tests.kernels.backends import tracing_for
from vestige_jax import init
from vestige_jax.spec import CacheSpec

TINY = {
    **dict(latent_dim=32, branch_dim=16, heads=4, rank=8, fetch=64, block=64, tail=32, fired=0.05),
    **dict(dtypes=("bfloat16",), batches=(1,), lengths=(256,), ahead_at=256, model_lengths=(128,)),
    **dict(rounds=3, seconds=0.1, copy_mebibytes=1, matmul_side=64),
}


def config(**changes):
    made = bench_config.get_config()
    made.update(TINY | changes)
    return made


def scene(batch=2, closed=256, **index):
    spec = CacheSpec(32, 16, 4, 48**-0.5, closed + 64, block=64, fetch=64, dtype=jnp.bfloat16, **{"rank": 8} | index)
    nothing = jnp.zeros((8, batch, 4, 48), jnp.bfloat16)
    return bench_scene.Scene(spec, None, None, nothing, None, closed, 32)


# the clock


def test_programs_take_turns_in_another_order_each_round(monkeypatch):
    monkeypatch.setattr(bench_clock, "ENOUGH", 0.0)
    called = []
    programs = [Program(name, lambda name=name: called.append(name)) for name in "abc"]
    times = bench_clock.alternate(programs, rounds=4, seconds=60)
    assert "".join(called[:6]) == "aabbcc"  # warm-up twice: one call compiles, one is timed
    assert called[6::2] == called[7::2]  # each sample behind an untimed call of the same program
    orders = ["".join(called[i : i + 6 : 2]) for i in range(6, 30, 6)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders) and len(set(orders)) > 1
    assert {name: len(values) for name, values in times.items()} == {"a": 4, "b": 4, "c": 4}


def test_time_ends_the_rounds_but_not_before_three():
    times = bench_clock.alternate([Program("a", lambda: None)], rounds=9, seconds=0)
    assert len(times["a"]) == 3


def test_short_programs_are_called_often_and_times_are_per_step(monkeypatch):
    clock = iter(np.arange(0, 1000, 1e-3))
    monkeypatch.setattr(bench_clock, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    called = []
    times = bench_clock.alternate([Program("a", lambda: called.append(0), inner=4)], rounds=3, seconds=60)
    assert len(called) == 2 + 3 * (1 + 2)  # a call takes 1 ms and a sample at least 2; the first is not timed
    assert_allclose(times["a"], 1e-3 / (2 * 4))


def test_ratio_is_of_rounds_with_an_interval_of_the_median():
    row = bench.ratio(np.arange(1.0, 26), "x")
    assert row == {"x": 13, "x_lo": 7, "x_hi": 19, "x_from": 8, "x_to": 18}
    assert bench.ratio(np.array([3.0, 1.0, 2.0]), "x")["x_to"] == 3


# what is counted


def test_bytes_by_hand():
    # 256 closed rows of 96 bytes, 8 + 4 kept, 33 in the tail; index 32 + 16 + 4 bytes, membership 1, margin 4 + 1/32
    some = scene()
    assert bench_account.dense(some) == {"bytes": 2 * 289 * 96, "flops": 2 * 289 * 2 * 4 * (48 + 32)}
    assert bench_account.scan(some) == {"bytes": 2 * 256 * 57 + 2 * 8, "flops": 2 * 256 * 2 * 4 * 25}
    assert bench_account.compact(some, 10) == {"bytes": 2 * (8 + 10 * 516)}
    rows = 2 * (12 + 33 + 10)
    assert bench_account.policy(some, 10.2)["bytes"] == rows * 96 + 2 * 256 * 57 + 16 + 2 * (8 + 5160)


@pytest.mark.parametrize("bits, code", [(8, 24), (4, 12)])
def test_bytes_of_a_balanced_index_by_hand(bits, code):
    some = scene(index="balanced", rank=24, index_bits=bits)
    assert bench_account.scan(some) == {"bytes": 2 * 256 * (code + 4 + 1 + 4) + 16, "flops": 2 * 256 * 2 * 4 * 25}


def test_the_wanted_share_fires_and_every_form_of_attention_gives_one_result(quick_compilation):
    spec = CacheSpec(32, 16, 4, 48**-0.5, 576, block=64, rank=8, fetch=512, dtype=jnp.float32)
    made = bench_scene.build(spec, 2, 512, 32, 0.05, seed=3)
    np.testing.assert_array_equal(made.words[:, :512], made.cache.archive.words[:, :512])
    made.words = made.words.at[:, -1].set(jax.lax.bitcast_convert_type(made.new[0], jnp.uint32))  # of the first step
    policy, *others = bench_programs.steps(made, 1, seen := [])
    outs = {program.name: program.call() for program in others}
    assert set(outs) == set(bench_programs.names("float32")) - {"policy"}
    for name, out in outs.items():
        assert_allclose(out, outs["einsum native"], atol=2e-4, err_msg=name)
    for _ in range(bench_scene.RING):
        policy.call()
    fired = np.array([stats.fired[0] for stats in seen])
    assert fired.shape == (8, 2) and 0.5 < fired.mean() / (0.05 * (512 - 20)) < 2 and len(set(fired.ravel())) > 3
    assert made.cache.tail.length.tolist() == [33, 33]  # every step at the same length
    index = made.cache.index
    other = bench_scene.reindexed(made, 0.05, index="balanced", rank=24, index_bits=8)
    asked = bench_programs.policy("balanced 8", other, 1, again := [])
    for _ in range(bench_scene.RING):
        asked.call()
    fired = np.array([stats.fired[0] for stats in again])
    assert 0.5 < fired.mean() / (0.05 * (512 - 20)) < 2
    assert made.cache.index is index and not index.code.is_deleted()  # of the cache given away, all but its index
    assert other.cache.index.code.dtype == jnp.int8 and other.cache.archive.words is made.cache.archive.words
    assert np.isfinite(policy.call()).all()  # the scene goes on


# the driver


@pytest.mark.slow
def test_a_run_writes_every_program_and_goes_on(tmp_path, monkeypatch, capsys):
    bench.main(config(publish=str(tmp_path / "figures")), tmp_path / "out")
    lines = (tmp_path / "out" / "trials.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    groups = {group: {row["program"] for row in rows if row["group"] == group} for group in bench.NAMES}
    assert groups == {
        group: set(names) | ({"scan balanced 8", "scan balanced 4"} if group == "stage" else set())
        for group, names in bench.NAMES.items()
    }
    assert {row["program"] for row in rows if row["group"] == "step"} > {"policy", "balanced 8", "balanced 4"}
    policy = next(row for row in rows if row["program"] == "policy" and row["group"] == "step")
    assert policy["over_policy"] == 1 and policy["fired_least"] <= policy["fired"] <= policy["fired_most"]
    assert policy["steps"] >= 5 and policy["overflowed"] == 0
    assert len(list((tmp_path / "figures").iterdir())) == 4  # summary, programs, claims and the figure
    assert "the policy is ahead" in capsys.readouterr().out
    monkeypatch.setattr(bench.Bench, "measure", lambda *_: pytest.fail("measured again"))
    bench.main(config(), tmp_path / "out")
    assert (tmp_path / "out" / "trials.jsonl").read_text().splitlines() == lines


@pytest.mark.slow
def test_steps_of_the_loop_copy_no_cache():
    """The timed program holds no array of the archive's size but the cache that it was given."""
    spec = CacheSpec(32, 16, 4, 48**-0.5, 1 << 19, block=256, rank=8, fetch=64, dtype=jnp.bfloat16)
    made = bench_scene.build(dataclasses.replace(spec, capacity=512), 1, 256, 32, 0.05, seed=0)
    cache = jax.eval_shape(lambda: init(spec, 1))
    ring = {"query": made.queries, "row": made.new}
    step = bench_programs.loop(lambda c, item: bench_programs.policy_step(spec, 32, c, item), 2)
    memory = jax.jit(step, donate_argnums=0).lower(cache, ring, 0).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 0.9 * spec.nbytes(1)["total"]
    assert memory.temp_size_in_bytes < spec.nbytes(1)["archive"] / 4


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"lengths": (100,)}, r"lengths=\(100,\) must be multiples of block=64"),
        ({"tail": 63}, "tail=63 must lie in"),
        ({"fired": 0.0}, "fired=0.0 must lie between"),
        ({"dtypes": ("float8",)}, "dtypes='float8' must be float32 or bfloat16"),
        ({"batches": (1, 1)}, r"batches=\(1, 1\) must be different values"),
        ({"batches": (0,)}, r"batches=\(0,\) must be numbers of at least 1"),
        ({"implementation": "foo"}, "implementation='foo' is not available; choose"),
        ({"implementation": "mosaic_gpu"}, "implementation='mosaic_gpu' cannot run here: it needs a GPU"),
        ({"balanced_bits": (5,)}, r"balanced_bits=\(5,\) cannot be run: index_bits=5 is not available"),
        ({"balanced_rank": 99}, "balanced_rank=99 cannot be run: rank=99 of a balanced index must lie in 1..48"),
        ({"rank": 99}, "rank=99 must be at most latent_dim=32"),
        ({"copy_mebibytes": 0}, "copy_mebibytes=0 must be at least 1"),
        ({"matmul_side": 0}, "matmul_side=0 must be at least 1"),
        ({"model_lengths": (-5,)}, r"model_lengths=\(-5,\) must be numbers of at least 2"),
        ({"stage_batches": (-5,)}, r"stage_batches=\(-5,\) must be numbers of at least 1"),
        ({"minutes": -5.0}, "minutes=-5.0 must be at least 0"),
        ({"seconds": -1.0}, "seconds=-1.0 must be at least 0"),
        ({"checkpoint": "nowhere"}, "checkpoint='nowhere' must be a folder with a config.json"),
        ({"checkpoint": "vestige_jax/checkpoints/tiny_rope"}, "checkpoint=.*tiny_rope.*rotated"),
        ({"publish": __file__}, "cannot write in the folder .*choose another --config.publish"),
        ({"memory": 1e-9}, "not even"),
        ({"rounds": -1}, "rounds=-1 must be at least 1"),
    ],
)
def test_what_cannot_be_timed_is_refused(changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        bench.main(config(**changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_kernels_say_what_they_cannot_run_before_anything_is_timed():
    with tracing_for("gpu", "NVIDIA H200"):
        bench.Bench(config(implementation="mosaic_gpu"))
        with pytest.raises(UserError, match="implementation='mosaic_gpu' cannot run here: rows are .*float32 not"):
            bench.Bench(config(implementation="mosaic_gpu", dtypes=("bfloat16", "float32")))


def test_the_shortest_run_still_has_its_tables(tmp_path, capsys):
    bench.main(config(minutes=1e-9), tmp_path)
    assert "stopped after" in capsys.readouterr().out and (tmp_path / "summary.csv").exists()


def test_what_does_not_fit_is_left_out_and_said():
    room = 1 << 30
    made = bench.Bench(config(memory=min(0.9, room / bench_clock.memory()), lengths=(256, 1 << 24)))
    assert [place[2] for place in made.places] == [256]
    assert "left out, too large for the memory: bfloat16 batch 1 at 16777216" in made.opening()


# the report


def step_rows(length, policy, dense, einsum):
    """Rows of a step whose programs took these milliseconds."""
    times = {
        "policy": policy,
        "dense cache": 2 * dense,
        "dense native 128": dense,
        "dense native 4096": 3 * dense,
        "einsum native": einsum,
    }
    for name, ms in times.items():
        row = {"group": "step", "program": name, "dtype": "float32", "batch": 1, "length": length, "samples": 9}
        row |= {"ms": ms, "ms_lo": ms, "ms_hi": ms, "bytes": 1000, "flops": 2000}
        for other in ("policy", "einsum native"):
            value = ms / times[other]
            name = f"over_{other.split()[0]}"
            row |= {name: value, f"{name}_lo": value, f"{name}_hi": value, f"{name}_from": value, f"{name}_to": value}
        yield row | ({"fired": 2.0} if row["program"] == "policy" else {})


MACHINE = [{"group": "machine", "program": name, "dtype": "-", "batch": 0, "length": 0, "ms": 1.0, "samples": 3,
            "bytes": 10**7, "flops": 10**9} for name in ("copy", "matmul")]  # fmt: skip


def test_summary_takes_the_fastest_dense_form():
    (row,) = bench_report.summarise([*MACHINE, *step_rows(400, policy=2.0, dense=5.0, einsum=4.0)])
    assert (row["dense_is"], row["dense_ms"], row["ratio"]) == ("dense native 128", 5.0, 2.5)
    assert row["dense_over_einsum"] == 1.25 and row["fired"] == 0.005
    assert_allclose(row["policy_gbps"], 0.0005) and assert_allclose(row["policy_copy_share"], 5e-5)


def test_claims_of_the_place_that_they_are_about():
    rows = [*MACHINE, *step_rows(256, 2.0, 7.0, 5.0), *step_rows(512, 2.0, 1.0, 1.0)]
    summary = list(bench_report.summarise(rows))
    rules = bench_report.rules(summary, config())
    assert {claim.quantity: (claim.get("at_least"), claim.get("at_most")) for claim in rules.values()} == {
        "dense / policy, float32, 256 rows": (3.0, None),
        "dense / einsum, float32, 256 rows": (None, 1.2),
    }
    found = bench_report.measured(rows)
    assert found["dense / policy, float32, 256 rows"].value == 3.5
    assert found["dense / einsum, float32, 256 rows"].value == 1.4


def test_another_index_stands_beside_the_papers():
    rows = [*MACHINE, *step_rows(256, policy=2.0, dense=6.0, einsum=6.0)]
    for row in rows[2:]:
        row |= {"over_balanced_8": row["ms"] / 1.5}
    beside = rows[2] | {"program": "balanced 8", "ms": 1.5, "bytes": 400, "over_balanced_8": 1.0}
    beside |= {"over_policy": 0.75, "over_policy_from": 0.7, "over_policy_to": 0.8}
    scans = [
        rows[2] | {"group": "stage", "program": name, "ms": ms}
        for name, ms in (("scan", 1.0), ("scan balanced 8", 0.6))
    ]
    rows += [beside, *scans]
    summary = list(bench_report.summarise(rows))
    want = {"policy_scan_ms": 1.0, "balanced_8_ms": 1.5, "balanced_8_ratio": 4.0, "balanced_8_mb": 4e-4,
            "balanced_8_scan_ms": 0.6}  # fmt: skip
    assert {key: summary[0][key] for key in bench_report.index_columns(summary)} == want
    rule = bench_report.rules(summary, config())["balanced index of 8 bits, float32, 256 rows"]
    assert rule.at_most == 1.0 and bench_report.measured(rows)[rule.quantity].low == 0.7
    details = {row["program"]: row for row in bench_report.details(rows, 64) if row["group"] == "stage"}
    assert_allclose([details[name]["step_share"] for name in ("scan", "scan balanced 8")], [0.5, 0.4])


@pytest.mark.parametrize(
    "ratios, said",
    [
        ([0.5, 2, 4], "from 2048 rows on"),
        ([1.5, 2, 4], "at every length timed, from 1024 on"),
        ([0.1, 0.2, 0.3], "at no length up to 16384"),
        ([0.5, 2, 0.9], "not at 16384"),
    ],
)
def test_crossover(ratios, said):
    assert bench_report.crossover(list(zip((1024, 4096, 16384), ratios, strict=True))) == said


# gpu-check


def says(text, status=0):
    return (sys.executable, "-c", f"import sys; print({text!r}); sys.exit({status})")


def test_gpu_check_says_what_is_missing(tmp_path, capsys):
    assert gpu_check.main(tmp_path) == 2
    assert "needs an NVIDIA Hopper GPU and jax[cuda13], and jax sees cpu (cpu) only" in capsys.readouterr().out
    assert gpu_check.missing(says("gpu|NVIDIA A100-SXM4-80GB")) == "NVIDIA A100-SXM4-80GB is no Hopper GPU"
    assert gpu_check.missing(says("gpu|NVIDIA H200")) is None
    assert gpu_check.missing(says("", status=1)).startswith("jax finds no device")


def test_gpu_check_goes_on_after_a_part_that_fails(tmp_path, capsys, monkeypatch):
    commands = {
        "good": ("-c", "print('fine')"),
        "bad": ("-c", "raise SystemExit(3)"),
        "slow": ("-c", "while True: pass"),
    }
    parts = [gpu_check.Part(name, command, 1 if name == "slow" else 20) for name, command in commands.items()]
    monkeypatch.setattr(gpu_check, "parts", lambda out: parts[1:] + parts[:1])
    assert gpu_check.main(tmp_path, says("gpu|NVIDIA H200")) == 1
    lines = capsys.readouterr().out.strip().splitlines()[-3:]
    assert [line.split("  ")[0] for line in lines] == ["FAILED with status 3", "FAILED: stopped after 1 s", "passed"]


def test_gpu_check_says_where_it_cannot_write(monkeypatch):
    monkeypatch.setattr(gpu_check, "parts", lambda out: pytest.fail("begun"))
    with pytest.raises(UserError, match="cannot write in the folder .*test_bench.py .*--out"):
        gpu_check.main(Path(__file__), says("gpu|NVIDIA H200"))


def test_gpu_check_ends_within_eight_minutes(tmp_path):
    assert sum(part.seconds for part in gpu_check.parts(tmp_path)) < 8 * 60
