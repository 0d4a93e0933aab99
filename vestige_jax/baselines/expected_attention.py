"""Expected Attention (Devoto et al., arXiv 2510.00636): what queries like the prompt's would give each row."""

import jax
import jax.numpy as jnp
from jax import lax

from vestige_jax.baselines.observed import Observed, Selector


def expected_attention() -> Selector:
    """Mean over heads of softmax_u(scale mu_h.row_u + scale^2 row_u^T Sigma_h row_u / 2) ||W_UV,h c_u|| (VestigeKV §5).

    The exponential of the logit is E exp(scale <q, row_u>) for Gaussian q ~ (mu_h, Sigma_h), the moments of all
    absorbed prompt queries. Adapted: keys are rows; the moments are of queries as the cache meets them, so with a
    rotated branch they average over the prompt's positions, not over future ones.
    """

    def score(observed: Observed):
        mean, covariance, norms = observed.need("query_mean", "query_covariance", "value_norms")
        heads = tuple(jnp.moveaxis(x, axis, 0) for x, axis in ((mean, 1), (covariance, 1), (norms, -1)))

        def one(head):  # a head at a time, so that one [B, A, C] is held and not H of them
            mean, covariance, norms = head
            weights = jax.nn.softmax(logits(observed, mean, covariance), axis=-1, where=observed.live)
            return jnp.where(observed.live, weights * norms, 0.0)

        return lax.map(one, heads).mean(0)

    return score


def logits(observed: Observed, mean: jax.Array, covariance: jax.Array) -> jax.Array:
    """ln E exp(scale <q, row_u>) of one head with moments [B, C], [B, C, C]: float32 [B, A]."""
    rows, scale = observed.rows.astype(jnp.float32), observed.spec.scale
    along = jnp.einsum("bsc,bc->bs", rows, mean, precision=lax.Precision.HIGHEST)
    spread = jnp.einsum("bsc,bcd->bsd", rows, covariance, precision=lax.Precision.HIGHEST)
    return scale * along + scale**2 / 2 * jnp.sum(spread * rows, axis=-1)
