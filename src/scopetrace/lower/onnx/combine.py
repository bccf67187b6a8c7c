"""The main program and all function bodies as one torch.fx graph for `torch.onnx.export`, and what the model returns.

A Subgraph is the main program or the body of a function. At a call, the operands become outputs of the combined graph
and the results become placeholders of it. So no edge leads from one subgraph to another, and there is no call node
that translation or optimization could merge, drop or inline.

Data flow:
    FxLowering of the main program -> nodes copied; at an `invoke_subgraph` the callee's body is copied first
    write-back program -> the outputs of the main program: results, then new values of inputs and state (Results)
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

from scopetrace._compat.graph_module import set_grad_enabled
from scopetrace._compat.ops import schema_of
from scopetrace._compat.shape_env import FreshFakes
from scopetrace._compat.symbols import Symbolic, example, to_expr
from scopetrace.containers.structure import leaves_with_path, tensor_holders
from scopetrace.errors import OnnxExportError
from scopetrace.ir.registered import tensor_in
from scopetrace.ir.tape import ProgramTape, Value
from scopetrace.ir.write_back import ChangeShape, GraphInput, StateRef, Update, ViewOf
from scopetrace.lower.onnx.translate import refusal, without_form
from scopetrace.lower.result_nodes import ResultNodes, in_memory_order, write_back_of
from scopetrace.ops.functional_variants import functional_variant
from scopetrace.ops.history import OVERWRITE
from scopetrace.ops.views import is_contiguous
from scopetrace.program.graph import FxLowering, node_value
from scopetrace.program.outlined import Function

Operand = torch.fx.Node | bool | int | float | complex
"""An operand or output in the combined graph."""

_aten = torch.ops.aten
INVOKE = torch.ops.higher_order.invoke_subgraph

_SQUEEZES = (_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims)
"""Their ONNX form takes dimensions of size 1 only; where torch's squeeze changes no size, it is left out."""

_ARANGES = (_aten.arange.default, _aten.arange.start, _aten.arange.start_step)


