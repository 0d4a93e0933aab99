"""Checkpoints in the Hugging Face layout: config.json and safetensors, one file or shards with an index."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from vestige_jax.models.config import ModelConfig
from vestige_jax.models.decoder import Decoder

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_LISTED = 12
# Inside two exponentials: these keep float32 whatever the model is loaded as.
_FLOAT32 = ("A_log", "dt_bias")
_EXPERTS = ("w1", "w2", "w3")
_TABLES = ("embed_tokens", "lm_head")
# What DeepSeek calls the same modules.
_DEEPSEEK = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_VECTORS = ("scale", "o_norm", "e_score_correction_bias", "dt_bias")


@dataclasses.dataclass(frozen=True)
class Entry:
    """How one parameter lies in the files: its tensors (several for stacked experts), their shape, and the two maps."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    read: Callable[[np.ndarray], np.ndarray]
    write: Callable[[np.ndarray], np.ndarray]


def load(path: str | pathlib.Path, *, dtype=jnp.float32) -> Decoder:
    """Reads a model from a folder with config.json and model.safetensors, or shards and their index.

    Strict: every tensor the config asks for must be there, in its shape, and nothing else. All names and shapes are
    checked before any weight is read; then one shard is open at a time.

    Args:
      path: the folder.
      dtype: of every parameter except the decay's `A_log` and `dt_bias`, which stay float32.

    Raises: FileNotFoundError for a missing file; ValueError that names each missing, extra or misshaped tensor, the
      first with a value that is not finite, a damaged or truncated file, or what is wrong with the config.
    """
    folder = pathlib.Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"no checkpoint folder at {folder}")
    config = ModelConfig.from_json(folder)
    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype))
    graph, state = nnx.split(abstract)
    flat = dict(nnx.to_flat_state(state))
    entries = {where: entry(where, param.shape, config.model_type) for where, param in flat.items()}
    shards = _shards(folder)
    _check_tensors(folder, entries, shards)
    filled = {where: flat[where].replace(value) for where, value in _read_all(flat, entries, shards)}
    return nnx.merge(graph, nnx.from_flat_state(filled))


def save(path: str | pathlib.Path, model: Decoder, tokenizer=None) -> None:
    """Writes config.json, model.safetensors and, if given, the tokenizer's files into the folder `path`."""
    folder = pathlib.Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    for where, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        value = np.asarray(param[...])
        item = entry(where, param.shape, model.config.model_type)
        tensors.update(_to_file(item, value if where[-1] in _EXPERTS else value[None]))
    (folder / "config.json").write_text(json.dumps(model.config.to_json(), indent=1) + "\n")
    unfinished = folder / f"{WEIGHTS}.part"
    safetensors.numpy.save_file(tensors, unfinished, metadata={"format": "pt"})
    os.replace(unfinished, folder / WEIGHTS)
    if tokenizer is not None:
        tokenizer.save(folder)


def entry(where: tuple, shape: tuple[int, ...], model_type: str = "kimi_linear") -> Entry:
    """The file layout of the parameter at a path of the module tree: kernels there are [outputs, inputs], flattened."""
    leaf = where[-1]
    names = _names(where, shape, _DEEPSEEK if model_type == "deepseek_v2" else {})
    if leaf in _TABLES:
        return Entry(names, shape, lambda x: x, lambda x: x)
    if leaf in _VECTORS:
        return _reshaped(names, shape, (math.prod(shape),))
    if leaf == "A_log":
        return _reshaped(names, shape, (1, 1, *shape, 1))
    if leaf.endswith("_conv1d"):
        taps, channels = shape[0], math.prod(shape[1:])
        layout = (channels, 1, taps)
        return Entry(names, layout, lambda x: x[:, 0].T.reshape(shape), lambda x: x.reshape(taps, -1).T[:, None])
    shape = shape[1:] if leaf in _EXPERTS else shape
    inputs = math.prod(shape[:2]) if leaf == "o_proj" else shape[0]
    outputs = math.prod(shape) // inputs
    return Entry(names, (outputs, inputs), lambda x: x.T.reshape(shape), lambda x: x.reshape(inputs, outputs).T)


def _reshaped(names: tuple[str, ...], ours: tuple[int, ...], theirs: tuple[int, ...]) -> Entry:
    return Entry(names, theirs, lambda x: x.reshape(ours), lambda x: x.reshape(theirs))


