"""The functions that a forward may run, read off their code before it runs.

Data flow:
    the traced callable, its modules' classes and hooks -> their code -> names in it
    a name, looked up in globals, closures, classes -> more functions, until there are none
    what names lead to that is no function -> `Found`: objects, tables and cells that the forward may write to

It follows names, not calls: it finds more functions than run, and not those that are looked up by a computed name.
Functions of torch and of the standard library are not followed.
"""

from __future__ import annotations

import dis
import enum
import functools
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from scopetrace._compat.sources import NOT_THE_MODEL, is_of_python

PACKAGES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
"""Where libraries are installed."""
_OPERATORS = (
    *(
        "forward",
        "__call__",
        "__enter__",
        "__exit__",
        "__getattr__",
        "__getitem__",
        "__setitem__",
        "__delitem__",
        "__contains__",
    ),
    *("__iter__", "__next__", "__len__"),
)
"""Methods that run without being named, and forward; those of arithmetic and comparison are taken to write nothing."""

_LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "torchgen", "sympy", "numpy", "scopetrace"}


@functools.cache
def is_users(filename: str) -> bool:
    """Whether a file is neither torch's nor the standard library's."""
    return not filename.startswith(NOT_THE_MODEL) and not is_of_python(filename)


def is_users_class(kind: Any) -> bool:
    """Whether a class was made neither by torch nor by the standard library."""
    return str(kind.__module__).partition(".")[0] not in _LIBRARIES


ATOMS = frozenset(
    {bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, range, type(...)}
)
"""The classes of values that have no content and run no code."""


class Names(NamedTuple):
    """What the code of a function, and of the functions inside it, names."""

    all: frozenset[str]
    """Its globals and attributes."""
    globals: frozenset[str]
    """The globals that it reads."""
    bound_globals: frozenset[str]
    """The globals that it binds or deletes."""
    bound_attributes: frozenset[str]
    """The attributes that it binds or deletes."""


_names: dict[int, tuple[Names, weakref.ref[types.CodeType]]] = {}  # a cache by id; an entry goes with its code


def names_of(code: types.CodeType) -> Names:
    """The names in a function's code."""
    known = _names.get(id(code))
    if known is None:
        key = id(code)
        known = _names[key] = _read_names(code), weakref.ref(code, lambda _: _names.pop(key, None))
    return known[0]


