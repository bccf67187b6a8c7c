"""What calls make that is used outside of them, and what that means for the functions of equal calls."""

from __future__ import annotations

import bisect
import collections
from typing import Any

from scopetrace._compat.symbols import Symbolic, to_expr
from scopetrace.containers.structure import leaves
from scopetrace.ir.tape import Call, FunctionalTape, Value

Place = tuple[int, int]
"""A value in a call, the same in equal calls: the number of the op that makes it, and of its result."""
Bound = tuple[str, str] | None
"""The name and kind of the output for a value that is bound to an attribute of the module."""


class Readers:
    """Of each value of a tape: the op that makes it, the last op that reads it, and the calls that take or give it.

    The same of each symbol that an op makes from data.
    """

    def __init__(self, tape: FunctionalTape) -> None:
        self._made: dict[Any, int] = {}
        self._last: dict[Any, int] = {}
        self._calls: dict[Any, list[Call]] = collections.defaultdict(list)
        self._ops = tape.ops
        self._symbols = [symbol for op in tape.ops for symbol in op.unbacked or ()]
        self._steps = [i for i, op in enumerate(tape.ops) if op.kind not in ("placeholder", "get_attr")]
        for i, op in enumerate(tape.ops):
            read = op.inputs() if not self._symbols else [*op.inputs(), *self._symbols_in((op.args, op.kwargs))]
            self._last.update(dict.fromkeys(read, i))
            self._made.update(dict.fromkeys([*op.values(), *(op.unbacked or ())], i))
        for call in tape.calls:
            used = (call.args, call.kwargs, call.outputs, call.mutated)
            for value in [*leaves(used, Value), *self._symbols_in(used)]:
                self._calls[value].append(call)
        results = [*tape.graph_outputs(), *(w.value for w in tape.attribute_writes)]
        self._results = {*leaves(results, Value), *self._symbols_in(results)}

    def _symbols_in(self, x: Any) -> set[Any]:
        numbers = leaves(x, Symbolic) if self._symbols else ()
        return {symbol for number in numbers for symbol in to_expr(number).free_symbols}

    def makes(self, call: Call, value: Any) -> bool:
        """Whether a value or symbol is made in a call, including the calls inside it."""
        return call.start <= self._made.get(value, -1) < call.stop

    def place(self, call: Call, value: Value) -> Place:
        """Where in a call a value is made."""
        i = self._made[value]
        return bisect.bisect_left(self._steps, i) - self._first_step(call), self._ops[i].values().index(value)

    def at(self, call: Call, place: Place) -> Value:
        """The value that a call makes there."""
        return self._ops[self._steps[self._first_step(call) + place[0]]].values()[place[1]]

    def _first_step(self, call: Call) -> int:
        return bisect.bisect_left(self._steps, call.start)

    def lost_numbers(self, call: Call) -> list[Any]:
        """The symbols that a call makes and that are used outside of it, though they are no sizes of its results."""
        used = [symbol for symbol in self._symbols if self.leaves(symbol, call)]
        sizes = {to_expr(n) for v in leaves(call.outputs, Value) for n in v.fake.size()} if used else ()
        return [symbol for symbol in used if symbol not in sizes]

    def leaves(self, value: Any, call: Call) -> bool:
        """Whether a value or symbol is made in a call and used outside of it."""
        if not self.makes(call, value):
            return False
        if value in self._results or self._last.get(value, -1) >= call.stop:
            return True
        return not all(call in reader.ancestors() for reader in self._calls.get(value, ()))


class Captured:
    """What calls make that is used outside of them, though forward does not return it (`self.last = ...`).

    Equal calls share a function, so each has to give what is used of any. That is known once all calls are cut out:
    `missing` then says what to give beside, and outlining starts again with that as `wanted`.
    """

    def __init__(self, tape: FunctionalTape, readers: Readers, wanted: dict[Call, dict[Place, Bound]]) -> None:
        self._readers = readers
        self._wanted = wanted
        self._attributes = tape.attributes.keys()
        self._bound = {w.value: w.path for w in tape.attribute_writes}
        self._groups: dict[Any, dict[Call, dict[Place, Bound]]] = collections.defaultdict(dict)

    def of(self, call: Call, used: list[Value]) -> dict[Value, Bound]:
        """What a call gives, with names for some; `used` are the values that are used outside of this call."""
        merged = {self._readers.place(call, v): self._name(call, v) for v in used} | self._wanted.get(call, {})
        return {self._readers.at(call, place): merged[place] for place in sorted(merged)}

    def note(self, key: Any, call: Call, captured: dict[Value, Bound]) -> dict[Call, dict[Place, Bound]]:
        """Note what a call gives. `key` is equal for calls that are equal but for what they give here.

        Gives what is noted of all these.
        """
        group = self._groups[key]
        group[call] = {self._readers.place(call, v): bound for v, bound in captured.items()}
        return group

    def wants(self, *calls: Call) -> bool:
        """Whether one of these calls has to give what equal ones do."""
        return not self._wanted.keys().isdisjoint(calls)

    def missing(self) -> dict[Call, dict[Place, Bound]]:
        """By call, what it has to give because an equal one does; empty where all equal ones give the same."""
        missing: dict[Call, dict[Place, Bound]] = {}
        for calls in self._groups.values():
            union: dict[Place, Bound] = {}
            for places in calls.values():
                union |= {place: union.get(place) or bound for place, bound in places.items()}
            if any(places != union for places in calls.values()):
                missing |= dict.fromkeys(calls, union)
        return missing

    def _name(self, call: Call, value: Value) -> Bound:
        name = self._bound.get(value, "")
        if not name.startswith(call.prefix) or not name:
            return None
        return name.removeprefix(call.prefix), "mutated" if name in self._attributes else "captured"
