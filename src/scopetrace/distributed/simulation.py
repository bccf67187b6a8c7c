"""An estimate of a plan's cost on many ranks: memory of a rank, and communication that computation does not hide.

Data flow:
    trace -> FLOPs up to each step of the order: the times of a forward; a backward takes twice as long, or as long as
    its ops where it was traced
    plan -> its events: the steps at which all-gathers are issued and needed, and parameters are freed
    both -> one link that transfers one group after the other, one processor that waits for what it needs

The model is simple on purpose: full bandwidth for each transfer, no contention for memory, and a processor that issues
a collective only when it arrives at it. It shows which groups the processor waits for and how long, not how long a step
takes on a real cluster.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from scopetrace.api.runnable import program_of
from scopetrace.api.trace import Trace
from scopetrace.distributed.costs import op_flops, op_results
from scopetrace.distributed.groups import ROOT, Group
from scopetrace.distributed.planning import Plan, ShardGroup, call_of, order_of
from scopetrace.distributed.schedule import END, Event
from scopetrace.errors import PlanError
from scopetrace.formatting import Printed, amount, columns, duration


class Transfer(NamedTuple):
    """A collective on the link, with times in seconds from the beginning of the step."""

    kind: str
    """`all-gather` or `reduce-scatter`."""
    group: Group
    nbytes: int
    """Bytes that a rank receives or sends, padding included."""
    issued: float
    start: float
    stop: float


@dataclasses.dataclass(frozen=True, repr=False)
class Simulation(Printed):
    """One training step of one rank. `print(simulation)`."""

    ranks: int
    transfers: tuple[Transfer, ...]
    """The transfers in order."""
    compute: float
    """Seconds of computation, forward and backward."""
    exposed_forward: float
    """Seconds in which the forward waits for parameters."""
    exposed_backward: float
    """Seconds in which the backward waits for parameters, and the step for the last gradients."""
    memory: Mapping[str, int]
    """Bytes of memory of a rank, by purpose."""
    padding: float
    """The fraction of the gathered bytes that is padding: FSDP2 pads each parameter to equal rows on all ranks."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.compute + self.exposed_forward + self.exposed_backward

    def __str__(self) -> str:
        rows = [("memory of a rank", ""), *((what, amount(n, "B")) for what, n in self.memory.items())]
        rows.append(("in all", amount(sum(self.memory.values()), "B")))
        gathered = sum(t.nbytes for t in self.transfers)
        exposed = self.exposed_forward + self.exposed_backward
        return "\n".join(
            [
                columns(rows),
                "",
                f"{len(self.transfers)} collectives, {amount(gathered, 'B')} for each of {self.ranks} ranks, "
                f"{self.padding:.1%} of it padding",
                f"step {duration(self.seconds)}: computation {duration(self.compute)}, exposed communication "
                f"{duration(exposed)} ({duration(self.exposed_forward)} forward, "
                f"{duration(self.exposed_backward)} backward)",
            ]
        )

    def __repr__(self) -> str:
        return f"<Simulation on {self.ranks} ranks: step {duration(self.seconds)}>"


def simulate(
    plan: Plan,
    tr: Trace,
    *,
    ranks: int,
    bandwidth: float,
    flops: float,
    latency: float = 0.0,
    param_dtype: torch.dtype | None = None,
    optimizer_bytes: int = 8,
) -> Simulation:
    """Simulate one training step under a plan, with parameters sharded over `ranks`.

    Args:
        plan: what `plan` gave for the trace's order.
        tr: the trace, with the sizes of one rank's batch.
        ranks: number of ranks that share the parameters.
        bandwidth: bytes per second that a rank receives in an all-gather, and sends in a reduce-scatter.
        flops: floating-point operations per second of a rank.
        latency: seconds that a collective takes in addition to its transfer.
        param_dtype: dtype of gathered parameters and reduced gradients, as in `MixedPrecisionPolicy`; None: their own.
        optimizer_bytes: bytes of optimizer state per element; 8 for Adam in float32.

    Raises PlanError for a plan of another order, or sizes that are not positive.
    """
    order = order_of(plan.model, tr.order).without(plan.ignored)
    if (difference := order.first_difference(plan.order)) is not None:
        raise PlanError(f"the plan is of another order: {difference}")
    for name, number in (("ranks", ranks), ("bandwidth", bandwidth), ("flops", flops)):
        if number <= 0:
            raise PlanError(f"{name}={number} must be positive")
    shards = {g.modules: _shards(plan, g, ranks) for g in plan.groups}
    sizes = {
        group: sum(ranks * rows * width * (param_dtype or dtype).itemsize for rows, width, dtype in parts)
        for group, parts in shards.items()
    }
    rank = _Rank(flops, bandwidth * ranks / max(ranks - 1, 1), latency, sizes)
    before, before_backward = _flops(tr, plan)
    forward = rank.run([*plan.events[0], Event("wait", ROOT, END)], before)
    backward = rank.run([*plan.events[1], Event("end", ROOT, END)], before_backward)
    params = [plan.order.registered.params[name] for group in plan.groups for name in group.params]
    exact = sum(torch.Size(p.shape).numel() * (param_dtype or p.dtype).itemsize for p in params)
    padding = 1 - exact / max(sum(sizes.values()), 1)
    memory = _memory(plan, tr, [*itertools.chain(*shards.values())], sizes, optimizer_bytes)
    return Simulation(ranks, tuple(rank.transfers), rank.done / flops, forward, backward, memory, padding)


