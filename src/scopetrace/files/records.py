"""What a file may have: the classes of its instances with the fields and their types, and no names that would be code.

An instance is written as the fields that differ from their defaults, so that a file of an older version is read where
new fields have defaults.
"""

from __future__ import annotations

import base64
import collections.abc
import dataclasses
import enum
import functools
import keyword
import math
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import torch

from scopetrace._compat.graph_module import is_writable
from scopetrace._compat.ops import OPS, is_op, schema_of
from scopetrace._compat.questions import Missing
from scopetrace._compat.shape_env import DimSpec
from scopetrace._compat.symbols import BINDING_KEYS, METHODS, CallMethodKey, Symbolic
from scopetrace.containers.structure import Effect, Removed, Returned
from scopetrace.files.archive import name_of, torch_object
from scopetrace.ir import conditions, guards, registered, tape, write_back
from scopetrace.ir.scopes import Scope
from scopetrace.ir.side_effects import SideEffect
from scopetrace.ir.tape import BodyTape, FunctionalTape, Op, ProgramTape, Tape, Value

_TAPES = (tape.RecordedTape, FunctionalTape, BodyTape)

TABLES: dict[type, str] = {
    Value: "values",
    **{Op: "ops", tape.Call: "calls", Scope: "scopes"},
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
    *(guards.Guard, Missing, guards.OfInput, guards.GradientOfInput, SideEffect),
    *(guards.Flag, guards.WhichInputs, guards.WhichContainers, guards.HasGradient),
    *BINDING_KEYS,
)

RECORDS = {kind.__name__: kind for kind in (*_TAPES, *_INLINE)}
"""By name, the data classes that a file may have, beside those of the tables."""

NAMES = {kind: name for name, kind in RECORDS.items()}

FORMS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    float: ("float", str, {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}.__getitem__),
    complex: ("complex", lambda x: [x.real, x.imag], lambda parts: complex(*parts)),
    bytes: ("bytes", lambda x: base64.b64encode(x).decode(), lambda text: base64.b64decode(text, validate=True)),
    tuple: ("tuple", list, tuple),
    dict: ("dict", lambda x: [[key, item] for key, item in x.items()], dict),
    set: ("set", list, set),
    frozenset: ("frozenset", list, frozenset),
    slice: ("slice", lambda x: [x.start, x.stop, x.step], lambda parts: slice(*parts)),
    torch.Size: ("size", list, torch.Size),
    torch.device: ("device", str, torch.device),
    **{
        kind: (kind.__name__, name_of, functools.partial(torch_object, kind))
        for kind in (torch.dtype, torch.layout, torch.memory_format)
    },
    type(...): ("ellipsis", lambda x: None, lambda data: ...),
    Removed: ("removed", lambda x: x.name, lambda name: Removed(str(name))),
}
"""By class, the tag of an object as data, what gives its contents, and what builds it from these."""

_OF_A_TAPE = ("shape_env", "fake_mode", "inference")

LEFT_OUT: dict[type, tuple[str, ...]] = {
    tape.Call: ("module",),
    tape.AttributeWrite: ("module", "place"),
    conditions.SizeRules: ("env", "dynamic_shapes"),
    DimSpec: ("derive",),  # used only where the trace is made
    guards.GradientOfInput: ("gradient",),
    guards.WhichContainers: ("held",),
    **dict.fromkeys(_TAPES, (*_OF_A_TAPE, "example_inputs", "settled")),
    BodyTape: _OF_A_TAPE,
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
"""Leaf modules take and give objects of any class, and an op of a pickle one of C++; `refuse_code` checks arguments."""


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


# What would be code --------------------------------------------------------------------------------------------------

# torch.fx writes names of arguments, attributes and keywords into the code of a graph as they are, and the `repr` of
# constants. So a name that is no name, and an object whose text a file chooses, would be code that the file brings.

_CONSTANTS = (
    *(type(None), bool, int, float, complex, str, bytes, type(...), enum.Enum, *OPS),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Classes whose `repr` is the object, or which torch.fx writes in another safe way."""
_TENSORS = (Value, type(None), bool, int, float, complex, *Symbolic)
"""What an op takes for a tensor."""
_OPERANDS = (Value, BodyTape, *Symbolic)


def refuse_code(tape: ProgramTape, *, is_file: bool) -> None:
    """Raise ValueError for a tape whose names or constants would be code. A pickle may also have objects of its own."""
    for inner in tape.walk():
        for op in inner.ops:
            _check_op(op, is_file)
        for x in _outputs(inner):
            if not isinstance(x, _OPERANDS):
                raise ValueError(f"a program gives {type(x).__name__}")
        for call in inner.calls:
            if not is_writable(call.fqn or "", keywords=True):
                raise ValueError(f"{call.fqn!r} is no name of a module")
        if isinstance(inner, BodyTape):
            _check_name(inner.name)


def _outputs(tape: Tape) -> Iterator[Any]:
    if isinstance(tape, ProgramTape):
        yield from (write.value for write in tape.attribute_writes)
    if isinstance(tape, FunctionalTape) and tape.returned is not None:
        yield from tape.returned
    elif isinstance(tape, BodyTape):
        yield from (x for x in _leaves(tape.outputs) if not isinstance(x, _CONSTANTS))


def _check_op(op: Op, is_file: bool) -> None:
    if op.kind == "placeholder":
        _check_name(op.target)
    elif op.kind != "call_function" and not (isinstance(op.target, str) and is_writable(op.target)):
        raise ValueError(f"{op.target!r} is no name of an attribute")
    for name in op.kwargs:
        _check_name(name)
    if any(isinstance(key, CallMethodKey) and key.name not in METHODS for key in _leaves(op.unbacked or {})):
        raise ValueError(f"a size is no result of {op.unbacked}")
    if op.kind == "call_module" and is_file:
        raise ValueError(f"a file has no code of a leaf module, such as {op.target}")
    if op.kind == "call_function":
        _check_arguments(op)
        for x in _leaves((op.args, op.kwargs)):
            if not isinstance(x, (*_OPERANDS, *_CONSTANTS)) and (is_file or not isinstance(x, torch.ScriptObject)):
                raise TypeError(f"an argument of {op.target} is an object of {type(x).__name__}")


def _check_arguments(op: Op) -> None:
    """Raise TypeError for arguments that the op does not have, and for others than tensors where it takes tensors."""
    if not is_op(op.target):
        return
    arguments = schema_of(op.target).arguments
    operands = dict(zip([a.name for a in arguments if not a.kwarg_only], op.args, strict=False)) | op.kwargs
    kinds = {a.name: a for a in arguments}
    if len(operands) != len(op.args) + len(op.kwargs) or not operands.keys() <= kinds.keys():
        raise TypeError(f"{op.target} does not take these arguments")
    for name, x in operands.items():
        if kinds[name].is_tensor and not all(isinstance(leaf, _TENSORS) for leaf in _leaves(x)):
            raise TypeError(f"{name} of {op.target} is no tensor")


def _leaves(x: Any) -> Iterator[Any]:
    """What torch.fx writes of an argument, beside lists, tuples, dicts and slices."""
    if isinstance(x, (list, tuple)):
        for item in x:
            yield from _leaves(item)
    elif isinstance(x, dict):
        yield from _leaves([*x, *x.values()])
    elif isinstance(x, slice):
        yield from (x.start, x.stop, x.step)
    else:
        yield x


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{name!r} is no name of an argument")
