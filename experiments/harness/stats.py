"""Intervals: of counted outcomes, and of any statistic of independent values."""

import math
from collections.abc import Callable, Sequence

import numpy as np

Z95 = 1.959963984540054
"""The 0.975 quantile of the standard normal distribution."""
Statistic = Callable[[np.ndarray], float]


def wilson(successes: int, n: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a proportion; (0, 1) when nothing was counted.

    The two p that solve (p̂ - p)² = z² p (1 - p) / n, with p̂ = successes / n.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes must be between 0 and n = {n}, got {successes}")
    if n == 0:
        return 0.0, 1.0
    share, weight = successes / n, z * z / n
    centre = (share + weight / 2) / (1 + weight)
    half = z * math.sqrt(share * (1 - share) / n + weight / (4 * n)) / (1 + weight)
    low, high = max(0.0, centre - half), min(1.0, centre + half)
    return low if successes else 0.0, high if successes < n else 1.0  # exact at the ends, where rounding would show


def bootstrap(values: Sequence[float], statistic: Statistic = np.mean, draws: int = 2000) -> tuple[float, float]:
    """Percentile bootstrap, 95%, of a statistic of independent values; the same draws every time.

    `values` are what was drawn independently: one number for each trial or document, not for each token in it.
    """
    values = np.asarray(values, np.float64)
    if len(values) == 0:
        raise ValueError("values is empty: there is nothing to draw from")
    rng = np.random.default_rng(0)
    return percentiles([statistic(values[rng.integers(len(values), size=len(values))]) for _ in range(draws)])


def resampled(count: int, draws: int = 2000) -> np.ndarray:
    """Which of `count` independent values each draw of a bootstrap takes: int [draws, count], the same every time.

    For statistics that work on all draws at once; the interval is `percentiles` of their results.
    """
    return np.random.default_rng(0).integers(count, size=(draws, count))


def percentiles(drawn: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of a statistic's values over the draws of a bootstrap."""
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(low), float(high)
