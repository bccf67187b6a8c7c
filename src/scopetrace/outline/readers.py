"""Who reads a value or a number outside of the call in which it was made."""

from __future__ import annotations

import bisect
import collections
from typing import Any

from scopetrace._compat.symbols import Symbolic, to_expr
from scopetrace.containers.structure import leaves
from scopetrace.ir.tape import Call, FunctionalTape, Tape, Value


class Readers:
    """Of each value of a tape: where it is made, the last op that reads it, and the calls that take or give it."""

    def __init__(self, tape: FunctionalTape) -> None:
        self._made: dict[Value, int] = {}
        self._last: dict[Value, int] = {}
        self._calls: dict[Value, list[Call]] = collections.defaultdict(list)
        self._ops = tape.ops
        self._steps = [i for i, op in enumerate(tape.ops) if op.kind not in ("placeholder", "get_attr")]
        for i, op in enumerate(tape.ops):
            self._last.update(dict.fromkeys(op.inputs(), i))
            self._made.update(dict.fromkeys(op.values(), i))
        for call in tape.calls:
            for value in leaves((call.args, call.kwargs, call.outputs, call.mutated), Value):
                self._calls[value].append(call)
        self._results = set(leaves(tape.graph_outputs(), Value))
        self._results.update(w.value for w in tape.attribute_writes)

    def makes(self, call: Call, value: Value) -> bool:
        """Whether a value is made in a call, or in calls inside it."""
        return call.start <= self._made.get(value, -1) < call.stop

    def place(self, call: Call, value: Value) -> tuple[int, int]:
        """Where in a call a value is made: the op, counted from the call's first, and which of its results it is."""
        i = self._made[value]
        return bisect.bisect_left(self._steps, i) - self._first_step(call), self._ops[i].values().index(value)

    def at(self, call: Call, place: tuple[int, int]) -> Value:
        """The value that a call makes there."""
        found: Value = self._ops[self._steps[self._first_step(call) + place[0]]].values()[place[1]]
        return found

    def _first_step(self, call: Call) -> int:
        return bisect.bisect_left(self._steps, call.start)

    def leaves(self, value: Value, call: Call) -> bool:
        """Whether a value is made in a call, or in calls inside it, and read outside of it."""
        if not self.makes(call, value):
            return False
        if value in self._results or self._last.get(value, -1) >= call.stop:
            return True
        return not all(_is_inside(reader, call) for reader in self._calls.get(value, ()))


class Numbers:
    """Of each symbol that an op of a tape makes from data: where it is made, and who uses it."""

    def __init__(self, tape: Tape) -> None:
        self._made = {symbol: i for i, op in enumerate(tape.ops) for symbol in op.unbacked or ()}
        self._ops: dict[Any, list[int]] = collections.defaultdict(list)
        self._calls: dict[Any, list[Call]] = collections.defaultdict(list)
        if not self._made:
            return
        for i, op in enumerate(tape.ops):
            for symbol in _symbols((op.args, op.kwargs)):
                self._ops[symbol].append(i)
        for call in tape.calls:
            for symbol in _symbols((call.args, call.kwargs, call.outputs)):
                self._calls[symbol].append(call)

    def lost(self, call: Call) -> list[Any]:
        """The symbols that are made in a call and used outside of it, though they are no size of its results."""
        sizes = {to_expr(n) for v in leaves(call.outputs, Value) for n in v.fake.size()} if self._made else set()
        return [
            s for s, i in self._made.items() if call.start <= i < call.stop and s not in sizes and self._out(s, call)
        ]

    def _out(self, symbol: Any, call: Call) -> bool:
        if any(not call.start <= i < call.stop for i in self._ops[symbol]):
            return True
        return any(user is not call and not _is_inside(user, call) for user in self._calls[symbol])


def _symbols(x: Any) -> set[Any]:
    return {symbol for number in leaves(x, Symbolic) for symbol in to_expr(number).free_symbols}


def _is_inside(call: Call | None, outer: Call) -> bool:
    while call is not None and call is not outer:
        call = call.parent
    return call is outer