def _names(where: tuple, shape: tuple[int, ...], renamed: Mapping[str, str]) -> tuple[str, ...]:
    leaf = where[-1]
    parts = [renamed.get(str(part), str(part)) for part in where]
    if leaf == "lm_head":
        return ("lm_head.weight",)
    base = ".".join(["model", *parts[:-1]])
    if leaf == "scale":
        return (f"{base}.weight",)
    if leaf in _EXPERTS:
        return tuple(f"{base}.experts.{e}.{parts[-1]}.weight" for e in range(shape[0]))
    if leaf == "e_score_correction_bias":
        return (f"{base}.gate.{leaf}",)
    return (f"{base}.{leaf}" if leaf in _FLOAT32 else f"{base}.{leaf}.weight",)


def _shards(folder: pathlib.Path) -> list[pathlib.Path]:
    index = folder / INDEX
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{index} is not a safetensors index: {error!r}") from error
        shards = [folder / name for name in files]
    else:
        shards = [folder / WEIGHTS]
    missing = [str(shard) for shard in shards if not shard.is_file()]
    if missing:
        raise FileNotFoundError(f"checkpoint files are missing: {', '.join(missing)}")
    return shards


@contextlib.contextmanager
def _opened(shard: pathlib.Path) -> Iterator[safetensors.safe_open]:
    try:
        handle = safetensors.safe_open(shard, framework="numpy")
    except safetensors.SafetensorError as error:
        size = shard.stat().st_size
        raise ValueError(f"{shard} ({size} bytes) is damaged or truncated, download it again: {error}") from error
    with handle as file:
        yield file


def _check_tensors(folder: pathlib.Path, entries: dict[tuple, Entry], shards: list[pathlib.Path]) -> None:
    want = {name: item.shape for item in entries.values() for name in item.names}
    have: dict[str, tuple[int, ...]] = {}
    for shard in shards:
        with _opened(shard) as file:
            have.update((name, tuple(file.get_slice(name).get_shape())) for name in file.keys())  # noqa: SIM118
    wrong = [f"{n} is {have[n]}, expected {want[n]}" for n in want if n in have and have[n] != want[n]]
    problems = {"missing": _absent(want, have), "extra": _absent(have, want), "misshaped": wrong}
    if any(problems.values()):
        found = "; ".join(f"{kind}: {_listed(names)}" for kind, names in problems.items() if names)
        raise ValueError(f"{folder} does not fit its config.json: {found}")


def _absent(names, others) -> list[str]:
    return [name for name in names if name not in others]


def _listed(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def _read_all(
    flat: dict, entries: dict[tuple, Entry], shards: list[pathlib.Path]
) -> Iterator[tuple[tuple, jnp.ndarray]]:
    """(path, value) as soon as the last tensor of a parameter has been read; stacked experts wait in host memory."""
    where = {name: (path, i) for path, item in entries.items() for i, name in enumerate(item.names)}
    waiting: dict[tuple, np.ndarray] = {}
    left = {path: len(item.names) for path, item in entries.items()}
    for shard in shards:
        with _opened(shard) as file:
            for name in file.keys():  # noqa: SIM118
                path, i = where[name]
                param, value = flat[path], entries[path].read(_finite(shard, name, file.get_tensor(name)))
                if path[-1] in _EXPERTS:
                    value = _stack(waiting.pop(path, None), value, i, param)
                left[path] -= 1
                if left[path]:
                    waiting[path] = value
                else:
                    yield path, jnp.asarray(value, param.dtype)


def _finite(shard: pathlib.Path, name: str, value: np.ndarray) -> np.ndarray:
    finite = np.isfinite(value)
    if not finite.all():
        bad = value.size - np.count_nonzero(finite)
        raise ValueError(f"{shard}: {bad} of the {value.size} values of {name} are not finite, expected none")
    return value


def _stack(buffer: np.ndarray | None, value: np.ndarray, i: int, param) -> np.ndarray:
    buffer = np.empty(param.shape, param.dtype) if buffer is None else buffer
    buffer[i] = value
    return buffer


def _to_file(item: Entry, value: np.ndarray) -> dict[str, np.ndarray]:
    return {name: np.ascontiguousarray(item.write(part)) for name, part in zip(item.names, value, strict=True)}
