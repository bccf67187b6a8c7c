"""Whether decoded data has the types that a class says of its fields."""

from __future__ import annotations

import collections.abc
import functools
import types
import typing
from typing import Any

from scopetrace._compat.ops import OPS
from scopetrace.files.records import RECORDS, fields_of
from scopetrace.ir.reads import Place
from scopetrace.ir.tape import Op

_OF_AN_OP = {"args": tuple, "kwargs": dict, "outputs": Any}
"""Leaf modules take and give objects of any class, and an op of a pickle an object of C++; `names` checks arguments."""


def checked_fields(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """The values of fields, with sets for lists where the class has sets.

    Raises TypeError for a value whose type is not that of the field, and for what is no field.
    """
    hints, checked = _hints(kind), {}
    for name, value in values.items():
        hint = hints.get(name)
        if type(value) is list and (kind_of_set := typing.get_origin(hint)) in (set, frozenset):
            value = kind_of_set(value)
        if name not in hints or not _fits(value, hint):
            raise TypeError(f"{name} of a {kind.__name__} is a {type(value).__name__}")
        checked[name] = value
    return checked


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {name: hints[name] for name in fields_of(kind)} | {"frames": Any} | (_OF_AN_OP if kind is Op else {})


def _fits(x: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin is None:
        if hint is Any or not isinstance(hint, type):  # a type variable
            return True
        if hint is Place:
            return type(x).__name__ in RECORDS and all(hasattr(x, name) for name in vars(hint) if name[0] != "_")
        return isinstance(x, (int, float) if hint is float else hint)
    parts = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(x, part) for part in parts)
    if origin is collections.abc.Callable:
        return isinstance(x, OPS)  # a file names no other function
    if not isinstance(x, origin):
        return False
    if origin is dict:
        return all(_fits(key, parts[0]) and _fits(value, parts[1]) for key, value in x.items())
    if origin is tuple and parts[1:] != (...,):
        return len(x) == len(parts) and all(map(_fits, x, parts))
    return all(_fits(item, parts[0]) for item in x)
