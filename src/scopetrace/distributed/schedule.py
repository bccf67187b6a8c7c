"""A simulation of FSDP2: when it gathers and frees groups, and whether each parameter is gathered when it is used.

The rules are those of `torch.distributed.fsdp.fully_shard` (torch 2.13): a group is gathered when the first of its
modules is called, and the groups of its prefetch list after it; it is freed when all its modules have run, the root's
group at the end. Backward goes through the forward passes of the groups in reverse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from scopetrace.distributed.groups import ROOT, Group, Grouping
from scopetrace.order.execution import CallUsage, ExecutionOrder

Prefetch = Mapping[Group, Sequence[Group]]


class Pass(NamedTuple):
    """A forward pass of a group: from the step that calls its first module to that in which its last one returns."""

    group: Group
    start: int
    stop: int


@dataclasses.dataclass(repr=False)
class Schedule:
    """What FSDP2 does in one forward."""

    gathers: list[tuple[Group, int]] = dataclasses.field(default_factory=list)
    """The all-gathers in order, each with the step that issues it."""
    passes: list[Pass] = dataclasses.field(default_factory=list)
    """The passes in the order in which they end."""
    missing: tuple[Group, Group] | None = None
    """Of the first use of a parameter that is not gathered: the group that has it, and the innermost one in whose pass
    it is used."""

    def __repr__(self) -> str:
        return f"<Schedule: {len(self.gathers)} all-gathers, {len(self.passes)} passes>"


def forward_schedule(order: ExecutionOrder, grouping: Grouping, prefetch: Prefetch) -> Schedule:
    """Simulate the steps of a forward, up to the first use of a parameter that is not gathered."""
    return _Forward(order, grouping, prefetch).run()


class _Forward:
    def __init__(self, order: ExecutionOrder, grouping: Grouping, prefetch: Prefetch) -> None:
        self.order = order
        self.grouping = grouping
        self.prefetch = prefetch
        self.group_of = grouping.group_of()
        self.manager = {param: grouping.managers(param)[0] for param in order.param_first_use}
        self.gathered: set[Group] = set()
        self.ready: dict[Group, int] = {}  # by group, the step in which its pass began
        self.to_run: dict[Group, set[str | None]] = {}
        self.open: list[Group] = []  # the groups of the modules that are being called
        self.schedule = Schedule()

    def run(self) -> Schedule:
        for i, step in enumerate(self.order.steps):
            call = self.order.calls[step.call]
            if step.kind == "call":
                self._arguments(call)
            self._use(step.params)
            if self.schedule.missing is not None:
                return self.schedule
            module = None if call.direct or call.in_op else self.order.registered.module(call.fqn)
            group = self.group_of.get(module)
            if group is not None and step.kind == "call":
                self._enter(group, i)
            elif group is not None and step.kind == "return":
                self._leave(group, module, i)
        for group in [g for g in self.grouping.groups if g in self.ready]:  # modules of them never ran
            self._complete(group, len(self.order.steps) - 1)
        return self.schedule

    def _gather(self, group: Group, at: int) -> None:
        if group not in self.gathered:
            self.gathered.add(group)
            self.schedule.gathers.append((group, at))

    def _enter(self, group: Group, at: int) -> None:
        self.open.append(group)
        self._gather(group, at)
        if not self.to_run.get(group):
            self.to_run[group] = set(group)
        if group not in self.ready:
            self.ready[group] = at
            for other in self.prefetch.get(group, ()):
                self._gather(other, at)

    def _leave(self, group: Group, module: str | None, at: int) -> None:
        self.open.pop()
        self.to_run[group].discard(module)
        if not self.to_run[group] and group in self.ready:
            self._complete(group, at)

    def _complete(self, group: Group, at: int) -> None:
        self.schedule.passes.append(Pass(group, self.ready.pop(group), at))
        if group != ROOT:
            self.gathered.discard(group)

    def _arguments(self, call: CallUsage) -> None:
        """The parameters among a call's arguments are read before it.

        Tensors that replace parameters (`functional_call`) stay only where these are gathered already, since gathering
        assigns the parameters.
        """
        for param in call.replaced:
            group = self.grouping.managers(param)[0]
            if group != ROOT:
                self.schedule.missing = group, ROOT
        if self.open:
            self._use(name for name in call.param_arguments if name in self.manager)

    def _use(self, params: Iterable[str]) -> None:
        group = next((self.manager[param] for param in params if self.manager[param] not in self.ready), None)
        if group is not None:
            self.schedule.missing = group, next(g for g in reversed(self.open) if g in self.ready)


class BackwardEvent(NamedTuple):
    """What FSDP2's hooks see in a backward."""

    kind: str
    """As `GradientStep.kind`: `result` and `arguments` of a pass, or `again` for a module that runs again."""
    group: Group
    number: int
    """The number of the pass; of `again`, -1."""
    at: int
    """The step of the forward that it mirrors; in a backward that was traced, the ops of the trace before it."""


