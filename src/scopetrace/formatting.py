"""Aligned columns, quantities with three digits, objects as text and in notebooks."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

LONGEST = 60
"""Characters of a value that are shown."""


class Printed:
    """What prints as text does so in a notebook, too."""

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


class Tabular:
    """What prints as a table with notes below, in a notebook as an HTML table."""

    def _table(self) -> list[tuple[str, ...]]:
        """The cells of the header and of each line."""
        raise NotImplementedError

    def _notes(self) -> Iterable[str]:
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join([columns(self._table()), "", *self._notes()])

    def to_html(self) -> str:
        """A piece of HTML, with all texts of the model escaped."""
        head, *rows = self._table()
        return html_table(rows, head) + "".join(f"<p>{html.escape(note)}</p>" for note in self._notes())

    def _repr_html_(self) -> str:  # for notebooks
        return self.to_html()


def html_table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Rows of cells as an HTML table, with all texts escaped and spaces kept."""

    def line(cells: Sequence[str], tag: str) -> str:
        style = "text-align:left;white-space:pre;padding:2px 14px 2px 0"
        inside = [f"<{tag} style='{style}'>{html.escape(cell)}</{tag}>" for cell in cells]
        return f"<tr>{''.join(inside)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><thead>{line(head, 'th')}</thead><tbody>{body}</tbody></table>"


def columns(rows: Sequence[Sequence[str]], widest: int | None = None) -> str:
    """Rows of cells, aligned; what is wider than `widest` runs over."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths = [min(width, widest or width) for width in widths]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def amount(count: float, unit: str) -> str:
    """A quantity with three digits and a prefix: `amount(6.4e9, "B")` is `6.40 GB`."""
    prefixes = ("", "k", "M", "G", "T", "P")
    step = min(max(int(math.log10(count) // 3), 0), len(prefixes) - 1) if count >= 1 else 0
    value = count / 1000**step
    digits = max(0, 2 - max(int(math.log10(value)), 0)) if value > 0 else 0
    return f"{value:.{digits if step else 0}f} {prefixes[step]}{unit}"


def duration(seconds: float) -> str:
    """Seconds with three digits: `12.3 ms`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def short_repr(x: Any) -> str:
    """The repr of an object where it is short and has no address, else its class: `<Cache>`."""
    try:
        text = repr(x)
    except Exception:  # any class may break its own repr
        text = ""
    is_short = 0 < len(text) <= LONGEST and "\n" not in text and " at 0x" not in text
    return text if is_short else f"<{type(x).__name__}>"
