"""Needles in real prose: one sentence ties a key to a five-digit code, a question asks for the code (VestigeKV §6).

Keys are names of three random syllables. A hash of the name decides its split, as it does for documents: no name and no
prose of a test trial was ever trained on, or seen by the validation that stops a training run.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from experiments.text import corpus

CONSONANTS = "bdfgklmnprstvz"
VOWELS = "aeiou"
KEYS = 5  # the asked name cycles over this many
DIGITS = 5  # of a code
SHORTEST = 10  # tokens that the line of a needle takes at the least


@dataclasses.dataclass(frozen=True)
class Template:
    sentence: str
    question: str


def wording(claim: str, lead: str = "") -> Template:
    """A sentence that claims a code for a key, and a question that repeats the claim up to the code."""
    sentence = f"{lead}{claim} {{code}}."
    return Template(sentence[0].upper() + sentence[1:], f"Answer: {claim} ")


MAIN = "passcode"
# The key comes before the code. From many wordings, these and random ones, the model learns to look for the name,
# whatever is said about it.
CLAIMS = {
    MAIN: "the secret passcode for {key} is",
    "vault": "the vault of {key} has the number",
    "ticket": "{key} holds ticket",
    "house": "{key} lives in house",
    "room": "the room of {key} is",
    "phone": "the phone number of {key} is",
    "account": "the bank account of {key} ends in",
    "parking": "{key} parks the car in space",
    "seat": "the seat for {key} is",
    "order": "{key} paid for order",
    "flight": "{key} takes flight",
    "score": "{key} made a score of",
    "file": "the file on {key} is kept under",
    "key": "the key of {key} is marked",
    "invoice": "the invoice for {key} has number",
    "member": "{key} is member",
    "box": "letters for {key} go to box",
    "course": "{key} teaches course",
    "licence": "the licence of {key} reads",
    "parcel": "the parcel from {key} weighs",
}
LEADS = ("Note that ", "Remember that ", "It is known that ", "As agreed, ", "By the way, ", "Keep in mind that ")
TRAINED = {name: wording(claim) for name, claim in CLAIMS.items()}
# Wordings that are never trained on. The words of the first two are kept out of the random claims as well.
SPARED = {
    "locker": wording("the locker of {key} opens with"),
    "badge": wording("{key} wears badge", "Please write down that "),
}
UNSEEN = SPARED | {"shelf": wording("the shelf of {key} has the label")}
TEMPLATES = TRAINED | UNSEEN


class Encoder(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def special(self, text: str) -> int: ...


@dataclasses.dataclass(frozen=True)
class Needle:
    key: str
    code: str
    template: Template

    @property
    def sentence(self) -> str:
        return self.template.sentence.format(key=self.key, code=self.code)

    @property
    def question(self) -> str:
        return "\n" + self.template.question.format(key=self.key)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One question. `span`: start and end (exclusive) of the asked sentence in `prefix`; `spans`: of every needle."""

    prefix: np.ndarray  # int32 [n], starts with BOS
    question: np.ndarray  # int32, comes after the cut
    answer: np.ndarray  # int32 [DIGITS], teacher-forced
    span: tuple[int, int]
    spans: tuple[tuple[int, int], ...]
    key: str
    code: str

    @property
    def depth(self) -> float:
        return self.span[0] / len(self.prefix)

    @property
    def ids(self) -> np.ndarray:
        return np.concatenate([self.prefix, self.question, self.answer])


class Prose:
    """A corpus in tokens. A split is tokenised when it is first asked for; a draw is a function of the generator."""

    def __init__(self, text: corpus.Corpus, encoder: Encoder):
        self.encoder, self.hash = encoder, text.hash
        self.bos = encoder.special("[BOS]")
        self._text, self._tokens = text, {}

    @functools.cached_property
    def words(self) -> list[str]:
        return _words(self._text)

    def _documents(self, split: str) -> list[np.ndarray]:
        if split not in self._tokens:
            texts = [document.text for document in self._text.split(split)]
            self._tokens[split] = [self.encode(text + "\n\n") for text in texts]
        return self._tokens[split]

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.encoder.encode(text), np.int32)

    def size(self, split: str) -> int:
        """Tokens of a split."""
        return sum(map(len, self._documents(split)))

    def draw(self, split: str, rng: np.random.Generator, length: int) -> np.ndarray:
        """`length` tokens of whole documents in random order; the first one starts somewhere inside."""
        documents = self._documents(split)
        parts: list[np.ndarray] = []
        drawn = 0
        while drawn < length:
            for index in rng.permutation(len(documents)):
                part = documents[index] if parts else documents[index][rng.integers(len(documents[index])) :]
                parts.append(part)
                drawn += len(part)
                if drawn >= length:
                    break
        return np.concatenate([np.zeros(0, np.int32), *parts])[:length]


