"""VestigeKV in JAX: rows flow in, a partition decides where each lives, every step attends the rows that can matter.

Axis letters, here and in every docstring: B batch, T query time, S cache slot, H head, R latent, P branch, K sketch
rank, C = R + P cache row, A archive rows, M tier-1 rows, F fetched rows, N calibration queries, E bound terms.
"""

from vestige_jax.attention import attend_chunk
from vestige_jax.cache import Cache, fork, grow, init, length, put, reset, take
from vestige_jax.calibration import calibrate
from vestige_jax.checks import Fault, raise_on_fault
from vestige_jax.decode import Stats, append, attend, step
from vestige_jax.index import fit_basis
from vestige_jax.merging import merge_rows
from vestige_jax.partition import close, keep, keep_set, where
from vestige_jax.sigma import sigma
from vestige_jax.spec import CacheSpec

__version__ = "0.1.0"

__all__ = [
    "Cache",
    "CacheSpec",
    "Fault",
    "Stats",
    "append",
    "attend",
    "attend_chunk",
    "calibrate",
    "close",
    "fit_basis",
    "fork",
    "grow",
    "init",
    "keep",
    "keep_set",
    "length",
    "merge_rows",
    "put",
    "raise_on_fault",
    "reset",
    "sigma",
    "step",
    "take",
    "where",
]
