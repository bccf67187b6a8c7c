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
import functools
import sys
import sysconfig
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from scopetrace._compat.sources import NOT_THE_MODEL, prefixes

_STANDARD = prefixes(Path(sysconfig.get_paths()["stdlib"]))
_PACKAGES = prefixes(Path(sysconfig.get_paths()["purelib"])) + prefixes(Path(sysconfig.get_paths()["platlib"]))
_NOT_CALLED = (
    *("__init__", "__new__", "__repr__", "__str__", "__setstate__", "__getstate__", "__reduce__", "__reduce_ex__"),
    *("__deepcopy__", "__copy__", "__init_subclass__", "__class_getitem__", "__del__", "__dir__", "__eq__", "__hash__"),
)
_LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "torchgen", "sympy", "numpy", "scopetrace"}


@functools.cache
def is_users(filename: str) -> bool:
    """Whether a file is neither torch's nor the standard library's."""
    if filename.startswith((*NOT_THE_MODEL, "<frozen")):
        return False
    return not filename.startswith(_STANDARD) or filename.startswith(_PACKAGES)


@functools.cache
def is_users_class(kind: Any) -> bool:
    """Whether a class was made neither by torch nor by the standard library."""
    return str(kind.__module__).partition(".")[0] not in _LIBRARIES


@functools.cache
def names_of(code: types.CodeType) -> frozenset[str]:
    """The globals and attributes that a function names, and the functions inside it."""
    inner = [names_of(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


@functools.cache
def globals_of(code: types.CodeType) -> frozenset[str]:
    """The globals that a function reads, and the functions inside it."""
    return _operands(code, (dis.opmap["LOAD_GLOBAL"],), 1)


@functools.cache
def bound_globals(code: types.CodeType) -> frozenset[str]:
    """The globals that a function binds or deletes, and the functions inside it."""
    found = _operands(code, (dis.opmap["STORE_GLOBAL"], dis.opmap["DELETE_GLOBAL"]), 0)
    if "globals" in names_of(code):  # globals()["N"] = 1
        found |= {c for c in code.co_consts if isinstance(c, str)}
    return found


@functools.cache
def bound_attributes(code: types.CodeType) -> frozenset[str]:
    """The attributes that a function binds or deletes, and the functions inside it."""
    return _operands(code, (dis.opmap["STORE_ATTR"], dis.opmap["DELETE_ATTR"]), 0)


def _operands(code: types.CodeType, ops: tuple[int, ...], shift: int) -> frozenset[str]:
    """The names that are operands of some instructions, whose low `shift` bits are flags.

    `dis.get_instructions` says the same, and would take as long as the trace of a small model.
    """
    found, raw, extended = set[str](), code.co_code, 0
    for i in range(0, len(raw), 2):
        operand = raw[i + 1] | extended
        extended = operand << 8 if raw[i] == dis.EXTENDED_ARG else 0
        if raw[i] in ops:
            found.add(code.co_names[operand >> shift])
    return frozenset(found).union(*(_operands(c, ops, shift) for c in code.co_consts if isinstance(c, types.CodeType)))


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
        """The users' classes whose attributes they may read or write."""
        self.cells: dict[int, tuple[str, types.CellType]] = {}
        """By id, the variables of enclosing functions, with their names."""
        self.globals: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        """The globals that they bind: the table and the name."""
        self.looked_up: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        """The globals that they name, with their values."""
        self._seen: set[int] = set()
        self._names: set[str] = set()
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
        elif isinstance(x, type):
            self.add_class(x)
        elif hasattr(x, "__wrapped__") and callable(x) and not isinstance(x, torch.nn.Module):
            self.add(x.__wrapped__)

    def add_class(self, kind: type) -> None:
        """Follow the methods of a class that some function names, its `forward` and its operators."""
        for base in kind.__mro__:
            if base in self.classes or base.__module__ == "builtins" or not is_users_class(base):
                continue
            self.classes[base] = None
            for name, member in vars(base).items():
                if name == "forward" or name in self._names or (name[:2] == "__" and name not in _NOT_CALLED):
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
        for name in bound_globals(code):
            self.globals[id(table), name] = table, name
        for name in names - self._names:
            self._names.add(name)
            for base, member in self._members.pop(name, ()):
                self._add_member(base, name, member)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            self._add_cell(name, cell)
        for name in globals_of(code) & table.keys():
            if (id(table), name) not in self.looked_up:
                self._look_up(table, name, code)
        for name, default in _defaults(function):
            self._visit(f"{function.__name__}'s default of {name}", f"{name}=", default)
        if function.__dict__:
            self._visit(function.__name__, function.__name__, function)

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

    def _look_up(self, table: dict[str, Any], name: str, code: types.CodeType | None) -> None:
        value = table[name]
        self.looked_up[id(table), name] = table, name, value
        if not isinstance(value, types.ModuleType):
            self.add(value)
            self._visit(f"globals()[{name!r}]", name, value)
        elif code is not None:
            inside = vars(value)
            for inner in bound_attributes(code):
                self.globals[id(inside), inner] = inside, inner
            if is_users(getattr(value, "__file__", None) or "<frozen"):
                for inner in names_of(code) & inside.keys():
                    if (id(inside), inner) not in self.looked_up:
                        self._look_up(inside, inner, None)


def _defaults(function: types.FunctionType) -> list[tuple[str, Any]]:
    """The parameters with defaults, and these."""
    values, code = function.__defaults__ or (), function.__code__
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return [*zip(names, values, strict=True), *(function.__kwdefaults__ or {}).items()]
