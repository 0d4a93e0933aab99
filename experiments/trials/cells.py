"""What drivers that serve prompts work with: one checkpoint, its text, and cells measured on a shared prefill.

A cell is a method at a ratio, on a batch of trials. What comes before the cut does not depend on it, so a batch is
prefilled once, whatever is measured on it.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

import vestige_jax as vk
from experiments.harness.checkpoints import checkpoint_folder, dtype
from experiments.text import corpus, needles
from experiments.trials import checks, needle_batch, serving
from experiments.trials.needle_batch import Batch
from vestige_jax import baselines, generation, models
from vestige_jax.models import DecoderState, MLAState
from vestige_jax.spec import CacheSpec, keep_count


class Cells:
    """A model and its text. Holds the state of one prefilled batch at a time.

    Args: checkpoint, a folder as given or under the root of the checkout; text as in `corpus.load`; chunk, tokens of a
    prompt per prefill step; methods, those whose statistics the prefill collects; prose, the text if it is in tokens
    of this model's vocabulary already.
    Raises ValueError or OSError for what cannot be loaded.
    """

    def __init__(
        self,
        checkpoint: str,
        *,
        text: str | None,
        weights_dtype: str,
        chunk: int,
        methods: Iterable[baselines.Method] = (),
        prose: needles.Prose | None = None,
    ):
        checks.checkpoint(checkpoint)
        self.folder, self.chunk, self.methods = checkpoint_folder(checkpoint), chunk, tuple(methods)
        self.model = models.load(self.folder, dtype=dtype("weights_dtype", weights_dtype))
        self.prose = prose or needles.Prose(corpus.load(text), models.Tokenizer.load(self.folder))
        self._prefilled: tuple[Batch, CacheSpec, DecoderState] | None = None

    @property
    def layers(self) -> int:
        """Layers that have a cache."""
        return len(self.model.config.full_attn_layers)

    def spec(
        self,
        batch: Batch,
        *,
        block: int,
        rows_dtype: str,
        ratios: Sequence[float],
        methods: Iterable[baselines.Method] | None = None,
        **fields: Any,
    ) -> CacheSpec:
        """One spec for every method and ratio: tier 1 has room for the largest keep set; smaller ones fit in.

        block 0 is the whole prefix; methods, those that are served under it, by default all. Raises ValueError where
        the tail could serve the needle, or would close, and for a method that cannot be served like this.
        """
        block = block or batch.prefix
        if batch.prefix % block:
            raise ValueError(
                f"prefixes={batch.prefix} must be a multiple of block={block}: rows behind the last whole block are "
                "always attended, and the needle may be one of them"
            )
        if batch.longest >= block:
            raise ValueError(f"block={block} must be longer than the {batch.longest} tokens of question and answer")
        capacity, stored = batch.prefix + batch.longest, dtype("rows_dtype", rows_dtype)
        sizes = dict(block=block, ratio=1 / min(ratios), trace=True, dtype=stored)
        spec = self.model.config.cache_spec(capacity, **sizes, **fields)
        for method in self.methods if methods is None else methods:
            serving.check(spec, method)
        return spec

    def prefill(self, spec: CacheSpec, batch: Batch) -> DecoderState:
        """The state of the batch at the cut: computed once, and shared by its cells, whose specs may differ."""
        if self._prefilled is None or self._prefilled[0] is not batch:
            self._prefilled = None  # one at a time
            ids, phrase = jnp.asarray(batch.ids), self.prose.encode(serving.PHRASE).tolist()
            state = serving.prefill(self.model, spec, ids, self.methods, chunk=self.chunk, phrase=phrase)
            self._prefilled = batch, spec, state
        _, own, state = self._prefilled
        return state if own == spec else relaid(spec, state)

    def measure(
        self, spec: CacheSpec, batch: Batch, method: baselines.Method, ratio: float, seed: int
    ) -> list[dict[str, Any]]:
        """A row for each of the batch's places: what `needle_batch.measure` says of this method at this ratio."""
        spec, state = self.compressed(spec, batch, method, ratio, seed)
        tokens, lengths = jnp.asarray(batch.tokens), jnp.asarray(batch.lengths)
        forced = generation.teacher_force(self.model, spec, state, tokens, lengths)
        return needle_batch.measure(spec, batch, state, forced)

    def compressed(
        self, spec: CacheSpec, batch: Batch, method: baselines.Method, ratio: float, seed: int
    ) -> tuple[CacheSpec, DecoderState]:
        """The state at the cut with tier 1 as the method has it, and the spec that it is decoded under."""
        state, served = self.prefill(spec, batch), serving.served(spec, method)
        rows = keep_count(batch.prefix, 1 / ratio, None)
        seeds = jnp.asarray(needle_batch.seeds(batch, seed, self.layers))
        return served, serving.compress(served, state, method, rows, seeds)


def relaid(spec: CacheSpec, state: DecoderState) -> DecoderState:
    """The state with tier 1 and index as this spec lays them out, both empty: select and calibrate before decoding."""
    layers = list(state.layers)
    for i, layer in enumerate(layers):
        if isinstance(layer, MLAState):
            empty = vk.init(spec, layer.positions.shape[0])
            parts = dict(tier1=empty.tier1, index=empty.index, calibration=empty.calibration)
            layers[i] = dataclasses.replace(layer, cache=dataclasses.replace(layer.cache, **parts))
    return dataclasses.replace(state, layers=tuple(layers))