def _words(text: corpus.Corpus) -> list[str]:
    """Lower-case words of the training prose, without those of the spared wordings."""
    found = {word for document in text.split("train") for word in re.findall(r"\b[a-z]{3,9}\b", document.text)}
    return sorted(found - {word for template in SPARED.values() for word in template.sentence.lower().split()})


def name(rng: np.random.Generator, split: str, taken: Sequence[str] = ()) -> str:
    """A name of three syllables that belongs to `split` and is not `taken`."""
    while True:
        syllables = (CONSONANTS[rng.integers(len(CONSONANTS))] + VOWELS[rng.integers(len(VOWELS))] for _ in range(3))
        drawn = "".join(syllables).capitalize()
        if drawn not in taken and corpus.split_of(drawn) == split:
            return drawn


def code(rng: np.random.Generator) -> str:
    return "".join(str(digit) for digit in rng.integers(10, size=DIGITS))


def _seed(split: str, *numbers: int) -> np.random.Generator:
    """Every split has its own range of seeds."""
    return np.random.default_rng([corpus.SPLITS.index(split), *numbers])


def keys(split: str, seed: int = 0) -> list[str]:
    """The `KEYS` names that the asked key cycles over."""
    rng, names = _seed(split, seed), []
    while len(names) < KEYS:
        names.append(name(rng, split, names))
    return names


def trial(
    prose: Prose,
    index: int,
    *,
    prefix: int,
    seed: int = 0,
    template: str = MAIN,
    needles: int = 1,
    depth: tuple[float, float] = (0.1, 0.8),
    split: str = "test",
) -> Trial:
    """Trial number `index`: `prefix` tokens of held-out prose with `needles` sentences, one of which is asked for.

    Every sentence starts at a depth uniform in [depth[0], depth[1]) of the prefix, on a line of its own.
    Raises ValueError for an unknown template, an empty depth range, or a range too narrow for the needles.
    """
    if template not in TEMPLATES:
        raise ValueError(f"template={template!r} is unknown; choose one of {', '.join(TEMPLATES)}")
    if needles < 1 or not 0 <= depth[0] <= depth[1] <= 1:
        raise ValueError(f"needles={needles} must be at least 1 and depth={depth} an increasing pair in [0, 1]")
    if needles * SHORTEST > prefix:
        raise ValueError(f"needles={needles} do not fit into prefix={prefix} tokens; use fewer, or a longer prefix")
    rng = _seed(split, seed, prefix, index)
    asked, others = keys(split, seed)[index % KEYS], []
    for _ in range(needles - 1):
        others.append(name(rng, split, [*keys(split, seed), *others]))
    stack = [Needle(key, code(rng), TEMPLATES[template]) for key in (asked, *others)]
    order = rng.permutation(needles)
    ids, spans = _hide(prose, rng, split, [stack[i] for i in order], prefix, depth)
    return Trial(
        prefix=ids,
        question=prose.encode(stack[0].question),
        answer=prose.encode(stack[0].code),
        span=spans[int(np.argmin(order))],
        spans=tuple(spans),
        key=stack[0].key,
        code=stack[0].code,
    )


def _lines(prose: Prose, needles: Sequence[Needle]) -> list[np.ndarray]:
    return [prose.encode("\n" + needle.sentence + "\n") for needle in needles]


