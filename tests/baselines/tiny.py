"""One layer small enough to work out by hand: R = P = 1, one head, eight rows, two sinks."""

import jax.numpy as jnp
import numpy as np

import vestige_jax as vk
from vestige_jax import baselines
from vestige_jax.baselines import Observed

SPEC = vk.CacheSpec(1, 1, 1, 0.5, 8, block=8, kappa=1, sinks=2, budget=3, rank=1, dtype=jnp.float32)
CONTENT = (5, 0, 0, 0, 0, 0, 0, 0)
BRANCH = (1, 1, 1, 9, 1, -2, 1, 4)  # mean 2


def observed(
    count=3,
    closed=8,
    spec=SPEC,
    content=CONTENT,
    branch=BRANCH,
    queries=((0, 0),),
    positions=(8,),
    mass=None,
    seed=0,
    mean=(0, 0),
    covariance=((0, 0), (0, 0)),
    norms=(1,) * 8,
    repeat=(0,) * 8,
):
    rows = jnp.stack([jnp.asarray(content, jnp.float32), jnp.asarray(branch, jnp.float32)], axis=-1)[None]
    one = lambda values: jnp.asarray(values, jnp.float32)[None]  # noqa: E731
    return Observed(
        rows=rows,
        closed=jnp.array([closed], jnp.int32),
        count=jnp.array([count], jnp.int32),
        queries=one(queries)[:, :, None],
        positions=jnp.asarray(positions, jnp.int32)[None],
        mass=jnp.zeros((1, 8)) if mass is None else one(mass),
        seed=jnp.array([seed], jnp.uint32),
        spec=spec,
        query_mean=one(mean)[:, None],
        query_covariance=one(covariance)[:, None],
        value_norms=one(norms)[..., None],
        repeat=None if repeat is None else one(repeat),
    )


def kept(name, **facts):
    mask = baselines.select(baselines.SELECTORS[name](), observed(**facts))
    return np.flatnonzero(mask[0]).tolist()
