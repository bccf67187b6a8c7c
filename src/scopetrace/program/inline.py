"""The graph of a GraphModule with the graphs of the GraphModules that it calls in place of the calls."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch.fx


def inlined(graph_module: torch.fx.GraphModule) -> torch.fx.Graph:
    """The graph itself where no node calls a GraphModule, else a new one, whose targets are paths from the outermost.

    `torch.fx.passes.split_module` and partitioners make such calls. Nodes keep their names and meta.
    """
    if not any(_called(graph_module, node) is not None for node in graph_module.graph.nodes):
        return graph_module.graph
    graph = torch.fx.Graph()
    graph.output(_append(graph, graph_module, "", None))
    graph.output_node().meta = dict(graph_module.graph.output_node().meta)
    return graph


def _called(graph_module: torch.fx.GraphModule, node: torch.fx.Node) -> torch.fx.GraphModule | None:
    module = graph_module.get_submodule(str(node.target)) if node.op == "call_module" else None
    return module if isinstance(module, torch.fx.GraphModule) else None


def _append(graph: torch.fx.Graph, module: torch.fx.GraphModule, prefix: str, inputs: Sequence[Any] | None) -> Any:
    """Append the nodes of a graph module, and return what it returns; `inputs` stand for its placeholders."""
    copies: dict[torch.fx.Node, Any] = {}
    operands = None if inputs is None else iter(inputs)
    for node in module.graph.nodes:
        called = _called(module, node)
        if node.op == "output":
            return torch.fx.map_arg(node.args[0], copies.__getitem__)
        if node.op == "placeholder" and operands is not None:
            copies[node] = next(operands)
        elif called is not None:
            args = torch.fx.map_arg((*node.args, *node.kwargs.values()), copies.__getitem__)
            copies[node] = _append(graph, called, f"{prefix}{node.target}.", args)
        elif node.target is operator.getitem and not isinstance(copies[node.args[0]], torch.fx.Node):
            copies[node] = copies[node.args[0]][node.args[1]]
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op in ("get_attr", "call_module"):
                copies[node].target = prefix + str(node.target)
    raise ValueError(f"the graph of {prefix or 'the graph module'} has no output node")
