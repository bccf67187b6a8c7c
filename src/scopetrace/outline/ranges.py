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
import functools
from collections.abc import Iterator
from typing import Any

from scopetrace.ir.segment import has_symbols
from scopetrace.ir.tape import Call, FunctionalTape, Op, Value, forward_of
from scopetrace.outline.key import Identity, KeyBuilder
from scopetrace.outline.readers import Readers
from scopetrace.outline.signature import own_tensors


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
    """The ranges of the calls of one tape, each computed once.

    Attributes:
        tape: that tape.
        readers: its readers.
        forward: what the root call ran.
        has_symbols: whether sizes are symbolic.
        own_tensors: as the function of this name, of a call.
        children: the calls right inside of each call.
    """

    def __init__(self, tape: FunctionalTape, forward: Any) -> None:
        self.tape, self.readers, self.forward = tape, Readers(tape), forward
        self.has_symbols = has_symbols(tape)
        self._ranges: dict[Call, Range] = {}
        self._numbers: dict[Any, int] = {}
        self.own_tensors = functools.cache(functools.partial(own_tensors, tape))
        self.children: dict[Call | None, list[Call]] = collections.defaultdict(list)
        for call in tape.calls:
            self.children[call.parent].append(call)

    def of(self, call: Call) -> Range | None:
        """That of a call; None where sizes are symbolic, since numbers may be equal without being the same."""
        if not self.has_symbols and call not in self._ranges:
            self._ranges[call] = self._range(call)
        return self._ranges.get(call)

    def _range(self, call: Call) -> Range:
        key, reads = _RangeKey(call, self.readers), list[tuple[int, Op]]()
        steps = [0]
        """Of each op, the number of those before it that are no reads."""
        for i, op in enumerate(self.tape.ops[call.start : call.stop]):
            is_read = op.kind in ("placeholder", "get_attr")
            if is_read:
                reads.append((i, op))
            else:
                key.add_op(op)
            steps.append(steps[-1] + (not is_read))
        inner = [*self._inside(call)]
        for each in (call, *inner):
            key.items += (steps[each.start - call.start], steps[each.stop - call.start], each.module_type)
            forward = forward_of(each, self.forward)
            key.items.append(Identity(getattr(forward, "__func__", forward)))
            key.add((each.args, each.kwargs, each.outputs, each.mutated))
        numbers: dict[Call | None, int] = {each: i for i, each in enumerate(inner)}
        key.items += [numbers.get(each.parent) for each in inner]
        key.items += [(steps[i], key.numbers.get(op.result)) for i, op in reads]
        number = self._numbers.setdefault(tuple(key.items), len(self._numbers))
        values = [*key.numbers]
        return Range(number, values, [v for v in values if v not in key.inside], [op for _, op in reads], inner)

    def _inside(self, call: Call) -> Iterator[Call]:
        for child in self.children.get(call, ()):
            yield child
            yield from self._inside(child)


class _RangeKey(KeyBuilder):
    """The key of the ops of one call, with the metadata of what comes from outside where it is met.

    Attributes:
        inside: the values that the ops make.
    """

    def __init__(self, call: Call, readers: Readers) -> None:
        super().__init__({})
        self.inside: set[Value] = set()
        self._call, self._readers = call, readers
        self._storages: dict[int, int] = {}

    def add_op(self, op: Op) -> None:
        """Append an op of the call."""
        items = self.items
        items += (op.kind, op.target, op.grad)
        self.add(op.args)
        if op.kwargs:
            self.add(op.kwargs)
        for v in op.values():
            if v not in self.numbers:
                self.numbers[v] = len(self.numbers)
                self.inside.add(v)
                storage = self._storages.get(v.storage)
                if storage is None:
                    self._storages[v.storage] = len(self._storages)
                else:  # a view, or the same tensor as an operand
                    items += (Value, storage, *(u.fake is v.fake for u in op.inputs()))
                items.append(self._readers.leaves(v, self._call))
        self.add(op.outputs)

    def meet(self, v: Value) -> int:
        """The number of a value that comes from outside, after what is to be the same of it."""
        storage, fake = self._storages.setdefault(v.storage, len(self._storages)), v.fake
        kind = (fake.dtype, fake.device, fake.layout, fake.size()) if v.key is None else v.key
        self.items += (Value, storage, kind)
        return super().meet(v)
