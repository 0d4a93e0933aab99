"""Dividends of an unrotated branch, as numbers on both twins: what statistics of other methods gain (VestigeKV §5, §6).

H2O's shelf life, SnapKV's vote drift, sink stability, Quest's pruned pages, the projection residual, the merge class.
Writes trials.jsonl, summary.csv, claims.csv, meta.json and dividends.png.
"""

import dataclasses
import functools
import itertools
import pathlib

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from configs import dividends as dividends_config
from experiments.anatomy import arms, dissection, orders, panels, watching
from experiments.anatomy.arms import Arm, Measured
from experiments.harness.claims import Estimate
from experiments.harness.runner import launch, reading_input
from vestige_jax.baselines.pages import dot
from vestige_jax.baselines.quest import Quest, pruned

COUNTS = ("length", "ratio", "window", "kernel", "sinks", "page", "asked", "rank", "calibration")
PAGES, MERGED = "quest pruned", "merge class"
SKETCH = ("sketch residual", "sketch spread", "eta p10", "eta p50", "eta p90")
Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured, from the config; static under jit."""

    length: int
    best: int  # m
    horizons: tuple[int, ...]
    window: int
    kernel: int
    sinks: int
    page: int
    asked: int
    rank: int
    calibration: int
    tolerance: float

    @property
    def cut(self) -> int:
        return self.length // 2

    @property
    def octaves(self) -> dict[str, tuple[int, int]]:
        """Positions in which the sinks' share is averaged."""
        edges = [self.length // part for part in (8, 4, 2, 1)]
        return {f"sink mass {low}-{high}": (low, high) for low, high in itertools.pairwise(edges)}

    def overlaps(self, method: str) -> list[str]:
        return [f"{method} overlap +{horizon}" for horizon in self.horizons]

    @property
    def names(self) -> list[str]:
        return [*self.overlaps("h2o"), *self.overlaps("snapkv"), *self.octaves, PAGES, *SKETCH, MERGED]

    @property
    def windows(self) -> np.ndarray:
        """bool [2 + 2 horizons, T], whose queries are added up: past, the vote at the cut; received and vote later."""
        at, cut = np.arange(self.length), self.cut
        first = [at < cut, (at >= cut - self.window) & (at < cut)]
        later = [(at >= cut) & (at < cut + horizon) for horizon in self.horizons]
        ends = [cut + horizon for horizon in self.horizons]
        return np.stack([*first, *later, *((at >= end - self.window) & (at < end) for end in ends)])


def main(config: ml_collections.ConfigDict, out: pathlib.Path) -> None:
    with reading_input():
        sizes = check(config)
        found = arms.load(config)
        check_rank(sizes, found)
    with arms.start(config, out, found) as run:
        facts = dict(length=config.length, seed=config.seed, kind=config.kind)
        arms.collect(
            run,
            found,
            sizes.names,
            ids=lambda arm, prompt: dissection.text(arm.prose, prompt, **facts),
            positions=np.arange(config.length),
            measure=lambda _, seen: measure(sizes, seen.latent_dim, seen.scale, seen.rows, seen.queries),
        )
        measured = Measured(run, found)
        arms.finish(run, measured, estimates(measured, sizes), lambda quantity, layer: None)
        panels.draw(run.path("dividends.png"), figure(measured, sizes), f"Dividends, {config.prompts} texts")


def check(config: ml_collections.ConfigDict) -> Sizes:
    """The sizes of a config. Raises ValueError for one that is out of range."""
    arms.check(config, *COUNTS)
    cut, values = config.length // 2, tuple(config.horizons)
    if not values or not 1 <= min(values) <= max(values) <= cut or list(values) != sorted(set(values)):
        raise ValueError(f"horizons={values} must be rising numbers from 1 to {cut}, half of length={config.length}")
    if config.kernel % 2 == 0:
        raise ValueError(f"kernel={config.kernel} must be odd, so that an average is centred on its row")
    for name in ("window", "calibration", "asked"):
        if config[name] > cut:
            raise ValueError(f"{name}={config[name]} must be at most {cut}, half of length={config.length}")
    if not 1 <= cut // config.ratio <= cut - config.window:
        most = f"leave 1 to {cut - config.window} of the {cut} rows before the cut, those before the first vote"
        raise ValueError(f"ratio={config.ratio} must {most}")
    if config.sinks > config.length // 8:
        raise ValueError(f"sinks={config.sinks} must be at most an eighth of length={config.length}")
    if not 0 <= config.tolerance <= 1:
        raise ValueError(f"tolerance={config.tolerance} must lie in [0, 1]")
    own = {field.name: config[field.name] for field in dataclasses.fields(Sizes) if field.name != "best"}
    return Sizes(**own | {"horizons": values}, best=cut // config.ratio)


def check_rank(sizes: Sizes, found: dict[str, Arm]) -> None:
    """Raises ValueError for more columns than a latent has."""
    for name, arm in found.items():
        latent = arm.model.layers[arm.layers[0]].self_attn.latent
        if sizes.rank > latent:
            raise ValueError(f"rank={sizes.rank} must be at most {latent}, the latent of the {name} arm")


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def measure(sizes: Sizes, latent: int, scale: float, rows: Array, queries: Array) -> dict[str, Array]:
    """Everything in `sizes.names`, float32 [L]: rows [L, T, C], and queries [L, T, H, C] of every position."""
    return jax.lax.map(lambda layer: _measure(sizes, latent, scale, *layer), (rows, queries))


def _measure(sizes: Sizes, latent: int, scale: float, rows: Array, queries: Array) -> dict[str, Array]:
    windows = jnp.asarray(sizes.windows, jnp.float32)
    mass, first = watching.received(rows, queries, windows, scale=scale, sinks=sizes.sinks)
    found = {name: first[low:high].mean() for name, (low, high) in sizes.octaves.items()}
    found |= overlaps(sizes, mass) | {PAGES: pages(sizes, rows, queries)}
    cut = sizes.cut
    fitted = queries[cut - sizes.calibration : cut]
    found |= watching.residuals(rows[:cut], fitted, queries[cut:], latent=latent, rank=sizes.rank)
    return found | {MERGED: orders.shared(orders.classes(rows, jnp.array([sizes.tolerance])))[0]}


def overlaps(sizes: Sizes, mass: Array) -> dict[str, Array]:
    """Top m of the rows before the cut by what was known there, against what came later; mass [windows, T].

    Votes leave out the rows of the first window, which only part of its queries see.
    """
    count, before = len(sizes.horizons), sizes.cut - sizes.window
    received, votes = mass[:, : sizes.cut], watching.pooled(mass[:, :before], sizes.kernel)
    kept = orders.overlap(received[:1], received[2 : 2 + count], sizes.best)
    voted = orders.overlap(votes[1:2], votes[2 + count :], sizes.best)
    names = [*sizes.overlaps("h2o"), *sizes.overlaps("snapkv")]
    return dict(zip(names, [*kept, *voted], strict=True))


def pages(sizes: Sizes, rows: Array, queries: Array) -> Array:
    """Share of Quest's pages that the last queries need not look at, mean over them and their heads."""
    rows, asked = rows[: -sizes.asked], queries[-sizes.asked :].reshape(-1, rows.shape[-1])
    bounds = Quest(sizes.page).scores(rows, jnp.ones(len(rows), bool), asked)
    return pruned(bounds, dot(asked, rows).max(-1)).mean()


def estimates(measured: Measured, sizes: Sizes) -> dict[str, Estimate]:
    """What the claims of a config may speak of."""
    labels = {PAGES: PAGES, MERGED: MERGED} | {name: name for name in SKETCH}
    for method in ("h2o", "snapkv"):
        for end, name in (("smallest", 0), ("largest", -1)):
            labels[f"{method} overlap, {end} horizon"] = sizes.overlaps(method)[name]
    found = {}
    for label, name in labels.items():
        found |= {f"{label}, {arm}": measured.mean(arm, name) for arm in ("nope", "rope")}
        found[f"{label}, nope - rope"] = measured.difference(name)
    for arm in ("nope", "rope"):
        first, *_, last = sizes.octaves
        found[f"sink mass, last octave, {arm}"] = measured.mean(arm, last)
        found[f"sink mass, last over first octave, {arm}"] = measured.of(over, (arm, last), (arm, first))
    return found


def over(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The ratio of two quantities [..., prompts, layers], each the mean over prompts and layers."""
    return one.mean((-2, -1)) / other.mean((-2, -1))


def figure(measured: Measured, sizes: Sizes) -> list[panels.Panel]:

    def behind(method: str) -> dict[str, str]:
        return dict(zip(map(str, sizes.horizons), sizes.overlaps(method), strict=True))

    octaves = {name.rsplit(" ", 1)[1]: name for name in sizes.octaves}
    return [
        panels.along(measured, "H2O: top rows still valid", "tokens later", behind("h2o")),
        panels.along(measured, "SnapKV: votes still valid", "tokens later", behind("snapkv")),
        panels.along(measured, f"mass on the first {sizes.sinks} rows", "position", octaves),
        panels.along(measured, "shares", "", {"pages pruned": PAGES, "rows merged": MERGED}, joined=False),
        panels.along(
            measured,
            f"left by {sizes.rank} columns, of",
            "",
            {"content scores": SKETCH[0], "spread of scores": SKETCH[1]},
            joined=False,
        ),
        panels.along(measured, "eta over length of the latent", "quantile", {name[4:]: name for name in SKETCH[2:]}),
    ]


if __name__ == "__main__":
    launch(main, like=dividends_config)
