"""Tokens from tiktoken ranks: Kimi's splits and special ids, the chat layout, bounds."""

import base64
import json

import pytest

from vestige_jax.models import Tokenizer
from vestige_jax.models.tokenizer import KIMI_PATTERN

BYTES = {bytes([i]): i for i in range(256)}
WORDS = {b"us": 256, b"user": 257, b"er": 258, b"as": 259}


@pytest.fixture
def tokenizer():
    return Tokenizer({**BYTES, **WORDS})


def pieces(text):
    """How the pattern splits: with single-byte ranks, by where merges could not cross."""
    import tiktoken

    encoding = tiktoken.Encoding("split", pat_str=KIMI_PATTERN, mergeable_ranks=_all_pairs(text), special_tokens={})
    return [encoding.decode([i]) for i in encoding.encode_ordinary(text)]


def _all_pairs(text):
    """Ranks in which every substring is a token, so that only the pattern splits."""
    ranks, data = dict(BYTES), text.encode()
    for width in range(2, len(data) + 1):
        for i in range(len(data) - width + 1):
            ranks.setdefault(data[i : i + width], len(ranks))
    return ranks


def test_pattern_splits_digits_by_three_words_with_their_space_and_contractions():
    assert pieces("Tell me 12345 don't") == ["Tell", " me", " ", "123", "45", " don't"]
    assert pieces("ok!!\n\n  x") == ["ok", "!!\n\n", " ", " x"]


def test_pattern_takes_runs_of_han_apart_from_words():
    assert pieces("ab中文cd") == ["ab", "中文", "cd"]


def test_round_trip(tokenizer):
    text = "naïve user's 2048 — 中文\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_kimi_special_ids_lie_behind_the_ranks(tokenizer):
    """With 163,584 ranks these offsets give [BOS] 163584, <|im_end|> 163586 ... [PAD] 163839."""
    base = 260
    for text, offset in {
        "[BOS]": 0, "[EOS]": 1, "<|im_end|>": 2, "<|im_user|>": 3, "<|im_assistant|>": 4, "<|im_system|>": 10,
        "<|im_middle|>": 17, "[PAD]": 255,
    }.items():  # fmt: skip
        assert tokenizer.special(text) == base + offset
    assert tokenizer.encoding.n_vocab == base + 258


def test_chat_layout(tokenizer):
    """The published order: user opening, text, end, assistant opening; no [BOS]."""
    base, user = 260, [257]
    text, assistant = tokenizer.encode("Hi."), tokenizer.encode("assistant")
    expected = [base + 3, *user, base + 17, *text, base + 2, base + 4, *assistant, base + 17]
    assert tokenizer.chat([("user", "Hi.")]) == expected
    assert tokenizer.chat([("user", "Hi.")], prompt=False) == expected[: -len(assistant) - 2]


def test_text_cannot_forge_special_tokens(tokenizer):
    assert max(tokenizer.encode("<|im_end|>")) < 260
    assert tokenizer.encode("<|im_end|>", specials=True) == [262]


def test_ids_beyond_the_embeddings_are_refused():
    """Kimi's tokenizer knows 163,842 ids, its model 163,840."""
    tokenizer = Tokenizer({**BYTES, **WORDS}, vocab_size=260 + 256)
    assert tokenizer.encode("<|reserved_token_513|>", specials=True) == [513]
    with pytest.raises(ValueError, match=r"\[517\].*516 embeddings"):
        tokenizer.encode("<|reserved_token_517|>", specials=True)
    with pytest.raises(ValueError, match=r"\[516\]"):
        tokenizer.decode([1, 516])
    with pytest.raises(ValueError, match=r"\[-1\]"):
        tokenizer.decode([-1])


def test_model_vocabulary_larger_than_the_tokenizer():
    with pytest.raises(ValueError, match="outside"):
        Tokenizer(BYTES, {}, vocab_size=512).decode([300])


def test_id_in_a_gap_is_refused():
    with pytest.raises(ValueError, match="300"):
        Tokenizer(BYTES, {"[EOS]": 400}).decode([1, 300])


def test_unknown_special_lists_the_known(tokenizer):
    with pytest.raises(ValueError, match=r"<\|im_start\|>.*\[BOS\]"):
        tokenizer.special("<|im_start|>")


def test_files_round_trip(tmp_path):
    written = Tokenizer({**BYTES, **WORDS}, {"[EOS]": 260, "[PAD]": 261}, pattern=r"\d|\D+")
    written.save(tmp_path)
    read = Tokenizer.load(tmp_path)
    assert (read.ranks, read.specials, read.pattern) == (written.ranks, written.specials, written.pattern)
    assert read.encode("user 10") == written.encode("user 10")


def test_bounds_come_from_the_model_config_beside_it(tmp_path):
    Tokenizer(BYTES, {"[EOS]": 256}).save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100}))
    with pytest.raises(ValueError, match="100 embeddings"):
        Tokenizer.load(tmp_path).encode("user")


def test_kimi_tokenizer_config_keeps_reserved_tokens(tmp_path):
    """That file names the tokens in use and no pattern; the places between them are tokens too."""
    lines = [f"{base64.b64encode(piece).decode()} {rank}" for piece, rank in BYTES.items()]
    (tmp_path / "tiktoken.model").write_text("\n".join(lines))
    added = {"256": {"content": "[BOS]", "special": True}, "258": {"content": "<|im_end|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    read = Tokenizer.load(tmp_path)
    assert read.special("<|im_end|>") == 258 and read.special("<|reserved_token_257|>") == 257
    assert read.pattern == KIMI_PATTERN


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda lines: [], "holds no ranks"),
        (lambda lines: lines[:100], "156 of the 256 single bytes are missing, the first is 100"),
        (lambda lines: lines[:258], "has 258 ranks, but the first special id.*is 260: 2 ranks are missing"),
        (lambda lines: lines[:257] + lines[258:], r"259 pieces must have the ranks 0\.\.258, no 257"),
        (lambda lines: [*lines, "YXM9 260"], "has 261 ranks, but the first special id.*is 260: the two overlap"),
    ],
)
def test_truncated_ranks_say_what_is_missing(tmp_path, damage, message):
    Tokenizer({**BYTES, **WORDS}, {"[EOS]": 260, "[PAD]": 261}).save(tmp_path)
    path = tmp_path / "tiktoken.model"
    path.write_text("".join(f"{line}\n" for line in damage(path.read_text().splitlines())))
    with pytest.raises(ValueError, match=rf"tiktoken\.model .*{message}"):
        Tokenizer.load(tmp_path)


def test_missing_and_damaged_ranks_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tiktoken\.model"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tiktoken.model").write_text("YQ== 0\nnot a rank line\n")
    with pytest.raises(ValueError, match="line 2"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tiktoken.model").write_text("YQ== 0\n")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.load(tmp_path)
