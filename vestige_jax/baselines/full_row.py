"""Control: sigma of the whole row. Says whether the branch alone carries the signal."""

import vestige_jax as vk
from vestige_jax.baselines.observed import Observed, Selector


def full_row() -> Selector:
    """|| row_u - lowpass(row)_u || over all C channels, block by block (VestigeKV §5)."""

    def score(observed: Observed):
        spec = observed.spec
        return vk.sigma(observed.rows, block=spec.block, kappa=spec.lowpass_bins)

    return score
