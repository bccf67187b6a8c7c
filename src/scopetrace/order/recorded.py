"""The execution order of a tape."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

from scopetrace.order.execution import CallUsage, ExecutionOrder
from scopetrace.record.bodies import FORMS
from scopetrace.record.registered import Registered
from scopetrace.record.structure import leaves
from scopetrace.record.tape import Call, Op, Tape, Value


def execution_order(tape: Tape) -> ExecutionOrder:
    """Read it off the ops and calls of a recording (with its mutations)."""
    reader, params = _Reader(tape.registered), dict[Value, str]()
    reader.read(tape, params)
    reader.use(tape.calls[0], (params[v] for v in leaves(tape.outputs, Value) if v in params))
    changed = {v.storage for part in tape.walk() for op in part.ops for v in op.writes}
    written = dict.fromkeys(name for value, name in params.items() if value.storage in changed)
    return ExecutionOrder(tuple(map(_usage, reader.begun)), tape.registered, tuple(written))


@dataclasses.dataclass(slots=True)
class _Begun:
    """A call that has begun."""

    call: Call
    number: int
    index: int
    parent: int | None
    steps: list[tuple[str, ...] | int] = dataclasses.field(default_factory=list)


class _Reader:
    """Collects the steps of each call, in one walk over the ops."""

    def __init__(self, registered: Registered) -> None:
        self.registered = registered
        self.begun: list[_Begun] = []
        self._latest: dict[Call, _Begun] = {}  # a body that two ops share runs twice, with the same records
        self._counts: dict[Any, int] = {}
        self._used: list[str] = []

    def read(self, tape: Tape, params: dict[Value, str]) -> None:
        """The ops of a program; `params` has what its values stand for: at first, the placeholders of a body."""
        coming = collections.deque(tape.calls)
        for i, op in enumerate(tape.ops):
            while coming and coming[0].start <= i:
                self._begin(coming.popleft())
            self._op(op, params)
        for call in coming:
            self._begin(call)

    def _begin(self, call: Call) -> None:
        parent = None if call.parent is None else self._latest[call.parent]
        key = self.registered.module(call.fqn) if call.fqn is not None else id(call.module)
        index = self._counts[key] = self._counts.get(key, -1) + 1
        begun = _Begun(call, len(self.begun), index, None if parent is None else parent.number)
        self.begun.append(begun)
        self._latest[call] = begun
        if parent is not None:
            parent.steps.append(begun.number)

    def _op(self, op: Op, params: dict[Value, str]) -> None:
        if op.kind == "get_attr":
            name = self.registered.param(op.target)
            if name is not None:
                params[op.outputs] = name
        elif op.bodies():
            self._higher_order(op, params)
        elif op.kind != "placeholder":
            own = self.registered.inside(op.target) if op.kind == "call_module" else []
            self.use(op.call, [*(params[v] for v in op.inputs() if v in params), *own])

    def use(self, call: Call | None, params: Iterable[str]) -> None:
        """These parameters are used together."""
        used = tuple(dict.fromkeys(params))
        if used and call is not None:
            self._latest[call].steps.append(used)
            self._used += used

    def _higher_order(self, op: Op, params: dict[Value, str]) -> None:
        """The uses inside the bodies; what the op is given and no body uses is used by the op."""
        start = len(self._used)
        form = FORMS[op.target]
        args = form.gathered(op.args)
        operands = [x for i in form.operands for x in args[i]]
        for body in op.bodies():
            placeholders = (o.outputs for o in body.ops if o.kind == "placeholder")
            given = zip(placeholders, operands, strict=False)
            self.read(body, {inner: params[x] for inner, x in given if isinstance(x, Value) and x in params})
        inside = self._used[start:]
        self.use(op.call, (params[v] for v in op.inputs() if v in params and params[v] not in inside))


def _usage(begun: _Begun) -> CallUsage:
    call = begun.call
    kind = call.module_type.__name__ if call.module_type else call.scope.type_name or "function"
    return CallUsage(
        call.fqn, begun.index, kind, begun.parent, tuple(begun.steps), call.direct, call.raised is not None
    )
