"""Byte-pair ranks for the tiny checkpoints, trained on the training split alone.

Re-create the committed vocabulary (the ranks depend a little on the Python version, whose text they are trained on):
    python -m experiments.text.vocabulary --out=vestige_jax/checkpoints/tiny_nope
"""

import argparse
import collections
import sys
from collections.abc import Iterable
from pathlib import Path

import regex

from experiments.text import corpus
from vestige_jax.models import Tokenizer

# Lines, single digits, words with their leading space, punctuation, runs of blanks. A digit never joins a neighbour, so
# that a code of five digits is always five tokens.
PATTERN = r"\n+|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|[^\S\n]+(?!\S)|[^\S\n]+"
SPECIALS = tuple("[BOS] [EOS] <|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> [PAD]".split())
SIZE = 1024  # bytes, merges and specials

Pair = tuple[bytes, bytes]


def train(texts: Iterable[str], size: int, pattern: str = PATTERN) -> dict[bytes, int]:
    """Ranks of `size` tokens: the 256 bytes, then the most frequent pair, repeatedly; ties go to the smaller bytes.

    Raises ValueError when `size` is below 256. A text with nothing left to merge gives fewer than `size`.
    """
    if size < 256:
        raise ValueError(f"size={size} is below the 256 single bytes")
    table = _Table(collections.Counter(word for text in texts for word in regex.findall(pattern, text)))
    ranks = {bytes([byte]): byte for byte in range(256)}
    while len(ranks) < size and table.counts:
        pair = min(table.counts, key=lambda pair: (-table.counts[pair], pair))
        table.merge(pair)
        ranks.setdefault(pair[0] + pair[1], len(ranks))
    return ranks


class _Table:
    """Distinct words as lists of tokens, with the count of every adjacent pair and the words that hold it."""

    def __init__(self, frequencies: dict[str, int]):
        self.words = [[bytes([byte]) for byte in word.encode()] for word in frequencies]
        self.frequencies = list(frequencies.values())
        self.counts: dict[Pair, int] = collections.defaultdict(int)
        self.holders: dict[Pair, set[int]] = collections.defaultdict(set)
        for index in range(len(self.words)):
            self._count(index, 1)

    def _count(self, index: int, sign: int) -> None:
        word = self.words[index]
        for pair in zip(word, word[1:], strict=False):
            self.counts[pair] += sign * self.frequencies[index]
            self.holders[pair].add(index)
            if self.counts[pair] == 0:
                del self.counts[pair]

    def merge(self, pair: Pair) -> None:
        for index in self.holders.pop(pair):
            self._count(index, -1)
            self.words[index] = _merged(self.words[index], pair)
            self._count(index, 1)


def _merged(word: list[bytes], pair: Pair) -> list[bytes]:
    out: list[bytes] = []
    skip = False
    for left, right in zip(word, [*word[1:], b""], strict=True):
        if skip:
            skip = False
        elif (left, right) == pair:
            out.append(left + right)
            skip = True
        else:
            out.append(left)
    return out


def tokenizer(ranks: dict[bytes, int], pattern: str = PATTERN) -> Tokenizer:
    """The tokenizer of these ranks, its special tokens behind them."""
    return Tokenizer(ranks, {name: len(ranks) + i for i, name in enumerate(SPECIALS)}, pattern=pattern)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for tiktoken.model and tokenizer_config.json")
    parser.add_argument("--text", default=None, help="file or folder of other text")
    parser.add_argument("--size", type=int, default=SIZE, help="tokens in all, specials included")
    options = parser.parse_args(arguments)
    text = corpus.load(options.text)
    ranks = train((document.text for document in text.split("train")), options.size - len(SPECIALS))
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer(ranks).save(options.out)
    sys.stdout.write(f"{len(ranks)} ranks from text {text.hash[:12]} in {options.out}\n")


if __name__ == "__main__":
    main()
