"""Why an index finds rows: what it is fitted to, on how many queries, how long ago, and for which layer (VestigeKV §8).

Offline, on rows and queries of held-out text from one dense pass: nothing is served, and the gate is open. Codes are
exact and have the same length throughout, that of the paper's index with its branch, so that only the maps differ.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_collections
import numpy as np

from experiments.anatomy import dissection
from experiments.harness.runner import Run
from experiments.trials.cells import Cells
from experiments.trials.index_grid import ETA
from vestige_jax import balanced, calibration, partition
from vestige_jax.sigma import sigma
from vestige_jax.spec import CacheSpec

TABLE = "ablation"
Maps = tuple[np.ndarray, np.ndarray]
"""A and B [C, C], A B^T = I; their first columns make codes."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to fit an index; what is not given is as deployed."""

    name: str
    fitted_to: str = "balanced, row"
    queries: int = 64  # positions, of all heads
    rows: int | None = None  # evenly spaced rows that their covariance is of; None: all
    age: int = 1  # fitted when the prefix had 1/age of its rows
    shrinkage: float = 0.01
    shared: bool = False  # one basis for all layers
    allowance: str = "z"  # times the bound; 'z per head'; or 'margin', the same for every row, whatever its bound


class Layer(NamedTuple):
    """One layer of one text: queries [T, H, C] of every position."""

    rows: np.ndarray  # [T, C]
    queries: np.ndarray
    attended: np.ndarray  # bool [T], tier 1 and what is behind the cut


class Seen(NamedTuple):
    """What Q queries of one layer attend and miss."""

    queries: np.ndarray  # [Q, C]
    archived: np.ndarray  # bool [Q, T]
    peak: np.ndarray  # [Q], best score of the attended rows
    target: np.ndarray  # int [Q], best archived row
    hard: np.ndarray  # bool [Q], it beats the peak


def variants(config: ml_collections.ConfigDict) -> list[Variant]:
    """Every ablation of a config."""
    base = Variant("balanced, row", queries=config.fit_queries, shrinkage=config.shrinkage)
    fits = ("sketch", "query-only", "row-only", "balanced, content", "balanced, row")
    changed = functools.partial(dataclasses.replace, base)
    return [
        *(changed(name=name, fitted_to=name) for name in fits),
        *(changed(name=f"{count} queries", queries=count) for count in config.calibration_queries),
        *(changed(name=f"{count} rows", rows=count) for count in config.calibration_rows),
        *(changed(name=f"fitted at 1/{age}", age=age) for age in config.ages),
        *(changed(name=f"shrinkage {value:g}", shrinkage=value) for value in config.shrinkages),
        *(changed(name=name, allowance=name) for name in ("z per head", "margin")),
        changed(name="one basis for all layers", shared=True),
    ]


class Probe(NamedTuple):
    """Variants on `texts` texts of `prefix` tokens and `config.tokens` behind them."""

    name: str
    prefix: int
    texts: int
    variants: list[Variant]


def probes(config: ml_collections.ConfigDict, long: bool) -> Iterator[Probe]:
    """Every ablation at the prefix of the config; if `long`, also an old basis beside a new one on long prefixes."""
    every = variants(config)
    yield Probe(TABLE, config.prefix, config.ablation_texts, every)
    for prefix in config.old_prefixes if long else ():
        age = prefix // config.old_fit
        old = dataclasses.replace(every[-1], name=f"fitted at {config.old_fit} tokens", age=age, shared=False)
        new = dataclasses.replace(old, name="balanced, row", age=1)
        yield Probe(f"{TABLE}, {prefix} tokens", prefix, config.old_texts, [new, old])


def fill(
    run: Run,
    config: ml_collections.ConfigDict,
    checkpoint: str,
    facts: Mapping[str, Any],
    cells: Cells,
    *,
    long: bool = False,
) -> None:
    """Measures what the run lacks of every variant on every text."""
    for part in probes(config, long):
        _fill(run, config, (checkpoint, part.name), part, facts, cells)


