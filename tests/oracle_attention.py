"""A float64 reference for attention, recall and calibration: numpy and plain loops, nothing of the library.

One sequence at a time. A sequence is its rows [n, C] and the tier of each: 1 kept, 2 tail, 3 archived.
"""

import fractions
import math
from typing import NamedTuple

import numpy as np

KEPT, TAIL, ARCHIVED = 1, 2, 3


class Attention(NamedTuple):
    """Softmax attention of every head: out [H, R], lse, peak and entropy [H]."""

    out: np.ndarray
    lse: np.ndarray
    peak: np.ndarray
    entropy: np.ndarray


class Sequence(NamedTuple):
    """What decides how one sequence is served."""

    rows: np.ndarray  # [n, C]
    tier: np.ndarray  # [n]
    basis: np.ndarray  # V [R, K]
    z: float
    threshold: float


class Served(NamedTuple):
    """What a decode step should do with one sequence."""

    attended: np.ndarray  # bool [n]
    fires: np.ndarray  # bool [H, n]
    margin: np.ndarray  # [H, n] index score - s*, -inf where a row cannot fire
    open: np.ndarray  # bool [H]
    overflowed: bool


class Sample(NamedTuple):
    """One head of one calibration query."""

    hard: bool
    need: float
    entropy: float


def rounded(values, dtype) -> np.ndarray:
    """Values as a buffer of that dtype holds them."""
    return np.asarray(np.asarray(values, np.float32), dtype).astype(np.float64)


def scores(query, rows, scale) -> np.ndarray:
    """scale * <q_h, row_u>: [H, n]."""
    return scale * np.asarray(query, np.float64) @ np.asarray(rows, np.float64).T


def softmax(logits) -> np.ndarray:
    """Over the last axis."""
    weight = np.exp(logits - logits.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True)


def attention(query, rows, latent_dim, scale) -> Attention:
    """Every head over the rows; over no rows: output 0, lse and peak -inf, entropy 0."""
    rows, heads = np.asarray(rows, np.float64), len(query)
    if not len(rows):
        return Attention(np.zeros((heads, latent_dim)), *np.full((2, heads), -np.inf), np.zeros(heads))
    logits = scores(query, rows, scale)
    weight = softmax(logits)
    peak = logits.max(1)
    lse = peak + np.log(np.exp(logits - peak[:, None]).sum(1))
    entropy = -np.sum(weight * np.log(np.maximum(weight, 1e-300)), axis=1)
    return Attention(weight @ rows[:, :latent_dim], lse, peak, entropy)


def causal(queries, rows, past, latent_dim, scale) -> tuple[np.ndarray, np.ndarray]:
    """Dense causal attention, query t of [T, H, C] over rows[: past + t + 1]: out [T, H, R], column sums [n]."""
    out, mass = [], np.zeros(len(rows))
    for t, query in enumerate(queries):
        seen = rows[: past + t + 1]
        out.append(attention(query, seen, latent_dim, scale).out)
        mass[: len(seen)] += softmax(scores(query, seen, scale)).sum(0)
    return np.array(out).reshape(len(queries), queries.shape[1], latent_dim), mass


def index_terms(query, rows, basis, *, latent_dim, scale, sketch_dtype) -> tuple[np.ndarray, np.ndarray]:
    """idx [H, n] from the exact branch and the rounded sketch, and cert [H, n], the coefficient of z."""
    known, certificate = np.zeros((2, len(query), len(rows)))
    free = latent_dim - basis.shape[1]
    for h, q in enumerate(np.asarray(query, np.float64)):
        content = q[:latent_dim]
        missed = np.linalg.norm(content - basis @ (basis.T @ content))
        for u, row in enumerate(rows):
            latent = row[:latent_dim]
            sketch = rounded(basis.T @ latent, sketch_dtype)
            eta = np.linalg.norm(latent - basis @ (basis.T @ latent))
            known[h, u] = scale * (q[latent_dim:] @ row[latent_dim:] + (basis.T @ content) @ sketch)
            certificate[h, u] = scale * missed * eta / math.sqrt(free) if free else 0.0
    return known, certificate


