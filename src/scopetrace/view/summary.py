"""A program by module: shapes, parameters, FLOPs and memory of each call, as text, data or HTML.

Data flow:
    Tree of sections + Meter -> a Row for each section down to a depth
    rows -> a table, in which equal neighbours are one line; dicts; an HTML table
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx

from scopetrace.containers.structure import leaves
from scopetrace.formatting import Tabular, amount
from scopetrace.program.graph import node_value, type_text
from scopetrace.program.traced import TracedProgram
from scopetrace.view.measures import Marks, Measures, Meter, share
from scopetrace.view.text import counted
from scopetrace.view.tree import Section, Tree, tensors_of

_SHOWN = 3  # tensors of a cell


@dataclasses.dataclass(frozen=True)
class Row(Measures):
    """A module call, a user scope, or the body of a higher-order op. Counts include all that is inside."""

    path: str
    """The scope's path."""
    fqn: str | None
    """The module's name; None for what is no submodule of the model."""
    type: str
    """The module's class; empty for a user scope or a body."""
    index: int
    """0 for the first call of the module, 1 for its second."""
    depth: int
    """0 for the root."""
    inputs: tuple[str, ...]
    """The tensors among the arguments: `f32[1, 8]`."""
    outputs: tuple[str, ...]
    """The tensors of the result."""
    share: float
    """Its part of the FLOPs of the program, from 0 to 1; of the activation bytes where it has no FLOPs."""
    writes: tuple[str, ...]
    """The inputs, buffers and parameters of the model that it changes; names without that of the module itself."""
    shares: tuple[str, ...]
    """The parameters that modules outside read, too."""


class Summary(Tabular):
    """What each module of a program takes and costs. Prints as a table; in a notebook, as an HTML table.

    Attributes:
        rows: a Row for each call, user scope and body, outer before inner, in the order of execution.
        unused: by name, the elements of the model's parameters that no op of the program reads.
    """

    def __init__(self, program: TracedProgram, depth: int | None = None) -> None:
        """`depth`: levels of sections below the root that have rows; None for all."""
        self._tree = Tree(program)
        self._meter = Meter(program)
        self._marks = Marks(program, self._tree)
        self._depth = depth
        self._root = self._meter.of(self._tree.root)
        self.rows: list[Row] = []
        self._lines: list[tuple[str, ...]] = [_HEADER]
        self._add(self._tree.root, 0)
        params = program.model.named_parameters() if isinstance(program.model, torch.nn.Module) else ()
        used = set(map(id, tensors_of(program, self._tree.root)))
        self.unused = {name: p.numel() for name, p in params if id(p) not in used}

    def to_dict(self) -> dict[str, Any]:
        """The rows and the totals as plain data, for JSON. Sizes are elements or bytes."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        return {"total": rows[0], "unused_parameters": self.unused, "rows": rows}

    def __repr__(self) -> str:
        return f"<Summary of {self.rows[0].path}: {len(self.rows)} rows>"

    def _add(self, section: Section, depth: int, *, is_shown: bool = True) -> None:
        """Add the rows of a section and of those in it, and their lines, in which equal neighbours are one."""
        self.rows.append(self._row(section, depth, self._meter.of(section)))
        if is_shown:
            self._lines.append(_cells(_label(section), self.rows[-1]))
        for item in self._tree.runs(section.items) if depth != self._depth else ():
            is_run = item.kind == "run" and len(item.items) > 1
            for inner in item.items:
                self._add(inner, depth + 1, is_shown=is_shown and (inner is item.items[0] or not is_run))
            if is_shown and is_run:
                first, *others = item.items
                label = counted([_label(member) for member in others])
                label += f" as {_label(first)}" if len(others) == 1 else ""
                self._lines.append(_cells(label, self._row(others[-1], depth + 1, self._meter.of(*others))))

    def _row(self, section: Section, depth: int, cost: Measures) -> Row:
        call = section.call
        return Row(
            **vars(cost),
            path=section.path,
            fqn=call.fqn,
            type=call.scope.type_name if section.kind == "call" else "",
            index=call.index,
            depth=depth,
            inputs=_types(section.inputs),
            outputs=_types(section.outputs),
            share=share(cost, self._root),
            writes=self._marks.writes(section),
            shares=self._marks.shares(section),
        )

    def _table(self) -> list[tuple[str, ...]]:
        """The last column only where a line has something in it."""
        return self._lines if any(line[-1] for line in self._lines[1:]) else [line[:-1] for line in self._lines]

    def _notes(self) -> Iterator[str]:
        cost = self._root
        frozen = cost.parameters - cost.trainable
        if cost.parameters:
            parameters = f"{cost.parameters:,} parameters, {amount(cost.parameter_bytes, 'B')}"
            yield parameters + (f"; {frozen:,} of them do not require gradients" if frozen else "")
        if cost.buffer_bytes:
            yield f"{amount(cost.buffer_bytes, 'B')} of buffers and constants"
        yield f"{amount(cost.flops, 'FLOP')}, {amount(cost.activation_bytes, 'B')} of activations"
        if self.unused:
            names = [*self.unused]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            yield f"not used: {sum(self.unused.values()):,} parameters, in {', '.join(names[:3])}{more}"


_HEADER = ("module", "input", "output", "parameters", "FLOPs", "activations", "share", "notes")


def _cells(label: str, row: Row) -> tuple[str, ...]:
    counts = (
        f"{row.parameters:,}" if row.parameters else "-",
        amount(row.flops, "") if row.flops else "-",
        amount(row.activation_bytes, "B") if row.activation_bytes else "-",
    )
    marks = (("writes", row.writes), ("shares", row.shares))
    notes = "; ".join(f"{what} {_cell(names)}" for what, names in marks if names)
    return ("  " * row.depth + label, _cell(row.inputs), _cell(row.outputs), *counts, f"{row.share:.0%}", notes)


def _label(section: Section) -> str:
    return f'scope("{section.name}")' if section.kind == "scope" else section.label


def _types(x: Any) -> tuple[str, ...]:
    """The tensors in a structure as text, each node once."""
    return tuple(type_text(node_value(node)) for node in dict.fromkeys(leaves(x, torch.fx.Node)))


def _cell(types: tuple[str, ...]) -> str:
    more = f", … {len(types) - _SHOWN} more" if len(types) > _SHOWN else ""
    return ", ".join(types[:_SHOWN]) + more if types else "-"
