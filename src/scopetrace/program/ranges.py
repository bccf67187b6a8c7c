"""A graph as it runs under torch's profiler: with a range for each module call and user scope, in backward too.

Data flow:
    op of a node -> the scopes around it, root first, then those of the forward op that it is the backward of
    scopes of neighbours -> ranges that end, ranges that begin, before the node runs
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch.fx

from scopetrace._compat.graph_module import set_grad_enabled
from scopetrace.ir.scopes import Scope
from scopetrace.ir.tape import Call, Op
from scopetrace.program.graph import FxLowering

Range = tuple[str, int]
"""The name, and the position of the module call that it is a part of: two calls in a row are two ranges."""


class RangedRun(torch.fx.Interpreter):
    """One run of the graph of a GraphModule, which names the module calls to the profiler that is active.

    A range is a `record_function`, and a call of a module for a profiler with stacks: TensorBoard lists those.
    `switches`: with the nodes that switch autograd on or off.
    """

    def __init__(self, lowering: FxLowering, graph_module: torch.fx.GraphModule, *, switches: bool) -> None:
        super().__init__(graph_module)
        self._module_shown_as = lowering.module_shown_as
        calls = {call.position: call for tape in lowering.tape.walk() for call in tape.calls}
        self._left: deque[tuple[torch.fx.Node, list[Range] | None]] = deque()
        """Nodes that did not run yet, with the ranges around them; None where they take values, or do nothing."""
        for node in self.graph.nodes:
            op = lowering.op_of.get(node) if node.op in ("call_function", "call_module") else None
            if switches or node.target is not set_grad_enabled:
                self._left.append((node, None if op is None else [*_around(op, calls)]))

    def __call__(self, *inputs: Any) -> Any:
        self.args_iter = iter(inputs)
        self._run_inside([])
        return self.env[self.graph.output_node()]

    def _run_inside(self, outer: list[Range]) -> None:
        """Run the nodes that are left, up to the first that is not in these ranges."""
        depth = len(outer)
        while self._left:
            node, around = self._left[0]
            if around is not None and around[:depth] != outer:
                return
            if around is None or len(around) == depth:
                self._left.popleft()
                self.env[node] = self.run_node(node)
                for value in self.user_to_last_uses.get(node, ()):
                    del self.env[value]
            else:
                name, inner = around[depth][0], around[: depth + 1]
                with torch.profiler.record_function(name):
                    self._module_shown_as(name)(self._run_inside, inner)


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
