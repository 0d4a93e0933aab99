"""The cache pytree, and how sequences enter, leave and copy themselves (VestigeKV §4).

Rows arrive in the tail. A full tail is a block: it moves to the archive, which stays in position order and is never
rewritten. A keep mask says which archived rows are also in tier 1, a compact copy that is read densely every step.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.blocks import Device, device
from kernels_pallas.words import row_words, to_floats, word_dtype
from vestige_jax import checks
from vestige_jax.index import Basis, provisional
from vestige_jax.spec import CacheSpec

Array = jax.Array


class _Rows:
    """Rows stored as integer words, so that every move is bit-exact; W = C, on a TPU padded (kernels_pallas.words)."""

    words: Array

    @property
    def rows(self) -> Array:
        """The same bits as floats of the row dtype; on a TPU zeros may follow the C numbers of a row."""
        return to_floats(self.words)


def _pytree(cls):
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


@_pytree
class Tail(_Rows):
    """Rows of the block being filled: always attended."""

    words: Array  # [B, block, W] bits of the rows
    length: Array  # [B] int32, below block between calls


@_pytree
class Tier1(_Rows):
    """A compact copy of the kept rows, in position order."""

    words: Array  # [B, M, W] bits of the rows, M in whole groups of 8
    position: Array  # [B, M] int32, -1 past count
    count: Array  # [B] int32


@_pytree
class Archive(_Rows):
    """Every closed row, bit-exact, in position order; only ever appended to."""

    words: Array  # [B, A, W] bits of the rows
    sigma: Array  # [B, A] float32, high-frequency energy of the branch
    kept: Array  # [B, A] bool, also in tier 1
    closed: Array  # [B] int32, a multiple of block


@_pytree
class Index:
    """What a step reads of an archived row, beside its branch, to bound its score."""

    basis: Basis  # V [B, R, K] float32, orthonormal columns; or a balanced pair of maps
    step: Array  # [B, K] float32, the unit of a code of 8 or 4 bits; [B, 0] for codes that are floats
    code: Array  # [B, A, .] see CacheSpec.code_layout
    branch: Array  # [B, A, CacheSpec.branch_apart] words of the row
    bound: Array  # [B, E, A] float32: eta, and the rounding terms in the sound mode


@_pytree
class Calibration:
    """z and the entropy gate of a sequence, and the decode queries awaiting calibration."""

    z: Array  # [B] float32, multiplies residual * bound (1 in the sound mode)
    threshold: Array  # [B] float32 nats; a head is open above it
    clamped: Array  # [B] bool: too few hard samples, z = z_max
    queries: Array  # [B, N, H, C] row dtype; N = 64, or 0 when only `calibrate` calibrates
    positions: Array  # [B, N] int32, -1 empty
    count: Array  # [B] int32, decode queries seen
    installed: Array  # [B] bool, the provisional index has been replaced


@_pytree
class Merged:
    """Rows that stand for several closed ones, attended beside tier 1 (see vestige_jax.merging)."""

    rows: Array  # [B, W, R + C + 1] float32, [value | key | bias / scale]
    count: Array  # [B] int32


@_pytree
class Cache:
    """One layer's rows for B sequences. Static facts live in CacheSpec, never here."""

    tail: Tail
    tier1: Tier1
    archive: Archive
    index: Index
    calibration: Calibration
    fault: Array  # [B] int32, sticky bits of checks.Fault
    merged: Merged | None = None  # where CacheSpec(merged=W) has room for some


def init(spec: CacheSpec, batch: int) -> Cache:
    """An empty cache for `batch` sequences, with the provisional index: first K unit vectors, gate open, z_max."""
    spec.nbytes(batch)  # refuses a batch that is not a positive integer
    rows, slots, kept = row_words(spec.row_dim), spec.archive_rows, spec.tier1_slots
    word = word_dtype(spec.dtype)
    basis, step = provisional(spec, batch)
    numbers, kind = spec.code_layout
    return Cache(
        tail=Tail(jnp.zeros((batch, spec.block, rows), word), jnp.zeros(batch, jnp.int32)),
        tier1=Tier1(
            jnp.zeros((batch, kept, rows), word),
            jnp.full((batch, kept), -1, jnp.int32),
            jnp.zeros(batch, jnp.int32),
        ),
        archive=Archive(
            jnp.zeros((batch, slots, rows), word),
            jnp.zeros((batch, slots), jnp.float32),
            jnp.zeros((batch, slots), bool),
            jnp.zeros(batch, jnp.int32),
        ),
        index=Index(
            basis,
            step,
            jnp.zeros((batch, slots, numbers), kind),
            jnp.zeros((batch, slots, spec.branch_apart), word),
            jnp.zeros((batch, spec.certificate_terms, slots), jnp.float32),
        ),
        calibration=Calibration(
            jnp.full(batch, spec.provisional_z, jnp.float32),
            jnp.full(batch, -jnp.inf, jnp.float32),
            jnp.full(batch, spec.bound == "calibrated"),
            jnp.zeros((batch, spec.query_buffer, spec.num_heads, spec.row_dim), spec.dtype),
            jnp.full((batch, spec.query_buffer), -1, jnp.int32),
            jnp.zeros(batch, jnp.int32),
            jnp.zeros(batch, bool),
        ),
        fault=jnp.zeros(batch, jnp.int32),
        merged=no_merged(spec, batch),
    )


