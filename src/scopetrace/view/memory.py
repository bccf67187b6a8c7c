"""Which memory a program needs when, and which module calls make, keep and free it.

Data flow:
    ops as they ran -> each storage: its bytes, the op that makes it, the last op that reads or writes it
    storages -> bytes in use at each op -> the peak; by call: made, freed, kept for what follows, saved for backward

A storage is freed after the op that uses it last, as eager frees what no variable and no saved tensor holds.
Parameters, buffers and inputs are there before and after. What the parts of a composite op make for each other counts
while the op runs, as the logarithms of `cross_entropy_loss`; what kernels take for themselves is not counted.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from scopetrace._compat.allocations import peak_of_op
from scopetrace._compat.ops import can_decompose, is_op
from scopetrace._compat.symbols import example
from scopetrace._compat.tensors import NO_SHAPE_RULE
from scopetrace.containers.structure import leaves
from scopetrace.formatting import Tabular, amount
from scopetrace.ir.scopes import source_of
from scopetrace.ir.tape import Call, Op, ProgramTape, RecordedTape, Tape, Value
from scopetrace.program.graph import fakes_of
from scopetrace.program.traced import TracedProgram

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


@dataclasses.dataclass(frozen=True)
class CallMemory:
    """The memory of one module call, in bytes, with the calls inside it."""

    fqn: str | None
    """The module's name, as `ModuleCall.fqn`."""
    type: str
    """The name of its class."""
    index: int
    """0 for the first call of the module, 1 for its second."""
    depth: int
    """How many calls are around it."""
    made: int
    """What its ops make, in forward, with what the parts of composite ops make for each other."""
    freed: int
    """How much of that is freed before it returns."""
    saved: int
    """How much of that its program's backward reads. 0 where the program has no backward."""
    peak: int
    """The most that is in use while it runs, forward or backward, that of other calls included."""


@dataclasses.dataclass(eq=False)
class Storage:
    """Memory that the program makes."""

    size: int
    """In bytes."""
    first: int
    """The position of the op that makes it."""
    last: int
    """The position of the last op that uses it; that after the last op for results of the program."""
    forward_last: int
    """The position of the last op of the forward that uses it."""
    backward_first: int | None = None
    """Where forward makes it and backward reads it, the position of the first op of backward that does."""
    key: int | None = None
    """As `Value.storage`; None of what the bodies and the parts of an op need besides its results, while it runs."""


@dataclasses.dataclass(frozen=True, eq=False)
class Recomputed:
    """A part of the forward that runs again in backward."""

    again: int
    """The position of the first op of its backward, before which it runs again."""
    dropped: frozenset[Storage]
    """What is freed when it ends, and made again."""
    kept: frozenset[Storage]
    """What it reads, which is kept until it runs again."""


