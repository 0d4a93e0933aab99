import pytest

from experiments.text import corpus


@pytest.fixture(scope="module")
def library():
    return corpus.load()


def test_the_library_is_real_and_every_split_is_disjoint(library):
    names = {split: {document.name for document in library.split(split)} for split in corpus.SPLITS}
    texts = {split: {document.text for document in library.split(split)} for split in corpus.SPLITS}
    for a in corpus.SPLITS:
        for b in corpus.SPLITS:
            if a != b:
                assert not names[a] & names[b]
                assert not texts[a] & texts[b]
    assert sum(map(len, names.values())) == len(library.documents) > 1500
    topics = [document for document in library.documents if document.name.startswith("topics/")]
    assert len(topics) > 50
    assert min(len(document.text) for document in library.documents if document not in topics) > corpus.SHORTEST


def test_a_third_is_held_out(library):
    sizes = {split: sum(len(document.text) for document in library.split(split)) for split in corpus.SPLITS}
    assert 0.6 < sizes["train"] / sum(sizes.values()) < 0.73
    assert sizes["test"] > 2 * sizes["validation"]


def test_a_split_depends_on_the_name_alone():
    # First 32 bits of `printf NAME | sha256sum`, modulo 12: 10, 1, 5, 6, and 8 for the last.
    names = ("topics/assert", "abc/ABCMeta", "ast/", "os/walk", "doc18")
    assert [corpus.split_of(name) for name in names] == ["test", "train", "train", "train", "validation"]


def test_the_library_is_read_the_same_way_twice(library):
    assert corpus.load.__wrapped__().hash == library.hash


def test_the_hash_sees_names_texts_order_and_where_one_ends():
    def hashed(*pairs):
        return corpus.Corpus("", tuple(corpus.Document(*pair) for pair in pairs)).hash

    base = hashed(("a", "one"), ("b", "two"))
    assert base == hashed(("a", "one"), ("b", "two"))
    others = [
        hashed(("a", "one"), ("c", "two")),
        hashed(("a", "one"), ("b", "Two")),
        hashed(("b", "two"), ("a", "one")),
        hashed(("ao", "ne"), ("b", "two")),
    ]
    assert len({base, *others}) == 5


def test_docstrings_are_found_where_they_are():
    long = "word " * 60
    source = f'''
"""{long}module"""
class Outer:
    """short"""
    def method(self):
        """{long}method"""
        def inner():
            """{long}inner"""
if True:
    async def twice():
        """{long}first"""
else:
    def twice():
        """{long}second"""
'''
    found = {document.name: document.text.split()[-1] for document in corpus.docstrings(source.encode(), "pkg.mod")}
    assert found == {
        "pkg.mod/": "module",
        "pkg.mod/Outer.method": "method",
        "pkg.mod/Outer.method.inner": "inner",
        "pkg.mod/twice": "first",
        "pkg.mod/twice#2": "second",
    }


def test_code_has_no_docstring_in_it():
    source = b'''"""Module."""
import os

class Outer:
    """Of the
    class."""

    def method(self):
        """Of the method."""
        return """no docstring"""
'''
    assert (
        corpus.bare(source)
        == '''import os

class Outer:

    def method(self):
        return """no docstring"""'''
    )


@pytest.mark.slow
def test_the_library_s_code_is_a_text_of_its_own(library):
    code = corpus.load(corpus.CODE)
    assert len(code.documents) > 300 and code.hash != library.hash
    sizes = {split: sum(len(document.text) for document in code.split(split)) for split in corpus.SPLITS}
    assert 0.5 < sizes["train"] / sum(sizes.values()) < 0.8
    held_out = "".join(document.text for document in code.split("test"))
    trained = [document.text for document in library.split("train") if len(document.text) < 2000]
    assert not any(text in held_out for text in trained)


def test_one_text_under_two_names_is_kept_once():
    documents = [corpus.Document("b", "same"), corpus.Document("a", "same"), corpus.Document("c", "other")]
    assert [document.name for document in corpus._unique(iter(documents))] == ["a", "c"]


def test_a_folder_of_text_replaces_the_library(tmp_path):
    paragraphs = [f"Paragraph {i}. " + "some words " * 100 for i in range(120)]
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "book.txt").write_text("\n\n".join(paragraphs))
    text = corpus.load(str(tmp_path))
    assert text.documents[0].name.startswith("sub/book.txt#")
    assert "".join(document.text for document in text.documents).count("Paragraph") == 120
    assert text.hash != corpus.load(str(tmp_path / "sub" / "book.txt")).hash  # the names differ


@pytest.mark.parametrize("content", [None, "too short"])
def test_a_missing_or_tiny_text_is_refused(tmp_path, content):
    path = tmp_path / "text.txt"
    if content:
        path.write_text(content)
    with pytest.raises(ValueError, match="text="):
        corpus.load(str(path))
