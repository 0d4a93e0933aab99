"""Bytes and operations counted from shapes: what a program cannot do without, whatever a compiler adds (§3)."""

from experiments.benchmark.bench_scene import Scene


def row(scene: Scene) -> int:
    """Bytes of one row."""
    return scene.spec.row_dim * scene.spec.dtype.itemsize


def attend(scene: Scene, rows: int) -> dict[str, int]:
    """Attention over `rows` rows of every sequence."""
    spec = scene.spec
    products = 2 * spec.num_heads * (spec.row_dim + spec.latent_dim)
    return {"bytes": scene.batch * rows * row(scene), "flops": scene.batch * rows * products}


def dense(scene: Scene) -> dict[str, int]:
    """A step that attends every row, its own included."""
    return attend(scene, scene.total)


def scan(scene: Scene) -> dict[str, int]:
    """The index of every closed row, read; its margin and the counts of fired rows, written."""
    spec, (numbers, kind) = scene.spec, scene.spec.code_layout
    branch = spec.branch_dim if spec.index == "sketch" else 0
    in_place = branch - spec.copied_branch  # what a code does not hold is read in the row
    index = in_place * spec.dtype.itemsize + numbers * kind.itemsize + 4 * spec.certificate_terms
    products = 2 * spec.num_heads * (branch + spec.rank + spec.certificate_terms)
    member, margin = 1, 4 + 4 / 128
    rows = scene.batch * scene.closed
    return {"bytes": int(rows * (index + member + margin)), "flops": rows * products}


def compact(scene: Scene, fetched: int) -> dict[str, int]:
    """The counts of all groups, the margins of those that a fetched row is in, the list."""
    return {"bytes": scene.batch * int(scene.closed / 128 * 4 + fetched * (128 * 4 + 4))}


def policy(scene: Scene, fetched: float) -> dict[str, int]:
    """The whole step: tier 1 and tail attended, index scanned, `fetched` rows a sequence listed, read and attended."""
    parts = [attend(scene, kept(scene) + scene.tail + 1), scan(scene), compact(scene, round(fetched))]
    parts.append(attend(scene, round(fetched)))
    return {name: sum(part.get(name, 0) for part in parts) for name in ("bytes", "flops")}


def kept(scene: Scene) -> int:
    """Rows of tier 1, sinks included."""
    return scene.spec.keep_count(scene.closed) + scene.spec.sinks
