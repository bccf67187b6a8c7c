"""When two translated bodies are the same function: equal nodes, wiring, attributes, constants; names do not count."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import onnx_ir as ir


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
