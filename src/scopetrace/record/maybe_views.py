"""Copies of a recorded program that would be views if a dynamic size were 1, where it matters which they are.

`x.transpose(0, 1).flatten()` copies where both dimensions have two elements or more, and is a view where one has one. A
later write to one of both, before the other is read, then changes what that read gives.
"""

from __future__ import annotations

import bisect

import torch

from scopetrace._compat.shape_env import WatchedShapeEnv
from scopetrace._compat.tensors import is_symbolic
from scopetrace.containers.structure import leaves
from scopetrace.ir.scopes import source_of
from scopetrace.ir.tape import Op, RecordedTape, Value

_aten = torch.ops.aten
_RESHAPES = (_aten.reshape.default, _aten.reshape_as.default, _aten.flatten.using_ints, _aten.ravel.default)
MAYBE_VIEWS = frozenset((*_RESHAPES, _aten.contiguous.default))


def expect_copies(tape: RecordedTape, env: WatchedShapeEnv) -> None:
    """Record that a call has no size 1 where the program depends on it that such an op copies."""
    sources = [(i, op, _source(op)) for i, op in enumerate(tape.ops)]
    copies = [(i, op, v) for i, op, v in sources if v and is_symbolic(v.fake) and op.result.storage != v.storage]
    if not copies:
        return
    writes, last_read = _uses(tape)

    def matters(start: int, written: int, other: int) -> bool:
        at = writes.get(written, [])
        first = bisect.bisect_right(at, start)
        return first < len(at) and at[first] < last_read.get(other, -1)

    for i, op, source in copies:
        copy = op.result
        if matters(i, source.storage, copy.storage) or matters(i, copy.storage, source.storage):
            place = {"module": str(op.scope), "source": source_of(op.frames)}
            for size in source.fake.size():
                if isinstance(size, torch.SymInt):
                    env.take_for_more_than_one(size, place)


def _source(op: Op) -> Value | None:
    """What an op may give a view of; in a step, where the parts of composite ops are recorded, those of a copy."""
    if op.target in MAYBE_VIEWS or (
        op.target is _aten.clone.default and op.kwargs.get("memory_format") is torch.contiguous_format
    ):
        return op.inputs()[0]
    return _source(op.inputs()[0].op) if op.target is _aten._unsafe_view.default else None


def _uses(tape: RecordedTape) -> tuple[dict[int, list[int]], dict[int, int]]:
    """By storage, where it is written, and where it is read last: at the end, where somebody outside sees it."""
    writes: dict[int, list[int]] = {}
    last_read: dict[int, int] = {}
    for i, op in enumerate(tape.ops):
        for v in op.inputs():
            last_read[v.storage] = i
        for v in op.writes:
            writes.setdefault(v.storage, []).append(i)
    outside = [v for op in tape.ops if op.kind in ("placeholder", "get_attr") for v in op.values()]
    bound = [write.value for write in tape.attribute_writes]
    for v in (*outside, *bound, *leaves(tape.outputs, Value)):
        last_read[v.storage] = len(tape.ops)
    return writes, last_read
