"""Which nodes of a flat graph belong to which module call, in the form that `torch.export.unflatten` can follow.

It reads `nn_module_stack`: a call is a stretch of nodes without gaps, and by its name its module lies inside the module
that calls it. So a call has a frame of its own if its module is `a.b` where the caller's is `a`; ops of others stay in
the frame around them.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

import torch
import torch.fx

from scopetrace._compat.graph_module import set_grad_enabled
from scopetrace._compat.schema import is_op, schema_of
from scopetrace._compat.versions import CURRENT
from scopetrace.containers.structure import leaves
from scopetrace.ir import meta
from scopetrace.ir.scopes import Scope
from scopetrace.ir.tape import Call, Frames, FunctionalTape, Op, Value
from scopetrace.ops.functional_variants import by_name, tensor_of
from scopetrace.program.graph import has_effect, live_ops

_CHECK = torch.ops.aten._assert_tensor_metadata.default


@dataclasses.dataclass(eq=False)
class ModuleCallFrame:
    """A module call that `torch.export.unflatten` can tell apart."""

    call: Call
    fqn: str
    index: int
    """0 for the first call under this name."""
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
        """`nn_module_stack` of the nodes in it."""
        return {f"L__self__{f.name}": (f.fqn, f.type_name) for f in reversed(list(self.chain()))}

    @property
    def type_name(self) -> str:
        """The module's class, as torch.export writes it."""
        kind = self.call.module_type or torch.nn.Module
        return f"{kind.__module__}.{kind.__qualname__}"


def frames_of(tape: FunctionalTape) -> dict[Call, ModuleCallFrame]:
    """The frame in which each call of the tape runs: its own, or the one around it."""
    count: collections.Counter[str] = collections.Counter()
    found: dict[Call, ModuleCallFrame] = {}
    for call in sorted(tape.calls, key=lambda c: c.position):
        if call.parent is None:
            found[call] = ModuleCallFrame(call, "", 0, None)
            continue
        around = found[call.parent]
        prefix = f"{around.fqn}." if around.fqn else ""
        if call.fqn and call.fqn.startswith(prefix) and call.module_type is not None and call.raised is None:
            found[call] = ModuleCallFrame(call, call.fqn, count[call.fqn], around)
            count[call.fqn] += 1
        else:
            found[call] = around
    return found


def with_marks(tape: FunctionalTape, frames: dict[Call, ModuleCallFrame]) -> FunctionalTape:
    """The tape with a mark in each call that has no op, and on each argument or result of a call that nothing needs.

    A call without nodes (`nn.Identity`) is no call to `torch.export.unflatten`, and makes it fail where the call has a
    signature; a dead value is gone after `run_decompositions`, which then refuses the signature. The mark is a check of
    the dtype, which torch.export itself writes for casts: torch's passes keep it, and ONNX drops it.
    """
    marks: dict[int, list[Op]] = collections.defaultdict(list)  # by the place before which they stand
    _mark_idle_calls(tape, frames, marks)
    _mark_dead_values(tape, marks)
    if not marks:
        return tape
    ops = [o for i, op in enumerate(tape.ops) for o in (*marks.get(i, ()), op)]
    return dataclasses.replace(tape, ops=[*ops, *marks.get(len(tape.ops), ())])


def _mark_idle_calls(tape: FunctionalTape, frames: dict[Call, ModuleCallFrame], marks: dict[int, list[Op]]) -> None:
    live = live_ops(tape)
    nodes = [op for op in tape.ops if id(op) in live and op.kind == "call_function" and not is_erased(op)]
    busy = {frame for op in nodes for frame in _around(op, frames)}
    for call in sorted(tape.calls, key=lambda c: -c.position):  # inner calls first: theirs is their callers' too
        frame = frames[call]
        passed = leaves((call.args, call.kwargs), Value)
        if frame.call is call and frame not in busy and passed:
            busy.update(frame.chain())
            marks[call.start].insert(0, _mark(passed[0], call, call.scope, call.frames))