def _fill(run, config, place: tuple[str, str], part: Probe, facts: Mapping[str, Any], cells: Cells) -> None:
    sizes, ratio = cells.model.config, config.ratios[0]
    width = min(config.paper_rank + sizes.branch_dim, sizes.latent_dim + sizes.branch_dim)
    layout = dict(block=part.prefix, ratio=1 / ratio, rank=0, sinks=config.sinks, allow_rope=True)
    spec = sizes.cache_spec(part.prefix + config.tokens, **layout)
    plan = {
        (*place, one.name, width, 16, spec.recall_target, ratio, i): one
        for i in range(part.texts)
        for one in part.variants
    }
    seen: tuple[int, list[Layer]] | None = None
    row_bytes = spec.row_dim * config.number_bytes
    for key in run.todo(plan, label=", ".join(place)):
        if seen is None or seen[0] != key[-1]:
            seen = key[-1], look_at(spec, config, cells, key[-1])
        counts = measure(spec, plan[key], seen[1], width)
        fetched = float(np.mean(counts["rows"])) / config.tokens
        read = 1 / ratio + fetched / part.prefix
        nbytes = 2 * width + ETA + read * row_bytes
        fields = dict(zip(run.rows.key, key, strict=True)) | dict(facts) | {"kind": TABLE, "prefix": part.prefix}
        cost = {"fetched_per_step": fetched, "bytes_per_row": nbytes, "bytes_ratio": nbytes / row_bytes}
        run.add(fields | counts | cost | {"overflow": 0.0})


def look_at(spec: CacheSpec, config: ml_collections.ConfigDict, cells: Cells, number: int) -> list[Layer]:
    """Rows and queries of every layer over one held-out text, and the keep set of its prefix, one block."""
    prefix = spec.block
    length = prefix + config.tokens
    ids = dissection.text(cells.prose, number, length=length, seed=config.seed)
    seen = dissection.dissect(cells.model, ids, np.arange(length))
    layers = []
    for rows, queries in zip(np.asarray(seen.rows), np.asarray(seen.queries), strict=True):
        branch = jnp.asarray(rows[None, :prefix, spec.latent_dim :])
        energy = sigma(branch, block=spec.block, kappa=spec.lowpass_bins)
        kept = partition.keep(energy, jnp.array([prefix]), ratio=spec.ratio, sinks=spec.sinks)
        behind = np.ones(config.tokens, bool)
        layers.append(Layer(rows, queries, np.concatenate([np.asarray(kept[0]), behind])))
    return layers


