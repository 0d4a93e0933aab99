"""What the attention layers of a model ask and cache, from one dense pass over a text (VestigeKV §1).

A query's scores are scale * <query, row>, over the rows up to its own position. In a rotated model queries and rows are
given twice: as used, and as they were before rotation. Without rotation the two are the same.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.text import corpus, needles
from vestige_jax.models import Decoder, rope

Array = jax.Array
KINDS = ("prose", "needle")


@dataclasses.dataclass(frozen=True)
class Anatomy:
    """Every MLA layer (L of them) of one text of T tokens; all arrays are float32 but `positions`."""

    rows: Array  # [L, T, C], as the cache holds them
    queries: Array  # [L, N, H, C], absorbed and unscaled, as they score `rows`
    plain_rows: Array  # [L, T, C], before rotation
    plain_queries: Array  # [L, N, H, C], before rotation
    positions: Array  # int32 [N], where each query was asked
    layers: tuple[int, ...]  # 0-based numbers of the layers
    latent_dim: int  # R: a row is [latent R | branch P]
    scale: float
    theta: float  # of the model's config; says how a model without rotation would be rotated
    yarn: rope.Yarn | None = None  # its frequencies; plain vectors have its amplitude already

    def rotated(self) -> tuple[Array, Array]:
        """(rows, queries) with the branch of the plain ones rotated by position: one model, as if it had RoPE.

        In a rotated model this is (rows, queries) again.
        """
        rows = self.turned(self.plain_rows, jnp.arange(self.rows.shape[1]))
        return rows, self.turned(self.plain_queries, self.positions[:, None])

    def turned(self, vectors: Array, positions: Array) -> Array:
        """Plain rows or queries [..., C] with the branch rotated by `positions`, int32, which broadcast to [...]."""
        latent, branch = vectors[..., : self.latent_dim], vectors[..., self.latent_dim :]
        positions = jnp.broadcast_to(positions, branch.shape[:-1])
        return jnp.concatenate([latent, rope.rotate(branch, positions, self.theta, self.yarn)], axis=-1)


def dissect(model: Decoder, ids: np.ndarray, positions: np.ndarray) -> Anatomy:
    """Runs `model` densely over ids int [T] and looks at the queries asked at `positions` int [N].

    Attention goes through the prompt a block of queries at a time, as in training: [T, T] is never held.
    Raises ValueError for a model without MLA, a position outside the text, an id outside the vocabulary.
    """
    ids, positions = np.asarray(ids), np.asarray(positions)
    layers = tuple(i for i, block in enumerate(model.layers) if block.cached)
    if not layers:
        raise ValueError("the model has no MLA layer: there are no rows to look at")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"ids has shape {ids.shape} and dtype {ids.dtype}, expected integers [T]")
    if positions.ndim != 1 or not positions.size or not 0 <= positions.min() <= positions.max() < len(ids):
        raise ValueError(f"positions={positions} must be a list of positions of the text, 0 to {len(ids) - 1}")
    words = model.config.vocab_size
    if not 0 <= ids.min() <= ids.max() < words:
        raise ValueError(f"ids has values in [{ids.min()}, {ids.max()}], the vocabulary has {words} entries")
    used, plain = _dissect(*nnx.split(model), jnp.asarray(ids, jnp.int32), jnp.asarray(positions, jnp.int32))
    attention = model.layers[layers[0]].self_attn
    yarn = model.config.rope_scaling
    yarn = yarn and dataclasses.replace(yarn, mscale=yarn.mscale_all_dim)
    facts = dict(latent_dim=attention.latent, scale=attention.scale, theta=model.config.rope_theta, yarn=yarn)
    return Anatomy(*used, *(plain or used), jnp.asarray(positions, jnp.int32), layers, **facts)


@functools.partial(jax.jit, static_argnums=0)
def _dissect(graph, weights, ids, positions):
    """(rows, queries) as used, and before rotation (None where nothing is rotated)."""
    model = nnx.merge(graph, weights)
    stream = model.hidden(ids[None])
    inputs = [
        (block.self_attn, block.input_layernorm(x[0]))
        for block, x in zip(model.layers, stream[:-1], strict=True)
        if block.cached
    ]
    where = jnp.arange(len(ids))
    used = _project(inputs, where, positions, positions)
    rotated = model.config.rotated
    return used, _project(inputs, 0 * where, positions, 0 * positions) if rotated else None


def _project(inputs, row_positions, asked, query_positions):
    """Rows of every token and queries of those asked, of all layers, each taken to stand at the given positions."""
    rows = [layer.project(x, row_positions)[1] for layer, x in inputs]
    queries = [layer.project(x[asked], query_positions)[0] for layer, x in inputs]
    return jnp.stack(rows).astype(jnp.float32), jnp.stack(queries).astype(jnp.float32)


def text(prose: needles.Prose, index: int, *, length: int, seed: int = 0, kind: str = "prose") -> np.ndarray:
    """Held-out text number `index`, int32 [length]: BOS and prose, or BOS and the end of a needle trial and answer.

    Raises ValueError for a kind that is neither 'prose' nor 'needle'.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is unknown; choose one of {', '.join(KINDS)}")
    if kind == "needle":
        body = needles.trial(prose, index, prefix=length, seed=seed).ids[-(length - 1) :]
    else:
        rng = np.random.default_rng([corpus.SPLITS.index("test"), seed, length, index])
        body = prose.draw("test", rng, length - 1)
    return np.concatenate([np.array([prose.bos], np.int32), body])


def late(length: int, count: int) -> np.ndarray:
    """`count` positions spread evenly over the second half of a text: every query has many rows to choose from.

    Raises ValueError for more than there are.
    """
    first = length // 2
    if not 1 <= count <= length - first:
        raise ValueError(f"queries={count} must be at least 1 and at most {length - first}, half of length={length}")
    return first + np.arange(count) * (length - first) // count
