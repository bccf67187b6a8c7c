"""The module calls of a tape that `torch.export.unflatten` can tell apart, and which values are read in them.

The recorder knows a tensor by the op that returned it last: where that is its own argument, as `x.to(torch.float32)` is
of a float32 tensor, a caller who goes on with `x` seems to read a value of the module that cast it. The program is
right; the signature of that module would be lost.

Data flow:
    calls of the tape -> ModuleCallFrames
    ops whose result is their argument -> the argument of each (`Identities`)
    reads of such a result outside of the call that made it, and not through its results -> reads of the argument
    casts -> a check of the dtype before each, since with another one a cast returns, or writes, something else
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx

from scopetrace._compat.ops import is_op, schema_of
from scopetrace.containers.structure import leaves, map_structure
from scopetrace.ir.tape import Call, FunctionalTape, Op, Value, renamed

CASTS = ("aten::to", "aten::type_as")
"""The names of the ops that cast."""


@dataclasses.dataclass(eq=False)
class ModuleCallFrame:
    """A module call that `torch.export.unflatten` can tell apart from the calls around it."""

    call: Call
    fqn: str
    index: int
    """0 for the first call with this fqn."""
    parent: ModuleCallFrame | None

    @property
    def name(self) -> str:
        """The name of the call in `module_call_graph`: `a.b`, `a.b@1` for the second."""
        return f"{self.fqn}@{self.index}" if self.index else self.fqn

    def chain(self) -> Iterator[ModuleCallFrame]:
        """This frame and those around it, inner before outer."""
        frame: ModuleCallFrame | None = self
        while frame is not None:
            yield frame
            frame = frame.parent

    def module_stack(self) -> dict[str, tuple[str, str]]:
        """The `nn_module_stack` of the nodes in it."""
        kinds = [(f, f.call.module_type or torch.nn.Module) for f in reversed(list(self.chain()))]
        return {f"L__self__{f.name}": (f.fqn, f"{kind.__module__}.{kind.__qualname__}") for f, kind in kinds}


def frames_of(tape: FunctionalTape) -> dict[Call, ModuleCallFrame]:
    """The frame of each call of the tape: its own, or that of a call around it."""
    count: collections.Counter[str] = collections.Counter()
    frames: dict[Call, ModuleCallFrame] = {}
    for call in sorted(tape.calls, key=lambda c: c.position):
        if call.parent is None:
            frames[call] = ModuleCallFrame(call, "", 0, None)
            continue
        around = frames[call.parent]
        prefix = f"{around.fqn}." if around.fqn else ""
        if call.fqn and call.fqn.startswith(prefix) and call.module_type is not None and call.raised is None:
            frames[call] = ModuleCallFrame(call, call.fqn, count[call.fqn], around)
            count[call.fqn] += 1
        else:
            frames[call] = around
    return frames


class Identities:
    """The values that are an argument of their op, and from where they are read as that argument."""

    def __init__(self, tape: FunctionalTape, frames: dict[Call, ModuleCallFrame]) -> None:
        self._frames = frames
        self._argument = {
            op.outputs: value
            for op in tape.ops
            if op.kind == "call_function" and isinstance(op.outputs, Value)
            for value in op.inputs()[:1]
            if op.outputs.fake is value.fake
        }
        calls = [call for call in tape.calls if frames[call].call is call]
        self._results = {frames[call]: set(leaves(call.outputs, Value)) for call in calls}

    def seen_from(self, frame: ModuleCallFrame, x: Any) -> Any:
        """What ops in `frame` read for the values in a structure."""
        return map_structure(lambda v: self._value(frame, v), x, Value) if self._argument else x

    def _value(self, frame: ModuleCallFrame, value: Value) -> Value:
        around = set(frame.chain())
        while value in self._argument and value.op.call is not None:
            left = [f for f in self._frames[value.op.call].chain() if f not in around]
            if all(value in self._results[f] for f in left):
                break
            value = self._argument[value]
        return value

    def applied(self, tape: FunctionalTape) -> FunctionalTape:
        """The tape with all ops, and the outputs, reading what they see."""
        if not self._argument:
            return tape
        root = self._frames[tape.calls[0]]
        ops = [self._applied_to(op) for op in tape.ops]
        return dataclasses.replace(tape, ops=ops, returned=self.seen_from(root, tape.graph_outputs()))

    def _applied_to(self, op: Op) -> Op:
        read = [v for v in op.inputs() if v in self._argument]
        if not read or op.call is None:
            return op
        values = {v: self._value(self._frames[op.call], v) for v in read}
        return op.replace(args=renamed(op.args, values), kwargs=renamed(op.kwargs, values))


def casts(tape: FunctionalTape) -> Iterator[tuple[int, Value]]:
    """The place of each cast among the ops, and the tensor that it takes."""
    for i, op in enumerate(tape.ops):
        if op.kind == "call_function" and is_op(op.target) and schema_of(op.target).name in CASTS:
            yield i, op.tensor(0)
