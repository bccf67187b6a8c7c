"""Do the graph, the scopes and the calls of a trace agree?"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.fx

from scopetrace import meta
from scopetrace.calls import ModuleCall
from scopetrace.errors import LintError
from scopetrace.graph import Program
from scopetrace.record.structure import leaves
from scopetrace.scopes import Scope


def lint(
    program: Program, graph_module: torch.fx.GraphModule, calls: list[ModuleCall], scopes: dict[str, Scope]
) -> None:
    """Raise LintError that lists every disagreement."""
    problems = [
        *_graph_problems(graph_module),
        *_node_problems(graph_module.graph, calls, scopes),
        *_call_problems(graph_module.graph, calls),
        *_boundary_problems(program, graph_module.graph),
    ]
    if problems:
        raise LintError("\n".join(problems))


def _graph_problems(graph_module: torch.fx.GraphModule) -> Iterator[str]:
    try:
        graph_module.graph.lint()
    except RuntimeError as error:
        yield f"graph: {str(error).splitlines()[0]}"


def _node_problems(graph: torch.fx.Graph, calls: list[ModuleCall], scopes: dict[str, Scope]) -> Iterator[str]:
    for node in graph.nodes:
        path, position = meta.scope_path(node), meta.call_position(node)
        if path is None and position is None:
            continue  # made by a pass of someone else
        if path not in scopes:
            yield f"{node.name}: its scope {path!r} is not in the trace"
        elif position is None or not 0 <= position < len(calls):
            yield f"{node.name}: its call {position} is not in the trace"
        elif calls[position].scope not in scopes[path].ancestors():
            yield f"{node.name}: its scope {path} is not inside its call's, {calls[position].scope}"
        if node.op in ("placeholder", "get_attr") and meta.value(node) is None:
            yield f"{node.name}: it has no meta['val']"


def _call_problems(graph: torch.fx.Graph, calls: list[ModuleCall]) -> Iterator[str]:
    order = {node: i for i, node in enumerate(graph.nodes)}
    seen: dict[int, int] = {}
    for call in calls:
        if call.module is not None:
            count = seen.get(id(call.module), 0)
            seen[id(call.module)] = count + 1
            if call.index != count:
                yield f"{call}: it is call number {count} of its module"
        for kind, structure in (("argument", call.arguments), ("output", call.outputs)):
            for node in leaves(structure, torch.fx.Node):
                if node not in order:
                    yield f"{call}: its {kind} {node.name} is not in the graph"
        first = min((order[n] for n in call.nodes if n.op != "get_attr" and n in order), default=None)
        for node in leaves(call.arguments, torch.fx.Node):
            if first is not None and order.get(node, -1) > first:
                yield f"{call}: its argument {node.name} is made after its first op"


def _boundary_problems(program: Program, graph: torch.fx.Graph) -> Iterator[str]:
    placeholders = sum(n.op == "placeholder" for n in graph.nodes)
    inputs = len(program.tape.inputs) + len(program.tape.numbers)
    if placeholders != inputs:
        yield f"the graph has {placeholders} placeholders for {inputs} inputs"
