"""H2O with a recent window, as its authors run it: half of the budget for the last rows."""

import jax.numpy as jnp

from vestige_jax.baselines.observed import Observed, Selector


def h2o_recent() -> Selector:
    """The last floor(m / 2) rows, and the most attended of the others (VestigeKV §5)."""

    def score(observed: Observed):
        recent = observed.position >= (observed.closed - observed.count // 2)[:, None]
        return jnp.where(recent, jnp.inf, observed.mass)

    return score
