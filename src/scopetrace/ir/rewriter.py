"""One tape from another, op by op.

op -> its place in the new tape -> copied on what stands for its operands, or what a subclass puts in its place
call -> a copy of it around what stands for its ops, with what stands for its arguments and results
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from scopetrace.ir.segment import with_values
from scopetrace.ir.tape import BodyTape, Call, Op, Tape


def copied_calls(tape: Tape) -> dict[Call, Call]:
    """By call of a tape, and of the bodies in it, a copy in the copy of the call around it."""
    copies: dict[Call, Call] = {}
    for call in sorted({c for inner in tape.walk() for c in inner.calls}, key=lambda c: c.position):
        copies[call] = call.replace(parent=None if call.parent is None else copies[call.parent])
    return copies


def new_storages(tape: Tape) -> Iterator[int]:
    """Numbers of storages that neither a tape has nor a body in it, which is asked when the first one is taken."""
    used = (v.storage for inner in tape.walk() for op in inner.ops for v in op.values())
    yield from itertools.count(max(used, default=0) + 1)


def boundaries(calls: list[Call]) -> dict[int, list[tuple[Call, bool]]]:
    """By position of an op, the calls that end or begin before it, in order; each with whether it begins."""
    places = collections.defaultdict[int, list[tuple[Call, bool]]](list)
    for call in reversed(calls):
        if call.start < call.stop:
            places[call.stop].append((call, False))
    for call in calls:
        places[call.start].append((call, True))
        if call.start == call.stop:
            places[call.stop].append((call, False))
    return places


class TapeRewriter:
    """Goes along `old` and appends to `new`: a copy, but for what subclasses do in `step`.

    Attributes:
        replacements: by value of the old tape, and by body of one of its higher-order ops, what stands for it.
        calls: by call of the old tape, that of the new one.
        storages: gives numbers of storages that no tape of the program has.
        op: the op of the old tape that is next, at the end the last one.
    """

    def __init__(self, old: Any, around: TapeRewriter | None = None) -> None:
        """`around` rewrites the tape in which `old` is a body."""
        self.old = old
        self.op: Op | None = None
        self.new: Any = dataclasses.replace(old, ops=[], calls=[], attributes=dict(old.attributes))
        self.replacements: dict[Any, Any] = {} if around is None else around.replacements
        self.calls: dict[Call, Call] = copied_calls(old) if around is None else around.calls
        self.storages: Iterator[int] = new_storages(old) if around is None else around.storages

    def run(self) -> Any:
        """The new tape."""
        self.append(self.old, self.old.calls)
        self.new.calls.sort(key=lambda call: call.position)
        for call in self.new.calls:
            call.rename(self.replacements)
        return with_values(self.new, self.replacements)

    def append(self, tape: Tape, calls: list[Call]) -> None:
        """Append what stands for the ops of a tape, and these of its calls."""
        places = boundaries(calls)
        for i, op in enumerate((*tape.ops, None)):
            if op is None:
                self.finish()
            else:
                self.op = op
            for call, begins in places.get(i, ()):
                self.begin(call) if begins else self.end(call)
            if op is not None:
                self.step(op)

    def finish(self) -> None:
        """After the last op, in the last calls."""

    def begin(self, call: Call) -> None:
        """A call of the old tape begins before the next op."""
        self.calls[call].start = len(self.new.ops)
        self.new.calls.append(self.calls[call])

    def end(self, call: Call) -> None:
        """A call of the old tape ended with the last op."""
        self.calls[call].stop = len(self.new.ops)

    def step(self, op: Op) -> None:
        """Append what stands for an op."""
        self.copy(op)

    def inner(self, body: BodyTape) -> TapeRewriter:
        """What rewrites a body of a higher-order op."""
        return type(self)(body, self)

    def copy(self, op: Op) -> None:
        """Append a copy of an op. New tensors get new memory, but those that come from outside."""
        self.rewrite_bodies(op)
        storages = {v.storage: self.replacements[v].storage for v in op.inputs()}
        if op.kind not in ("placeholder", "get_attr"):
            for v in op.values():
                storages.setdefault(v.storage, next(self.storages))
        self.new.ops.append(op.copied(self.replacements, storages, self.calls))

    def rewrite_bodies(self, op: Op) -> None:
        """Rewrite the bodies of a higher-order op, each once."""
        for body in op.bodies():
            if body not in self.replacements:
                self.replacements[body] = self.inner(body).run()
