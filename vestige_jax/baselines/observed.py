"""What a selector may look at, and how its answer becomes a keep set."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from vestige_jax import checks
from vestige_jax.partition import top_rows
from vestige_jax.spec import CacheSpec

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Observed:
    """One layer of B prompts at the cut, before any query of the question (VestigeKV §5).

    `spec` is static: scale, sinks, block, and where a row's latent ends. What was not observed is None; a selector that
    cannot do without asks through `need`.
    """

    rows: Array  # [B, A, C] closed rows, zeros past `closed`
    closed: Array  # [B] int32
    count: Array  # [B] int32, m: rows to keep besides the sinks
    queries: Array  # [B, N, H, C] the last absorbed prompt queries, unscaled, oldest first
    positions: Array  # [B, N] int32, where each was asked; -1 for none
    mass: Array  # [B, A] float32, softmax weight from every prompt query and head
    seed: Array  # [B] uint32, a number of the trial's own
    spec: CacheSpec = dataclasses.field(metadata={"static": True})
    query_mean: Array | None = None  # [B, H, C] float32, of all absorbed prompt queries
    query_covariance: Array | None = None  # [B, H, C, C] float32
    value_norms: Array | None = None  # [B, A, H] float32, ||W_UV,h c_u||
    repeat: Array | None = None  # [B, A] float32, most softmax weight from any query when the prompt was read again

    @property
    def position(self) -> Array:
        """int32 [A]."""
        return jnp.arange(self.rows.shape[1])

    @property
    def live(self) -> Array:
        """Rows that exist: bool [B, A]."""
        return self.position < self.closed[:, None]

    @property
    def others(self) -> Array:
        """Rows that exist and are no sinks: bool [B, A]."""
        return self.live & (self.position >= self.spec.sinks)

    @property
    def branch(self) -> Array:
        """r_u of every row: [B, A, P]."""
        return self.rows[..., self.spec.latent_dim :]

    @property
    def most(self) -> int:
        """The largest `count` that tier 1 has room for."""
        return max(0, self.spec.tier1_rows - self.spec.sinks)

    def need(self, *names: str) -> tuple[Array, ...]:
        """These fields. Raises ValueError for one that was not observed."""
        missing = [name for name in names if getattr(self, name) is None]
        checks.require(not missing, f"{missing} was not observed; prefill with `experiments.trials.serving.prefill`")
        return tuple(getattr(self, name) for name in names)


class MergedRows(NamedTuple):
    """Rows that stand for several: logit scale * <q, key> + bias, and a value of their own (VestigeKV §1)."""

    value: Array  # [B, W, R]
    key: Array  # [B, W, C]
    bias: Array  # [B, W] nats; ln m for m identical rows
    count: Array  # [B] int32, how many there are; what is behind them means nothing


Selector = Callable[[Observed], Array]
"""Scores float [B, A], or a keep mask bool [B, A]."""
Merger = Callable[[Observed], MergedRows]
"""The rows that stand for all closed rows but the sinks; W = `Observed.most`."""


def select(selector: Selector, observed: Observed) -> Array:
    """The keep set of a selector: bool [B, A].

    A score (float [B, A], higher is kept) keeps the sinks and the `count` best other rows, ties to the lower position.
    A mask (bool [B, A]) is taken as it is; choosing how many rows, sinks included, is then the selector's part.
    """
    answer = _answer(selector, observed)
    if answer.dtype == bool:
        return answer & observed.live
    return top_rows(answer, observed.closed, observed.count, observed.most, observed.spec.sinks)


def share(selector: Selector, layers: list[Observed]) -> list[Array]:
    """The keep sets of all layers under one threshold: sinks, and the count * layers best other rows of any layer.

    Ties go to the lower position, then to the lower layer. Raises ValueError for a selector that answers with a mask.
    """
    scores = [_answer(selector, observed) for observed in layers]
    for score in scores:
        checks.floating("a selector's answer", score)
    first, slots, depth = layers[0], layers[0].rows.shape[1], len(layers)
    live = jnp.stack([observed.others for observed in layers], axis=-1)  # [B, A, L]: by position, then by layer
    score = jnp.maximum(jnp.stack(scores, axis=-1).astype(jnp.float32), jnp.finfo(jnp.float32).min)
    flat = jnp.where(live, score, -jnp.inf).reshape(-1, slots * depth)
    _, order = lax.top_k(flat, slots * depth)
    chosen = jnp.arange(slots * depth) < depth * first.count[:, None]
    kept = jnp.put_along_axis(jnp.zeros(flat.shape, bool), order, chosen, axis=-1, inplace=False).reshape(live.shape)
    return [(kept & live)[..., i] | (observed.live & ~observed.others) for i, observed in enumerate(layers)]


def _answer(selector: Selector, observed: Observed) -> Array:
    answer = selector(observed)
    checks.shape("a selector's answer", answer, observed.rows.shape[:2], "[B, A]")
    if answer.dtype != bool:
        checks.floating("a selector's answer", answer)
    return answer
