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
import operator
from collections.abc import Iterator, Mapping

import torch

from scopetrace._compat.checkpoints import checkpoint_modules
from scopetrace.containers.structure import leaves
from scopetrace.errors import ArgumentError
from scopetrace.formatting import amount
from scopetrace.ir.tape import Call, Tape, Value
from scopetrace.program.traced import ModuleCall, TracedProgram
from scopetrace.view.measures import Meter
from scopetrace.view.memory import Storage, forward_call, is_forward, storages_of, timeline_of

Storages = Mapping[int, Storage]


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
        checkpoint_modules(model, self.modules)

    def __str__(self) -> str:
        peaks = f"peak {amount(self.peak_bytes_before, 'B')} -> {amount(self.peak_bytes, 'B')}"
        return "\n".join([f"{peaks}, {amount(self.flops, 'FLOP')} computed twice", *(f"  {f}" for f in self.fqns)])


@dataclasses.dataclass(frozen=True, eq=False)
class _Candidate:
    """A call that could be checkpointed."""

    call: ModuleCall
    record: Call
    """The call on the tape of the ops as they ran."""
    again: int
    """The position of the first op of its backward, before which it runs again."""
    dropped: frozenset[int]
    """The storages that are freed when it returns, and made again."""
    kept: frozenset[int]
    """The storages of its arguments, which are kept until it runs again."""
    passing: int
    """The bytes that are there besides while it runs again."""
    flops: int
    cost: int
    """What running it again takes: its FLOPs, and the bytes that it makes."""

    def gain(self, storages: Storages, at: int) -> int:
        """By how many bytes less is in use while an op after the call runs, and before it runs again."""
        if not self.record.stop <= at < self.again:
            return 0
        less = sum(storages[s].size for s in self.dropped if storages[s].used >= at)
        return less - sum(storages[s].size for s in self.kept if storages[s].used < at)

    def holds(self, storages: Storages, at: int) -> bool:
        """Whether what it has made again is there while an op runs."""
        return self.again <= at and any(storages[s].used >= at for s in self.dropped)

    def is_in(self, other: _Candidate) -> bool:
        """Whether this call was made in the other one, or is that."""
        return other.record in self.record.ancestors()


def checkpoint_plan(program: TracedProgram, budget_bytes: int) -> CheckpointPlan:
    """See `Trace.checkpoint_plan`."""
    tape = program.as_run
    if all(map(is_forward, tape.ops)):
        raise ArgumentError("checkpoint_plan is of a training step: trace a function that calls backward()")
    _, storages = storages_of(tape)
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
    """Finds calls to checkpoint among the candidates, which are a tree: a call, or calls inside it.

    Attributes:
        lowest: the lowest peak of the choices that were tried.
    """

    def __init__(self, tape: Tape, storages: Storages, budget: int) -> None:
        self._tape, self._storages, self._budget = tape, storages, budget
        self.lowest: int | None = None

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
        most = max(_timeline(self._tape, self._storages, chosen))
        self.lowest = most if self.lowest is None else min(most, self.lowest)
        return most

    def _from(self, start: list[_Candidate], candidates: list[_Candidate]) -> list[_Candidate]:
        """The first choice that fits, else the last one: from `start`, with more calls while they lower the peak.

        Where none does, a call in whose backward the peak is, and which makes all again at once, gives way to those
        inside it for good.
        """
        chosen = start
        free = [c for c in candidates if not any(c.is_in(other) or other.is_in(c) for other in chosen)]
        while True:
            timeline = _timeline(self._tape, self._storages, chosen)
            most = max(timeline)
            self.lowest = most if self.lowest is None else min(most, self.lowest)
            at = timeline.index(most)
            if most <= self._budget:
                return chosen
            gains = [(_worth(c, chosen, self._storages, at), c) for c in free]
            gain, best = max(gains, key=operator.itemgetter(0), default=(0.0, None))
            if best is not None and gain > 0:
                chosen = [*(c for c in chosen if not c.is_in(best)), best]
                free = [c for c in free if not c.is_in(best)]
                continue
            whole = next((c for c in chosen if c.holds(self._storages, at)), None)
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


def _by_class(candidates: list[_Candidate]) -> Iterator[list[_Candidate]]:
    """For each class of modules, its outermost calls."""
    of_class: dict[type, list[_Candidate]] = {}
    for c in candidates:
        chain = of_class.setdefault(type(c.call.module), [])
        if not any(c.is_in(outer) for outer in chain):
            chain.append(c)
    yield from of_class.values()


def _worth(c: _Candidate, chosen: list[_Candidate], storages: Storages, at: int) -> float:
    """Bytes freed at a peak for what it costs, beyond what calls inside, in whose place it is, free and cost."""
    inside = [other for other in chosen if other.is_in(c)]
    gain = c.gain(storages, at) - sum(other.gain(storages, at) for other in inside)
    return gain / max(c.cost - sum(other.cost for other in inside), 1)


def _timeline(tape: Tape, storages: Storages, chosen: list[_Candidate]) -> list[int]:
    """The bytes in use while each op runs, with calls checkpointed."""
    again = {s: c.again for c in chosen for s in c.dropped}
    kept: dict[int, int] = {}
    for c in chosen:
        kept.update((s, max(c.again, kept.get(s, 0))) for s in c.kept)
    intervals = [(c.passing, c.again, c.again) for c in chosen]
    for key, s in storages.items():
        if key in again:
            intervals += [(s.size, s.made, s.forward_used), (s.size, again[key], s.used)]
        else:
            intervals.append((s.size, s.made, max(s.used, kept.get(key, 0))))
    return timeline_of(len(tape.ops), intervals)


def _candidates(program: TracedProgram, tape: Tape, storages: Storages) -> Iterator[_Candidate]:
    """The calls that make what only their own backward reads."""
    meter = Meter(program)
    times = collections.Counter(id(call.module) for call in program.calls)
    first = _first_backward(tape)
    records = {record.position: record for record in tape.calls}
    for call in program.calls:
        again, record = first.get(call.position), records.get(call.position)
        if call.module is None or again is None or record is None or times[id(call.module)] > 1:
            continue
        own = {key: s for key, s in storages.items() if record.start <= s.made < record.stop}
        dropped = {
            key
            for key, s in own.items()
            if s.backward_used is not None and s.backward_used >= again and s.forward_used < record.stop
        }
        if not dropped or call.raised is not None or call.is_leaf:
            continue
        inside = [(s.size, s.made, record.stop if key in dropped else s.forward_used) for key, s in own.items()]
        most = max(timeline_of(len(tape.ops), inside)[record.start : record.stop])
        kept = {v.storage for v in leaves((record.args, record.kwargs), Value)} & storages.keys()
        passing = most - sum(storages[s].size for s in dropped)
        flops = sum(meter.flops(node) for node in call.nodes)
        cost = flops + sum(s.size for s in own.values())
        yield _Candidate(call, record, again, frozenset(dropped), frozenset(kept), passing, flops, cost)


def _first_backward(tape: Tape) -> dict[int, int]:
    """By position of a call, the position of the first op of backward that belongs to it or to a call inside it."""
    found: dict[int, int] = {}
    for i, op in enumerate(tape.ops):
        call = None if is_forward(op) else forward_call(op, tape)
        while call is not None:
            found.setdefault(call.position, i)
            call = call.parent
    return found
