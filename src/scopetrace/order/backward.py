"""What happens to the module calls of a training step while it differentiates.

Data flow:
    nodes of autograd's graph that ran, in order, each with the op of the forward that made it
    -> the gradient of a call's result is known when the node of the op that made it begins
    -> those of its arguments are known when the last node of its ops that read them has run
    -> a checkpointed region runs again before the first of its nodes that has saved tensors
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterator, Mapping

from scopetrace.containers.structure import leaves
from scopetrace.ir.tape import BackwardNode, Call, ProgramTape, RecordedTape, Value
from scopetrace.order.execution import GradientStep


def gradient_steps(tape: ProgramTape, numbers: Mapping[Call, int]) -> tuple[tuple[GradientStep, ...], ...]:
    """For each backward of a RecordedTape what happens in it, in order; `numbers` are the indices of the calls."""
    if not isinstance(tape, RecordedTape) or not tape.backwards:
        return ()
    position = {value: i for i, op in enumerate(tape.ops) for value in op.values()}
    return tuple(_Backward(tape, nodes, position).steps(numbers) for nodes in tape.backwards)


_At = tuple[int, int, tuple[int, int]]
"""When something happens: the number of the node before which it does; first what is at the arguments of calls, then at
results, then regions that run again; of arguments the call that began last first, of results that which ended first."""


class _Backward:
    """One backward. Ops of the forward are given by their positions."""

    def __init__(self, tape: RecordedTape, nodes: list[BackwardNode], position: Mapping[Value, int]) -> None:
        self._tape = tape
        self._nodes = nodes
        self._position = position
        self._op_of = [max((position[v] for v in node.op.values() if v in position), default=-1) for node in nodes]
        self._last = {op: n for n, op in enumerate(self._op_of)}
        self._reached = sorted(self._last)
        self._first = {op: n for n, op in reversed([*enumerate(self._op_of)])}

    def steps(self, numbers: Mapping[Call, int]) -> tuple[GradientStep, ...]:
        """What happens, in order."""
        steps = [(at, kind, call) for call in self._tape.calls for at, kind in self._of_call(call)]
        steps += [(at, "again", call) for region in self._tape.checkpointed for at, call in self._again(*region)]
        steps.sort(key=operator.itemgetter(0))
        return tuple(GradientStep(kind, numbers[call], self._ops_before(at[0])) for at, kind, call in steps)

    def _ops_before(self, node: int) -> int:
        if node:
            return self._nodes[node - 1].stop
        return next((i for i, op in enumerate(self._tape.ops) if op.phase is not None), len(self._tape.ops))

    def _of_call(self, call: Call) -> Iterator[tuple[_At, str]]:
        arguments = {v for v in leaves((call.args, call.kwargs), Value) if v.requires_grad}
        first, stop = (bisect.bisect_left(self._reached, i) for i in (call.start, call.stop))
        reached = self._reached[first:stop]
        reads_arguments = any(not arguments.isdisjoint(self._tape.ops[i].inputs()) for i in reached)
        passed = 1 + max(self._last[i] for i in reached) if reads_arguments else None
        for v in dict.fromkeys(leaves(call.outputs, Value)):
            node = self._first.get(self._position[v])
            if node is not None and v in arguments:  # an argument that is given back
                passed = node if passed is None else passed
                yield (passed, 0, (-call.position, 0)), "result"
            elif node is not None and v.requires_grad:
                yield (node, 1, (call.stop, -len(list(call.ancestors())))), "result"
        if passed is not None:
            yield (passed, 0, (-call.position, 1)), "arguments"

    def _again(self, start: int, stop: int) -> Iterator[tuple[_At, Call]]:
        first = next(
            (n for n, node in enumerate(self._nodes) if node.has_saved and start <= self._op_of[n] < stop), None
        )
        for call in self._tape.calls:
            if first is not None and start <= call.start < stop and call.stop <= stop:
                yield (first, 2, (call.position, 0)), call
