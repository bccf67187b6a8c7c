"""The values of a compiled graph, in the memory and with the strides that the graph promises.

A compiler may return values in other memory and with other strides than the graph: an input where the graph says
`clone`, a copy where it says `view`. The write-back depends on memory, so `GraphValues` restores it first.

Data flow:
    ops of the tape -> for each value in the memory of an input, parameter or buffer: that tensor, and views of it
    values of a compiled graph -> those from the tensors of the call, whose sizes and strides may be other ones
    values in memory of their own -> as they are where they share it as promised and nothing else has it, else copies
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from scopetrace._compat.symbols import Symbolic, has_unbacked, to_expr
from scopetrace.errors import CompiledGraphError
from scopetrace.ir.tape import ProgramTape, Value, flat, values_in
from scopetrace.ir.write_back import (
    FromGraph,
    GraphInput,
    Number,
    SameAs,
    StateRef,
    ValueSource,
    ViewOf,
    ViewStep,
    WriteBack,
    Written,
    once_each,
    resolved,
)
from scopetrace.ops.view_inverses import Geometry
from scopetrace.program.arguments import CallCode


class GraphValues:
    """What the graph of a tape returns, and where in memory.

    Attributes:
        sources: what each value is, once those in memory of their own are restored.
    """

    def __init__(self, tape: ProgramTape) -> None:
        self._is_dynamic, self._grad = tape.sizes is not None, tape.grad
        self._known: dict[Value, Written | None] = {v: GraphInput(i, v.op.name) for i, v in enumerate(tape.inputs)}
        self._known |= {v: StateRef(name) for name, v in tape.attribute_reads()}
        self._outside = {v.storage for v in self._known}
        """The storages of inputs, parameters, buffers and constants."""
        promised: list[Any] = [*tape.graph_outputs(), *(w.value for w in tape.attribute_writes)]
        first: dict[Any, int] = {}
        self._layouts = [_Layout.of(promise) for promise in promised]
        self.sources: list[ValueSource] = []
        self._own: dict[int, list[int]] = {}  # by storage, the places of the distinct values in memory of their own
        for i, promise in enumerate(promised):
            place = first.setdefault(promise, i) if isinstance(promise, Value) else i
            source = self._source(promise) if isinstance(promise, Value) else None
            self.sources.append(source or (FromGraph(i) if place == i else SameAs(place)))
            if self._layouts[i] is not None and place == i and promise.storage not in self._outside:
                self._own.setdefault(promise.storage, []).append(i)
        self._used = {row.output for row in (tape.write_back or WriteBack([], self.sources)).rows()}
        """Which of the values are results, or are written back."""
        self._are_own = all(source == FromGraph(i) for i, source in enumerate(self.sources))

    def restored(
        self, inputs: Sequence[Any], values: Sequence[Any], state: Callable[[str], torch.Tensor], number: Number
    ) -> list[Any]:
        """The values of a compiled graph, copied or viewed where memory or strides differ from those of the graph.

        `state` gives a parameter, buffer or constant by its name, `number` the value of a symbolic size in this call.
        Raises CompiledGraphError for another number of values, and for values of other shapes or dtypes.
        """
        if len(values) != len(self._layouts):
            count = len(self._layouts)
            raise CompiledGraphError(f"the compiled graph returned {len(values)} values, the graph has {count}")
        outputs = list(values)
        pairs: dict[int, tuple[_Layout, torch.Tensor]] = {}
        for i, layout in enumerate(self._layouts):
            is_tensor = isinstance(values[i], torch.Tensor)
            if i in self._used and not is_tensor and (layout is not None or values[i] is None):
                was = type(values[i]).__name__
                raise CompiledGraphError(f"the compiled graph returned {was} as value {i}, the graph has a tensor")
            if layout is not None and is_tensor:
                geometry = resolved(layout.geometry, number) if self._is_dynamic else layout.geometry
                pairs[i] = layout._replace(geometry=geometry), values[i]
                _check(i, *pairs[i])
        taken = _Ranges(x for x in inputs if isinstance(x, torch.Tensor))  # the others are numbers
        for places in self._own.values():
            if returned := {i: pairs[i] for i in places if i in pairs}:
                for i, tensor in zip(returned, _in_one_memory([*returned.values()], taken), strict=True):
                    outputs[i] = tensor
        return outputs if self._are_own else self._restore(inputs, outputs, state, lambda inputs: number)

    @functools.cached_property
    def _restore(self) -> Callable[..., list[Any]]:
        code = CallCode()
        lines = WriteBack([], self.sources).statements(code.constant)
        return code.function("inputs, values, held, number", [*lines, "return results"])

    def _source(self, value: Value) -> Written | None:
        """What gives a value in a call: the tensor that has its memory, and views of it.

        None for one in other memory, and for one that is not made by views of one tensor.
        """
        if value not in self._known:
            self._known[value] = self._view(value) if value.storage in self._outside else None
        return self._known[value]

    def _view(self, value: Value) -> Written | None:
        op = value.op
        base = op.args[0] if op.args else None
        if isinstance(op.target, str) or not isinstance(base, Value) or base.storage != value.storage:
            return None
        outside = self._source(base)
        if outside is None:
            return None
        if op.writes:  # it wrote, and gives back what it wrote to
            return outside if base.fake is value.fake else None
        others = flat([*op.args[1:], op.kwargs])  # other tensors, functions, numbers that depend on data
        numbers = [to_expr(x) for x in others if isinstance(x, Symbolic)]
        if values_in(others) or op.bodies() or any(map(has_unbacked, numbers)):
            return None
        slot = None if isinstance(op.outputs, Value) else value.slot
        grad = None if op.grad == self._grad else op.grad
        step = ViewStep(op.target, op.args[1:], op.kwargs, slot, grad)
        return ViewOf(outside.base, (*outside.steps, step)) if isinstance(outside, ViewOf) else ViewOf(outside, (step,))


class _Layout(NamedTuple):
    """How a dense tensor lies in its storage. The numbers may be symbolic."""

    dtype: torch.dtype
    geometry: Geometry

    @classmethod
    def of(cls, promise: Any) -> _Layout | None:
        """That of a value; None where it is not dense, is conjugated or negated, or has sizes that depend on data."""
        if not isinstance(promise, Value) or promise.fake.layout is not torch.strided:
            return None
        fake = promise.fake
        size, stride = tuple(fake.size()), tuple(fake.stride())
        depends = any(has_unbacked(to_expr(n)) for n in (*size, *stride, promise.offset))
        is_plain = not (fake.is_conj() or fake.is_neg() or depends)
        return cls(fake.dtype, Geometry(size, stride, promise.offset)) if is_plain else None  # type: ignore[arg-type]

    @property
    def start(self) -> int:
        """In bytes."""
        return self.geometry.offset * self.dtype.itemsize


def _check(i: int, layout: _Layout, value: torch.Tensor) -> None:
    if value.size() != layout.geometry.size or value.dtype != layout.dtype:
        was = f"{value.dtype} of shape {list(value.size())}"
        wanted = f"{layout.dtype} of shape {list(layout.geometry.size)}"
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


def _in_one_memory(pairs: list[tuple[_Layout, torch.Tensor]], taken: _Ranges) -> list[torch.Tensor]:
    """Outputs that share one storage, which no input and no other output may share."""
    (first, value), *_ = pairs
    together = all(_lies_as(p, v, first, value) for p, v in pairs)
    if taken.take(value) and together:
        return [v for _, v in pairs]
    return _copied(pairs)


def _lies_as(promise: _Layout, value: torch.Tensor, root: _Layout, base: torch.Tensor) -> bool:
    """Whether `value` lies at the same distance from `base` as `promise` from `root`, with its strides."""
    is_there = value.numel() == 0 or value.data_ptr() - base.data_ptr() == promise.start - root.start
    return is_there and (value.stride() == promise.geometry.stride or (value is not base and value.numel() == 0))


def _copied(pairs: list[tuple[_Layout, torch.Tensor]]) -> list[torch.Tensor]:
    """Copies in one new storage, at the same relative offsets and with the same strides as in the graph."""
    if len({p.dtype for p, _ in pairs}) > 1 or any(_overlaps(p) for p, _ in pairs):
        return [v.clone() for _, v in pairs]
    start = min(p.geometry.offset for p, _ in pairs)
    stop = max(p.geometry.span()[1] + 1 if v.numel() else p.geometry.offset for p, v in pairs)
    memory = pairs[0][1].new_empty(stop - start)
    views = [memory.as_strided(p.geometry.size, p.geometry.stride, p.geometry.offset - start) for p, _ in pairs]
    for view, (promise, value) in zip(views, pairs, strict=True):
        once = once_each(promise.geometry.stride)
        view[once].copy_(value[once])
    return views


def _overlaps(layout: _Layout) -> bool:
    """Whether elements share memory, expanded dimensions (stride 0) aside."""
    size, stride = layout.geometry[:2]
    return Geometry(tuple([n if s else 1 for n, s in zip(size, stride, strict=True)]), stride, 0).overlaps_itself()
