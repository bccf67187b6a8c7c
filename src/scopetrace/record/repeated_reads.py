"""What a call that repeats another one has read: what the other one read, of its own modules and objects.

Data flow:
    what was read of the modules and objects of an original -> (one of them, Read), after the forward
    the modules and objects in their place, in each repetition -> RepeatedReads: the values that they have then
    the reads of the tape, when somebody asks for them -> a Read for each
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from scopetrace.ir.reads import MISSING, InLayer, InTable, Place, Read, own_dict, snapshot
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
    owners: list[int]
    """The ids of what stands for `Original.owners`."""

    def note(self) -> None:
        """Note each attribute where it is watched, unless it was read or written before."""
        noted_in = Elsewhere(self.original.call, self.call).noted
        for watched, key in self.original.seen:
            owner, noted = watched.first[key]
            new = self.partner(owner)
            if id(new) not in watched.first:
                watched.first[id(new)] = new, noted and noted_in(noted)


class OfOwner:
    """What was read of a module or object of an original, and of its class."""

    __slots__ = ("_counts", "_get", "_keys", "count", "of_class", "of_own", "owner")

    def __init__(self, owner: Any, of_own: list[Read], of_class: list[Read]) -> None:
        """`of_own` are attributes in its `__dict__`, and all those of a layer that its code names."""
        self.owner, self.of_own, self.of_class = owner, of_own, of_class
        self.count = len(of_own) + len(of_class)
        """How many reads there are."""
        keys = [_keys_of(read.place) for read in of_own]
        self._counts = list(map(len, keys))
        self._keys = tuple(itertools.chain.from_iterable(keys))
        self._get = operator.itemgetter(*self._keys) if len(self._keys) > 1 else None

    def values(self, own: dict[str, Any]) -> Sequence[Any]:
        """What stands in a `__dict__` for all that was read of this one."""
        try:
            found: Sequence[Any] = [own[key] for key in self._keys] if self._get is None else self._get(own)
        except KeyError:
            found = [own.get(key, MISSING) for key in self._keys]
        return found if ATOMS.issuperset(map(type, found)) else list(map(snapshot, found))

    def reads(self, own: dict[str, Any], name: str, values: Iterator[Any]) -> Iterator[tuple[Read, Any, Place, str]]:
        """Of `own`, the `__dict__` of a module or object `name`: each read, the value in its stead, place and name.

        `values` begins with what the method of this name gave of it.
        """
        for read, count in zip(self.of_own, self._counts, strict=True):
            place, found = read.place, tuple(itertools.islice(values, count))
            if isinstance(place, InLayer):
                yield read, (*found, *[None] * len(place.lacks)), InLayer(own, place.keys, place.lacks), name
            else:
                assert isinstance(place, InTable)
                yield read, found[0], InTable(own, place.key), f"{name}.{place.key}"
        yield from [(read, read.value, read.place, read.name) for read in self.of_class]


def _keys_of(place: Place) -> Sequence[Any]:
    if isinstance(place, InLayer):
        return place.keys
    assert isinstance(place, InTable)
    return (place.key,)


class RepeatedReads:
    """What one repetition read, as items of `tape.ReadList`."""

    __slots__ = ("_calls", "_names", "_new", "_of", "count", "values")

    def __init__(self, repeated: Repeated, of_original: Sequence[OfOwner], names: Mapping[int, str]) -> None:
        """`of_original` has what was read of the modules and objects of the original, and `names` those of all, by id.

        To be made when the modules are as they were before the forward.
        """
        self._calls = repeated.original.call, repeated.call
        self._names = names
        self._new = list[Any]()
        self._of = list[OfOwner]()
        self.values = list[Any]()
        """What was read of its own modules and objects."""
        self.count = 0
        """How many reads there are."""
        for of_owner in of_original:
            new = repeated.partner(of_owner.owner)
            if new is not of_owner.owner:  # else it is one of both calls
                self._new.append(new)
                self._of.append(of_owner)
                self.values += of_owner.values(own_dict(new))
                self.count += of_owner.count

    def reads(self) -> list[Read]:
        """One for each."""
        elsewhere, found, values = Elsewhere(*self._calls), [], iter(self.values)
        for new, of_owner in zip(self._new, self._of, strict=True):
            outer = self._names.get(id(new), "")
            for read, value, place, name in of_owner.reads(own_dict(new), outer, values):
                name = name if place is read.place else name.removeprefix("self.").lstrip(".")
                found.append(Read(name, value, place, *elsewhere.noted((read.frames, read.module))))
        return found
