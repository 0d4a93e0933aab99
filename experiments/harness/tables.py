"""Tables for a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any


def render(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """A plain table under a header: numbers to the right, text to the left, a cell without a value as ``-``."""
    cells = [[_text(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in [columns, *cells]) for i in range(len(columns))]
    right = [all(not isinstance(row.get(column), str) for row in rows) for column in columns]

    def line(values: Sequence[str]) -> str:
        padded = [v.rjust(w) if r else v.ljust(w) for v, w, r in zip(values, widths, right, strict=True)]
        return "  ".join(padded).rstrip()

    return "\n".join([line(columns), line(["-" * width for width in widths]), *(line(values) for values in cells)])


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4f}" if 0 < abs(value) < 0.1 else f"{value:.2f}"
    return str(value)
