"""`CheckpointPlan`: which module calls to checkpoint, so that a training step fits into a number of bytes.

Data flow:
    storages of a step, from the op that makes them to their last use -> bytes in use at each op -> the peak
    a call checkpointed: what it makes and only its own backward reads is freed at its end, and made again then
    while the peak is over the budget: of the calls that lower it, checkpoint the one with most bytes for a FLOP
    where none does: a call that makes too much again at once gives way to those inside it
"""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections.abc import Iterator

import torch

from scopetrace._compat.gradients import apply_activation_checkpointing
from scopetrace.containers.structure import leaves
from scopetrace.errors import ArgumentError
from scopetrace.formatting import amount
from scopetrace.ir.tape import Call, Tape, Value
from scopetrace.program.traced import ModuleCall, TracedProgram
from scopetrace.view.measures import Meter
from scopetrace.view.memory import Recomputed, Storage, forward_calls, gradients_among, storages_of, timeline_of


@dataclasses.dataclass(frozen=True)
class CheckpointPlan:
    """The modules of a model whose forward is run again in backward. `apply` wraps them."""

    fqns: tuple[str, ...]
    """Their names in the trace, in the order of execution."""
    peak_bytes: int
    """The most that is in use at one time with it, as `Memory.peak_bytes`."""
    peak_bytes_before: int
    """Without it."""
    flops: int
    """What is computed twice, as `torch.utils.flop_counter` counts."""
    modules: tuple[torch.nn.Module, ...] = dataclasses.field(repr=False)

    def apply(self, model: torch.nn.Module) -> None:
        """Wrap the modules in torch's CheckpointWrapper, without reentrant autograd; names in `state_dict` stay.

        Raises ArgumentError for a model that has not all of them.
        """
        known = set(map(id, model.modules()))
        missing = [fqn for fqn, module in zip(self.fqns, self.modules, strict=True) if id(module) not in known]
        if missing:
            raise ArgumentError(f"{missing[0]} is no module of this model: give the one that the traced step calls")
        chosen = set(map(id, self.modules))
        apply_activation_checkpointing(model, check_fn=lambda module: id(module) in chosen)

    def __str__(self) -> str:
        peaks = f"peak {amount(self.peak_bytes_before, 'B')} -> {amount(self.peak_bytes, 'B')}"
        return "\n".join([f"{peaks}, {amount(self.flops, 'FLOP')} computed twice", *(f"  {f}" for f in self.fqns)])


@dataclasses.dataclass(frozen=True, eq=False)
class _Candidate(Recomputed):
    """A call that could be checkpointed."""

    call: ModuleCall
    record: Call
    """The call on the tape of the ops as they ran."""
    passing: int
    """The bytes that are there besides while it runs again."""
    flops: int
    cost: int
    """What running it again takes: its FLOPs, and the bytes that it makes."""

    def gain(self, at: int) -> int:
        """By how many bytes less is in use while an op after the call runs, and before it runs again."""
        if not self.record.stop <= at < self.again:
            return 0
        return sum(s.size for s in self.dropped if s.last >= at) - sum(s.size for s in self.kept if s.last < at)

    def worth(self, chosen: list[_Candidate], at: int) -> float:
        """Bytes freed at a peak for what it costs, beyond what calls inside, in whose place it is, free and cost."""
        inside = [other for other in chosen if other.is_in(self)]
        gain = self.gain(at) - sum(other.gain(at) for other in inside)
        return gain / max(self.cost - sum(other.cost for other in inside), 1)

    def holds(self, at: int) -> bool:
        """Whether what it has made again is there while an op runs."""
        return self.again <= at and any(s.last >= at for s in self.dropped)

    def is_in(self, other: _Candidate) -> bool:
        """Whether this call was made in the other one, or is that."""
        return other.record in self.record.ancestors()


def checkpoint_plan(program: TracedProgram, budget_bytes: int, *, gradients: bool = True) -> CheckpointPlan:
    """See `Trace.checkpoint_plan`. `gradients`: whether those of parameters count, which FSDP2 shards."""
    tape = program.as_run
    if all(op.phase is None for op in tape.ops):
        raise ArgumentError("checkpoint_plan is of a training step: trace a function that calls backward()")
    _, storages = storages_of(tape)
    if not gradients:
        sharded = set(gradients_among(tape, storages))
        storages = [s for s in storages if s not in sharded]
    candidates = list(_candidates(program, tape, storages))
    search = _Search(tape, storages, budget_bytes)
    chosen = search.cheapest(candidates)
    if chosen is None:
        raise ArgumentError(
            f"budget_bytes={budget_bytes}: checkpoints bring the peak down to {search.lowest} bytes only; in use "
            "then are gradients, results, and tensors that no module call could make again"
        )
    calls = sorted((c.call for c in chosen), key=lambda call: call.position)
    names = tuple(str(call.fqn or call.scope) for call in calls)
    modules = tuple(call.module for call in calls if call.module is not None)
    flops = sum(c.flops for c in chosen)
    return CheckpointPlan(names, search.peak(chosen), search.peak([]), flops, modules)


