"""Methods to compare with: which rows of a shared latent cache to keep, for all heads or none (VestigeKV §5).

A selector is a pure function Observed -> scores [B, A] (or a keep mask), closed over its hyperparameters. To add one:
write its decision in a file of its own, from the paper's equation; name its factory in SELECTORS; add a tiny example
worked out by hand to tests/baselines. Any selector runs alone ('norm') or with the certified recall tier
('norm+recall'); 'vestige' is 'sigma+recall', and 'dense' attends everything.
"""

import dataclasses
from collections.abc import Callable

from vestige_jax.baselines.full_row import full_row
from vestige_jax.baselines.h2o import h2o
from vestige_jax.baselines.h2o_recent import h2o_recent
from vestige_jax.baselines.norm import norm
from vestige_jax.baselines.observed import Observed, Selector, select
from vestige_jax.baselines.random import random
from vestige_jax.baselines.sigma import sigma
from vestige_jax.baselines.snapkv import snapkv
from vestige_jax.baselines.streaming import streaming
from vestige_jax.baselines.stride import stride

__all__ = ["ALIASES", "SELECTORS", "Method", "Observed", "Selector", "known", "method", "select"]

SELECTORS: dict[str, Callable[..., Selector]] = {
    "sigma": sigma,
    "full_row": full_row,
    "norm": norm,
    "random": random,
    "stride": stride,
    "streaming": streaming,
    "h2o": h2o,
    "h2o_recent": h2o_recent,
    "snapkv": snapkv,
}
ALIASES = {"vestige": "sigma+recall"}
RECALLS = {"": "none", "recall": "certified"}
"""Written after '+' in a method's name -> CacheSpec.recall."""


@dataclasses.dataclass(frozen=True)
class Method:
    """A point on the two axes. `selector` None: dense."""

    name: str
    selector: Selector | None
    recall: str


def method(name: str) -> Method:
    """The method called `selector` or `selector+recall`, or an alias. Raises ValueError that lists the known names."""
    if name == "dense":
        return Method(name, None, "none")
    selector, _, recall = ALIASES.get(name, name).partition("+")
    if selector not in SELECTORS or recall not in RECALLS or ALIASES.get(name, name).endswith("+"):
        raise ValueError(f"method {name!r} is unknown; {known()}")
    return Method(name, SELECTORS[selector](), RECALLS[recall])


def known() -> str:
    """The names that `method` takes, in one phrase."""
    return f"choose from dense, {', '.join([*ALIASES, *SELECTORS])}, or any of these selectors with +recall"
