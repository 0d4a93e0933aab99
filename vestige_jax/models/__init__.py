"""Decoders built from Hugging Face checkpoints, serving through a VestigeKV cache."""

from vestige_jax.models.cached import MLAState
from vestige_jax.models.checkpoint import load, save
from vestige_jax.models.config import ModelConfig
from vestige_jax.models.decoder import Decoder
from vestige_jax.models.kda import KDAState
from vestige_jax.models.state import DecoderState, fork, put, reset, take
from vestige_jax.models.tokenizer import Tokenizer

__all__ = [
    "Decoder",
    "DecoderState",
    "KDAState",
    "MLAState",
    "ModelConfig",
    "Tokenizer",
    "fork",
    "load",
    "put",
    "reset",
    "save",
    "take",
]
