"""Small caches for the tests, and the one comparison of a cache with the oracle."""

import jax
import jax.numpy as jnp
import numpy as np

import vestige_jax as vj
from tests import oracle

# One spec and shape for most tests: every other compiles anew. Five blocks of 8 rows, then a tail that can't fill.
BATCH = 3
TIME = 27
RAGGED = np.array([TIME, 0, 16])
SHAPE = dict(latent_dim=6, branch_dim=4, num_heads=2, scale=0.3, capacity=44)
SPEC = vj.CacheSpec(**SHAPE, block=8, ratio=0.25, sinks=2, rank=3, fetch=16, dtype=jnp.float32)


def random_rows(seed, *shape, spec=SPEC):
    """Rows in the spec's dtype, as numpy."""
    return np.random.default_rng(seed).normal(size=(*shape, spec.row_dim)).astype(spec.dtype)


def random_queries(seed, *shape, spec=SPEC):
    return random_rows(seed, *shape, spec.num_heads, spec=spec)


def append(spec, cache, rows, lengths=None):
    """`vj.append` with the rows padded to TIME, so that all run one program."""
    time = rows.shape[1]
    lengths = np.full(len(rows), time) if lengths is None else lengths
    padded = np.pad(rows, ((0, 0), (0, max(0, TIME - time)), (0, 0)))
    return vj.append(spec, cache, padded, lengths)


# Compiled for SPEC, once for all tests.
append_jit = jax.jit(lambda cache, rows, lengths: vj.append(SPEC, cache, rows, lengths))
step_jit = jax.jit(lambda cache, query, row, active: vj.step(SPEC, cache, query, row, active))


def filled(spec, rows, lengths=None):
    """A new cache after one append of rows [B, T, C]."""
    return append(spec, vj.init(spec, len(rows)), rows, lengths)


def sequences(spec, rows, lengths=None):
    """What the oracle makes of the same append."""
    lengths = [rows.shape[1]] * len(rows) if lengths is None else lengths
    made = [oracle.Sequence(spec) for _ in rows]
    for sequence, one, length in zip(made, rows, lengths, strict=True):
        for row in one[:length]:
            sequence.write(row)
    return made


def bits(array):
    """The bit pattern of an array, so that -0.0, NaN and subnormal numbers are told apart."""
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.kind in "fV" else array


def assert_same(one, other):
    """Two pytrees hold the same bits."""
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(bits(a), bits(b)), one, other)


def settled(cache):
    """What a cache holds, without what an earlier block left in the unused part of the tail."""
    used = np.arange(cache.tail.rows.shape[1]) < np.asarray(cache.tail.length)[:, None]
    tail = np.where(used[..., None], np.asarray(cache.tail.rows), 0)
    return tail, cache.tail.length, cache.tier1, cache.archive, cache.index, cache.calibration, cache.fault


def kept_positions(cache, b):
    return np.flatnonzero(np.asarray(cache.archive.kept)[b]).tolist()


_where = jax.jit(vj.where, static_argnums=0)


def assert_partition(spec, cache, expected):
    """Every written row is in its tier with the bits that were appended, and nowhere else."""
    cache_length, tiers = np.asarray(vj.length(cache)), np.asarray(_where(spec, cache))
    cache = jax.tree.map(np.asarray, cache)
    for b, sequence in enumerate(expected):
        rows = np.stack([*sequence.rows, np.zeros(spec.row_dim, spec.dtype)])[:-1]
        closed = sequence.closed
        assert cache_length[b] == len(rows)
        assert tiers[b].tolist() == sequence.tiers()

        assert cache.archive.closed[b] == closed
        np.testing.assert_array_equal(bits(cache.archive.rows[b, :closed]), bits(rows[:closed]))
        np.testing.assert_allclose(cache.archive.sigma[b, :closed], sequence.sigma, rtol=1e-4, atol=1e-5)
        assert not cache.archive.kept[b, closed:].any()

        tail = cache.tail.length[b]
        assert tail == len(rows) - closed < spec.block
        np.testing.assert_array_equal(bits(cache.tail.rows[b, :tail]), bits(rows[closed:]))

        count = cache.tier1.count[b]
        assert cache.tier1.position[b, :count].tolist() == sequence.kept
        np.testing.assert_array_equal(bits(cache.tier1.rows[b, :count]), bits(rows[sequence.kept]))
        assert (cache.tier1.position[b, count:] == -1).all()
        assert (cache.tier1.rows[b, count:] == 0).all()
    assert not cache.fault.any()
