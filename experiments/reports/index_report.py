"""Summary, claims and tables of the index experiment."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np

from experiments.harness import claims, paired, tables
from experiments.harness.claims import Estimate
from experiments.harness.runner import Run
from experiments.harness.twins import Twin
from experiments.reports import index_figure
from experiments.trials import index_grid
from experiments.trials.index_ablations import TABLE as ABLATION
from experiments.trials.index_grid import Kind

PLACE = ("arm", "workload", "index", "rank", "bits", "target", "ratio")
MEASURED = ("hard_recall", "hard_lo", "hard_hi", "hard", "fetched_per_step", "fired_per_step", "overflow")
COLUMNS = (
    *PLACE,
    *("checkpoints", "trials", "dropped", "intact", "lo", "hi", *MEASURED, "delta_nats"),
    *("bytes_per_row", "bytes_ratio"),
)
ABLATION_COLUMNS = ("arm", "workload", "variant", "trials", *MEASURED, "bytes_per_row", "bytes_ratio")
LEGEND = """\
intact: of the trials that dense answers, Wilson's 95% interval over the trials of all training seeds, which are not
independent: claims draw training seeds first. hard_recall: the best row of a hard query behind the cut is fetched,
bootstrap over sequences. fetched, fired: rows per step and layer; fetched while decoding, fired for the dense queries.
bytes: of an archived row, with its share of tier 1 and fetches; ratio: of a whole row. delta_nats: a token, over dense.
Ablations: offline, exact codes of one length, no gate."""
Rows = Sequence[Mapping[str, Any]]


def write(run: Run, config: ml_collections.ConfigDict, family: Sequence[Twin]) -> None:
    """summary.csv, trainings.csv, ablations.csv, claims.csv, index.png, and the tables on the screen."""
    rows = list(run.rows)
    measured = [row for row in rows if row["kind"] != ABLATION and not row["workload"].startswith("reach")]
    summary = list(summarise(measured))
    ablations = [cell | {"variant": cell["index"]} for cell in summarise([r for r in rows if r["kind"] == ABLATION])]
    run.write_csv("summary.csv", summary, COLUMNS)
    run.write_csv("trainings.csv", list(_by_training(measured, config)), ("checkpoint", *COLUMNS))
    run.write_csv("ablations.csv", ablations, ABLATION_COLUMNS)
    by_kind = tuple("kind" if field == "workload" else field for field in PLACE)
    index_figure.draw(run, config, list(summarise(measured, by_kind)))
    print(tables.render([_line(cell) for cell in summary], (*PLACE, *SHOWN)))
    print("\n" + tables.render(ablations, ABLATION_COLUMNS) + "\n\n" + LEGEND)
    for twin in family:
        if not twin.weights:
            print(f"not there, left out: {twin.path}; made by: {twin.training}")
    for arm, kind in _unanswered(rows, config):
        print(f"{kind}, {arm}: dense attention answers none of the sizes that were tried")
    print(f"\n{claims.write(run, config.claims, estimates(measured, config))}")


def summarise(rows: Rows, place: Sequence[str] = PLACE) -> Iterator[dict[str, Any]]:
    """A cell for each index, ratio and workload of an arm, over all of its checkpoints."""
    groups: dict[tuple, list] = {}
    for row in rows:
        groups.setdefault(tuple(row[field] for field in place), []).append(row)
    for values, group in groups.items():
        yield dict.fromkeys(COLUMNS) | dict(zip(place, values, strict=True)) | _cell(group)


def _by_training(rows: Rows, config: ml_collections.ConfigDict) -> Iterator[dict[str, Any]]:
    """Cells of the claims' two indexes, one for each training."""
    compared = (index_grid.reference(config), index_grid.candidate(config))
    return summarise([row for row in rows if index_grid.kind_of(row) in compared], ("checkpoint", *PLACE))


def _cell(rows: Rows) -> dict[str, Any]:
    cell: dict[str, Any] = {"checkpoints": len({row["checkpoint"] for row in rows}), "trials": len(rows)}
    for name in ("fetched_per_step", "overflow", "bytes_per_row", "bytes_ratio"):
        cell[name] = float(np.mean([row[name] for row in rows]))
    if "nll" in rows[0]:
        share = paired.share(rows)
        known = (None, None, None) if share.unusable else (share.value, share.low, share.high)
        cell |= dict(zip(("intact", "lo", "hi"), known, strict=True))
        cell["dropped"] = sum(row["dropped"] for row in rows)
        if ">" in rows[0]["kind"]:
            cell["delta_nats"] = float(np.mean([_delta(row) for row in rows]))
    if "hard" in rows[0]:
        recall = paired.ratio(rows, "recalled", "hard")
        cell |= {"hard_recall": recall.value, "hard_lo": recall.low, "hard_hi": recall.high}
        cell["hard"] = sum(sum(row["hard"]) for row in rows)
        cell["fired_per_step"] = sum(sum(r["rows"]) for r in rows) / max(1, sum(sum(r["steps"]) for r in rows))
    return cell


