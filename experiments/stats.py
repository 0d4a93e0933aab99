"""Intervals for counted outcomes."""

import math

Z95 = 1.959963984540054
"""The 0.975 quantile of the standard normal distribution."""


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