def _mark_dead_values(tape: FunctionalTape, marks: dict[int, list[Op]]) -> None:
    named = {v for call in tape.calls for v in leaves((call.args, call.kwargs, call.outputs), Value)}
    needed = {v for v in tape.graph_outputs() if isinstance(v, Value)} | {w.value for w in tape.attribute_writes}
    for i, op in reversed(list(enumerate(tape.ops))):
        dead = [v for v in op.values() if v in named and v not in needed] if op.kind == "call_function" else []
        for value in dead:
            marks[i + 1].insert(0, _mark(value, op.call, op.scope, op.frames))
        if dead or has_effect(op) or any(v in needed for v in op.values()):
            needed.update(op.inputs())


def is_erased(call: Op | torch.fx.Node) -> bool:
    """Whether `run_decompositions` replaces the result of this call by its argument.

    It does not follow that in `module_call_graph` and raises SpecViolationError, so such a call is left out.
    """
    op = call.target
    if not is_op(op) or schema_of(op).name not in CURRENT.erased_ops:
        return False
    given = by_name(op, call.args, call.kwargs)
    if "train" in given:
        return not given["train"] or given["p"] == 0
    tensor = tensor_of(call.args[0])
    return not (tensor.is_complex() or tensor.is_neg())


def _around(op: Op, frames: dict[Call, ModuleCallFrame]) -> list[ModuleCallFrame]:
    return list(frames[op.call].chain()) if op.call is not None else []


def _mark(value: Value, call: Call | None, scope: Scope, frames: Frames) -> Op:
    return Op("call_function", _CHECK, (value, None, None, value.fake.dtype), {}, None, scope, call, frames)


def place_nodes(graph: torch.fx.Graph, frames: dict[Call, ModuleCallFrame]) -> Placement:
    """The frames of the nodes of a lifted graph; written on the nodes as `nn_module_stack`.

    A node that comes after its call has ended is in the innermost frame that is still open.
    """
    at = {call.position: frame for call, frame in frames.items()}
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    current = at[0]
    closed: set[ModuleCallFrame] = set()
    found = Placement({}, set())
    for region in _regions(nodes):
        wanted = [_wanted(node, at) for node in region.nodes]
        around = _common([f for f in wanted if f is not None]) if region.apart else None
        for node, own in zip(region.nodes, wanted, strict=True):
            frame = next(f for f in (around or own or current).chain() if f not in closed)
            inside = set(frame.chain())
            closed.update(f for f in current.chain() if f not in inside)
            current = found.frame[node] = frame
            node.meta["nn_module_stack"] = (own or frame if region.apart else frame).module_stack()
        if region.apart:
            found.hidden.update(region.nodes)
    return found


@dataclasses.dataclass
class Placement:
    """Where the nodes of a graph are."""

    frame: dict[torch.fx.Node, ModuleCallFrame]
    hidden: set[torch.fx.Node]
    """Those that go into a `wrap_with_set_grad_enabled`, and are no nodes of the graph after that."""


@dataclasses.dataclass
class _Region:
    """Nodes between two switches of autograd, the first switch included; `apart` where it is not as at the start."""

    nodes: list[torch.fx.Node]
    apart: bool


def _regions(nodes: list[torch.fx.Node]) -> list[_Region]:
    switches = [n for n in nodes if n.target is set_grad_enabled]
    if not switches:
        return [_Region(nodes, apart=False)]
    outer = not switches[0].args[0]
    found = [_Region([], apart=False)]
    for node in nodes:
        if node.target is set_grad_enabled:
            found.append(_Region([], apart=node.args[0] is not outer))
        found[-1].nodes.append(node)
    return found


def _wanted(node: torch.fx.Node, at: dict[int, ModuleCallFrame]) -> ModuleCallFrame | None:
    position = meta.call_position(node)
    return None if position is None or "nn_module_stack" not in node.meta else at[position]


def _common(frames: list[ModuleCallFrame]) -> ModuleCallFrame:
    """The innermost frame around all of them."""
    shared = list(frames[0].chain())
    for frame in frames[1:]:
        around = set(frame.chain())
        shared = [f for f in shared if f in around]
    return shared[0]
