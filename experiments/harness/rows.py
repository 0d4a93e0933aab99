"""Results on disk that survive a kill: rows appended one by one, and files that replace the old one whole."""

import contextlib
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class UserError(ValueError):
    """A mistake in what a driver was asked to do; the message is all that its user needs to read."""


class Rows:
    """A JSONL file of keyed rows.

    A row is a flat mapping and its key is the tuple of its ``key`` fields. Rows of an earlier run are read back on
    opening; a last line without its newline was cut off by a kill and is removed. Each new row is on the disk when
    ``add`` returns.
    """

    def __init__(self, path: pathlib.Path, key: Sequence[str]):
        self.path, self.key = path, tuple(key)
        _drop_half_line(path)
        self._rows = {}
        for number, row in enumerate(_read(path), start=1):
            if not isinstance(row, dict) or not set(self.key) <= set(row):
                raise UserError(f"{path} line {number} is no row of {', '.join(self.key)}: choose another --out")
            self._rows[self._key(row)] = row
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)

    def done(self, *key) -> bool:
        """Whether the row with these key values, in the order of ``key``, is known."""
        if len(key) != len(self.key):
            raise ValueError(f"a key has the fields {self.key}, got {key}")
        return key in self._rows

    def holds(self, row: Mapping[str, Any]) -> bool:
        """Whether a row with this one's key is known. Raises ValueError on a missing key field."""
        return self._key(row) in self._rows

    def add(self, row: Mapping[str, Any]) -> None:
        """Append one row. Raises ValueError on a missing key field, a key that is known, or a number not finite."""
        line = _dumps(row)
        row = json.loads(line)
        key = self._key(row)
        if key in self._rows:
            raise ValueError(f"the row {dict(zip(self.key, key, strict=True))} is in {self.path} already")
        self._file.write(line + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._rows[key] = row

    def close(self) -> None:
        self._file.close()

    def _key(self, row: Mapping[str, Any]) -> tuple:
        missing = [field for field in self.key if field not in row]
        if missing:
            raise ValueError(f"a row of {self.path} lacks its key fields {missing}: it has {sorted(row)}")
        return tuple(row[field] for field in self.key)


@contextlib.contextmanager
def atomic(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yields a temporary path in the same folder, which takes the place of ``path`` when the block ends well.

    A reader, or a run after a kill, sees the old file or the new one, never a part.
    """
    path = pathlib.Path(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    temporary = pathlib.Path(name)
    try:
        yield temporary
        with open(temporary, "r+b") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically."""
    with atomic(path) as temporary:
        temporary.write_text(_dumps(value, indent=1) + "\n", encoding="utf-8")


def _dumps(value: Any, indent: int | None = None) -> str:
    try:
        return json.dumps(value, default=_plain, allow_nan=False, indent=indent)
    except ValueError as error:
        raise ValueError(f"a result has to be made of finite numbers, got {value}") from error


def _plain(value: Any) -> Any:
    """NumPy and JAX scalars and arrays as Python numbers and lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def _drop_half_line(path: pathlib.Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)


def _read(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path} line {number} is no row ({error}): mend it, or choose another --out") from None
