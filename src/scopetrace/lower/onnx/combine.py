"""The main program and all function bodies as one torch.fx graph for `torch.onnx.export`, and what the model returns.

A Subgraph is the main program or the body of a function. At a call, the operands become outputs of the combined graph
and the results become placeholders of it. So no edge leads from one subgraph to another, and there is no call node
that translation or optimization could merge, drop or inline.

Data flow:
    FxLowering of the main program -> nodes copied; at an `invoke_subgraph` the callee's body is copied first
    write-back program -> the outputs of the main program: results, then new values of inputs and state (Results)
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
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
from scopetrace.ops.overwrite import OVERWRITE
from scopetrace.program.graph import FxLowering
from scopetrace.program.outlined import Function

Operand = torch.fx.Node | bool | int | float | complex
"""An operand or output in the combined graph."""

INVOKE = torch.ops.higher_order.invoke_subgraph

_SQUEEZES = (torch.ops.aten.squeeze.default, torch.ops.aten.squeeze.dim, torch.ops.aten.squeeze.dims)
"""Their ONNX form takes dimensions of size 1 only; where torch's squeeze changes no size, it is left out."""


@dataclasses.dataclass(eq=False)
class CallSite:
    """One call of a function in a subgraph."""

    node: torch.fx.Node
    """The `invoke_subgraph` node."""
    callee: Subgraph
    operands: list[Operand]
    """Nodes of the combined graph, or Python numbers, for the callee's inputs in order."""
    results: list[torch.fx.Node]
    """Placeholders of the combined graph, one for each output of the callee."""

    @property
    def function(self) -> Function:
        """The called function."""
        assert self.callee.function is not None
        return self.callee.function


@dataclasses.dataclass(eq=False)
class Subgraph:
    """The main program (`function` is None), or the body of a function."""

    function: Function | None
    program: FxLowering
    inputs: list[torch.fx.Node] = dataclasses.field(default_factory=list)
    """Placeholders of the combined graph, in the order of the subgraph's own."""
    held: dict[str, torch.fx.Node] = dataclasses.field(default_factory=dict)
    """By name, placeholders of the combined graph for parameters, buffers and constants."""
    sites: list[CallSite] = dataclasses.field(default_factory=list)
    outputs: list[Operand] = dataclasses.field(default_factory=list)
    """Nodes of the combined graph, or Python numbers."""
    unknown: list[torch.fx.Node] = dataclasses.field(default_factory=list)
    """Placeholders of the combined graph for the outputs of a plugin, whose body is left out."""
    fits_all: bool = True
    """Whether every call has operands of the same sizes, symbolic ones by name."""

    def tensor(self, name: str) -> torch.Tensor:
        """A parameter, buffer or constant by its name on the tape."""
        return self.program.tape.attributes[name]


