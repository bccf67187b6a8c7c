"""Keys of ops: equal where the ops and all their constants are.

Values and symbols are numbered in the order in which they are met, so that names do not matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from scopetrace._compat.symbols import Symbolic, to_expr
from scopetrace.containers.structure import container_type, open_container
from scopetrace.ir.tape import BodyTape, Op, Value

_ATOMS = frozenset({bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_SEQUENCES = frozenset({tuple, list, torch.Size})


class Identity:
    """An object whose equality is not known: it equals itself only."""

    def __init__(self, x: Any) -> None:
        self._x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self._x is other._x

    def __hash__(self) -> int:
        return id(self._x)

    def __repr__(self) -> str:
        return type(self._x).__name__


class KeyBuilder:
    """Appends to a key. A class in it stands before a constant of that class; a number of a value before nothing."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.numbers: dict[Value, int] = {}
        """The values that were met, in order."""
        self._symbols: dict[Any, str] = {}

    def add(self, x: Any) -> None:
        """Append an argument or result of an op or a call."""
        kind = type(x)
        if kind is Value:
            self.items.append(self.numbers.setdefault(x, len(self.numbers)))
        elif kind in _ATOMS:
            self.items += (kind, x)
        elif kind in _SEQUENCES:
            self.items += (kind, len(x))
            for item in x:
                self.add(item)
        elif kind is float or kind is complex:
            self.items += (kind, repr(x))  # 0.0 differs from -0.0, and nan equals nan
        elif isinstance(x, Symbolic):
            self.items += ("size", self._text(x))
        elif kind is BodyTape:
            self.items += ("body", tape_key(x))
        else:
            self._add_container(x)

    def add_operand(self, x: Any) -> None:
        """Append a value with its metadata, or a symbolic number."""
        if isinstance(x, Value):
            t = x.fake
            self.items += (
                "a tensor that was passed before" if x in self.numbers else "a new tensor",
                t.dtype,
                t.device,
                t.layout,
            )
            self.add(tuple(t.size()))
        self.add(x)

    def add_ops(self, ops: Iterable[Op]) -> None:
        """Append ops, whose results get the next numbers."""
        for op in ops:
            self.items += (op.kind, op.target, "autograd on" if op.grad else "autograd off")
            self.add(op.args)
            if op.kwargs:
                self.add(op.kwargs)
            self.add(op.outputs)

    def _add_container(self, x: Any) -> None:
        children = open_container(x)
        if children is None:
            self.items.append(Identity(x))
            return
        self.items += (container_type(x).__name__, len(children))
        for path, item in children:
            self.items.append(path)
            self.add(item)

    def _text(self, number: Any) -> str:
        expr = to_expr(number)
        for symbol in sorted(expr.free_symbols, key=str):
            self._symbols.setdefault(symbol, f"n{len(self._symbols)}")
        return str(expr.xreplace({s: type(s)(name, **s.assumptions0) for s, name in self._symbols.items()}))


def tape_key(tape: BodyTape) -> tuple[Any, ...]:
    """The key of the body of a higher-order op."""
    key = KeyBuilder()
    for op in tape.ops:
        if op.kind == "placeholder":
            key.add_operand(op.outputs)
    key.add_ops(op for op in tape.ops if op.kind != "placeholder")
    key.add(tape.outputs)
    return tuple(key.items)
