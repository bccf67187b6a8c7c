"""Tapes from the data that `Encoder` gave.

Data flow:
    tables of rows -> scopes, frames, fakes, values, calls, ops, tapes, each made once, when it is first referred to
    `{tag: data}` -> the object: one of torch's or of ours, a container of the user's, or a `NamedObject` for it

Nothing is imported, and nothing is called by a name in the data but what stands in the tables of this file. Whatever is
wrong raises; `read` makes one error of it.
"""

from __future__ import annotations

import enum
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import parametrize

from scopetrace._compat.expressions import decode_expression, restore_environment
from scopetrace._compat.ops import OPS, find_higher_order, find_op
from scopetrace._compat.shape_env import sym_node
from scopetrace._compat.tensors import FakeFactory, without_dispatch
from scopetrace.containers.classes import NamedObject, class_of_name, object_named
from scopetrace.containers.structure import unflattened
from scopetrace.errors import TraceFileError
from scopetrace.files.archive import ArchiveReader, torch_object
from scopetrace.files.records import FORMS, LEFT_OUT, RECORDS, checked_fields
from scopetrace.ir.conditions import SizeRules
from scopetrace.ir.scopes import Code, Scope
from scopetrace.ir.tape import GIVEN_META, Call, Op, Signed, Tape, Value

_NUMBERS = {"SymInt": torch.SymInt, "SymFloat": torch.SymFloat, "SymBool": torch.SymBool}
_PYTHON_NUMBERS: dict[str, type] = {"int": int, "float": float, "bool": bool}
_PLAIN_FORMS = {tag: make for tag, _, make in FORMS.values()}
_BUSY = object()


class Decoder:
    """Makes objects of the rows of `tables`. All fake tensors belong to one fake mode, all sizes to one environment."""

    def __init__(
        self, tables: dict[str, list[Any]], environment: Any, archive: ArchiveReader, foreign: list[Any]
    ) -> None:
        self._tables = tables
        self._archive = archive
        self._foreign = foreign
        self._objects: dict[str, list[Any]] = {name: [None] * len(rows) for name, rows in tables.items()}
        self._factory = FakeFactory()
        if environment is not None:
            restore_environment(self._factory.shape_env, environment)
        for table in ("scopes", "frames", "values", "calls"):  # outer ones first, so that no recursion is deep
            for number in range(len(tables.get(table, ()))):
                self.row(table, number)

    def row(self, table: str, number: Any) -> Any:
        """What a row of a table stands for."""
        objects = self._objects[table]
        if type(number) is not int or not 0 <= number < len(objects):
            raise ValueError(f"there is no row {number} of {table}")
        if objects[number] is _BUSY:
            raise ValueError(f"row {number} of {table} leads to itself")
        if objects[number] is None:
            objects[number] = _BUSY
            objects[number] = _ROWS[table](self, self._tables[table][number])
        return objects[number]

    def data(self, x: Any) -> Any:
        """The object of what `Encoder.data` gave."""
        if isinstance(x, list):
            return [self.data(item) for item in x]
        if not isinstance(x, dict):
            return x
        ((tag, inside),) = x.items()
        if tag in _PLAIN_FORMS:
            return _PLAIN_FORMS[tag](self.data(inside))
        return self.row(tag, inside) if tag in _ROWS else _FORMS[tag](self, inside)

    # ---------------------------------------------------------------- the program

    def fields(self, kind: type, row: dict[str, Any]) -> dict[str, Any]:
        """The fields of an instance of `kind`."""
        values = {name: self._frames(x) if name == "frames" else self.data(x) for name, x in row.items()}
        return {**dict.fromkeys(LEFT_OUT.get(kind, ())), **checked_fields(kind, values)}

    def _scope(self, row: Any) -> Scope:
        parent, name, type_name = row
        _expect(str, name, type_name)
        return Scope(name, type_name) if parent is None else self.row("scopes", parent).child(name, type_name)

    def _frames(self, x: Any) -> Any:
        return () if x is None else x if isinstance(x, str) else self.row("frames", x)

    def _linked_frames(self, row: Any) -> Any:
        outer, inner = row
        for file, name, line in inner:
            _expect(str, file, name)
            _expect(int, line)
        return self._frames(outer), tuple((Code(file, name), line) for file, name, line in inner)

    def _fake(self, row: Any) -> torch.Tensor:
        size, layout, dtype, device, requires_grad = row
        what = torch_object(torch.dtype, dtype), torch.device(device)
        if isinstance(layout, str):  # sparse
            with self._factory.mode, torch.no_grad():
                kind = torch_object(torch.layout, layout)
                fake = torch.empty(self.data(size), layout=kind, dtype=what[0], device=what[1])
                return fake.requires_grad_(bool(requires_grad))
        with without_dispatch(), torch.no_grad():
            return self._factory.fresh(self.data(size), self.data(layout), *what, bool(requires_grad))

    def _value(self, row: Any) -> Value:
        fake, slot, storage, offset, real, requires_grad, autograd_placeholder = row
        _expect(int, slot, storage)
        _expect(bool, requires_grad, autograd_placeholder)
        value = Value(self.row("fakes", fake), slot, storage, None)
        value.offset, value.real = self.data(offset), self.data(real)
        _expect((int, torch.SymInt), value.offset)
        _expect((torch.Tensor, type(None)), value.real)
        value.requires_grad, value.autograd_placeholder = requires_grad, autograd_placeholder
        return value

    def _op(self, row: Any) -> Op:
        op = Op(**self.fields(Op, row))
        if op.kind == "call_function":
            _expect(OPS, op.target)
        elif op.kind not in ("placeholder", "get_attr", "call_module") or not op.name:
            raise ValueError(f"an op of kind {op.kind!r}")
        _expect(dict, *(op.meta or {}).values())
        if op.meta and not op.meta.keys() <= {*GIVEN_META}:
            raise ValueError(f"an op with {', '.join(op.meta)}")
        return op

    def _call(self, row: Any) -> Call:
        row = dict(row)
        kind, signature, raised = row.pop("module_type", None), row.pop("signature", None), row.pop("raised", None)
        call = Call(
            **self.fields(Call, row),
            module_type=None if kind is None else self.row("classes", kind),
            raised=None if raised is None else RuntimeError(str(raised)),
        )
        call.signature = None if signature is None else self._signature(signature)
        return call

    def _tape(self, row: Any) -> Tape:
        name, fields = row
        kind = RECORDS[name]
        if "foreign" not in fields.get("context_fn", {"foreign": 0}):
            raise ValueError("the policy of a region is code in a file")
        tape: Any = kind(**self.fields(kind, fields))
        tape.shape_env, tape.fake_mode = self._factory.shape_env, self._factory.mode
        return tape

    def _record(self, data: Any) -> Any:
        name, row = data
        kind = RECORDS[name]
        fields = self.fields(kind, row)
        if kind is SizeRules:
            fields["env"] = self._factory.shape_env
        return kind(**fields)

    def _number(self, row: Any) -> Any:
        kind, expr, pytype, hint = row
        _expect((int, float, type(None)), hint)
        return _NUMBERS[kind](sym_node(self._factory.shape_env, decode_expression(expr), _PYTHON_NUMBERS[pytype], hint))

    # ---------------------------------------------------------------- objects of users

    def _class(self, row: Any) -> type:
        module, qualname, base, signature = row
        _expect(str, module, qualname)
        if base is not None:  # torch makes the class of a parametrized module, which no Python module has
            return type(qualname, (self.row("classes", base),), {"__module__": parametrize.__name__})
        if signature is None:
            return class_of_name(module, qualname)
        return class_of_name(module, qualname, (torch.nn.Module,), {"forward": Signed(self._signature(signature))})

    def _signature(self, rows: Any) -> inspect.Signature:
        def parameter(name: Any, kind: Any, *default: Any) -> inspect.Parameter:
            defaults = {"default": self.data(default[0])} if default else {}
            return inspect.Parameter(name, _kind(kind), **defaults)

        return inspect.Signature([parameter(*row) for row in rows])

    def _container(self, data: Any) -> Any:
        kind, context, children = data
        for key, _ in children:
            _expect(str, key)
        inside = [(key, self.data(item)) for key, item in children]
        return unflattened(self.row("classes", kind), self.data(context), inside)

    def _named(self, data: Any) -> Any:
        module, qualname, text = data
        _expect(str, module, qualname, text)
        named = object_named(module, qualname)
        if isinstance(named, (type, enum.Enum, types.FunctionType, types.BuiltinFunctionType)):
            return named
        return NamedObject(object, None, text, module, qualname)

    def _object(self, data: Any) -> NamedObject:
        kind, attributes, text = data
        _expect(str, text)
        inside = self.data(attributes)
        _expect((dict, type(None)), inside)
        return NamedObject(self.row("classes", kind), inside, text)


