"""Geometry of rows: those that win, whether their order is stationary, and which could be merged (VestigeKV §1, §6).

Arms: the model's rows and queries as they are (nope), the same ones with their branch rotated (turned), and those of
the twin that was trained with rotation (rope). Writes trials.jsonl, summary.csv, claims.csv, meta.json and
geometry.png.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from configs import geometry as geometry_config
from experiments.anatomy import arms, dissection, orders, panels
from experiments.anatomy.arms import Arm, Measured
from experiments.harness import published
from experiments.harness.claims import Estimate
from experiments.harness.runner import launch, reading_input

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured, from the config; static under jit."""

    prefix: int
    tops: tuple[int, ...]
    best: int  # m of rank stationarity
    shifts: tuple[int, ...]
    tolerances: tuple[float, ...]

    @property
    def unions(self) -> dict[str, int]:
        return {f"union top-{top}": top for top in self.tops}

    @property
    def overlaps(self) -> dict[str, int]:
        return {f"overlap at +{shift}": shift for shift in self.shifts}

    @property
    def distincts(self) -> dict[str, float]:
        return {f"distinct at {tolerance:g}": tolerance for tolerance in self.tolerances}

    @property
    def names(self) -> list[str]:
        return [*self.unions, *self.overlaps, *self.distincts]


def main(config: ml_collections.ConfigDict, out: pathlib.Path) -> None:
    with reading_input():
        sizes = check(config)
        found = arms.load(config, turned=True)
    with arms.start(config, out, found) as run:
        facts = dict(length=config.prefix + config.steps, seed=config.seed, kind=config.kind)
        arms.collect(
            run,
            found,
            sizes.names,
            ids=lambda arm, prompt: dissection.text(arm.prose, prompt, **facts),
            positions=np.arange(config.prefix, config.prefix + config.steps),
            measure=functools.partial(measure, sizes),
        )
        measured = Measured(run, found)
        arms.finish(run, measured, estimates(measured, sizes), paper, inflations(measured, sizes))
        panels.draw(run.path("geometry.png"), figure(measured, sizes), f"Geometry of rows, {config.prompts} texts")


def check(config: ml_collections.ConfigDict) -> Sizes:
    """The sizes of a config. Raises ValueError for one that is out of range."""
    arms.check(config, "prefix", "steps", "ratio")
    best = config.prefix // config.ratio
    if best < 1:
        raise ValueError(f"ratio={config.ratio} must be at most prefix={config.prefix}")
    for name, least, most in (("tops", 1, config.prefix), ("shifts", 0, 1 << 24), ("tolerances", 0, 1)):
        values = config[name]
        if not values or not least <= min(values) <= max(values) <= most or list(values) != sorted(set(values)):
            raise ValueError(f"{name}={values} must be rising numbers from {least} to {most}")
    return Sizes(config.prefix, tuple(config.tops), best, tuple(config.shifts), tuple(config.tolerances))


def measure(sizes: Sizes, arm: Arm, seen: dissection.Anatomy) -> dict[str, Array]:
    """Everything in `sizes.names`, of every layer: float32 [L]."""
    rows, queries = seen.rotated() if arm.turned else (seen.rows, seen.queries)
    later = jnp.stack([asked_later(arm, seen, shift) for shift in (0, *sizes.shifts)], axis=1)
    return _measure(sizes, rows[:, : sizes.prefix], queries, later)


def asked_later(arm: Arm, seen: dissection.Anatomy, shift: int) -> Array:
    """The queries [L, N, H, C], fixed before rotation, as they would be asked `shift` tokens later."""
    return seen.turned(seen.plain_queries, (seen.positions + shift)[:, None]) if arm.rotates else seen.plain_queries


@functools.partial(jax.jit, static_argnums=0)
def _measure(sizes: Sizes, rows: Array, queries: Array, later: Array) -> dict[str, Array]:
    """rows [L, n, C], queries [L, N, H, C], later [L, 1 + shifts, N, H, C]."""

    def layer(arrays):
        rows, queries, later = arrays
        joined = orders.classes(rows, jnp.asarray(sizes.tolerances))
        found = dict(zip(sizes.distincts, orders.distinct(joined), strict=True))
        found |= {name: union(rows, queries, top) for name, top in sizes.unions.items()}
        kept = stationarity(rows, later, sizes.best)
        return found | dict(zip(sizes.overlaps, kept, strict=True))

    return jax.lax.map(layer, (rows, queries, later))


