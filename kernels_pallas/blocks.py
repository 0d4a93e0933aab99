"""Which device a kernel is traced for, and the block sizes it runs with there."""

import dataclasses

import jax
from jax.sharding import get_abstract_mesh

TOGETHER = 8  # rows that lie together in a TPU's memory: the least that one copy may move


@dataclasses.dataclass(frozen=True)
class TpuBlocks:
    """Block sizes of the Mosaic TPU kernels.

    attend_rows     rows of a contiguous range read at once.
    attend_queries  queries attended at once; more of them read the rows again.
    splits          interleaved parts of the range, one a core: 2 where one device is two cores.
    gather_rows     rows of a fetch list held at once: as many row copies are in flight.
    scan_rows       archived rows scanned at once.
    """

    attend_rows: int = 1024
    attend_queries: int = 256
    splits: int = 1
    gather_rows: int = 64
    scan_rows: int = 4096


@dataclasses.dataclass(frozen=True)
class GpuBlocks:
    """Block sizes of the Mosaic GPU kernels.

    attend_rows rows that a thread block attends at once.
    attend_ctas thread blocks of an attend in all: one to a multiprocessor.
    gather_rows rows of a fetch list that a thread block attends at once; two blocks of them are on their way.
    gather_splits   parts of a fetch list, live or not: each leaves 128 KB to be added up, as much as four blocks bring.
    scan_rows   archived rows that a thread block scans at once.
    scan_ctas   thread blocks of a scan in all: two to a multiprocessor.
    stages      blocks on their way into shared memory at once.
    register_operands   an attend's weights go to the tensor cores from registers; False: by way of shared memory,
                which small rows leave room for and interpreters need.
    """

    attend_rows: int = 64
    attend_ctas: int = 132
    gather_rows: int = 32
    gather_splits: int = 32
    scan_rows: int = 128
    scan_ctas: int = 264
    stages: int = 2
    register_operands: bool = True


@dataclasses.dataclass(frozen=True)
class XlaBlocks:
    """How much plain XLA holds of a buffer at once.

    rows        slots of a chunk, on any device but a CPU and for many queries.
    few         queries of a decode step, at most. On a CPU their chunks are cut to its caches:
    numbers     numbers of a chunk as float32, over all its columns: the caches of two cores hold them.
    least       slots of a chunk of what is left over, less than a chunk.
    """

    rows: int = 1024
    few: int = 128
    numbers: int = 640 << 10
    least: int = 128


XLA = XlaBlocks()


# Devices whose two cores share one program, and those with less on-chip memory a core (v4, v5p: 16 to 64 MiB VMEM).
_TPU = {
    "TPU v4": TpuBlocks(attend_rows=512, splits=2, scan_rows=2048),
    "TPU v5": TpuBlocks(splits=2),
    "TPU v5p": TpuBlocks(splits=2),
}


@dataclasses.dataclass(frozen=True)
class Device:
    """What kernels need to know of a device."""

    platform: str  # "cpu", "gpu" or "tpu"
    kind: str  # "TPU v5 lite", "NVIDIA H200", ...


def device() -> Device:
    """The device being traced for: that of the mesh in use where it names one, else jax's default device."""
    target = get_abstract_mesh().abstract_device
    if target is not None and target.platform is not None:
        return Device(target.platform, target.device_kind)
    default = jax.config.jax_default_device
    if default is None or isinstance(default, str):
        default = jax.devices(default)[0]
    return Device(default.platform, default.device_kind)


def tpu_blocks(kind: str, *, row_bytes: int) -> TpuBlocks:
    """The table's entry, or the default, with fewer rows at once where rows are wide: a block stays under 4 MiB."""
    blocks = _TPU.get(kind, TpuBlocks())
    fit = max(128, (4 << 20) // row_bytes // 128 * 128)
    return dataclasses.replace(blocks, attend_rows=min(blocks.attend_rows, fit))


def xla_chunks(batch: int, slots: int, numbers: int, queries: int) -> tuple[int, tuple[int, ...]]:
    """Of how many sequences at once, and of how many slots, first and then of what is left over, chunks are.

    A slot holds `numbers`; `queries` are asked of it at once.
    """
    if device().platform != "cpu" or queries > XLA.few:
        return batch, (min(XLA.rows, slots),)
    least, most = min(XLA.least, slots), _power_of_two(XLA.numbers // max(numbers, 1))
    group = batch if batch * min(slots, XLA.least) <= most else 1
    size = min(_power_of_two(max(most // group, 1)), _power_of_two(slots - 1))
    if group == batch and slots - size < least:
        return batch, (slots,)
    return group, (size, least) if size > least else (least,)


def _power_of_two(n: int) -> int:
    """The largest power of two that is at most n."""
    return 1 << max(n, 1).bit_length() - 1
