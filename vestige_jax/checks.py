"""Bad input, answered before compilation; inside jit, the bits of the fault flag."""

import enum

import jax
import jax.numpy as jnp
import numpy as np


class Fault(enum.IntFlag):
    """Why a write was dropped. Sticky per sequence until `reset`."""

    CAPACITY = 1
    NON_FINITE = 2
    LENGTH = 4


def require(condition: bool, message: str):
    """Raise ValueError(message) unless the condition holds."""
    if not condition:
        raise ValueError(message)


def concrete(*arrays) -> bool:
    """True when every array has values now, that is, outside jit."""
    return not any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves(arrays))


def shape(name: str, array, expected: tuple, legend: str):
    """Raise unless the array has the expected shape; None entries are free. `legend` names the axes."""
    actual = jnp.shape(array)
    fits = len(actual) == len(expected) and all(e in (None, a) for a, e in zip(actual, expected, strict=True))
    wanted = tuple("any" if e is None else e for e in expected)
    require(fits, f"{name} has shape {actual}; expected {legend} = {wanted}")


def floating(name: str, array):
    """Raise unless the array is of a floating dtype."""
    require(
        jnp.issubdtype(jnp.result_type(array), jnp.floating),
        f"{name} has dtype {jnp.result_type(array)}; expected a float",
    )


def integer(name: str, array):
    """Raise unless the array is of an integer dtype."""
    kind = jnp.result_type(array)
    require(jnp.issubdtype(kind, jnp.integer), f"{name} has dtype {kind}; expected integers")


def finite(name: str, array, dtype=None, where=True):
    """Raise, when values are known, if any (`where` its leading axes are true) is NaN or infinite in the dtype."""
    if concrete(array, where):
        trailing = tuple(range(jnp.ndim(where), jnp.ndim(array)))
        good = jnp.isfinite(jnp.asarray(array, dtype)).all(trailing) | ~jnp.asarray(where)
        require(bool(good.all()), f"{name} holds NaN or infinite values; every value must be finite")


def lengths(name: str, values, batch: int, most: int):
    """Raise unless values is int[B] in [0, most]."""
    shape(name, values, (batch,), "[B]")
    integer(name, values)
    if concrete(values):
        bad = [int(v) for v in np.asarray(values) if not 0 <= v <= most]
        require(not bad, f"{name} holds {bad}; every length must lie in [0, {most}]")


def positions(name: str, values, capacity: int):
    """Raise unless values are integers in [-1, capacity); -1 means ignored."""
    integer(name, values)
    if concrete(values):
        bad = sorted({int(v) for v in np.ravel(values) if not -1 <= v < capacity})
        require(not bad, f"{name} holds {bad}; every position must lie in [0, capacity={capacity}), or be -1: ignored")


def slot(cache, slots):
    """Raise unless slots index sequences of the cache."""
    batch, slots = cache.fault.shape[0], jnp.asarray(slots)
    integer("slot", slots)
    if concrete(slots):
        bad = [int(s) for s in np.ravel(slots) if not 0 <= s < batch]
        require(not bad, f"slot {bad} is out of range; the cache holds sequences 0 to {batch - 1}")


def same_layout(cache, single):
    """Raise unless `single` is a batch-1 cache of the same spec."""
    for whole, one in zip(jax.tree.leaves(cache), jax.tree.leaves(single), strict=True):
        wanted = (1, *whole.shape[1:])
        fits = one.shape == wanted and one.dtype == whole.dtype
        require(
            fits, f"single has an array {one.dtype}{one.shape}; its spec must be the cache's: {whole.dtype}{wanted}"
        )


def describe_fault(bits: int) -> str:
    """The fault bits in words, for error messages."""
    words = {
        Fault.CAPACITY: "the capacity was exceeded (nothing was overwritten)",
        Fault.NON_FINITE: "a row or query held NaN or infinite values",
        Fault.LENGTH: "a length was negative or beyond the rows given",
    }
    return "; ".join(text for flag, text in words.items() if bits & flag) or "none"


def raise_on_fault(fault):
    """Raise RuntimeError naming every sequence whose fault flag is set; fault int32[..., B].

    ValueError for what isn't such an array.
    """
    fault = np.asarray(fault)
    require(fault.ndim >= 1 and fault.shape[-1] > 0, f"fault has shape {fault.shape}; expected [..., B], B >= 1")
    integer("fault", fault)
    bits = np.bitwise_or.reduce(fault.reshape(-1, fault.shape[-1]), axis=0)
    bad = [f"sequence {b}: {describe_fault(int(v))}" for b, v in enumerate(bits) if v]
    if bad:
        raise RuntimeError("cache fault: " + ", ".join(bad))
