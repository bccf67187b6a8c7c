"""Which tensors of a call share memory, and how they lie in it: as in the trace, where the program writes to it.

Data flow:
    inputs of the trace, tensors of the model -> where each lies: a storage, and which bytes of it
    pairs that share bytes, where one of them is written -> how far they lie apart
    the same of a call -> a pair that lies otherwise is an error that names both
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from scopetrace._compat.tensors import storage_id
from scopetrace.errors import InputMismatchError, StateMismatchError
from scopetrace.ir.tape import ProgramTape, Value
from scopetrace.ir.write_back import SetTo, StateRef
from scopetrace.ops.view_inverses import Geometry

_MOST_STEPS = 10_000
"""After so many tries two tensors of unusual strides count as sharing elements."""


class Place(NamedTuple):
    """Where a tensor lies: in bytes, counted from the start of its storage."""

    start: int
    stop: int
    dims: tuple[tuple[int, int], ...]
    """Size and stride of each dimension of more than one element."""
    item: int
    """The bytes of an element."""

    @classmethod
    def of(cls, geometry: Geometry, item: int) -> Place:
        """That of a strided tensor of these positions and size of elements."""
        start, dims = geometry.offset * item, tuple([(n, s * item) for n, s in geometry.dims])
        last = sum((n - 1) * s for n, s in dims) + item
        return cls(start, start + (last if geometry.numel else 0), dims, item)


WHOLE = Place(0, 1, (), 1)
"""Of what counts as sharing memory with all in its storage."""

Lies = tuple[Any, ...]
"""How two tensors lie that share memory: equal where it is the same for a program that writes to them."""


def _in_one_memory(a: Place, b: Place) -> Lies | None:
    """How `b` lies beside `a`, which is in the same storage; None where no element is in both."""
    if a == b:
        return ("at one place",)
    if a.start >= b.stop or b.start >= a.stop or not _meet(a, b):
        return None
    return b.start - a.start, a.dims, a.item, b.dims, b.item


def _meet(a: Place, b: Place) -> bool:
    """Whether a byte is in both: whether numbers within the sizes lead over the strides from one to the other."""
    reaches: dict[int, tuple[int, int]] = {1: (1 - b.item, a.item - 1)}
    for dims, sign in ((a.dims, 1), (b.dims, -1)):
        for n, stride in dims:
            low, high = reaches.get(abs(stride), (0, 0))
            there = sign * (n - 1) * (1 if stride > 0 else -1 if stride < 0 else 0)
            reaches[abs(stride)] = min(low, low + there), max(high, high + there)
    reaches.pop(0, None)
    steps = sorted(((s, low, high) for s, (low, high) in reaches.items()), reverse=True)
    left = [(0, 0)]  # how far the smaller steps lead, down and up
    for stride, low, high in reversed(steps):
        left.append((left[-1][0] + stride * low, left[-1][1] + stride * high))
    left = left[-2::-1]
    tries = _MOST_STEPS

    def leads(to: int, i: int) -> bool:
        nonlocal tries
        if i == len(steps) or tries < 0:
            return to == 0 or tries < 0
        stride, low, high = steps[i]
        down, up = left[i]
        for n in range(max(low, -((up - to) // stride)), min(high, (to - down) // stride) + 1):
            tries -= 1
            if leads(to - n * stride, i + 1):
                return True
        return False

    return leads(b.start - a.start, 0)


class _Sharing:
    """How some tensors lie in memory that they share, and whether others lie so."""

    def __init__(self, storages: Sequence[int], place: Callable[[int], Place], matters: Callable[[int, int], bool]):
        """Storages and places are those when traced; `matters` says of two tensors whether they have to lie so."""
        self._matters = matters
        self._traced = self._pairs(storages, place)

    def difference(self, tensors: Sequence[torch.Tensor], whole: Container[int] = ()) -> tuple[int, int, str] | None:
        """The first pair that lies otherwise than in the trace: the positions, and how it was then.

        Of the tensors at `whole` all of the storage counts.
        """
        storages = list(map(storage_id, tensors))
        if not self._traced and len(set(storages)) == len(storages):
            return None
        current = self._pairs(storages, lambda i: WHOLE if i in whole else place_of(tensors[i]))
        if current == self._traced:
            return None
        both = self._traced.keys() & current.keys()
        i, j = min(pair for pair in self._traced.keys() | current if self._traced.get(pair) != current.get(pair))
        if (i, j) in both:
            return i, j, "lay otherwise in the memory that they share"
        return i, j, "shared memory" if (i, j) in self._traced else "did not share memory"

    def _pairs(self, storages: Sequence[int], place: Callable[[int], Place]) -> dict[tuple[int, int], Lies]:
        members = collections.defaultdict[int, list[int]](list)
        for i, storage in enumerate(storages):
            members[storage].append(i)
        pairs: dict[tuple[int, int], Lies] = {}
        for group in members.values():
            for a, b in _neighbours(group, place) if len(group) > 1 else ():
                i, j = sorted((a, b))
                lies = _in_one_memory(place(i), place(j)) if self._matters(i, j) else None
                if lies is not None:
                    pairs[i, j] = lies
        return pairs


def _neighbours(group: list[int], place: Callable[[int], Place]) -> Iterator[tuple[int, int]]:
    """The pairs whose memory overlaps between the first and last element of each."""
    places = {i: place(i) for i in group}
    before: list[int] = []
    for i in sorted(group, key=lambda i: places[i].start):
        before = [other for other in before if places[other].stop > places[i].start]
        yield from ((other, i) for other in before)
        before.append(i)


def place_of(t: torch.Tensor, offset: int | torch.SymInt | None = None) -> Place:
    """Where a tensor lies in its storage; `offset` elements after its start, where that is not the tensor's own."""
    if t.layout is not torch.strided:
        return WHOLE
    return Place.of(Geometry.of(t, t.storage_offset() if offset is None else offset), t.dtype.itemsize)


