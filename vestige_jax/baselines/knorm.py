"""Knorm (Devoto et al., arXiv 2406.11430): keys of small norm are the ones attended."""

import jax.numpy as jnp

from vestige_jax.baselines.observed import Observed, Selector


def knorm() -> Selector:
    """-|| row_u || (VestigeKV §5). Adapted: the key that all heads share is the whole row, latent and branch."""

    def score(observed: Observed):
        return -jnp.linalg.norm(observed.rows.astype(jnp.float32), axis=-1)

    return score
