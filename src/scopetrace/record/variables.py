"""What the forward reads of variables and of functions: globals, closures, members of classes, default arguments.

Data flow:
    the traced callable, calls and ops of the tape, values that were read -> the functions that ran, or may have
    the names in their code -> globals, variables of enclosing functions, attributes of classes -> a Read each
    the functions themselves -> where a class has them, and their default arguments -> a Read each

Values are taken after the forward, when all is as it was before.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence, Set
from typing import Any

import torch

from scopetrace._compat.sources import PACKAGES
from scopetrace.ir.reads import MISSING, CallInputs, InClosure, InSlot, InTable, Read, snapshot
from scopetrace.ir.tape import Tape
from scopetrace.record.code import Reach, is_users, is_users_class

_NO_CALL = CallInputs((), {}, ())


def functions_that_ran(fn: Any, values: Sequence[Any], tape: Tape, reach: Reach) -> Reach:
    """Those that ran, since calls and ops were in them, and those that may have, since these or `values` name them."""
    ran = Reach(lambda name, key, x: ran.add_class(type(x)))
    ran.add(fn)
    ran.add_class(type(getattr(fn, "__self__", fn)))
    for kind in {call.module_type: None for call in tape.calls if call.module_type is not None}:
        ran.add_class(kind)
    for found in (*functions_of(reach, tape), *values):
        ran.add(found)
    for kind in set(map(type, values)):
        ran.add_class(kind)
    return ran


def functions_of(reach: Reach, tape: Tape) -> list[types.FunctionType]:
    """The functions that calls and ops of a tape were in, also methods that the forward got by a computed name."""
    frames = [op.frames for op in tape.ops if op.kind == "call_function"] + [call.frames for call in tape.calls]
    codes = {id(code) for inner in frames if inner and isinstance(inner, tuple) for code, _ in inner[1]}
    found = [f for f in reach.functions if id(f.__code__) in codes]
    if {"getattr"} & reach.names:
        members = [m for kind in reach.classes for m in vars(kind).values() if type(m) is types.FunctionType]
        found += [m for m in members if id(m.__code__) in codes]
    return list(dict.fromkeys(found))


def variables_read(ran: Reach, written: Set[str], changed: Set[tuple[int, str]], root: str) -> Iterator[Read]:
    """What these functions name of globals, classes and enclosing functions, but for what the forward wrote."""
    for table, name, value in ran.looked_up.values():
        if name not in written and not isinstance(value, types.ModuleType) and not _is_of_others(value):
            is_registry = str(table.get("__file__")).startswith(PACKAGES)  # of a library, which it fills itself
            yield Read(name, value if is_registry else snapshot(value), InTable(table, name), (), root)
    for kind in ran.bases:
        for name in ran.names.intersection(vars(kind)):
            value = vars(kind)[name]
            if name[:2] != "__" and not hasattr(type(value), "__get__") and (id(kind), name) not in changed:
                yield Read(f"{kind.__name__}.{name}", snapshot(value), InTable(vars(kind), name), (), root)
    for name, cell in ran.cells.values():
        place = InClosure(cell)
        value = place.now(_NO_CALL)
        if name not in written and value is not MISSING and not _is_of_others(value):
            yield Read(name, snapshot(value), place, (), root)


def functions_read(ran: Reach, tape: Tape, written: Set[str]) -> Iterator[Read]:
    """Where classes have the functions that ran, and default arguments that may change."""
    root, functions = tape.root.path, {id(f) for f in ran.functions}
    called = {call.module_type: None for call in tape.calls if call.module_type is not None and not call.leaf}
    for kind in called | ran.classes:
        for name in vars(kind).keys() & (ran.names | {"forward", "__call__", "__getitem__"}):
            member = vars(kind)[name]
            function = getattr(member, "fget", getattr(member, "__func__", member))
            if id(function) in functions or (kind in called and name == "forward"):
                yield Read(f"{kind.__name__}.{name}", member, InTable(vars(kind), name), (), root)
    for f in ran.functions:
        for key in ("__defaults__", "__kwdefaults__"):
            defaults = getattr(f, key) or ()
            values = list(defaults.values()) if isinstance(defaults, dict) else defaults
            if any(isinstance(x, list | dict | set) for x in values) and not any(k[-1:] == "=" for k in written):
                yield Read(f"default arguments of {f.__name__}", snapshot(defaults or None), InSlot(f, key), (), root)


def _is_of_others(value: Any) -> bool:
    """Whether it is a function of torch, Python or NumPy, which nobody replaces but for a while."""
    if isinstance(value, types.FunctionType):
        return not is_users(value.__code__.co_filename)
    return callable(value) and not isinstance(value, type | torch.nn.Module) and not is_users_class(type(value))
