import re

import numpy as np
import pytest

from experiments.text import corpus, needles
from vestige_jax.models import Tokenizer

CHECKPOINT = "vestige_jax/checkpoints/tiny_nope"


@pytest.fixture(scope="module")
def tokenizer(repository):
    return Tokenizer.load(repository / CHECKPOINT)


@pytest.fixture(scope="module")
def prose(tokenizer):
    return needles.Prose(corpus.load(), tokenizer)


def sentences(tokenizer, trial):
    return [tokenizer.decode(trial.prefix[slice(*span)]) for span in trial.spans]


def test_every_digit_is_a_token(tokenizer):
    for digit in range(10):
        assert len(tokenizer.encode(str(digit))) == 1
    for text in ("48213", " 48213.", "x48213y"):
        pieces = [tokenizer.decode([token]) for token in tokenizer.encode(text)]
        assert [piece for piece in pieces if piece.isdigit()] == list("48213")
    assert not any(len(piece) > 1 and any(48 <= byte < 58 for byte in piece) for piece in tokenizer.ranks)


@pytest.mark.parametrize("template", needles.TEMPLATES)
@pytest.mark.parametrize("count", [1, 4])
def test_a_trial_is_what_it_says(prose, tokenizer, template, count):
    for index in range(6):
        trial = needles.trial(prose, index, prefix=512, template=template, needles=count)
        assert trial.prefix.shape == (512,)
        assert trial.prefix[0] == tokenizer.special("[BOS]")
        start, stop = trial.span
        found = sentences(tokenizer, trial)
        assert found == [text for text in found if text.endswith(".")]
        assert trial.span in trial.spans
        asked = tokenizer.decode(trial.prefix[start:stop])
        assert asked == needles.TEMPLATES[template].sentence.format(key=trial.key, code=trial.code)
        for first, last in trial.spans:  # alone on its line
            assert tokenizer.decode(trial.prefix[first - 1 : first]) == "\n"
            assert tokenizer.decode(trial.prefix[last : last + 1]) == "\n"
            assert 0.1 <= first / 512 < 0.8
        assert trial.depth == start / 512
        assert trial.key in tokenizer.decode(trial.question)
        assert tokenizer.decode(trial.answer) == trial.code
        assert len(trial.answer) == needles.DIGITS
        assert tokenizer.decode(trial.prefix).count(trial.code) == 1


def test_the_asked_key_cycles_over_five_names(prose):
    keys = [needles.trial(prose, index, prefix=256).key for index in range(10)]
    assert len(set(keys)) == 5
    assert keys[:5] == keys[5:] == needles.keys("test")


def test_depth_covers_its_range(prose):
    depths = [needles.trial(prose, index, prefix=256).depth for index in range(60)]
    assert min(depths) < 0.2
    assert max(depths) > 0.7


def test_a_depth_can_be_fixed(prose):
    trial = needles.trial(prose, 0, prefix=1000, depth=(0.5, 0.5))
    assert trial.depth == 0.5


def test_thirty_needles_fit_and_keep_their_own_codes(prose, tokenizer):
    trial = needles.trial(prose, 3, prefix=4096, needles=30)
    assert len(trial.prefix) == 4096
    assert len(set(trial.spans)) == 30
    starts = np.array(trial.spans)[:, 0] / 4096
    assert starts.min() >= 0.1
    assert starts.max() < 0.8
    assert sum(trial.key in text for text in sentences(tokenizer, trial)) == 1


def test_a_trial_depends_on_its_numbers_alone(prose):
    first, again = (needles.trial(prose, 7, prefix=300, seed=1) for _ in range(2))
    np.testing.assert_array_equal(first.ids, again.ids)
    for other in (
        needles.trial(prose, 8, prefix=300, seed=1),
        needles.trial(prose, 7, prefix=300, seed=2),
        needles.trial(prose, 7, prefix=300, seed=1, split="validation"),
    ):
        assert not np.array_equal(first.prefix, other.prefix)