def _delta(row: Mapping[str, Any]) -> float:
    return (row["nll"] - row["nll_dense"]) / row["scored"]


def estimates(rows: Rows, config: ml_collections.ConfigDict) -> dict[str, Estimate]:
    """The candidate against the paper's index at the first ratio, by kind of workload and arm: trial by trial.

    Intervals: bootstrap over training seeds, then over trials.
    """
    found = {}
    for arm in ("nope", "rope"):
        for kind in config.workloads:
            here = [row for row in rows if (row["arm"], row["kind"]) == (arm, kind)]
            new, old = (
                _of(here, which(config), config.ratios[0]) for which in (index_grid.candidate, index_grid.reference)
            )
            if not new or not old:
                continue
            for name, estimate in _against(new, old).items():
                found[f"{name} the paper's, {kind}, {arm}"] = estimate
    return found


def _against(new: Rows, old: Rows) -> dict[str, Estimate]:
    names = ("bytes over", "intact less", "hard recall less")
    both = [{(row["checkpoint"], row["trial"]) for row in side} for side in (new, old)]
    if both[0] != both[1]:
        return dict.fromkeys(names, paired.nothing("not the same trials on both sides: the run is not done"))
    why = paired.unusable(new)
    nbytes = [_table(side, lambda row: row["bytes_per_row"]) for side in (new, old)]
    shares = [_table(side, _recall) for side in (new, old)]
    sides = ((nbytes[0] / nbytes[1], np.zeros_like(nbytes[0])), (paired.table(new), paired.table(old)), shares)
    return {name: _compare(*pair, why) for name, pair in zip(names, sides, strict=True)}


def _recall(row: Mapping[str, Any]) -> float:
    return sum(row["recalled"]) / sum(row["hard"]) if sum(row["hard"]) else np.nan


def _table(rows: Rows, value: Callable[[Mapping[str, Any]], float]) -> np.ndarray:
    """float64 [checkpoints, trials], NaN where nothing was measured."""
    places, trials = (sorted({row[field] for row in rows}) for field in ("checkpoint", "trial"))
    out = np.full((len(places), len(trials)), np.nan)
    for row in rows:
        out[places.index(row["checkpoint"]), trials.index(row["trial"])] = value(row)
    return out


def _compare(first: np.ndarray, second: np.ndarray, why: str) -> Estimate:
    """Mean of `first` less that of `second`, where both are known."""
    known = np.isfinite(first) & np.isfinite(second)
    if not known.any():
        return paired.nothing(why or "no query was hard")
    first, second = (np.where(known, side, np.nan) for side in (first, second))
    value = float(np.nanmean(first) - np.nanmean(second))
    return Estimate(value, *paired.nested(first, second, paired=True), int(known.sum()), why)


def _of(rows: Rows, kind: Kind, ratio: int) -> Rows:
    return [row for row in rows if index_grid.kind_of(row) == kind and row["ratio"] == ratio]


def _unanswered(rows: Rows, config: ml_collections.ConfigDict) -> Iterator[tuple[str, str]]:
    done = {(row["arm"], row["kind"]) for row in rows if not row["workload"].startswith("reach")}
    for arm in dict.fromkeys(row["arm"] for row in rows):
        yield from ((arm, kind) for kind in config.workloads if (arm, kind) not in done)


SHOWN = ("trials", "intact", "95%", "hard_recall", "fetched", "fired", "overflow", "delta_nats", "bytes", "bytes_ratio")


def _line(cell: Mapping[str, Any]) -> dict[str, Any]:
    known = cell["lo"] is not None
    return dict(cell) | {
        "intact": f"{cell['intact']:.2f}" if known else "unusable",
        "95%": f"{cell['lo']:.2f}-{cell['hi']:.2f}" if known else None,
        "fetched": cell["fetched_per_step"],
        "fired": cell["fired_per_step"],
        "bytes": cell["bytes_per_row"],
    }
