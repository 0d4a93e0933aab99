"""A haystack of nothing but key-value lines: every line looks like the one that is asked for (VestigeKV §6).

Among prose a needle stands out, and whatever keeps what stands out serves it. Here salience is worth nothing.
"""

import numpy as np

from experiments.text import corpus, needles
from experiments.text.needles import Needle, Prose, Trial


def trial(
    prose: Prose,
    index: int,
    *,
    prefix: int,
    seed: int = 0,
    template: str = needles.MAIN,
    depth: tuple[float, float] = (0.1, 0.8),
    split: str = "test",
) -> Trial:
    """Trial number `index`: `prefix` tokens, filled with lines of one wording, each on a name and a code of its own.

    What is left over, less than a line, is held-out prose in front. The asked line starts within `depth` of the prefix.
    Raises ValueError for an unknown template, or a prefix without a line that starts there.
    """
    if template not in needles.TEMPLATES:
        raise ValueError(f"template={template!r} is unknown; choose one of {', '.join(needles.TEMPLATES)}")
    rng = np.random.default_rng([corpus.SPLITS.index(split), seed, prefix, index, 1])  # no needle trial has five
    names = needles.keys(split, seed)
    asked = names[index % needles.KEYS]
    stack, lines = _fill(prose, rng, split, [asked, *(name for name in names if name != asked)], prefix, template)
    spare = prefix - 1 - sum(map(len, lines))
    slot = _slot(rng, spare, lines, prefix, depth)
    order = [*range(1, slot + 1), 0, *range(slot + 1, len(lines))]  # the asked line, drawn first, in its place
    text = prose.draw(split, rng, spare)
    ids, spans = needles.interleave(prose.bos, text, [lines[i] for i in order], np.full(len(lines), spare))
    return Trial(
        prefix=ids,
        question=prose.encode(stack[0].question),
        answer=prose.encode(stack[0].code),
        span=spans[slot],
        spans=tuple(spans),
        key=stack[0].key,
        code=stack[0].code,
    )


def _fill(
    prose: Prose, rng: np.random.Generator, split: str, names: list[str], prefix: int, template: str
) -> tuple[list[Needle], list[np.ndarray]]:
    """As many lines as fit behind BOS: on the first of the names, then on new ones that are none of them."""
    stack: list[Needle] = []
    lines: list[np.ndarray] = []
    room, key, taken = prefix - 1, names[0], set(names)
    while True:
        needle = Needle(key, needles.code(rng), needles.TEMPLATES[template])
        line = prose.encode("\n" + needle.sentence + "\n")
        room -= len(line)
        if room < 0:
            return stack, lines
        stack.append(needle)
        lines.append(line)
        key = needles.name(rng, split, taken)
        taken.add(key)


def _slot(
    rng: np.random.Generator, spare: int, lines: list[np.ndarray], prefix: int, depth: tuple[float, float]
) -> int:
    """How many of the other lines come before the asked one: any number that starts it within `depth`."""
    starts = 2 + spare + np.cumsum([0, *map(len, lines[1:])])  # BOS, and its own line break
    fits = np.flatnonzero((starts >= depth[0] * prefix) & (starts < depth[1] * prefix))
    if not lines or not fits.size:
        raise ValueError(f"prefix={prefix} has no line that starts in depth={depth}: use a longer one")
    return int(rng.choice(fits))