def _hide(
    prose: Prose,
    rng: np.random.Generator,
    split: str,
    needles: Sequence[Needle],
    length: int,
    depth: tuple[float, float],
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """BOS and prose of `length` tokens with the needles in the given order; the span of each sentence."""
    lines = _lines(prose, needles)
    # A sentence starts after BOS, the prose before it, the lines before it and its own line break.
    first = max(0, int(np.ceil(depth[0] * length)) - 2)
    last = int(np.ceil(depth[1] * length)) - 3 - sum(len(line) for line in lines[:-1])
    spare = length - 1 - sum(len(line) for line in lines)
    last = min(max(last, first) if depth[0] == depth[1] else last, spare)
    if last < first:
        count = len(needles)
        raise ValueError(f"needles={count} do not fit into depth={depth} of prefix={length} tokens: use a longer one")
    cuts = np.sort(rng.integers(first, last + 1, size=len(lines)))
    text = prose.draw(split, rng, spare)
    return interleave(prose.bos, text, lines, cuts)


def interleave(
    bos: int, text: np.ndarray, lines: Sequence[np.ndarray], cuts: np.ndarray
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """BOS and text, with each line in front of the place where its cut falls; and the span of each line's sentence."""
    parts, spans, length = [np.array([bos], np.int32)], [], 1
    for piece, line in zip(np.split(text, cuts), [*lines, np.zeros(0, np.int32)], strict=True):
        parts += [piece, line]
        length += len(piece) + len(line)
        spans.append((length - len(line) + 1, length - 1))
    return np.concatenate(parts), spans[: len(lines)]


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Training sequences: needles among prose, then a question about each in random order."""

    fewest: int = 2
    most: int = 5
    share: float = 0.8  # of the sequence, at most, that needles and questions take
    main: float = 0.5  # chance of the main template; the rest is half claims, half random words
    text_weight: float = 0.1  # of the loss on everything but answers

    def batch(self, prose: Prose, rng: np.random.Generator, size: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32, weights float32), both [size, length]; weights[b, t] scales the loss of predicting ids[b, t]."""
        ids, weights = zip(*(self._sequence(prose, rng, length) for _ in range(size)), strict=True)
        return np.stack(ids), np.stack(weights)

    def _sequence(self, prose: Prose, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
        needles, lines, questions = self._needles(prose, rng, int(self.share * length))
        answers = [prose.encode(needle.code) for needle in needles]
        asked = rng.permutation(len(needles))
        tail = [part for i in asked for part in (questions[i], answers[i])]
        spare = length - 1 - sum(len(part) for part in (*lines, *tail))
        if spare < 0:
            raise ValueError(f"length={length} tokens cannot hold one needle and its question: use a longer sequence")
        cuts = np.sort(rng.integers(0, spare + 1, size=len(lines)))
        head, _ = interleave(prose.bos, prose.draw("train", rng, spare), lines, cuts)
        marks = [np.full(len(part), i % 2) for i, part in enumerate(tail)]  # question, answer, question, ...
        is_answer = np.concatenate([np.zeros(len(head)), *marks])
        return np.concatenate([head, *tail]), np.where(is_answer, 1.0, self.text_weight).astype(np.float32)

    def _needles(self, prose: Prose, rng: np.random.Generator, room: int):
        """As many needles as were drawn, or as fit into `room` tokens with their questions."""
        needles: list[Needle] = []
        lines: list[np.ndarray] = []
        questions: list[np.ndarray] = []
        for _ in range(rng.integers(self.fewest, self.most + 1)):
            key = name(rng, "train", [needle.key for needle in needles])
            needle = Needle(key, code(rng), self._template(prose, rng))
            line, question = _lines(prose, [needle])[0], prose.encode(needle.question)
            room -= len(line) + len(question) + DIGITS
            if room < 0 and needles:
                break
            needles, lines, questions = [*needles, needle], [*lines, line], [*questions, question]
        return needles, lines, questions

    def _template(self, prose: Prose, rng: np.random.Generator) -> Template:
        """The main template; or a claim, half of the time behind a lead; or, as often, random words and the key."""
        if rng.random() < self.main:
            return TRAINED[MAIN]
        if rng.random() < 0.5:
            claim = list(CLAIMS.values())[rng.integers(len(CLAIMS))]
            return wording(claim, LEADS[rng.integers(len(LEADS))] if rng.random() < 0.5 else "")
        before, after = rng.integers(0, 4), rng.integers(1, 4)
        words = [prose.words[i] for i in rng.integers(len(prose.words), size=before + after)]
        return wording(" ".join([*words[:before], "{key}", *words[before:]]))
