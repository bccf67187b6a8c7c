"""A simulation of FSDP2: when it gathers and frees groups, and whether each parameter is gathered when it is used.

The rules are those of `torch.distributed.fsdp.fully_shard` (torch 2.13): a group is gathered when the first of its
modules is called, and the groups of its prefetch list after it; it is freed when all its modules have run, the root's
group at the end. Backward goes through the forward passes of the groups in reverse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from scopetrace.distributed.groups import ROOT, Group, Grouping
from scopetrace.order.execution import CallUsage, ExecutionOrder

Prefetch = Mapping[Group, Sequence[Group]]


class Pass(NamedTuple):
    """A forward pass of a group: from the step that calls its first module to that in which its last one returns."""

    group: Group
    start: int
    stop: int


END = -1
"""The place of what is after all else."""


class Event(NamedTuple):
    """What happens to a group: an `all-gather` or a `reduce-scatter` is issued, ops `wait` for it, it is to `free`."""

    kind: str
    group: Group
    at: int
    """The step of the order in which it does; of a backward, see `Gradient.at`; END."""


class Schedule:
    """What FSDP2 does in one forward, up to the first use of a parameter that is not gathered.

    Attributes:
        events: what happens to groups, in order.
        passes: the passes in the order in which they end.
        missing: of the first use of a parameter that is not gathered, the group that has it, and the innermost one in
            whose pass it is used; None where there is none.
    """

    def __init__(self, order: ExecutionOrder, grouping: Grouping, prefetch: Prefetch) -> None:
        self.events: list[Event] = []
        self.passes: list[Pass] = []
        self.missing: tuple[Group, Group] | None = None
        self._grouping, self._prefetch = grouping, prefetch
        self._manager = {param: grouping.managers(param)[0] for param in order.param_first_use}
        self._gathered: set[Group] = set()
        self._ready: dict[Group, int] = {}  # by group, the step in which its pass began
        self._to_run: dict[Group, set[str | None]] = {}
        self._open: list[Group] = []  # the groups of the modules that are being called
        group_of = grouping.group_of()
        for i, step in enumerate(order.steps):
            call = order.calls[step.call]
            if step.kind == "call":
                self._read_arguments(call)
            self._use(step.params)
            if self.missing is not None:
                return
            module = None if call.direct or call.in_op else order.registered.module(call.fqn)
            group = group_of.get(module)
            if group is not None and step.kind == "call":
                self._enter(group, i)
            elif group is not None and step.kind == "return":
                self._leave(group, module, i)
        for group in [g for g in grouping.groups if g in self._ready]:  # modules of them never ran
            self._complete(group, len(order.steps) - 1)

    def _enter(self, group: Group, at: int) -> None:
        self._open.append(group)
        if not self._to_run.get(group):
            self._to_run[group] = set(group)
        begins = group not in self._ready
        for other in (group, *(self._prefetch.get(group, ()) if begins else ())):
            if other not in self._gathered:
                self._gathered.add(other)
                self.events.append(Event("all-gather", other, at))
        if begins:
            self._ready[group] = at
            self.events.append(Event("wait", group, at))

    def _leave(self, group: Group, module: str | None, at: int) -> None:
        self._open.pop()
        self._to_run[group].discard(module)
        if not self._to_run[group] and group in self._ready:
            self._complete(group, at)

    def _complete(self, group: Group, at: int) -> None:
        self.passes.append(Pass(group, self._ready.pop(group), at))
        if group != ROOT:
            self._gathered.discard(group)
            self.events.append(Event("free", group, at))

    def _read_arguments(self, call: CallUsage) -> None:
        """The parameters among a call's arguments are read before it.

        Tensors that replace parameters (`functional_call`) stay only where these are gathered already, since gathering
        assigns the parameters.
        """
        for param in call.replaced:
            group = self._grouping.managers(param)[0]
            if group != ROOT:
                self.missing = group, ROOT
        if self._open:
            self._use(name for name in call.param_arguments if name in self._manager)

    def _use(self, params: Iterable[str]) -> None:
        group = next((self._manager[param] for param in params if self._manager[param] not in self._ready), None)
        if group is not None:
            self.missing = group, next(g for g in reversed(self._open) if g in self._ready)


class Gradient(NamedTuple):
    """What FSDP2's hooks see in a backward."""

    kind: str
    """As `GradientStep.kind`: `result` and `arguments` of a pass, or `again` for a module that runs again."""
    group: Group
    number: int
    """The number of the pass; of `again`, -1."""
    at: int
    """The step of the forward that it mirrors; in a backward that was traced, the ops of the trace before it."""


def gradients(order: ExecutionOrder, grouping: Grouping, passes: Sequence[Pass]) -> list[Gradient]:
    """What the hooks see in order: in the backward of a traced training step, else in the forward passes in reverse."""
    if not order.backwards:
        ends = [(-p.stop, 0, -i) for i, p in enumerate(passes)]
        mirrored = sorted([*ends, *((-p.start, 1, -i) for i, p in enumerate(passes))])
        return [Gradient(("result", "arguments")[kind], passes[-i].group, -i, -at) for at, kind, i in mirrored]
    group_of = grouping.group_of()
    begins = {step.call: at for at, step in enumerate(order.steps) if step.kind == "call"}
    returns = {step.call: at for at, step in enumerate(order.steps) if step.kind == "return"}
    running = {p.group for p in passes}
    seen: list[Gradient] = []
    for kind, call, at in order.backwards[0]:
        if kind == "again":
            group = group_of.get(order.registered.module(order.calls[call].fqn))
            seen += [Gradient(kind, group, -1, at)] if group in running else []
            continue
        hooked = [p.start == begins[call] if kind == "arguments" else p.stop == returns[call] for p in passes]
        seen += [Gradient(kind, passes[i].group, i, at) for i, is_hooked in enumerate(hooked) if is_hooked]
    return seen


def backward_events(
    hooks: Iterable[Gradient], passes: Sequence[Pass], forward: Prefetch, backward: Prefetch
) -> Iterator[Event]:
    """What happens in a backward in order, each with the `Gradient.at` at which it does.

    `passes` are those of groups with parameters. A group without a backward prefetch list prefetches the group whose
    forward pass ended before its own, which is FSDP2's default. Groups without a last gradient are reduced at the end.
    """
    gathered, active, begun = {ROOT}, set[Group](), set[Group]()
    running: dict[Group, None] = {}
    left: dict[Group, list[int]] = {}
    for number, p in enumerate(passes):
        left.setdefault(p.group, []).append(number)
    for kind, group, _, at in hooks:
        if kind == "arguments":
            active.discard(group)
            gathered -= {group} - {ROOT}
            running.pop(group, None)
            yield Event("reduce-scatter", group, at)
            continue
        ahead = () if group in begun else forward.get(group, ())
        if kind == "result":
            ahead = backward.get(group, ())
            if not ahead and group not in active and left[group]:
                before = left[group].pop() - 1
                ahead = (passes[before].group,) if before >= 0 else ()
            active.add(group)
            begun.add(group)
        for other in (group, *ahead):
            if other not in gathered:
                gathered.add(other)
                yield Event("all-gather", other, at)
        running[group] = None
        yield Event("wait", group, at)
    yield from (Event("reduce-scatter", group, END) for group in running)
