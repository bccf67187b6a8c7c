"""When two translated bodies are the same function: equal nodes, wiring, attributes, constants; names do not count."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
import torch.fx
from onnx_ir.tensor_adapters import TorchTensor

from scopetrace.ir import meta
from scopetrace.lower.onnx.combine import CallSite, CombinedGraph, Results, Subgraph
from scopetrace.lower.onnx.naming import FunctionNames, Labels, SizeNames, forget_sizes_made_inside, output_names


def body_key(graph: ir.Graph) -> Hashable:
    """Equal for graphs that compute the same in the same way, of inputs of equal types and ranks.

    Names, sizes and metadata do not count.
    """
    kinds = tuple((str(value.dtype), None if value.shape is None else len(value.shape)) for value in graph.inputs)
    return kinds, _graph_key(graph, {})


def _graph_key(graph: ir.Graph, numbers: dict[ir.Value, int]) -> Hashable:
    for value in graph.inputs:
        numbers[value] = len(numbers)
    nodes = [_node_key(node, numbers) for node in graph]
    return len(graph.inputs), tuple(nodes), tuple(numbers[value] for value in graph.outputs)


def _node_key(node: ir.Node, numbers: dict[ir.Value, int]) -> Hashable:
    inputs = tuple(-1 if value is None else numbers[value] for value in node.inputs)
    attributes = tuple(sorted((name, _attribute_key(a, numbers)) for name, a in node.attributes.items()))
    for value in node.outputs:
        numbers[value] = len(numbers)
    types = tuple(str(value.dtype) for value in node.outputs)
    return node.domain, node.op_type, inputs, attributes, types


def _attribute_key(attribute: ir.Attr, numbers: dict[ir.Value, int]) -> Any:
    value = attribute.value
    if attribute.type is ir.AttributeType.TENSOR:
        return "tensor", str(value.dtype), tuple(value.shape), value.tobytes()
    if attribute.type is ir.AttributeType.GRAPH:
        return "graph", _graph_key(value, numbers)
    return str(attribute.type), repr(value)


PROTO_LIMIT = 2**31 - 2**27
"""Bytes of weights up to which a file holds them itself: protobuf ends at 2 GiB, and the graph needs room too."""


def onnx_tensor(tensor: torch.Tensor) -> ir.TensorProtocol:
    """A tensor as ONNX holds it, without a copy; complex ones as pairs of real numbers, as torch.onnx has them."""
    tensor = tensor.detach()
    return TorchTensor(torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg())


def attach(graph: ir.Graph, held: Mapping[str, torch.Tensor], state: Iterable[str]) -> None:
    """Give the last inputs of a graph, one for each tensor, their data.

    What the model changes (`state`) stays an input as well, so that its new value can be given back; its data are the
    default. Tensors on the meta device have no data: they stay inputs.
    """
    kept = set(state)
    values = dict(zip(held, graph.inputs[len(graph.inputs) - len(held) :], strict=True))
    for name, value in values.items():
        if held[name].device.type == "meta":
            continue
        value.const_value = onnx_tensor(held[name])
        value.const_value.name = value.name
        if name not in kept:
            graph.inputs.remove(value)
        graph.register_initializer(value)


def save(model: ir.Model, path: str | os.PathLike[str], external_data: bool | None) -> None:
    """Write a model; with `external_data` its weights go to a file beside it. None: where they have to."""
    if external_data is None:
        tensors = [v.const_value for v in model.graph.initializers.values() if v.const_value is not None]
        external_data = sum(t.nbytes for t in tensors) > PROTO_LIMIT
    Path(path).unlink(missing_ok=True)
    ir.save(model, path, external_data=f"{Path(path).name}.data" if external_data else None)


IR_VERSION = 10
"""The first with `metadata_props` and value types in functions."""

_ANY_VERSION = 1


@dataclasses.dataclass
class Parts:
    """What the assembler needs beside the whole."""

    names: FunctionNames
    labels: Labels
    attributes: Callable[[Subgraph, CallSite], dict[str, Any]]
    """The ONNX attributes of a call."""
    sizes: SizeNames
    has_body: Callable[[Subgraph], bool]


class Assembler:
    """Builds the model. `functions` has the ONNX function of each piece; pieces with equal bodies share one."""

    def __init__(self, translated: ir.Model, whole: CombinedGraph, parts: Parts) -> None:
        self._translated, self._whole, self._parts = translated, whole, parts
        graph = translated.graph
        self._original: dict[torch.fx.Node, ir.Value] = {
            **dict(zip(whole.inputs, graph.inputs, strict=True)),
            **dict(zip(whole.outputs, graph.outputs, strict=True)),
        }
        self.functions: dict[Subgraph, ir.Function] = {}
        self.plugins: list[ir.Function] = []
        """Functions that are called, and left out of the model."""

    def model(self, input_names: Sequence[str], output_names: Sequence[str]) -> ir.Model:
        """The model, without the tensors that the main program holds: they are still among its inputs."""
        known: dict[Any, ir.Function] = {}
        for piece in self._whole.pieces:
            if piece.function is not None:
                self._add_function(piece, known)
        main = self._whole.main
        body = _Body(self, main)
        graph = body.graph
        self._parts.labels.write(main, graph)
        self._name_values(body, input_names, output_names)
        unique = list(dict.fromkeys(self.functions.values()))
        functions = [f for f in unique if not any(f is p for p in self.plugins)]
        self._import_domains([*unique, graph], graph)
        return ir.Model(graph, ir_version=IR_VERSION, producer_name="scopetrace", functions=functions)

    def _name_values(self, body: _Body, input_names: Sequence[str], output_names: Sequence[str]) -> None:
        held = list(body.piece.held)
        inputs = dict(zip(body.graph.inputs, [*input_names, *held], strict=True))
        self._parts.labels.name_values(body.graph, inputs, dict(zip(body.graph.outputs, output_names, strict=True)))

    def _add_function(self, piece: Subgraph, known: dict[Any, ir.Function]) -> None:
        """The function of a piece: one of a class with an equal body, or a new one."""
        function = piece.function
        body = _Body(self, piece)
        names = dict(zip(body.graph.inputs, (i.name for i in function.inputs), strict=True))
        what = function.identifier if piece.unknown else body_key(body.graph)
        key = (function.module_type, self._parts.names.base(function), what)
        if key in known:
            self.functions[piece] = _without_shapes(known[key])
            return
        forget_sizes_made_inside(body.graph)
        self._parts.labels.write(piece, body.graph)
        self._parts.labels.name_values(
            body.graph, names, dict(zip(body.graph.outputs, output_names(function.outputs), strict=True))
        )
        domain, name = self._parts.names.take(function)
        made = ir.Function(domain, name, graph=body.graph, attributes=[])
        known[key] = self.functions[piece] = made if piece.fits_all else _without_shapes(made)
        self._import_domains([body.graph], body.graph)
        if not self._parts.has_body(piece):
            self.plugins.append(made)

    def _import_domains(self, users: Iterable[Any], into: ir.Graph) -> None:
        for user in users:
            for node in ir.traversal.RecursiveGraphIterator(user):
                into.opset_imports[node.domain] = self._version(node.domain)
            if isinstance(user, ir.Function):
                into.opset_imports[user.domain] = self._version(user.domain)
                for domain in user.opset_imports:
                    into.opset_imports[domain] = self._version(domain)

    def _version(self, domain: str) -> int:
        return self._translated.graph.opset_imports.get(domain, _ANY_VERSION)

    # ---------------------------------------------------------------- used by bodies

    def cut_out(self, piece: Subgraph) -> tuple[ir.Graph, dict[torch.fx.Node, ir.Value]]:
        """A copy of a piece's nodes as a graph of its own, and its values by the nodes of the whole."""
        holes = [result for site in piece.sites for result in site.results]
        inputs = [*piece.inputs, *piece.held.values(), *piece.unknown, *holes]
        wanted = [x for x in (*piece.outputs, *(o for s in piece.sites for o in s.operands)) if x in self._original]
        outputs = [x for x in dict.fromkeys(wanted) if x.op != "placeholder"]
        read = [n for n in inputs if n in self._original] if outputs else []
        values = {n: self._parts.sizes.new_value(meta.value(n)) for n in inputs if n not in read}
        if outputs:
            graph = ir.convenience.extract(
                self._translated.graph, [self._original[n] for n in read], [self._original[n] for n in outputs]
            )
            values |= dict(zip([*read, *outputs], [*graph.inputs, *graph.outputs], strict=True))
            self._sort_constants(graph)
        else:
            graph = ir.Graph([], [], nodes=[])
        graph.name, graph.inputs[:], graph.outputs[:] = "main_graph", [], []
        graph.opset_imports.clear()
        graph.metadata_props.clear()
        return graph, values

    def _sort_constants(self, graph: ir.Graph) -> None:
        """In a fixed order: `extract` has them in a set."""
        order = {name: i for i, name in enumerate(self._translated.graph.initializers)}
        constants = sorted(graph.initializers.values(), key=lambda value: order[value.name or ""])
        graph.initializers.clear()
        for value in constants:
            graph.initializers.add(value)

    def call(self, piece: Subgraph, site: CallSite, inputs: list[ir.Value | None]) -> ir.Node:
        """The node of a call."""
        callee = self.functions[site.callee]
        attributes = self._parts.attributes(piece, site)
        for name, value in attributes.items():
            if name not in callee.attributes:
                callee.attributes.add(ir.Attr(name, ir.convenience.convert_attribute(name, value).type, None))
        node = ir.node(callee.name, inputs, attributes, domain=callee.domain, num_outputs=len(site.results))
        self._parts.labels.label_call(piece, site, node)
        return node


