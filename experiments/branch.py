"""Branch anatomy: what the branch of a row carries, and what is left of attention without it (VestigeKV §1, §6).

Per layer: norms of branch over content, in the weights and in the rows; the branch's share of the variance of scores;
how often the best row stays the best by the branch alone and by the content alone. On both twins.
Writes trials.jsonl, summary.csv, claims.csv, meta.json and branch.png.
"""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from configs import branch as branch_config
from experiments.anatomy import arms, dissection, panels
from experiments.anatomy.arms import Arm, Measured
from experiments.harness import published
from experiments.harness.claims import Estimate
from experiments.harness.runner import launch, reading_input

QUANTITIES = (
    "top-1 by branch",
    "top-1 by content",
    "score variance by branch",
    "rank by branch, p90",
    "row norm ratio",
)
WEIGHTS = "weight norm ratio"
NO_PROMPT = -1
"""In place of a prompt: a fact of the weights."""
Array = jax.Array


def main(config: ml_collections.ConfigDict, out: pathlib.Path) -> None:
    with reading_input():
        arms.check(config, "length", "queries")
        found = arms.load(config)
        positions = dissection.late(config.length, config.queries)
    with arms.start(config, out, found) as run:
        facts = dict(length=config.length, seed=config.seed, kind=config.kind)
        arms.collect(
            run,
            found,
            QUANTITIES,
            ids=lambda arm, prompt: dissection.text(arm.prose, prompt, **facts),
            positions=positions,
            measure=lambda _, seen: measure(seen.latent_dim, seen.rows, seen.queries, seen.positions),
        )
        for name, arm in found.items():
            for layer, ratio in weight_ratios(arm).items():
                arms.add(run, (NO_PROMPT, name, layer, WEIGHTS), ratio)
        measured = Measured(run, found)
        arms.finish(run, measured, estimates(measured), paper)
        panels.draw(run.path("branch.png"), figure(measured), f"Branch anatomy, {config.prompts} texts")


@functools.partial(jax.jit, static_argnums=0)
def measure(latent: int, rows: Array, queries: Array, positions: Array) -> dict[str, Array]:
    """QUANTITIES of every layer, float32 [L]: rows [L, T, C], queries [L, N, H, C] asked at positions [N].

    Shares are over queries and heads; a query sees the rows up to its own position, ties go to the lower one.
    score variance: sum of cov(s_branch, s) over sum of var(s), each over the rows that one query and head see.
    rank: rows that score above the best row by the branch alone, 90th percentile.
    row norm ratio: mean length of a branch over mean length of a latent.
    """
    return jax.lax.map(lambda layer: _measure(latent, *layer, positions), (rows, queries))


def _measure(latent, rows, queries, positions):
    each = jax.lax.map(lambda asked: _query(latent, rows, *asked), (queries, positions), batch_size=16)
    length = {part: jnp.linalg.norm(x, axis=-1).mean() for part, x in _parts(rows, latent).items()}
    return {
        "top-1 by branch": each["branch kept"].mean(),
        "top-1 by content": each["content kept"].mean(),
        "score variance by branch": each["covariance"].sum() / each["variance"].sum(),
        "rank by branch, p90": jnp.quantile(each["rank"].astype(jnp.float32), 0.9),
        "row norm ratio": length["branch"] / length["content"],
    }


def _query(latent: int, rows: Array, query: Array, position: Array) -> dict[str, Array]:
    """Of one position, per head [H]: query [H, C]. The scale of scores drops out of everything here."""
    visible = jnp.arange(len(rows)) <= position
    keys, asked = _parts(rows, latent), _parts(query, latent)
    scores = {part: jnp.where(visible, asked[part] @ keys[part].T, -jnp.inf) for part in keys}
    full = jnp.where(visible, query @ rows.T, -jnp.inf)
    best = full.argmax(-1)
    branch, total = (_centred(x, visible) for x in (scores["branch"], full))
    ahead = scores["branch"] > jnp.take_along_axis(scores["branch"], best[:, None], axis=-1)
    return {
        "branch kept": scores["branch"].argmax(-1) == best,
        "content kept": scores["content"].argmax(-1) == best,
        "covariance": (branch * total).sum(-1) / visible.sum(),
        "variance": (total * total).sum(-1) / visible.sum(),
        "rank": ahead.sum(-1),
    }


def _parts(x: Array, latent: int) -> dict[str, Array]:
    return {"content": x[..., :latent], "branch": x[..., latent:]}


def _centred(scores: Array, visible: Array) -> Array:
    scores = jnp.where(visible, scores, 0)
    return jnp.where(visible, scores - scores.sum(-1, keepdims=True) / visible.sum(), 0)


def weight_ratios(arm: Arm) -> dict[int, float]:
    """Mean length of the kv_a rows that make the branch over that of those that make the content, by layer.

    Empty for attention that projects no latent.
    """
    ratios = {}
    for layer in arm.layers:
        attention = arm.model.layers[layer].self_attn
        if hasattr(attention, "kv_a_proj_with_mqa"):
            lengths = np.linalg.norm(np.asarray(attention.kv_a_proj_with_mqa[...], np.float32), axis=0)
            ratios[layer] = float(lengths[attention.latent :].mean() / lengths[: attention.latent].mean())
    return ratios


def estimates(measured: Measured) -> dict[str, Estimate]:
    """What the claims of a config may speak of; weights are those of the nope arm."""
    found = {f"{name}, {arm}": measured.mean(arm, name) for name in QUANTITIES for arm in ("nope", "rope")}
    found |= {f"{name}, nope - rope": measured.difference(name) for name in QUANTITIES}
    weights = ("nope", WEIGHTS)
    found[f"{WEIGHTS}, smallest"] = measured.of(lambda cell: cell.min((-2, -1)), weights)
    found[f"{WEIGHTS}, last over first"] = measured.of(lambda cell: cell[..., 0, -1] / cell[..., 0, 0], weights)
    return found


def paper(quantity: str, layer: Any) -> str | None:
    """The published figures of a quantity, beside its mean over layers."""
    if layer != arms.MEAN:
        return None
    if quantity == WEIGHTS:
        return _weights_by_layer()
    figures = {
        "top-1 by branch": ("top-1 retention", dict(part="branch")),
        "top-1 by content": ("top-1 retention", dict(part="content")),
        "score variance by branch": ("share of score variance", dict(part="branch")),
    }
    name, where = figures.get(quantity, ("", {}))
    return published.beside(name, **where)


def _weights_by_layer() -> str:
    figures = [figure for figure in published.FIGURES if figure.quantity == "branch/content norm ratio"]
    layers = ",".join(str(figure.where["layer"]) for figure in figures)
    return f"{' '.join(map(str, figures))} (layers {layers.replace(',', ', ')}, {published.SHORT[figures[0].model]})"


def figure(measured: Measured) -> list[panels.Panel]:
    """One panel a quantity, layers along the axis."""
    names = (WEIGHTS, "row norm ratio", "score variance by branch", "top-1 by branch", "top-1 by content")
    return [panels.by_layer(measured, name, paper(name, arms.MEAN)) for name in names if measured.arms(name)]


if __name__ == "__main__":
    launch(main, like=branch_config)