def measure(spec: CacheSpec, variant: Variant, layers: list[Layer], width: int) -> dict[str, list[int]]:
    """Counts over the queries behind the cut, by layer, as `held_out.measure` has them."""
    cut = spec.block // variant.age
    first = max(0, cut - variant.queries)
    sample = slice(0, cut, max(1, cut // (variant.rows or cut)))
    fitted = [(layer.queries[first:cut].reshape(-1, spec.row_dim), layer.rows[sample]) for layer in layers]
    if variant.shared:
        pooled = np.concatenate([queries for queries, _ in fitted])
        covariance = np.mean([_covariance(rows) for _, rows in fitted], axis=0)
        maps = [fit(spec, variant, pooled, covariance)] * len(layers)
    else:
        maps = [fit(spec, variant, queries, _covariance(rows)) for queries, rows in fitted]
    counts = [
        _count(spec, variant, pair, width, layer, look(spec, layer, first, cut))
        for pair, layer in zip(maps, layers, strict=True)
    ]
    return {name: [layer[name] for layer in counts] for name in counts[0]}


def fit(spec: CacheSpec, variant: Variant, queries: np.ndarray, covariance: np.ndarray) -> Maps:
    """The maps of a variant for queries [N, C] and rows of this covariance [C, C]."""
    whole, content = slice(None), slice(spec.latent_dim)
    moment = queries.T @ queries / len(queries)
    if variant.fitted_to == "balanced, row":
        return _balanced(queries, covariance, variant.shrinkage)
    if variant.fitted_to == "balanced, content":
        return _beside_branch(_balanced(queries[:, content], covariance[content, content], variant.shrinkage), spec)
    if variant.fitted_to == "sketch":
        return _beside_branch(_principal(np.cov(queries[:, content], rowvar=False)), spec)
    chosen = {"query-only": moment, "row-only": covariance}[variant.fitted_to]
    return _principal(chosen[whole, whole])


def _balanced(queries: np.ndarray, covariance: np.ndarray, shrinkage: float) -> Maps:
    mask = jnp.ones((1, len(queries)), bool)
    pair = balanced.fit(jnp.asarray(queries)[None], mask, jnp.asarray(covariance)[None], shrinkage)
    return np.asarray(pair.query[0]), np.asarray(pair.row[0])


def _principal(moment: np.ndarray) -> Maps:
    vectors = np.linalg.eigh(moment)[1][:, ::-1]
    return vectors, vectors


def _beside_branch(maps: Maps, spec: CacheSpec) -> Maps:
    """Maps of the content, behind the branch as it is."""
    content, branch = spec.latent_dim, spec.branch_dim
    out = []
    for one in maps:
        both = np.zeros((spec.row_dim, spec.row_dim), np.float32)
        both[content:, :branch] = np.eye(branch)
        both[:content, branch:] = one
        out.append(both)
    return out[0], out[1]


def _covariance(rows: np.ndarray) -> np.ndarray:
    return np.cov(rows, rowvar=False, bias=True).astype(np.float32)


def look(spec: CacheSpec, layer: Layer, first: int, last: int) -> Seen:
    """Queries of positions `first` to `last`, of every head, position by position."""
    queries = layer.queries[first:last].reshape(-1, spec.row_dim)
    position = np.repeat(np.arange(first, last), spec.num_heads)[:, None]
    at = np.arange(len(layer.rows))
    score = spec.scale * queries @ layer.rows.T
    attended = (at <= position) & (layer.attended | (at == position))
    archived = (at <= position) & ~attended
    peak = np.where(attended, score, -np.inf).max(1)
    missed = np.where(archived, score, -np.inf)
    return Seen(queries, archived, peak, missed.argmax(1), missed.max(1) > peak)


def _scores(spec: CacheSpec, maps: Maps, width: int, queries: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, ...]:
    """Index scores and bounds, [Q, T] each."""
    asked, held = queries @ maps[0], rows @ maps[1]
    missed = np.linalg.norm(asked[:, width:], axis=1) / math.sqrt(max(1, spec.row_dim - width))
    known = spec.scale * asked[:, :width] @ held[:, :width].T
    return known, spec.scale * np.outer(missed, np.linalg.norm(held[:, width:], axis=1))


def _count(spec: CacheSpec, variant: Variant, maps: Maps, width: int, layer: Layer, seen: Seen) -> dict[str, int]:
    """The allowance from the queries `seen`, then what fires for those behind the cut."""
    tested = look(spec, layer, spec.block, len(layer.rows))
    known, bound = _scores(spec, maps, width, tested.queries, layer.rows)
    allowed = np.tile(_allowance(spec, variant, maps, width, layer, seen), len(known) // spec.num_heads)[:, None]
    allowed = allowed * (1 if variant.allowance == "margin" else bound)
    fires = tested.archived & (known + allowed >= tested.peak[:, None])
    union = fires.reshape(-1, spec.num_heads, fires.shape[1]).any(1)
    own = np.take_along_axis(fires, tested.target[:, None], 1)[:, 0]
    fetched = np.take_along_axis(np.repeat(union, spec.num_heads, axis=0), tested.target[:, None], 1)[:, 0]
    found = dict(
        queries=fires[:, 0] | True, hard=tested.hard, covered=own & tested.hard, recalled=fetched & tested.hard
    )
    found |= dict(fires=fires.any(1), rows=union)
    return {name: int(values.sum()) for name, values in found.items()} | {"steps": len(union)}


def _allowance(spec: CacheSpec, variant: Variant, maps: Maps, width: int, layer: Layer, seen: Seen) -> np.ndarray:
    """What the queries `seen` need to find their row, conformally: z, or a margin in nats, of every head [H]."""
    known, bound = (
        np.take_along_axis(values, seen.target[:, None], 1)[:, 0]
        for values in _scores(spec, maps, width, seen.queries, layer.rows)
    )
    unit = np.ones_like(bound) if variant.allowance == "margin" else bound
    short = seen.peak - known
    need = np.where(unit > 0, short / np.where(unit > 0, unit, 1), np.where(short <= 0, -np.inf, np.inf))
    pools = (-1, spec.num_heads) if variant.allowance == "z per head" else (-1, 1)
    need, hard = (values.reshape(pools).T for values in (need, seen.hard))
    found, _ = calibration.conformal_z(jnp.asarray(need), jnp.asarray(hard), spec)
    return np.broadcast_to(np.asarray(found, np.float64), spec.num_heads)
