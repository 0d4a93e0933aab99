"""DecoderState: what a sequence needs to go on, and moving sequences between slots of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
from jax import Array

import vestige_jax as vk
from vestige_jax.models.cached import MLAState
from vestige_jax.models.kda import KDAState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecoderState:
    """layers: one KDAState or MLAState per block; length: int32 [B], tokens consumed."""

    layers: tuple[KDAState | MLAState, ...]
    length: Array

    @property
    def caches(self) -> tuple[vk.Cache, ...]:
        """The caches of the MLA layers, in layer order."""
        return tuple(layer.cache for layer in self.layers if isinstance(layer, MLAState))


def fork(spec: vk.CacheSpec, state: DecoderState, slots: Array) -> DecoderState:
    """A batch whose sequence i continues sequence slots[i]: recurrent memory, convolution window, cache, all of it."""
    return _map(lambda x: x[slots], lambda cache: vk.fork(spec, cache, slots), state)


def take(spec: vk.CacheSpec, state: DecoderState, slot: int | Array) -> DecoderState:
    """The sequence in one slot, as a state of batch 1."""
    return _map(lambda x: _row(x, slot), lambda cache: vk.take(spec, cache, slot), state)


def put(spec: vk.CacheSpec, state: DecoderState, slot: int | Array, single: DecoderState) -> DecoderState:
    """`state` with the sequence in `slot` replaced by `single`, a state of batch 1."""
    write = lambda x, one: x.at[slot].set(one[0])  # noqa: E731
    return _map(write, lambda cache, one: vk.put(spec, cache, slot, one), state, single)


def reset(spec: vk.CacheSpec, state: DecoderState, slot: int | Array) -> DecoderState:
    """`state` with an empty sequence in `slot`."""
    cleared = _map(lambda x: x.at[slot].set(0), lambda cache: vk.reset(spec, cache, slot), state)
    return dataclasses.replace(cleared, layers=tuple(_forget(layer, slot) for layer in cleared.layers))


def _forget(layer: KDAState | MLAState, slot: int | Array) -> KDAState | MLAState:
    if isinstance(layer, KDAState):
        return layer
    return dataclasses.replace(layer, positions=layer.positions.at[slot].set(-1))


def _row(x: Array, slot: int | Array) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, slot, 1) if x.ndim else x


def _map(array: Callable, cache: Callable, *states: DecoderState) -> DecoderState:
    """Applies `array` to every plain array of the states and `cache` to every cache, both batch-leading."""
    is_cache = lambda x: isinstance(x, vk.Cache)  # noqa: E731
    apply = lambda first, *rest: (cache if is_cache(first) else array)(first, *rest)  # noqa: E731
    return jax.tree.map(apply, *states, is_leaf=is_cache)
