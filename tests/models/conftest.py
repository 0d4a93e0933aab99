"""The golden Kimi checkpoint, its reference arrays, and a spec that attends every row."""

import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file

from vestige_jax import models


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly(quick_compilation):
    """All modules here."""


@pytest.fixture(scope="session")
def kimi(golden):
    """The random three-layer checkpoint: KDA, KDA + MoE, MLA + MoE."""
    return models.load(golden / "kimi_tiny")


@pytest.fixture(scope="session")
def reference(golden):
    """Ids [2, 83], logits and hidden states of an independent implementation."""
    return load_file(golden / "kimi_tiny" / "reference.safetensors")


@pytest.fixture(scope="session")
def ids(reference):
    return jnp.asarray(reference["input_ids"], jnp.int32)


@pytest.fixture(scope="session")
def spec(kimi):
    """Five closed blocks of 16 at the end of the reference ids, all of their rows kept."""
    return kimi.config.cache_spec(96, block=16, ratio=1.0, rank=8, fetch=64, dtype=jnp.float32)