def union(rows: Array, queries: Array, top: int) -> Array:
    """Share of rows [n, C] that are among the `top` best of some query of [N, H, C]."""
    winners = jax.lax.map(lambda asked: orders.top(asked @ rows.T, top).any(0), queries)
    return winners.any(0).mean(dtype=jnp.float32)


def stationarity(rows: Array, later: Array, best: int) -> Array:
    """Overlap of the `best` rows for queries [1 + S, N, H, C] asked now (the first) and later: float32 [S], means."""

    def step(asked):
        scores = asked @ rows.T
        return orders.overlap(scores[:1], scores[1:], best).mean(-1)

    return jax.lax.map(step, later.swapaxes(0, 1)).mean(0)


def estimates(measured: Measured, sizes: Sizes) -> dict[str, Estimate]:
    """What the claims of a config may speak of: the first and last of each list of sizes."""
    ends: dict[str, list[str]] = {
        "union, {} top": list(sizes.unions),
        "overlap, {} shift": list(sizes.overlaps),
        "distinct, {} tolerance": list(sizes.distincts),
    }
    found = {}
    for label, names in ends.items():
        for end, name in (("smallest", names[0]), ("largest", names[-1])):
            found |= {f"{label.format(end)}, {arm}": measured.mean(arm, name) for arm in ("nope", "turned", "rope")}
    first, *_, last = [*sizes.unions, *sizes.unions]
    found["inflation, smallest top"] = measured.of(inflation(), *pair(first))
    found["inflation, largest top"] = measured.of(inflation(), *pair(last))
    found["inflation, smallest over largest top"] = measured.of(
        lambda a, b, c, d: inflation()(a, b) / inflation()(c, d), *pair(first), *pair(last)
    )
    return found


def pair(name: str) -> tuple[tuple[str, str], tuple[str, str]]:
    return ("turned", name), ("nope", name)


def inflation(layer: int | slice = slice(None)) -> Callable[..., Any]:
    """Union of the turned rows over that of the same rows as they are; means over prompts and these layers."""
    return lambda turned, plain: turned[..., layer].mean(_last(layer)) / plain[..., layer].mean(_last(layer))


def _last(layer: int | slice) -> tuple[int, ...]:
    return (-2, -1) if isinstance(layer, slice) else (-1,)


def inflations(measured: Measured, sizes: Sizes) -> list[dict[str, Any]]:
    """Rows of the summary: inflation by layer and on the whole, in place of a quantity of the turned arm."""
    if "turned" not in measured.layers:
        return []
    rows = []
    for name, top in sizes.unions.items():
        for i, layer in [*enumerate(measured.layers["turned"]), (slice(None), arms.MEAN)]:
            own = measured.of(inflation(i), *pair(name))
            rows.append(arms.line("turned", layer, f"inflation top-{top}", own))
    return rows


def paper(quantity: str, layer: Any) -> str | None:
    """The published figures beside a mean over layers."""
    kind, _, top = quantity.partition(" top-")
    if layer != arms.MEAN or not top:
        return None
    if kind == "inflation":
        return published.beside("winner union, inflation by rotation", top=int(top))
    both = {b: published.beside("winner union, share of prefix", branch=b, top=int(top)) for b in ("nope", "rotated")}
    return "; ".join(f"{branch} {value}" for branch, value in both.items() if value) or None


def figure(measured: Measured, sizes: Sizes) -> list[panels.Panel]:
    ticks = {f"top-{top}": name for name, top in sizes.unions.items()}
    return [
        panels.along(measured, "winner union, share of prefix", "of each step and head", ticks, joined=False),
        panels.along(measured, f"overlap of the top {sizes.best}", "tokens later", _ticks(sizes.overlaps)),
        panels.along(measured, "rows that lead a class", "tolerance", _ticks(sizes.distincts)),
    ]


def _ticks(names: dict[str, Any]) -> dict[str, str]:
    return {f"{value:g}": name for name, value in names.items()}


if __name__ == "__main__":
    launch(main, like=geometry_config)
