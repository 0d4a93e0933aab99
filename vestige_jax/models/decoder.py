"""The decoder: embeddings, blocks of attention and feed-forward, logits; dense, prefill and decode."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import vestige_jax as vk
from vestige_jax.models.cached import Cached
from vestige_jax.models.config import ModelConfig
from vestige_jax.models.gqa import GQA
from vestige_jax.models.kda import KDA
from vestige_jax.models.layers import FFN, RMSNorm
from vestige_jax.models.mla import MLA
from vestige_jax.models.moe import MoE
from vestige_jax.models.state import DecoderState

Logits = Literal["all", "last", "none"]


class Block(nnx.Module):
    """x += attention(rms(x)); x += feed-forward(rms(x))."""

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs, dtype):
        width, eps = config.hidden_size, config.rms_norm_eps
        full = GQA if config.grouped else MLA
        attention = full if layer in config.full_attn_layers else KDA
        self.input_layernorm = RMSNorm(width, eps, dtype=dtype)
        self.self_attn = attention(config, rngs=rngs, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(width, eps, dtype=dtype)
        if config.is_moe(layer):
            self.block_sparse_moe = MoE(config, rngs=rngs, dtype=dtype)
        else:
            self.mlp = FFN(width, config.intermediate_size, rngs=rngs, dtype=dtype)

    @property
    def cached(self) -> bool:
        """Whether this block keeps rows in a cache."""
        return isinstance(self.self_attn, Cached)

    def __call__(self, x: Array) -> Array:
        return self._feed(x + self.self_attn(self.input_layernorm(x)))

    def prefill(self, spec, x: Array, state, lengths: Array | None):
        """(x, state) after T more tokens."""
        args = (self.input_layernorm(x), state, lengths)
        out, state = self.self_attn.prefill(spec, *args) if self.cached else self.self_attn.prefill(*args)
        return self._feed(x + out), state

    def decode(self, spec, x: Array, state, active: Array | None):
        """(x, state, stats) after one more token; stats is None where there is no cache."""
        args = (self.input_layernorm(x), state, active)
        if self.cached:
            out, state, stats = self.self_attn.decode(spec, *args)
        else:
            (out, state), stats = self.self_attn.decode(*args), None
        return self._feed(x + out), state, stats

    def _feed(self, x: Array) -> Array:
        feed = self.mlp if hasattr(self, "mlp") else self.block_sparse_moe
        return x + feed(self.post_attention_layernorm(x))


class Decoder(nnx.Module):
    """Kimi Linear (KDA and NoPE-MLA blocks), its twins (the branch rotated; GQA for MLA), DeepSeek-V2 (MLA throughout).

    Three ways through it compute the same function: the dense forward `model(ids)`, `prefill` over chunks, and `decode`
    token by token (exact while the cache attends every row).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        shape = (config.vocab_size, config.hidden_size)
        self.config = config
        self.embed_tokens = nnx.Param(_table(rngs, shape, config.initializer_range, dtype))
        self.layers = nnx.List(Block(config, i, rngs=rngs, dtype=dtype) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.lm_head = nnx.Param(_table(rngs, shape, config.initializer_range, dtype))

    def __call__(self, ids: Array) -> Array:
        """Dense forward: ids int [B,T] -> logits float32 [B,T,V]."""
        return self._logits(self.hidden(ids)[-1])

    def hidden(self, ids: Array) -> tuple[Array, ...]:
        """The residual stream [B,T,D] before the first block and after each block."""
        _check_ids(ids, 2)
        x = self._embed(ids)
        stream = [x]
        for block in self.layers:
            x = block(x)
            stream.append(x)
        return tuple(stream)

    def init_state(self, spec: vk.CacheSpec, batch: int, observe: bool = False) -> DecoderState:
        """The state before the first token.

        Args:
          spec: from `config.cache_spec`; one for all MLA layers.
          batch: number of sequences.
          observe: also add up what prompt queries look at, and their mean and covariance (`MLAState.seen`).
        """
        self._check_spec(spec)
        layers = [
            block.self_attn.init_state(spec, batch, observe) if block.cached else block.self_attn.init_state(batch)
            for block in self.layers
        ]
        return DecoderState(tuple(layers), jnp.zeros((batch,), jnp.int32))

    def prefill(
        self, spec: vk.CacheSpec, ids: Array, state: DecoderState, lengths: Array | None = None, logits: Logits = "all"
    ) -> tuple[Array | None, DecoderState]:
        """Continues from `state` by ids [B,T]; may be called any number of times, on chunks of any size.

        Args:
          lengths: int32 [B]; tokens at or past lengths[b] are padding and change nothing.
          logits: 'all' -> [B,T,V]; 'last' -> [B,V], at the last real token (undefined where lengths[b] is 0); 'none' ->
            None. Only what is asked for is computed.
        """
        _check_ids(ids, 2)
        if logits not in ("all", "last", "none"):
            raise ValueError(f"logits is {logits!r}, expected 'all', 'last' or 'none'")
        x, layers = self._embed(ids), []
        for block, layer in zip(self.layers, state.layers, strict=True):
            x, layer = block.prefill(spec, x, layer, lengths)
            layers.append(layer)
        added = ids.shape[1] if lengths is None else lengths
        state = DecoderState(tuple(layers), state.length + added)
        if logits == "none":
            return None, state
        return self._logits(_at_end(x, lengths) if logits == "last" else x), state

    def calibrate(self, spec: vk.CacheSpec, state: DecoderState) -> DecoderState:
        """Fits the index of every MLA layer to its last prompt queries (VestigeKV §3)."""
        layers = [
            block.self_attn.calibrate(spec, layer) if block.cached else layer
            for block, layer in zip(self.layers, state.layers, strict=True)
        ]
        return DecoderState(tuple(layers), state.length)

    def decode(
        self, spec: vk.CacheSpec, ids: Array, state: DecoderState, active: Array | None = None
    ) -> tuple[Array, DecoderState, vk.Stats | None]:
        """One token per sequence: ids [B] -> (logits float32 [B,V], state, Stats with leading [MLA layers]).

        A sequence with active[b] false keeps its state; its logits mean nothing. Stats is None in a model without MLA.
        """
        _check_ids(ids, 1)
        x, layers, stats = self._embed(ids), [], []
        for block, layer in zip(self.layers, state.layers, strict=True):
            x, layer, seen = block.decode(spec, x, layer, active)
            layers.append(layer)
            stats += [seen] if block.cached else []
        added = 1 if active is None else active.astype(jnp.int32)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *stats) if stats else None
        return self._logits(x), DecoderState(tuple(layers), state.length + added), stacked

    def _embed(self, ids: Array) -> Array:
        # An id outside the table would be clamped to its edge in silence; NaN shows in every result.
        return self.embed_tokens[...].at[ids].get(mode="fill", fill_value=jnp.nan)

    def _logits(self, x: Array) -> Array:
        return jnp.einsum("...d,vd->...v", self.norm(x), self.lm_head[...], preferred_element_type=jnp.float32)

    def _check_spec(self, spec: vk.CacheSpec) -> None:
        config = self.config
        if config.rotated and not spec.allow_rope:
            raise ValueError("the branch of this model is rotated: use config.cache_spec(allow_rope=True)")
        have = (spec.latent_dim, spec.branch_dim, spec.num_heads, spec.scale)
        want = (config.latent_dim, config.branch_dim, config.num_attention_heads, config.softmax_scale)
        if have != want:
            raise ValueError(f"spec has (latent, branch, heads, scale) {have}, this model {want}; use its cache_spec")


def _table(rngs: nnx.Rngs, shape: tuple[int, int], spread: float, dtype) -> Array:
    return (jax.random.normal(rngs.params(), shape, jnp.float32) * spread).astype(dtype)


def _at_end(x: Array, lengths: Array | None) -> Array:
    """[B,T,D] -> [B,D], the last real token of each sequence."""
    if lengths is None:
        return x[:, -1]
    last = jnp.maximum(lengths - 1, 0)
    return jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]


def _check_ids(ids: Array, rank: int) -> None:
    if ids.ndim != rank or 0 in ids.shape or not jnp.issubdtype(ids.dtype, jnp.integer):
        shape = "[B, T], at least one" if rank == 2 else "[B]"
        raise ValueError(f"ids has shape {ids.shape} and dtype {ids.dtype}, expected integers {shape}")