class _Search:
    """Finds calls to checkpoint among the candidates, which are a tree; `lowest` is the lowest peak that was tried."""

    def __init__(self, tape: Tape, storages: list[Storage], budget: int) -> None:
        self._tape, self._storages, self._budget = tape, storages, budget
        self.lowest = sys.maxsize

    def cheapest(self, candidates: list[_Candidate]) -> list[_Candidate] | None:
        """Of the choices that fit, the one that computes least again; None where none fits.

        All calls of one class are a choice, as one checkpoints the blocks of a model by hand.
        """
        chains = sorted(_by_class(candidates), key=_flops)
        choices = [self._from([], candidates)]
        choices += [chain for chain in chains if self.peak(chain) <= self._budget][:_MOST_CHAINS]
        if all(self.peak(choice) > self._budget for choice in choices):
            choices = [self._from(chain, candidates) for chain in chains]
        fitting = [self._needed(choice) for choice in choices if self.peak(choice) <= self._budget]
        return min(fitting, key=_flops, default=None)

    def peak(self, chosen: list[_Candidate]) -> int:
        """The most in use at one time with these checkpointed."""
        return max(self._timeline(chosen))

    def _timeline(self, chosen: list[_Candidate]) -> list[int]:
        """The bytes in use while each op runs, with calls checkpointed."""
        passing = [Storage(c.passing, c.again, c.again, c.again) for c in chosen]
        timeline = timeline_of(len(self._tape.ops), [*self._storages, *passing], chosen)
        self.lowest = min(self.lowest, max(timeline))
        return timeline

    def _from(self, start: list[_Candidate], candidates: list[_Candidate]) -> list[_Candidate]:
        """The first choice that fits, else the last one: from `start`, with more calls while they lower the peak.

        Where none does, a call that makes too much again at the peak gives way to those inside it.
        """
        chosen = start
        free = [c for c in candidates if not any(c.is_in(other) or other.is_in(c) for other in chosen)]
        while True:
            timeline = self._timeline(chosen)
            peak = max(timeline)
            if peak <= self._budget:
                return chosen
            at = timeline.index(peak)
            worth = {c: c.worth(chosen, at) for c in free}
            best = max(free, key=lambda c: worth[c], default=None)
            if best is not None and worth[best] > 0:
                chosen = [*(c for c in chosen if not c.is_in(best)), best]
                free = [c for c in free if not c.is_in(best)]
                continue
            whole = next((c for c in chosen if c.holds(at)), None)
            if whole is None:
                return chosen
            chosen = [c for c in chosen if c is not whole]
            free += [c for c in candidates if c is not whole and c.is_in(whole)]

    def _needed(self, chosen: list[_Candidate]) -> list[_Candidate]:
        """Without those that are not needed to fit: later ones may make earlier ones needless."""
        for c in sorted(chosen, key=lambda c: -c.cost):
            without = [other for other in chosen if other is not c]
            if self.peak(without) <= self._budget:
                chosen = without
        return chosen


_MOST_CHAINS = 3


def _flops(chosen: list[_Candidate]) -> int:
    return sum(c.flops for c in chosen)


def _by_class(candidates: list[_Candidate]) -> list[list[_Candidate]]:
    """For each class of modules, its outermost calls."""
    of_class: dict[type, list[_Candidate]] = {}
    for c in candidates:
        chain = of_class.setdefault(type(c.call.module), [])
        if not any(c.is_in(outer) for outer in chain):
            chain.append(c)
    return list(of_class.values())


def _candidates(program: TracedProgram, tape: Tape, storages: list[Storage]) -> Iterator[_Candidate]:
    """The calls that make what only their own backward reads."""
    meter = Meter(program)
    times = collections.Counter(id(call.module) for call in program.calls)
    first: dict[int, int] = {}  # by position of a call, the first op of backward that belongs to it or to one inside it
    for i, op in enumerate(tape.ops):
        for around in forward_calls(op, tape) if op.phase is not None else ():
            first.setdefault(around.position, i)
    records = {record.position: record for record in tape.calls}
    for call in program.calls:
        again, record = first.get(call.record.position), records.get(call.record.position)
        if call.module is None or again is None or record is None or times[id(call.module)] > 1:
            continue
        inside = [s for s in storages if record.start <= s.first < record.stop]
        dropped = frozenset(
            s
            for s in inside
            if s.backward_first is not None and s.backward_first >= again and s.forward_last < record.stop
        )
        if not dropped or call.raised is not None or call.is_leaf:
            continue
        alone = [dataclasses.replace(s, last=record.stop if s in dropped else s.forward_last) for s in inside]
        peak = max(timeline_of(len(tape.ops), alone)[record.start : record.stop])
        arguments = {v.storage for v in leaves((record.args, record.kwargs), Value)}
        kept = frozenset(s for s in storages if s.key in arguments)
        passing = peak - sum(s.size for s in dropped)
        flops = sum(meter.flops(node) for node in call.nodes)
        yield _Candidate(again, dropped, kept, call, record, passing, flops, flops + sum(s.size for s in inside))
