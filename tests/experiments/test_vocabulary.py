import json

import pytest
import tiktoken
from tiktoken.load import load_tiktoken_bpe

from experiments import vocabulary


def encoding(ranks, pattern=vocabulary.PATTERN):
    return tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def test_merges_come_in_order_of_frequency_and_ties_go_to_the_smaller_bytes():
    ranks = vocabulary.train(["ab ab ab ab cd cd cd xx xx xx abab"], 260)
    new = [token for token, rank in sorted(ranks.items(), key=lambda item: item[1])[256:]]
    # Words: ab, " ab" x3, " cd" x3, " xx" x3, " abab". So a+b 6, " "+ab 4, then five pairs with 3 each, " "+c the smallest, and
    # of what is left " "+x comes before " c"+d.
    assert new == [b"ab", b" ab", b" c", b" x"]


def test_ranks_agree_with_tiktoken():
    text = "the cat sat on the mat, the rat ate the cat\n\n  and 1234 rats ran\n" * 3
    ranks = vocabulary.train([text], 300)
    table = encoding(ranks)
    assert table.decode(table.encode_ordinary(text)) == text
    assert len(table.encode_ordinary(" the")) == 1
    assert len(table.encode_ordinary("1234")) == 4


def test_written_files_load(tmp_path):
    ranks = vocabulary.train(["some words, some more words"], 270)
    vocabulary.write(tmp_path, ranks)
    assert load_tiktoken_bpe(str(tmp_path / "tiktoken.model")) == ranks
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["pattern"] == vocabulary.PATTERN
    assert list(config["added_tokens_decoder"]) == [str(len(ranks) + i) for i in range(len(vocabulary.SPECIALS))]


def test_training_is_deterministic():
    text = ["banana bandana ban, cabana " * 5]
    assert list(vocabulary.train(text, 290)) == list(vocabulary.train(text, 290))


def test_fewer_tokens_than_bytes_are_refused():
    with pytest.raises(ValueError, match="size=100"):
        vocabulary.train(["text"], 100)
