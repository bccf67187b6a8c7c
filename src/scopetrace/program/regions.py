"""Regions as part of the program again, for what has no form for them: functions, ONNX, pipelines.

an op of a region -> the ops of its body, on its operands, in the scopes and calls of the body
all other ops     -> copied, bodies of branches and loops too
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch

from scopetrace.ir.segment import with_values
from scopetrace.ir.tape import BodyTape, Call, FunctionalTape, Op, Tape, Value, renamed, values_in

REGIONS = (torch.ops.higher_order.tag_activation_checkpoint, torch.ops.higher_order.invoke_subgraph)
"""The ops whose body computes what the op gives, and how often is all that differs."""


def has_regions(tape: Tape) -> bool:
    """Whether a program has ops of regions, in bodies too."""
    return any(op.target in REGIONS for inner in tape.walk() for op in inner.ops)


def without_regions(tape: FunctionalTape) -> FunctionalTape:
    """The program with the ops of its regions in their places."""
    found: FunctionalTape = _Inliner(tape).run(tape)
    return found


class _Inliner:
    def __init__(self, tape: FunctionalTape) -> None:
        used = (v.storage for inner in tape.walk() for op in inner.ops for v in op.values())
        self._storages = itertools.count(max(used, default=0) + 1)
        self._calls: dict[Call, Call | None] = {}
        self._bodies: dict[Any, Any] = {}
        """By body of a branch or loop, that without regions."""
        self._inlined: set[BodyTape] = set()

    def run(self, old: Any) -> Any:
        """The tape without regions."""
        new = dataclasses.replace(old, ops=[], calls=[])
        values: dict[Value, Value] = {}
        self._append(new, old, old.calls, values, None, None)
        new.calls.sort(key=lambda call: call.position)
        return with_values(new, values)

    def _append(
        self,
        new: Any,
        old: Any,
        calls: list[Call],
        values: dict[Value, Value],
        storages: dict[int, int] | None,
        around: Call | None,
    ) -> None:
        """Append the ops of a tape, and `calls`.

        Of a region, `values` and `storages` have what the placeholders stand for, and `around` is the call of its op.
        """
        starts: list[int] = []
        for call in old.calls:
            parent = self._calls.get(call.parent, around) if call.parent is not None else None
            self._calls[call] = call.replace(parent=parent) if call in calls else around
        for op in old.ops:
            starts.append(len(new.ops))
            placed = op.replace(call=None if op.call is None else self._calls.get(op.call, around))
            if op.target in REGIONS:
                self._inline(new, placed, values)
            elif op.kind != "placeholder" or storages is None:
                new.ops.append(self._copied(placed, values, storages))
        starts.append(len(new.ops))
        for call in calls:
            copy = self._calls[call]
            assert copy is not None
            copy.start, copy.stop = starts[call.start], starts[call.stop]
            copy.args, copy.kwargs, copy.outputs = renamed((call.args, call.kwargs, call.outputs), values)
            copy.mutated = renamed(call.mutated, values)
            new.calls.append(copy)

    def _copied(self, op: Op, values: dict[Value, Value], storages: dict[int, int] | None) -> Op:
        for body in op.bodies():
            if body not in self._bodies:
                self._bodies[body] = self.run(body)
        for v in op.values():
            known = v.storage if storages is None else storages.get(v.storage)
            known = next(self._storages) if known is None else known
            values[v] = v.copy(known)
            if storages is not None:
                storages[v.storage] = known
        now: dict[Any, Any] = {body: self._bodies[body] for body in op.bodies()}
        now |= {v: values[v] for v in (*op.inputs(), *op.values())}
        return op.replace(**{name: renamed(getattr(op, name), now) for name in ("args", "kwargs", "outputs")})

    def _inline(self, new: Any, op: Op, values: dict[Value, Value]) -> None:
        body = op.bodies()[0]
        operands: list[Any] = [a for a in op.args if type(a) is not BodyTape and not isinstance(a, str)]
        placeholders = [o.outputs for o in body.ops if o.kind == "placeholder"]
        pairs = [(p, x) for p, x in zip(placeholders, operands, strict=True) if isinstance(p, Value)]
        inside = {p: values[x] for p, x in pairs}
        storages = {p.storage: values[x].storage for p, x in pairs}
        calls = [] if body in self._inlined else body.calls  # a shared body has those of its first call
        self._inlined.add(body)
        self._append(new, body, calls, inside, storages, op.call)
        for v, result in zip(op.values(), values_in(body.outputs), strict=True):
            values[v] = inside[result]