def no_merged(spec: CacheSpec, batch: int) -> Merged | None:
    """Room for merged rows and none there, or None where the spec has no room."""
    width = spec.latent_dim + spec.row_dim + 1
    rows = (batch, spec.merged, width)
    return Merged(jnp.zeros(rows, jnp.float32), jnp.zeros(batch, jnp.int32)) if spec.merged else None


@functools.cache
def _layout(spec: CacheSpec, target: Device) -> list[jax.ShapeDtypeStruct]:
    del target  # layouts differ by the device that is traced for
    return jax.tree.leaves(jax.eval_shape(lambda: init(spec, 1)))


def check_cache(name: str, cache: Cache) -> None:
    """Raise ValueError unless it is a Cache."""
    checks.require(isinstance(cache, Cache), f"{name} is a {type(cache).__name__}; expected a Cache, as init makes it")


def check_layout(spec: CacheSpec, cache: Cache) -> None:
    """Raise ValueError unless the cache was made by a spec of the same sizes and dtypes."""
    check_cache("cache", cache)
    layout = _layout(spec, device())
    merged = None if cache.merged is None else cache.merged.rows.shape[1]
    checks.require(
        (merged or 0) == spec.merged, f"cache.merged has room for {merged} rows; this spec has merged={spec.merged}"
    )
    for (path, array), wanted in zip(jax.tree_util.tree_leaves_with_path(cache), layout, strict=True):
        fits = array.shape[1:] == wanted.shape[1:] and array.dtype == wanted.dtype
        name = f"cache{jax.tree_util.keystr(path)}"
        shape = ", ".join(["B", *map(str, wanted.shape[1:])])
        checks.require(fits, f"{name} is {array.dtype}{list(array.shape)}; this spec has {wanted.dtype}[{shape}]")


def length(cache: Cache) -> Array:
    """Tokens held by each sequence, int32[B]."""
    check_cache("cache", cache)
    return cache.archive.closed + cache.tail.length


def take(spec: CacheSpec, cache: Cache, slot) -> Cache:
    """The sequence in `slot` alone, as a cache of batch 1."""
    return fork(spec, cache, jnp.asarray(slot)[None])


def put(spec: CacheSpec, cache: Cache, slot, single: Cache) -> Cache:
    """`cache` with its sequence `slot` replaced by `single` (batch 1, same spec)."""
    check_cache("cache", cache)
    check_cache("single", single)
    checks.slot(cache, slot)
    checks.same_layout(cache, single)
    return jax.tree.map(lambda all_, one: all_.at[slot].set(one[0]), cache, single)


def reset(spec: CacheSpec, cache: Cache, slot) -> Cache:
    """`cache` with sequence `slot` empty again, its calibration and fault cleared."""
    return put(spec, cache, slot, init(spec, 1))


def fork(spec: CacheSpec, cache: Cache, slots) -> Cache:
    """A cache whose sequence i is a copy of sequence slots[i]; slots int32[N]."""
    check_cache("cache", cache)
    checks.slot(cache, slots)
    return jax.tree.map(lambda x: jnp.take(x, jnp.asarray(slots), axis=0), cache)


def grow(spec: CacheSpec, cache: Cache) -> Cache:
    """The same sequences in the layout of a spec with room for more: larger capacity, ratio or budget, same block.

    Tier 1 stays as it is until the next re-rank. Raises ValueError where some part has more room than in the spec.
    """
    check_cache("cache", cache)
    batch = cache.fault.shape[0]
    wanted = dataclasses.replace(init(spec, batch), merged=cache.merged)
    same = jax.tree.structure(cache) == jax.tree.structure(wanted)
    checks.require(same, f"cache was made by a spec of another index than index={spec.index!r}, or another calibration")
    for (path, small), large in zip(jax.tree_util.tree_leaves_with_path(cache), jax.tree.leaves(wanted), strict=True):
        fits = small.dtype == large.dtype and all(a <= b for a, b in zip(small.shape, large.shape, strict=True))
        name = f"cache{jax.tree_util.keystr(path)}"
        checks.require(fits, f"{name} is {small.dtype}{list(small.shape)}, more than {large.dtype}{list(large.shape)}")
    return jax.tree.map(lambda small, large: lax.dynamic_update_slice(large, small, [0] * small.ndim), cache, wanted)
