"""KeyDiff (Park et al., arXiv 2504.15364): keys that differ from the average direction."""

import jax
import jax.numpy as jnp

from vestige_jax.baselines.observed import Observed, Selector


def keydiff() -> Selector:
    """-cos(row_u, mean of the normalised rows) (VestigeKV §5). The whole row is the key that all heads share."""

    def score(observed: Observed):
        rows = unit(observed.rows.astype(jnp.float32))
        share = observed.live / jnp.maximum(observed.closed, 1)[:, None]
        anchor = unit(jnp.sum(rows * share[..., None], axis=1))
        return -jnp.sum(rows * anchor[:, None], axis=-1)

    return score


def unit(x: jax.Array) -> jax.Array:
    """x / ||x|| along the last axis; zero stays zero."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