class InputSharing:
    """Inputs lie in memory that they share as they did in the trace, where one of them is written or they were one."""

    def __init__(self, tape: ProgramTape) -> None:
        written, values = tape.written_storages(), tape.inputs
        self._paths = tape.input_paths
        self._whole = {i for i, v in enumerate(values) if v.storage in tape.uses_absolute_offset}  # by `as_strided`
        self._written = {i for i, v in enumerate(values) if v.storage in written}

        def matters(i: int, j: int) -> bool:
            return i in self._written or j in self._written or values[i].fake is values[j].fake

        def place(i: int) -> Place:
            return WHOLE if i in self._whole else place_of(values[i].fake, values[i].offset)

        self._sharing = _Sharing([v.storage for v in values], place, matters)

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise InputMismatchError where tensors of a call lie otherwise."""
        other = self._sharing.difference(tensors, self._whole)
        if other is not None:
            i, j, was = other
            or_else = f", or with {self._paths[j]}.clone() for calls of both kinds" if j not in self._written else ""
            raise InputMismatchError(
                f"{self._paths[j]} and {self._paths[i]} {was} when traced, and it is otherwise now; trace again with "
                "inputs like these" + or_else
            )


class StateSharing:
    """The model's tensors lie in memory that they share as they did in the trace, where one is written or learns.

    No input lies in their memory, where it or that is written.
    """

    def __init__(self, tape: ProgramTape) -> None:
        written, reads = tape.written_storages(), tape.attribute_reads()
        learns = any(op.phase is not None for op in tape.ops)
        changed = {n for n, v in reads if v.storage in written or (learns and v.requires_grad)}
        replaced = _replaced(tape) if changed else set()  # a call itself changes what these share
        names = [name for name in dict.fromkeys(n for n, _ in reads) if name not in replaced] if changed else []
        tensors = [tape.attributes[name] for name in names]
        self._names, self._paths = names, tape.input_paths
        self._written_inputs = {i for i, v in enumerate(tape.inputs) if v.storage in written}
        self._beside_inputs = {n: v.storage in written for n, v in reads}
        """The tensors whose memory an input may not share, and whether they are written."""
        if not self._written_inputs and True not in self._beside_inputs.values():
            self._beside_inputs = {}
        self._sharing = _Sharing(
            list(map(storage_id, tensors)),
            lambda i: place_of(tensors[i]),
            lambda i, j: names[i] in changed or names[j] in changed,
        )

    def check(self, current: Callable[[Iterable[str]], list[torch.Tensor]], inputs: Sequence[Any]) -> None:
        """Raise StateMismatchError where they lie otherwise, InputMismatchError for an input among them.

        `current` gives the tensors of the model by their names.
        """
        if self._beside_inputs:
            self._check_inputs(current(self._beside_inputs), inputs)
        other = self._sharing.difference(current(self._names)) if self._names else None
        if other is not None:
            i, j, was = other
            raise StateMismatchError(
                f"{self._names[j]} and {self._names[i]} of the model {was} when traced, and it is otherwise now, and "
                "one of them is written or has a gradient; trace again, or put it back"
            )

    def _check_inputs(self, tensors: list[torch.Tensor], inputs: Sequence[Any]) -> None:
        storages = list(map(storage_id, tensors))
        for i, (path, tensor) in enumerate(zip(self._paths, inputs, strict=False)):
            storage = storage_id(tensor)
            if storage not in storages:
                continue
            for (name, written), t, other in zip(self._beside_inputs.items(), tensors, storages, strict=True):
                matters = other == storage and (written or i in self._written_inputs)
                if matters and _in_one_memory(place_of(tensor), place_of(t)):
                    both = f"{path} shares memory with {name} of the model"
                    raise InputMismatchError(f"{both}, which writes one of them; pass {path}.clone()")


def _replaced(tape: ProgramTape) -> set[str]:
    """The tensors of the model that get other memory in a call."""
    updates = [] if tape.write_back is None else tape.write_back.updates
    names = {u.target.name for u in updates if isinstance(u, SetTo) and isinstance(u.target, StateRef)}
    sources = (op.args[0] for op in tape.ops if op.target is torch.ops.aten.set_.source_Tensor)
    return names | {v.op.target for v in sources if isinstance(v, Value) and isinstance(v.op.target, str)}
