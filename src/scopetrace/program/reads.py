"""What a forward read, asked again at each call of its trace.

Data flow:
    reads of the tape -> plain attributes as (table, key, value), all others by their place -> one check, made once
    a call -> each is asked -> an answer other than that of the trace is an error that names the read
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from scopetrace._compat.symbols import Symbolic
from scopetrace.errors import InputMismatchError, StateMismatchError
from scopetrace.ir.reads import (
    MISSING,
    CallInputs,
    Flag,
    InTable,
    Missing,
    OfEnvironment,
    OfInput,
    Read,
    same,
    snapshot,
)

Number = Callable[[Any], Any]
"""From a symbolic size to its value in a call."""

_IDENTICAL = frozenset({bool, int, float, str, type(None), type, types.FunctionType, Missing})
"""The classes of values that do not change: where nothing was assigned there is the same object."""


class StateCheck:
    """Compares the state at a call with that of the trace."""

    def __init__(self, reads: list[Read]) -> None:
        self._plain: list[tuple[Any, str, Any, Read]] = []
        self._others: list[Read] = []
        for read in reads:
            place = read.place
            if isinstance(place, InTable) and type(read.value) in _IDENTICAL:
                self._plain.append((place.table, place.key, read.value, read))
            else:
                self._others.append(read)

    def run(self, call: CallInputs, number: Number) -> None:
        """Raise InputMismatchError for a fact of an input, StateMismatchError for all else, that differs."""
        for table, key, value, read in self._plain:
            now = table.get(key, MISSING)
            if now is not value and not same(value, now):
                raise _mismatch(read, value, now)
        for read in self._others:
            value, now = read.value, read.place.now(call)
            if isinstance(read.place, OfInput):
                value = _in_numbers(value, number)
            if not same(value, snapshot(now)):
                raise _mismatch(read, value, now)


def _in_numbers(value: Any, number: Number) -> Any:
    if isinstance(value, tuple):
        return tuple([_in_numbers(item, number) for item in value])
    return number(value) if isinstance(value, Symbolic) else value


def _mismatch(read: Read, value: Any, now: Any) -> InputMismatchError:
    at = f", which the model reads at {read.source}" if read.source else ""
    problem = f"{read.name}{at}: {_text(value)} when traced and {_text(now)} now"
    if isinstance(read.place, OfInput):
        return InputMismatchError(f"{problem}; trace again with inputs like these, or pass them as they were")
    if isinstance(read.place, Flag | OfEnvironment):
        return StateMismatchError(f"{problem}; trace again in this state, or call in that of the trace")
    return StateMismatchError(f"{problem}; trace again, or put it back; what changes from call to call is an argument")


def _text(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:76]} ..."
