"""The execution order of a recorded tape: of its forward, and of what happens to the calls while it differentiates.

Data flow:
    ops -> one walk, which notes for each module call what its ops read -> steps of the calls
    nodes of autograd's graph that ran, in order, each with the op of the forward that made it
    -> the gradient of a call's result is known when the node of the op that made it begins
    -> those of its arguments are known when the last node of its ops that read them has run
    -> a checkpointed region runs again before the first of its nodes that has saved tensors
"""

from __future__ import annotations

import bisect
import collections
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence

from scopetrace.containers.structure import leaves
from scopetrace.ir.registered import Registered
from scopetrace.ir.tape import BackwardNode, Call, Op, ProgramTape, RecordedTape, Tape, Value, values_in
from scopetrace.ops.higher_order import FORMS
from scopetrace.order.execution import CallUsage, ExecutionOrder, GradientStep, OrderBuilder


def execution_order(tape: ProgramTape) -> ExecutionOrder:
    """The execution order of a RecordedTape, mutations included. Of a training step, that of its forward."""
    reader, params = _Reader(tape.registered, _writers(tape)), _Params()
    reader.read(tape, params)
    reader.use(tape.calls[0], [v for v in leaves(tape.outputs, Value) if v in params.names], params)
    changed = {v.storage for part in tape.walk() for op in part.ops if op.phase is None for v in op.writes}
    written = dict.fromkeys(name for value, name in params.names.items() if value.storage in changed)
    if not isinstance(tape, RecordedTape) or not tape.backwards:
        return reader.building.order(tuple(written))
    position = {value: i for i, op in enumerate(tape.ops) for value in op.values()}
    backwards = tuple(_Backward(tape, nodes, position).steps(reader.numbers) for nodes in tape.backwards)
    return reader.building.order(tuple(written), backwards)


def _writers(tape: ProgramTape) -> set[Call]:
    """The calls that change an argument in place that requires grad."""
    writers: set[Call] = set()
    for op in [op for part in tape.walk() for op in part.ops if op.writes]:
        storages = {v.storage for v in op.writes}
        for call in op.call.ancestors() if op.call is not None else ():
            if any(v.requires_grad and v.storage in storages for v in values_in((call.args, call.kwargs))):
                writers.add(call)
    return writers


class _Params:
    """The parameters that values of a tape are, or are views of."""

    def __init__(self) -> None:
        self.names: dict[Value, str] = {}
        self._by_storage: dict[int, list[str]] = {}

    def add(self, value: Value, name: str) -> None:
        self.names[value] = name
        self._by_storage.setdefault(value.storage, []).append(name)

    def of(self, value: Value) -> list[str]:
        """The parameter that a value is, or those that share its storage."""
        return [self.names[value]] if value in self.names else self._by_storage.get(value.storage, [])


