"""Control: nothing but the sinks. What is still found leaks through the rest of the model."""

from vestige_jax.baselines.observed import Observed, Selector


def nuke() -> Selector:
    """The sinks alone, whatever the budget (VestigeKV §5)."""

    def mask(observed: Observed):
        return observed.live & ~observed.others

    return mask
