"""`module_call_graph` of an ExportedProgram, and `nn_module_stack`s that `torch.export.unflatten` can follow.

Data flow:
    module calls of the tape -> frames: the calls that unflatten can tell apart (`frames_of`)
    casts, calls without ops, dead arguments and results -> a no-op check each, so that they have nodes (`with_marks`)
    nodes of the lifted graph -> the frame of each, written as `nn_module_stack` (`place_nodes`)
    frames -> signatures in ModuleCallEntries (`ModuleCalls`)

unflatten takes a module call to be consecutive nodes with one `nn_module_stack`, of a module inside the module that
calls it: a call has a frame of its own if its module is `a.b` where the caller's is `a`; the ops of other calls are in
the frame around them. A signature holds if all that a module reads from outside, parameters and buffers aside, are
arguments, and all that others read from it are results. A call for which that is not so (a value is passed through an
attribute) has no signature; unflatten then makes one from the values that go in and out.
"""

from __future__ import annotations

import collections
import dataclasses
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx
from torch.export import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ConstantArgument,
    SymBoolArgument,
    SymFloatArgument,
    SymIntArgument,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from scopetrace._compat.export import can_be_saved
from scopetrace._compat.graph_module import enter_autocast, exit_autocast, set_grad_enabled
from scopetrace._compat.ops import is_op, schema_of
from scopetrace._compat.versions import CURRENT
from scopetrace.containers.structure import leaves, map_structure
from scopetrace.ir.scopes import Frames, Nested, Scope, innermost_common
from scopetrace.ir.tape import Call, FunctionalTape, Op, Value
from scopetrace.ops.functional_variants import by_name, tensor_of
from scopetrace.program.graph import call_position, class_text, has_effect, live_ops, node_value

Node = torch.fx.Node


@dataclasses.dataclass(eq=False)
class ModuleCallFrame(Nested):
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

    def module_stack(self) -> dict[str, tuple[str, str]]:
        """The `nn_module_stack` of the nodes in it."""
        return {f"L__self__{f.name}": (f.fqn, class_text(f.call)) for f in reversed(list(self.ancestors()))}


def frames_of(tape: FunctionalTape) -> dict[Call, ModuleCallFrame]:
    """The frame of each call of the tape: its own, or that of a call around it."""
    count: collections.Counter[str] = collections.Counter()
    frames: dict[Call, ModuleCallFrame] = {}
    for call in sorted(tape.calls, key=lambda c: c.position):
        around = None if call.parent is None else frames[call.parent]
        prefix = f"{around.fqn}." if around is not None and around.fqn else ""
        if around is None:
            frames[call] = ModuleCallFrame(call, "", 0, None)
        elif call.fqn and call.fqn.startswith(prefix) and call.module_type is not None and call.raised is None:
            frames[call] = ModuleCallFrame(call, call.fqn, count[call.fqn], around)
            count[call.fqn] += 1
        else:
            frames[call] = around
    return frames


def is_cast(op: Op) -> bool:
    """Whether an op casts: with another dtype it returns, or writes, something else."""
    return is_op(op.target) and schema_of(op.target).name in ("aten::to", "aten::type_as")


class _Passed:
    """The arguments and results of a call as torch.export's argument specs."""

    def __init__(self, frame: ModuleCallFrame, lower: Callable[[Any], Any]) -> None:
        call = frame.call
        flat, in_spec = pytree.tree_flatten(_sizes_as_tuples(lower((call.args, call.kwargs))))
        out, out_spec = pytree.tree_flatten(_sizes_as_tuples(lower(call.outputs)))
        self.taken = {x for x in flat if isinstance(x, Node)}
        self.returned = {x for x in out if isinstance(x, Node)}
        inputs, outputs = [argument_of(x) for x in flat], [argument_of(x) for x in out]
        can_be_said = None not in (*inputs, *outputs) and can_be_saved(in_spec) and can_be_saved(out_spec)
        self.signature = ModuleCallSignature(inputs, outputs, in_spec, out_spec) if can_be_said else None
        """None where an argument or result has no argument spec, or a structure cannot be saved."""


