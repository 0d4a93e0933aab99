"""H2O (Zhang et al., arXiv 2306.14048): the rows that got the most attention so far."""

from vestige_jax.baselines.observed import Observed, Selector


def h2o() -> Selector:
    """Column sums of the causal softmax over all prompt queries and heads (VestigeKV §5)."""

    def score(observed: Observed):
        return observed.mass

    return score
