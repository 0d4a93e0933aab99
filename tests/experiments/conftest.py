"""Twins that drivers can run in seconds."""

import json
import shutil

import pytest
from flax import nnx

from experiments.text import vocabulary
from vestige_jax import models

PROSE = [f"Line {i} of a text about nothing, with words like river, mountain, paper and {i * 7}." for i in range(600)]
PHRASES = ["The secret passcode for is . What is the secret passcode for ? Please write down that wears badge"] * 20


@pytest.fixture(scope="session")
def twins(tmp_path_factory):
    """A folder with random checkpoints nope and rope, of the same weights and two MLA layers, and text.txt."""
    folder = tmp_path_factory.mktemp("twins")
    (folder / "text.txt").write_text("\n\n".join(PROSE))
    sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, kv_lora_rank=8, v_head_dim=8)
    branch = dict(qk_nope_head_dim=8, qk_rope_head_dim=4)
    layers = dict(num_hidden_layers=2, full_attn_layers=(0, 1), kda_num_heads=2, kda_head_dim=8)
    config = models.ModelConfig(vocab_size=400, initializer_range=0.5, **sizes, **branch, **layers)
    make = nnx.jit(lambda: models.Decoder(config, rngs=nnx.Rngs(0)))  # one program, not one for each shape
    models.save(folder / "nope", make())
    vocabulary.tokenizer(vocabulary.train(PROSE + PHRASES, 350)).save(folder / "nope")
    shutil.copytree(folder / "nope", folder / "rope")
    raw = json.loads((folder / "rope" / "config.json").read_text())
    (folder / "rope" / "config.json").write_text(json.dumps(raw | {"mla_use_nope": False}))
    return folder


@pytest.fixture(scope="session")
def tiny(twins):
    """config -> the config on these twins, with two prompts and other changes."""

    def change(config, **changes):
        paths = dict(checkpoint=str(twins / "nope"), twin=str(twins / "rope"), text=str(twins / "text.txt"))
        with config.ignore_type():
            config.update(paths | dict(prompts=2) | changes)
        return config

    return change
