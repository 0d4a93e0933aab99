"""Public entry: pick an implementation, refuse loudly what cannot run. Kernels are imported when they are used."""

import jax
import jax.numpy as jnp

from kernels_pallas import blocks, checks, codes, fetchlist, reference
from kernels_pallas.fetchlist import FetchList, Margins
from kernels_pallas.parts import Part
from kernels_pallas.words import take_rows

Array = jax.Array

IMPLEMENTATIONS = ("xla", "mosaic_tpu", "mosaic_gpu")

# What None picks on a platform. Kernels that have not run on the hardware are not picked: they are asked for by name.
AUTOMATIC = {"cpu": "xla", "gpu": "xla", "tpu": "xla"}

_PLATFORM = {"mosaic_tpu": "tpu", "mosaic_gpu": "gpu"}
_HOPPER = ("NVIDIA H100", "NVIDIA H200", "NVIDIA H20", "NVIDIA H800", "NVIDIA GH200")
_SHARED = 232_448 - 8_192  # bytes of shared memory on Hopper, less what bounds, members and barriers take


def resolve(implementation: str | None, problems: dict[str, str | None] | None = None) -> str:
    """The implementation that runs on the device being traced for (see `blocks.device`).

    None is plain XLA on every device: compilers and interpreters have proved the Mosaic kernels, hardware has not yet.
    "mosaic_tpu" (a TPU) and "mosaic_gpu" (a Hopper GPU) are asked for by name.
    `problems` says by kernel why these arguments can't run on it. Raises ValueError for a choice that can't run, with
    the reason.
    """
    device = blocks.device()
    problems = {"mosaic_tpu": None, "mosaic_gpu": None} | (problems or {})
    if device.platform == "gpu" and not device.kind.startswith(_HOPPER):
        problems["mosaic_gpu"] = f"it needs a Hopper GPU, and this program is for {device.kind}"
    if implementation is None:
        automatic = AUTOMATIC.get(device.platform, "xla")
        return "xla" if problems.get(automatic) else automatic
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} is not known; choose None or from {list(IMPLEMENTATIONS)}")
    if implementation == "xla":
        return "xla"
    problem = problems[implementation]
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
    Returns a Part. Raises ValueError for a bad shape, dtype, latent_dim or scale, or if the implementation can't run
    here.
    """
    checks.attend(query, rows, length, latent_dim, scale)
    kind = resolve(implementation, {"mosaic_tpu": _tpu_problem(rows), "mosaic_gpu": _attend_problem(rows, latent_dim)})
    if kind == "xla" or rows.shape[1] == 0:
        return reference.attend(query, rows, length, latent_dim=latent_dim, scale=scale)
    if kind == "mosaic_gpu":
        from kernels_pallas import attend_gpu

        return attend_gpu.attend(query, rows, length, latent_dim=latent_dim, scale=scale, blocks=blocks.GpuBlocks())
    from kernels_pallas import attend_tpu

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
    """Exact attention of every query over rows gathered by a list (VestigeKV §3).

    The gather is part of the kernels: a TPU copies the 8 rows that lie together around an entry, a Hopper GPU single
    rows. Without them XLA gathers, and `attend` reads the copies.

    Args
      query [B, Q, C], rows [B, S, W] as in `attend`; position int32 [B, F]: the list; count int32 [B]: entries
        f < count are used, each once (duplicates count twice), and must lie in [0, S).
    Returns a Part; of an empty list the empty one. Raises ValueError as `attend` does; entries are not looked at.
    """
    checks.attend_list(query, rows, position, count, latent_dim, scale)
    problem = _tpu_problem(rows)
    if rows.shape[1] % blocks.TOGETHER:
        problem = f"rows has {rows.shape[1]} slots and a TPU copies {blocks.TOGETHER} rows that lie together"
    kind = resolve(implementation, {"mosaic_tpu": problem, "mosaic_gpu": _list_problem(rows, latent_dim)})
    if kind == "xla" or 0 in (rows.shape[1], position.shape[1]):
        gathered = take_rows(rows, position)
        return reference.attend(query, gathered, count, latent_dim=latent_dim, scale=scale)
    if kind == "mosaic_gpu":
        from kernels_pallas import attend_gpu

        return attend_gpu.attend_list(
            query, rows, position, count, latent_dim=latent_dim, scale=scale, blocks=blocks.GpuBlocks()
        )
    from kernels_pallas import attend_tpu

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
      rows [B, S, W] (the branch is read in place), code [B, S, K] floats, or whole steps in int8 or packed two to a
        byte (`kernels_pallas.codes`, [B, S, K / 2]; their size is in the sketch), bound [B, E, S] float32.
      member bool [B, S]: rows that may fire; length int32 [B]: rows u < length exist. Blocks past it cost nothing.
      latent_dim R: where the branch begins; None: it ends the row.
    Returns Margins: float32 [B, S], -inf where a row can't fire, and the fired count of every 128 rows. No score
    leaves the chip. Raises ValueError for a bad shape, dtype or latent_dim, or if the implementation can't run here.
    """
    checks.scan(branch, sketch, residual, threshold, rows, code, bound, member, length, latent_dim)
    latent_dim = rows.shape[2] - branch.shape[2] if latent_dim is None else latent_dim
    tpu_problem = _tpu_problem(rows) or _tpu_code_problem(code)
    gpu_problem = _scan_problem(branch, rows, code, latent_dim)
    kind = resolve(implementation, {"mosaic_tpu": tpu_problem, "mosaic_gpu": gpu_problem})
    if kind == "xla" or rows.shape[1] == 0:
        margin = reference.scan(
            branch, sketch, residual, threshold, rows, code, bound, member, length, latent_dim=latent_dim
        )
        return Margins(margin, fetchlist.count_fired(margin))
    if kind == "mosaic_gpu":
        from kernels_pallas import scan_gpu

        margin = scan_gpu.scan(
            branch, sketch, residual, threshold, rows, code, bound, member, length, latent_dim=latent_dim,
            blocks=blocks.GpuBlocks(),
        )  # fmt: skip
        return Margins(margin, fetchlist.count_fired(margin))
    from kernels_pallas import scan_tpu

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
    Raises ValueError for a bad shape or dtype, a width that is no integer >= 0, or an unknown implementation.
    """
    checks.compact(margins, width)
    resolve(implementation)  # plain XLA whatever is chosen; what is unknown is refused
    return fetchlist.compact(margins, width, platform=blocks.device().platform)


def _tpu_problem(rows: Array) -> str | None:
    if rows.dtype.name in ("uint16", "uint32", "bfloat16", "float32"):
        return None
    return f"rows are {rows.dtype}, and the kernels read bfloat16 and float32, as such or as words"


def _tpu_code_problem(code: Array) -> str | None:
    if code.shape[2] and code.dtype not in (jnp.bfloat16, jnp.float32, *codes.NARROW):
        return f"code is {code.dtype}, and the TPU kernel reads bfloat16, float32, and codes of 8 and 4 bits"
    if code.shape[2] and code.dtype in codes.NARROW and blocks.device().kind == "TPU v4":
        return "code has 8 or 4 bits, and the matrix units of a TPU v4 multiply no int8"
    if code.dtype == codes.PACKED and code.shape[2] % 4:
        return f"rank {codes.numbers(code)} is no multiple of 8, and the TPU kernel unpacks 8 numbers of 4 bits at once"
    return None


def _attend_problem(rows: Array, latent_dim: int) -> str | None:
    """Why the GPU kernel can't attend these rows."""
    width = rows.shape[2]
    if rows.dtype.name not in ("uint16", "bfloat16"):
        return f"rows are {rows.dtype}, and Hopper's tensor cores multiply bfloat16 exactly, float32 not"
    if width % 16 or latent_dim % 32 or (latent_dim > 128 and latent_dim % 128):
        return f"latent_dim={latent_dim} of {width} does not split into tiles: 16 columns, and 32 or 128 of the latent"
    return None if width <= 592 else f"rows of {width} leave no room for two blocks in shared memory"


