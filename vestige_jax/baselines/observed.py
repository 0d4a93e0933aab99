"""What a selector may look at, and how its answer becomes a keep set."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from vestige_jax import checks
from vestige_jax.partition import top_rows
from vestige_jax.spec import CacheSpec

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Observed:
    """One layer of B prompts at the cut, before any query of the question (VestigeKV §5).

    `spec` is static: scale, sinks, block, and where a row's latent ends.
    """

    rows: Array  # [B, A, C] closed rows, zeros past `closed`
    closed: Array  # [B] int32
    count: Array  # [B] int32, m: rows to keep besides the sinks
    queries: Array  # [B, N, H, C] the last absorbed prompt queries, unscaled, oldest first
    positions: Array  # [B, N] int32, where each was asked; -1 for none
    mass: Array  # [B, A] float32, softmax weight from every prompt query and head
    seed: Array  # [B] uint32, a number of the trial's own
    spec: CacheSpec = dataclasses.field(metadata={"static": True})

    @property
    def position(self) -> Array:
        """int32 [A]."""
        return jnp.arange(self.rows.shape[1])

    @property
    def live(self) -> Array:
        """Rows that exist: bool [B, A]."""
        return self.position < self.closed[:, None]

    @property
    def branch(self) -> Array:
        """r_u of every row: [B, A, P]."""
        return self.rows[..., self.spec.latent_dim :]


Selector = Callable[[Observed], Array]


def select(selector: Selector, observed: Observed) -> Array:
    """The keep set of a selector: bool [B, A].

    A score (float [B, A], higher is kept) keeps the sinks and the `count` best other rows, ties to the lower position.
    A mask (bool [B, A]) is taken as it is; choosing how many rows, sinks included, is then the selector's part.
    """
    answer = selector(observed)
    checks.shape("a selector's answer", answer, observed.rows.shape[:2], "[B, A]")
    if answer.dtype == bool:
        return answer & observed.live
    checks.floating("a selector's answer", answer)
    most = max(0, observed.spec.tier1_rows - observed.spec.sinks)
    return top_rows(answer, observed.closed, observed.count, most, observed.spec.sinks)
