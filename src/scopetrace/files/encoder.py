"""Tapes as data for JSON.

Data flow:
    tape -> rows of fields, in tables: values, ops, calls, tapes, scopes, frames, fakes, numbers, tensors, classes
    anything in a field -> itself (text, number, list) or `{tag: data}`; a reference to a row is `{table: number}`

What has no form as data is foreign: an error for a file, a number in a list for a pickle.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import math
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.nn.utils import parametrize

from scopetrace._compat.expressions import encode_expression
from scopetrace._compat.ops import OPS, is_higher_order, schema_of
from scopetrace._compat.symbols import Symbolic
from scopetrace._compat.tensors import FakeTensor
from scopetrace.containers.classes import NamedObject, object_named
from scopetrace.containers.structure import flattened, is_plain_object
from scopetrace.errors import ScopetraceWarning
from scopetrace.files.archive import PLAIN, ArchiveWriter, name_of
from scopetrace.files.records import FORMS, NAMES, TABLES, fields_of, is_default
from scopetrace.formatting import short_repr
from scopetrace.ir.guards import in_a_file
from scopetrace.ir.scopes import Frames, Scope
from scopetrace.ir.tape import BodyTape, Call, Op, ProgramTape, Tape, Value, is_plain, signature_of

_ITSELF = (type(None), bool, int, str, float)


class NoForm(Exception):
    """An object that is no data, in its only argument."""


class Encoder:
    """Writes objects into tables, and real tensors into an archive.

    `foreign` takes what has no form as data; None: such objects raise NoForm, but for those that are only shown.
    """

    def __init__(self, archive: ArchiveWriter, foreign: list[Any] | None) -> None:
        self.tables: dict[str, list[Any]] = {}
        self._archive = archive
        self._foreign = foreign
        self._only_shown = False
        self._rows: dict[tuple[str, Any], int] = {}
        self._keep: list[Any] = []  # ids must not be used again
        self._storages: dict[int, int] = {}

    def data(self, x: Any) -> Any:
        """An object as data."""
        kind = type(x)
        if kind in _ITSELF and (kind is not float or math.isfinite(x)):
            return x
        if kind is list:
            return [self.data(item) for item in x]
        if kind in FORMS:
            tag, contents, _ = FORMS[kind]
            return {tag: self.data(contents(x))}
        if kind in TABLES:
            return {TABLES[kind]: self.row_of(x)}
        if kind in NAMES:
            return {"record": [NAMES[kind], self._fields(x)]}
        for base, form in _BASES:
            if isinstance(x, base):
                return form(self, x)
        parts = flattened(x)
        if parts is not None:
            owner, context, children = parts
            return {"container": [self.class_row(owner), self.data(context), [[k, self.data(c)] for k, c in children]]}
        return self._object(x)

    def _row(self, table: str, x: Any, key: Any, make: Callable[[], Any]) -> int:
        """The number of the row of `x`, which is known by `key`."""
        if (table, key) not in self._rows:
            row = make()  # which may make rows before it
            rows = self.tables.setdefault(table, [])
            self._rows[table, key] = len(rows)
            rows.append(row)
            self._keep.append(x)
        return self._rows[table, key]

    # ---------------------------------------------------------------- the program

    def row_of(self, x: Any) -> int:
        """The row of a value, op, call, tape or scope."""
        if isinstance(x, Call) and x.parent is not None:
            self.row_of(x.parent)  # outer calls first, so that reading needs no deep recursion
        return self._row(TABLES[type(x)], x, id(x), lambda: _ROWS[TABLES[type(x)]](self, x))

    def _scope(self, scope: Scope) -> list[Any]:
        return [scope.parent and self.row_of(scope.parent), scope.name, scope.type_name]

    def _fields(self, x: Any, **changed: Any) -> dict[str, Any]:
        """The fields that differ from their defaults; those that are `changed` have another value in the file."""
        row = {}
        for name, field in fields_of(type(x)).items():
            value = changed.get(name, getattr(x, name))
            if not is_default(field, value):
                row[name] = self._frames(value) if name == "frames" else self.data(value)
        return row

    def _tape(self, tape: Tape) -> list[Any]:
        for scope in tape.scopes():
            self.row_of(scope)
        for call in tape.calls:
            self.row_of(call)
        changed: dict[str, Any] = {"owners": {name: (None, at) for name, (_, at) in tape.owners.items()}}
        if isinstance(tape, ProgramTape):
            changed["guards"] = in_a_file(tape.guards, tape.attributes.values())
        for name in ("uses_absolute_offset", "written"):
            if hasattr(tape, name):
                changed[name] = sorted(map(self._storage, getattr(tape, name)))
        policy: dict[str, Any] = {}
        if isinstance(tape, BodyTape) and tape.context_fn is not None:
            changed["context_fn"] = None
            if self._foreign is not None:
                policy["context_fn"] = self._no_form(tape.context_fn)
            else:
                text = "a policy of selective checkpointing is not in the file: a loaded trace computes whole regions "
                text += "again, with equal results; pickle.dumps(trace) keeps it"
                warnings.warn(text, ScopetraceWarning, stacklevel=2)
        return [NAMES[type(tape)], self._fields(tape, **changed) | policy]

    def _op(self, op: Op) -> dict[str, Any]:
        row = self._fields(op, meta=None)
        if op.meta is None:
            return row
        stacks = {key: _by_name(stack) for key, stack in op.meta.items() if key != "custom"}
        with self._to_show():
            return {**row, "meta": self.data({**op.meta, **stacks})}

    def _call(self, call: Call) -> dict[str, Any]:
        raised = call.raised and f"{type(call.raised).__name__}: {call.raised}"
        plain = {name: value for name, value in call.attributes.items() if is_plain(value)}
        kind = call.module_type
        with self._to_show():
            row = self._fields(call, raised=raised, attributes=plain, module_type=None, signature=None)
            if kind is not None:
                row["module_type"] = self.class_row(kind)
            if isinstance(call.module, torch.jit.ScriptModule):  # each has a forward of its own
                row["signature"] = self._signature(call.module.forward)
            return row if call.signature is None else {**row, "signature": self._parameters(call.signature)}

    @contextlib.contextmanager
    def _to_show(self) -> Iterator[None]:
        """What has no form as data is written as its text, inside: it is shown, and the program does not use it."""
        outer, self._only_shown = self._only_shown, self._foreign is None
        try:
            yield
        finally:
            self._only_shown = outer

    def _value(self, value: Value) -> list[Any]:
        real = None if value.real is None else self._tensor(value.real)
        flags = [value.requires_grad, value.autograd_placeholder]
        return [self._fake(value.fake), value.slot, self._storage(value.storage), self.data(value.offset), real, *flags]

    def _storage(self, storage: int) -> int:
        """A number from 1 on: passes number the storages that they add from -1 downwards."""
        return self._storages.setdefault(storage, len(self._storages) + 1)

    def _fake(self, fake: torch.Tensor) -> int:
        def make() -> list[Any]:
            if fake.layout not in (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
                raise NoForm(fake)
            strided = fake.layout is torch.strided
            layout = self.data(list(fake.stride())) if strided else name_of(fake.layout)
            return [self.data(list(fake.size())), layout, name_of(fake.dtype), str(fake.device), fake.requires_grad]

        return self._row("fakes", fake, id(fake), make)

    def _tensor(self, t: torch.Tensor) -> dict[str, Any]:
        if isinstance(t, FakeTensor):
            return {"fakes": self._fake(t)}
        if type(t) not in PLAIN:
            return self._no_form(t)
        return {"tensors": self._row("tensors", t, id(t), lambda: self._archive.add_tensor(t))}

    def _number(self, number: Any) -> dict[str, int]:
        node = number.node
        hint = None if node.hint is None else node.pytype(node.hint)
        row = [type(number).__name__, encode_expression(node.expr), node.pytype.__name__, hint]
        return {"numbers": self._row("numbers", number, repr(row), lambda: row)}

    def _frames(self, frames: Frames) -> Any:
        """Text, None, or a row: that of the frames outside, and the frames inside."""
        if isinstance(frames, str) or not frames:
            return frames or None
        outer = self._frames(frames[0])
        inner: Any = frames[1]
        rows = [[code.co_filename, code.co_name, line] for code, line in inner]
        return self._row("frames", frames, id(frames), lambda: [outer, rows])

    # ---------------------------------------------------------------- objects of users

    def class_row(self, kind: type) -> int:
        """The row of a class: its name and, of a module's class, the signature of forward."""

        def make() -> list[Any]:
            forward = getattr(kind, "forward", None) if issubclass(kind, torch.nn.Module) else None
            is_of_torch = kind.__module__ == parametrize.__name__ and not hasattr(parametrize, kind.__name__)
            base = self.class_row(kind.__base__) if is_of_torch and kind.__base__ else None
            return [kind.__module__, kind.__qualname__, base, forward and self._signature(forward)]

        return self._row("classes", kind, kind, make)

    def _signature(self, forward: Any) -> list[Any] | None:
        try:
            return self._parameters(signature_of(forward))
        except (TypeError, ValueError):
            return None

    def _parameters(self, signature: inspect.Signature) -> list[Any]:
        parameters = list(signature.parameters.values())
        with self._to_show():
            defaults = [[] if p.default is p.empty else [self.data(p.default)] for p in parameters]
        return [[p.name, int(p.kind), *default] for p, default in zip(parameters, defaults, strict=True)]

    def _object(self, x: Any) -> dict[str, Any]:
        """A function, class, member of an enum, or an object that consists of its attributes."""
        if isinstance(x, (type, enum.Enum, types.FunctionType, types.BuiltinFunctionType)):
            kind = type(x)
            if isinstance(x, enum.Enum):
                named = kind.__module__, f"{kind.__qualname__}.{x.name}"
            else:
                named = x.__module__, x.__qualname__
            if object_named(*named) is x:
                return {"named": [*named, kind.__name__]}
        elif (
            not (self._only_shown or isinstance(x, (list, tuple, dict)))
            and is_plain_object(x)
            and all(is_plain(item) or isinstance(item, (list, dict, tuple)) for item in vars(x).values())
        ):
            return {"object": [self.class_row(type(x)), self.data(vars(x)), short_repr(x)]}
        return self._no_form(x)

    def _saved_object(self, x: NamedObject) -> dict[str, Any]:
        """An object of a trace that was itself loaded."""
        if x.name is not None:
            return {"named": [x.module, x.name, x.text]}
        return {"object": [self.class_row(x.kind), self.data(x.attributes), x.text]}

    def _no_form(self, x: Any) -> dict[str, Any]:
        if self._only_shown:
            return {"object": [self.class_row(type(x)), None, short_repr(x)]}
        if self._foreign is None:
            raise NoForm(x)
        self._foreign.append(x)
        return {"foreign": len(self._foreign) - 1}


def _by_name(stack: dict[str, Any]) -> dict[str, Any]:
    """An `nn_module_stack` with the names of classes, as torch.export has it."""
    names = {cls: f"{cls.__module__}.{cls.__qualname__}" for _, cls in stack.values() if isinstance(cls, type)}
    return {key: (path, names.get(cls, cls)) for key, (path, cls) in stack.items()}


def _target(encoder: Encoder, x: Any) -> dict[str, Any]:
    return {"higher_order": x.name()} if is_higher_order(x) else {"op": [schema_of(x).name, schema_of(x).overload]}


_ROWS: dict[str, Callable[[Encoder, Any], Any]] = {
    **{"values": Encoder._value, "scopes": Encoder._scope, "calls": Encoder._call},
    **{"ops": Encoder._op, "tapes": Encoder._tape},
}

_BASES: tuple[tuple[Any, Callable[[Encoder, Any], Any]], ...] = (
    (torch.Tensor, Encoder._tensor),
    (NamedObject, Encoder._saved_object),
    (Symbolic, Encoder._number),
    (OPS, _target),
    (sympy.Basic, lambda encoder, x: {"expression": encode_expression(x)}),
)
"""How instances of classes and of their subclasses are written."""
