"""The ranges of the calls of a tape whose ops were put in another order, or are others.

Data flow:
    the call that each op asks for -> of each call, outer first, the longest stretch of its ops -> its range
    an op that asks for a call outside of its range -> the innermost call around it
"""

from __future__ import annotations

import bisect
import collections
import itertools
from typing import Any

from scopetrace.containers.structure import Removed, leaves, map_structure
from scopetrace.ir.tape import Call, Op, Tape, Value


class CallRanges:
    """The ranges of the calls of a tape."""

    def __init__(self, tape: Tape) -> None:
        self.tape, self.calls = tape, set(tape.calls)
        self.asked = {
            i: [] if op.call is None else [*op.call.ancestors()][::-1]
            for i, op in enumerate(tape.ops)
            if op.kind in ("call_function", "call_module")
        }
        """By the position of an op, the calls that it asks to be in, outer ones first."""
        self.steps = list(self.asked)
        self.children = collections.defaultdict[Call | None, list[Call]](list)
        for call in tape.calls:
            self.children[call.parent if call.parent in self.calls else None].append(call)
        self.made_at = {v: i for i, op in enumerate(tape.ops) for v in op.values()}

    def settle(self) -> dict[Op, Op]:
        """Set `start` and `stop` of all calls, and move ops that lie outside of the range of their call.

        Returns the new op for each that moved.
        """
        ops, moved = self.tape.ops, dict[Op, Op]()
        first = next((i for i, op in enumerate(ops) if op.kind != "placeholder"), len(ops))
        self._place_children(None, first, len(ops))
        innermost: list[Call | None] = [None] * len(ops)
        for call in self.tape.calls:
            # what is made after a call begins is no argument of it any more, and what is made after it no result
            call.args, call.kwargs = self._made_before(call.start, (call.args, call.kwargs))
            call.outputs, call.mutated = self._made_before(call.stop, (call.outputs, call.mutated))
            innermost[call.start : call.stop] = [call] * (call.stop - call.start)
        for i, asked in self.asked.items():
            op, inside = ops[i], innermost[i]
            scope = self.tape.root if inside is None else inside.scope
            inside = inside or next((call for call in reversed(asked) if call not in self.calls), None)
            if op.call is not inside:
                moved[op] = ops[i] = op.replace(call=inside, scope=scope).take_values()
        return moved

    def _made_before(self, limit: int, template: Any) -> Any:
        def in_time(v: Value) -> Value | Removed:
            is_late = v.op.kind in ("call_function", "call_module") and self.made_at.get(v, -1) >= limit
            return Removed(str(v.op.target)) if is_late else v

        return map_structure(in_time, template, Value)

    def _place_children(self, parent: Call | None, start: int, stop: int) -> None:
        """Give the calls made directly in `parent` ranges in it, in their order."""
        children = self.children[parent]
        is_root = [child.parent for child in children] == [None]
        runs: list[tuple[int, int] | None] = [(start, stop)] if is_root else self._runs(children, start, stop)
        for number, child in enumerate(children):
            child.start, child.stop = runs[number] or self._empty(child, start, runs[number + 1 :], stop)
            self._place_children(child, child.start, child.stop)
            start = child.stop

    def _runs(self, children: list[Call], start: int, stop: int) -> list[tuple[int, int] | None]:
        """Of each call, the longest stretch of ops that are all in it; None without any."""
        inside = self.steps[bisect.bisect_left(self.steps, start) : bisect.bisect_left(self.steps, stop)]
        among = set(children)
        stretches = collections.defaultdict[Call | None, list[list[int]]](list)
        for call, stretch in itertools.groupby(inside, lambda i: next((c for c in self.asked[i] if c in among), None)):
            stretches[call].append([*stretch])
        runs: list[tuple[int, int] | None] = []
        for child in children:
            longest = max((s for s in stretches[child] if s[0] >= start), key=len, default=None)
            runs.append(None if longest is None else (longest[0], longest[-1] + 1))
            start = start if longest is None else longest[-1] + 1
        return runs

    def _empty(self, call: Call, start: int, later: list[tuple[int, int] | None], stop: int) -> tuple[int, int]:
        """The range of a call without ops: after its arguments are made, before the next call with ops."""
        limit = next((run[0] for run in later if run is not None), stop)
        starts = [self.made_at[v] + 1 for v in leaves((call.args, call.kwargs), Value) if v in self.made_at]
        at = min(max([start, *starts]), limit)
        return at, at