Shard = tuple[int, int, torch.dtype]
"""The part of a parameter that a rank has: its rows, elements of a row, dtype. Dimension 0 is sharded, with padding."""


def _shards(plan: Plan, group: ShardGroup, ranks: int) -> list[Shard]:
    params = [plan.order.registered.params[name] for name in group.params]
    return [(-(-p.shape[0] // ranks), torch.Size(p.shape[1:]).numel(), p.dtype) for p in params]


def _memory(
    plan: Plan, tr: Trace, shards: Iterable[Shard], sizes: Mapping[Group, int], optimizer_bytes: int
) -> dict[str, int]:
    owned = sum(rows * width * dtype.itemsize for rows, width, dtype in shards)
    gathered = ({"all-gather": 1, "free": -1}.get(e.kind, 0) * sizes[e.group] for e in plan.events[0])
    return {
        "sharded parameters": owned,
        "sharded gradients": owned,
        "optimizer": sum(rows * width * optimizer_bytes for rows, width, _ in shards),
        "gathered parameters, at most": max(itertools.accumulate(gathered, initial=0)),
        "gradients of a group, at most": max(sizes.values(), default=0),
        "results of ops, without recomputation": sum(op_results(op) for op in program_of(tr).tape.ops if not op.phase),
    }


# ---------------------------------------------------------------- time


def _flops(tr: Trace, plan: Plan) -> tuple[list[int], list[int]]:
    """The FLOPs of all ops before each `Event.at` of a forward, and of its backward; at END those of all."""
    program = program_of(tr)
    tape = program.recorded if plan.order.backwards else program.tape
    at_op = [0, *itertools.accumulate(op_flops(tape))]
    first = call_of(plan.model, tr.order)
    calls = [tape.calls[call.record.position] for call in tr.calls[first:]]
    before: list[int] = []
    for step in plan.order.steps:
        flops = before[-1] if before else 0
        if step.kind != "use" and step.call < len(calls):
            call = calls[step.call]
            flops = max(flops, at_op[call.start if step.kind == "call" else call.stop])
        before.append(flops)
    if not plan.order.backwards:
        return before, [*(3 * before[-1] - 2 * flops for flops in before), 3 * before[-1]]
    ends = [i for i, op in enumerate(tape.ops, 1) if op.phase is not None and op.phase.name == "backward"]
    return before, at_op[: ends[-1] + 1]


class _Rank:
    """The processor and the link of a rank, which does one transfer after the other. The step begins at time 0."""

    def __init__(self, flops: float, bandwidth: float, latency: float, sizes: Mapping[Group, int]) -> None:
        self.transfers: list[Transfer] = []
        self.done = 0  # FLOPs of the processor
        self._flops, self._bandwidth, self._latency, self._sizes = flops, bandwidth, latency, sizes
        self._arrives: dict[Group, float] = {}  # when the last transfer of a group is done
        self._free = 0.0  # when all are
        self._time = 0.0

    def run(self, events: Iterable[Event], before: Sequence[int]) -> float:
        """Compute up to each event, at the `end` until all transfers are done. The seconds waited."""
        exposed = 0.0
        places = itertools.groupby(events, operator.attrgetter("at"))
        # At one place, all is issued before any is awaited.
        for kind, group, at in (e for _, es in places for e in sorted(es, key=lambda e: e.kind != "all-gather")):
            self._time += max(before[at] - self.done, 0) / self._flops
            self.done = max(before[at], self.done)
            if kind in ("wait", "end"):
                arrives = self._free if kind == "end" else self._arrives.get(group, 0.0)
                exposed += max(arrives - self._time, 0.0)
                self._time = max(arrives, self._time)
            elif kind != "free":
                start = max(self._free, self._time)
                self._free = self._arrives[group] = start + self._latency + self._sizes[group] / self._bandwidth
                self.transfers.append(Transfer(kind, group, self._sizes[group], self._time, start, self._free))
            if kind == "reduce-scatter":  # which frees the group's parameters
                del self._arrives[group]
        return exposed
