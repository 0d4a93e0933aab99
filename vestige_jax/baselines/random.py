"""Control: rows drawn without looking. Each prompt and layer draws from a seed of its own."""

import jax

from vestige_jax.baselines.observed import Observed, Selector


def random() -> Selector:
    """Uniform scores: every set of m rows is equally likely (VestigeKV §5)."""

    def score(observed: Observed):
        slots = observed.rows.shape[1]
        return jax.vmap(lambda seed: jax.random.uniform(jax.random.key(seed), (slots,)))(observed.seed)

    return score