class Memory(Tabular):
    """The memory of a program. Prints as a table of its module calls; in a notebook, as an HTML table.

    Symbolic sizes count as those of the example.

    Attributes:
        rows: a CallMemory for each module call, outer before inner, in the order of execution.
        peak_bytes: the most that is in use at one time, without parameters, buffers and inputs.
        peak_op: the op that runs then, as `aten.linear.default`; empty where nothing is made.
        peak_call: the name of the module whose call runs then.
        peak_phase: whether that is in `forward`, `backward` or `other` code, such as an optimizer's.
        peak_source: the line of the model's code that runs then; empty outside of the forward.
        saved_bytes: what forward makes and backward reads.
        held_bytes: parameters, buffers, constants and inputs.
        eager_peak_bytes: of a step with regions under `torch.utils.checkpoint`, about what eager needs: there a region
            runs again whole, random numbers included, where a trace keeps them. Else `peak_bytes`.
        timeline: the bytes in use while each op runs, in the order of execution.
    """

    def __init__(self, program: TracedProgram, depth: int | None = None) -> None:
        """`depth`: levels of calls below the root that have rows; None for all."""
        tape = program.as_run
        self.held_bytes, storages = storages_of(tape)
        self.timeline = timeline_of(len(tape.ops), storages)
        self.peak_bytes = max(self.timeline, default=0)
        self.eager_peak_bytes = _eager_peak(tape, storages, self.peak_bytes)
        self.saved_bytes = sum(s.size for s in storages if s.backward_first is not None)
        self.peak_op, self.peak_call, self.peak_phase, self.peak_source = "", "", "forward", ""
        if self.peak_bytes:
            op = tape.ops[self.timeline.index(self.peak_bytes)]
            self.peak_op = str(op.target)
            self.peak_call = next((call.fqn or "" for call in forward_calls(op, tape)), "")
            if op.phase is None:
                self.peak_source = source_of(op.frames) or ""
            else:
                self.peak_phase = op.phase.name
        self.rows = list(self._rows(tape, storages, depth))

    def _rows(self, tape: Tape, storages: list[Storage], depth: int | None) -> Iterator[CallMemory]:
        peaks: dict[Call, int] = {}
        for op, in_use in zip(tape.ops, self.timeline, strict=True):
            for call in forward_calls(op, tape):
                peaks[call] = max(peaks.get(call, 0), in_use)
        for call in (call for call in tape.calls if call.is_module):
            level = sum(around.is_module for around in call.ancestors()) - 1
            if depth is not None and level > depth:
                continue
            inside = [s for s in storages if call.start <= s.first < call.stop and tape.ops[s.first].phase is None]
            size = sum(s.size for s in inside)
            freed = sum(s.size for s in inside if s.last < call.stop)
            saved = sum(s.size for s in inside if s.backward_first is not None)
            place = call.fqn, call.scope.type_name, call.index, level
            yield CallMemory(*place, size, freed, saved, peaks.get(call, 0))

    def to_dict(self) -> dict[str, Any]:
        """The totals and rows as plain data, for JSON. Sizes are bytes."""
        totals = {k: v for k, v in vars(self).items() if k not in ("rows", "timeline")}
        return {**totals, "rows": [dataclasses.asdict(row) for row in self.rows]}

    def __repr__(self) -> str:
        return f"<Memory: peak {amount(self.peak_bytes, 'B')}, {len(self.rows)} calls>"

    def _table(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("module", "made", "freed", "saved", "peak")]
        for row in self.rows:
            sizes = (row.made, row.freed, row.saved, row.peak)
            label = "  " * row.depth + (f"{row.type}[{row.fqn}]" if row.fqn else row.type)
            label += f" call {row.index + 1}" if row.index and row.fqn else ""
            rows.append((label, *(amount(n, "B") if n else "-" for n in sizes)))
        return rows

    def _notes(self) -> Iterator[str]:
        of = f" of {self.peak_call}" if self.peak_call else ""
        at = f" in the {self.peak_phase}{of}" if self.peak_phase != "other" else " after backward"
        yield f"peak {amount(self.peak_bytes, 'B')}{at}: {self.peak_op}" if self.peak_op else "peak 0 B"
        if self.eager_peak_bytes != self.peak_bytes:
            peak = amount(self.eager_peak_bytes, "B")
            yield f"that is the trace's own peak; eager, which runs checkpointed regions anew, needs about {peak}"
        if self.saved_bytes:
            yield f"{amount(self.saved_bytes, 'B')} saved for backward"
        yield f"{amount(self.held_bytes, 'B')} of parameters, buffers and inputs besides"


def forward_calls(op: Op, tape: Tape) -> Iterable[Call]:
    """The module calls that an op belongs to, inner before outer: of an op of backward, those of the forward's op."""
    call = tape.calls[op.phase.call] if op.phase is not None and op.phase.scope is not None else op.call
    return () if call is None else (around for around in call.ancestors() if around.is_module)


def storages_of(tape: Tape) -> tuple[int, list[Storage]]:
    """The bytes that are there before the program, and what it makes."""
    storages: dict[int, Storage] = {}
    for i, op in enumerate(tape.ops):
        for value in op.values():
            if value.storage not in storages:
                storages[value.storage] = Storage(_bytes(value), i, i, i, key=value.storage)
        for value in (*op.inputs(), *op.values()):
            s = storages[value.storage]
            s.last = i
            if op.phase is None:
                s.forward_last = i
            elif s.backward_first is None and tape.ops[s.first].phase is None:
                s.backward_first = i
    results = *tape.graph_outputs(), *(write.value for write in getattr(tape, "attribute_writes", ()))
    for result in leaves(results, Value):
        storages[result.storage].last = len(tape.ops)
    by_kind: dict[bool, list[Storage]] = {True: [], False: []}
    for s in storages.values():
        by_kind[tape.ops[s.first].kind in ("placeholder", "get_attr")].append(s)
    return sum(s.size for s in by_kind[True]), [*by_kind[False], *_inside_ops(tape, by_kind[False])]


