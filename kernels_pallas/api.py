"""Public entry: pick an implementation, refuse loudly what cannot run."""

import jax

from kernels_pallas import reference
from kernels_pallas.parts import Part

Array = jax.Array

IMPLEMENTATIONS = ("xla",)


def resolve(implementation: str | None) -> str:
    """The implementation that runs: None picks the best for the device. Raises ValueError for one that can't run."""
    if implementation in (None, "xla"):
        return "xla"
    raise ValueError(
        f"implementation={implementation!r} cannot run: this version has {list(IMPLEMENTATIONS)} only; "
        "pass None or 'xla' (plain XLA, any device)"
    )


def attend(
    query: Array, rows: Array, length: Array, *, latent_dim: int, scale: float, implementation: str | None = None
) -> Part:
    """Exact attention of every query over the first rows of a buffer (VestigeKV §1).

    s_q(u) = scale * <query_q, row_u>; out_q = sum_u softmax_u(s_q) * row_u[:R].

    Args
      query [B, Q, C], rows [B, S, C], unscaled; length int32 [B] or [B, Q]: rows u < length count.
      latent_dim R <= C: the leading numbers of a row are its value. Rows past the longest length cost nothing.
    Returns a Part. Raises ValueError if the implementation can't run here.
    """
    resolve(implementation)
    return reference.attend(query, rows, length, latent_dim=latent_dim, scale=scale)


def scan(
    branch: Array,
    sketch: Array,
    residual: Array,
    threshold: Array,
    rows: Array,
    code: Array,
    bound: Array,
    member: Array,
    length: Array,
    *,
    implementation: str | None = None,
) -> Array:
    """Margin by which a row may beat what is attended, the best over heads (VestigeKV §3).

    margin(u) = max_h <branch_h, row_u[-P:]> + <sketch_h, code_u> + <residual_h, bound_u> - threshold_h.

    Args
      branch [B, H, P], sketch [B, H, K], residual [B, H, E], threshold [B, H]: the prepared query, all float32, scale
        and z folded in; threshold +inf closes a head.
      rows [B, S, C] (the branch is read in place), code [B, S, K], bound [B, E, S] float32.
      member bool [B, S]: rows that may fire; length int32 [B]: rows u < length exist. Blocks past it cost nothing.
    Returns float32 [B, S], -inf where a row can't fire. Raises ValueError if the implementation can't run here.
    """
    resolve(implementation)
    return reference.scan(branch, sketch, residual, threshold, rows, code, bound, member, length)
