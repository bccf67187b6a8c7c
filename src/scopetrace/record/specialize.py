"""`specialize=True`: the example inputs decide what Python does with values, and each decision is kept.

Data flow:
    Python needs a number that depends on data -> its value in the example run -> a Specialization on the tape, and a
    condition in torch's ShapeEnv, which later questions rely on and which the graph asserts
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from scopetrace._compat.shape_env import Decision, condition_of
from scopetrace.errors import InputMismatchError
from scopetrace.record.values import RealValues


@dataclasses.dataclass(frozen=True)
class Specialization:
    """Something that a trace fixes, because Python looked at a value that depends on data."""

    expression: str
    """What Python asked for, in the symbols of the graph: `u0 > 3`, or `u0` where it took the number itself."""
    value: bool | int | float
    """The answer that the example inputs gave."""
    op: str
    """The op that read the value: `aten.item.default`."""
    module: str
    """The scope path in which Python asked: `Net/Linear[fc]`."""
    fqn: str | None
    """The name of the module there; None for a module outside the model."""
    source: str | None
    """The user's line: `model.py:12, in forward: if x.sum() > 0:`."""

    @property
    def message(self) -> str:
        """What the graph's assertion says on inputs that decide otherwise."""
        return f"the trace is specialized, and these inputs differ: {self}; trace again with inputs like these"

    def __str__(self) -> str:
        at = f", at {self.source}" if self.source else ""
        return f"{self.expression} was {self.value} ({self.op}) in {self.module}{at}"


class Decider:
    """Decides what Python asks while a tape is recorded."""

    def __init__(self, values: RealValues, found: list[Specialization], where: Callable[[Any], dict[str, Any]]) -> None:
        self._values = values
        self._found = found
        self._where = where  # op, module, fqn and source of a question

    def __call__(self, expr: Any) -> Decision:
        """What `expr` is in the example run. Raises NoRealValue."""
        where = self._where(expr)
        value = self._values.number(expr)
        value = value if isinstance(value, (bool, float)) else int(value)
        known = Specialization(str(expr), value, **where)
        if known not in self._found:
            self._found.append(known)
        return Decision(value, condition_of(expr, value), known.message)


def decided_by(found: Sequence[Specialization], message: str) -> Specialization | None:
    """The specialization that an assertion's message is about."""
    return next((s for s in found if s.message == message), None)


@contextlib.contextmanager
def specialized(found: Sequence[Specialization]) -> Iterator[None]:
    """Runs a graph inside: an assertion that fails because of a specialization is an InputMismatchError."""
    try:
        yield
    except RuntimeError as error:
        if decided_by(found, str(error)) is None:
            raise
        raise InputMismatchError(str(error)) from error
