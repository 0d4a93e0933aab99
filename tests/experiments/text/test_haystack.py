"""Haystacks of key-value lines."""

import re

import numpy as np
import pytest

from experiments.text import corpus, haystack, needles
from vestige_jax.models import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(repository):
    return Tokenizer.load(repository / "vestige_jax/checkpoints/tiny_nope")


@pytest.fixture(scope="module")
def prose(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(f"Line {i} of a text about rivers, paper and mountains." for i in range(2000)))
    return needles.Prose(corpus.load(str(path)), tokenizer)


def test_every_line_is_a_pair_and_one_of_them_is_asked_for(prose, tokenizer):
    for index in range(6):
        trial = haystack.trial(prose, index, prefix=512)
        text = tokenizer.decode(trial.prefix[1:])
        pairs = re.findall(r"The secret passcode for (\w+) is (\d{5})\.", text)
        assert trial.prefix.shape == (512,) and trial.prefix[0] == prose.bos
        assert len(pairs) == len(trial.spans) == len({key for key, _ in pairs}) >= 20
        assert pairs.count((trial.key, trial.code)) == 1
        assert tokenizer.decode(trial.prefix[slice(*trial.span)]).endswith(f"{trial.key} is {trial.code}.")
        assert trial.span in trial.spans and 0.1 <= trial.depth < 0.8
        assert trial.spans[0][0] < 40  # no room for another line in front
        assert all(corpus.split_of(key) == "test" for key, _ in pairs)
        assert trial.key in tokenizer.decode(trial.question)


def test_a_trial_depends_on_its_numbers_alone(prose):
    first, again = (haystack.trial(prose, 7, prefix=300, seed=1) for _ in range(2))
    np.testing.assert_array_equal(first.ids, again.ids)
    others = [dict(index=8), dict(seed=2), dict(split="validation"), dict(template="locker")]
    for other in others:
        trial = haystack.trial(prose, **{"index": 7, "prefix": 300, "seed": 1} | other)
        assert not np.array_equal(first.prefix, trial.prefix)


def test_the_asked_line_is_anywhere_in_its_range(prose):
    depths = [haystack.trial(prose, index, prefix=512).depth for index in range(40)]
    assert min(depths) < 0.2 and max(depths) > 0.7
    assert {haystack.trial(prose, index, prefix=512).key for index in range(10)} == set(needles.keys("test"))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"template": "none"}, "template='none'"), ({"prefix": 16}, "prefix=16"), ({"depth": (0.5, 0.5)}, "prefix=300")],
)
def test_an_impossible_trial_is_refused(prose, options, message):
    with pytest.raises(ValueError, match=message):
        haystack.trial(prose, 0, **{"prefix": 300} | options)
