"""What a decode step has to move between memory and chip, counted from the sizes of what is stored (VestigeKV §3).

A compiler's own count leaves out what a kernel reads, or takes the kernel's word for it; where it can see, it counts
copies into on-chip memory and whole buffers that are updated in one row. This account counts each array once.

Published, per archived row: rho * 1152 + 260 * (1 - rho) + f * 1152 = 294 bytes for 1152, 3.9 times fewer. `Layout`
holds what a device adds to it.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a device stores and moves rows, in bytes.

    row      a stored row; on a TPU whole tiles of 128 numbers, so 1280 for 1152.
    branch   a branch, as the scan reads it: in place, or on a TPU beside the sketch; a balanced index has none.
    in_place the same where it lies in the row; on a TPU with the tile around it, so 256 for 128.
    code     a code, of floats or of few bits.
    bounds   the certificate's float32 numbers and the membership of a row.
    maps     what maps a query, of a sequence: V of a sketch, A of a balanced index.
    together rows that one copy of the fetch moves; 8 on a TPU.
    passes   times a fetched row crosses the memory bus; 3 where it is gathered into a copy that is then read.
    """

    row: int
    branch: int
    in_place: int
    code: int
    bounds: int = 5
    maps: int = 0
    together: int = 1
    passes: int = 1


MARGIN = 4  # float32, of every scanned row
TILE = 128  # numbers in a tile's row


def layout(
    platform: str, latent: int, branch: int, rank: int, itemsize: int = 2, *, kind: str = "sketch", bits: int = 16
) -> Layout:
    """Of kernels on 'tpu', or on 'cuda', which reads and gathers single rows; kind and bits are those of the index."""
    width = latent + branch
    own = branch * itemsize if kind == "sketch" else 0
    maps = 4 * (latent * rank if kind == "sketch" else width**2)
    parts = {"branch": own, "code": rank * bits // 8, "maps": maps}
    if platform != "tpu":
        return Layout(width * itemsize, in_place=own, **parts)
    return Layout(-(-width // TILE) * TILE * itemsize, in_place=TILE * itemsize if own else 0, together=8, **parts)


def attend(device: Layout, rows: int) -> int:
    """A contiguous range, read once."""
    return rows * device.row


def scan(device: Layout, rows: int) -> int:
    """Branch, sketch and bounds of every row, and the margin that is written."""
    return rows * (device.branch + device.code + device.bounds + MARGIN)


def scan_in_place(device: Layout, rows: int) -> int:
    """The same where the branch is read in the row."""
    return scan(device, rows) + rows * (device.in_place - device.branch)


def compact(rows: int, fetched: int) -> int:
    """The counts of all groups of 128, and the margins of the groups that hold a fetched row."""
    return rows // 128 * 4 + min(rows, fetched * 128) * MARGIN


def fetch(device: Layout, fetched: int) -> int:
    """Gathered rows, attended."""
    return fetched * device.together * device.passes * device.row


def policy(device: Layout, *, archive: int, tier1: int, tail: int, fetched: int) -> dict[str, int]:
    """A step of the policy, by what is read."""
    return {
        "tier 1": attend(device, tier1),
        "tail": attend(device, tail),
        "maps": device.maps,
        "scan": scan(device, archive),
        "compact": compact(archive, fetched),
        "fetch": fetch(device, fetched),
    }


def dense(device: Layout, *, archive: int, tail: int) -> int:
    """A step that reads every row."""
    return attend(device, archive + tail)
