"""Module calls as a table."""

from __future__ import annotations

from collections.abc import Sequence

from scopetrace.calls import ModuleCall
from scopetrace.show.values import typed, value_text

_LIMIT = 8  # items of a container that a cell shows


def calls_table(calls: list[ModuleCall]) -> str:
    """One line for each call: its position, fqn, index and class, what went in and what came out."""
    rows = [("call", "fqn", "index", "class", "arguments", "outputs"), *map(_row, calls)]
    return columns(rows, widest=80)  # one call with many arguments must not push all outputs away


def columns(rows: Sequence[Sequence[str]], widest: int | None = None) -> str:
    """Rows of cells, aligned; what is wider than `widest` runs over."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths = [min(width, widest or width) for width in widths]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(call: ModuleCall) -> tuple[str, ...]:
    cls = call.module_type.__name__ if call.module_type is not None else "function"
    given = ", ".join(f"{name}={value_text(x, typed, _LIMIT)}" for name, x in call.arguments.items())
    if call.raised is not None:
        result = f"raised {type(call.raised).__name__}"
    else:
        result = value_text(call.outputs, typed, _LIMIT)
    return str(call.position), "-" if call.fqn is None else call.fqn or '""', str(call.index), cls, given, result
