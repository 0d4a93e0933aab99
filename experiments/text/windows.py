"""Windows of held-out text: a prefix that is compressed, and what follows it, token by token through the policy.

A window is a `needles.Trial` without a needle, so that `cells` and `needle_batch` serve it: its question is the first
token behind the cut, which the prefix itself predicts, and its answer are all others.
"""

from typing import Any

import ml_collections
import numpy as np

from experiments.harness.checkpoints import dtype
from experiments.text import corpus, needles
from experiments.trials import needle_batch
from experiments.trials.needle_batch import Batch
from vestige_jax.generation import Forced
from vestige_jax.models import Decoder
from vestige_jax.spec import CacheSpec

FIELDS = ("allow_rope", "block", "sinks", "rank", "fetch", "overflow")


def draw(prose: needles.Prose, *, seed: int, count: int, length: int, split: str = "test") -> np.ndarray:
    """`count` windows of held-out text, int32 [count, length], each behind a BOS; no two share a token of the text.

    Raises ValueError where the split has less text than that.
    """
    need, have = count * (length - 1), prose.size(split)
    if need > have:
        raise ValueError(f"{count} windows of {length} tokens need {need}, the {split} split of the text has {have}")
    rng = np.random.default_rng([corpus.SPLITS.index(split), seed, length])
    text = prose.draw(split, rng, need).reshape(count, length - 1)
    return np.concatenate([np.full((count, 1), prose.bos, np.int32), text], axis=1)


def batches(ids: np.ndarray, cut: int, size: int) -> list[Batch]:
    """The windows ids [N, T] in batches; `places` hold their numbers."""
    return list(needle_batch.batches(cut, [(("", i), _trial(line, cut)) for i, line in enumerate(ids)], size))


def _trial(ids: np.ndarray, cut: int) -> needles.Trial:
    return needles.Trial(ids[:cut], ids[cut : cut + 1], ids[cut + 1 :], (0, 0), (), "", "")


def cache_spec(model: Decoder, config: ml_collections.ConfigDict, cut: int, tokens: int, **changes: Any) -> CacheSpec:
    """The spec that the fields of a config ask for, with room for `tokens` behind the cut: the last of them is not fed.

    Raises ValueError for what the spec refuses.
    """
    fields = {name: config[name] for name in FIELDS} | {"dtype": dtype("rows_dtype", config.rows_dtype)}
    return model.config.cache_spec(cut + tokens - 1, **(fields | changes))


def losses(forced: Forced) -> np.ndarray:
    """Cross-entropy in nats of every token behind the first, float64 [B, L - 1]."""
    return -np.asarray(forced.logprob, np.float64)


def traffic(spec: CacheSpec, batch: Batch, forced: Forced) -> list[dict[str, float]]:
    """What decoding each window cost, as `needle_batch.traffic` has it."""
    means = needle_batch.traffic(spec, batch, forced)
    return [{name: float(values[b]) for name, values in means.items()} for b in range(len(batch.places))]


def nbytes(prose: needles.Prose, ids: np.ndarray) -> int:
    """Bytes of UTF-8 that the tokens ids [L] stand for."""
    return len(prose.encoder.encoding.decode_bytes(ids.tolist()))


def at_least(config: ml_collections.ConfigDict, **least: int) -> None:
    """ValueError for the first of these fields that is below its least value."""
    for name, bound in least.items():
        if config[name] < bound:
            raise ValueError(f"{name}={config[name]} must be at least {bound}")


def check_ratios(config: ml_collections.ConfigDict, prefix: int) -> None:
    """ValueError unless config.ratios are compressions of a prefix of this many tokens."""
    if not config.ratios or not 1 <= min(config.ratios) <= max(config.ratios) <= prefix:
        raise ValueError(
            f"ratios={config.ratios} must lie between 1 and the {prefix} tokens of a prefix: 32 keeps 1 in 32"
        )
