"""Nothing of T x T is held at T = 32768: prefill with observation and every method, as the compiler says.

A CPU's compiler does not count what a library call holds inside: the largest array of the program is looked at too.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from experiments.trials import serving
from vestige_jax import baselines, generation, models
from vestige_jax.models.observation import Rereading

T, CHUNK, BATCH = 32768, 1024, 1
MOST_BYTES = T * T // 8
"""One bit for each pair of positions: 128 MiB."""
MOST_NUMBERS = T * T // 128

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model():
    sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, kv_lora_rank=24, v_head_dim=8)
    branch = dict(qk_nope_head_dim=8, qk_rope_head_dim=32)
    layers = dict(num_hidden_layers=1, full_attn_layers=(0,), kda_num_heads=2, kda_head_dim=8)
    config = models.ModelConfig(vocab_size=32, **sizes, **branch, **layers)
    return models.Decoder(config, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def spec(model):
    return model.config.cache_spec(T, block=4096, ratio=1 / 8, rank=4, fetch=512, dtype=jnp.float32)


@pytest.fixture(scope="module")
def state(model, spec):
    """Shapes alone."""
    return jax.eval_shape(lambda: model.init_state(spec, BATCH, observe=True))


def held(function, *args) -> tuple[int, int]:
    """Bytes that the compiled program holds beside its arguments and results, and the size of its largest array."""
    compiled = function.lower(*args).compile()
    shapes = re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", compiled.as_text())
    sizes = [math.prod(int(n) for n in shape.split(",") if n) for shape in shapes]
    return compiled.memory_analysis().temp_size_in_bytes, max(sizes)


def assert_small(function, *args):
    held_bytes, largest = held(function, *args)
    assert held_bytes < MOST_BYTES and largest < MOST_NUMBERS
    assert largest >= T  # the text was understood


def with_seen(state, change):
    layers = tuple(layer.__class__(**(vars(layer) | {"seen": change(layer.seen)})) for layer in state.layers)
    return state.__class__(layers, state.length)


@pytest.mark.parametrize("reread", [False, True])
def test_prefill_with_observation(model, spec, state, reread):
    if reread:
        state = with_seen(state, lambda seen: Rereading(seen.mass))
    graph, weights = nnx.split(model)
    ids, lengths = jnp.zeros((BATCH, CHUNK), jnp.int32), jnp.full(BATCH, CHUNK)
    logits = jnp.zeros((BATCH, model.config.vocab_size))
    assert_small(generation._prefill, graph, weights, spec, ids, lengths, logits, state)


@pytest.mark.parametrize("name", [*baselines.SELECTORS, *baselines.MERGERS])
def test_selection(spec, state, name):
    method = baselines.method(name)
    own = serving.served(spec, method)
    state = with_seen(state, lambda seen: seen.__class__(**(vars(seen) | {"repeat": seen.mass})))
    run = jax.jit(functools.partial(serving._choose, own, method.selector, method.kind))
    seeds = jnp.zeros((1, BATCH), jnp.uint32)
    assert_small(run, list(state.layers), jnp.int32(T // 8), seeds)


def test_a_score_for_each_pair_of_positions_is_seen():
    rows = jax.ShapeDtypeStruct((T, 8), jnp.float32)
    assert held(jax.jit(lambda q, k: jax.nn.softmax(q @ k.T, axis=-1).sum(0)), rows, rows)[1] == T * T
