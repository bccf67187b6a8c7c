"""What a program calls, in the place of the call: graphs of GraphModules, and regions.

Data flow:
    a node that calls a GraphModule -> the nodes of its graph, on its operands (`inlined`)
    an op of a region -> the ops of its body, on its operands, in the scopes and calls of the body (`without_regions`)
    all other nodes and ops -> copied, bodies of branches and loops too
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from scopetrace.functionalization.emitter import TapeRewriter
from scopetrace.ir.tape import BodyTape, FunctionalTape, Op, Tape, Value, values_in


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


# Regions, for what has no form for them: functions, ONNX, pipelines -------------------------------------------------

_REGIONS = (torch.ops.higher_order.tag_activation_checkpoint, torch.ops.higher_order.invoke_subgraph)
"""The ops whose body computes what the op gives, and how often is all that differs."""


def has_regions(tape: Tape) -> bool:
    """Whether a program has ops of regions, in bodies too."""
    return any(op.target in _REGIONS for inner in tape.walk() for op in inner.ops)


def without_regions(tape: FunctionalTape) -> FunctionalTape:
    """The program with the ops of its regions in their places."""
    return _Inliner(tape).run()


class _Inliner(TapeRewriter):
    def __init__(self, old: FunctionalTape | BodyTape, around: TapeRewriter | None = None) -> None:
        super().__init__(old, around)
        self._inlined: set[BodyTape] = around._inlined if isinstance(around, _Inliner) else set()
        self._depth = 0  # how many regions are around the op

    def step(self, op: Op) -> None:
        if op.target in _REGIONS:
            self._inline(op)
        elif op.kind != "placeholder" or not self._depth:
            self.copy(op)

    def _inline(self, op: Op) -> None:
        body = op.bodies()[0]
        operands = [a for a in op.args if type(a) is not BodyTape and not isinstance(a, str)]
        placeholders = [o.outputs for o in body.ops if o.kind == "placeholder"]
        pairs = zip(placeholders, operands, strict=True)
        self.replacements |= {p: self.replacements[x] for p, x in pairs if isinstance(p, Value)}
        is_first = body not in self._inlined  # a shared body has the calls of its first one
        self._inlined.add(body)
        calls = self.calls
        if not is_first:
            around = None if op.call is None else calls[op.call]
            inside: dict[Any, Any] = dict.fromkeys({o.call for o in body.ops if o.call is not None}, around)
            self.calls = calls | inside
        self._depth += 1
        self.append(body, body.calls if is_first else [])
        self._depth -= 1
        self.calls = calls
        for v, result in zip(op.values(), values_in(body.outputs), strict=True):
            self.replacements[v] = self.replacements[result]