class ModuleCalls:
    """The module calls of a lifted graph, and which of them have signatures."""

    def __init__(
        self,
        placement: Placement,
        frames: list[ModuleCallFrame],
        chosen: set[ModuleCallFrame],
        lower: Callable[[Any], Any],
        buffers: list[tuple[Node, Node]],
    ) -> None:
        """`chosen` are those of `frames` that get a signature if they can have one.

        `buffers` has the placeholder and the new value of those that change.
        """
        self._place, hidden = placement
        self._in_buffers = {node for old, new in buffers for node in _values_between(old, new)}
        seen = {frame for inner in set(self._place.values()) for frame in inner.ancestors()}
        inside = [f for f in frames if f.parent is not None]
        self._passed = {f: _Passed(f, lower) for f in inside if f in seen & chosen}
        said = {f for f, p in self._passed.items() if p.signature and hidden.isdisjoint(p.taken | p.returned)}
        self._unsigned = {f.fqn for f in inside if f not in said}
        before = -1
        while len(self._unsigned) != before:  # calls that values bypass have no signature
            before = len(self._unsigned)
            for frame, node in self._reads():
                self._read(node, frame)
            for frame, passed in self._passed.items():
                if self._is_signed(frame) and any(n.op == "placeholder" for n in passed.returned - passed.taken):
                    self._unsigned.add(frame.fqn)

    def entries(self, fqns: list[str], renamed: dict[str, str]) -> list[ModuleCallEntry]:
        """An entry for each module of `fqns`, then one for each second and later call of a module.

        `renamed` has new names of nodes.
        """
        for passed in self._passed.values():
            for x in [*passed.signature.inputs, *passed.signature.outputs] if passed.signature else ():
                x.name = renamed.get(x.name, x.name)
        signed = {f.name: p.signature for f, p in self._passed.items() if f.fqn not in self._unsigned}
        entries = [ModuleCallEntry(fqn, signed.pop(fqn, None)) for fqn in fqns if fqn]
        return entries + [ModuleCallEntry(name, signature) for name, signature in signed.items()]

    def _reads(self) -> Iterator[tuple[ModuleCallFrame, Node]]:
        """(frame, value) for each read: by a node, as argument of an inner call, or as result of the frame."""
        for node, frame in self._place.items():
            for read in node.all_input_nodes:
                yield frame, read
        for frame, passed in self._passed.items():
            if self._is_signed(frame):
                assert frame.parent is not None
                for node in passed.taken:
                    yield frame.parent, node
                for node in passed.returned:
                    yield frame, node

    def _read(self, node: Node, reader: ModuleCallFrame) -> None:
        if node.op == "placeholder" or self._place[node] is reader or node in self._in_buffers:
            return
        around = list(self._place[node].ancestors())
        for frame in reader.ancestors():
            if frame in around:
                self._leave(node, around[: around.index(frame)], reader)
                return
            if self._is_signed(frame):
                if node in self._passed[frame].taken:
                    return
                # unflatten computes symbolic sizes, and arithmetic of sizes, again where they are read
                in_python = getattr(node.target, "__module__", "") == operator.add.__module__
                if in_python or node.target is torch.ops.aten.sym_size.int:
                    for below in node.all_input_nodes:
                        self._read(below, frame)
                    return
                self._unsigned.add(frame.fqn)

    def _leave(self, node: Node, frames: list[ModuleCallFrame], reader: ModuleCallFrame) -> None:
        """Drop signatures for a node inside `frames` that is read outside of them by `reader`."""
        for frame in frames:
            if self._is_signed(frame):
                if node not in self._passed[frame].returned:
                    self._unsigned.add(frame.fqn)
            elif all(user in self._place and frame in self._place[user].ancestors() for user in node.users):
                self._unsigned.add(reader.fqn)  # unflatten returns values that nodes outside read, and there are none

    def _is_signed(self, frame: ModuleCallFrame) -> bool:
        return frame.parent is not None and frame.fqn not in self._unsigned