class CombinedGraph:
    """All subgraphs in one graph: placeholders, then ops, then one output node for all subgraphs.

    Args:
        main: the main program.
        function_of: gives the Function that an `invoke_subgraph` node calls.
        finish: gives the outputs of the main program from the values of its output node, as `Results.values` does.
        is_left_out: whether the body of a Function, a plugin, is left out of the graph.
    """

    def __init__(
        self,
        main: FxLowering,
        function_of: Callable[[torch.fx.Node], Function],
        finish: Callable[[Sequence[Operand], Sequence[torch.fx.Node], Callable[[str], torch.fx.Node]], list[Operand]],
        is_left_out: Callable[[Function], bool],
    ) -> None:
        self.graph = torch.fx.Graph()
        self.root = torch.nn.Module()
        self.subgraphs: list[Subgraph] = []
        """Callees before callers; the main program last."""
        self._function_of = function_of
        self._is_left_out = is_left_out
        self._bodies: dict[Function, Subgraph] = {}
        self._nodes: dict[tuple[Subgraph, torch.fx.Node], Operand] = {}
        self._tensors: dict[tuple[Subgraph, Hashable], str] = {}
        self._branches: dict[FxLowering, str] = {}
        self._subgraph_of: dict[torch.fx.Node, Subgraph] = {}
        self.fakes = FreshFakes()
        """Makes the fake values of the remaining placeholders; knows which symbols they stand for."""
        self._count = itertools.count()
        self._start = self.graph.call_function(operator.pos, (0,))  # placeholders are inserted before it; erased below
        self.main = Subgraph(None, main)
        self._add(self.main)
        self.main.outputs = finish(self.main.outputs, self.main.inputs, self._hold)
        self.outputs = self._close()

    @property
    def inputs(self) -> list[torch.fx.Node]:
        """The placeholders of the combined graph."""
        return [n for n in self.graph.nodes if n.op == "placeholder"]

    # ---------------------------------------------------------------- subgraphs

    def _add(self, subgraph: Subgraph) -> None:
        if subgraph.function is not None and self._is_left_out(subgraph.function):
            self._leave_out(subgraph)
        else:
            for node in subgraph.program.graph.nodes:
                self._copy(subgraph, node)
        self.subgraphs.append(subgraph)

    def _leave_out(self, subgraph: Subgraph) -> None:
        nodes = subgraph.program.graph.nodes
        subgraph.inputs = [self._input(subgraph, meta.value(n)) for n in nodes if n.op == "placeholder"]
        given = _flat(next(n for n in nodes if n.op == "output").args[0])
        subgraph.unknown = [self._input(subgraph, meta.value(n)) for n in given]
        subgraph.outputs = list(subgraph.unknown)

    def _copy(self, subgraph: Subgraph, node: torch.fx.Node) -> None:
        if node.op == "placeholder":
            new = self._input(subgraph, meta.value(node))
            subgraph.inputs.append(new)
            self._nodes[subgraph, node] = new
        elif node.op == "get_attr":
            self._attribute(subgraph, node)
        elif node.op == "output":
            subgraph.outputs = list(_flat(self._map(subgraph, node.args[0])))
        elif node.op == "call_module":
            raise OnnxExportError(
                "a leaf module has no ONNX form",
                op=str(node.target),
                module=meta.scope_path(node),
                hint="name it in plugins= in place of leaf_modules=",
            )
        elif node.target is INVOKE:
            self._cut(subgraph, node)
        elif node.target in _SQUEEZES and _kind(node) == _kind(node.all_input_nodes[0]):
            self._nodes[subgraph, node] = self._map(subgraph, node.args[0])
        elif node.target is OVERWRITE:  # its value is the second operand; the first matters to autograd only
            self._nodes[subgraph, node] = self._map(subgraph, node.args[1])
        elif node.target is not set_grad_enabled and (subgraph, node) not in self._nodes:
            args, kwargs = self._map(subgraph, node.args), self._map(subgraph, node.kwargs)
            new = self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
            new.meta = dict(node.meta)
            self._nodes[subgraph, node] = new

    def _input(self, subgraph: Subgraph, value: Any) -> torch.fx.Node:
        with self.graph.inserting_before(self._start):
            node = self.graph.placeholder(f"input_{next(self._count)}")
        meta.set_value(node, value)
        self._subgraph_of[node] = subgraph
        return node

    def _attribute(self, subgraph: Subgraph, node: torch.fx.Node) -> None:
        name, program = str(node.target), subgraph.program
        if name in program.tape.attributes:
            self._nodes[subgraph, node] = self._held(subgraph, name, subgraph.tensor(name), meta.value(node))
        elif name in program.bodies and any(user.target is not INVOKE for user in node.users):
            self._nodes[subgraph, node] = self._branch(
                program.bodies[name]
            )  # a body of a cond, which torch.onnx translates
        elif name not in program.bodies and (user := next(iter(node.users))).op == "call_function":
            raise OnnxExportError(
                "an op takes an object that is no tensor, such as packed weights",
                op=str(user.target),
                module=meta.scope_path(user),
                hint="trace the model before it is quantized, or name the module in plugins=",
            )

    def _held(self, subgraph: Subgraph, name: str, tensor: torch.Tensor, value: Any) -> torch.fx.Node:
        """The placeholder of a tensor; tied weights have one."""
        name = self._tensors.setdefault((subgraph, _identity(tensor)), name)
        if name not in subgraph.held:
            subgraph.held[name] = self._input(subgraph, value)
        return subgraph.held[name]

    def _hold(self, name: str) -> torch.fx.Node:
        """The placeholder of a tensor of the main program that its results need."""
        return self.main.held[self._tensors[self.main, _identity(self.main.tensor(name))]]

    def _branch(self, body: FxLowering) -> torch.fx.Node:
        name = self._branches.setdefault(body, f"body_{len(self._branches)}")
        if not hasattr(self.root, name):
            self.root.add_module(name, body.graph_module())
        return self.graph.create_node("get_attr", name, name=name)

    def _cut(self, subgraph: Subgraph, node: torch.fx.Node) -> None:
        """A call: its operands leave the combined graph, its results enter it."""
        function = self._function_of(node)
        callee = self._bodies.get(function)
        if callee is None:
            callee = self._bodies[function] = Subgraph(function, function.lowering)
            self._add(callee)
        operands = [self._map(subgraph, a) for a in node.args[2:]]
        callee.fits_all &= list(map(_kind, operands)) == list(map(_kind, callee.inputs))
        results = [self._input(subgraph, value) for value in meta.value(node)]
        for user in node.users:
            assert user.target is operator.getitem
            self._nodes[subgraph, user] = results[user.args[1]]  # type: ignore[index]
        subgraph.sites.append(CallSite(node, callee, operands, results))

    def _map(self, subgraph: Subgraph, x: Any) -> Any:
        return torch.fx.node.map_arg(x, lambda n: self._nodes[subgraph, n])

    # ---------------------------------------------------------------- outputs

    def _close(self) -> list[torch.fx.Node]:
        """Add the output node; gives its nodes: outputs and call operands of all subgraphs that are no placeholders.

        Placeholders that no op reads, such as weights that are only passed to calls, are erased, since torch.onnx need
        not translate them; as keys they still identify the values.
        """
        leaving = [x for p in self.subgraphs for x in (*p.outputs, *(o for s in p.sites for o in s.operands))]
        nodes = list(dict.fromkeys(x for x in leaving if isinstance(x, torch.fx.Node) and x.op != "placeholder"))
        self.graph.erase_node(self._start)
        for node in self.inputs:
            if node.users or not nodes:  # torch.onnx takes no empty graph
                meta.set_value(node, self.fakes.like(self._subgraph_of[node], meta.value(node)))
            else:
                self.graph.erase_node(node)
        self.graph.output(tuple(nodes))
        return nodes


