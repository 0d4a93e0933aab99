"""The text of the experiments: English that ships with every CPython, or any text of the user's.

The default text is `pydoc_data.topics` (the language reference as pydoc prints it) and the docstrings of the standard
library. It is read from source with `ast`: nothing is imported or run. A document is one topic or one docstring; a hash
of its name alone decides its split, so a document never changes sides when other documents come or go. `code` is a
second kind of text: the standard library's modules, a document each, without the docstrings that the prose is made of.
"""

import ast
import dataclasses
import functools
import hashlib
import inspect
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SPLITS = ("train", "validation", "test")
CODE = "code"
"""Names the standard library's source in place of a path."""
SHORTEST = 200  # characters; shorter docstrings are mostly one-line stubs
PIECE = 2000  # characters; a user's file is cut at blank lines into documents of about this size
# Left out: other people's packages, code that some distributions ship separately, generated tables.
SKIPPED = frozenset(
    "site-packages dist-packages test tests idlelib tkinter turtledemo lib2to3 distutils ensurepip pydoc_data "
    "lib-dynload __pycache__".split()
)


@dataclasses.dataclass(frozen=True)
class Document:
    name: str
    text: str

    @functools.cached_property
    def split(self) -> str:
        return split_of(self.name)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents in name order. `hash` is the sha256 of names and texts: it says which text a result was measured on."""

    source: str
    documents: tuple[Document, ...]

    def split(self, name: str) -> tuple[Document, ...]:
        if name not in SPLITS:
            raise ValueError(f"split={name!r} is unknown; choose one of {', '.join(SPLITS)}")
        return tuple(document for document in self.documents if document.split == name)

    @functools.cached_property
    def hash(self) -> str:
        digest = hashlib.sha256()
        for document in self.documents:
            for part in (document.name, document.text):
                data = part.encode()
                digest.update(len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()


def split_of(name: str) -> str:
    """Two thirds train; the held-out third is a quarter validation (for stopping a training run) and the rest test."""
    bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 12
    return "train" if bucket < 8 else "validation" if bucket == 8 else "test"


@functools.cache
def load(text: str | None = None) -> Corpus:
    """The standard library's prose, its source for text='code', or the text of a file or a folder of files.

    Raises ValueError when `text` does not exist or is too small to fill all three splits.
    """
    source, documents = _source(text)
    corpus = Corpus(source, _unique(documents))
    for split in SPLITS:
        if not corpus.split(split):
            count = len(corpus.documents)
            raise ValueError(f"text={text!r} has {count} documents, none of them in split {split!r}; give more text")
    return corpus


def _source(text: str | None) -> tuple[str, Iterator[Document]]:
    if not text:
        return "standard library", _standard_library()
    if text == CODE:
        return "standard library, code", _modules()
    return Path(text).name, _files(Path(text))


def _unique(documents: Iterator[Document]) -> tuple[Document, ...]:
    """Sorted by name; a text that appears twice keeps its first name, so that no text is on both sides of a split."""
    first: dict[str, Document] = {}
    for document in sorted(documents, key=lambda document: document.name):
        first.setdefault(document.text, document)
    return tuple(first.values())


def _standard_library() -> Iterator[Document]:
    for name, text in _topics(_root() / "pydoc_data" / "topics.py").items():
        yield Document(f"topics/{name}", text)
    for name, source in _sources():
        yield from docstrings(source, name)


def _modules() -> Iterator[Document]:
    for name, source in _sources():
        text = bare(source)
        if len(text) > SHORTEST:
            yield Document(name, text)


def _root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _sources() -> Iterator[tuple[str, bytes]]:
    """Name and source of the standard library's modules."""
    for path in sorted(_root().rglob("*.py")):
        parts = path.relative_to(_root()).with_suffix("").parts
        if SKIPPED.isdisjoint(parts) and not parts[0].startswith(("config-", "_sysconfigdata")):
            yield ".".join(parts), path.read_bytes()


def bare(source: bytes) -> str:
    """A module's text without the lines of its docstrings, so that it shares no text with the prose."""
    lines = source.decode("utf-8", errors="replace").splitlines()
    for _, node in _definitions(ast.parse(source), ""):
        if ast.get_docstring(node, clean=False) is not None:
            first, last = node.body[0].lineno, node.body[0].end_lineno
            lines[first - 1 : last] = [None] * (last - first + 1)
    return "\n".join(line for line in lines if line is not None)


def _topics(path: Path) -> dict[str, str]:
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "topics":
            return ast.literal_eval(node.value)
    raise ValueError(f"{path} defines no `topics`; pass text=PATH to use another text")


def docstrings(source: bytes, module: str) -> Iterator[Document]:
    """Docstrings of a module, its classes and its functions, longer than `SHORTEST`; named module/Class.function."""
    seen: dict[str, int] = {}
    for name, node in _definitions(ast.parse(source), module + "/"):
        text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
        if len(text) > SHORTEST:
            seen[name] = seen.get(name, 0) + 1  # the same function defined once per platform
            yield Document(name if seen[name] == 1 else f"{name}#{seen[name]}", text)


def _definitions(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.Module):
        yield name, node
    for child in ast.iter_child_nodes(node):
        inner = name
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = name + ("" if name.endswith("/") else ".") + child.name
            yield inner, child
        if not isinstance(child, ast.expr):
            yield from _definitions(child, inner)


def _files(path: Path) -> Iterator[Document]:
    if not path.exists():
        raise ValueError(f"text={str(path)!r} does not exist; give a text file or a folder of text files")
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            name = file.relative_to(path).as_posix() if path.is_dir() else file.name
            for index, piece in enumerate(pieces(file.read_text(encoding="utf-8", errors="replace"))):
                yield Document(f"{name}#{index}", piece)


def pieces(text: str) -> Iterator[str]:
    """Cut at blank lines into pieces of at least `PIECE` characters; the last one is what is left."""
    piece = ""
    for paragraph in re.split(r"\n\s*\n", text.replace("\r\n", "\n")):
        piece = f"{piece}\n\n{paragraph}" if piece else paragraph
        if len(piece) >= PIECE:
            yield piece
            piece = ""
    if piece.strip():
        yield piece
