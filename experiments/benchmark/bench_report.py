"""Tables, claims and the figure of the benchmark, from its rows alone."""

import itertools
import math
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_collections
from matplotlib.figure import Figure

from experiments.benchmark.bench_programs import DENSE, EINSUM, names
from experiments.harness import claims, plots, tables
from experiments.harness.claims import Estimate
from experiments.harness.rows import atomic
from experiments.harness.runner import Run

Row = Mapping[str, Any]

COLUMNS = (
    "dtype batch length policy_ms dense_ms dense_is ratio ratio_lo ratio_hi einsum_ms dense_over_einsum fired "
    "policy_mb dense_mb policy_gbps policy_copy_share dense_gbps dense_copy_share policy_gflops dense_gflops "
    "dense_matmul_share"
).split()
INDEX = "ms ratio mb scan_ms".split()  # columns of each kind of index, after its name
PROGRAMS = (
    "group program dtype batch length ms ms_lo ms_hi samples step_share us_per_token mb gbps copy_share gflops fired "
    "fired_least fired_most fetched overflowed"
).split()
SCREEN = "program dtype length ms ms_lo ms_hi step_share us_per_token mb gbps copy_share gflops".split()
TITLES = {
    "stage": "Stages of the policy's step, each alone",
    "block": "Once in a block",
    "prefill": "Appending a block of a prompt, and storing its rows alone",
    "model": "The whole tiny model, per token",
}


def write(run: Run, config: ml_collections.ConfigDict) -> None:
    """summary.csv, programs.csv, claims.csv, bench.png, and what they say on the screen."""
    rows = list(run.rows)
    summary, programs = list(summarise(rows)), list(details(rows, config.block))
    columns = ("device", *COLUMNS, *index_columns(summary))
    run.write_csv("summary.csv", (dict.fromkeys(columns) | {"device": config.device} | row for row in summary), columns)
    run.write_csv("programs.csv", programs, PROGRAMS)
    plot(run.path("bench.png"), summary, config)
    print("\n".join(screen(summary, programs, config)))
    print("\n" + claims.write(run, rules(summary, config), measured(rows)))


def publish(run: Run, folder: pathlib.Path, device: str) -> None:
    """Copies for the repository, named after the device."""
    slug = "bench_" + re.sub("[^a-z0-9]+", "_", device.lower()).strip("_")
    folder.mkdir(parents=True, exist_ok=True)
    copies = {"summary.csv": f"{slug}.csv", "bench.png": f"{slug}.png"}
    copies |= {name: f"{slug}_{name}" for name in ("programs.csv", "claims.csv")}
    for name, copy in copies.items():
        with atomic(folder / copy) as temporary:
            shutil.copyfile(run.path(name), temporary)


def screen(summary: Sequence[Row], programs: Sequence[Row], config: ml_collections.ConfigDict) -> Iterator[str]:
    machine = {row["program"]: row for row in programs if row["group"] == "machine"}
    copy, matmul = machine["copy"]["gbps"], machine["matmul"]["gflops"]
    yield f"\n{config.device}: copies {copy:.1f} GB/s, multiplies float32 at {matmul:.0f} GFLOP/s"
    yield f"One decode step, {config.heads} heads, rows of {config.latent_dim} + {config.branch_dim} numbers."
    yield f"length: closed rows, and {config.tail} more in the tail. Synthetic rows, seed {config.seed}.\n"
    yield tables.render(summary, COLUMNS) + "\n"
    yield from crossovers(summary)
    chosen = [row for row in summary if "policy_scan_ms" in row]
    if index_columns(chosen):
        yield f"\nUnder other indexes, of {config.balanced_rank} dimensions of 8 or 4 bits; as many rows fire\n"
        yield tables.render(chosen, ["dtype", "length", "dense_ms", "policy_ms", *index_columns(chosen)])
    for group, title in TITLES.items():
        chosen = [row for row in programs if row["group"] == group]
        if chosen:
            yield f"\n{title}\n\n{tables.render(chosen, SCREEN)}"


