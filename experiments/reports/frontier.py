"""How far apart two sets of texts are: the area under their divergence frontier (Pillutla et al., arXiv 2102.01454).

MAUVE reads a text with GPT-2. Here a text is a vector of the measured model's own, so values compare with each other
and not with published MAUVE; everything behind the vector is MAUVE's definition, but for the PCA before clustering.
"""

import numpy as np
from scipy.cluster import vq

SCALE = 5.0
"""c, MAUVE's own."""


def area(p: np.ndarray, q: np.ndarray, scale: float = SCALE, points: int = 501) -> float:
    """Area under the divergence frontier of two histograms [K]: 1 where they are equal, near 0 where they are disjoint.

    The frontier is (exp(-c KL(q|r)), exp(-c KL(p|r))) over the mixtures r = w p + (1 - w) q, 0 <= w <= 1. Between
    disjoint ones the area is c B(c + 1, c), 1/252 at c = 5.
    Raises ValueError for histograms of different length, with a negative entry, or empty.
    """
    p, q = _shares(p), _shares(q)
    if p.shape != q.shape:
        raise ValueError(f"histograms of {len(p)} and {len(q)} bins: both must count the same bins")
    weight = np.sin(np.linspace(0, np.pi / 2, points))[:, None] ** 2  # dense at both ends, where the frontier bends
    mixture = weight * p + (1 - weight) * q
    x, y = np.exp(-scale * _divergence(q, mixture)), np.exp(-scale * _divergence(p, mixture))
    # From (1, 0), past r = q at x = 1, down to r = p at y = 1, and on to (0, 1).
    x, y = np.concatenate([[1.0], x, [0.0]]), np.concatenate([[0.0], y, [1.0]])
    return float(-np.trapezoid(y, x))


def cluster(features: np.ndarray, clusters: int, seed: int = 0) -> np.ndarray:
    """Cluster of each feature vector [N, D], int [N], by k-means on their directions: the best of ten random starts.

    Raises ValueError for fewer vectors than clusters.
    """
    if not 2 <= clusters <= len(features):
        raise ValueError(f"clusters={clusters} must be at least 2, and at most the {len(features)} vectors")
    features = np.asarray(features, np.float64)
    unit = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    centres, _ = vq.kmeans(unit, clusters, iter=10, rng=np.random.default_rng(seed))
    return vq.vq(unit, centres)[0]


def between(one: np.ndarray, other: np.ndarray, clusters: int) -> float:
    """`area` between two sets of cluster numbers."""
    counts = (np.bincount(np.asarray(labels, np.int64), minlength=clusters) for labels in (one, other))
    return area(*counts)


def _shares(counts: np.ndarray) -> np.ndarray:
    counts = np.asarray(counts, np.float64)
    if counts.ndim != 1 or (counts < 0).any() or counts.sum() == 0:
        raise ValueError(f"a histogram must be one row of counts, not all of them 0, got {counts.tolist()}")
    return counts / counts.sum()


def _divergence(p: np.ndarray, mixtures: np.ndarray) -> np.ndarray:
    """KL(p | r) in nats for every row r of mixtures [N, K]; inf where r lacks what p has."""
    seen = p > 0
    with np.errstate(divide="ignore"):
        return (p[seen] * (np.log(p[seen]) - np.log(mixtures[:, seen]))).sum(1)
