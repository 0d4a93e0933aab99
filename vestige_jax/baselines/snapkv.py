"""SnapKV (Li et al., arXiv 2404.14469): the rows that the end of the prompt looks at, and their neighbours."""

import jax
import jax.numpy as jnp
from jax import lax

from vestige_jax.baselines.observed import Observed, Selector

POOLS = ("avg", "max")


def snapkv(window: int = 32, kernel: int = 7, pool: str = "avg") -> Selector:
    """Softmax weights of the last `window` queries, summed over heads, pooled over `kernel` positions (VestigeKV §5).

    A query sees the closed rows up to its own position; pooling sees zeros beyond either end.
    Raises ValueError for an even kernel, a window of no queries, or a pool that is neither 'avg' nor 'max'.
    """
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"kernel={kernel} must be odd, so that an average is centred on its row")
    if window < 1:
        raise ValueError(f"window={window} must be at least 1 query")
    if pool not in POOLS:
        raise ValueError(f"pool={pool!r} must be one of {list(POOLS)}")

    def score(observed: Observed):
        total = jnp.where(observed.live, window_mass(observed, window), 0.0)
        if pool == "max":
            return lax.reduce_window(total, 0.0, lax.max, (1, kernel), (1, 1), "SAME")
        return lax.reduce_window(total, 0.0, lax.add, (1, kernel), (1, 1), "SAME") / kernel

    return score


def window_mass(observed: Observed, window: int) -> jax.Array:
    """Softmax weight of every row, summed over the last `window` queries and all heads: float32 [B, A]."""
    queries, positions = observed.queries[:, -window:], observed.positions[:, -window:]
    rows = observed.rows.astype(jnp.float32)
    scores = jnp.einsum("bthc,bsc->bths", queries.astype(jnp.float32), rows, precision=lax.Precision.HIGHEST)
    seen = observed.live[:, None] & (observed.position <= positions[..., None])
    weights = jax.nn.softmax(observed.spec.scale * scores, axis=-1, where=seen[:, :, None])
    return jnp.where(seen.any(-1)[..., None, None], weights, 0.0).sum((1, 2))