class _Body:
    """One piece as an ONNX graph: its inputs in order, its calls, its outputs in order."""

    def __init__(self, assembler: Assembler, piece: Subgraph) -> None:
        self.piece = piece
        self.graph, self._values = assembler.cut_out(piece)
        self._last_call: list[ir.Node] = []
        if piece.function is not None:
            self._initializers_to_constants()
        for site in piece.sites:
            self._insert_call(assembler, site)
        self._set_inputs()
        self._stand_for_unknown()
        self.graph.outputs.extend(self._outputs())
        self.graph.sort()

    def _initializers_to_constants(self) -> None:
        """Functions hold no initializers."""
        for value in list(self.graph.initializers.values()):
            assert value.const_value is not None
            self._replace(value, self._constant(value.const_value))
        self.graph.initializers.clear()

    def _constant(self, tensor: Any) -> ir.Value:
        node = ir.node("Constant", [], {"value": tensor})
        new = node.outputs[0]
        new.type, new.shape, new.const_value = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape), tensor
        self._prepend(node)
        return new

    def _prepend(self, node: ir.Node) -> None:
        if len(self.graph):
            self.graph.insert_before(self.graph[0], node)
        else:
            self.graph.append(node)

    def _replace(self, old: ir.Value, new: ir.Value) -> None:
        ir.convenience.replace_all_uses_with(old, new)
        for node, value in self._values.items():
            if value is old:
                self._values[node] = new

    def _insert_call(self, assembler: Assembler, site: CallSite) -> None:
        operands = iter(site.operands)
        inputs = [None if i.kind == "absent" else self._value(next(operands)) for i in site.callee.function.inputs]
        node = assembler.call(self.piece, site, inputs)
        before = [p for v in inputs if v is not None and (p := v.producer()) is not None] + self._last_call
        if before:  # in the order of the calls
            self.graph.insert_after(max(before, key=list(self.graph).index), node)
        else:
            self._prepend(node)
        self._last_call = [node]
        for result, new in zip(site.results, node.outputs, strict=True):
            hole = self._values[result]
            new.type, new.shape = hole.type, hole.shape
            self._replace(hole, new)

    def _value(self, x: Any) -> ir.Value:
        """The value of a node of the whole, or of a plain number."""
        return self._values[x] if isinstance(x, torch.fx.Node) else self._constant(ir.tensor(x))

    def _set_inputs(self) -> None:
        own = [self._values[n] for n in self.piece.inputs]
        if self.piece.function is None:
            self.graph.inputs[:] = [*own, *(self._values[n] for n in self.piece.held.values())]
            return
        for name, node in self.piece.held.items():  # a constant that the body holds
            self._replace(self._values[node], self._constant(onnx_tensor(self.piece.tensor(name))))
        given = iter(own)
        self.graph.inputs[:] = [ir.Value() if i.kind == "absent" else next(given) for i in self.piece.function.inputs]

    def _stand_for_unknown(self) -> None:
        """One node in the place of a body that is left out, so that its outputs come from somewhere."""
        if self.piece.unknown:
            node = ir.node("Unknown", self.graph.inputs, num_outputs=len(self.piece.unknown))
            self.graph.append(node)
            for placeholder, new in zip(self.piece.unknown, node.outputs, strict=True):
                old = self._values[placeholder]
                new.type, new.shape = old.type, old.shape
                self._values[placeholder] = new

    def _outputs(self) -> list[ir.Value]:
        """ONNX has no output that is an input, and no two that are the same value."""
        found: list[ir.Value] = []
        for x in self.piece.outputs:
            value = self._value(x)
            if value.producer() is None or any(value is other for other in found):
                node = ir.node("Identity", [value])
                node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
                self.graph.append(node)
                value = node.outputs[0]
            found.append(value)
        return found


