"""The graphs to translate, as one: the main program and each body side by side, cut open at every call.

A *piece* is the main program or the body of a function. Where a piece calls a function, the operands become outputs of
the whole and the results become inputs of it, so that the pieces have no edge in common and no call is in the way:
what translates and optimizes the whole cannot merge, drop or inline calls, because there are none in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx

from scopetrace._compat.graph_module import set_grad_enabled
from scopetrace._compat.schema import schema_of
from scopetrace._compat.symbols import Symbolic, to_expr
from scopetrace._compat.tensors import FreshFakes
from scopetrace.containers.objects import tensor_holders
from scopetrace.containers.structure import leaves_with_path
from scopetrace.errors import OnnxExportError
from scopetrace.functionalization.overwrite import OVERWRITE
from scopetrace.ir import meta
from scopetrace.ir.tape import ProgramTape, Value
from scopetrace.ir.write_back import (
    ChangeShape,
    FromGraph,
    GraphInput,
    SameAs,
    Source,
    StateRef,
    StridedStep,
    Update,
    ViewOf,
    ViewStep,
    WriteBack,
)
from scopetrace.program.graph import FxLowering

INVOKE = torch.ops.higher_order.invoke_subgraph

_SQUEEZES = (torch.ops.aten.squeeze.default, torch.ops.aten.squeeze.dim, torch.ops.aten.squeeze.dims)
"""torch.onnx translates them to an op that takes sizes of 1 alone; where other sizes stay, torch's give their input."""


@dataclasses.dataclass(eq=False)
class CallSite:
    """One call of a function in a piece."""

    node: torch.fx.Node
    """The `invoke_subgraph` node that it is made from."""
    callee: Subgraph
    operands: list[Any]
    """Nodes of the whole, or plain numbers, for the callee's inputs in order."""
    results: list[torch.fx.Node]
    """Placeholders of the whole, one for each output of the callee."""


