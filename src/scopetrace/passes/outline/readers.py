"""Who reads a value outside of the call in which it was made."""

from __future__ import annotations

import collections

from scopetrace.record.structure import leaves
from scopetrace.record.tape import Call, Op, Tape, Value


class Readers:
    """Of each value of a tape: where it is made, the last op that reads it, and the calls that take or give it."""

    def __init__(self, tape: Tape) -> None:
        self._made: dict[Value, int] = {}
        self._last: dict[Value, int] = {}
        self._calls: dict[Value, list[Call]] = collections.defaultdict(list)
        for i, op in enumerate(tape.ops):
            self._last.update(dict.fromkeys(_read(op), i))
            self._made.update(dict.fromkeys(_given(op), i))
        for call in tape.calls:
            for value in leaves((call.args, call.kwargs, call.outputs, call.mutated), Value):
                self._calls[value].append(call)
        self._results = set(leaves(tape.outputs if tape.returned is None else tape.returned, Value))
        self._results.update(w.value for w in tape.attribute_writes)

    def makes(self, call: Call, value: Value) -> bool:
        """Whether a value is made in a call, or in calls inside it."""
        return call.start <= self._made.get(value, -1) < call.stop

    def leaves(self, value: Value, call: Call) -> bool:
        """Whether a value is made in a call, or in calls inside it, and read outside of it."""
        if not self.makes(call, value):
            return False
        if value in self._results or self._last.get(value, -1) >= call.stop:
            return True
        return not all(_is_inside(reader, call) for reader in self._calls.get(value, ()))


def _read(op: Op) -> list[Value]:
    return leaves((op.args, op.kwargs), Value) if op.kind == "call_module" else op.inputs()


def _given(op: Op) -> list[Value]:
    return leaves(op.outputs, Value) if op.kind == "call_module" else op.values()


def _is_inside(call: Call | None, outer: Call) -> bool:
    while call is not None and call is not outer:
        call = call.parent
    return call is outer
