"""Bad arguments, answered before anything is compiled: from shapes, dtypes and Python numbers, never from values."""

import math
import numbers

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import codes
from kernels_pallas.fetchlist import GROUP, Margins
from kernels_pallas.words import float_dtype

Array = jax.Array

_KINDS = {
    "floats": lambda array: jnp.issubdtype(array.dtype, jnp.floating),
    "integers": lambda array: jnp.issubdtype(array.dtype, jnp.integer),
    "bool": lambda array: array.dtype == bool,
    "floats, or words of uint16 or uint32": lambda array: jnp.issubdtype(float_dtype(array), jnp.floating),
    "floats, int8, or uint8 with two numbers a byte": lambda array: (
        array.dtype in codes.NARROW or jnp.issubdtype(array.dtype, jnp.floating)
    ),
}
FLOATS, INTEGERS, BOOL, ROWS, CODES = _KINDS


def attend(query: Array, rows: Array, length: Array, latent_dim: int, scale: float) -> None:
    """Raise ValueError for a bad argument of `kernels_pallas.attend`."""
    sizes = _asked(query, rows, latent_dim, scale)
    _array(sizes, "length", length, "BQ" if np.ndim(length) == 2 else "B", INTEGERS)


def attend_list(query: Array, rows: Array, position: Array, count: Array, latent_dim: int, scale: float) -> None:
    """Raise ValueError for a bad argument of `kernels_pallas.attend_list`."""
    sizes = _asked(query, rows, latent_dim, scale)
    _array(sizes, "position", position, "BF", INTEGERS)
    _array(sizes, "count", count, "B", INTEGERS)


def _asked(query, rows, latent_dim, scale) -> dict[str, int]:
    sizes = {}
    _array(sizes, "query", query, "BQC", FLOATS)
    _array(sizes, "rows", rows, "BSW", ROWS)
    asked, width = sizes["C"], sizes["W"]
    _require(asked <= width, f"query has C={asked} columns; expected at most the W={width} of rows")
    _whole("latent_dim", latent_dim, 1, asked, "the columns of query")
    number = isinstance(scale, numbers.Real) and math.isfinite(scale)
    array = isinstance(scale, (jax.Array, np.ndarray)) and scale.shape == ()
    _require(number or array, f"scale={scale!r} must be a finite number")
    return sizes


def scan(branch, sketch, residual, threshold, rows, code, bound, member, length, latent_dim: int | None) -> None:
    """Raise ValueError for a bad argument of `kernels_pallas.scan`."""
    sizes = {}
    _array(sizes, "branch", branch, "BHP", FLOATS)
    _array(sizes, "sketch", sketch, "BHK", FLOATS)
    _array(sizes, "residual", residual, "BHE", FLOATS)
    _array(sizes, "threshold", threshold, "BH", FLOATS)
    _array(sizes, "rows", rows, "BSW", ROWS)
    _array(sizes, "code", code, "BSN", CODES)
    rank, stored = sizes["K"], codes.numbers(code)
    _require(
        stored == rank, f"code has shape {code.shape} of {code.dtype}, K={stored}; expected the K={rank} of sketch"
    )
    _array(sizes, "bound", bound, "BES", FLOATS)
    _array(sizes, "member", member, "BS", BOOL)
    _array(sizes, "length", length, "B", INTEGERS)
    width, read = sizes["W"], sizes["P"]
    _require(read <= width, f"branch has P={read} columns; expected at most the W={width} of rows")
    if latent_dim is not None:
        _whole("latent_dim", latent_dim, 0, width - read, f"where P={read} of W={width} columns can begin")


def compact(margins: Margins, width: int) -> None:
    """Raise ValueError for a bad argument of `kernels_pallas.compact`."""
    _require(isinstance(margins, Margins), f"margins is a {type(margins).__name__}; expected Margins, as scan returns")
    sizes = {}
    _array(sizes, "margins.margin", margins.margin, "BS", FLOATS)
    sizes["G"] = -(-sizes["S"] // GROUP)
    _array(sizes, "margins.fired", margins.fired, "BG", INTEGERS)
    _whole("width", width, 0)


def _array(sizes: dict[str, int], name: str, array, axes: str, kind: str):
    """Raise unless it is an array of this kind, with these axes: of the size that is known, else they are known now."""
    legend = f"[{', '.join(axes)}]"
    _require(hasattr(array, "shape"), f"{name}={array!r}; expected an array {legend}")
    fits = len(array.shape) == len(axes) and all(
        sizes.setdefault(axis, size) == size for axis, size in zip(axes, array.shape, strict=True)
    )
    wanted = tuple(sizes.get(axis, "any") for axis in axes)
    _require(fits, f"{name} has shape {array.shape}; expected {legend} = {wanted}")
    _require(_KINDS[kind](array), f"{name} is {array.dtype}; expected {kind}")


def _whole(name: str, value, least: int, most: int | None = None, what: str = ""):
    """Raise unless it is a Python integer in least..most."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    fits = whole and least <= value and (most is None or value <= most)
    wanted = f">= {least}" if most is None else f"in {least}..{most}, {what}"
    _require(fits, f"{name}={value!r} must be an integer {wanted}")


def _require(condition: bool, message: str):
    if not condition:
        raise ValueError(message)
