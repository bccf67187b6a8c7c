"""`lint`: checks that tape, graph, scopes and module calls of a program agree.

One generator for each subject yields a line of text for each disagreement; all lines become one LintError.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.fx

from scopetrace.containers.structure import leaves
from scopetrace.errors import InvalidTapeError, LintError
from scopetrace.ir.scopes import Scope
from scopetrace.ir.verify import verify
from scopetrace.program.graph import FxLowering, call_position, node_value, scope_path
from scopetrace.program.traced import ModuleCall, TracedProgram


def lint(program: TracedProgram) -> None:
    """Raise LintError that lists every disagreement between the tape, the graph, the scopes and the calls."""
    calls, problems = program.all_calls, list[str]()
    try:
        verify(program.tape, "tracing")
    except InvalidTapeError as error:
        problems.append(str(error))
    try:
        program.graph_module.graph.lint()
    except RuntimeError as error:
        problems.append(f"graph: {str(error).splitlines()[0]}")
    for inner in program.lowering.walk():
        problems += _node_problems(inner, calls, program.scopes)
        problems += _call_problems(inner.graph, [call for call in calls if call.lowering is inner])
    if problems:
        raise LintError("\n".join(problems))


def _node_problems(program: FxLowering, calls: list[ModuleCall], scopes: dict[str, Scope]) -> Iterator[str]:
    table = {call.record.position: call for call in calls}
    for node in program.graph.nodes:
        path, position = scope_path(node), call_position(node)
        if path is None and position is None:
            continue  # made by a user's pass
        if path not in scopes:
            yield f"{node.name}: its scope {path!r} is not in the trace"
        elif position not in table:
            yield f"{node.name}: its call {position} is not in the trace"
        elif table[position].scope not in scopes[path].ancestors():
            yield f"{node.name}: its scope {path} is not inside its call's, {table[position].scope}"
        if node.op in ("placeholder", "get_attr") and node_value(node) is None and node.target not in program.bodies:
            yield f"{node.name}: it has no meta['val']"


def _call_problems(graph: torch.fx.Graph, calls: list[ModuleCall]) -> Iterator[str]:
    order = {node: i for i, node in enumerate(graph.nodes)}
    for call in calls:
        for kind, structure in (("argument", call.argument_templates), ("output", call.output_template)):
            for node in leaves(structure, torch.fx.Node):
                if node not in order:
                    yield f"{call}: its {kind} {node.name} is not in the graph"
        first = min((order[n] for n in call.nodes if n.op != "get_attr" and n in order), default=None)
        for node in leaves(call.argument_templates, torch.fx.Node):
            if first is not None and order.get(node, -1) > first:
                yield f"{call}: its argument {node.name} is made after its first op"
