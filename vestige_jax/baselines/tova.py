"""TOVA (Oren et al., arXiv 2401.06104): the rows that the last token looks at."""

from vestige_jax.baselines.observed import Observed, Selector
from vestige_jax.baselines.snapkv import window_mass


def tova() -> Selector:
    """Softmax weights of the last prompt query, mean over heads (VestigeKV §5).

    Adapted: asked once, at the cut, where the original drops one row at every step.
    """

    def score(observed: Observed):
        return window_mass(observed, 1) / observed.spec.num_heads

    return score
