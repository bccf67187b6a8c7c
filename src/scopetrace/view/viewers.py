"""A program as files of other viewers: Model Explorer (https://ai.google.dev/edge/model-explorer), and a timeline.

Data flow:
    Box -> a graph, and one for each body of a higher-order op
    box of an op -> node: namespace from the boxes around it, edges from its inputs, types of its outputs
    any other box -> group: what `to_html` says of it, and its arguments
    ops as they ran -> Tree: sections and ops -> one event each; an op takes a microsecond, since a trace has no times
    Memory -> a counter of the bytes in use

The timeline has the trace event format, which Perfetto and chrome://tracing open. For Model Explorer, a program is a
graph collection. Its own adapter for ExportedPrograms merges calls of equal names and numbers outputs wrongly, so we
write its JSON ourselves; class Graph in its graph_builder.py is the schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.fx

from scopetrace.program.graph import named
from scopetrace.program.traced import TracedProgram
from scopetrace.view.boxes import Box, Port
from scopetrace.view.html import facts_of
from scopetrace.view.measures import Meter
from scopetrace.view.memory import Memory
from scopetrace.view.text import op_line
from scopetrace.view.tree import OpItem, Section, Tree

_LONGEST = 300  # characters of an attribute


def graph_collection(root: Box) -> dict[str, Any]:
    """`{"label": ..., "graphs": [...]}`: the main graph first, then the bodies of higher-order ops."""
    graphs: list[dict[str, Any]] = []
    _Graph("main", root, graphs)
    return {"label": root.key, "graphs": graphs}


class _Graph:
    """A graph, which is appended to `graphs`, and after it those of the bodies in it."""

    def __init__(self, name: str, root: Box, graphs: list[dict[str, Any]]) -> None:
        self._nodes: list[dict[str, Any]] = []
        self._groups: dict[str, dict[str, str]] = {}
        self._graphs = graphs
        self._makers: dict[torch.fx.Node, tuple[str, int]] = {}  # by value, the node that gives it, and which output
        graphs.append({"id": name, "nodes": self._nodes, "groupNodeAttributes": self._groups})
        for port in root.inputs:
            self._add({"id": port.node.name, "label": port.name, "namespace": ""}, [], [port], {})
        self._box(root, "")
        results = {port.name: named(port.node) for port in root.outputs}
        self._add({"id": "outputs of the graph", "label": "output", "namespace": ""}, root.outputs, [], results)

    def _box(self, box: Box, around: str) -> None:
        if box.kind == "op":
            parameters = ", ".join(port.name for port in box.parameters)
            node: dict[str, Any] = {"id": box.name, "label": box.label, "namespace": around}
            node["subgraphIds"] = [body.label for body in box.children]
            facts = {"op": box.text, "parameters": parameters, "source": box.source}
            self._add(node, box.inputs, box.outputs, facts)
            for body in box.children:
                _Graph(body.label, body, self._graphs)
            return
        if box.kind != "run":  # the members of a run are groups of their own
            around = f"{around}/{box.label}" if around else box.label
            arguments = {f"argument {port.name}": port.type for port in box.inputs}
            self._groups[around] = dict(facts_of(box)) | arguments
        for child in box.children:
            self._box(child, around)

    def _add(self, node: dict[str, Any], inputs: list[Port], outputs: list[Port], facts: dict[str, str]) -> None:
        edges = [(str(i), *self._makers[port.node]) for i, port in enumerate(inputs) if port.node in self._makers]
        node["incomingEdges"] = [
            {"sourceNodeId": maker, "sourceNodeOutputId": str(output), "targetNodeInputId": i}
            for i, maker, output in edges
        ]
        node["outputsMetadata"] = [
            {"id": str(i), "attrs": _attributes({"tensor_shape": port.type, "__tensor_tag": port.name})}
            for i, port in enumerate(outputs)
        ]
        node["attrs"] = _attributes(facts)
        self._makers |= {port.node: (node["id"], i) for i, port in enumerate(outputs)}
        self._nodes.append(node)


def _attributes(facts: dict[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": text[:_LONGEST]} for key, text in facts.items() if text]


def chrome_trace(program: TracedProgram) -> dict[str, Any]:
    """`{"traceEvents": [...]}`; the time of an op is its number in microseconds."""
    program = program.with_tape(program.as_run)
    tree, meter = Tree(program), Meter(program)
    return {"traceEvents": [*_events(tree.root, meter), *_memory(tree, program)], "displayTimeUnit": "ns"}


def _events(section: Section, meter: Meter) -> Iterator[dict[str, Any]]:
    cost = meter.of(section)
    sizes = {"flops": cost.flops, "activation bytes": cost.activation_bytes}
    if isinstance(section, OpItem):
        yield _event(section.label, section.first, 1, {"op": op_line(section, named), **sizes})
    else:
        facts = {"path": section.path, "ops": cost.ops, "parameters": cost.parameters, **sizes}
        yield _event(section.label, section.first, section.op_count, facts)
    for item in section.items:
        yield from _events(item, meter)


def _event(name: str, start: int, length: int, facts: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "X", "pid": 0, "tid": 0, "ts": start, "dur": length, "args": facts}


def _memory(tree: Tree, program: TracedProgram) -> Iterator[dict[str, Any]]:
    """The bytes in use while each op runs, with those of ops just before it whose results nobody reads."""
    ops = {program.lowering.op_of.get(op.node): op for op, _ in tree.ops.values()}
    most = 0
    for ran, in_use in zip(program.tape.ops, Memory(program).timeline, strict=True):
        most = max(most, in_use)
        if ran in ops:
            yield {"name": "memory", "ph": "C", "pid": 0, "ts": ops[ran].first, "args": {"bytes": most}}
            most = 0
