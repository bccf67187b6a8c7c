"""Which op of the forward each op of a backward belongs to.

Data flow:
    an op makes nodes of autograd's graph -> their sequence numbers, from the first one on, are those of the op
    torch differentiates -> the node that runs says the op by its number -> `Phase`: call and scope of that op
    a sum of gradients that meet -> the op that made the tensor whose gradient it is
    the nodes that ran, in order -> `RecordedTape.backwards`
    an op of an optimizer, or between backward and optimizer -> `Phase("other")`
"""

from __future__ import annotations

import bisect
import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from scopetrace._compat.gradients import current_node, is_function, nodes_of, sequence_number
from scopetrace._compat.ops import in_transform, unwrapped
from scopetrace.ir.tape import BackwardNode, Op, Phase, Value, flat
from scopetrace.record.values import ValueTable

OTHER = Phase("other")


class PhaseRecorder:
    """Gives the ops of one recording their phases."""

    def __init__(self, values: ValueTable) -> None:
        self._builder, self._values = values.builder, values
        self._known: dict[tuple[int, str], Phase] = {}  # one for each place, by which the graph knows them
        self._ended: tuple[int, dict[int, Any]] | None = None
        """The number of the node that ended last, and by the id of each gradient that it gave, where that goes to."""
        self.seen: set[int] = set()
        """The storages of gradients that a `Function.backward` got or gave, which it may keep."""

    @contextlib.contextmanager
    def backward(
        self, outputs: Sequence[torch.Tensor], grad_outputs: Sequence[torch.Tensor | None], *, keeps_graph: bool
    ) -> Iterator[None]:
        """Inside, torch differentiates `outputs`; with `keeps_graph`, what led to them may be differentiated again."""
        ops, seeds = self._builder.tape.ops, {self._values.value_of(t).op for t in grad_outputs if t is not None}
        for i in range(max(0, len(ops) - len(grad_outputs)), len(ops)):
            if ops[i] in seeds and ops[i].target is torch.ops.aten.ones_like.default:
                ops[i] = ops[i].replace(phase=self.of_op(ops[i].tensor(0).op))
                ops[i].result.op = ops[i]
        self._builder.tape.backwards.append([])
        handles = [node.register_hook(self._on_end(node, keeps_graph=keeps_graph)) for node in nodes_of(outputs)]
        before, self._builder.phase = self._builder.phase, self._of_running_node
        try:
            yield
        finally:
            self._ended, self._builder.phase = None, before or self._between
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def of(self, phase: Phase) -> Iterator[None]:
        """Inside, all ops have this phase."""
        before, self._builder.phase = self._builder.phase, lambda *_: phase
        try:
            yield
        finally:
            self._builder.phase = before

    def of_op(self, op: Op) -> Phase:
        """The phase of what backward does with the gradient of a result of an op, such as to add it to `grad`."""
        if op.phase is not None and op.phase.name == "backward":
            return op.phase
        call = 0 if op.call is None else op.call.position
        return self._known.setdefault((call, op.scope.path), Phase("backward", call, op.scope))

    def _between(self, args: Any, outputs: Any) -> Phase | None:
        """After a backward: what is in no module and needs no gradient is no part of a forward."""
        call = self._builder.call
        inside = call is None or call.module is not None
        return None if inside or any(v.requires_grad for v in flat(outputs) if isinstance(v, Value)) else OTHER

    def _on_end(self, node: Any, *, keeps_graph: bool) -> Any:
        number, after, tape = sequence_number(node), node.next_functions, self._builder.tape
        op = None if hasattr(node, "variable") else self._maker_of(number)
        has_saved, is_python = number in self._builder.saving, is_function(node)

        def ended(grad_inputs: Any, grad_outputs: Any) -> None:
            if not keeps_graph:
                self._builder.differentiated.add(number)
            if isinstance(op, Op):
                freed = not (keeps_graph or in_transform())  # a transform frees the graph of its own level
                tape.backwards[-1].append(BackwardNode(op, len(tape.ops), has_saved, freed))
            if is_python:
                known = (self._values.by_id.get(id(t)) for t in (*grad_inputs, *grad_outputs))
                self.seen.update([v.storage for v in known if v is not None])
            pairs = zip(grad_inputs, after, strict=True)
            self._ended = number, {id(t): target for t, (target, _) in pairs if isinstance(t, torch.Tensor)}

        return ended

    def _of_running_node(self, args: Any, outputs: Any) -> Phase | None:
        node = current_node()
        if node is None:
            return self.of_op(self._builder.tape.ops[-1])
        if self._ended is not None and self._ended[0] == sequence_number(node):
            read = (id(v.fake) for v in flat(args) if isinstance(v, Value))
            node = next((self._ended[1][i] for i in read if i in self._ended[1]), node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            return self.of_op(self._values.value_of(unwrapped(leaf)).op)
        maker = self._maker_of(sequence_number(node))
        return maker if isinstance(maker, Phase) else self.of_op(maker or self._builder.tape.ops[-1])

    def _maker_of(self, number: int) -> Op | Phase | None:
        nodes = self._builder.made_nodes
        i = bisect.bisect_right(nodes, number, key=operator.itemgetter(0)) - 1
        return nodes[i][1] if i >= 0 else None