def _sizes_as_tuples(x: Any) -> Any:
    """With tuples for `torch.Size`s, since unflatten passes tuples on and compares types."""
    return map_structure(tuple, x, torch.Size)


def _values_between(first: Node, last: Node) -> list[Node]:
    """The values that a buffer takes one after the other, without the first; none where one is read too late for that.

    unflatten writes each of them to the buffer where it is made, and reads it there: that is right where none is
    read after the next one was made, and each is the first argument of the op that makes the next, also decomposed.
    """
    order = {node: i for i, node in enumerate(first.graph.nodes)}
    values, node = list[Node](), last
    while node is not first:
        old = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(old, Node) or not is_op(node.target) or torch.Tag.core not in node.target.tags:
            return []
        after, before = node_value(node), node_value(old)
        same = isinstance(before, torch.Tensor) and before.shape == after.shape and before.dtype == after.dtype
        if not same or any(order[user] > order[node] for user in old.users):
            return []
        values.append(node)
        node = old
    return values


CHECK_OF_DTYPE = torch.ops.aten._assert_tensor_metadata.default


def with_marks(
    tape: FunctionalTape, frames: dict[Call, ModuleCallFrame], chosen: set[ModuleCallFrame]
) -> FunctionalTape:
    """The tape with a check before each cast, and of the `chosen` calls in those without ops, of dead values passed.

    `torch.export.unflatten` fails on a signature of a call without nodes (`nn.Identity`), and `run_decompositions`
    refuses a signature whose values it removed as dead. The check is `_assert_tensor_metadata` of the dtype, which
    torch.export itself writes before casts: torch's passes keep it, and ONNX drops it.
    """
    marks: dict[int, list[Op]] = collections.defaultdict(list)  # by the place before which they stand
    for i, op in enumerate(tape.ops):
        before = tape.ops[i - 1]
        has_check = before.target is CHECK_OF_DTYPE and before.args[0] is op.tensor(0)  # a graph of torch.export
        if is_cast(op) and not has_check:
            marks[i].append(_mark(op.tensor(0), op.call, op.scope, op.frames, op.grad))
    _mark_idle_calls(tape, frames, chosen, marks)
    _mark_dead_values(tape, [call for call in tape.calls if frames[call] in chosen], marks)
    if not marks:
        return tape
    ops = [o for i, op in enumerate(tape.ops) for o in (*marks.get(i, ()), op)]
    return dataclasses.replace(tape, ops=[*ops, *marks.get(len(tape.ops), ())])


def _mark_idle_calls(
    tape: FunctionalTape, frames: dict[Call, ModuleCallFrame], chosen: set[ModuleCallFrame], marks: dict[int, list[Op]]
) -> None:
    live = live_ops(tape)
    nodes = [op for op in tape.ops if id(op) in live and op.kind == "call_function" and not is_erased(op)]
    busy = {frame for op in nodes if op.call is not None for frame in frames[op.call].ancestors()}
    for call in sorted(tape.calls, key=lambda c: -c.position):  # inner calls first: theirs is their callers' too
        frame = frames[call]
        passed = leaves((call.args, call.kwargs), Value)
        if frame.call is call and frame in chosen - busy and passed:
            busy.update(frame.ancestors())
            # Not in a block of another mode: what is in its subgraph is no node of the call.
            marks[call.start].insert(0, _mark(passed[0], call, call.scope, call.frames, tape.outer_grad))


def _mark_dead_values(tape: FunctionalTape, calls: list[Call], marks: dict[int, list[Op]]) -> None:
    named = {v for call in calls for v in leaves((call.args, call.kwargs, call.outputs), Value)}
    needed = {v for v in tape.graph_outputs() if isinstance(v, Value)} | {w.value for w in tape.attribute_writes}
    for i, op in reversed(list(enumerate(tape.ops))):
        dead = [v for v in op.values() if v in named and v not in needed] if op.kind == "call_function" else []
        for value in dead:
            marks[i + 1].insert(0, _mark(value, op.call, op.scope, op.frames, op.grad))
        if dead or has_effect(op) or any(v in needed for v in op.values()):
            needed.update(op.inputs())