class _Reader:
    """Collects the steps of each call in one walk over the ops."""

    def __init__(self, registered: Registered, writers: set[Call]) -> None:
        self.registered = registered
        self.building = OrderBuilder(registered)
        self._writers = writers
        self.numbers: dict[Call, int] = {}
        """The index of each call; of one in a body of two ops, which is walked twice, the last."""
        self._used: list[str] = []
        self._bodies = 0  # how many bodies the walk is inside of

    def read(self, tape: Tape, params: _Params) -> None:
        """Walk over the ops of a tape; for a body, `params` has its placeholders."""
        coming = collections.deque(tape.calls)
        for i, op in enumerate(tape.ops):
            while coming and coming[0].start <= i:
                self._begin(coming.popleft(), params)
            self._op(op, params)
        for call in coming:
            self._begin(call, params)

    def _begin(self, call: Call, params: _Params) -> None:
        if not call.is_module:
            self.numbers[call] = self.numbers[call.of_module]
            return
        parent = None if call.parent is None else self.numbers[call.parent]
        arguments = [params.names[v] for v in values_in((call.args, call.kwargs)) if v in params.names]
        replaced = map(self.registered.param, call.replaced)
        usage = CallUsage(
            call.fqn,
            0,
            call.module_type.__name__ if call.module_type else call.scope.type_name or "function",
            parent,
            direct=call.direct,
            raised=call.raised is not None,
            param_arguments=tuple(dict.fromkeys(arguments)),
            replaced=tuple(name for name in replaced if name is not None),
            in_op=self._bodies > 0,
            writes_input=call in self._writers,
        )
        key = id(call.module) if call.fqn is None else self.registered.module(call.fqn)
        self.numbers[call] = self.building.begin(key, usage)

    def _op(self, op: Op, params: _Params) -> None:
        if op.kind == "get_attr":
            name = self.registered.param(op.name)
            if name is not None:
                params.add(op.result, name)
        elif op.bodies():
            self._higher_order(op, params)
        elif op.kind != "placeholder" and op.phase is None:
            of_leaf = self.registered.inside(op.name) if op.kind == "call_module" else []
            self.use(op.call, op.inputs(), params, of_leaf)

    def use(self, call: Call | None, values: Iterable[Value], params: _Params, also: Sequence[str] = ()) -> None:
        """Note that an op reads these values.

        Parameters count; views of parameters count unless the op before used the parameter, to make the view.
        """
        if call is None:
            return
        steps = self.building.steps[self.numbers[call]]
        before = steps[-1] if steps and isinstance(steps[-1], tuple) else ()
        names = [name for v in values for name in params.of(v) if v in params.names or name not in before]
        used = tuple(dict.fromkeys([*names, *also]))
        if used:
            steps.append(used)
            self._used += used

    def _higher_order(self, op: Op, params: _Params) -> None:
        """Walk over the bodies of an op; operands that no body uses count as used by the op."""
        start = len(self._used)
        form = FORMS[op.target]
        args = form.gathered(op.args)
        operands = [x for i in form.operands for x in args[i]]
        for body in op.bodies() if form.takes_all else op.bodies()[:1]:
            inside = _Params()
            for inner, x in zip([o for o in body.ops if o.kind == "placeholder"], operands, strict=False):
                for name in params.of(x) if isinstance(x, Value) else ():
                    inside.add(inner.result, name)
            self._bodies += 1
            self.read(body, inside)
            self._bodies -= 1
        used = self._used[start:]
        self.use(op.call, [v for v in op.inputs() if not set(params.of(v)) <= set(used)], params)


# Backward ------------------------------------------------------------------------------------------------------------


_At = tuple[int, int, tuple[int, int]]
"""When something happens: the number of the node before which it does; first what is at the arguments of calls, then at
results, then regions that run again; of arguments the call that began last first, of results that which ended first."""


class _Backward:
    """One backward. Ops of the forward are given by their positions."""

    def __init__(self, tape: RecordedTape, nodes: list[BackwardNode], position: Mapping[Value, int]) -> None:
        self._tape = tape
        self._calls = [call for call in tape.calls if call.is_module]
        self._nodes = nodes
        self._position = position
        self._op_of = [max((position[v] for v in node.op.values() if v in position), default=-1) for node in nodes]
        self._last = {op: n for n, op in enumerate(self._op_of)}
        self._reached = sorted(self._last)
        self._first = {op: n for n, op in reversed([*enumerate(self._op_of)])}

    def steps(self, numbers: Mapping[Call, int]) -> tuple[GradientStep, ...]:
        steps = [(at, kind, call) for call in self._calls for at, kind in self._of_call(call)]
        steps += [(at, "again", call) for region in self._tape.checkpointed for at, call in self._again(*region)]
        steps.sort(key=operator.itemgetter(0))
        before = next((i for i, op in enumerate(self._tape.ops) if op.phase is not None), len(self._tape.ops))
        ops = [before, *(node.stop for node in self._nodes)]  # by number of nodes, the ops that run before
        return tuple(GradientStep(kind, numbers[call], ops[at[0]]) for at, kind, call in steps)

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
        for call in self._calls:
            if first is not None and start <= call.start < stop and call.stop <= stop:
                yield (first, 2, (call.position, 0)), call
