"""Which nodes of a flat graph belong to which module call, in the form that `torch.export.unflatten` can follow.

It reads `nn_module_stack`: a call is a stretch of nodes without gaps, and its module lies inside the module that calls it
by name. So a call has a frame of its own if its module is `a.b` where the caller's is `a`; ops of others stay in the
frame around them.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

import torch
import torch.fx

from scopetrace import meta
from scopetrace.graph import live_ops
from scopetrace.record.tape import Call, Op, Tape, Value
from scopetrace.record.structure import leaves

_CHECK = torch.ops.aten._assert_tensor_metadata.default


@dataclasses.dataclass(eq=False)
class Frame:
    """A module call that `torch.export.unflatten` can tell apart."""

    call: Call
    fqn: str
    index: int
    """0 for the first call under this name."""
    parent: Frame | None

    @property
    def name(self) -> str:
        """The name of the call in `module_call_graph`: `a.b`, `a.b@1` for the second."""
        return f"{self.fqn}@{self.index}" if self.index else self.fqn

    def chain(self) -> Iterator[Frame]:
        """This frame and those around it, inner before outer."""
        frame: Frame | None = self
        while frame is not None:
            yield frame
            frame = frame.parent

    def module_stack(self) -> dict[str, tuple[str, str]]:
        """`nn_module_stack` of the nodes in it."""
        return {f"L__self__{f.name}": (f.fqn, f.type_name) for f in reversed(list(self.chain()))}

    @property
    def type_name(self) -> str:
        """The module's class, as torch.export writes it."""
        kind = self.call.module_type or torch.nn.Module
        return f"{kind.__module__}.{kind.__qualname__}"


def frames_of(tape: Tape) -> dict[Call, Frame]:
    """The frame in which each call of the tape runs: its own, or the one around it."""
    count: collections.Counter[str] = collections.Counter()
    found: dict[Call, Frame] = {}
    for call in sorted(tape.calls, key=lambda c: c.position):
        if call.parent is None:
            found[call] = Frame(call, "", 0, None)
            continue
        around = found[call.parent]
        prefix = f"{around.fqn}." if around.fqn else ""
        if call.fqn and call.fqn.startswith(prefix) and call.module_type is not None and call.raised is None:
            found[call] = Frame(call, call.fqn, count[call.fqn], around)
            count[call.fqn] += 1
        else:
            found[call] = around
    return found


def with_marks(tape: Tape, frames: dict[Call, Frame]) -> Tape:
    """The tape with one op in each call that has none: a check of the dtype of a tensor that goes through.

    A call without nodes (`nn.Identity`) is no call to `torch.export.unflatten`, and makes it fail where the call has a
    signature. This op, which torch.export itself writes for casts, is kept by torch's passes, and dropped for ONNX.
    """
    live = live_ops(tape)
    busy = {frame for op in tape.ops if op.kind == "call_function" and id(op) in live for frame in _around(op, frames)}
    marks: dict[int, list[Op]] = collections.defaultdict(list)
    for call in sorted(tape.calls, key=lambda c: -c.position):  # inner calls first: theirs is their callers' too
        frame = frames[call]
        passed = leaves((call.args, call.kwargs), Value)
        if frame.call is call and frame not in busy and passed:
            busy.update(frame.chain())
            marks[call.start].insert(0, _mark(call, passed[0]))
    if not marks:
        return tape
    ops = [o for i, op in enumerate(tape.ops) for o in (*marks.get(i, ()), op)]
    return dataclasses.replace(tape, ops=[*ops, *marks.get(len(tape.ops), ())])


def _around(op: Op, frames: dict[Call, Frame]) -> list[Frame]:
    return list(frames[op.call].chain()) if op.call is not None else []


def _mark(call: Call, value: Value) -> Op:
    return Op("call_function", _CHECK, (value, None, None, value.fake.dtype), {}, None, call.scope, call, call.frames)


def place_nodes(graph: torch.fx.Graph, frames: dict[Call, Frame]) -> dict[torch.fx.Node, Frame]:
    """The frame of each node; written on the nodes as `nn_module_stack`.

    A node that comes after its call has ended is in the innermost frame that is still open.
    """
    at = {call.position: frame for call, frame in frames.items()}
    current = next(frame for frame in frames.values() if frame.parent is None)
    closed: set[Frame] = set()
    found: dict[torch.fx.Node, Frame] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        position = meta.call_position(node)
        wanted = current if position is None or "nn_module_stack" not in node.meta else at[position]
        frame = next(f for f in wanted.chain() if f not in closed)
        inside = set(frame.chain())
        closed.update(f for f in current.chain() if f not in inside)
        current = found[node] = frame
        node.meta["nn_module_stack"] = frame.module_stack()
    return found


__all__ = ["Frame", "frames_of", "place_nodes", "with_marks"]
