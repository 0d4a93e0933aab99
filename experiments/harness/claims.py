"""What the paper claims, as rules that were written down before a run, and what our numbers say to them.

A rule is a bound on one measured quantity, and stands in the config of its driver::

    config.claims = {
        "branch keeps the argmax": ConfigDict(
            dict(paper="top-1 by the branch alone .9869 (48B Base)", quantity="retention branch", at_least=0.9)
        ),
    }

The driver measures the quantity with an interval, and three verdicts are possible: the interval lies on the right side
of the bound, on the wrong side, or on both.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import ml_collections
import numpy as np

from experiments.harness import tables
from experiments.harness.runner import Run
from experiments.harness.stats import Statistic, bootstrap

COLUMNS = ("claim", "paper", "rule", "ours", "lo", "hi", "n", "agrees", "because")


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A measured quantity with its 95% interval over n samples; `unusable` says why it means nothing, where it does."""

    value: float | None
    low: float | None
    high: float | None
    n: int
    unusable: str = ""


def bootstrapped(values: np.ndarray, statistic: Statistic = np.mean) -> Estimate:
    """A statistic of independent values [N, ...] with its bootstrap interval over the N."""
    values = np.asarray(values, np.float64)
    return Estimate(float(statistic(values)), *bootstrap(values, statistic), len(values))


ABSENT = Estimate(None, None, None, 0, "not measured with these settings")


def judge(claims: ml_collections.ConfigDict, measured: Mapping[str, Estimate]) -> list[dict[str, Any]]:
    """One row of COLUMNS for each claim; one about what this run did not measure can't be told."""
    return [
        {"claim": name, "paper": claim.paper} | _verdict(claim, measured.get(claim.quantity, ABSENT))
        for name, claim in claims.items()
    ]


def write(run: Run, claims: ml_collections.ConfigDict, measured: Mapping[str, Estimate]) -> str:
    """Writes claims.csv and gives the table for the screen."""
    rows = judge(claims, measured)
    run.write_csv("claims.csv", rows, COLUMNS)
    return tables.render(rows, COLUMNS)


def _verdict(claim: ml_collections.ConfigDict, ours: Estimate) -> dict[str, Any]:
    bounds = {side: claim[side] for side in ("at_least", "at_most") if side in claim}
    if len(bounds) != 1:
        raise ValueError(f"a claim has one bound, at_least or at_most, this one has {sorted(bounds)}: {claim.paper}")
    ((side, bound),) = bounds.items()
    row = {"rule": f"{claim.quantity} {side.replace('_', ' ')} {bound:g}", "n": ours.n}
    row |= {"ours": ours.value, "lo": ours.low, "hi": ours.high}
    if ours.unusable:
        return row | {"agrees": "can't be told", "because": ours.unusable}
    right, wrong = (
        (ours.low >= bound, ours.high < bound) if side == "at_least" else (ours.high <= bound, ours.low > bound)
    )
    if right or wrong:
        return row | {"agrees": "yes" if right else "no", "because": ""}
    return row | {"agrees": "can't be told", "because": "the interval spans both verdicts"}
