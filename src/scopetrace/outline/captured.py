"""What calls make that is read outside of them, though forward does not return it (`self.last = …`).

Equal calls share a function whoever reads such a value: the function gives what is read of any of them.
"""

from __future__ import annotations

import collections
from typing import Any

from scopetrace.ir.tape import Call, FunctionalTape, Value
from scopetrace.outline.readers import Readers

Place = tuple[int, int]
"""Of a value in a call: the op that makes it, counted from the call's first, and which of its results it is."""
Bound = tuple[str, str] | None
"""The output's name and kind, where it is bound to an attribute of the module."""


class Captured:
    """The captured values of chosen calls; `wanted` are those that equal calls must give too."""

    def __init__(self, tape: FunctionalTape, readers: Readers, wanted: dict[Call, dict[Place, Bound]]) -> None:
        self._readers = readers
        self._wanted = wanted
        self._held = tape.attributes.keys()
        self._bound = {w.value: f"{w.fqn}.{w.name}" if w.fqn else w.name for w in tape.attribute_writes}
        self._groups: dict[Any, dict[Call, dict[Place, Bound]]] = collections.defaultdict(dict)

    def of(self, call: Call, own: list[Value]) -> dict[Value, Bound]:
        """The values that a call gives, of which `own` are read outside, with names for some."""
        found = self._places(call, own)
        merged = {**found, **self._wanted.get(call, {})}
        return {self._readers.at(call, place): merged[place] for place in sorted(merged)}

    def note(self, key: Any, call: Call, given: dict[Value, Bound]) -> None:
        """A call with this key, but for what is captured, gives these."""
        self._groups[key][call] = {self._readers.place(call, v): bound for v, bound in given.items()}

    def missing(self) -> dict[Call, dict[Place, Bound]]:
        """What calls must give because equal ones give it; empty where all give the same."""
        found: dict[Call, dict[Place, Bound]] = {}
        for calls in self._groups.values():
            union: dict[Place, Bound] = {}
            for places in calls.values():
                union |= {place: union.get(place) or bound for place, bound in places.items()}
            if any(places != union for places in calls.values()):
                found |= dict.fromkeys(calls, union)
        return found

    def _places(self, call: Call, values: list[Value]) -> dict[Place, Bound]:
        return {self._readers.place(call, v): self._name(call, v) for v in values}

    def _name(self, call: Call, value: Value) -> Bound:
        name, prefix = self._bound.get(value, ""), f"{call.fqn}." if call.fqn else ""
        if not name.startswith(prefix) or not name:
            return None
        return name.removeprefix(prefix), "mutated" if name in self._held else "captured"
