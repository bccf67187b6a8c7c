"""The classes of which a file has instances, by name, the fields that a file does not have, and the types of fields.

An instance is written as the fields that differ from their defaults, so that a file of an older version is read where
new fields have defaults.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import types
import typing
from typing import Any

from scopetrace._compat.ops import OPS
from scopetrace._compat.shape_env import DimSpec
from scopetrace._compat.symbols import BINDING_KEYS
from scopetrace.containers.structure import Effect, Returned
from scopetrace.ir import conditions, guards, registered, tape, write_back
from scopetrace.ir.scopes import Scope
from scopetrace.ir.side_effects import SideEffect

_TAPES = (tape.RecordedTape, tape.FunctionalTape, tape.BodyTape)

TABLES: dict[type, str] = {
    tape.Value: "values",
    **{tape.Op: "ops", tape.Call: "calls", Scope: "scopes"},
    **dict.fromkeys(_TAPES, "tapes"),
}
"""The tables of what a program refers to from several places. Each is written once, as a row."""

_INLINE: tuple[type, ...] = (
    *(Effect, Returned, DimSpec, tape.AttributeWrite, tape.Autocast, tape.Phase, tape.BackwardNode),
    *(conditions.SizeRules, conditions.DynamicInput, conditions.Specialization),
    *(registered.Registered, registered.RegisteredModule, registered.RegisteredParam),
    *(write_back.WriteBack, write_back.GraphInput, write_back.StateRef, write_back.FromGraph, write_back.ViewStep),
    *(write_back.StridedStep, write_back.ViewOf, write_back.SameAs, write_back.CopyInto, write_back.ChangeShape),
    write_back.SetTo,
    *(guards.Guard, guards.Missing, guards.OfInput, guards.GradientOfInput, SideEffect),
    *(guards.Flag, guards.WhichInputs, guards.HasGradient),
    *BINDING_KEYS,
)

RECORDS = {kind.__name__: kind for kind in (*_TAPES, *_INLINE)}
"""By name, the data classes that a file may have, beside those of the tables."""

NAMES = {kind: name for name, kind in RECORDS.items()}

_FORMER_FIELDS = {"reads": "guards", "place": "source"}
"""The names that version 2 of the format has for fields."""
RECORDS["Read"] = guards.Guard  # in version 2

_OF_A_TAPE = ("shape_env", "fake_mode", "inference")

LEFT_OUT: dict[type, tuple[str, ...]] = {
    tape.Call: ("module",),
    tape.AttributeWrite: ("module",),
    conditions.SizeRules: ("env", "dynamic_shapes"),
    DimSpec: ("derive",),  # used only where the trace is made
    guards.GradientOfInput: ("gradient",),
    **dict.fromkeys(_TAPES, (*_OF_A_TAPE, "example_inputs", "settled")),
    tape.BodyTape: _OF_A_TAPE,
}
"""The fields that a file does not have: the model's modules and inputs, and what is made anew for all its tapes."""


def fields_of(kind: type) -> dict[str, dataclasses.Field[Any]]:
    """The fields that are written of a class, by name."""
    left_out = LEFT_OUT.get(kind, ())
    return {f.name: f for f in dataclasses.fields(kind) if f.name not in left_out}


def is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    """Whether a field has the value that it has without being given."""
    if field.default is not dataclasses.MISSING:
        return value is field.default
    if field.default_factory is not dataclasses.MISSING and type(value) in (list, dict, set):
        return not value
    return False


_OF_AN_OP = {"args": tuple, "kwargs": dict, "outputs": Any}
"""Leaf modules take and give objects of any class, and an op of a pickle an object of C++; `names` checks arguments."""


def checked_fields(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """The values of fields, with sets for lists where the class has sets.

    Raises TypeError for a value whose type is not that of the field, and for what is no field.
    """
    hints, checked = _hints(kind), {}
    for name, value in values.items():
        name = name if name in hints else _FORMER_FIELDS.get(name, name)
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
    return {name: hints[name] for name in fields_of(kind)} | {"frames": Any} | (_OF_AN_OP if kind is tape.Op else {})


def _fits(x: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin is None:
        if hint is Any or not isinstance(hint, type):  # a type variable
            return True
        if hint is guards.Source:
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
