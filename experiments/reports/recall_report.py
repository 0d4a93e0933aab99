"""Summary, claims, tables and figures of the recall experiment."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_collections

from experiments.harness import claims, paired, plots, published, tables
from experiments.harness.claims import Estimate
from experiments.harness.runner import Run
from experiments.reports import needle_report
from experiments.trials import sheets
from experiments.trials.listening import TABLE as HELD_OUT

PLACE = ("table", "workload", "prefix", "variant", "method", "ratio")
COLUMNS = (
    *PLACE,
    *("trials", "dropped", "intact", "coverage", "lo", "hi", "hard_recall", "hard_share", "attended"),
    *("fetched_per_step", "fire_rate", "overflow", "queries_fired", "gate_open", "gate_open_hard", "recall_at"),
    "published",
)
RATIOS = {
    "coverage": ("covered", "hard"),
    "hard_recall": ("recalled", "hard"),
    "hard_share": ("hard", "queries"),
    "fetched_per_step": ("rows", "steps"),
    "fire_rate": ("steps_fired", "steps"),
    "queries_fired": ("fires", "queries"),
    "gate_open": ("open", "queries"),
    "gate_open_hard": ("open_hard", "hard"),
}
"""What a table shows, as counts of `held_out.measure`: how many of what."""
PUBLISHED_LATENT = 512
LEGEND = """\
{published}. Held out: queries of the text behind the cut (first kind > second kind), one head of one position each, of
all layers. coverage: the best row of a hard query fires for its own head (target {tau:g}); hard_recall: it is fetched;
fetched: rows per position and layer, for all heads together; fires: positions at which some row fires; queries_fired:
heads of positions, as the published fire rate is understood; recall_at: the best row is among the first j archived rows
by index score; gate_open: of all and of hard queries. Intervals: 95% bootstrap over sequences."""
Rows = Sequence[Mapping[str, Any]]


def write(run: Run, config: ml_collections.ConfigDict, answered: Sequence, *, tau: float, latent: int) -> None:
    """summary.csv, claims.csv, both figures, and the tables on the screen.

    answered: the workload of each kind that dense attention answers; tau, the target of coverage; latent, R.
    """
    rows = list(run.rows)
    kinds = {workload.name: workload.kind for workload in answered}
    trials = [row for row in rows if row["table"] != HELD_OUT]
    heard = [row for row in rows if row["table"] == HELD_OUT]
    needle_cells = sheets.summarise(trials, PLACE)
    text_cells = list(summarise(heard, config, latent))
    order = ("reach", "recovery", "starved", "knobs")
    needle_cells.sort(key=lambda cell: (order.index(cell["table"]), cell["prefix"], cell["workload"]))
    summary = [_row(cell) for cell in (*needle_cells, *text_cells)]
    run.write_csv("summary.csv", summary, COLUMNS)
    _draw(run, config, needle_cells)
    print(_tables(needle_cells, text_cells))
    run.explain("\n\n".join([LEGEND.format(published=published.legend(), tau=tau), needle_report.CAUTION]))
    for kind in ("single", "many", "pairs"):
        if kind not in kinds.values():
            print(f"{kind}: dense attention answers none of the sizes that were tried")
    print(f"\n{claims.write(run, config.claims, estimates(rows, kinds, config))}")


def summarise(rows: Rows, config: ml_collections.ConfigDict, latent: int) -> Iterator[dict[str, Any]]:
    """A cell for each held-out variant: shares pooled over layers and sequences, None where nothing was hard.

    Published ranks are of a latent of 512: they stand beside the same share of ours.
    """
    groups: dict[tuple, list] = {}
    for row in rows:
        groups.setdefault(tuple(row[field] for field in PLACE), []).append(row)
    for place, group in groups.items():
        cell = dict(zip(PLACE, place, strict=True)) | {"trials": len(group)}
        for name, (some, of) in RATIOS.items():
            cell[name] = _pooled(group, some, of)
        found = [_pooled(group, f"top{j}", "hard") for j in config.recall_at]
        text = ", ".join(
            f"{j}: {value:.3f}" for j, value in zip(config.recall_at, found, strict=True) if value is not None
        )
        cell["recall_at"] = text or None
        coverage = paired.ratio(group, "covered", "hard")
        cell |= {"lo": coverage.low, "hi": coverage.high}
        rank = cell["variant"].removeprefix("rank=")
        cell["published"] = _ranks(int(rank) * PUBLISHED_LATENT // latent) if rank.isdigit() else None
        yield cell


def _row(cell: Mapping[str, Any]) -> dict[str, Any]:
    return dict.fromkeys(COLUMNS) | {"published": _published(cell)} | {k: v for k, v in cell.items() if v is not None}


def _pooled(rows: Rows, some: str, of: str) -> float | None:
    total = sum(sum(row[of]) for row in rows)
    return sum(sum(row[some]) for row in rows) / total if total else None


def estimates(rows: Rows, kinds: Mapping[str, str], config: ml_collections.ConfigDict) -> dict[str, Estimate]:
    """Every quantity that a claim may be about, by its name."""
    found: dict[str, Estimate] = {}
    for kind in ("single", "many", "pairs"):
        own = [row for row in rows if kinds.get(row["workload"]) == kind]
        if not own:
            continue
        found |= _recovery(own, kind, config)
        found |= _starved(own, kind, config)
    for workload, kind in kinds.items():
        answers = [row for row in rows if row["workload"] == f"{workload} > answers"]
        missed = [
            row | {"missed": [h - r for h, r in zip(row["hard"], row["recalled"], strict=True)]} for row in answers
        ]
        found[f"missed at the answers, {kind}"] = paired.ratio(missed, "missed", "hard")
    heard = [row for row in rows if row["table"] == HELD_OUT]
    return found | _held_out(heard, config)


def _recovery(rows: Rows, kind: str, config: ml_collections.ConfigDict) -> dict[str, Estimate]:
    found = {}
    for ratio_ in config.ratios:
        cell = {name: _cell(rows, "recovery", "base", name, ratio_) for name in config.methods}
        for name, group in cell.items():
            found[f"{name}, {kind}, {ratio_}x"] = paired.share(group)
        found[f"vestige over sigma, {kind}, {ratio_}x"] = paired.difference(
            cell.get("vestige", []), cell.get("sigma", [])
        )
        fetched = [row["fetched_per_step"] / row["prefix"] for row in cell.get("vestige", [])]
        found[f"extra rows, {kind}, {ratio_}x"] = paired.mean(fetched)
    return found


def _starved(rows: Rows, kind: str, config: ml_collections.ConfigDict) -> dict[str, Estimate]:
    found = {}
    for fetch in config.starved:
        cell = {
            name: _cell(rows, "starved", f"fetch={fetch}", name, config.ratios[0]) for name in config.starved_methods
        }
        for name, group in cell.items():
            found[f"{name}, {kind}, fetch {fetch}"] = paired.share(group)
        for other in config.starved_methods[1:]:
            quantity = f"{config.starved_methods[0]} over {other}, {kind}, fetch {fetch}"
            found[quantity] = paired.difference(cell[config.starved_methods[0]], cell[other])
    return found


def _held_out(heard: Rows, config: ml_collections.ConfigDict) -> dict[str, Estimate]:
    """What the claims ask for: there are hundreds of quantities, each with a bootstrap of its own."""
    wanted = {claim.quantity for claim in config.claims.values()}
    found = {}
    for workload, variant, method in dict.fromkeys((row["workload"], row["variant"], row["method"]) for row in heard):
        group = _heard(heard, workload, variant, method)
        for name, (some, of) in RATIOS.items():
            if (quantity := f"{name}, {workload}, {variant}, {method}") in wanted:
                found[quantity] = paired.ratio(group, some, of)
        if (quantity := f"share of the archive, {workload}, {variant}, {method}") in wanted:
            archived = [row | {"archive": [steps * row["archived"] for steps in row["steps"]]} for row in group]
            found[quantity] = paired.ratio(archived, "rows", "archive")
    for low, high in itertools.combinations(config.ranks, 2):
        groups = [_heard(heard, "prose > prose", f"rank={rank}", "vestige") for rank in (low, high)]
        for name, counts in (("rows", ("rows", "steps")), ("queries fired", ("fires", "queries"))):
            if (quantity := f"{name}, rank={low} over rank={high}") in wanted:
                found[quantity] = paired.quotient(*groups, *counts)
    return found


def _cell(rows: Rows, table: str, variant: str, method: str, ratio_: int) -> Rows:
    where = dict(table=table, variant=variant, method=method, ratio=ratio_)
    return [row for row in rows if all(row[field] == value for field, value in where.items())]


def _heard(rows: Rows, workload: str, variant: str, method: str) -> Rows:
    where = dict(workload=workload, variant=variant, method=method)
    return [row for row in rows if all(row[field] == value for field, value in where.items())]


def _published(cell: Mapping[str, Any]) -> str | None:
    """The figure of the same cell; recovery was published for one needle."""
    if cell["table"] == HELD_OUT:
        return cell["published"]
    if cell["table"] == "recovery" and cell["workload"] == "1 needle":
        return published.beside("intact", method=cell["method"], ratio=cell["ratio"], prefix=cell["prefix"])
    return None


def _draw(run: Run, config: ml_collections.ConfigDict, cells: Rows) -> None:
    name = config.checkpoint.rstrip("/").rsplit("/", 1)[-1]
    recovery = [cell for cell in cells if cell["table"] == "recovery" and cell["method"] != "dense"]
    labelled = [cell | {"method": f"{cell['workload']}: {cell['method']}"} for cell in recovery]
    ours = [cell["method"] for cell in labelled if cell["method"].endswith(": vestige")]
    if labelled:
        plots.intact_bars(run.path("recall.png"), labelled, f"With and without recall, {name}", highlight=ours)
    starved = [cell for cell in cells if cell["table"] == "starved"]
    labelled = [cell | {"method": f"{cell['workload']}, {cell['variant']}: {cell['method']}"} for cell in starved]
    ours = [cell["method"] for cell in labelled if cell["method"].endswith(": vestige")]
    if labelled:
        plots.intact_bars(run.path("recall-starved.png"), labelled, f"With next to no fetches, {name}", highlight=ours)


def _tables(needle_cells: Rows, text_cells: Rows) -> str:
    columns = ["table", "workload", "prefix", "variant", "method", "ratio", "intact", "95%", "exact", "attended"]
    columns += ["fetched", "fires", "overflow", "dropped", "published"]
    parts = [tables.render([_line(cell) for cell in needle_cells], columns), "Held-out queries:"]
    shares = ["workload", "variant", "method", "trials", "coverage", "95%", "hard_recall", "hard_share"]
    shares += ["fetched", "fires", "queries_fired", "gate_open", "gate_open_hard", "recall_at", "published"]
    parts.append(tables.render([_heard_line(cell) for cell in text_cells], shares))
    return "\n\n".join(parts)


def _ranks(rank: int) -> str | None:
    """What was published for a rank of 512."""
    names = {"fire rate": "fire rate", "rows per query": "rows", "hard recall": "hard recall"}
    found = [f"{short} {figure}" for name, short in names.items() for figure in published.find(name, rank=rank)]
    return f"rank {rank} of {PUBLISHED_LATENT}: {', '.join(found)}" if found else None


def _line(cell: Mapping[str, Any]) -> dict[str, Any]:
    usable = cell["intact"] is not None
    return dict(cell) | {
        "intact": f"{cell['intact']:.2f}" if usable else "unusable",
        "95%": f"{cell['lo']:.2f}-{cell['hi']:.2f}" if usable else None,
        "fetched": cell["fetched_per_step"],
        "fires": cell["fire_rate"],
        "published": _published(cell),
    }


def _heard_line(cell: Mapping[str, Any]) -> dict[str, Any]:
    known = cell["lo"] is not None
    names = {"fetched": cell["fetched_per_step"], "fires": cell["fire_rate"]}
    return dict(cell) | names | {"95%": f"{cell['lo']:.3f}-{cell['hi']:.3f}" if known else None}
