"""What several drivers refuse of a config before anything is measured. Each raises ValueError that names the field."""

import contextlib
from collections.abc import Iterator, Sequence

import ml_collections

from experiments.harness import twins
from experiments.harness.checkpoints import checkpoint_folder
from experiments.harness.twins import Twin


def positive(config: ml_collections.ConfigDict, *names: str) -> None:
    """Raises for a field that is no number above 0; nan is none."""
    for name in names:
        if not config[name] > 0:
            raise ValueError(f"{name}={config[name]} must be above 0")


def distinct(config: ml_collections.ConfigDict, *names: str) -> None:
    """Raises for a list that holds a value twice: its rows would be counted twice."""
    for name in names:
        twice = [value for i, value in enumerate(config[name]) if value in config[name][:i]]
        if twice:
            raise ValueError(f"{name}={config[name]} must be different values, {twice[0]!r} is there twice")


@contextlib.contextmanager
def naming(config: ml_collections.ConfigDict, **fields: str) -> Iterator[None]:
    """Inside, what a CacheSpec says of one of its fields is said of the field of the config that it came from."""
    try:
        yield
    except ValueError as error:
        name = fields.get(str(error).partition("=")[0])
        if name is None:
            raise
        raise ValueError(f"{name}={config[name]} cannot be run: {error}") from error


def checkpoint(path: str, name: str = "checkpoint") -> None:
    """Raises unless a checkpoint is there."""
    if not path or not (checkpoint_folder(path) / "config.json").exists():
        raise ValueError(f"{name}={path!r} must be a folder with a config.json, like vestige_jax/checkpoints/tiny_nope")


def family(config: ml_collections.ConfigDict) -> list[Twin]:
    """Every twin that a config names. Raises unless the main one is among them and there; others may be missing."""
    checkpoint(config.checkpoint)
    found = twins.family(config)
    if 0 not in config.training_seeds:
        raise ValueError(
            f"training_seeds={config.training_seeds} must hold 0, the seed of checkpoint={config.checkpoint!r}"
        )
    return found


def say_missing(family: Sequence[Twin]) -> None:
    """A line on the screen for every checkpoint that is left out, with the command that makes it."""
    for twin in family:
        if not twin.weights:
            print(f"not there, left out: {twin.path}; made by: {twin.training}", flush=True)
