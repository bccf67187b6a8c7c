"""What a call that repeats another one has read: what the other one read, of its own modules and objects.

Data flow:
    what was read of the modules and objects of an original -> (one of them, Read), after the forward
    the modules and objects in their place, in each repetition -> RepeatedReads: the values that they have then
    the reads of the tape, when somebody asks for them -> a Read for each
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scopetrace.ir.reads import MISSING, InLayer, InTable, Read, own_dict, snapshot
from scopetrace.ir.scopes import Frames
from scopetrace.ir.tape import Call
from scopetrace.record.code import ATOMS
from scopetrace.record.original import Original
from scopetrace.record.reads import Noted


class Elsewhere:
    """Says where in a repetition is what is somewhere in its original."""

    def __init__(self, original: Call, call: Call) -> None:
        self._old, self._new = original.scope, call.scope.path
        self.known: dict[int, Frames] = {id(original.frames): call.frames}
        """By id of frames of the original, those that stand for them."""

    def frames(self, old: Frames) -> Frames:
        """The frames that stand for those of an op, a call or a read."""
        found = self.known.get(id(old))
        if found is None:
            found = old
            if old and not isinstance(old, str):
                outer = self.frames(old[0])
                found = old if outer is old[0] else (outer, old[1])
            self.known[id(old)] = found
        return found

    def path(self, old: str) -> str:
        """The path of the scope that stands for one; also for one in an earlier call of the module of the original."""
        own = self._old.path
        if old == own or old.startswith(f"{own}/"):
            return self._new + old[len(own) :]
        labels = old.split("/")
        if self._old.label not in labels:
            return old
        below = labels[len(labels) - labels[::-1].index(self._old.label) :]
        return "/".join([self._new, *below])

    def noted(self, noted: Noted) -> Noted:
        """Where the repetition has read what stands for something that the original has read."""
        return self.frames(noted[0]), self.path(noted[1])


@dataclasses.dataclass(eq=False, slots=True)
class Repeated:
    """A call that repeats an original, and what stands for the modules and objects of that."""

    original: Original
    call: Call
    partner: Callable[[Any], Any]
    owners: list[int] = dataclasses.field(default_factory=list)
    """The ids of what stands for `Original.owners`."""

    def note(self) -> None:
        """Note each attribute where it is watched, unless it was read or written before."""
        noted_in = Elsewhere(self.original.call, self.call).noted
        for watched, key in self.original.seen:
            owner, noted = watched.first[key]
            new = self.partner(owner)
            if id(new) not in watched.first:
                watched.first[id(new)] = new, noted and noted_in(noted)


OfOwner = tuple[Any, list[tuple[Any, Read]]]
"""A module or object, and what was read of it and of its class: each with which of them has it."""


class RepeatedReads:
    """What one repetition read, as items of `tape.ReadList`."""

    __slots__ = ("_calls", "_names", "_owners", "_reads", "values")

    def __init__(self, repeated: Repeated, of_original: Sequence[OfOwner], names: Mapping[int, str]) -> None:
        """`of_original` has what was read of the modules and objects of the original, and `names` those of all, by id.

        To be made when the modules are as they were before the forward.
        """
        self._calls = repeated.original.call, repeated.call
        self._names = names
        self._owners, self._reads = list[Any](), list[Read]()
        self.values = list[Any]()
        for owner, found in of_original:
            new = repeated.partner(owner)
            if new is owner:  # it is one of both calls
                continue
            own = own_dict(new)
            for holder, read in found:
                is_own = holder is owner
                self._owners.append(new if is_own else None)
                self._reads.append(read)
                self.values.append(_value_of(own, read) if is_own else read.value)

    @property
    def count(self) -> int:
        """How many reads there are."""
        return len(self._reads)

    def reads(self) -> list[Read]:
        """One for each."""
        elsewhere, found = Elsewhere(*self._calls), []
        for owner, value, read in zip(self._owners, self.values, self._reads, strict=True):
            place, name = read.place, read.name
            if owner is not None:
                own, name = own_dict(owner), self._names.get(id(owner), "")
                if isinstance(place, InLayer):
                    place = InLayer(own, place.keys, place.lacks)
                else:
                    assert isinstance(place, InTable)
                    place, name = InTable(own, place.key), f"{name}.{place.key}"
                name = name.removeprefix("self.").lstrip(".")
            found.append(Read(name, value, place, *elsewhere.noted((read.frames, read.module))))
        return found


def _value_of(own: dict[str, Any], read: Read) -> Any:
    """What stands in a `__dict__` for a value that was read of another one, or for those of a layer."""
    place = read.place
    if isinstance(place, InLayer):
        found = [own[key] for key in place.keys]
        if not ATOMS.issuperset(map(type, found)):
            found = list(map(snapshot, found))
        return (*found, *[None] * len(place.lacks))
    assert isinstance(place, InTable)
    value = own.get(place.key, MISSING)
    return value if type(value) in ATOMS else snapshot(value)