def backward_events(order: ExecutionOrder, grouping: Grouping, passes: Sequence[Pass]) -> list[BackwardEvent]:
    """The events of a backward in order: that of a traced training step, else the forward passes in reverse."""
    if not order.backwards:
        ends = [(p.stop, "result", i) for i, p in enumerate(passes)]
        mirrored = sorted([*ends, *((p.start, "arguments", i) for i, p in enumerate(passes))], key=_latest_first)
        return [BackwardEvent(kind, passes[i].group, i, at) for at, kind, i in mirrored]
    group_of = grouping.group_of()
    begins = {step.call: at for at, step in enumerate(order.steps) if step.kind == "call"}
    returns = {step.call: at for at, step in enumerate(order.steps) if step.kind == "return"}
    running = {p.group for p in passes}
    events: list[BackwardEvent] = []
    for kind, call, at in order.backwards[0]:
        if kind == "again":
            group = group_of.get(order.registered.module(order.calls[call].fqn))
            events += [BackwardEvent(kind, group, -1, at)] if group in running else []
            continue
        hooked = [p.start == begins[call] if kind == "arguments" else p.stop == returns[call] for p in passes]
        events += [BackwardEvent(kind, passes[i].group, i, at) for i, is_hooked in enumerate(hooked) if is_hooked]
    return events


def _latest_first(event: tuple[int, str, int]) -> tuple[int, bool, int]:
    at, kind, number = event
    return -at, kind != "result", -number


class BackwardSchedule:
    """What FSDP2 does in one backward.

    Attributes:
        gathers: the all-gathers in order, each with the `BackwardEvent.at` that issues it.
    """

    def __init__(
        self, events: Sequence[BackwardEvent], passes: Sequence[Pass], forward: Prefetch, backward: Prefetch
    ) -> None:
        """Simulate the backward of some passes, those of groups with parameters.

        A group without a backward prefetch list prefetches the group whose forward pass ended before its own, which is
        FSDP2's default.
        """
        self.gathers: list[tuple[Group, int]] = []
        self._prefetch = backward
        self._passes = passes
        self._gathered = {ROOT}
        self._active: set[Group] = set()
        self._begun: set[Group] = set()
        self._left: dict[Group, list[int]] = {}
        for number, p in enumerate(passes):
            self._left.setdefault(p.group, []).append(number)
        for event in events:
            if event.kind == "result":
                self._begin(event)
            elif event.kind == "again":
                ahead = () if event.group in self._begun else forward.get(event.group, ())
                self._gather((event.group, *ahead), event.at)
            else:
                self._active.discard(event.group)
                self._gathered -= {event.group} - {ROOT}

    def _begin(self, event: BackwardEvent) -> None:
        group = event.group
        ahead = self._prefetch.get(group, ())
        if not ahead and group not in self._active and self._left[group]:
            before = self._left[group].pop() - 1
            ahead = (self._passes[before].group,) if before >= 0 else ()
        self._active.add(group)
        self._begun.add(group)
        self._gather((group, *ahead), event.at)

    def _gather(self, groups: Iterable[Group], at: int) -> None:
        for group in groups:
            if group not in self._gathered:
                self._gathered.add(group)
                self.gathers.append((group, at))
