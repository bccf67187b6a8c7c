"""The lines that change Python's state, seen in a run of the forward that is traced line by line.

Data flow:
    changes of an earlier run -> what each of them has now -> compared after each line of code of users
    a value that is another one -> the line before -> the source of a SideEffect

Only a run that is made again to judge changes is watched in this way: it takes several times as long.
"""

from __future__ import annotations

import collections
import contextlib
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from scopetrace._compat.questions import MISSING
from scopetrace.containers.contents import Change, form_of
from scopetrace.containers.stand_ins import is_watched
from scopetrace.guards.attributes import current_attributes
from scopetrace.ir.guards import MODULE_TABLES
from scopetrace.ir.scopes import user_line
from scopetrace.sources import is_users


@contextlib.contextmanager
def noting_lines(changes: list[Change]) -> Iterator[dict[str, str]]:
    """Inside, the lines that change what `changes` are of are noted, by the names of the changes.

    Nothing is noted where a debugger or a coverage tool traces lines already.
    """
    noted: dict[str, str] = {}
    if sys.gettrace() is not None:
        yield noted
        return
    getters = [_getter(change) for change in changes]
    values = [get() for get in getters]
    lines: list[tuple[types.CodeType, int]] = []  # that which each open function is at, the innermost last

    def trace(frame: types.FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename[:1] == "<" or not is_users(frame.f_code.co_filename):
            return None
        for i, change in enumerate(changes if event != "exception" else ()):
            before, values[i] = values[i], getters[i]()
            if lines and change.name not in noted and _differ(before, values[i]):
                noted[change.name] = user_line(lines[-1:]) or ""
        if event in ("line", "return") and lines:
            lines.pop()
        if event in ("line", "call"):
            lines.append((frame.f_code, frame.f_lineno))
        return trace

    sys.settrace(trace)
    try:
        yield noted
    finally:
        sys.settrace(None)


def _differ(before: Any, after: Any) -> bool:
    """Whether two values of a place are different objects, and no equal numbers: a stand-in would be asked."""
    is_plain = type(before) is type(after) and type(after) in (int, bytes, _Ids)
    return after is not before and not (is_plain and after == before)


def _getter(change: Change) -> Callable[[], Any]:
    owner, key = change.place
    if isinstance(change.holder, torch.nn.Module) and change.attribute:
        return lambda: _of_module(change.holder, change.attribute)
    if change.is_generator:
        form = form_of(type(owner))
        return lambda: pickle.dumps(form.read(owner)) if form is not None else None
    if key is not MISSING:
        return change.place.current
    if change.places and is_watched(owner):  # which may have a stand-in there
        return lambda: _ids(change.places[0].current())
    return lambda: _ids(owner)


class _Ids(tuple[int, ...]):
    """The ids of the items of a list or set."""


def _ids(x: Any) -> _Ids:
    """The ids of the items of a list or set, without asking a stand-in."""
    base = next((base for base in (list, set, collections.deque) if isinstance(x, base)), None)
    return _Ids(() if base is None else map(id, base.__iter__(x)))


def _of_module(module: torch.nn.Module, name: str) -> Any:
    attributes = current_attributes(module)
    tables = (attributes, *(attributes.get(table, {}) for table in MODULE_TABLES))
    return next((table[name] for table in tables if name in table), MISSING)
