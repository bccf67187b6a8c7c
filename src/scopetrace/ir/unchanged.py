"""When a read has the answer of the trace, as conditions that a call asks quickly.

    Read -> Conditions that hold only while its answer is that of the trace: that the same objects are where they were
    Reads, tables of modules -> one function, whether all is as it was

A condition may fail where an equal object has come in the place of another: then the read itself is compared.
"""

from __future__ import annotations

import itertools
import types
from typing import Any

import torch

from scopetrace._compat.questions import quick_flag
from scopetrace.ir.conjunction import Condition, is_attribute, is_entry
from scopetrace.ir.reads import (
    MISSING,
    NO_CALL,
    Flag,
    InClosure,
    InSlot,
    InTable,
    InTables,
    Missing,
    OfFunctions,
    Read,
    same,
    snapshot,
)

_IDENTICAL = frozenset({bool, int, float, str, type(None), type, types.FunctionType, torch.dtype, Missing})
"""The classes of values that do not change: where nothing was assigned there is the same object."""

_MOST = 16
"""So many items of a container are asked one by one; those of longer ones are compared in a loop of C."""


def is_constant(x: Any) -> bool:
    """Whether an object, a number or text for one, does not change."""
    return type(x) in _IDENTICAL or (type(x) is tuple and _IDENTICAL.issuperset(map(type, x)))


def is_same(read: Read) -> bool:
    """Whether the answer to a read is that of the trace."""
    now = read.place.now(NO_CALL)
    return same(read.value, now) or same(read.value, snapshot(now))


def unchanged(read: Read) -> list[Condition]:
    """What holds only while the answer to a read is that of the trace."""
    place, then = read.place, read.value
    if isinstance(place, Flag) and (quick := quick_flag(place.function, place.args, then)) is not None:
        ask, args, answer = quick  # whose class is always the same; text is a new object each time
        return [Condition(f"{{}}({', '.join('{}' for _ in args)}) == {{}}", (ask, *args, answer))]
    if isinstance(place, InTable | InTables) and then is MISSING:
        tables = (place.table,) if isinstance(place, InTable) else place.tables
        return [Condition("{} not in {}", (place.key, table)) for table in tables]
    found = None
    if isinstance(place, InTable | InClosure) and is_same(read):
        now = place.now(NO_CALL)
        is_there = (
            is_entry(place.table, place.key, now)
            if isinstance(place, InTable)
            else is_attribute(place.cell, "cell_contents", now)
        )
        found = _with_content(is_there, now)
    elif isinstance(place, InSlot) and is_constant(then) and is_same(read):
        found = [is_attribute(place.owner, place.key, getattr(place.owner, place.key, MISSING))]
    elif isinstance(place, OfFunctions) and is_same(read) and not any(f.__kwdefaults__ for f in place.functions):
        parts = itertools.product(place.functions, ("__code__", "__defaults__", "__kwdefaults__"))
        found = [is_attribute(f, part, getattr(f, part)) for f, part in parts]
    return [Condition("{}({})", (is_same, read))] if found is None else found


def _with_content(is_there: Condition, x: Any) -> list[Condition] | None:
    """That an object is somewhere, and has in it what it has now; None where that is no question of identity alone."""
    if snapshot(x) is x:  # it is compared by identity, or does not change
        return [is_there]
    if type(x) not in (list, tuple, dict) or len(x) > _MOST:
        return None
    keys = list(x) if type(x) is dict else list(range(len(x)))
    if not all(map(is_constant, keys)):
        return None
    same_keys = Condition("[*{}] == {}", (x, keys)) if type(x) is dict else Condition("{}({}) == {}", (len, x, len(x)))
    found = [is_there, same_keys]
    for key in keys:
        of_item = _with_content(Condition("{}[{}] is {}", (x, key, x[key])), x[key])
        if of_item is None:
            return None
        found += of_item
    return found