def is_erased(call: Op | torch.fx.Node) -> bool:
    """Whether torch replaces the result of this call by its argument: `run_decompositions`, or indexing for `x[:]`.

    The first does not follow that in `module_call_graph` and raises SpecViolationError, so such a call is left out.
    """
    op = call.target
    if op is torch.ops.aten.slice.Tensor:
        bounds = call.args[2:]
        return all(type(n) is int for n in bounds) and bounds == (0, sys.maxsize)
    if not is_op(op) or schema_of(op).name not in CURRENT.erased_ops:
        return False
    operands = by_name(op, call.args, call.kwargs)
    if "train" in operands:
        return not operands["train"] or operands["p"] == 0
    tensor = tensor_of(call.args[0])
    return not (tensor.is_complex() or tensor.is_neg())


def _mark(value: Value, call: Call | None, scope: Scope, frames: Frames, grad: bool) -> Op:
    args = (value, None, None, value.fake.dtype)
    return Op("call_function", CHECK_OF_DTYPE, args, {}, None, scope, call, frames, grad=grad)


Placement = tuple[dict[Node, ModuleCallFrame], set[Node]]
"""The frames of the nodes of a graph; nodes that will be moved into a body of a region."""


def place_nodes(graph: torch.fx.Graph, frames: dict[Call, ModuleCallFrame]) -> Placement:
    """The frame of each node of a lifted graph, which is also written as its `nn_module_stack`.

    A node that stands after the end of its call gets the innermost frame that is still open.
    """
    at: dict[int | None, ModuleCallFrame] = {call.position: frame for call, frame in frames.items()}
    current = at[0]
    closed: set[ModuleCallFrame] = set()
    placed: dict[Node, ModuleCallFrame] = {}
    hidden: set[Node] = set()
    for region, is_moved in _mode_regions([n for n in graph.nodes if n.op not in ("placeholder", "output")]):
        called_in = [at.get(call_position(n)) if "nn_module_stack" in n.meta else None for n in region]
        inside = [f.ancestors() for f in called_in if f is not None] if is_moved else []
        around = innermost_common(inside) if inside else None
        for node, wanted in zip(region, called_in, strict=True):
            frame = next(f for f in (around or wanted or current).ancestors() if f not in closed)
            still = set(frame.ancestors())
            closed.update(f for f in current.ancestors() if f not in still)
            current = placed[node] = frame
            node.meta["nn_module_stack"] = (wanted or frame if is_moved else frame).module_stack()
        if is_moved:
            hidden.update(region)
    return placed, hidden


def _mode_regions(nodes: list[Node]) -> list[tuple[list[Node], bool]]:
    """The nodes from one switch of a mode to the next, and whether a mode differs from that at the start."""
    other = next((n.args[0] for n in nodes if n.target is set_grad_enabled), None)
    regions: list[tuple[list[Node], bool]] = [([], False)]
    grad = autocast = False
    for node in nodes:
        if node.target in (set_grad_enabled, enter_autocast, exit_autocast):
            grad = node.args[0] is other if node.target is set_grad_enabled else grad
            autocast = node.target is enter_autocast or (autocast and node.target is set_grad_enabled)
            regions.append(([], grad or autocast))
        regions[-1][0].append(node)
    return regions


PLAIN = (bool, int, float, str, type(None))
_KINDS: tuple[tuple[type, Any], ...] = (
    (torch.Tensor, TensorArgument),
    (torch.SymInt, SymIntArgument),
    (torch.SymFloat, SymFloatArgument),
    (torch.SymBool, SymBoolArgument),
)


def argument_of(x: Any) -> Any:
    """The torch.export argument spec of a node or Python value; None for other objects."""
    if isinstance(x, torch.fx.Node):
        val = x.meta.get("val")
        return next((spec(x.name) for kind, spec in _KINDS if isinstance(val, kind)), None)
    return ConstantArgument("", x) if type(x) in PLAIN else None