def serve(
    sequence, query, *, latent_dim, scale, sketch_dtype, fetch, overflow="dense", top_j=None, activation=0, recall=True
) -> Served:
    """Which rows a decode step attends."""
    rows, tier, basis, z, threshold = sequence
    count = len(rows)
    near, archived = np.isin(tier, (KEPT, TAIL)), tier == ARCHIVED
    everything = np.ones(count, bool)
    attended = attention(query, rows[near], latent_dim, scale)
    is_open = attended.entropy > threshold
    margin = np.full((len(query), count), -np.inf)
    if recall and archived.any():
        known, cert = index_terms(
            query, rows[archived], basis, latent_dim=latent_dim, scale=scale, sketch_dtype=sketch_dtype
        )
        margin[:, archived] = known + z * cert - attended.peak[:, None]
        margin[~is_open] = -np.inf
    fires = margin >= 0
    overflowed = bool(fires.any(0).sum() > fetch)
    if count < activation or (overflowed and overflow == "dense"):
        return Served(everything, fires, margin, is_open, overflowed)
    fetched = fires.any(0)
    if overflowed:
        best = np.argsort(-margin.max(0), kind="stable")[:fetch]
        fetched = np.isin(np.arange(count), best)
    if top_j is not None:
        fetched = _top_of_each_head(fires & fetched, margin, top_j)
    return Served(near | fetched, fires, margin, is_open, overflowed)


def _top_of_each_head(fires, margin, top_j):
    chosen = np.zeros(fires.shape[1], bool)
    for h in range(len(fires)):
        ranked = sorted(np.flatnonzero(fires[h]), key=lambda u: -margin[h, u])
        chosen[ranked[:top_j]] = True
    return chosen


def samples(sequence, queries, positions, *, latent_dim, scale, sketch_dtype) -> list[Sample]:
    """Every head of every calibration query that counts: queries [N, H, C] asked at positions [N], -1 ignored."""
    rows, tier, basis, *_ = sequence
    found = []
    for query, position in zip(queries, positions, strict=True):
        if position < 0:
            continue
        visible = np.arange(len(rows)) <= position
        near = visible & (np.isin(tier, (KEPT, TAIL)) | (np.arange(len(rows)) == position))
        for head in query:
            logits = np.where(visible, scores(head[None], rows, scale)[0], -np.inf)
            target = int(np.argmax(logits))
            here = attention(head[None], rows[near], latent_dim, scale)
            known, cert = index_terms(
                head[None], rows[target : target + 1], basis, latent_dim=latent_dim, scale=scale,
                sketch_dtype=sketch_dtype,
            )  # fmt: skip
            short = float(here.peak[0] - known[0, 0])
            edge = -math.inf if short <= 0 else math.inf
            need = short / float(cert[0, 0]) if cert[0, 0] > 0 else edge
            found.append(Sample(not near[target], need, float(here.entropy[0])))
    return found


def calibrated(found, *, tau=0.9, z_max=8.0) -> tuple[float, float, bool]:
    """z, gate threshold (-inf: always open) and clamped, from the samples of one sequence."""
    tau = fractions.Fraction(str(tau))
    alpha = (1 - tau) / 2
    hard = [s for s in found if s.hard]
    k = math.ceil((len(hard) + 1) * tau / (1 - alpha))
    if k > len(hard):
        return z_max, -math.inf, True
    z = min(sorted(s.need for s in hard)[k - 1], z_max)
    threshold = float(np.quantile([s.entropy for s in hard], float(alpha)))
    passed = sum(s.entropy > threshold for s in found)
    return z, threshold if passed <= fractions.Fraction(6, 10) * len(found) else -math.inf, False


def basis(content, rank) -> np.ndarray:
    """Top eigenvectors of the covariance of content [N, R], by numpy."""
    centred = np.asarray(content, np.float64) - np.mean(content, 0, dtype=np.float64)
    _, vectors = np.linalg.eigh(centred.T @ centred / len(centred))
    return vectors[:, ::-1][:, :rank]
