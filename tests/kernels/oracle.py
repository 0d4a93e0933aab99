"""Float64 references for the kernels, written from the equations in numpy. They share no code with the kernels."""

import numpy as np


def attend(query, rows, live, latent_dim, scale):
    """Softmax attention of query [B, Q, C] over rows [B, S, C] where live [B, 1 or Q, S]: out, lse, peak, mean."""
    query, rows = np.asarray(query, np.float64), np.asarray(rows, np.float64)
    batch, queries, _ = query.shape
    live = np.broadcast_to(live, (batch, queries, rows.shape[1]))
    out = np.zeros((batch, queries, latent_dim))
    lse, peak = np.full((2, batch, queries), -np.inf)
    mean = np.zeros((batch, queries))
    for b, q in np.ndindex(batch, queries):
        seen = np.flatnonzero(live[b, q])
        if not len(seen):
            continue
        score = scale * rows[b, seen] @ query[b, q]
        peak[b, q] = score.max()
        lse[b, q] = peak[b, q] + np.log(np.exp(score - peak[b, q]).sum())
        weight = np.exp(score - lse[b, q])
        out[b, q] = weight @ rows[b, seen, :latent_dim]
        mean[b, q] = weight @ score
    return out, lse, peak, mean


def margins(branch, sketch, residual, threshold, branch_rows, code, bound, member, length):
    """Best margin over the heads of every row, -inf where it can't fire: float64 [B, S]."""
    branch, sketch, residual, threshold, branch_rows, code, bound = (
        np.asarray(x, np.float64) for x in (branch, sketch, residual, threshold, branch_rows, code, bound)
    )
    score = branch @ branch_rows.swapaxes(1, 2) + sketch @ code.swapaxes(1, 2) + residual @ bound
    best = (score - threshold[..., None]).max(1)
    exists = np.arange(best.shape[1]) < np.asarray(length)[:, None]
    return np.where(np.asarray(member) & exists, best, -np.inf)


def fetch_list(margin, width):
    """Positions of fired rows, S past the end; how many; and whether more fired than fit."""
    batch, slots = margin.shape
    position, fired = np.full((batch, width), slots), [np.flatnonzero(row >= 0) for row in margin]
    for b, found in enumerate(fired):
        position[b, : min(width, len(found))] = found[:width]
    count = np.array([len(found) for found in fired])
    return position, np.minimum(count, width), count > width


def whole(digits):
    """The numbers that four digits to base 256 write."""
    return sum(256.0 ** (3 - i) * np.asarray(digit, np.float64) for i, digit in enumerate(digits))
