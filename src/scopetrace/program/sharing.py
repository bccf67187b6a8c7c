"""Which tensors of a call share memory, and how they lie in it: as in the trace, where the program writes to it.

Data flow:
    inputs of the trace, tensors of the model -> where each lies: a storage, and which bytes of it
    pairs that share bytes, where one of them is written -> how far they lie apart
    the same of a call -> a pair that lies otherwise is an error that names both
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from scopetrace._compat.tensors import storage_id
from scopetrace.errors import InputMismatchError, StateMismatchError
from scopetrace.ir.tape import ProgramTape, Value
from scopetrace.ir.write_back import SetTo, StateRef
from scopetrace.ops.view_inverses import Geometry

_MOST_STEPS = 10_000
"""After so many tries two tensors of unusual strides count as sharing elements."""


class MemoryRange(NamedTuple):
    """Where a tensor lies: in bytes, counted from the start of its storage."""

    start: int
    stop: int
    dims: tuple[tuple[int, int], ...]
    """Size and stride of each dimension of more than one element."""
    item: int  # the bytes of an element


WHOLE = MemoryRange(0, 1, (), 1)
"""Of what counts as sharing memory with all in its storage."""

Lies = tuple[Any, ...]
"""How two tensors lie that share memory: equal where it is the same for a program that writes to them."""


def _in_one_memory(a: MemoryRange, b: MemoryRange) -> Lies | None:
    """How `b` lies beside `a`, which is in the same storage; None where no element is in both."""
    if a == b:
        return ("at one place",)
    if a.start >= b.stop or b.start >= a.stop or not _meet(a, b):
        return None
    return b.start - a.start, a.dims, a.item, b.dims, b.item


def _meet(a: MemoryRange, b: MemoryRange) -> bool:
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


class Sharing:
    """Inputs and tensors of the model lie in memory that they share as in the trace, where one is written or learns."""

    def __init__(self, tape: ProgramTape) -> None:
        written, values, state = tape.written_storages(), tape.inputs, dict(tape.attribute_reads())
        learns = any(op.phase is not None for op in tape.ops)
        changed = {n for n, v in state.items() if v.storage in written or (learns and v.requires_grad)}
        self._count = count = len(values)
        self._whole = {i for i, v in enumerate(values) if v.storage in tape.uses_absolute_offset}  # by `as_strided`
        self._written = {i for i, v in enumerate([*values, *state.values()]) if v.storage in written}
        self._state = list(state) if changed or self._written else []
        self._names = [*tape.input_paths, *self._state]
        replaced = _replaced(tape) if changed else set()  # a call itself changes what these share

        def matters(i: int, j: int) -> bool:  # i < j
            if i < count:
                return i in self._written or j in self._written or (j < count and values[i].fake is values[j].fake)
            pair = {self._names[i], self._names[j]}
            return pair.isdisjoint(replaced) and not pair.isdisjoint(changed)

        def place(i: int) -> MemoryRange:
            return WHOLE if i in self._whole else memory_range(traced[i].fake, traced[i].offset)

        self._matters = matters
        traced = [*values, *(state[name] for name in self._state)]
        self._traced = self._pairs([(i < count, v.storage) for i, v in enumerate(traced)], place)
        self.matters = bool(changed or self._written) or len({id(v.fake) for v in values}) < count
        """Whether tensors of a call can lie otherwise than the program allows."""

    def check(self, inputs: Sequence[Any], held: Callable[[str], torch.Tensor]) -> None:
        """Raise InputMismatchError or StateMismatchError for tensors of a call that lie otherwise.

        `held` gives a tensor of the model by its name. An input may not lie in memory of the model where it or that is
        written.
        """
        tensors = [*inputs[: self._count], *map(held, self._state)]
        storages = list(map(storage_id, tensors))
        if not self._traced and len(set(storages)) == len(storages):
            return
        pairs = self._pairs(storages, lambda i: WHOLE if i in self._whole else memory_range(tensors[i]))
        if pairs == self._traced:
            return
        i, j = min(pair for pair in self._traced.keys() | pairs if self._traced.get(pair) != pairs.get(pair))
        first, other, count = self._names[i], self._names[j], self._count
        if i < count <= j:
            both = f"{first} shares memory with {other} of the model"
            raise InputMismatchError(f"{both}, which writes one of them; pass {first}.clone()")
        was = "shared memory" if (i, j) in self._traced else "did not share memory"
        if (i, j) in self._traced and (i, j) in pairs:
            was = "lay otherwise in the memory that they share"
        problem = f"{was} when traced, and it is otherwise now"
        if i >= count:
            hint = "one of them is written or has a gradient; trace again, or put it back"
            raise StateMismatchError(f"{other} and {first} of the model {problem}, and {hint}")
        or_else = f", or with {other}.clone() for calls of both kinds" if j not in self._written else ""
        raise InputMismatchError(f"{other} and {first} {problem}; trace again with inputs like these{or_else}")

    def _pairs(self, storages: Sequence[Any], place: Callable[[int], MemoryRange]) -> dict[tuple[int, int], Lies]:
        members = collections.defaultdict[Any, list[int]](list)
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


def _neighbours(group: list[int], place: Callable[[int], MemoryRange]) -> Iterator[tuple[int, int]]:
    """The pairs whose memory overlaps between the first and last element of each."""
    places = {i: place(i) for i in group}
    before: list[int] = []
    for i in sorted(group, key=lambda i: places[i].start):
        before = [other for other in before if places[other].stop > places[i].start]
        yield from ((other, i) for other in before)
        before.append(i)


def memory_range(t: torch.Tensor, offset: int | torch.SymInt | None = None) -> MemoryRange:
    """Where a tensor lies in its storage; `offset` elements after its start, where that is not the tensor's own."""
    if t.layout is not torch.strided:
        return WHOLE
    geometry, item = Geometry.of(t, t.storage_offset() if offset is None else offset), t.dtype.itemsize
    first, last = geometry.span()
    return MemoryRange(first * item, (last + 1) * item, tuple([(n, s * item) for n, s in geometry.dims]), item)


def _replaced(tape: ProgramTape) -> set[str]:
    """The tensors of the model that get other memory in a call."""
    updates = [] if tape.write_back is None else tape.write_back.updates
    names = {u.target.name for u in updates if isinstance(u, SetTo) and isinstance(u.target, StateRef)}
    sources = (op.args[0] for op in tape.ops if op.target is torch.ops.aten.set_.source_Tensor)
    return names | {v.op.target for v in sources if isinstance(v, Value) and isinstance(v.op.target, str)}
