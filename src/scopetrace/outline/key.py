"""Equality of module calls: a key that is equal for two calls if they can share a function.

The key has the class, the Python arguments, dtypes and sizes of tensors, which of them are the same tensor, and the ops
with all their constants. Values and symbols are numbered in the order in which they are met, so that names do not
matter.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from scopetrace._compat.symbols import Symbolic, to_expr
from scopetrace.containers.structure import container_type, open_container
from scopetrace.ir.tape import BodyTape, Op, Value
from scopetrace.outline.signature import ArgumentLeaf

_PLAIN = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class Numbering:
    """Parts of a key, with numbers for the values and symbols of one program.

    `names` has the identifiers of the bodies that are functions already, of which equal ones are the same tape.
    """

    def __init__(self, names: dict[BodyTape, str]) -> None:
        self._names = names
        self._values: dict[Value, int] = {}
        self._symbols: dict[Any, str] = {}

    def operand(self, x: Any) -> Any:
        """An operand of the program: a value, with its metadata, or a symbolic number."""
        if not isinstance(x, Value):
            return self.of(x)
        known = x in self._values
        return (self._number(x), known, *self._kind(x.fake))

    def op(self, op: Op) -> Any:
        """An op. Its results get the next numbers."""
        key = (op.kind, op.target, op.grad, self.of(op.args), self.of(op.kwargs))
        return (*key, self.of(op.outputs))

    def of(self, x: Any) -> Any:
        """An argument of a call or an op."""
        if isinstance(x, Value):
            return ("value", self._number(x))
        if isinstance(x, Symbolic):
            return ("size", self._text(x))
        if isinstance(x, _PLAIN):
            return (type(x).__name__, x)
        if isinstance(x, (float, complex)):
            return (type(x).__name__, repr(x))  # 0.0 differs from -0.0, and nan equals nan
        if isinstance(x, BodyTape):
            return ("body", self._names.get(x) or tape_key(x, self._names))
        if isinstance(x, dict):
            return (type(x).__name__, *((self.of(k), self.of(v)) for k, v in x.items()))
        inner = open_container(x)
        if inner is not None:
            return (container_type(x).__name__, *((path, self.of(item)) for path, item in inner))
        return ("object", type(x).__name__, Identity(x))

    def _number(self, value: Value) -> int:
        return self._values.setdefault(value, len(self._values))

    def _kind(self, t: torch.Tensor) -> tuple[Any, ...]:
        return t.dtype, t.device, t.layout, tuple(self.of(n) for n in t.size())

    def _text(self, number: Any) -> str:
        expr = to_expr(number)
        for symbol in sorted(expr.free_symbols, key=str):
            self._symbols.setdefault(symbol, f"n{len(self._symbols)}")
        return str(expr.xreplace({s: type(s)(name, **s.assumptions0) for s, name in self._symbols.items()}))


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


def call_key(
    cls: type | None,
    passed: list[ArgumentLeaf],
    operands: list[Any],
    ops: list[Op],
    outputs: list[Value],
    names: dict[BodyTape, str],
) -> Any:
    """The key of a call: its class, forward's arguments, all operands of its function in order, its ops and results."""
    numbers = Numbering(names)
    taken = tuple(numbers.operand(x) for x in operands)
    given = tuple((g.place, numbers.of(g.leaf)) for g in passed)  # whatever containers hold them
    return cls, given, taken, tuple(numbers.op(op) for op in ops), numbers.of(outputs)


def tape_key(tape: BodyTape, names: dict[BodyTape, str]) -> Any:
    """The key of the body of a higher-order op."""
    numbers = Numbering(names)
    taken = tuple(numbers.operand(op.outputs) for op in tape.ops if op.kind == "placeholder")
    return taken, tuple(numbers.op(op) for op in tape.ops if op.kind != "placeholder"), numbers.of(tape.outputs)


def content_hash(key: Any) -> str:
    """A hash of a key that is the same in every process."""
    return hashlib.sha256(repr(key).encode()).hexdigest()[:16]