def summarise(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """One row a place: the policy beside the fastest dense form."""
    machine = {row["program"]: row for row in rows if row["group"] == "machine"}
    copy, matmul = rate(machine["copy"], "bytes"), rate(machine["matmul"], "flops")
    for place, forms in places(rows).items():
        policy, dense, einsum = forms["policy"], fastest(forms, DENSE), fastest(forms, EINSUM)
        row = dict(zip(("dtype", "batch", "length"), place, strict=True))
        row |= {"dense_is": dense["program"], "fired": policy["fired"] / place[2], "einsum_ms": einsum["ms"]}
        row |= {f"ratio{side}": dense[f"over_policy{side}"] for side in ("", "_lo", "_hi")}
        row["dense_over_einsum"] = dense["over_einsum"]
        for name, side in (("policy", policy), ("dense", dense)):
            gbps, gflops = rate(side, "bytes"), rate(side, "flops")
            row |= {f"{name}_ms": side["ms"], f"{name}_mb": side["bytes"] / 1e6, f"{name}_gbps": gbps}
            row |= {f"{name}_copy_share": gbps / copy, f"{name}_gflops": gflops}
        row |= indexes(forms, place, dense, rows)
        yield row | {"dense_matmul_share": row["dense_gflops"] / matmul}


def indexes(forms: Mapping[str, Row], place: tuple, dense: Row, rows: Sequence[Row]) -> dict[str, float]:
    """The scan of the paper's index; time, dense / time, megabytes and scan of every other one timed at a place."""
    scans = {
        row["program"]: row["ms"]
        for row in rows
        if row["group"] == "stage" and (row["dtype"], row["batch"], row["length"]) == place
    }
    found = {"policy_scan_ms": scans["scan"]} if "scan" in scans else {}
    for name in balanced(forms):
        row, key = forms[name], name.replace(" ", "_")
        values = row["ms"], dense[f"over_{key}"], row["bytes"] / 1e6, scans.get(f"scan {name}")
        found |= {f"{key}_{column}": value for column, value in zip(INDEX, values, strict=True)}
    return found


def balanced(forms: Mapping[str, Row]) -> list[str]:
    """The steps under a balanced index, most bits first."""
    return sorted((name for name in forms if name.startswith("balanced")), key=lambda name: -int(name.split()[1]))


def index_columns(summary: Sequence[Row]) -> list[str]:
    """Columns that only some places have: those of other indexes, and the paper's scan beside them."""
    found = dict.fromkeys(key for row in summary for key in row if key.startswith("balanced"))
    return ["policy_scan_ms", *found] if found else []


def places(rows: Sequence[Row]) -> dict[tuple, dict[str, Row]]:
    """Programs of a step by (dtype, batch, length); only places where all were timed."""
    found: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        if row["group"] == "step":
            found.setdefault((row["dtype"], row["batch"], row["length"]), {})[row["program"]] = row
    return {place: forms for place, forms in found.items() if set(names(place[0])) <= set(forms)}


def fastest(forms: Mapping[str, Row], names: Sequence[str]) -> Row:
    return min((forms[name] for name in names if name in forms), key=lambda row: row["ms"])


def rate(row: Row, what: str) -> float:
    """1e9 bytes or operations a second, at the median time."""
    return row[what] / row["ms"] / 1e6


def details(rows: Sequence[Row], block: int) -> Iterator[dict[str, Any]]:
    """Every program with its rates; the stages with their share of the step."""
    copy = next(rate(row, "bytes") for row in rows if row["program"] == "copy")
    step = places(rows)
    for row in rows:
        more = dict.fromkeys(PROGRAMS) | dict(row)
        if row["bytes"]:
            more |= {"mb": row["bytes"] / 1e6, "gbps": rate(row, "bytes"), "copy_share": rate(row, "bytes") / copy}
        if row["flops"]:
            more["gflops"] = rate(row, "flops")
        if row["group"] == "stage" and (row["dtype"], row["batch"], row["length"]) in step:
            own = row["program"].removeprefix("scan ")  # the scan of another index is a share of its step
            forms = step[row["dtype"], row["batch"], row["length"]]
            more["step_share"] = row["ms"] / forms.get(own, forms["policy"])["ms"]
        if row["group"] in ("block", "prefill"):
            more["us_per_token"] = 1e3 * row["ms"] / block / row["batch"]
        yield more


def crossovers(summary: Sequence[Row]) -> Iterator[str]:
    """From which length on the policy is ahead, for each dtype and batch."""
    for (dtype, batch), line in by_line(summary).items():
        points = [(row["length"], row["ratio"]) for row in line]
        yield f"{dtype}, batch {batch}: the policy is ahead {crossover(points)}"


def by_line(summary: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    """The rows of each dtype and batch, by length."""
    lines: dict[tuple[str, int], list[Row]] = {}
    for row in sorted(summary, key=lambda row: row["length"]):
        lines.setdefault((row["dtype"], row["batch"]), []).append(row)
    return dict(sorted(lines.items(), reverse=True))


def crossover(points: Sequence[tuple[int, float]]) -> str:
    """Where the ratio dense / policy last passes 1, on a straight line between logarithms of neighbours."""
    behind = [i for i, (_, ratio) in enumerate(points) if ratio < 1]
    if not behind:
        return f"at every length timed, from {points[0][0]} on"
    if behind[-1] == len(points) - 1:
        return f"at no length up to {points[-1][0]}" if len(behind) == len(points) else f"not at {points[-1][0]}"
    (n, low), (m, high) = points[behind[-1]], points[behind[-1] + 1]
    share = -math.log(low) / (math.log(high) - math.log(low))
    return f"from {n * (m / n) ** share:.0f} rows on"


def rules(summary: Sequence[Row], config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """What this implementation claims, of every dtype at batch 1 that was timed."""
    found = {}
    for row in summary:
        if row["batch"] == 1 and row["length"] == config.ahead_at:
            at = f"{row['dtype']}, {row['length']} rows"
            paper = "crossover at about 28k tokens" if row["length"] > 28000 else "-"
            found[f"ahead of dense, {at}"] = dict(paper=paper, quantity=f"dense / policy, {at}", at_least=config.ahead)
            found[f"dense is no straw man, {at}"] = dict(
                paper="-", quantity=f"dense / einsum, {at}", at_most=config.straw
            )
            if "balanced_8_ms" in row:
                found[f"balanced index of 8 bits, {at}"] = dict(
                    paper="-", quantity=f"balanced 8 / policy, {at}", at_most=config.balanced_8
                )
    return ml_collections.ConfigDict(found)


def measured(rows: Sequence[Row]) -> dict[str, Estimate]:
    """The ratios at every place of batch 1; medians with 95% intervals."""
    found = {}
    for (dtype, batch, length), forms in places(rows).items():
        dense = fastest(forms, DENSE)
        for other in ("policy", "einsum") if batch == 1 else ():
            value, low, high = (dense[f"over_{other}{side}"] for side in ("", "_from", "_to"))
            found[f"dense / {other}, {dtype}, {length} rows"] = Estimate(value, low, high, dense["samples"])
        for name in balanced(forms) if batch == 1 else ():
            value, low, high = (forms[name][f"over_policy{side}"] for side in ("", "_from", "_to"))
            found[f"{name} / policy, {dtype}, {length} rows"] = Estimate(value, low, high, forms[name]["samples"])
    return found


def plot(path: pathlib.Path, summary: Sequence[Row], config: ml_collections.ConfigDict) -> None:
    """Time of a step and the ratio, by length; one line for each dtype and batch."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (place, line), colour in zip(by_line(summary).items(), itertools.cycle(plots.COLOURS), strict=False):
        length, style = [row["length"] for row in line], {"color": colour, "marker": "o", "markersize": 4}
        left.plot(length, [row["policy_ms"] for row in line], label="{}, batch {}".format(*place), **style)
        left.plot(length, [row["dense_ms"] for row in line], linestyle="--", **style)
        right.plot(length, [row["ratio"] for row in line], **style)
        low, high = ([row[side] for row in line] for side in ("ratio_lo", "ratio_hi"))
        right.fill_between(length, low, high, color=colour, alpha=0.2)
    left.set(xscale="log", yscale="log", ylabel="ms a step (dashed: dense)")
    right.set(xscale="log", ylabel="dense / policy, median and quartiles")
    right.axhline(1, color=plots.INK, linewidth=0.8)
    for panel in (left, right):
        panel.set_xticks(config.lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in config.lengths])
        panel.minorticks_off()
        panel.set_xlabel("closed rows")
        panel.grid(alpha=0.3)
    if summary:
        left.legend(fontsize="x-small")
    figure.suptitle(f"Decode step of one MLA layer, {config.device}", fontsize=10)
    plots.save(figure, path)
