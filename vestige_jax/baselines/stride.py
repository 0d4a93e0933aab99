"""Control: evenly spaced rows."""

import jax.numpy as jnp

from vestige_jax.baselines.observed import Observed, Selector


def stride() -> Selector:
    """The first row of each of m runs as equal as can be, the longer ones first, behind the sinks (VestigeKV §5)."""

    def score(observed: Observed):
        sinks = observed.spec.sinks
        rows = jnp.maximum(observed.closed - sinks, 1)[:, None]
        runs = jnp.clip(observed.count[:, None], 1, rows)
        short, longer = rows // runs, rows % runs
        at = observed.position - sinks
        past = at - longer * (short + 1)  # from here on runs are one row shorter
        first = jnp.where(past < 0, at % (short + 1), past % short) == 0
        return (first & (at >= 0)).astype(jnp.float32)

    return score
