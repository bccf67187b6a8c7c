"""The translated graph cut apart again: bodies become ONNX functions, the main program gets call nodes and weights.

Data flow:
    nodes between a subgraph's inputs and outputs -> a graph of its own, with call nodes in place of its call sites
    bodies with equal keys -> one ONNX function; names do not count in a key
    tensors of the model -> inputs of the main graph, for `weights.attach`
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
import torch.fx

from scopetrace.lower.onnx.combine import CallSite, CombinedGraph, Operand, Results, Subgraph
from scopetrace.lower.onnx.naming import (
    SITE,
    Home,
    SizeNames,
    forget_inner_sizes,
    function_name,
    label_nodes,
    name_values,
    output_names,
)
from scopetrace.lower.onnx.weights import identity, onnx_tensor
from scopetrace.outline.signature import unique_names
from scopetrace.program.graph import node_value
from scopetrace.program.outlined import Function


def body_key(graph: ir.Graph) -> bytes:
    """A key that is equal for graphs with equal nodes, edges, attributes, constants, input types and input ranks.

    Names, sizes and metadata do not count.
    """
    graph = graph.clone()
    ranks = [None if value.shape is None else ir.Shape([None] * len(value.shape)) for value in graph.inputs]
    for node in graph.all_nodes():
        node.name = None
        node.metadata_props.clear()
    computed = [value for node in graph.all_nodes() for value in node.outputs]
    of_bodies = [value for body in graph.subgraphs() for value in body.inputs]
    for i, value in enumerate((*graph.inputs, *computed, *of_bodies)):
        value.name, value.shape = f"value_{i}", ranks[i] if i < len(ranks) else None
        value.metadata_props.clear()
    return ir.to_proto(graph).SerializeToString(deterministic=True)


Attributes = Callable[[Subgraph, CallSite, Container[str]], dict[str, Any]]
"""Gives the ONNX attributes of a call, among them those with names that the function reads."""


def refer(graph: ir.Graph, attributes: Mapping[str, Any]) -> set[str]:
    """Let nodes read the attributes of their function, in place of equal numbers; gives the names that are read."""
    names = set()
    for node in graph.all_nodes():
        for attribute in list(node.attributes.values()):
            key, number = attribute.name, attribute.value
            if node.op_type == "Constant" and key == "value" and number.dtype == ir.DataType.FLOAT and number.size == 1:
                key, number = ("value_float", number.numpy().item()) if not number.shape.rank() else (key, None)
            equal = [name for name, value in attributes.items() if _is_number(number, value)]
            if equal:
                name = key if key in equal else equal[0]
                del node.attributes[attribute.name]
                kind = ir.AttributeType.FLOAT if isinstance(number, float) else ir.AttributeType.INT
                node.attributes.add(ir.RefAttr(key, name, kind))
                names.add(name)
    return names


def _is_number(x: Any, attribute: Any) -> bool:
    """Whether a number of an ONNX node is that of a module's attribute, which may have more digits."""
    if type(x) is float and type(attribute) is float:
        return torch.tensor(x, dtype=torch.float32).equal(torch.tensor(attribute, dtype=torch.float32))
    return type(x) is int and type(attribute) is int and x == attribute


