"""Control: the branch's length. Says whether the low-pass of sigma matters."""

import jax.numpy as jnp

from vestige_jax.baselines.observed import Observed, Selector


def norm() -> Selector:
    """|| r_u || (VestigeKV §5)."""

    def score(observed: Observed):
        return jnp.linalg.norm(observed.branch.astype(jnp.float32), axis=-1)

    return score
