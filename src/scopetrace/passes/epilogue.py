"""The write-back program of a functional tape: what the graph has to give, and what is done with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from scopetrace.errors import FunctionalizationError
from scopetrace.passes.region import Link, Region, geometry_of
from scopetrace.passes.write_back import (
    ChangeShape,
    CopyInto,
    FromGraph,
    Given,
    Held,
    SameAs,
    Source,
    ViewOf,
    ViewStep,
    WriteBack,
)
from scopetrace.record.structure import leaves
from scopetrace.record.tape import Tape, Value, flat

_aten = torch.ops.aten
_SIZED_BY_OTHER = {
    _aten.expand_as.default: _aten.expand.default,
    _aten.view_as.default: _aten.view.default,
    _aten.reshape_as.default: _aten.reshape.default,
}
Symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)


def attach(old: Tape, new: Tape, regions: dict[int, Region], read: Callable[[Value], Value]) -> None:
    """Give `new` its `returned` and `write_back`. `read` gives the final value of one of the old tape."""
    builder = _Builder(old, new, regions, read)
    new.returned = builder.returned
    new.write_back = WriteBack(builder.updates(), builder.results())
    new.outputs = old.outputs


class _Builder:
    def __init__(
        self, old: Tape, new: Tape, regions: dict[int, Region], read: Callable[[Value], Value]
    ) -> None:
        self.old, self.new, self.regions, self.read = old, new, regions, read
        self.returned: list[Any] = []
        self.outside: dict[Value, Given | Held] = {}
        for op in old.ops:
            if op.kind == "placeholder":
                self.outside[op.outputs] = Given(len(self.outside), op.target)
        for op in old.ops:
            if op.kind == "get_attr":
                self.outside[op.outputs] = Held(op.target)

    # ---------------------------------------------------------------- updates

    def updates(self) -> list[CopyInto | ChangeShape]:
        """In the order of the inputs."""
        found: list[CopyInto | ChangeShape] = []
        done: set[int] = set()
        for value, target in self.outside.items():
            region = self.regions.get(value.storage)
            last = self._last(value)
            if region is None or id(last.fake) in done:
                continue
            done.add(id(last.fake))
            for before, after in zip(self._shapes(value), self._shapes(value)[1:], strict=False):
                link = region.links[after]
                op = region.reshaped[before][1]
                found.append(ChangeShape(target, ViewStep(op.target, link.args, link.kwargs, None)))
            if region.version:
                grad = all(op.grad for op in region.written.values())
                found.append(CopyInto(target, self._give(self.read(last)), grad))
        return found

    def _shapes(self, value: Value) -> list[Value]:
        """The value and what in-place changes of its shape made of it."""
        region = self.regions[value.storage]
        found = [value]
        while (step := region.reshaped.get(found[-1])) is not None:
            found.append(step[0])
        return found

    def _last(self, value: Value) -> Value:
        return self._shapes(value)[-1] if value.storage in self.regions else value

    # ---------------------------------------------------------------- results

    def results(self) -> list[Source]:
        """One source for each tensor and symbolic number of the model's result."""
        self._outputs = leaves(self.old.outputs, (Value, *Symbolic))
        self._objects = {id(self._last(v).fake): target for v, target in reversed(self.outside.items())}
        self._alone = self._count_objects()
        self._first: dict[int, int] = {}
        self._storages: dict[int, int] = {}  # new storage of a result -> the old one
        found: list[Source] = []
        for i, leaf in enumerate(self._outputs):
            found.append(self._result(i, leaf))
        return found

    def _count_objects(self) -> dict[int, int]:
        seen: dict[int, set[int]] = {}
        for leaf in self._outputs:
            if isinstance(leaf, Value):
                seen.setdefault(leaf.storage, set()).add(id(leaf.fake))
        return {storage: len(objects) for storage, objects in seen.items()}

    def _result(self, i: int, leaf: Any) -> Source:
        if not isinstance(leaf, Value):
            return self._give(leaf)
        if id(leaf.fake) in self._first:
            return SameAs(self._first[id(leaf.fake)])
        self._first[id(leaf.fake)] = i
        target = self._objects.get(id(leaf.fake))
        if target is not None:
            return target
        region = self.regions.get(leaf.storage)
        if region is None:
            return self._plain(leaf, leaf)
        outside = [r for r in region.roots if r in self.outside]
        if outside:
            root, steps = self._chain(region, leaf)
            return ViewOf(self.outside[root], steps)
        if self._alone[leaf.storage] == 1:
            return self._plain(leaf, self.read(leaf))
        root, steps = self._chain(region, leaf)
        return ViewOf(self._plain(root, self.read(root)), steps)

    def _plain(self, old: Value, present: Value) -> FromGraph:
        new = self.read(old) if present is old else present
        stride = tuple(old.fake.stride()) if old.fake.layout is torch.strided else None
        moved = stride is not None and new.fake.stride() != old.fake.stride() and new.fake.numel() > 0
        owner = self._storages.setdefault(new.storage, old.storage)
        shared = owner != old.storage or (new.storage != old.storage and self._is_inputs(new.storage))
        return self._give(new, stride if moved else None, copy=shared)

    def _is_inputs(self, storage: int) -> bool:
        return any(v.storage == storage for v in self.outside)

    def _chain(self, region: Region, value: Value) -> tuple[Value, tuple[ViewStep, ...]]:
        steps: list[ViewStep] = []
        while (link := region.links.get(value)) is not None:
            if link.func is not None:
                steps.append(_view_step(value, link))
            value = link.parent
        return value, tuple(reversed(steps))

    def _give(self, value: Any, stride: tuple[int, ...] | None = None, *, copy: bool = False) -> FromGraph:
        for i, known in enumerate(self.returned):
            if known is value:
                return FromGraph(i, stride, copy)
        self.returned.append(value)
        return FromGraph(len(self.returned) - 1, stride, copy)


def _view_step(value: Value, link: Link) -> ViewStep:
    sized = _SIZED_BY_OTHER.get(link.func)
    if sized is not None:
        return ViewStep(sized, (list(value.fake.size()),), {}, None)
    if any(isinstance(a, Value) for a in flat((link.args, link.kwargs))):
        if geometry_of(value) == geometry_of(link.parent):
            return ViewStep(_aten.alias.default, (), {}, None)
        raise FunctionalizationError(
            f"no pure form: a result is a view by {link.func}, which reads other tensors",
            op=str(link.func),
            hint="return a copy (.clone()) from the model",
        )
    return ViewStep(link.func, link.args, link.kwargs, link.slot)
