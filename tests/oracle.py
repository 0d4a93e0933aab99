"""Float64 references written from the equations, for one sequence at a time. They share no code with the library."""

import math

import numpy as np

EMPTY, KEPT, TAIL, ARCHIVED = range(4)


def sigma(branch, block, kappa):
    """sigma_u = || r_u - lowpass(r)_u ||: every block of branch [S, P] keeps its kappa lowest Fourier bins (§2)."""
    blocks = np.asarray(branch, np.float64).reshape(-1, block, branch.shape[-1])
    spectrum = np.fft.rfft(blocks, axis=1)
    spectrum[:, kappa:] = 0
    smooth = np.fft.irfft(spectrum, n=block, axis=1)
    return np.linalg.norm(blocks - smooth, axis=-1).reshape(-1)


def keep(scores, *, ratio, budget=None, sinks):
    """Positions kept of rows with these scores: the sinks, and the m best others, ties to the lower position (§2)."""
    closed = len(scores)
    m = budget if budget is not None else max(1, math.floor(ratio * closed + 0.5))
    first = range(min(sinks, closed))
    others = sorted(range(len(first), closed), key=lambda u: (-scores[u], u))
    return sorted([*first, *others[:m]])


class Sequence:
    """Rows of one sequence, written one by one; every full block closes and all closed rows are ranked anew (§2)."""

    def __init__(self, spec):
        self.spec = spec
        self.rows = []
        self.sigma = []
        self.kept = []

    def write(self, row):
        self.rows.append(np.asarray(row))
        if len(self.rows) % self.spec.block == 0:
            self._close()

    def _close(self):
        branch = np.stack(self.rows[-self.spec.block :])[:, self.spec.latent_dim :]
        self.sigma.extend(sigma(branch, self.spec.block, self.spec.lowpass_bins))
        ratio = 1 / 32 if self.spec.ratio is None else self.spec.ratio
        self.kept = keep(self.sigma, ratio=ratio, budget=self.spec.budget, sinks=self.spec.sinks)

    @property
    def closed(self):
        return len(self.sigma)

    def tiers(self):
        """The tier of every position up to the capacity."""
        tiers = [EMPTY] * self.spec.capacity
        for position in range(len(self.rows)):
            tiers[position] = TAIL if position >= self.closed else KEPT if position in self.kept else ARCHIVED
        return tiers
