"""The values of a compiled graph, in the memory and with the strides that the graph promises.

A compiler may return values in other memory and with other strides than the graph: an input where the graph says
`clone`, a copy where it says `view`. The write-back depends on memory, so `GraphValues` restores it first.

Data flow:
    values of a compiled graph, by the storage that the graph has for them
    in that of an input -> the input, or a view of it; in that of an attribute -> as they are
    in one of their own -> as they are where they share it as promised and nothing else has it, else copies
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import torch

from scopetrace._compat.tensors import extent_of
from scopetrace.errors import CompiledGraphError
from scopetrace.ir.tape import Output, Tape, Value


class GraphValues:
    """What a graph returns, and where in memory.

    Args:
        tape: the tape of the graph.
        promised: its outputs: tape values, numbers or None.
    """

    def __init__(self, tape: Tape, promised: Sequence[Any]) -> None:
        self._promised = promised
        self._dense = [i for i, promise in enumerate(promised) if _is_plain(promise)]
        given = [op.outputs for op in tape.ops if op.kind == "placeholder"]
        self._inputs = [(i, value) for i, value in enumerate(given) if _is_plain(value)]
        self._attributes = {v.storage for op in tape.ops if op.kind == "get_attr" for v in op.values()}

    def restored(self, inputs: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """The values of a compiled graph, copied or viewed where memory or strides differ from those of the graph.

        Args:
            inputs: the inputs of this call.
            values: what the compiled graph returned.

        Raises CompiledGraphError for another number of values, and for values of other shapes or dtypes.
        """
        promised = self._promised
        if len(values) != len(promised):
            raise CompiledGraphError(f"the compiled graph returned {len(values)} values, the graph has {len(promised)}")
        groups: dict[int, list[int]] = {}
        for i in self._dense:
            if isinstance(values[i], torch.Tensor):
                _check(i, promised[i].fake, values[i])
                groups.setdefault(promised[i].storage, []).append(i)
        found = list(values)
        owners = {value.storage: (value, inputs[i]) for i, value in reversed(self._inputs)}  # the first that has it
        taken = _Ranges(x for x in inputs if isinstance(x, torch.Tensor))  # the others are numbers
        for storage, places in groups.items():
            pairs = [(promised[i], values[i]) for i in places]
            if storage in owners:
                tensors = [_of_input(*owners[storage], *pair) for pair in pairs]
            elif storage in self._attributes:
                tensors = [value for _, value in pairs]
            else:
                tensors = _in_one_memory(pairs, taken)
            for i, tensor in zip(places, tensors, strict=True):
                found[i] = tensor
        return found


def _is_plain(promise: Output) -> TypeGuard[Value]:
    """Whether it is a dense tensor of static sizes without conjugate or negative bit."""
    if not isinstance(promise, Value) or promise.fake.layout is not torch.strided:
        return False
    fake = promise.fake
    numbers = (*fake.size(), *fake.stride(), fake.storage_offset())
    return all(isinstance(n, int) for n in numbers) and not fake.is_conj() and not fake.is_neg()


def _check(i: int, fake: torch.Tensor, value: torch.Tensor) -> None:
    if value.size() != fake.size() or value.dtype != fake.dtype:
        was, wanted = (f"{t.dtype} of shape {list(t.size())}" for t in (value, fake))
        raise CompiledGraphError(f"the compiled graph returned {was} as value {i}, the graph has {wanted} there")


class _Ranges:
    """Address ranges of the inputs and of the values seen so far: disjoint, in order."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._ranges: list[tuple[int, int]] = []
        for start, stop in sorted(_range(t) for t in tensors if t.layout is torch.strided):
            if self._ranges and start < self._ranges[-1][1]:
                start, stop = self._ranges[-1][0], max(stop, self._ranges.pop()[1])
            if start < stop:
                self._ranges.append((start, stop))

    def take(self, t: torch.Tensor) -> bool:
        """Whether `t` overlaps none of the ranges; if so its own range is added."""
        start, stop = _range(t)
        i = bisect.bisect_left(self._ranges, (stop, 0))
        if start < stop and i and start < self._ranges[i - 1][1]:
            return False
        if start < stop:
            self._ranges.insert(i, (start, stop))
        return True


def _range(t: torch.Tensor) -> tuple[int, int]:
    storage = t.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes() if storage.data_ptr() else 0


def _of_input(owner: Value, given: torch.Tensor, promise: Value, value: torch.Tensor) -> torch.Tensor:
    """An output in the memory of an input: the input itself, or a view of it."""
    if promise is owner:
        return given
    if _is_view(owner, given, promise, value):
        return value
    fake, size = promise.fake, promise.fake.element_size()
    start = given.storage_offset() * given.element_size()
    start += promise.offset * size - owner.offset * given.element_size()
    if fake.dtype != given.dtype:
        with torch.no_grad():
            other = torch.empty(0, dtype=fake.dtype, device=given.device)
            return other.set_(given.untyped_storage(), start // size, fake.size(), fake.stride())
    view = given.as_strided(fake.size(), fake.stride(), start // size)
    return view if fake.requires_grad else view.detach()


def _in_one_memory(pairs: list[tuple[Value, torch.Tensor]], taken: _Ranges) -> list[torch.Tensor]:
    """Outputs that share one storage, which no input and no other output may share."""
    (first, value), *_ = pairs
    together = all(_is_view(first, value, p, v) for p, v in pairs) and value.stride() == first.fake.stride()
    if taken.take(value) and together:
        return [v for _, v in pairs]
    return _copied(pairs)


def _is_view(root: Value, base: torch.Tensor, promise: Value, value: torch.Tensor) -> bool:
    """Whether `value` lies at the same distance from `base` as `promise` from `root`, with its strides."""
    distance = promise.offset * promise.fake.element_size() - root.offset * root.fake.element_size()
    return value.numel() == 0 or (
        value.data_ptr() - base.data_ptr() == distance and value.stride() == promise.fake.stride()
    )


def _copied(pairs: list[tuple[Value, torch.Tensor]]) -> list[torch.Tensor]:
    """Copies in one new storage, at the same relative offsets and with the same strides as in the graph."""
    if len({p.fake.dtype for p, _ in pairs}) > 1 or any(_overlaps(p.fake) for p, _ in pairs):
        return [v.clone() for _, v in pairs]
    start = min(p.offset for p, _ in pairs)
    stop = max(p.offset + extent_of(p.fake) for p, _ in pairs)
    memory = pairs[0][1].new_empty(stop - start)
    views = [memory.as_strided(p.fake.size(), p.fake.stride(), p.offset - start) for p, _ in pairs]
    for view, (promise, value) in zip(views, pairs, strict=True):
        once = tuple(slice(0, 1) if s == 0 else slice(None) for s in promise.fake.stride())
        view[once].copy_(value[once])
    return views


def _overlaps(fake: torch.Tensor) -> bool:
    """Whether elements share memory, expanded dimensions (stride 0) aside."""
    reach = 0
    for stride, n in sorted((s, n) for n, s in zip(fake.size(), fake.stride(), strict=True) if s and n > 1):
        if stride <= reach:
            return True
        reach += (n - 1) * stride
    return False