def _expect(kind: Any, *values: Any) -> None:
    for value in values:
        if not isinstance(value, kind):
            raise TypeError(f"{value!r} is no {kind}")


_kind: Callable[[int], Any] = type(inspect.Parameter.VAR_KEYWORD)


def _op_of(decoder: Decoder, data: Any) -> Any:
    name, overload = data
    _expect(str, name, overload)
    op = find_op(name, overload)
    if op is None:
        full = f"{name.replace('::', '.')}.{overload or 'default'}"
        raise TraceFileError(
            f"the trace uses {full}, which torch {torch.__version__} does not have; "
            "import the library that registers it before the trace is loaded"
        )
    return op


def _higher_order(decoder: Decoder, name: Any) -> Any:
    op = find_higher_order(name)
    if op is None:
        raise TraceFileError(f"the trace uses {name}, which torch {torch.__version__} does not have")
    return op


_ROWS: dict[str, Callable[[Decoder, Any], Any]] = {
    "scopes": Decoder._scope,
    "frames": Decoder._linked_frames,
    "fakes": Decoder._fake,
    "values": Decoder._value,
    "calls": Decoder._call,
    "ops": Decoder._op,
    "tapes": Decoder._tape,
    "tensors": lambda decoder, row: decoder._archive.tensor(row),
    "numbers": Decoder._number,
    "classes": Decoder._class,
}

_FORMS: dict[str, Callable[[Decoder, Any], Any]] = {
    "record": Decoder._record,
    "container": Decoder._container,
    "named": Decoder._named,
    "object": Decoder._object,
    "op": _op_of,
    "higher_order": _higher_order,
    "expression": lambda decoder, data: decode_expression(data),
    "foreign": lambda decoder, number: decoder._foreign[number],
}