@dataclasses.dataclass(eq=False)
class Subgraph:
    """The main program (`function` is None), or the body of a function."""

    function: Any
    program: FxLowering
    inputs: list[torch.fx.Node] = dataclasses.field(default_factory=list)
    """Placeholders of the whole, in the order of the piece's own."""
    held: dict[str, torch.fx.Node] = dataclasses.field(default_factory=dict)
    """Placeholders of the whole for the tensors that the program holds, by name."""
    sites: list[CallSite] = dataclasses.field(default_factory=list)
    outputs: list[Any] = dataclasses.field(default_factory=list)
    """Nodes of the whole, or plain numbers."""
    unknown: list[torch.fx.Node] = dataclasses.field(default_factory=list)
    """Placeholders of the whole for what a body that is left out gives."""
    fits_all: bool = True
    """Whether the sizes in it are those of every call, by name too."""

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor that the program holds."""
        return self.program.tape.attributes[name]


class CombinedGraph:
    """All pieces in one graph: first the placeholders, then the ops, then one output with what leaves the pieces.

    `function_of` gives the function that an `invoke_subgraph` node calls; `finish` the outputs of the main program from
    the values of its output node, as `Results.values` does. Functions that `is_left_out` have no ops here.
    """

    def __init__(
        self,
        main: FxLowering,
        function_of: Callable[[torch.fx.Node], Any],
        finish: Callable[[Sequence[Any], Sequence[Any], Callable[[str], Any]], list[Any]],
        is_left_out: Callable[[Any], bool],
    ) -> None:
        self.graph = torch.fx.Graph()
        self.root = torch.nn.Module()
        self.pieces: list[Subgraph] = []
        """Callees before their callers; the main program last."""
        self._function_of = function_of
        self._is_left_out = is_left_out
        self._bodies: dict[Any, Subgraph] = {}
        self._nodes: dict[tuple[Subgraph, torch.fx.Node], Any] = {}
        self._tensors: dict[Any, str] = {}
        self._branches: dict[FxLowering, str] = {}
        self._piece_of: dict[torch.fx.Node, Subgraph] = {}
        self.fakes = FreshFakes()
        """What made the values of the placeholders that are left."""
        self._count = itertools.count()
        self._start = self.graph.call_function(operator.pos, (0,))  # what placeholders stand before; erased below
        self.main = Subgraph(None, main)
        self._add(self.main)
        self.main.outputs = finish(self.main.outputs, self.main.inputs, self._hold)
        self.outputs = self._close()

    @property
    def inputs(self) -> list[torch.fx.Node]:
        """The placeholders."""
        return [n for n in self.graph.nodes if n.op == "placeholder"]

    # ---------------------------------------------------------------- pieces

    def _add(self, piece: Subgraph) -> None:
        if piece.function is not None and self._is_left_out(piece.function):
            self._leave_out(piece)
        else:
            for node in piece.program.graph.nodes:
                self._copy(piece, node)
        self.pieces.append(piece)

    def _leave_out(self, piece: Subgraph) -> None:
        nodes = piece.program.graph.nodes
        piece.inputs = [self._input(piece, meta.value(n)) for n in nodes if n.op == "placeholder"]
        given = _flat(next(n for n in nodes if n.op == "output").args[0])
        piece.outputs = piece.unknown = [self._input(piece, meta.value(n)) for n in given]

    def _copy(self, piece: Subgraph, node: torch.fx.Node) -> None:
        if node.op == "placeholder":
            new = self._input(piece, meta.value(node))
            piece.inputs.append(new)
            self._nodes[piece, node] = new
        elif node.op == "get_attr":
            self._attribute(piece, node)
        elif node.op == "output":
            piece.outputs = list(_flat(self._map(piece, node.args[0])))
        elif node.op == "call_module":
            where = meta.scope_path(node) or node.target
            raise OnnxExportError(f"{where}: a leaf module has no ONNX form; name it in plugins= instead")
        elif node.target is INVOKE:
            self._cut(piece, node)
        elif node.target in _SQUEEZES and _kind(node) == _kind(node.args[0]):
            self._nodes[piece, node] = self._map(piece, node.args[0])
        elif node.target is OVERWRITE:  # the second, but for gradients
            self._nodes[piece, node] = self._map(piece, node.args[1])
        elif node.target is not set_grad_enabled and (piece, node) not in self._nodes:
            args, kwargs = self._map(piece, node.args), self._map(piece, node.kwargs)
            new = self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
            new.meta = dict(node.meta)
            self._nodes[piece, node] = new

    def _input(self, piece: Subgraph, value: Any) -> torch.fx.Node:
        with self.graph.inserting_before(self._start):
            node = self.graph.placeholder(f"input_{next(self._count)}")
        meta.set_value(node, value)
        self._piece_of[node] = piece
        return node

    def _attribute(self, piece: Subgraph, node: torch.fx.Node) -> None:
        name, program = str(node.target), piece.program
        if name in program.tape.attributes:
            self._nodes[piece, node] = self._held(piece, name, piece.tensor(name), meta.value(node))
        elif name in program.bodies and any(user.target is not INVOKE for user in node.users):
            self._nodes[piece, node] = self._branch(program.bodies[name])  # of a cond: goes along as it is

    def _held(self, piece: Subgraph, name: str, tensor: torch.Tensor, value: Any) -> torch.fx.Node:
        """Tensors that are the same memory, as tied weights are, are held once."""
        name = self._tensors.setdefault((piece, _identity(tensor)), name)
        if name not in piece.held:
            piece.held[name] = self._input(piece, value)
        return piece.held[name]

    def _hold(self, name: str) -> torch.fx.Node:
        """A tensor that the main program's results need beside its graph."""
        return self.main.held[self._tensors[self.main, _identity(self.main.tensor(name))]]

    def _branch(self, body: FxLowering) -> torch.fx.Node:
        name = self._branches.setdefault(body, f"body_{len(self._branches)}")
        if not hasattr(self.root, name):
            self.root.add_module(name, body.graph_module())
        return self.graph.create_node("get_attr", name, name=name)

    def _cut(self, piece: Subgraph, node: torch.fx.Node) -> None:
        """Operands out, results in."""
        function = self._function_of(node)
        callee = self._bodies.get(function)
        if callee is None:
            callee = self._bodies[function] = Subgraph(function, function.lowering)
            self._add(callee)
        operands = [self._map(piece, a) for a in node.args[2:]]
        callee.fits_all &= list(map(_kind, operands)) == list(map(_kind, callee.inputs))
        results = [self._input(piece, value) for value in meta.value(node)]
        for user in node.users:
            assert user.target is operator.getitem
            self._nodes[piece, user] = results[user.args[1]]  # type: ignore[index]
        piece.sites.append(CallSite(node, callee, operands, results))

    def _map(self, piece: Subgraph, x: Any) -> Any:
        return torch.fx.node.map_arg(x, lambda n: self._nodes[piece, n])

    # ---------------------------------------------------------------- the whole

    def _close(self) -> list[torch.fx.Node]:
        """What leaves the pieces, each node once, without what is an input anyway.

        Placeholders that no op reads, such as weights that are only passed on, are of no concern to what translates:
        they leave the graph, and stay as names for the values.
        """
        leaving = [x for p in self.pieces for x in (*p.outputs, *(o for s in p.sites for o in s.operands))]
        nodes = list(dict.fromkeys(x for x in leaving if isinstance(x, torch.fx.Node) and x.op != "placeholder"))
        self.graph.erase_node(self._start)
        for node in self.inputs:
            if node.users or not nodes:  # torch.onnx takes no empty graph
                meta.set_value(node, self.fakes.like(self._piece_of[node], meta.value(node)))
            else:
                self.graph.erase_node(node)
        self.graph.output(tuple(nodes))
        return nodes


def _kind(x: Any) -> Any:
    """Equal for values of equal sizes."""
    value = meta.value(x) if isinstance(x, torch.fx.Node) else x
    if isinstance(value, torch.Tensor):
        return to_expr(tuple(value.shape))
    return to_expr(value) if isinstance(value, Symbolic) else value


