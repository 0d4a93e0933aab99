"""Byte-pair tokens from tiktoken ranks, with every id checked against the vocabulary."""

from __future__ import annotations

import base64
import binascii
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import tiktoken

RANKS, CONFIG = "tiktoken.model", "tokenizer_config.json"

# How Kimi splits text before byte pairs: runs of Han, words without Han (with a contraction), up to three digits,
# punctuation, line breaks, spaces.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
# Offsets of Kimi's special tokens behind its byte-pair ranks; the places between them are reserved.
KIMI_SPECIALS = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|im_end|>": 2,
    "<|im_user|>": 3,
    "<|im_assistant|>": 4,
    "<|im_system|>": 10,
    "<|im_middle|>": 17,
    "[UNK]": 254,
    "[PAD]": 255,
}
_KIMI_RESERVED = 258


class Tokenizer:
    """Text to ids and back.

    Args:
      ranks: bytes -> id of every byte-pair token.
      specials: text -> id of the special tokens; None gives Kimi's, placed behind the ranks.
      pattern: the regular expression that splits text before byte pairs are merged.
      vocab_size: the model's number of embeddings. The tokenizer may know more ids than the model (Kimi's does); such
        an id raises in `encode` instead of reading outside the table.
    """

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        specials: Mapping[str, int] | None = None,
        *,
        pattern: str = KIMI_PATTERN,
        vocab_size: int | None = None,
    ):
        self.ranks = dict(ranks)
        self.specials = _kimi_specials(len(self.ranks)) if specials is None else dict(specials)
        self.pattern = pattern
        self.encoding = tiktoken.Encoding(
            "vestige_jax", pat_str=pattern, mergeable_ranks=self.ranks, special_tokens=self.specials
        )
        self.vocab_size = self.encoding.n_vocab if vocab_size is None else vocab_size

    @classmethod
    def load(cls, folder: str | pathlib.Path) -> Tokenizer:
        """Reads `tiktoken.model` and, where they exist, tokenizer_config.json (`pattern`, `added_tokens_decoder`) and
        the `vocab_size` of config.json.

        Raises FileNotFoundError without the ranks; ValueError that names the file and the line that is damaged, or what
        is missing: a single byte, a rank, or the ranks up to the first special id of tokenizer_config.json.
        """
        folder = pathlib.Path(folder)
        if not (folder / RANKS).is_file():
            raise FileNotFoundError(f"no tokenizer ranks at {folder / RANKS}")
        ranks = _read_ranks(folder / RANKS)
        options, model = _json(folder / CONFIG), _json(folder / "config.json")
        _check_ranks(folder / RANKS, ranks)
        specials = None
        if "added_tokens_decoder" in options:
            named = {item["content"]: int(i) for i, item in options["added_tokens_decoder"].items()}
            _check_first_special(folder, len(ranks), named)
            # Kimi's tokenizer_config.json names only the tokens in use; the reserved places between are tokens too.
            specials = named if "pattern" in options else {**_reserved(len(ranks), named), **named}
        pattern = options.get("pattern", KIMI_PATTERN)
        return cls(ranks, specials, pattern=pattern, vocab_size=model.get("vocab_size"))

    def save(self, folder: str | pathlib.Path) -> None:
        """Writes the two files that `load` reads."""
        folder = pathlib.Path(folder)
        ranks = sorted(self.ranks.items(), key=_by_rank)
        lines = [f"{base64.b64encode(piece).decode()} {rank}\n" for piece, rank in ranks]
        (folder / RANKS).write_text("".join(lines))
        added = {str(i): {"content": text, "special": True} for text, i in sorted(self.specials.items(), key=_by_rank)}
        options = {"pattern": self.pattern, "added_tokens_decoder": added}
        (folder / CONFIG).write_text(json.dumps(options, indent=1, ensure_ascii=False) + "\n")

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        """Ids of `text`. With specials=False the text of a special token is plain text, so a prompt cannot forge one.

        Raises ValueError for an id that the model has no embedding for.
        """
        if specials:
            return self._checked(self.encoding.encode(text, allowed_special="all"))
        return self._checked(self.encoding.encode_ordinary(text))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; a broken UTF-8 sequence becomes U+FFFD. Raises ValueError for an id outside the vocabulary."""
        ids = self._checked([int(i) for i in ids])
        try:
            return self.encoding.decode(ids)
        except KeyError as error:
            raise ValueError(f"token id {error} is in no vocabulary entry: the ids have a gap there") from None

    def chat(self, messages: Sequence[tuple[str, str]], *, prompt: bool = True) -> list[int]:
        """Kimi's chat layout of (role, text) pairs, roles 'system', 'user', 'assistant'; no [BOS].

        Each message is <|im_role|> role <|im_middle|> text <|im_end|>; with `prompt` the assistant's opening follows.
        """
        end = self.special("<|im_end|>")
        ids = [i for role, text in messages for i in (*self._opening(role), *self.encode(text), end)]
        return self._checked(ids + (self._opening("assistant") if prompt else []))

    def special(self, text: str) -> int:
        """The id of a special token; ValueError lists the known ones."""
        if text not in self.specials:
            named = sorted(known for known in self.specials if "reserved" not in known)
            raise ValueError(f"no special token {text!r}; this tokenizer has {named}")
        return self.specials[text]

    def _opening(self, role: str) -> list[int]:
        return [self.special(f"<|im_{role}|>"), *self.encode(role), self.special("<|im_middle|>")]

    def _checked(self, ids: list[int]) -> list[int]:
        bad = [i for i in ids if not 0 <= i < min(self.vocab_size, self.encoding.n_vocab)]
        if bad:
            known = f"the model has {self.vocab_size} embeddings, the tokenizer {self.encoding.n_vocab} ids"
            raise ValueError(f"token ids {bad[:8]} are outside the vocabulary: {known}")
        return ids


def _kimi_specials(base: int) -> dict[str, int]:
    named = {text: base + offset for text, offset in KIMI_SPECIALS.items()}
    return {**_reserved(base, named), **named}


def _reserved(base: int, named: Mapping[str, int]) -> dict[str, int]:
    taken = set(named.values())
    return {f"<|reserved_token_{i}|>": i for i in range(base, base + _KIMI_RESERVED) if i not in taken}


def _by_rank(item: tuple) -> int:
    return item[1]


def _read_ranks(path: pathlib.Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            piece, rank = line.split()
            ranks[base64.b64decode(piece, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(f"{path}, line {number} is not 'base64 rank': {line[:60]!r}") from error
    return ranks


def _check_ranks(path: pathlib.Path, ranks: Mapping[bytes, int]) -> None:
    bad = f"{path} is damaged or truncated, download it again"
    if not ranks:
        raise ValueError(f"{bad}: it holds no ranks")
    bytes_left = [i for i in range(256) if bytes([i]) not in ranks]
    if bytes_left:
        raise ValueError(f"{bad}: {len(bytes_left)} of the 256 single bytes are missing, the first is {bytes_left[0]}")
    ids_left = sorted(set(range(len(ranks))) - set(ranks.values()))
    if ids_left:
        raise ValueError(f"{bad}: its {len(ranks)} pieces must have the ranks 0..{len(ranks) - 1}, no {ids_left[0]}")


def _check_first_special(folder: pathlib.Path, count: int, named: Mapping[str, int]) -> None:
    """Special tokens follow the ranks without a gap: their first id says how many ranks the file had."""
    first = min(named.values(), default=count)
    if first != count:
        wrong = f"{folder / RANKS} has {count} ranks, but the first special id in {CONFIG} is {first}"
        raise ValueError(f"{wrong}: {f'{first - count} ranks are missing' if first > count else 'the two overlap'}")


def _json(path: pathlib.Path) -> dict:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
