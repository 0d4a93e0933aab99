"""Checkpoints that drivers are given: where they are, in what precision, and which ones exactly."""

import hashlib
import pathlib

import jax.numpy as jnp

from experiments.harness.runner import ROOT


def dtype(name: str, value: str) -> jnp.dtype:
    """A storage dtype by its name. Raises ValueError naming the config field."""
    if value not in ("float32", "bfloat16"):
        raise ValueError(f"{name}={value!r} must be float32 or bfloat16")
    return jnp.dtype(value)


def checkpoint_folder(path: str) -> pathlib.Path:
    """The folder as given, or under the root of the checkout."""
    return pathlib.Path(path) if pathlib.Path(path).exists() else ROOT / path


def fingerprint(folder: pathlib.Path) -> str:
    """A hash of a checkpoint: the first and last MiB of each file that decides what the model computes."""
    digest, end = hashlib.sha256(), 1 << 20
    names = ("config.json", "tokenizer_config.json", "tiktoken.model")
    for path in sorted(p for p in folder.iterdir() if p.suffix == ".safetensors" or p.name in names):
        with open(path, "rb") as file:
            digest.update(f"{path.name} {path.stat().st_size} ".encode() + file.read(end))
            file.seek(max(0, path.stat().st_size - end))
            digest.update(file.read(end))
    return digest.hexdigest()[:16]