def test_names_and_prose_of_the_splits_are_apart(prose, tokenizer):
    rng = np.random.default_rng(0)
    names = {split: {needles.name(rng, split) for _ in range(200)} for split in corpus.SPLITS}
    assert not names["train"] & (names["validation"] | names["test"])
    assert not names["validation"] & names["test"]
    held_out = "\n\n".join(document.text for document in corpus.load().split("test"))
    trial = needles.trial(prose, 0, prefix=400)
    before, after = np.split(trial.prefix[1:], [trial.span[0] - 2])
    assert tokenizer.decode(before[:60]).strip() in held_out
    assert tokenizer.decode(after[-60:]).strip("\ufffd \n").split("\n\n")[0] in held_out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "none"}, "template='none'"),
        ({"needles": 0}, "needles=0"),
        ({"depth": (0.5, 0.2)}, "depth="),
        ({"needles": 30}, "needles=30"),
        ({"prefix": 16}, "prefix=16"),
    ],
)
def test_an_impossible_trial_is_refused(prose, options, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        needles.trial(prose, 0, **{"prefix": 300, **options})


def test_training_sequences_ask_for_what_they_hold(prose, tokenizer):
    mixture = needles.Mixture(text_weight=0.25)
    ids, weights = mixture.batch(prose, np.random.default_rng(5), 8, 289)
    assert ids.shape == weights.shape == (8, 289)
    assert set(np.unique(weights)) == {0.25, 1.0}
    for row, weight in zip(ids, weights, strict=True):
        answers = tokenizer.decode(row[weight == 1.0])
        assert answers.isdigit()
        codes = [answers[i : i + needles.DIGITS] for i in range(0, len(answers), needles.DIGITS)]
        text = tokenizer.decode(row[1:])
        assert 2 <= len(codes) <= 5
        assert all(text.count(code) == 2 for code in codes)  # in its sentence and as an answer
        assert text.endswith(codes[-1])


def test_training_never_uses_the_unseen_wordings_or_held_out_names(prose, tokenizer):
    ids, _ = needles.Mixture(main=0.2).batch(prose, np.random.default_rng(6), 40, 161)
    text = tokenizer.decode(ids.ravel())
    for template in needles.UNSEEN.values():
        for words in template.question.removeprefix("Answer: ").split("{key}"):
            assert not words or words not in text
    syllable = f"[{needles.CONSONANTS}][{needles.VOWELS}]"
    names = {name for name in re.findall(r"\b[A-Z]\w{5}\b", text) if re.fullmatch(syllable * 3, name.lower())}
    names -= {word.capitalize() for word in prose.words}  # "Remove" is built like a name
    assert len(names) > 50
    assert {corpus.split_of(name) for name in names} == {"train"}


def test_the_mixture_has_every_wording_in_its_share(prose):
    rng, mixture = np.random.default_rng(0), needles.Mixture(main=0.25)
    drawn = [mixture._template(prose, rng) for _ in range(4000)]
    questions = [template.question for template in drawn]
    known = {template.question for template in needles.TRAINED.values()}
    assert known < set(questions)
    share = {
        "main": sum(template == needles.TRAINED[needles.MAIN] for template in drawn) / 4000,
        "random": sum(question not in known for question in questions) / 4000,
        "led": sum(template.sentence.startswith(needles.LEADS) for template in drawn) / 4000,
    }
    expected = {"main": 0.25 + 0.375 / 2 / len(needles.CLAIMS), "random": 0.375, "led": 0.1875}
    assert share == pytest.approx(expected, abs=0.03)
    assert all("{key}" in question for question in questions)


def test_needles_that_do_not_fit_are_left_out(prose):
    ids, weights = needles.Mixture(fewest=5).batch(prose, np.random.default_rng(1), 4, 160)
    assert ids.shape == (4, 160)
    asked = (weights == 1.0).sum(1) / needles.DIGITS
    assert asked.min() >= 1
    assert asked.max() < 5


def test_a_sequence_too_short_for_one_needle_is_refused(prose):
    with pytest.raises(ValueError, match="length=30"):
        needles.Mixture().batch(prose, np.random.default_rng(1), 1, 30)
