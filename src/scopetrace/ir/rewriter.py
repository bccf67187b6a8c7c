"""One tape from another, op by op.

op -> its place in the new tape -> copied on what stands for its operands, or what a subclass puts in its place
call -> a copy of it around what stands for its ops, with what stands for its arguments and results
"""

from __future__ import annotations

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
    """Numbers of storages that neither a tape has nor a body in it."""
    used = (v.storage for inner in tape.walk() for op in inner.ops for v in op.values())
    return itertools.count(max(used, default=0) + 1)


class TapeRewriter:
    """Goes along `old` and appends to `new`: a copy, but for what subclasses do in `step`.

    Attributes:
        replacements: by value of the old tape, and by body of one of its higher-order ops, what stands for it.
        calls: by call of the old tape, that of the new one.
        storages: gives numbers of storages that no tape of the program has.
    """

    def __init__(self, old: Any, around: TapeRewriter | None = None) -> None:
        """`around` rewrites the tape in which `old` is a body."""
        self.old = old
        self.new: Any = dataclasses.replace(old, ops=[], calls=[], attributes=dict(old.attributes))
        self.replacements: dict[Any, Any] = {} if around is None else around.replacements
        self.calls: dict[Call, Call] = copied_calls(old) if around is None else around.calls
        self.storages: Iterator[int] = new_storages(old) if around is None else around.storages

    def run(self) -> Any:
        """The new tape."""
        self.append(self.old, self.old.calls)
        self.new.calls.sort(key=lambda call: call.position)
        return with_values(self.new, self.replacements)

    def append(self, tape: Tape, calls: list[Call]) -> None:
        """Append what stands for the ops of a tape, and these of its calls."""
        starts: list[int] = []
        for op in tape.ops:
            starts.append(len(self.new.ops))
            self.step(op, op.replace(call=None if op.call is None else self.calls[op.call]))
        self.end()
        starts.append(len(self.new.ops))
        for call in calls:
            new = self.calls[call]
            new.start, new.stop = starts[call.start], starts[call.stop]
            self.new.calls.append(new.rename(self.replacements))

    def step(self, op: Op, placed: Op) -> None:
        """Append what stands for an op. `placed` is the same op in its new call."""
        self.copy(op, placed)

    def end(self) -> None:
        """After the last op."""

    def inner(self, body: BodyTape) -> TapeRewriter:
        """What rewrites a body of a higher-order op."""
        return type(self)(body, self)

    def copy(self, op: Op, placed: Op) -> None:
        """Append a copy of an op. New tensors get new memory, but those that come from outside."""
        self.rewrite_bodies(op)
        storages = {v.storage: self.replacements[v].storage for v in op.inputs()}
        if op.kind not in ("placeholder", "get_attr"):
            for v in op.values():
                storages.setdefault(v.storage, next(self.storages))
        self.new.ops.append(placed.copied(self.replacements, storages))

    def rewrite_bodies(self, op: Op) -> None:
        """Rewrite the bodies of a higher-order op, each once."""
        for body in op.bodies():
            if body not in self.replacements:
                self.replacements[body] = self.inner(body).run()