def gradients_among(tape: ProgramTape, storages: Iterable[Storage]) -> list[Storage]:
    """Those of the gradients that a program leaves in `grad`."""
    gradients = {write.value.storage for write in tape.attribute_writes if write.of is not None}
    return [s for s in storages if s.key in gradients]


def _inside_ops(tape: Tape, storages: Iterable[Storage]) -> Iterator[Storage]:
    """What the bodies and the parts of ops need besides the results of these."""
    of_results = collections.Counter[int]()
    for storage in storages:
        of_results[storage.first] += storage.size
    peaks: dict[Any, int] = {}
    for i, op in enumerate(tape.ops):
        in_use = [0, *(n for body in op.bodies() for n in timeline_of(len(body.ops), storages_of(body)[1]))]
        needed = max(in_use) if op.bodies() else _peak_of_parts(tape, op, peaks)
        if needed > of_results[i]:
            yield Storage(needed - of_results[i], i, i, i)


def _peak_of_parts(tape: Tape, op: Op, peaks: dict[Any, int]) -> int:
    """The most that is in use while a composite op runs; 0 for any other. `peaks` has those of equal metadata."""
    # The parts of a custom op may be Python, which runs once.
    is_composite = is_op(op.target) and op.target.namespace == "aten" and can_decompose(op.target)
    if not is_composite or op.writes or op.unbacked or tape.fake_mode is None:
        return 0
    if op.target is _ATTENTION and op.tensor(0).fake.is_meta:  # there alone torch has no kernel without all scores
        return 0
    key = None if tape.inference is None else tape.inference.key_of_call(op.target, op.args, op.kwargs)
    peak = None if key is None else peaks.get(key)
    if peak is None:
        try:
            peak = peak_of_op(tape.fake_mode, op.target, *fakes_of((op.args, op.kwargs)))
        except (RuntimeError, *NO_SHAPE_RULE):  # an operand has another shape by now, or the op asks for data
            peak = 0
        if key is not None:
            peaks[key] = peak
    return peak


def _bytes(value: Value) -> int:
    """The bytes of a storage; of a sparse tensor those of its elements, as if it were dense."""
    try:
        return example(value.fake.untyped_storage().nbytes())
    except (NotImplementedError, RuntimeError):
        return example(value.fake.numel()) * value.fake.element_size()


def timeline_of(count: int, storages: Iterable[Storage], recomputed: Collection[Recomputed] = ()) -> list[int]:
    """The bytes in use while each of `count` ops runs."""
    again = {s: r.again for r in recomputed for s in r.dropped}
    kept = {s: r.again for r in sorted(recomputed, key=lambda r: r.again) for s in r.kept}
    changes = [0] * (count + 2)

    def use(size: int, first: int, last: int) -> None:
        changes[first] += size
        changes[min(last, count) + 1] -= size

    for s in storages:
        use(s.size, s.first, s.forward_last if s in again else max(s.last, kept.get(s, 0)))
        if s in again:
            use(s.size, again[s], s.last)
    return list(itertools.accumulate(changes[:count]))


def _eager_peak(tape: Tape, storages: list[Storage], peak: int) -> int:
    """The peak of a step in eager, where what a checkpointed region makes for backward is made again there."""
    if not isinstance(tape, RecordedTape) or not (tape.checkpointed and tape.backwards):
        return peak
    recomputed = [(i, op.phase) for i, op in enumerate(tape.ops) if op.phase is not None and op.phase.recomputed]
    regions = []
    for start, stop in tape.checkpointed:
        inside = [s for s in storages if start <= s.first < stop > s.forward_last]
        dropped = {s: s.backward_first for s in inside if s.backward_first is not None}
        in_region = {call.position for call in tape.calls if start <= call.start < stop}
        again = next((i for i, phase in recomputed if phase.call in in_region), len(tape.ops))
        again = min([again, *dropped.values()])
        read = {v.storage for op in tape.ops[start:stop] for v in op.inputs()}
        kept = frozenset(s for s in storages if s.first < start and s.key in read)
        regions.append(Recomputed(again, frozenset(dropped), kept))
    return max(timeline_of(len(tape.ops), storages, regions), default=0)
