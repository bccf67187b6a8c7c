"""A graph as it runs under torch's profiler: with a range for each module call and user scope, in backward too.

Data flow:
    op of a node -> the scopes around it, root first, then those of the forward op that it is the backward of
    scopes of neighbours -> ranges that end, ranges that begin: one more node there -> the code of a graph with these
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch.fx

from scopetrace._compat.graph_module import method_of, set_grad_enabled, without_grad_switches
from scopetrace.ir.scopes import Scope
from scopetrace.ir.tape import Call, Op
from scopetrace.program.graph import FxLowering

Range = tuple[str, int]
"""The name, and the position of the module call that it is a part of: two calls in a row are two ranges."""


def _change(opened: list[torch.profiler.record_function], depth: int, names: tuple[str, ...]) -> None:
    """End all but the outer `depth` of the ranges that are open while a graph runs, and begin others."""
    while len(opened) > depth:
        opened.pop().__exit__(None, None, None)
    for name in names:
        opened.append(torch.profiler.record_function(name))
        opened[-1].__enter__()


def graph_variant(
    lowering: FxLowering, graph_module: torch.fx.GraphModule, *, ranges: bool, switches: bool
) -> Callable[..., Any]:
    """What runs the graph of a GraphModule: naming the module calls to the profiler that is active, with `ranges`.

    `switches`: with the nodes that switch autograd on or off.
    """
    if not ranges:
        return method_of(without_grad_switches(graph_module.graph), graph_module)
    calls = {call.position: call for tape in lowering.tape.walk() for call in tape.calls}
    graph, copies, current = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node](), list[Range]()
    names = [str(node.target) for node in graph_module.graph.nodes if node.op == "placeholder"]
    opened = graph.placeholder(f"{max(names, key=len, default='ranges')}_")  # which no other input is called
    for node in graph_module.graph.nodes:
        if node.target is set_grad_enabled and not switches:
            continue
        op = lowering.op_of.get(node)
        if op is not None and node.op in ("call_function", "call_module"):  # others take their values, or nothing
            around = list(_around(op, calls))
            pairs = zip(current, around, strict=False)
            depth = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            if current != around:
                graph.call_function(_change, (opened, depth, tuple([name for name, _ in around[depth:]])))
            current = around
        copies[node] = graph.node_copy(node, copies.__getitem__)
    run = method_of(graph, graph_module)

    def run_with_ranges(*inputs: Any) -> Any:
        ranges: list[torch.profiler.record_function] = []
        try:
            return run(ranges, *inputs)
        finally:
            _change(ranges, 0, ())

    return run_with_ranges


def _around(op: Op, calls: dict[int, Call]) -> Iterator[Range]:
    yield from _path(op.scope, op.call, "")
    if op.phase is not None and op.phase.scope is not None:
        kind = " recomputed" if op.phase.recomputed else " backward"
        (root, position), *inner = _path(op.phase.scope, calls.get(op.phase.call), kind)
        yield from ((root.removesuffix(kind) + " backward", position), *inner)  # one range of all that backward does


def _path(scope: Scope, call: Call | None, kind: str) -> Iterator[Range]:
    """The scopes from the root to `scope`, with the positions of the calls that they are in."""
    positions = {} if call is None else {c.scope.path: c.position for c in call.ancestors()}
    position = 0
    for outer in reversed(list(scope.ancestors())):
        position = positions.get(outer.path, position)
        yield outer.path + kind, position