def _list_problem(rows: Array, latent_dim: int) -> str | None:
    """Why the GPU kernel can't gather and attend these rows."""
    wide = f"rows of {rows.shape[2]} leave no room for two blocks of single rows in shared memory"
    return _attend_problem(rows, latent_dim) or (wide if rows.shape[2] > 576 else None)


def _scan_problem(branch: Array, rows: Array, code: Array, latent_dim: int) -> str | None:
    """Why the GPU kernel can't scan this index."""
    heads, branch_dim = branch.shape[1:]
    if rows.dtype.name not in ("uint16", "bfloat16"):
        return f"rows are {rows.dtype}, and Hopper's tensor cores multiply bfloat16 exactly, float32 not"
    if code.shape[2] and code.dtype not in (jnp.bfloat16, jnp.float16, *codes.NARROW):
        return f"code is {code.dtype}, and the GPU kernel reads 16-bit floats, and codes of 8 and 4 bits"
    if branch_dim % 16 or latent_dim % 16 or rows.shape[2] % 8:
        return f"branch_dim={branch_dim} and latent_dim={latent_dim} must be multiples of 16"
    rank = codes.numbers(code)
    if heads > 256:
        return f"{heads} heads are more than one copy moves, 256"
    if branch_dim + rank > 272:
        return f"branch_dim={branch_dim} and rank {rank} are too wide for shared memory"
    if code.shape[2] > 256:
        return f"a code of {code.shape[2]} is wider than one copy, 256"
    need = _scan_shared(heads, branch_dim, code)
    wide = f"{heads} heads, branch_dim={branch_dim} and rank {rank} need {need} bytes of shared memory, of {_SHARED}"
    return wide if need > _SHARED else None


def _scan_shared(heads: int, branch_dim: int, code: Array) -> int:
    """Bytes of a scan's queries, blocks on their way, and codes of 4 bits unpacked; see `scan_gpu`."""
    fit, packed = blocks.GpuBlocks(), code.dtype == codes.PACKED
    padded, depth = (-(-n // 32) * 32 for n in (heads, code.shape[2] * code.dtype.itemsize))
    query = 4 * depth * (1 + packed) if code.dtype in codes.NARROW else 3 * depth
    unpacked = 2 * fit.scan_rows * depth if packed else 0
    return padded * (6 * branch_dim + query) + fit.stages * fit.scan_rows * (2 * branch_dim + depth) + unpacked


def _tpu_blocks(rows: Array) -> blocks.TpuBlocks:
    return blocks.tpu_blocks(blocks.device().kind, row_bytes=rows.shape[2] * rows.dtype.itemsize)
