import pytest
import tiktoken

from experiments.text import vocabulary
from vestige_jax.models import Tokenizer


def encoding(ranks, pattern=vocabulary.PATTERN):
    return tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def test_merges_come_in_order_of_frequency_and_ties_go_to_the_smaller_bytes():
    ranks = vocabulary.train(["ab ab ab ab cd cd cd xx xx xx abab"], 260)
    new = [token for token, rank in sorted(ranks.items(), key=lambda item: item[1])[256:]]
    # Words: ab, " ab" x3, " cd" x3, " xx" x3, " abab". So a+b 6, " "+ab 4, then pairs with 3 each, of which " "+c is
    # the smallest, and of what is left " "+x comes before " c"+d.
    assert new == [b"ab", b" ab", b" c", b" x"]


def test_ranks_agree_with_tiktoken():
    text = "the cat sat on the mat, the rat ate the cat\n\n  and 1234 rats ran\n" * 3
    ranks = vocabulary.train([text], 300)
    table = encoding(ranks)
    assert table.decode(table.encode_ordinary(text)) == text
    assert len(table.encode_ordinary(" the")) == 1
    assert len(table.encode_ordinary("1234")) == 4


def test_a_saved_tokenizer_reads_back(tmp_path):
    tokenizer = vocabulary.tokenizer(vocabulary.train(["some words, some more words"], 270))
    tokenizer.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert again.ranks == tokenizer.ranks
    assert again.encode("more words 12") == tokenizer.encode("more words 12")
    assert again.special("[PAD]") == len(again.ranks) + len(vocabulary.SPECIALS) - 1


def test_the_committed_ranks_have_the_size_of_the_recipe(repository):
    tokenizer = Tokenizer.load(repository / "vestige_jax" / "checkpoints" / "tiny_nope")
    assert tokenizer.encoding.n_vocab == vocabulary.SIZE
    assert tokenizer.pattern == vocabulary.PATTERN


def test_training_is_deterministic():
    text = ["banana bandana ban, cabana " * 5]
    assert list(vocabulary.train(text, 290)) == list(vocabulary.train(text, 290))


def test_fewer_tokens_than_bytes_are_refused():
    with pytest.raises(ValueError, match="size=100"):
        vocabulary.train(["text"], 100)
