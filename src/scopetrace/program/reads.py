"""What a forward read, asked again at each call of its trace.

Data flow:
    reads of the tape -> plain attributes as (table, key, value), all others by their place -> one check, made once
    a call -> each is asked -> an answer other than that of the trace is an error that names the read
    submodules and hooks of the modules -> compared at once -> an error for those of modules that the trace has
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from scopetrace._compat.symbols import Symbolic
from scopetrace.errors import InputMismatchError, StateMismatchError
from scopetrace.ir.module_tables import SUBMODULES, Change
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
from scopetrace.ir.tape import ProgramTape

Number = Callable[[Any], Any]
"""From a symbolic size to its value in a call."""

_IDENTICAL = frozenset({bool, int, float, str, type(None), type, types.FunctionType, Missing})
"""The classes of values that do not change: where nothing was assigned there is the same object."""


class StateCheck:
    """Compares the state at a call with that of the trace."""

    def __init__(self, tape: ProgramTape) -> None:
        self._tape = tape
        self._plain: list[tuple[Any, str, Any, Read]] = []
        self._others: list[Read] = []
        for read in (part for whole in tape.reads for part in whole.parts):
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
                if read.place.fact == "layout":
                    sizes = call.tensors[read.place.index].shape
                    value = tuple(0 if n == 1 else stride for n, stride in zip(sizes, value, strict=True))
            if not same(value, snapshot(now)):
                raise _mismatch(read, value, now)
        if self._tape.module_tables is not None:
            for change in self._tape.module_tables.changes():
                self._refuse(change)

    def _refuse(self, change: Change) -> None:
        """Raise StateMismatchError for other hooks of a module that was called, and for other modules in its place."""
        tapes = list(self._tape.walk())
        called = {id(call.module) for tape in tapes for call in tape.calls if not call.leaf}
        used = called | {id(m) for m in self._tape.modules.values()} | {id(m) for m, _ in self._tape.owners.values()}
        if change.table != SUBMODULES:
            matters = id(change.module) in called
        else:
            goes_on = isinstance(change.module, _CONTAINERS)
            old = [m for name, m in change.old.items() if m is not None and (goes_on or change.new.get(name) is not m)]
            matters = any(id(inner) in used for m in old for inner in m.modules())
        if matters:
            raise StateMismatchError(f"{change.text}; trace again, or put it back")


_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
"""The modules whose forward, or that of the module around them, goes through all that they have."""


def _in_numbers(value: Any, number: Number) -> Any:
    if isinstance(value, tuple):
        return tuple([_in_numbers(item, number) for item in value])
    return number(value) if isinstance(value, Symbolic) else value


def _mismatch(read: Read, value: Any, now: Any) -> InputMismatchError:
    at = f", which the model reads at {read.source.removesuffix(':')}" if read.source else ""
    problem = f"{read.name}{at}: {_text(value)} when traced and {_text(now)} now"
    if isinstance(read.place, OfInput):
        return InputMismatchError(f"{problem}; trace again with inputs like these, or pass them as they were")
    if isinstance(read.place, Flag | OfEnvironment):
        return StateMismatchError(f"{problem}; trace again in this state, or call in that of the trace")
    return StateMismatchError(f"{problem}; trace again, or put it back; what changes from call to call is an argument")


def _text(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) < 80 else f"{text[:76]} ..."
