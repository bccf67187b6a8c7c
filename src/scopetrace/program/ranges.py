"""A graph as it runs under torch's profiler: with a range for each module call and user scope, in backward too.

Data flow:
    op of a node -> the scopes around it, root first, then those of the forward op that it is the backward of
    scopes of neighbours -> ranges that end, ranges that begin, before the node runs
"""

from __future__ import annotations

import itertools
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

    `switches`: with the nodes that switch autograd on or off.
    """

    def __init__(self, lowering: FxLowering, graph_module: torch.fx.GraphModule, *, switches: bool) -> None:
        super().__init__(graph_module)
        self._op_of, self._switches = lowering.op_of, switches
        self._calls = {call.position: call for tape in lowering.tape.walk() for call in tape.calls}
        self._open: list[tuple[Range, torch.profiler.record_function]] = []

    def __call__(self, *inputs: Any) -> Any:
        try:
            return self.run(*inputs)
        finally:
            self._enter([])

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run a node in the ranges of the module calls around it."""
        if n.target is set_grad_enabled and not self._switches:
            return None
        op = self._op_of.get(n)
        if op is not None and n.op in ("call_function", "call_module"):  # others take their values, or nothing
            self._enter([*_around(op, self._calls)])
        return super().run_node(n)

    def _enter(self, around: list[Range]) -> None:
        """End the ranges that are open and not among these, and begin the others."""
        pairs = zip(self._open, around, strict=False)
        depth = sum(1 for _ in itertools.takewhile(lambda pair: pair[0][0] == pair[1], pairs))
        while len(self._open) > depth:
            self._open.pop()[1].__exit__(None, None, None)
        for name, position in around[depth:]:
            self._open.append(((name, position), torch.profiler.record_function(name)))
            self._open[-1][1].__enter__()


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