def _without_shapes(function: ir.Function) -> ir.Function:
    """For a function that serves operands of several sizes, of which the values inside can say nothing."""
    for node in ir.traversal.RecursiveGraphIterator(function):
        for value in node.outputs:
            value.shape = None
    for value in function.inputs:
        value.shape = None
    return function


@dataclasses.dataclass
class Exported:
    """An ONNX model, and what it was made from."""

    model: ir.Model
    functions: list[ir.Function]
    """All functions, callees first, with those whose bodies the model leaves out."""
    plugins: list[ir.Function]
    """Those whose bodies it leaves out."""
    without_form: list[str]
    """The names of those whose bodies are not known in ONNX at all."""
    classes: dict[tuple[str, str], type | None]
    """By domain and name, the class of the modules that a function stands for."""
    results: Results
    expected_calls: Counter[type | None]
    """How often the trace calls the modules of each class that became functions."""

    def calls_in_file(self) -> Counter[tuple[str, str]]:
        """By domain and name, how often a run of the file calls each function."""
        bodies = {(f.domain, f.name): f for f in self.functions}

        def count(graph: Any) -> Counter[tuple[str, str]]:
            found: Counter[tuple[str, str]] = Counter()
            for node in ir.traversal.RecursiveGraphIterator(graph):
                key = (node.domain, node.op_type)
                if key in bodies:
                    found += Counter({key: 1}) + count(bodies[key])
            return found

        return count(self.model.graph)
