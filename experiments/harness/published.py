"""Published figures of VestigeKV (arXiv 2609.03949), to print beside ours. Not one of them was measured here.

A figure is a value of some quantity, for one cell of an experiment (``where``), from one model. There are two
generations, Kimi-Linear-48B-A3B-Base with seed 11 (a few cells pooled with seed 12) and -Instruct with seed 0: they are
different models and different needles, so each figure carries its model. Where none is named, ``UNSTATED`` says so.
Prefixes are the n of the compressed prefix: what was published as "8k" is 4096, "32k" is 16384. Tier-1 cells
(methods other than ``vestige``) were run without recall.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

BASE = "Kimi-Linear-48B-A3B-Base, seed 11"
BASE_POOLED = "Kimi-Linear-48B-A3B-Base, seeds 11 and 12"
INSTRUCT = "Kimi-Linear-48B-A3B-Instruct, seed 0"
DEEPSEEK = "DeepSeek-V2-Lite"
ROPE = "a RoPE model, not named"
LLAMA = "Llama-3.1-8B"
UNSTATED = "Kimi-Linear-48B-A3B, variant not stated"
SHORT = {BASE: "Base s11", BASE_POOLED: "Base s11+12", INSTRUCT: "Instruct s0", UNSTATED: "48B ?"}
"""Names that fit in a table; a legend under it gives the long ones."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """One published value; a range is a pair, what cannot be given as a number is a phrase."""

    quantity: str
    value: float | tuple[float, float] | str
    model: str
    where: Mapping[str, Any]
    note: str = ""

    def __str__(self) -> str:
        if isinstance(self.value, tuple):
            return "-".join(_short(end) for end in self.value)
        return self.value if isinstance(self.value, str) else _short(self.value)


def find(quantity: str, **where: Any) -> list[Figure]:
    """The figures of exactly this cell: same fields, same values."""
    return [figure for figure in FIGURES if figure.quantity == quantity and figure.where == where]


def beside(quantity: str, **where: Any) -> str | None:
    """The figures of a cell in one phrase, each with the short name of its model: '0.88 (Base s11), ...'; or None."""
    phrases = [f"{figure} ({SHORT.get(figure.model, figure.model)})" for figure in find(quantity, **where)]
    return ", ".join(phrases) or None


def legend() -> str:
    """The line that says what the short names stand for."""
    return "published, on other models than ours: " + "; ".join(f"{short} = {name}" for name, short in SHORT.items())


def _short(value: float) -> str:
    return f"{value:.2f}" if 0 <= value <= 1 and round(value, 2) == value else f"{value:g}"


def _series(
    quantity: str, model: str, axis: str, cells: Mapping[Any, Any], note: str = "", **where: Any
) -> Iterator[Figure]:
    """One figure per entry of ``cells``, placed by ``axis`` and by the fields that they share."""
    for place, value in cells.items():
        yield Figure(quantity, value, model, {**where, axis: place}, note)


def _needle() -> Iterator[Figure]:
    """Share of needle trials left intact, by method, ratio and prefix."""
    ratio = "ratio"

    def cells(model: str, method: str, prefix: int, values: Mapping[int, Any], note: str = "") -> Iterator[Figure]:
        return _series("intact", model, ratio, values, note, method=method, prefix=prefix)

    yield from cells(BASE, "sigma", 4096, {8: 1.00, 32: 0.88, 128: 0.67})
    yield from cells(BASE_POOLED, "sigma", 4096, {32: 0.89, 128: 0.69})
    yield from cells(INSTRUCT, "sigma", 4096, {32: 0.92, 128: 0.83})
    yield from cells(UNSTATED, "sigma", 16384, {32: 0.92, 128: 0.83})
    yield from cells(UNSTATED, "full_row", 4096, dict.fromkeys((8, 32, 128), "ties with sigma"))
    for method in ("h2o", "h2o_recent", "streaming"):
        yield from cells(BASE, method, 4096, {8: 0.0, 32: 0.0, 128: 0.0})
    yield from cells(BASE, "snapkv", 4096, {8: 0.33, 32: 0.04, 128: 0.0})
    for method in ("h2o", "snapkv", "streaming"):
        yield from cells(UNSTATED, method, 16384, {32: 0.0, 128: 0.0})
    inferred = "variant inferred: its eviction-only figures are those of Base, seed 11"
    yield from cells(BASE, "vestige", 4096, {32: 1.00, 128: 1.00}, inferred)
    yield from cells(INSTRUCT, "kmeans", 4096, {2: 0.79, 4: 0.33, 8: 0.0, 32: 0.0}, "prefix assumed")
    yield Figure("extra rows per query, share of prefix", (0.005, 0.026), BASE, {"method": "vestige"}, inferred)


def _branch() -> Iterator[Figure]:
    """What the branch carries, and what is left of it when it is narrowed or rotated."""
    norms = {3: 1.188, 7: 0.908, 11: 1.111, 15: 1.505, 19: 1.945, 23: 2.333, 26: 3.482}
    yield from _series("branch/content norm ratio", BASE, "layer", norms)
    yield Figure("share of score variance", 0.68, BASE, {"part": "branch"})
    yield from _series("top-1 retention", BASE, "part", {"branch": 0.9869, "content": 0.0001})
    yield Figure("top-1 retention", 0.99, ROPE, {"part": "branch"}, "so retention does not tell the two apart")
    yield from _series("dual arm intact", UNSTATED, "arm", {"nope": (0.88, 0.89)}, ratio=32)
    yield from _series("dual arm intact", DEEPSEEK, "arm", {"rope": 0.08, "leakage floor": 0.17}, ratio=32)
    yield from _series("branch width intact", UNSTATED, "dims", {4: 0.42, 64: 0.88}, "monotone between", ratio=32)
    union = {"nope": (0.0003, 0.0019), "rotated": (0.0028, 0.0062)}
    yield from _series("winner union, share of prefix", UNSTATED, "branch", union, "one model, rotated or not", top=1)
    yield from _series("winner union, inflation by rotation", UNSTATED, "top", {1: (3.2, 8.5), 64: (1.1, 2.1)})
    retired = "two different models; retired by the authors"
    yield from _series("extreme points, share of tokens", UNSTATED, "branch", {"nope": (0.023, 0.067)}, retired)
    yield from _series("extreme points, share of tokens", ROPE, "branch", {"rope": (0.102, 0.468)}, retired)


def _digests() -> Iterator[Figure]:
    """Page digests: recall@8 of the page that holds the true argmax."""
    worst = "page recall@8, worst layer"
    yield from _series(worst, UNSTATED, "radius", {"mean": 0.672, "max": ">= 0.97"}, branch="nope")
    yield from _series(worst, ROPE, "radius", {"mean": 0.024, "max": 0.014}, branch="rope")
    yield Figure("page recall@8, median gain", 0.055, UNSTATED, {}, "NoPE over RoPE")


def _recall() -> Iterator[Figure]:
    """The recall tier against the rank K of its index."""
    by_rank = {
        "fire rate": (0.028, 0.008, 0.004, 0.002),
        "rows per query": (15.2, 3.6, 1.2, 1.2),
        "hard recall": (0.950, 0.931, 0.974, 0.962),
    }
    for quantity, values in by_rank.items():
        yield from _series(quantity, UNSTATED, "rank", dict(zip((64, 128, 192, 256), values, strict=True)))


def _language() -> Iterator[Figure]:
    """Cross-entropy added on plain text, in nats per token, by method and ratio."""
    table = {
        (BASE, "vestige"): (0.0011, 0.0018, 0.0022),
        (BASE, "sigma"): (0.0055, 0.0090, 0.0104),
        (INSTRUCT, "vestige"): (0.0048, 0.0124, 0.0141),
        (INSTRUCT, "sigma"): (0.0096, 0.0111, 0.0101),
        (INSTRUCT, "recent"): (-0.017, -0.010, -0.008),
    }
    for (model, method), values in table.items():
        cells = dict(zip((8, 32, 128), values, strict=True))
        yield from _series("nats per token", model, "ratio", cells, method=method)


def _deployment() -> Iterator[Figure]:
    """Parity, RULER, time and bytes of the deployed path."""
    parity = {
        "median |delta NLL|": {"policy": 0.0079, "floor": 0.0068},
        "needles at 512x": {"eviction only": "6/12", "two-tier": "12/12"},
        "bits per byte": {"dense": 0.5881, "policy": 0.5885},
        "MAUVE, 16 contexts": {"dense": 0.999, "policy": 0.962},
    }
    for quantity, cells in parity.items():
        yield from _series(quantity, UNSTATED, "side", cells)
    multikey = {8192: (0.64, 0.92), 16384: (0.34, 0.84), 32768: (0.22, 0.84), 65536: (0.16, 0.76)}
    base, instruct = BASE.split(",")[0], INSTRUCT.split(",")[0]
    yield from _series("RULER mean of 13 tasks, 4k-64k", base, "side", {"dense": 0.922, "policy": 0.860})
    yield from _series("RULER mean of 13 tasks, 4k-64k", instruct, "side", {"dense": 0.942, "policy": 0.920})
    for column, model in enumerate((base, instruct)):
        policy = {length: values[column] for length, values in multikey.items()}
        yield from _series("RULER multikey_3", model, "length", policy, side="policy")
        yield from _series("RULER multikey_3", model, "length", dict.fromkeys(multikey, 1.0), side="dense")
    times = {65536: (4.360, 4.125), 131072: (4.786, 4.184), 262144: (5.590, 4.364), 520192: (7.120, 4.651)}
    for length, (dense, policy) in times.items():
        cells = {"dense": dense, "policy": policy}
        yield from _series("decode ms/token", UNSTATED, "side", cells, "whole server, two GPUs", length=length)
    yield Figure("decode crossover, tokens", "~28k", UNSTATED, {})
    yield from _series("bytes per archived token and step", UNSTATED, "side", {"dense": 1152, "policy": "~294"})
    yield Figure("device memory over dense", 1.14, UNSTATED, {})


def _others() -> Iterator[Figure]:
    """Context from other methods on other models."""
    scores = {0.0: 95.7, 0.5: 95.5, 0.7: 95.3, 0.8: 94.9, 0.9: 90.5}
    yield from _series("RULER-4k", LLAMA, "removed", scores, "query-agnostic; context only", method="kvzip")


FIGURES: tuple[Figure, ...] = (
    *_needle(),
    *_branch(),
    *_digests(),
    *_recall(),
    *_language(),
    *_deployment(),
    *_others(),
)
