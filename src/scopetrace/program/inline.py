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
    """The GraphModule that a node calls."""
    found = graph_module.get_submodule(str(node.target)) if node.op == "call_module" else None
    return found if isinstance(found, torch.fx.GraphModule) else None


def _append(graph: torch.fx.Graph, graph_module: torch.fx.GraphModule, prefix: str, given: Sequence[Any] | None) -> Any:
    """Append the nodes of a graph module, and return what it returns; `given` stands for its placeholders."""
    now: dict[torch.fx.Node, Any] = {}

    def present(x: Any) -> Any:
        return torch.fx.map_arg(x, lambda n: now[n])

    operands = None if given is None else iter(given)
    for node in graph_module.graph.nodes:
        called = _called(graph_module, node)
        if node.op == "output":
            return present(node.args[0])
        if node.op == "placeholder" and operands is not None:
            now[node] = next(operands)
        elif called is not None:
            args = (*node.args, *node.kwargs.values())
            now[node] = _append(graph, called, f"{prefix}{node.target}.", present(args))
        elif node.target is operator.getitem and not isinstance(now[node.args[0]], torch.fx.Node):
            now[node] = now[node.args[0]][node.args[1]]
        else:
            now[node] = graph.node_copy(node, lambda n: now[n])
            if node.op in ("get_attr", "call_module"):
                now[node].target = prefix + str(node.target)
    raise ValueError(f"the graph of {prefix or 'the graph module'} has no output node")
