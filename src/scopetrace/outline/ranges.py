"""The ops of a call as one key, by which equal calls are known before anything is cut out.

Data flow:
    a call -> its ops, the calls inside and their arguments, with numbers for values -> a number, equal for equal calls
    two calls of one number -> the values of one stand for those of the other, in the order in which they are met

Calls that share a function may differ here, as in the calls inside: `key.call_key` says which can share one, after they
are cut out. What is equal here is equal there, and where equal values are passed the second need not be cut out.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from scopetrace.containers.structure import container_type, open_container
from scopetrace.ir.segment import has_symbols
from scopetrace.ir.tape import Call, FunctionalTape, Op, Value, forward_of
from scopetrace.outline.key import Identity
from scopetrace.outline.readers import Readers
from scopetrace.outline.signature import own_tensors

_ATOMS = frozenset(
    {bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
)


@dataclasses.dataclass(eq=False, slots=True)
class Range:
    """The ops of one call."""

    number: int
    """Equal for equal calls, whose values correspond."""
    values: list[Value]
    """Those in it, each once."""
    outside: list[Value]
    """Those of them that it does not make."""
    reads: list[Op]
    """The parameters, buffers and constants that it is the first to read, which stay outside of functions."""
    inner: list[Call]
    """The calls in it."""


class Ranges:
    """The ranges of the calls of one tape, each found once."""

    def __init__(self, tape: FunctionalTape, readers: Readers, forward: Any) -> None:
        """`forward` is what the root call ran."""
        self._tape, self._readers, self._forward = tape, readers, forward
        self._has_symbols = has_symbols(tape)
        self._found: dict[Call, Range | None] = {}
        self._numbers: dict[Any, int] = {}
        self._own: dict[Call, dict[int, tuple[int, str, str]]] = {}
        self.children: dict[Call | None, list[Call]] = collections.defaultdict(list)
        """The calls right inside of each call."""
        for call in tape.calls:
            self.children[call.parent].append(call)

    def of(self, call: Call) -> Range | None:
        """That of a call; None where sizes are symbolic, since numbers may be equal without being the same."""
        if self._has_symbols:
            return None
        found = self._found.get(call)
        if found is None:
            found = self._found[call] = self._find(call)
        return found

    def own_tensors(self, call: Call) -> dict[int, tuple[int, str, str]]:
        """As the function of this name."""
        found = self._own.get(call)
        if found is None:
            found = self._own[call] = own_tensors(self._tape, call)
        return found

    def _find(self, call: Call) -> Range:
        key, reads = _Key(), list[tuple[int, Op]]()
        steps, inside = [0], set[Value]()
        """Of each op, the number of those before it that are no reads."""
        for i, op in enumerate(self._tape.ops[call.start : call.stop]):
            is_read = op.kind in ("placeholder", "get_attr")
            if is_read:
                reads.append((i, op))
            else:
                key.add_op(op, call, self._readers, inside)
            steps.append(steps[-1] + (not is_read))
        inner = [*self._inside(call)]
        for each in (call, *inner):
            key.items += (steps[each.start - call.start], steps[each.stop - call.start], each.module_type)
            forward = forward_of(each, self._forward)
            key.items.append(Identity(getattr(forward, "__func__", forward)))
            key.add((each.args, each.kwargs, each.outputs, each.mutated))
        numbers: dict[Call | None, int] = {each: i for i, each in enumerate(inner)}
        key.items += [numbers.get(each.parent) for each in inner]
        key.items += [(steps[i], key.numbers.get(op.result)) for i, op in reads]
        number = self._numbers.setdefault(tuple(key.items), len(self._numbers))
        values = [*key.numbers]
        return Range(number, values, [v for v in values if v not in inside], [op for _, op in reads], inner)

    def _inside(self, call: Call) -> Iterator[Call]:
        for child in self.children.get(call, ()):
            yield child
            yield from self._inside(child)


class _Key:
    """The key of one call. A class in it stands before a constant of that class; a number of a value before nothing."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.numbers: dict[Value, int] = {}
        """The values that were met, in order."""
        self._storages: dict[int, int] = {}

    def add_op(self, op: Op, call: Call, readers: Readers, inside: set[Value]) -> None:
        """Append an op of a call, and to `inside` what it makes."""
        items = self.items
        items += (op.kind, op.target, op.grad)
        self.add(op.args)
        if op.kwargs:
            self.add(op.kwargs)
        made = op.values()
        for v in made:
            if v not in self.numbers:
                self.numbers[v] = len(self.numbers)
                inside.add(v)
                storage = self._storages.get(v.storage)
                if storage is None:
                    self._storages[v.storage] = len(self._storages)
                else:  # a view, or the same tensor as an operand
                    items += (Value, storage, *(u.fake is v.fake for u in op.inputs()))
                items.append(readers.leaves(v, call))
        self.add(op.outputs)

    def add(self, x: Any) -> None:
        """Append an argument or result of an op or a call."""
        kind = type(x)
        if kind is Value:
            number = self.numbers.get(x)
            self.items.append(self._meet(x) if number is None else number)
        elif kind in _ATOMS:
            self.items += (kind, x)
        elif kind is tuple or kind is list:
            self.items += (kind, len(x))
            for item in x:
                self.add(item)
        elif kind is float or kind is complex:
            self.items += (kind, repr(x))  # 0.0 differs from -0.0, and nan equals nan
        else:
            self._add_container(x)

    def _meet(self, v: Value) -> int:
        """The number of a value that comes from outside, after what is to be the same of it."""
        number = self.numbers[v] = len(self.numbers)
        storage, fake = self._storages.setdefault(v.storage, len(self._storages)), v.fake
        kind = (fake.dtype, fake.device, fake.layout, fake.size()) if v.key is None else v.key
        self.items += (Value, storage, kind)
        return number

    def _add_container(self, x: Any) -> None:
        children = open_container(x)
        if children is None:
            self.items.append(Identity(x))
            return
        self.items += (container_type(x), len(children))
        for path, item in children:
            self.items.append(path)
            self.add(item)