def _read_names(code: types.CodeType) -> Names:
    """As `dis.get_instructions` says, which would take as long as the trace of a small model."""
    reads, binds, attributes = set[str](), set[str](), set[str]()
    raw, extended = code.co_code, 0
    for i in range(0, len(raw), 2):
        operand = raw[i + 1] | extended
        extended = operand << 8 if raw[i] == dis.EXTENDED_ARG else 0
        if raw[i] == _LOAD_GLOBAL:
            reads.add(code.co_names[operand >> 1])  # the lowest bit is a flag
        elif raw[i] in _BIND_GLOBAL:
            binds.add(code.co_names[operand])
        elif raw[i] in _BIND_ATTRIBUTE:
            attributes.add(code.co_names[operand])
    if "globals" in reads:  # globals()["N"] = 1
        binds |= {c for c in code.co_consts if isinstance(c, str)}
    own = Names(frozenset(code.co_names), frozenset(reads), frozenset(binds), frozenset(attributes))
    inner = [names_of(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return Names(*(one.union(*others) for one, *others in zip(own, *inner, strict=True))) if inner else own


_MEMO = type(functools.cache(len))
_LOAD_GLOBAL = dis.opmap["LOAD_GLOBAL"]
_BIND_GLOBAL = (dis.opmap["STORE_GLOBAL"], dis.opmap["DELETE_GLOBAL"])
_BIND_ATTRIBUTE = (dis.opmap["STORE_ATTR"], dis.opmap["DELETE_ATTR"])


class Reach:
    """Follows names from functions and classes; tells `visit` of each object that a name leads to.

    `visit(name, key, x)` is called with the name in source (`globals()['CACHE']`, `closure hits`), the key of
    `syntax.uses` (`CACHE`), and the object.
    """

    def __init__(self, visit: Callable[[str, str, Any], None]) -> None:
        self._visit = visit
        self.functions: list[types.FunctionType] = []
        """The functions that may run, in the order in which they were found."""
        self.classes: dict[type, None] = {}
        """The users' classes whose attributes they may write to."""
        self.bases: dict[type, None] = {}
        """The users' classes that they name."""
        self.cells: dict[int, tuple[str, types.CellType]] = {}
        """By id, the variables of enclosing functions, with their names."""
        self.globals: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        """The globals that they bind: the table and the name."""
        self.looked_up: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        """The globals that they name, with their values."""
        self._seen: set[int] = set()
        self.names: set[str] = set()
        """The globals and attributes that they name."""
        self._known: set[type] = set()
        self._members: dict[str, list[tuple[type, Any]]] = {}
        self._pending: list[types.FunctionType] = []

    def add(self, x: Any) -> None:
        """Follow a function, method, partial or class; nothing is done for other objects."""
        while isinstance(x, functools.partial):
            self._visit("partial", "", (*x.args, *x.keywords.values()))
            x = x.func
        if isinstance(x, types.MethodType):
            x = x.__func__
        if isinstance(x, (staticmethod, classmethod)):
            x = x.__func__
        if isinstance(x, property):
            for accessor in (x.fget, x.fset):
                self.add(accessor)
        elif isinstance(x, types.FunctionType):
            self._add_function(x)
        elif isinstance(x, _MEMO):
            self.add(x.__wrapped__)

    def add_class(self, kind: type) -> None:
        """Follow the methods of a class that some function names, its `forward` and its operators."""
        for base in kind.__mro__:
            if base in self._known:
                continue
            self._known.add(base)
            if not is_users_class(base):
                continue
            self.classes[base] = None
            for name, member in vars(base).items():
                if name in self.names or name in _OPERATORS:
                    self._add_member(base, name, member)
                else:
                    self._members.setdefault(name, []).append((base, member))

    def _add_member(self, base: type, name: str, member: Any) -> None:
        if isinstance(member, (types.FunctionType, staticmethod, classmethod, property)):
            self.add(member)
        elif name[:2] != "__":
            self._visit(f"{base.__name__}.{name}", f".{name}", member)

    def _add_function(self, function: types.FunctionType) -> None:
        if id(function) in self._seen or not is_users(function.__code__.co_filename):
            return
        self._seen.add(id(function))
        self.functions.append(function)
        self._pending.append(function)
        if len(self._pending) > 1:
            return  # the loop below is running
        while self._pending:
            self._follow(self._pending[0])
            self._pending.pop(0)

    def _follow(self, function: types.FunctionType) -> None:
        code, table = function.__code__, function.__globals__
        names = names_of(code)
        for name in names.bound_globals:
            self.globals[id(table), name] = table, name
        for name in names.all - self.names:
            self.names.add(name)
            for base, member in self._members.pop(name, ()):
                self._add_member(base, name, member)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            self._add_cell(name, cell)
        for name in names.globals & table.keys():
            if (id(table), name) not in self.looked_up:
                self._look_up(table, name, names)
        for name, default in _defaults(function) if function.__defaults__ or function.__kwdefaults__ else ():
            if type(default) not in ATOMS:
                self._visit(f"{function.__name__}'s default of {name}", f"{name}=", default)

    def _add_cell(self, name: str, cell: types.CellType) -> None:
        if id(cell) in self.cells:
            return
        self.cells[id(cell)] = name, cell
        try:
            content = cell.cell_contents
        except ValueError:  # a variable that is not bound yet
            return
        self.add(content)
        self._visit(f"closure {name}", name, content)

    def _look_up(self, table: dict[str, Any], name: str, names: Names | None) -> None:
        """Follow a global; `names` are those of the function that reads it, None where it is in another file."""
        value = table[name]
        self.looked_up[id(table), name] = table, name, value
        if type(value) is types.FunctionType:
            self._add_function(value)
            if value.__dict__:
                self._visit(f"globals()[{name!r}]", name, value)
        elif type(value) in ATOMS:
            return
        elif isinstance(value, type):
            self._look_into_class(value, names)
        elif not isinstance(value, types.ModuleType):
            self.add(value)
            self._visit(f"globals()[{name!r}]", name, value)
        elif names is not None:
            self._look_into_module(vars(value), names, is_users(getattr(value, "__file__", None) or "<frozen"))

    def _look_into_module(self, inside: dict[str, Any], names: Names, follow: bool) -> None:
        for name in names.bound_attributes:
            self.globals[id(inside), name] = inside, name
        for name in names.all & inside.keys() if follow else ():
            if (id(inside), name) not in self.looked_up:
                self._look_up(inside, name, None)

    def _look_into_class(self, kind: type, names: Names | None) -> None:
        """What a function names of a class; instances are followed where they are found."""
        if names is None or not is_users_class(kind) or issubclass(kind, enum.Enum):
            return
        self.bases.setdefault(kind)
        for base in kind.__mro__:
            for name in names.all & vars(base).keys() if is_users_class(base) else ():
                self._add_member(base, name, vars(base)[name])


def _defaults(function: types.FunctionType) -> list[tuple[str, Any]]:
    """The parameters with defaults, and these."""
    values, code = function.__defaults__ or (), function.__code__
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return [*zip(names, values, strict=True), *(function.__kwdefaults__ or {}).items()]
