"""Estimates from rows, with 95% intervals: shares, differences of methods on the same trials, quotients of counts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.harness.claims import Estimate
from experiments.harness.stats import bootstrap, wilson
from experiments.reports.needle_report import MOST_DROPPED

Rows = Sequence[Mapping[str, Any]]
NOTHING = "nothing was measured"


def share(rows: Rows) -> Estimate:
    """Share intact with Wilson's interval, of the trials that dense answers."""
    kept = [row for row in rows if not row["dropped"]]
    count = sum(row["intact"] for row in kept)
    return Estimate(count / max(1, len(kept)), *wilson(count, len(kept)), len(kept), unusable(rows))


def mean(values: Sequence[float], why: str = "") -> Estimate:
    """Mean of independent values."""
    if not len(values):
        return nothing(why or NOTHING)
    return Estimate(float(np.mean(values)), *bootstrap(values), len(values), why)


def pooled(rows: Rows) -> Estimate:
    """Share intact over checkpoints and trials: bootstrap over checkpoints, then over trials."""
    return difference(rows, [row | {"intact": False} for row in rows])


def difference(one: Rows, other: Rows) -> Estimate:
    """Share intact of `one` less that of `other`, trial by trial: bootstrap over checkpoints, then over trials.

    Training seeds are drawn before trials: trials of one model are no sample of models. Both sides have the same
    trials; where they have the same checkpoints, those are drawn together.
    """
    why = unusable(one) or unusable(other)
    if not one or not other:
        return nothing(why)
    first, second = table(one), table(other)
    if np.isnan(first).all() or np.isnan(second).all():
        return nothing(why)
    same = {row.get("checkpoint") for row in one} == {row.get("checkpoint") for row in other}
    value = float(np.nanmean(first) - np.nanmean(second))
    return Estimate(value, *nested(first, second, paired=same), int(np.isfinite(first).sum()), why)


def ratio(rows: Rows, some: str, of: str) -> Estimate:
    """A share of counts, pooled over layers; bootstrap over sequences, which are what was drawn independently."""
    counts = np.array([(sum(row[some]), sum(row[of])) for row in rows], np.float64).reshape(-1, 2)
    counts = counts[counts[:, 1] > 0]
    if not len(counts):
        return nothing("no query was hard" if of == "hard" and rows else NOTHING)
    share = lambda drawn: drawn[:, 0].sum() / drawn[:, 1].sum()  # noqa: E731
    return Estimate(float(share(counts)), *bootstrap(counts, share), len(counts))


def quotient(one: Rows, other: Rows, some: str, of: str) -> Estimate:
    """A share of `one` over that of `other`, on the same sequences."""
    if not one or not other:
        return nothing(NOTHING)
    pairs = {row["trial"]: row for row in other}
    both = [(row, pairs[row["trial"]]) for row in one if row["trial"] in pairs]
    counts = np.array([[sum(row[name]) for row in pair for name in (some, of)] for pair in both], np.float64)

    def statistic(drawn: np.ndarray) -> float:
        first, first_of, second, second_of = drawn.sum(0)
        return (first / max(first_of, 1)) / max(second / max(second_of, 1), 1 / max(second_of, 1))

    return Estimate(float(statistic(counts)), *bootstrap(counts, statistic), len(counts))


def table(rows: Rows) -> np.ndarray:
    """Intact as float64 [checkpoints, trials], NaN where dense fails."""
    places = sorted({row.get("checkpoint", "") for row in rows})
    trials = sorted({row["trial"] for row in rows})
    out = np.full((len(places), len(trials)), np.nan)
    for row in rows:
        if not row["dropped"]:
            out[places.index(row.get("checkpoint", "")), trials.index(row["trial"])] = row["intact"]
    return out


def nested(first: np.ndarray, second: np.ndarray, *, paired: bool, draws: int = 2000) -> tuple[float, float]:
    """95% bootstrap interval of a difference of means: checkpoints drawn first, then trials, the same in every run.

    Arrays [checkpoints, trials]; paired: the same checkpoints are drawn on both sides. Trials are the same on both.
    """
    rng = np.random.default_rng(0)
    trials = rng.integers(first.shape[1], size=(draws, 1, first.shape[1]))
    mine = rng.integers(len(first), size=(draws, len(first), 1))
    others = mine if paired else rng.integers(len(second), size=(draws, len(second), 1))
    found = _mean(first[mine, trials]) - _mean(second[others, trials])
    low, high = np.nanquantile(found, (0.025, 0.975))
    return float(low), float(high)


def _mean(drawn: np.ndarray) -> np.ndarray:
    """Mean of each draw over what is not NaN; NaN where nothing is."""
    there = np.isfinite(drawn)
    count = there.sum((1, 2))
    return np.where(count > 0, np.where(there, drawn, 0).sum((1, 2)) / np.maximum(count, 1), np.nan)


def order(one: Mapping[str, Sequence[float]], other: Mapping[str, Sequence[float]], draws: int = 500) -> Estimate:
    """Kendall's tau between the orders that two groups of trials give the same methods, by mean cost in nats.

    Args: method -> cost over dense of each trial. 1: the same order; 0: none in common; -1: the reverse.
    """
    methods = [name for name in one if len(one[name]) and len(other.get(name, ()))]
    if len(methods) < 2:
        return nothing("fewer than two methods in common")
    first, second = (np.array([list(group[name]) for name in methods], np.float64) for group in (one, other))
    rng = np.random.default_rng(0)
    found = [
        kendall(*(side[:, rng.integers(side.shape[1], size=side.shape[1])].mean(1) for side in (first, second)))
        for _ in range(draws)
    ]
    low, high = np.quantile(found, (0.025, 0.975))
    return Estimate(kendall(first.mean(1), second.mean(1)), float(low), float(high), len(methods))


def kendall(first: np.ndarray, second: np.ndarray) -> float:
    """Kendall's tau-a: share of pairs in the same order less that in the opposite one."""
    pairs = np.triu_indices(len(first), 1)
    signs = [np.sign(side[pairs[0]] - side[pairs[1]]) for side in (first, second)]
    return float((signs[0] * signs[1]).mean())


def best(groups: Mapping[str, Rows]) -> str:
    """The group with the largest share intact; the first of equals."""
    return max(groups, key=lambda name: share(groups[name]).value)


def unusable(rows: Rows) -> str:
    """Why these rows say nothing of a method, if so."""
    if not rows:
        return NOTHING
    dropped = sum(row["dropped"] for row in rows)
    return f"dense fails on {dropped} of {len(rows)} trials" if dropped > MOST_DROPPED * len(rows) else ""


def nothing(why: str) -> Estimate:
    """No measurement, and why."""
    return Estimate(None, None, None, 0, why)
