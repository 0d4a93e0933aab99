"""Rows that stand for several others: a baseline, served beside tier 1 (VestigeKV §1, §5)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from vestige_jax import checks
from vestige_jax.cache import Cache, Merged, check_layout
from vestige_jax.partition import keep_set
from vestige_jax.spec import CacheSpec

Array = jax.Array


def merge_rows(
    spec: CacheSpec, cache: Cache, kept: Array, value: Array, key: Array, bias: Array, count: Array
) -> Cache:
    """Install a keep set, and W merged rows in place of what it leaves out.

    A merged row's score is scale * <q, key> + bias, its value is its own: m identical rows are one with bias ln m,
    exactly. Merged rows hold until a block of the sequence closes, or `close` is called, as a keep set does.

    Args
      kept bool [B, A]; value [B, W, R], key [B, W, C], bias [B, W] in nats; count int32 [B]: how many there are.
    Raises ValueError for a misshaped argument, or a spec without room: W must be `spec.merged`.
    """
    check_layout(spec, cache)
    batch, width = cache.fault.shape[0], spec.merged
    checks.require(width > 0, "merged=0 leaves no room for merged rows; give CacheSpec(merged=W)")
    checks.shape("value", value, (batch, width, spec.latent_dim), "[B, W, R]")
    checks.shape("key", key, (batch, width, spec.row_dim), "[B, W, C]")
    checks.shape("bias", bias, (batch, width), "[B, W]")
    checks.shape("count", count, (batch,), "[B]")
    cache = keep_set(spec, cache, kept)
    return _install(spec, cache, value, key, bias, count)


@functools.partial(jax.jit, static_argnames="spec")
def _install(spec, cache, value, key, bias, count):
    parts = [value, key, bias[..., None] / spec.scale]
    rows = jnp.concatenate([part.astype(jnp.float32) for part in parts], axis=-1)
    exists = (jnp.arange(spec.merged) < count[:, None])[..., None]  # a weight of 0 would not silence a NaN
    return dataclasses.replace(cache, merged=Merged(jnp.where(exists, rows, 0.0), count))