@dataclasses.dataclass
class Assembler:
    """Builds the model."""

    translated: torch.onnx.ONNXProgram
    combined: CombinedGraph
    sizes: SizeNames
    attributes: Attributes
    by_reference: Sequence[str]
    """The names of attributes that bodies read from their calls."""
    flat: bool
    """The functions are to be inlined at last: they are not shared by calls of other sizes, and not labelled."""
    functions: dict[Subgraph, ir.Function] = dataclasses.field(default_factory=dict)
    """By subgraph, its ONNX function; subgraphs with equal bodies share one."""
    plugins: list[ir.Function] = dataclasses.field(default_factory=list)
    """Functions that are called, and whose bodies the model leaves out."""

    def __post_init__(self) -> None:
        self._read: dict[ir.Function, set[str]] = {}
        self._unique = unique_names(first=2)  # distinct functions of one class are `Name`, `Name_2`, …
        self._graph = self.translated.model.graph
        assert self.translated.exported_program is not None
        self.sources = {node.name: node for node in self.translated.exported_program.graph.nodes}
        self._original: dict[torch.fx.Node, ir.Value] = {
            **dict(zip(self.combined.graph.find_nodes(op="placeholder"), self._graph.inputs, strict=True)),
            **dict(zip(self.combined.outputs, self._graph.outputs, strict=True)),
        }

    def model(self, input_names: Sequence[str], output_names: Sequence[str]) -> ir.Model:
        """The model. Parameters, buffers and constants are still its last inputs: see `attach`."""
        known: dict[Hashable, ir.Function] = {}
        for subgraph in self.combined.subgraphs:
            if subgraph.function is not None:
                self._add_function(subgraph, subgraph.function, known)
        main = self.combined.main
        graph = self._body(main)
        if not self.flat:
            label_nodes(graph, main, self.sources)
        name_values(graph, [*input_names, *main.held], output_names)
        functions = list(dict.fromkeys(self.functions.values()))
        self._import_domains(graph, functions)
        return ir.Model(
            graph,
            ir_version=10,  # the first with `metadata_props` and value types in functions
            producer_name="scopetrace",
            producer_version=sys.modules["scopetrace"].__version__,
            functions=[f for f in functions if f not in self.plugins],
        )

    def _add_function(self, subgraph: Subgraph, function: Function, known: dict[Hashable, ir.Function]) -> None:
        """The function of a subgraph: that of a subgraph of the same class with an equal body, or a new one."""
        graph = self._body(subgraph)
        same = {n: v for n, v in function.calls[0].attributes.items() if n in self.by_reference}
        same = {n: v for n, v in same.items() if all(call.attributes.get(n) == v for call in function.calls)}
        read = refer(graph, same)
        what = function.identifier if subgraph.unknown or self.flat else body_key(graph)
        whole_name = function_name(function)
        key = (function.module_type, whole_name, function.label, what)
        if key in known:
            self.functions[subgraph] = _without_shapes(known[key])
            return
        forget_inner_sizes(graph)
        if not self.flat:
            label_nodes(graph, subgraph, self.sources)
            name_values(graph, [i.name for i in function.inputs], output_names(function.outputs))
        domain, _, name = self._unique(whole_name).partition("::")
        new = ir.Function(domain, name, graph=graph, attributes=[])
        self._read[new] = read
        known[key] = self.functions[subgraph] = new if subgraph.fits_all else _without_shapes(new)
        self._import_domains(graph)
        if function.label.is_plugin:
            self.plugins.append(new)

    def _import_domains(self, graph: ir.Graph, functions: Sequence[ir.Function] = ()) -> None:
        domains = ["", *(domain for f in functions for domain in (*f.opset_imports, f.domain))]
        domains += [node.domain for node in graph.all_nodes()]
        graph.opset_imports.update({domain: self._graph.opset_imports.get(domain, 1) for domain in domains})

    def _body(self, subgraph: Subgraph) -> ir.Graph:
        leaving = [*subgraph.outputs, *(x for site in subgraph.sites for x in site.operands)]
        graph, values = self._cut_out(subgraph, leaving)
        # What replaces a value does so among the outputs, too; those behind the subgraph's own are operands of calls.
        graph.outputs[:] = [
            values[x] if isinstance(x, torch.fx.Node) else _constant(graph, ir.tensor(x)) for x in leaving
        ]
        if subgraph.function is None:
            graph.inputs[:] = [values[n] for n in (*subgraph.inputs, *subgraph.held.values())]
        else:
            inputs = (values[n] for n in subgraph.inputs)
            graph.inputs[:] = [ir.Value() if i.kind == "absent" else next(inputs) for i in subgraph.function.inputs]
            _to_constants(graph, {values[n]: subgraph.tensor(name) for name, n in subgraph.held.items()})
        self._insert_calls(graph, subgraph, values)
        for i, value in enumerate(graph.outputs):  # ONNX allows no outputs that are inputs or equal to another
            if value.producer() is None or value in graph.outputs[:i]:
                graph.outputs[i] = identity(graph, value)
        graph.sort()
        return graph

    def _cut_out(
        self, subgraph: Subgraph, leaving: Sequence[Operand]
    ) -> tuple[ir.Graph, dict[torch.fx.Node, ir.Value]]:
        """A copy of a subgraph without inputs and outputs, and its values by the nodes of the combined graph."""
        holes = [result for site in subgraph.sites for result in site.results]
        inputs = [*subgraph.inputs, *subgraph.held.values(), *subgraph.unknown, *holes]
        outputs = [x for x in dict.fromkeys(leaving) if isinstance(x, torch.fx.Node) and x.op != "placeholder"]
        read = [n for n in inputs if n in self._original] if outputs else []
        values = {n: self.sizes.new_value(node_value(n)) for n in inputs if n not in read}
        if outputs:
            graph = ir.convenience.extract(
                self._graph, [self._original[n] for n in read], [self._original[n] for n in outputs]
            )
            values |= dict(zip([*read, *outputs], [*graph.inputs, *graph.outputs], strict=True))
            constants = dict(graph.initializers)  # in the order of a set
            graph.initializers.clear()
            graph.initializers.update({name: constants[name] for name in self._graph.initializers if name in constants})
        else:
            graph = ir.Graph([], [], nodes=[])
        graph.name, graph.inputs[:], graph.outputs[:] = "main_graph", [], []
        graph.opset_imports.clear()
        graph.metadata_props.clear()
        return graph, values

    def _insert_calls(self, graph: ir.Graph, subgraph: Subgraph, values: Mapping[torch.fx.Node, ir.Value]) -> None:
        """Append the call nodes in the order of their sites, and remove their operands from the outputs."""
        start = len(subgraph.outputs)
        for site in subgraph.sites:
            operands = iter(graph.outputs[start : start + len(site.operands)])
            del graph.outputs[start : start + len(site.operands)]
            inputs = [None if i.kind == "absent" else next(operands) for i in site.function.inputs]
            node = self._call(subgraph, site, inputs)
            graph.append(node)
            for result, new in zip(site.results, node.outputs, strict=True):
                hole = values[result]
                new.type, new.shape = hole.type, hole.shape
                hole.replace_all_uses_with(new, replace_graph_outputs=True)

    def _call(self, subgraph: Subgraph, site: CallSite, inputs: list[ir.Value | None]) -> ir.Node:
        callee = self.functions[site.callee]
        attributes = self.attributes(subgraph, site, self._read[callee])
        for name, value in attributes.items():
            if name not in callee.attributes:
                callee.attributes.add(ir.Attr(name, ir.convenience.convert_attribute(name, value).type, None))
        node = ir.node(callee.name, inputs, attributes, domain=callee.domain, num_outputs=len(site.results))
        if self.flat:
            node.metadata_props[SITE] = str(subgraph.sites.index(site))
            for output, named in zip(node.outputs, callee.outputs, strict=True):
                output.name = named.name
        else:
            Home.of(subgraph.function).label(node, site.node, f"{node.domain}::{node.op_type}")
        return node