@dataclasses.dataclass(eq=False)
class CallSite:
    """One call of a function in a subgraph."""

    node: torch.fx.Node
    """The `invoke_subgraph` node."""
    function: Function
    callee: Subgraph
    operands: list[Operand]
    """Nodes of the combined graph, or Python numbers, for the callee's inputs in order."""
    results: list[torch.fx.Node]
    """Placeholders of the combined graph, one for each output of the callee."""


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
        functions: by identifier, the functions that `invoke_subgraph` nodes call.
        is_left_out: whether the body of a Function, a plugin, is left out of the graph.
    """

    def __init__(
        self, main: FxLowering, functions: Mapping[str, Function], is_left_out: Callable[[Function], bool]
    ) -> None:
        self.graph = torch.fx.Graph()
        self.root = torch.nn.Module()
        self.subgraphs: list[Subgraph] = []
        """Callees before callers; the main program last."""
        self._functions = functions
        self._is_left_out = is_left_out
        self._bodies: dict[Function, Subgraph] = {}
        self._nodes: dict[torch.fx.Node, Operand] = {}
        self._tensors: dict[tuple[Subgraph, Hashable], str] = {}
        self._branches: dict[FxLowering, str] = {}
        self._subgraph_of: dict[torch.fx.Node, Subgraph] = {}
        self.fakes = FreshFakes()
        """Makes the fake values of the remaining placeholders; knows which symbols they stand for."""
        self._start = self.graph.call_function(operator.pos, (0,))  # placeholders are inserted before it; erased below
        self.main = Subgraph(None, main)
        self._add(self.main)
        self.outputs = self._close()

    def _add(self, subgraph: Subgraph) -> None:
        nodes = subgraph.program.graph.nodes
        if subgraph.function is not None and self._is_left_out(subgraph.function):
            subgraph.inputs = [self._input(subgraph, node_value(n)) for n in nodes if n.op == "placeholder"]
            results = pytree.tree_leaves(subgraph.program.output.args[0])
            subgraph.unknown = [self._input(subgraph, node_value(n)) for n in results]
            subgraph.outputs = list(subgraph.unknown)
        else:
            for node in nodes:
                self._copy(subgraph, node)
        self.subgraphs.append(subgraph)

    def _copy(self, subgraph: Subgraph, node: torch.fx.Node) -> None:
        if node.op == "placeholder":
            new = self._input(subgraph, node_value(node))
            subgraph.inputs.append(new)
            self._nodes[node] = new
        elif node.op == "get_attr":
            self._attribute(subgraph, node)
        elif node.op == "output":
            subgraph.outputs = pytree.tree_leaves(self._map(node.args[0]))
        elif node.op == "call_module":
            raise refusal("a leaf module has no ONNX form", node, "name it in plugins= in place of leaf_modules=")
        elif node.target is INVOKE:
            self._cut(subgraph, node)
        elif (same := _same_value(node)) is not None:
            self._nodes[node] = self._map(same)
        elif node.target is torch.ops.higher_order.flex_attention:
            raise without_form(node.graph.find_nodes(op="call_function", target=node.target))
        elif node.target is _aten.as_strided.default:
            self._nodes[node] = self._strided(node)
        elif node.target is not set_grad_enabled and node not in self._nodes:
            new = self._nodes[node] = self.graph.node_copy(node, self._nodes.__getitem__)
            new.args = self._map(_in_float32(node))

    def _strided(self, node: torch.fx.Node) -> torch.fx.Node:
        """`as_strided`, on a row-major copy of its base in the order of memory: ONNX knows no strides."""
        base, view = node_value(node.all_input_nodes[0]), node_value(node)
        order, shift = in_memory_order(base.stride()), view.storage_offset() - base.storage_offset()
        last = shift + sum((n - 1) * step for n, step in zip(view.shape, view.stride(), strict=True))
        is_inside = example(shift) >= 0 and example(last) < max(example(base.numel()), 1)
        is_known = type(shift) is int or to_expr(base.storage_offset()) == 0
        if not is_known or not is_inside or not is_contiguous(base.permute(order)):
            raise refusal(
                "as_strided reads memory that its base does not fill, and ONNX knows no memory",
                node,
                "index the tensor that the base is a part of, or clone() the base first",
            )

        def add(op: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
            new = self.graph.call_function(op, args, kwargs)
            new.meta = dict(node.meta)
            return new

        tensor, size, stride, *offset = self._map(node.args)
        ordered = add(_aten.permute.default, tensor, order)
        rows = add(_aten.clone.default, ordered, memory_format=torch.contiguous_format)
        return add(_aten.as_strided.default, rows, size, stride, shift if type(shift) is int else offset[0])

    def _input(self, subgraph: Subgraph, value: Any) -> torch.fx.Node:
        with self.graph.inserting_before(self._start):
            node = self.graph.placeholder(f"input_{len(self._subgraph_of)}")
        node.meta["val"] = value
        self._subgraph_of[node] = subgraph
        return node

    def _attribute(self, subgraph: Subgraph, node: torch.fx.Node) -> None:
        name, program = str(node.target), subgraph.program
        if name in program.tape.attributes:
            name = self._tensors.setdefault((subgraph, _identity(subgraph.tensor(name))), name)  # tied weights have one
            if name not in subgraph.held:
                subgraph.held[name] = self._input(subgraph, node_value(node))
            self._nodes[node] = subgraph.held[name]
        elif name in program.bodies and any(user.target is not INVOKE for user in node.users):
            self._nodes[node] = self._branch(program.bodies[name])  # of a cond, which torch.onnx translates
        elif name not in program.bodies and (user := next(iter(node.users))).op == "call_function":
            raise refusal(
                "an op takes an object that is no tensor, such as packed weights",
                user,
                "trace the model before it is quantized, or name the module in plugins=",
            )

    def held_name(self, name: str) -> str | None:
        """The name of a tensor among those that the main program holds; None for one that nobody reads."""
        return self._tensors.get((self.main, _identity(self.main.tensor(name))))

    def _branch(self, body: FxLowering) -> torch.fx.Node:
        name = self._branches.setdefault(body, f"body_{len(self._branches)}")
        if not hasattr(self.root, name):
            for inner in body.walk():
                for node in inner.graph.nodes:  # torch computes the values of conditions again, and wants an entry
                    node.meta["val"] = node_value(node)
            self.root.add_module(name, body.graph_module())
        return self.graph.create_node("get_attr", name, name=name)

    def _cut(self, subgraph: Subgraph, node: torch.fx.Node) -> None:
        """A call: its operands leave the combined graph, its results enter it."""
        function = self._functions[node.args[1]]  # type: ignore[index]
        callee = self._bodies.get(function)
        if callee is None:
            callee = self._bodies[function] = Subgraph(function, function.lowering)
            self._add(callee)
        operands = [self._map(a) for a in node.args[2:]]
        callee.fits_all &= list(map(_kind, operands)) == list(map(_kind, callee.inputs))
        results = [self._input(subgraph, value) for value in node_value(node)]
        for user in node.users:
            assert user.target is operator.getitem
            self._nodes[user] = results[user.args[1]]  # type: ignore[index]
        subgraph.sites.append(CallSite(node, function, callee, operands, results))

    def _map(self, x: Any) -> Any:
        return torch.fx.node.map_arg(x, self._nodes.__getitem__)

    def _close(self) -> list[torch.fx.Node]:
        """Add the output node; gives its nodes: outputs and call operands of all subgraphs that are no placeholders.

        Placeholders that no op reads, such as weights that are only passed to calls, are erased, since torch.onnx need
        not translate them; as keys they still identify the values.
        """
        leaving = [x for p in self.subgraphs for x in (*p.outputs, *(o for s in p.sites for o in s.operands))]
        nodes = list(dict.fromkeys(x for x in leaving if isinstance(x, torch.fx.Node) and x.op != "placeholder"))
        self.graph.erase_node(self._start)
        for node in self.graph.find_nodes(op="placeholder"):
            if node.users or not nodes:  # torch.onnx takes no empty graph
                node.meta["val"] = self.fakes.like(self._subgraph_of[node], node_value(node))
            else:
                self.graph.erase_node(node)
        self.graph.output(tuple(nodes))
        return nodes


def _in_float32(node: torch.fx.Node) -> Any:
    """The operands; for an `arange` of floats, with an end that ONNX counts to in float32 as torch does in float64."""
    if node.target not in _ARANGES or not any(isinstance(x, float) for x in node.args):
        return node.args
    numbers: list[Any] = [0, *node.args] if len(node.args) == 1 else [*node.args]
    value, (start, _, step) = node_value(node), (*numbers, 1)[:3]
    if value.is_floating_point() and type(value.shape[0]) is int:
        numbers[1] = start + max(value.shape[0] - 0.5, 0) * step
    return tuple(numbers[-len(node.args) :])


def _same_value(node: torch.fx.Node) -> Any:
    """The operand that the result is equal to; None where none is known to be."""
    if node.target in _SQUEEZES and _kind(node) == _kind(node.all_input_nodes[0]):
        return node.args[0]
    return node.args[1] if node.target is OVERWRITE else None  # its first operand matters to autograd only


def _kind(x: Operand) -> Hashable:
    """A key that is equal for values of equal sizes."""
    value = node_value(x) if isinstance(x, torch.fx.Node) else x
    if isinstance(value, torch.Tensor):
        return to_expr(tuple(value.shape))
    return to_expr(value) if isinstance(value, Symbolic) else value


def _identity(tensor: torch.Tensor) -> Hashable:
    if tensor.device.type == "meta" or tensor.numel() == 0 or tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


class Results:
    """The outputs of an ONNX model: the results of the model, then the new values of what it changes.

    A result that is an input is that value; a view is computed anew, of the changed value where its base was changed.
    A changed tensor of an object that is both argument and result, such as a cache, is listed once, as new value.
    """

    def __init__(self, tape: ProgramTape) -> None:
        self._tape, self._write_back = tape, write_back_of(tape)
        self._changed = list(dict.fromkeys(map(_target, self._write_back.updates)))
        paths = [path for path, leaf in leaves_with_path(tape.outputs) if isinstance(leaf, (Value, *Symbolic))]
        sources = zip(paths, self._write_back.results, strict=True)
        self._listed = {p: i for i, (p, source) in enumerate(sources) if "." not in p or source not in self._changed}
        """By path, the indices of the results that are outputs."""

    def names(self) -> list[str]:
        """Names of the outputs: `logits` or `output_0` from paths in the result, `fc.count_updated` for state."""
        changed = [target.name for target in self._changed]
        changed += [f"{w.fqn}.{w.name}" if w.fqn else w.name for w in self._tape.attribute_writes]
        return [*map(result_name, self._listed), *(f"{name}_updated" for name in changed)]

    def state(self) -> set[str]:
        """The names of the parameters and buffers that change."""
        return {target.name for target in self._changed if isinstance(target, StateRef)}

    def of_run(self, result: Any, inputs: Sequence[torch.Tensor], held: Callable[[str], torch.Tensor]) -> list[Any]:
        """The values of the outputs, read from the result, the inputs and the tensors of a run of the model."""
        leaves = dict(leaves_with_path(result, "", tensor_holders(result)))
        changed = [inputs[t.index] if isinstance(t, GraphInput) else held(t.name) for t in self._changed]
        bound = [w.module and tensor_in(w.module, w.name) for w in self._tape.attribute_writes]
        return [*(leaves[path] for path in self._listed), *changed, *bound]

    def lowering(self) -> FxLowering:
        """The graph of the program, with the outputs of the model in place of its own."""
        lowering = FxLowering(self._tape)
        bound: Any = lowering.output.args[0][len(self._tape.graph_outputs()) :]
        nodes = ResultNodes.of(lowering)
        before = {target: nodes.get(target) for target in self._changed}
        for update in self._write_back.updates:
            nodes.updated[_target(update)] = _updated(nodes, update)
        changed = {before[target]: node for target, node in nodes.updated.items()}
        bound = [changed.get(node, node) for node in bound]  # an attribute may be the very tensor that is changed
        results = nodes.all_results(self._write_back)
        listed = [results[i] for i in self._listed.values()]
        lowering.output.args = ((*listed, *(nodes.updated[t] for t in self._changed), *bound),)
        return lowering


def _target(update: Update) -> GraphInput | StateRef:
    """What an update changes. Raises OnnxExportError for memory around a tensor."""
    if isinstance(update.target, ViewOf):
        raise OnnxExportError(
            f"`{update}` changes memory around an input, which ONNX does not have",
            hint="give the model the tensor that has all of this memory",
        )
    return update.target


def _updated(nodes: ResultNodes, update: Update) -> Any:
    if not isinstance(update, ChangeShape):
        return nodes.get(update.value)
    op = update.step.op
    variant = functional_variant(op)
    if variant is None or "resize" in schema_of(op).op_name:
        raise OnnxExportError(
            f"the model changes the shape of {update.target} in a way that ONNX cannot express",
            op=str(op),
            hint="change a copy of it",
        )
    return nodes.view(nodes.get(update.target), dataclasses.replace(update.step, op=variant.op))


def result_name(path: str) -> str:
    """A name from a path in a result: `logits` for `['logits']`, `output_0` for `[0]`."""
    name = re.sub(r"\W+", "_", path).strip("_")
    return name if name and not name[0].isdigit() else f"output_{name}".rstrip("_")
