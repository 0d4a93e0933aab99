"""Tier 1 of VestigeKV (arXiv 2609.03949): rows whose branch stands out from its neighbours."""

import vestige_jax as vk
from vestige_jax.baselines.observed import Observed, Selector


def sigma() -> Selector:
    """sigma_u = || r_u - lowpass(r)_u ||, block by block (VestigeKV §2)."""

    def score(observed: Observed):
        spec = observed.spec
        return vk.sigma(observed.branch, block=spec.block, kappa=spec.lowpass_bins)

    return score
