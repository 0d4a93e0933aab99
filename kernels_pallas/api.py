"""Public entry: pick an implementation for the device, refuse loudly what cannot run."""

import jax
import jax.numpy as jnp

from kernels_pallas import attend_tpu, blocks, fetchlist, reference, scan_tpu
from kernels_pallas.fetchlist import FetchList, Margins
from kernels_pallas.parts import Part
from kernels_pallas.words import take_rows

Array = jax.Array

IMPLEMENTATIONS = ("xla", "mosaic_tpu")

_PLATFORM = {"mosaic_tpu": "tpu"}


def resolve(implementation: str | None, problem: str | None = None) -> str:
    """The implementation that runs: None picks the best for the device being traced for (see `blocks.device`).

    `problem` says why these arguments can't run on the device's own kernels: None falls back to XLA, a choice raises.
    Raises ValueError for a choice that can't run, with the reason.
    """
    device = blocks.device()
    if implementation is None:
        own = next((name for name, platform in _PLATFORM.items() if platform == device.platform), "xla")
        return "xla" if problem else own
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} is not known; choose None or from {list(IMPLEMENTATIONS)}")
    if implementation == "xla":
        return "xla"
    if device.platform != _PLATFORM[implementation]:
        problem = f"it needs a {_PLATFORM[implementation].upper()}, and this program is for a {device.platform.upper()}"
    if problem:
        raise ValueError(
            f"implementation={implementation!r} cannot run here: {problem}; pass None or 'xla' (plain XLA, any device)"
        )
    return implementation


def attend(
    query: Array, rows: Array, length: Array, *, latent_dim: int, scale: float, implementation: str | None = None
) -> Part:
    """Exact attention of every query over the first rows of a buffer (VestigeKV §1).

    s_q(u) = scale * <query_q, row_u>; out_q = sum_u softmax_u(s_q) * row_u[:R].

    Args
      query [B, Q, C], unscaled; rows [B, S, W], W >= C, words or floats, what is past C is not looked at; length int32
        [B] or [B, Q]: rows u < length count.
      latent_dim R <= C: the leading numbers of a row are its value. Rows past the longest length cost nothing.
    Returns a Part. Raises ValueError if the implementation can't run here.
    """
    kind = resolve(implementation, _tpu_problem(rows))
    if kind == "xla" or rows.shape[1] == 0:
        return reference.attend(query, rows, length, latent_dim=latent_dim, scale=scale)
    return attend_tpu.attend(query, rows, length, latent_dim=latent_dim, scale=scale, blocks=_tpu_blocks(rows))


def attend_list(
    query: Array,
    rows: Array,
    position: Array,
    count: Array,
    *,
    latent_dim: int,
    scale: float,
    implementation: str | None = None,
) -> Part:
    """Exact attention of every query over rows gathered by a list: `attend` with the gather fused in (VestigeKV §3).

    Args
      query [B, Q, C], rows [B, S, W] as in `attend`; position int32 [B, F]: the list; count int32 [B]: entries
        f < count are used, each once (duplicates count twice), and must lie in [0, S).
    Returns a Part; of an empty list the empty one. Raises ValueError if the implementation can't run here.
    """
    problem = _tpu_problem(rows)
    if rows.shape[1] % attend_tpu.GROUP:
        problem = f"rows has {rows.shape[1]} slots and a TPU copies {attend_tpu.GROUP} rows that lie together"
    kind = resolve(implementation, problem)
    if kind == "xla" or 0 in (rows.shape[1], position.shape[1]):
        gathered = take_rows(rows, position)
        return reference.attend(query, gathered, count, latent_dim=latent_dim, scale=scale)
    return attend_tpu.attend_list(
        query, rows, position, count, latent_dim=latent_dim, scale=scale, blocks=_tpu_blocks(rows)
    )


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
    latent_dim: int | None = None,
    implementation: str | None = None,
) -> Margins:
    """Margin by which a row may beat what is attended, the best over heads (VestigeKV §3).

    margin(u) = max_h <branch_h, row_u[R : R + P]> + <sketch_h, code_u> + <residual_h, bound_u> - threshold_h.

    Args
      branch [B, H, P], sketch [B, H, K], residual [B, H, E], threshold [B, H]: the prepared query, all float32, scale
        and z folded in; threshold +inf closes a head. P = 0 or K = 0 leaves a term out.
      rows [B, S, W] (the branch is read in place), code [B, S, K], bound [B, E, S] float32.
      member bool [B, S]: rows that may fire; length int32 [B]: rows u < length exist. Blocks past it cost nothing.
      latent_dim R: where the branch begins; None: it ends the row.
    Returns Margins: float32 [B, S], -inf where a row can't fire, and the fired count of every 128 rows. No score
    leaves the chip. Raises ValueError if the implementation can't run here.
    """
    latent_dim = rows.shape[2] - branch.shape[2] if latent_dim is None else latent_dim
    problem = _tpu_problem(rows)
    if code.shape[2] and code.dtype not in (jnp.bfloat16, jnp.float32):
        problem = f"code is {code.dtype}, and the TPU compiler loads bfloat16 and float32 only"
    kind = resolve(implementation, problem)
    if kind == "xla" or rows.shape[1] == 0:
        margin = reference.scan(
            branch, sketch, residual, threshold, rows, code, bound, member, length, latent_dim=latent_dim
        )
        return Margins(margin, fetchlist.count_fired(margin))
    return Margins(*scan_tpu.scan(
        branch, sketch, residual, threshold, rows, code, bound, member, length, latent_dim=latent_dim,
        blocks=_tpu_blocks(rows),
    ))  # fmt: skip


def compact(margins: Margins, width: int, *, implementation: str | None = None) -> FetchList:
    """The first `width` fired rows in position order: what is to be fetched (VestigeKV §3).

    Deterministic, without scatters or atomics, and from the counts of the scan: for a short list no second pass is made
    over the rows. Counts of a sequence set to 0 take it off the list.

    Args: margins as `scan` returns them; width F, static.
    Returns FetchList: position int32 [B, F] ascending, S past the count; count int32 [B]; overflowed bool [B].
    """
    return fetchlist.compact(margins, width, compare_all=resolve(implementation) == "mosaic_tpu")


def _tpu_problem(rows: Array) -> str | None:
    if rows.dtype.name in ("uint16", "uint32", "bfloat16", "float32"):
        return None
    return f"rows are {rows.dtype}, and the kernels read bfloat16 and float32, as such or as words"


def _tpu_blocks(rows: Array) -> blocks.TpuBlocks:
    return blocks.tpu_blocks(blocks.device().kind, row_bytes=rows.shape[2] * rows.dtype.itemsize)
