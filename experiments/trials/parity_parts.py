"""What the three parts of the parity experiment measure on one batch.

Each is made of cells and a config, raises ValueError for what cannot be run before anything compiles, and has
``measure(batch, side, ratio)``, which gives one row for each place of the batch.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import nnx

from experiments.harness import checkpoints
from experiments.text import windows
from experiments.trials import serving
from experiments.trials.cells import Cells
from experiments.trials.needle_batch import Batch
from vestige_jax import baselines, generation, models
from vestige_jax.generation import Sampler
from vestige_jax.models import Decoder
from vestige_jax.spec import CacheSpec

DENSE, CHUNKS, DTYPE = "dense", "dense, other chunks", "dense, other dtype"
TEXT, RESAMPLED = "text", "dense again"


class Text:
    """NLL of every token behind the cut, as deployed: prefill in chunks, calibrate, decode; blocks close all along."""

    def __init__(self, cells: Cells, config: ml_collections.ConfigDict):
        self.cells, self.config = cells, config
        self.other_rows = checkpoints.dtype("other_rows_dtype", config.other_rows_dtype)
        self.other_weights = checkpoints.dtype("other_weights_dtype", config.other_weights_dtype)
        self.spec(min(config.ratios))

    def spec(self, ratio: int) -> CacheSpec:
        return windows.cache_spec(
            self.cells.model, self.config, self.config.prefix, self.config.tokens, ratio=1 / ratio
        )

    def measure(self, batch: Batch, side: str, ratio: int) -> list[dict[str, Any]]:
        spec, model = self.spec(ratio), self.cells.model
        chunk = self.config.other_chunk if side == CHUNKS else self.config.chunk
        if side == DTYPE:
            spec, model = dataclasses.replace(spec, dtype=self.other_rows), self.other
        dense = side in (DENSE, CHUNKS, DTYPE)
        spec = serving.served(spec, baselines.method("dense" if dense else side))
        _, state = generation.prefill(model, spec, jnp.asarray(batch.ids), chunk=chunk)
        state = state if dense else generation.calibrate(model, spec, state)
        forced = generation.teacher_force(model, spec, state, jnp.asarray(batch.tokens))
        traffic = windows.traffic(spec, batch, forced)
        return [
            {"nll": loss, "bytes": windows.nbytes(self.cells.prose, trial.answer)} | means
            for loss, trial, means in zip(windows.losses(forced), batch.trials, traffic, strict=False)
        ]

    @functools.cached_property
    def other(self) -> Decoder:
        """The model in the other dtype; the same one where the weights keep theirs."""
        if self.config.other_weights_dtype == self.config.weights_dtype:
            return self.cells.model
        return models.load(self.cells.folder, dtype=self.other_weights)


class Needle:
    """Needle trials, as `experiments.needle` has them."""

    def __init__(self, cells: Cells, config: ml_collections.ConfigDict, batch: Batch):
        self.cells, self.seed = cells, config.seed
        fields = {name: config[name] for name in ("rows_dtype", "ratios", *windows.FIELDS)}
        self.spec = cells.spec(batch, **fields)

    def measure(self, batch: Batch, side: str, ratio: int) -> list[dict[str, Any]]:
        return self.cells.measure(self.spec, batch, baselines.method(side), ratio, self.seed)


class Samples:
    """Continuations of a context, each as one vector: the text's own, sampled densely, sampled through the policy.

    MAUVE takes the hidden state of a text's last token; short continuations are read more steadily by the mean of the
    last hidden states over their tokens, which is what is taken here.
    """

    def __init__(self, cells: Cells, config: ml_collections.ConfigDict):
        self.cells, self.config = cells, config
        self.sampler = Sampler(config.temperature, top_p=config.top_p)
        model, steps = cells.model, config.steps + 1
        self.spec = windows.cache_spec(model, config, config.context, steps, ratio=1 / config.deployed)

    def measure(self, batch: Batch, side: str, ratio: int) -> list[dict[str, Any]]:
        tokens = batch.tokens if side == TEXT else self._sampled(batch, side)
        graph, weights = nnx.split(self.cells.model)
        ids = jnp.asarray(np.concatenate([batch.ids, tokens], axis=1))
        features = np.asarray(_features(graph, weights, ids, batch.prefix))
        return [{"tokens": line, "features": vector} for line, vector in zip(tokens, features, strict=True)][
            : len(batch.places)
        ]

    def _sampled(self, batch: Batch, side: str) -> np.ndarray:
        """Tokens int32 [B, steps]. Dense again and the policy draw with the same keys: only the policy differs."""
        spec = serving.served(self.spec, baselines.method("dense" if side in (DENSE, RESAMPLED) else side))
        keys = np.random.SeedSequence([self.config.seed, batch.places[0][1], side != DENSE])
        seed = int(keys.generate_state(1)[0] >> 1)
        options = dict(sampler=self.sampler, seed=seed, eos=(), chunk=self.config.chunk)
        return np.asarray(generation.generate(self.cells.model, spec, batch.ids, self.config.steps, **options).tokens)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _features(graph, weights, ids, cut):
    """Mean over the tokens behind the cut of the normalised last hidden state: float32 [B, D]."""
    model = nnx.merge(graph, weights)
    return model.norm(model.hidden(ids)[-1])[:, cut:].astype(jnp.float32).mean(1)