def _identity(tensor: torch.Tensor) -> Any:
    if tensor.device.type == "meta" or tensor.numel() == 0 or tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _flat(x: Any) -> Iterator[Any]:
    for item in x if isinstance(x, (list, tuple)) else (x,):
        if isinstance(item, (list, tuple)):
            yield from _flat(item)
        else:
            yield item


class Results:
    """The outputs of a program."""

    def __init__(self, tape: ProgramTape, program: WriteBack | None) -> None:
        self._tape, self._program = tape, program

    @property
    def _changed(self) -> list[GraphInput | StateRef]:
        updates = [] if self._program is None else self._program.updates
        return list(dict.fromkeys(update.target for update in updates))

    def names(self) -> list[str]:
        """Names of the outputs, made of the keys of the result: `logits`, `output_0`; `fc.count_updated` for state."""
        found = [
            result_name(path)
            for path, leaf in leaves_with_path(self._tape.outputs)
            if isinstance(leaf, (Value, *Symbolic))
        ]
        changed = [target.name for target in self._changed]
        changed += [f"{w.fqn}.{w.name}" if w.fqn else w.name for w in self._tape.attribute_writes]
        return [*found, *(f"{name}_updated" for name in changed)]

    def state(self) -> set[str]:
        """The names of the model's tensors that it changes in place."""
        return {target.name for target in self._changed if isinstance(target, StateRef)}

    def of_run(self, result: Any, inputs: Sequence[torch.Tensor], held: Callable[[str], torch.Tensor]) -> list[Any]:
        """The values of the outputs after a run of the model: from its result, its inputs, and its own tensors."""
        given = dict(leaves_with_path(result, "", tensor_holders(result)))
        kept = [p for p, leaf in leaves_with_path(self._tape.outputs) if isinstance(leaf, (Value, *Symbolic))]
        changed = [inputs[t.index] if isinstance(t, GraphInput) else held(t.name) for t in self._changed]
        bound = [getattr(w.module, w.name) for w in self._tape.attribute_writes]
        return [*(given[path] for path in kept), *changed, *bound]

    def values(self, values: Sequence[Any], inputs: Sequence[Any], held: Callable[[str], Any]) -> list[Any]:
        """The outputs, from what the graph gives, its inputs, and a way to the tensors that it holds.

        Adds ops to the graph for views. All are nodes, or plain numbers.
        """
        if self._program is None:
            return list(values)
        count = len(values) - len(self._tape.attribute_writes)
        machine = _Machine(values[:count], inputs, held)
        for update in self._program.updates:
            machine.now[update.target] = machine.updated(update)
        for source in self._program.results:
            machine.results.append(machine.get(source))
        return [*machine.results, *(machine.now[t] for t in self._changed), *values[count:]]


class _Machine:
    def __init__(self, values: Sequence[Any], inputs: Sequence[Any], held: Callable[[str], Any]) -> None:
        self._values, self._inputs, self._held = values, inputs, held
        self.now: dict[GraphInput | StateRef, Any] = {}
        self.results: list[Any] = []

    def get(self, source: Source) -> Any:
        if isinstance(source, FromGraph):
            return self._values[source.index]
        if isinstance(source, SameAs):
            return self.results[source.index]
        if isinstance(source, ViewOf):
            view = self.get(source.base)
            for step in source.steps:
                view = self._view(view, step)
            return view
        if source in self.now:
            return self.now[source]
        return self._inputs[source.index] if isinstance(source, GraphInput) else self._held(source.name)

    def _view(self, base: torch.fx.Node, step: ViewStep | StridedStep) -> torch.fx.Node:
        if isinstance(step, ViewStep):
            out = _call(base, step.op, step.args, step.kwargs)
            return out if step.slot is None else _call(out, operator.getitem, (step.slot,), {})
        return _call(base, torch.ops.aten.as_strided.default, (step.size, step.stride, step.shift), {})

    def updated(self, update: Update) -> Any:
        """The value of an input after an update."""
        if not isinstance(update, ChangeShape):
            return self.get(update.value)
        op = update.step.op
        name = schema_of(op).op_name
        twin = getattr(torch.ops.aten, name.removesuffix("_"), None)
        if twin is None or "resize" in name:
            raise OnnxExportError(
                f"the model changes {update.target} with {op}, which has no ONNX form: change a copy of it instead"
            )
        return _call(self.get(update.target), twin.default, update.step.args, update.step.kwargs)


def _call(base: torch.fx.Node, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.fx.Node:
    """An op on a value, at the end of the graph."""
    node = base.graph.call_function(op, (base, *args), kwargs)
    value = meta.value(base)
    mode = value.fake_mode if isinstance(value, torch.Tensor) else contextlib.nullcontext()  # type: ignore[attr-defined]
    with mode, torch.no_grad():
        meta.set_value(node, op(value, *args, **kwargs))
    return node


def result_name(path: str) -> str:
    """A name for what stands at `path` in a result, `['logits']` or `[0]`."""
    name = re.sub(r"\W+", "_", path).strip("_")
    return name if name and not name[0].isdigit() else f"output_{name}".rstrip("_")
