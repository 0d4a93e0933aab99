"""StreamingLLM (Xiao et al., arXiv 2309.17453): attention sinks and the most recent rows."""

import jax.numpy as jnp

from vestige_jax.baselines.observed import Observed, Selector


def streaming() -> Selector:
    """The last m rows; the sinks are kept for every method (VestigeKV §5)."""

    def score(observed: Observed):
        return jnp.broadcast_to(observed.position.astype(jnp.float32), observed.rows.shape[:2])

    return score
