"""Sigma on a narrower branch: how many of its dimensions carry the signal."""

import jax.numpy as jnp
from jax import lax

import vestige_jax as vk
from vestige_jax import linear
from vestige_jax.baselines.observed import Observed, Selector


def sigma_pca(width: int) -> Selector:
    """Sigma of the branch's first `width` principal components, per prompt and layer (VestigeKV §6).

    r_u -> mean + V V^T (r_u - mean), V the top eigenvectors of the covariance of all closed rows. The mean is kept;
    sigma does not see it, nor the rotation, so it is computed on V^T (r_u - mean).
    Raises ValueError for a width below 1 or, where it is used, above the branch.
    """
    if width < 1:
        raise ValueError(f"width={width} must be at least 1 dimension")

    def score(observed: Observed):
        spec = observed.spec
        if width > spec.branch_dim:
            raise ValueError(f"width={width} must be at most branch_dim={spec.branch_dim}")
        narrow = jnp.einsum("bsp,bpk->bsk", *_centred(observed, width), precision=lax.Precision.HIGHEST)
        return vk.sigma(narrow, block=spec.block, kappa=spec.lowpass_bins)

    return score


def _centred(observed: Observed, width: int):
    """Branches about their mean [B, A, P], and the principal directions [B, P, K]."""
    live, number = observed.live[..., None], jnp.maximum(observed.closed, 1)[:, None, None]
    branch = jnp.where(live, observed.branch.astype(jnp.float32), 0.0)
    away = jnp.where(live, branch - branch.sum(1, keepdims=True) / number, 0.0)
    scatter = jnp.einsum("bsp,bsq->bpq", away, away, precision=lax.Precision.HIGHEST)
    _, vectors = linear.eigh(scatter / number)  # ascending
    return away, vectors[..., ::-1][..., :width]
