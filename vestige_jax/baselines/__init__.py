"""Methods to compare with: which rows of a shared latent cache to keep, for all heads or none (VestigeKV §5).

A selector is a pure function Observed -> scores [B, A] (or a keep mask), closed over its hyperparameters; a merger
answers with rows that stand for several. To add one: write its decision in a file of its own, from the paper's
equation; name its factory in SELECTORS or MERGERS; add a tiny example worked out by hand to tests/baselines. Any
selector runs alone ('norm') or with a recall tier ('norm+recall'); 'vestige' is 'sigma+recall', and 'dense' attends
everything.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from vestige_jax.baselines.expected_attention import expected_attention
from vestige_jax.baselines.full_row import full_row
from vestige_jax.baselines.h2o import h2o
from vestige_jax.baselines.h2o_recent import h2o_recent
from vestige_jax.baselines.keepkv import keepkv
from vestige_jax.baselines.keydiff import keydiff
from vestige_jax.baselines.kmeans import kmeans
from vestige_jax.baselines.knorm import knorm
from vestige_jax.baselines.kvzip import kvzip
from vestige_jax.baselines.norm import norm
from vestige_jax.baselines.nuke import nuke
from vestige_jax.baselines.observed import MergedRows, Merger, Observed, Selector, select, share
from vestige_jax.baselines.random import random
from vestige_jax.baselines.recalls import PAGES
from vestige_jax.baselines.sigma import sigma
from vestige_jax.baselines.sigma_pca import sigma_pca
from vestige_jax.baselines.snapkv import snapkv
from vestige_jax.baselines.streaming import streaming
from vestige_jax.baselines.stride import stride
from vestige_jax.baselines.tova import tova

__all__ = [
    "ALIASES",
    "MERGERS",
    "RECALLS",
    "SELECTORS",
    "MergedRows",
    "Merger",
    "Method",
    "Observed",
    "Selector",
    "known",
    "method",
    "select",
    "share",
]

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
    "snapkv_w64": functools.partial(snapkv, window=64),
    "snapkv_k5": functools.partial(snapkv, kernel=5),
    "snapkv_max": functools.partial(snapkv, pool="max"),
    "tova": tova,
    "knorm": knorm,
    "keydiff": keydiff,
    "expected_attention": expected_attention,
    "kvzip": kvzip,
    "kvzip_global": kvzip,
    "nuke": nuke,
    **{f"sigma_pca{width}": functools.partial(sigma_pca, width) for width in (1, 2, 4, 8, 16, 32)},
}
MERGERS: dict[str, Callable[..., Merger]] = {"kmeans": kmeans, "keepkv": keepkv}
ACROSS_LAYERS = ("kvzip_global",)
"""Selectors whose budget is one for all layers."""
REREAD = ("kvzip", "kvzip_global")
"""Selectors that look at `Observed.repeat`."""
ALIASES = {"vestige": "sigma+recall"}
RECALLS: dict[str, Any] = {"": "none", "recall": "certified", **PAGES}
"""Written after '+' in a method's name -> CacheSpec.recall."""


@dataclasses.dataclass(frozen=True)
class Method:
    """A point on the two axes.

    selector: None is dense. recall: a value of CacheSpec.recall.
    kind: 'keep' a set of rows in each layer, 'share' one budget over the layers, or 'merge'.
    rereads: the prompt has to be read a second time (`Observed.repeat`).
    """

    name: str
    selector: Selector | Merger | None
    recall: Any
    kind: str = "keep"
    rereads: bool = False


def method(name: str) -> Method:
    """The method called `selector` or `selector+recall`, or an alias. Raises ValueError that lists the known names."""
    if name == "dense":
        return Method(name, None, "none")
    selector, _, recall = ALIASES.get(name, name).partition("+")
    if selector in MERGERS and selector != name:
        raise ValueError(f"method {name!r}: {selector} merges rows, and none of them is recalled; say {selector!r}")
    factory = SELECTORS.get(selector) or MERGERS.get(selector)
    if factory is None or recall not in RECALLS or ALIASES.get(name, name).endswith("+"):
        raise ValueError(f"method {name!r} is unknown; {known()}")
    kind = "merge" if selector in MERGERS else "share" if selector in ACROSS_LAYERS else "keep"
    return Method(name, _made(factory), RECALLS[recall], kind, selector in REREAD)


@functools.cache
def _made(factory: Callable[..., Any]) -> Any:
    """One selector per factory, so that a program compiled for it is found again."""
    return factory()


def known() -> str:
    """The names that `method` takes, in one phrase."""
    recalls = ", ".join(f"+{name}" for name in RECALLS if name)
    merging = f"; or {', '.join(MERGERS)}" if MERGERS else ""
    return f"choose from dense, {', '.join([*ALIASES, *SELECTORS])}, or any of these selectors with {recalls}{merging}"
