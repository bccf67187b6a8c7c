"""A program as a graph collection, which Model Explorer (https://ai.google.dev/edge/model-explorer) opens.

Data flow:
    Tree of sections -> a graph, and one for each body of a higher-order op
    op -> node: namespace from the sections around it, edges from the ops that it reads, types of its results
    section -> group: class, name, parameters, FLOPs

Its own adapter for ExportedPrograms merges calls of equal names and numbers outputs wrongly, so we write its JSON
ourselves; class Graph in its graph_builder.py is the schema.
"""

from __future__ import annotations

from typing import Any

import torch.fx

from scopetrace.containers.structure import leaves, leaves_with_path
from scopetrace.program.graph import FxLowering, named, node_value, type_text, typed
from scopetrace.program.traced import TracedProgram
from scopetrace.view.measures import Meter
from scopetrace.view.tree import Op, Section, Tree, source_line, target_text, value_text

_LONGEST = 300  # characters of an attribute


def graph_collection(program: TracedProgram) -> dict[str, Any]:
    """`{"label": ..., "graphs": [...]}`: the main graph first, then the bodies of higher-order ops."""
    tree, meter = Tree(program), Meter(program)
    main = _Graph("main", program.lowering, tree, meter)
    main.add(tree.root)
    return {"label": tree.root.path, "graphs": [main.data(tree.root), *main.inner]}


class _Graph:
    def __init__(self, name: str, lowering: FxLowering, tree: Tree, meter: Meter) -> None:
        self._name, self._lowering, self._tree, self._meter = name, lowering, tree, meter
        self._nodes = [_node(n.name, n.name, "") | _types([n]) for n in lowering.graph.find_nodes(op="placeholder")]
        self._groups: dict[str, dict[str, str]] = {}
        self.inner: list[dict[str, Any]] = []

    def add(self, section: Section, around: str = "") -> None:
        """Add the ops of a section, and those of the sections in it."""
        namespace = f"{around}/{section.label}" if around else section.label
        self._groups[namespace] = self._group(section)
        for item in section.items:
            if isinstance(item, Op):
                self._nodes.append(self._op(item, namespace))
            else:
                self.add(item, namespace)

    def data(self, root: Section) -> dict[str, Any]:
        """The graph, with a node for its results."""
        results = [(path, leaf) for path, leaf in leaves_with_path(root.outputs) if isinstance(leaf, torch.fx.Node)]
        output = _node("outputs of the graph", "output", "")
        output["incomingEdges"] = self._edges([node for _, node in results])
        output["attrs"] = _attributes({f"result{path}": named(node) for path, node in results})
        return {"id": self._name, "nodes": [*self._nodes, output], "groupNodeAttributes": self._groups}

    def _op(self, op: Op, namespace: str) -> dict[str, Any]:
        node = op.node
        facts = {str(i): value_text(x, named) for i, x in enumerate(node.args) if not isinstance(x, torch.fx.Node)}
        facts |= {key: value_text(x, named) for key, x in node.kwargs.items()}
        read = [str(n.target) for n in op.attributes if n not in self._tree.bodies]
        more = {"parameters": ", ".join(read), "source": source_line(node, self._lowering)}
        return _node(node.name, target_text(node), namespace) | {
            "incomingEdges": self._edges(node.all_input_nodes),
            **_types(op.results),
            "attrs": _attributes(facts | {key: text for key, text in more.items() if text}),
            "subgraphIds": [self._body(body) for body in op.bodies],
        }

    def _body(self, section: Section) -> str:
        assert section.lowering is not None
        graph = _Graph(section.name, section.lowering, self._tree, self._meter)
        graph.add(section)
        self.inner += [graph.data(section), *graph.inner]
        return section.name

    def _edges(self, nodes: list[torch.fx.Node]) -> list[dict[str, str]]:
        edges = []
        for position, node in enumerate(node for node in nodes if node.op != "get_attr"):
            op, slot = self._tree.ops.get(node, (None, 0))
            output = sorted(op.parts).index(slot) if op is not None and node is not op.node else 0
            source = node.name if op is None else op.node.name
            ids = {"sourceNodeId": source, "sourceNodeOutputId": str(output), "targetNodeInputId": str(position)}
            edges.append(ids)
        return edges

    def _group(self, section: Section) -> dict[str, str]:
        cost, call = self._meter.of(section), section.call
        facts = {"ops": f"{cost.ops:,}", "parameters": f"{cost.parameter_count:,}", "FLOPs": f"{cost.flops:,}"}
        if section.kind == "call" and call.module_type is not None:
            facts |= {"class": f"{call.module_type.__module__}.{call.module_type.__qualname__}", "name": call.fqn or ""}
            facts |= {
                f"argument {name}": value_text(x, typed, 8)[:_LONGEST]
                for name, x in call.argument_templates.items()
                if leaves(x, torch.fx.Node)
            }
        return facts


def _node(identifier: str, label: str, namespace: str) -> dict[str, Any]:
    return {"id": identifier, "label": label, "namespace": namespace, "incomingEdges": [], "attrs": []}


def _types(nodes: list[torch.fx.Node]) -> dict[str, Any]:
    outputs = [
        {"id": str(i), "attrs": _attributes({"tensor_shape": type_text(node_value(n)), "__tensor_tag": named(n)})}
        for i, n in enumerate(nodes)
        if node_value(n) is not None
    ]
    return {"outputsMetadata": outputs}


def _attributes(facts: dict[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": text[:_LONGEST]} for key, text in facts.items()]
