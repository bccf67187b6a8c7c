"""Functional tapes of GraphModules, in ATen ops or in the functions and methods that the graph itself calls.

Data flow:
    GraphModule -> run node by node under the recorder -> RecordedTape of ATen ops, and a _NodeRecord for each node
    both -> nodes as single ops again where that is right (`_Lifter`) -> FunctionalTape

A node becomes one op again if it writes nothing and makes no view of a storage that is written. All other nodes stay
ATen ops, which functionalization makes pure, and `names` calls as the node did where torch has such a function.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.fx

from scopetrace._compat.compilers import stands_for_number
from scopetrace._compat.ops import in_transform, is_collective
from scopetrace._compat.questions import autocast_enabled
from scopetrace.containers.structure import leaves, map_structure
from scopetrace.functionalization.emitter import TapeRewriter
from scopetrace.ir.scopes import Scope
from scopetrace.ir.tape import FunctionalTape, Op, RecordedTape, Value, checks_enabled, flat
from scopetrace.ir.verify import verify
from scopetrace.ops.higher_order import FORMS
from scopetrace.program.graph import plain
from scopetrace.program.traced import functional_tape
from scopetrace.record.builder import Assumptions
from scopetrace.record.model import Model
from scopetrace.record.nodes import NodeRunner
from scopetrace.session import Recording, retraced

_SEEDED = torch.Tag.nondeterministic_seeded

ORIGIN = "torch_level"
"""The key of `Op.meta` by which an ATen op knows the node of the graph that ran it."""


@dataclasses.dataclass(frozen=True, eq=False)
class TorchTarget:
    """A function or method of a torch-level graph as the target of an op."""

    kind: str
    """`call_function`, `call_method` or, before it is on a tape, `call_module`."""
    target: Any
    """A function, the name of a method, or a module."""
    tags: tuple[Any, ...] = ()
    """Those tags of the ATen ops that it runs which keep it in the graph although nothing reads it."""

    @property
    def __name__(self) -> str:
        """The name that torch.fx gives its node."""
        return str(self.target) if self.kind == "call_method" else str(getattr(self.target, "__name__", "op"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.kind == "call_method":
            return getattr(args[0], self.target)(*args[1:], **kwargs)
        return self.target(*args, **kwargs)

    def __str__(self) -> str:
        return f".{self.target}" if self.kind == "call_method" else str(getattr(self.target, "__name__", self.target))


def tapes_of(
    gm: torch.fx.GraphModule, args: tuple[Any, ...], *, torch_level: bool
) -> tuple[RecordedTape, FunctionalTape]:
    """The recorded tape of `gm(*args)` in ATen ops, and the functional one, at torch level with `TorchTarget`s as well.

    Ops have the scopes and the stack traces of the nodes. Raises what recording raises, FunctionalizationError for a
    mutation without a functional form.
    """

    def attempt(assumptions: Assumptions) -> tuple[RecordedTape, list[_NodeRecord]]:
        recording = Recording(Model(gm), assumptions)
        interpreter = _RecordingInterpreter(gm, recording)
        return recording.run(interpreter.run, args, {}).tape, interpreter.nodes

    tape, nodes = retraced(attempt)
    return tape, functional_tape(_Lifter(tape, nodes).run() if torch_level else tape)


# Recording -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _NodeRecord:
    """A node of the graph, what it calls, with values of the tape for tensors, and its ops: `tape.ops[start:stop]`."""

    node: torch.fx.Node
    target: TorchTarget
    scope: Scope
    """The module scope that the node carries."""
    grad: bool
    """Whether autograd was on."""
    known: bool
    """Whether its arguments and outputs hold all its tensors, and no transform or autocast changes what it does."""
    start: int
    stop: int = 0
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    outputs: Any = None


class _RecordingInterpreter(NodeRunner):
    """Runs the graph and notes what each node did."""

    def __init__(self, gm: torch.fx.GraphModule, recording: Recording) -> None:
        super().__init__(gm, recording.builder)
        self.values = recording.values
        self.nodes: list[_NodeRecord] = []

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.op in ("placeholder", "get_attr", "output"):
            return super().run_node(n)
        target = TorchTarget(n.op, self.fetch_attr(str(n.target)) if n.op == "call_module" else n.target)
        tape, grad = self.builder.tape, torch.is_grad_enabled()
        known = not in_transform() and not autocast_enabled()
        scope = self.scope_of_forward(n) or self.builder.state.current_scope
        record = _NodeRecord(n, target, scope, grad, known, len(tape.ops))
        self.nodes.append(record)
        if record.known:
            record.args, record.kwargs = self._values(plain(self.fetch_args_kwargs_from_env(n)))
            record.known = not _hides_tensors((record.args, record.kwargs))
        out = super().run_node(n)
        record.stop = len(tape.ops)
        if record.known and not in_transform():
            record.outputs = self._values(out)
        record.known = record.known and not in_transform() and not _hides_tensors(record.outputs)
        return out

    def _values(self, x: Any) -> Any:
        return map_structure(self.values.value_of, x, torch.Tensor)


def _hides_tensors(x: Any) -> bool:
    """Whether an object or a slice, which an op of a tape cannot take, may hold tensors."""
    of_torch = (Value, torch.dtype, torch.device, torch.layout, torch.memory_format)
    known = (int, float, complex, str, type(None), type(...), *of_torch)
    slices = [[a.start, a.stop, a.step] for a in flat(x) if isinstance(a, slice)]
    return any(not isinstance(a, (slice, *known)) for a in flat(x)) or bool(leaves(slices, (Value, torch.Tensor)))


# Lifting -------------------------------------------------------------------------------------------------------------


class _Lifter(TapeRewriter):
    """Makes the tape with torch-level ops; ATen ops have the node behind them as `ORIGIN`."""

    def __init__(self, tape: RecordedTape, nodes: list[_NodeRecord]) -> None:
        super().__init__(dataclasses.replace(tape, calls=tape.calls[:1]))
        self.nodes = nodes
        self.written = {v.storage for op in tape.ops for v in op.writes}
        self.new.modules = dict(tape.modules)
        self.calls = dict.fromkeys(tape.calls, self.calls[tape.calls[0]])
        self._born: dict[int, int] = {}  # storage -> the index of the op that made it; -1 for one from outside
        for i, op in enumerate(tape.ops):
            for v in op.values():
                self._born.setdefault(v.storage, -1 if op.kind == "get_attr" else i)
        self._node_of = {op: s for s in nodes for op in tape.ops[s.start : s.stop]}
        self._lifted = set[_NodeRecord]()  # that become one op

    def run(self) -> RecordedTape:
        chosen: list[_NodeRecord] = []
        candidates = [s for s in self.nodes if self._can_lift(s)]
        while len(chosen) != len(candidates):
            chosen, needed = candidates, self._needed(candidates)
            candidates = [s for s in chosen if not self._hides(s, needed)]
        self._lifted = set(chosen)
        new: RecordedTape = super().run()
        if checks_enabled():
            verify(new, "torch level")
        return new

    # ---------------------------------------------------------------- which nodes

    def _ops(self, s: _NodeRecord) -> list[Op]:
        return [op for op in self.old.ops[s.start : s.stop] if op.kind != "get_attr"]

    def _can_lift(self, s: _NodeRecord) -> bool:
        ops = self._ops(s)
        if not s.known or not ops or any(op.unbacked or is_collective(op.target) for op in ops):
            return False
        if self.written and s.node.target == "view":  # the strides after functionalization may be others
            return False
        if any(self._born[v.storage] < s.start for op in ops for v in op.writes):
            return False
        outs = leaves(s.outputs, Value)
        known = {v for op in ops for v in op.values()} | set(leaves((s.args, s.kwargs), Value))
        # a module may read a buffer of its own
        others = {v.storage for op in ops for v in op.inputs() if v not in known}
        if not outs or not others.isdisjoint(self.written):
            return False
        parts = s.outputs if isinstance(s.outputs, (list, tuple)) else [s.outputs]
        if s.node.op != "call_module" and not all(isinstance(p, Value) or p is None for p in parts):
            return False
        shared = [v.storage for v in outs if v.storage in self.written]
        return len(set(shared)) == len(shared) and all(self._born[v] >= s.start for v in shared)

    def _needed(self, chosen: list[_NodeRecord]) -> set[Value]:
        """The values that ops of other nodes, arguments of chosen nodes and results use."""
        inside = {i for s in chosen for i in range(s.start, s.stop)}
        needed = {v for i, op in enumerate(self.old.ops) if i not in inside for v in op.inputs()}
        needed.update(v for s in chosen for v in leaves((s.args, s.kwargs), Value))
        needed.update(leaves(self.old.outputs, Value))
        needed.update(w.value for w in self.old.attribute_writes)
        return needed

    def _hides(self, s: _NodeRecord, needed: set[Value]) -> bool:
        """Whether a value that the node made is needed, but is not among its outputs."""
        shown = set(leaves(s.outputs, Value))
        return any(v in needed and v not in shown for op in self._ops(s) for v in op.values())

    # ---------------------------------------------------------------- building

    def step(self, op: Op) -> None:
        s = self._node_of.get(op)
        is_lifted = s in self._lifted
        if op.kind == "get_attr" or not is_lifted:
            meta = op.meta if s is None else {**(op.meta or {}), ORIGIN: {"node": s.node}}
            self._add(op.replace(meta=meta))
        if s is not None and is_lifted and op is self.old.ops[s.stop - 1]:
            self._add_node(s)

    def _add(self, op: Op) -> None:
        self.new.ops.append(op.copied(self.replacements, calls=self.calls))

    def _add_node(self, s: _NodeRecord) -> None:
        ops, target, outputs = self._ops(s), s.target, s.outputs
        kind: str = s.node.op
        new_target: Any = str(s.node.target)
        if kind == "call_module":
            self.new.modules[new_target] = target.target
        else:
            draws = any(_SEEDED in getattr(op.target, "tags", ()) for op in ops)
            kind, new_target = "call_function", dataclasses.replace(target, tags=(_SEEDED,) if draws else ())
            # without the names of torch.return_types
            outputs = tuple(outputs) if isinstance(outputs, tuple) else outputs
        op = ops[0].replace(scope=s.scope, grad=s.grad, writes=(), unbacked=None)
        self._add(op.replace(kind=kind, target=new_target, args=s.args, kwargs=s.kwargs, outputs=outputs))


# Inputs that stand for numbers ---------------------------------------------------------------------------------------

# Under `dynamic=True` Dynamo gives a float of the model, such as an `eps`, as a tensor of which the graph, or the body
# of a checkpointed region or a branch in it, takes the `item`.


def number_inputs(gm: torch.fx.GraphModule) -> list[int]:
    """The positions of the inputs of which the graph reads nothing but the number."""
    return [i for i, n in enumerate(gm.graph.find_nodes(op="placeholder")) if n.users and all(_readers_of_number(n))]


def _readers_of_number(n: torch.fx.Node) -> Iterator[bool]:
    for user in n.users:
        yield (user.op, user.target) == ("call_method", "item") or (user.target in FORMS and stands_for_number(n))


def with_numbers(gm: torch.fx.GraphModule, tensors: Mapping[int, torch.Tensor]) -> torch.fx.GraphModule:
    """The graph with constants for inputs, by their positions: recording knows the `item` of a constant."""
    if not tensors:
        return gm
    new = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
    inputs = list(new.graph.find_nodes(op="placeholder"))
    for i, tensor in tensors.items():
        with new.graph.inserting_after(inputs[-1]):
            kwargs: dict[str, Any] = {"dtype": tensor.dtype, "device": "cpu"}
            inputs[i].replace_all_uses_with(new.graph.call_function(torch.tensor, (tensor.item(),), kwargs))
    new.recompile()
    return new
