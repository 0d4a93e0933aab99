"""A whole model per token: with the policy, and with every row in the tail, which makes it a dense cache."""

import functools

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import nnx

from experiments.benchmark.bench_clock import Program
from experiments.harness import checkpoints
from experiments.text import corpus
from vestige_jax import generation, models
from vestige_jax.models import DecoderState
from vestige_jax.spec import CacheSpec

NAMES = ("policy", "dense")
STEPS = 32  # tokens in one compiled loop


def programs(config: ml_collections.ConfigDict, length: int, seen: list) -> list[Program]:
    """`STEPS` tokens behind a prompt of `length` held-out tokens, again and again from the same state.

    Tier 1 and index as in the needle experiment (rank 8, fetch 1024), calibrated on the prompt. `seen` receives Stats.
    """
    folder = checkpoints.checkpoint_folder(config.checkpoint)
    model, ids = models.load(folder), prompt(folder, length + STEPS)
    named = zip(NAMES, specs(model.config, length), strict=True)
    return [_program(name, model, spec, ids, seen) for name, spec in named]


def specs(config: models.ModelConfig, length: int) -> tuple[CacheSpec, CacheSpec]:
    """Of the policy, and of a cache that closes no block. ValueError for a model that cannot be served like this."""
    sizes = {"rank": min(8, config.kv_lora_rank), "fetch": 1024, "dtype": jnp.float32}
    policy = config.cache_spec(length + STEPS, block=min(4096, length), **sizes)
    return policy, config.cache_spec(length + STEPS, block=length + STEPS + 1, **sizes)


def prompt(folder, count: int) -> jax.Array:
    """Held-out text, int32 [1, count]; over again where there is too little."""
    tokenizer = models.Tokenizer.load(folder)
    text = "\n".join(document.text for document in corpus.load().split("test"))[: 8 * count]
    return jnp.asarray(np.resize(np.asarray(tokenizer.encode(text), np.int32), (1, count)))


def _program(name, model, spec, ids, seen) -> Program:
    _, state = generation.prefill(model, spec, ids[:, :-STEPS], chunk=1024)
    if name == "policy":
        state = generation.calibrate(model, spec, state)
    graph, weights = nnx.split(model)

    def call():
        logits, stats = _decode(graph, weights, spec, state, ids[:, -STEPS:])
        if name == "policy":
            seen.append(stats)
        return logits

    return Program(name, call, inner=STEPS)


@functools.partial(jax.jit, static_argnames=("graph", "spec"))
def _decode(graph, weights, spec, state: DecoderState, ids):
    model = nnx.merge(graph, weights)

    def one(state, token):
        logits, state, stats = model.decode(spec, token, state)
        return state, (logits[:, 0], stats)

    return jax.lax.scan(one, state, ids.T)[1]