def _kind(x: Operand) -> Hashable:
    """A key that is equal for values of equal sizes."""
    value = meta.value(x) if isinstance(x, torch.fx.Node) else x
    if isinstance(value, torch.Tensor):
        return to_expr(tuple(value.shape))
    return to_expr(value) if isinstance(value, Symbolic) else value


def _identity(tensor: torch.Tensor) -> Hashable:
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
    """The outputs of an ONNX model: the results of the model, then the new values of what it changes.

    It is the write-back program in terms of values: a result that is an input is that value, a view is computed anew,
    of the changed value where its base was changed.
    """

    def __init__(self, tape: ProgramTape, program: WriteBack | None) -> None:
        self._tape, self._program = tape, program

    @property
    def _changed(self) -> list[GraphInput | StateRef]:
        updates = [] if self._program is None else self._program.updates
        return list(dict.fromkeys(update.target for update in updates))

    def names(self) -> list[str]:
        """Names of the outputs: `logits` or `output_0` from paths in the result, `fc.count_updated` for state."""
        found = [
            result_name(path)
            for path, leaf in leaves_with_path(self._tape.outputs)
            if isinstance(leaf, (Value, *Symbolic))
        ]
        changed = [target.name for target in self._changed]
        changed += [f"{w.fqn}.{w.name}" if w.fqn else w.name for w in self._tape.attribute_writes]
        return [*found, *(f"{name}_updated" for name in changed)]

    def state(self) -> set[str]:
        """The names of the parameters and buffers that change."""
        return {target.name for target in self._changed if isinstance(target, StateRef)}

    def of_run(self, result: Any, inputs: Sequence[torch.Tensor], held: Callable[[str], torch.Tensor]) -> list[Any]:
        """The values of the outputs, read from the result, the inputs and the tensors of a run of the model."""
        given = dict(leaves_with_path(result, "", tensor_holders(result)))
        kept = [p for p, leaf in leaves_with_path(self._tape.outputs) if isinstance(leaf, (Value, *Symbolic))]
        changed = [inputs[t.index] if isinstance(t, GraphInput) else held(t.name) for t in self._changed]
        bound = [getattr(w.module, w.name) for w in self._tape.attribute_writes]
        return [*(given[path] for path in kept), *changed, *bound]

    def values(
        self, values: Sequence[Operand], inputs: Sequence[torch.fx.Node], held: Callable[[str], torch.fx.Node]
    ) -> list[Operand]:
        """The nodes of the outputs, from those of the graph's outputs, its inputs and the tensors that it holds.

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
    def __init__(
        self, values: Sequence[Operand], inputs: Sequence[torch.fx.Node], held: Callable[[str], torch.fx.Node]
    ) -> None:
        self._values, self._inputs, self._held = values, inputs, held
        self.now: dict[GraphInput | StateRef, Operand] = {}
        self.results: list[Operand] = []

    def get(self, source: Source) -> Operand:
        if isinstance(source, FromGraph):
            return self._values[source.index]
        if isinstance(source, SameAs):
            return self.results[source.index]
        if isinstance(source, ViewOf):
            view = self._node(source.base)
            for step in source.steps:
                view = self._view(view, step)
            return view
        if source in self.now:
            return self.now[source]
        return self._inputs[source.index] if isinstance(source, GraphInput) else self._held(source.name)

    def _node(self, source: Source) -> torch.fx.Node:
        found = self.get(source)
        assert isinstance(found, torch.fx.Node)
        return found

    def _view(self, base: torch.fx.Node, step: ViewStep | StridedStep) -> torch.fx.Node:
        if isinstance(step, ViewStep):
            out = _call(base, step.op, step.args, step.kwargs)
            return out if step.slot is None else _call(out, operator.getitem, (step.slot,), {})
        return _call(base, torch.ops.aten.as_strided.default, (step.size, step.stride, step.shift), {})

    def updated(self, update: Update) -> Operand:
        """The node of the new value of an input or of state."""
        if not isinstance(update, ChangeShape):
            return self.get(update.value)
        op = update.step.op
        name = schema_of(op).op_name
        variant = getattr(torch.ops.aten, name.removesuffix("_"), None)
        if variant is None or "resize" in name:
            raise OnnxExportError(
                f"the model changes the shape of {update.target} in a way that ONNX cannot express",
                op=str(op),
                hint="change a copy of it",
            )
        return _call(self._node(update.target), variant.default, update.step.args, update.step.kwargs)


def _call(base: torch.fx.Node, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.fx.Node:
    """A new op on `base` at the end of the graph."""
    node = base.graph.call_function(op, (base, *args), kwargs)
    value = meta.value(base)
    mode = value.fake_mode if isinstance(value, torch.Tensor) else contextlib.nullcontext()  # type: ignore[attr-defined]
    with mode, torch.no_grad():
        meta.set_value(node, op(value, *args, **kwargs))
    return node


def result_name(path: str) -> str:
    """A name from a path in a result: `logits` for `['logits']`, `output_0` for `[0]`."""
    name = re.sub(r"\W+", "_", path).strip("_")
    return name if name and not name[0].isdigit() else f"output_{name}".rstrip("_")