def _to_constants(graph: ir.Graph, held: Mapping[ir.Value, torch.Tensor]) -> None:
    """Make Constant nodes of initializers, which ONNX functions and graphs in them do not have, and lifted tensors."""
    for inner in (graph, *graph.subgraphs()):
        for value in list(inner.initializers.values()):
            value.replace_all_uses_with(_constant(inner, value.const_value), replace_graph_outputs=True)
        inner.initializers.clear()
    for value, tensor in held.items():
        value.replace_all_uses_with(_constant(graph, onnx_tensor(tensor)), replace_graph_outputs=True)


def _constant(graph: ir.Graph, tensor: Any) -> ir.Value:
    node = ir.node("Constant", [], {"value": tensor})
    new = node.outputs[0]
    new.type, new.shape, new.const_value = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape), tensor
    graph.append(node)  # all are sorted in the end
    return new


def _without_shapes(function: ir.Function) -> ir.Function:
    """The function without shapes in it, since its calls have operands of different sizes."""
    for value in (*function.inputs, *(output for node in function.all_nodes() for output in node.outputs)):
        value.shape = None
    return function


@dataclasses.dataclass
class Exported:
    """An ONNX model, its functions, and what `verify` needs to know of the trace."""

    model: ir.Model
    functions: list[ir.Function]
    """All functions of module calls, callees first, plugins too."""
    op_functions: list[ir.Function]
    """Those of ops, plugins too."""
    plugins: list[ir.Function]
    """The functions whose bodies the model leaves out."""
    without_form: list[str]
    """The names of plugins whose bodies have no ONNX form."""
    results: Results
    weight_inputs: list[torch.Tensor]
    """The weights that are inputs, in the order of these after those of the model."""
    retained: list[torch.Tensor]
    """Those of them that are outputs as well, in the order of these after those of the model."""
    without_data: set[str]
    """The names of the initializers of which only references are written."""
    error: float | None = None
    """The largest absolute error against the model, relative above 1; None where it was not verified."""

    def calls_in_file(self) -> Counter[tuple[str, str]]:
        """By domain and name, how often one run of the model calls each function."""
        bodies = {(f.domain, f.name): f for f in self.functions}

        def count(graph: ir.Graph | ir.Function) -> Counter[tuple[str, str]]:
            calls = Counter((n.domain, n.op_type) for n in graph.all_nodes() if (n.domain, n.op_type) in bodies)
            return sum((count(bodies[key]) for key in calls.elements()), calls)

        return count(self.model.graph)
