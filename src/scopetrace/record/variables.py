"""Which globals and variables of enclosing functions the functions of a forward read, by the names in their code.

Data flow:
    a function that runs -> the names that its code loads -> their values now -> those that are functions, likewise

Python has no cheap way to see such a read when it happens. So a name counts from the start, also where it stands in a
branch that is not taken; names in functions that nobody on the way refers to do not count.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from scopetrace._compat.sources import NOT_THE_MODEL, is_of_python
from scopetrace.ir.reads import MISSING

_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})


class Names(NamedTuple):
    """What a code object, and the code of functions and comprehensions inside it, loads."""

    chains: tuple[tuple[str, ...], ...]
    """Of each global, its name and the attributes that are taken of it."""
    free: tuple[str, ...]
    """The variables of enclosing functions."""
    attributes: frozenset[str]
    """The attributes of anything."""


@functools.cache
def names_in(code: types.CodeType) -> Names:
    """The names that a code object loads."""
    chains: list[list[str]] = []
    attributes: set[str] = set()
    chain: list[str] | None = None
    for instruction in dis.get_instructions(code):
        name, kind = instruction.argval, instruction.opname
        if kind in _GLOBALS:
            chain = [name]
            chains.append(chain)
        elif kind in _ATTRIBUTES:
            attributes.add(name)
            if chain is not None:
                chain.append(name)
        else:
            chain = None
    found = dict.fromkeys(map(tuple, chains))
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found.update(dict.fromkeys(names_in(inner).chains))
            attributes |= names_in(inner).attributes
    return Names(tuple(found), code.co_freevars, frozenset(attributes))


def is_of_model(path: str) -> bool:
    """Whether a file belongs to the user or to a library, and not to torch, this package or Python."""
    return not path.startswith(NOT_THE_MODEL) and not is_of_python(path)


def class_attribute(cls: type, name: str) -> tuple[Any, Any]:
    """The `__dict__` of the class that defines an attribute, and its value there."""
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__, base.__dict__[name]
    return {}, MISSING


class Variables:
    """Tells of each global and variable of an enclosing function that functions read.

    Args:
        on_global: called with the `__dict__`, the key there, the value, and the name for people.
        on_cell: called with the cell, its value, and the name.
        on_object: called with an object of a class of the model's code, and its name.
    """

    def __init__(
        self,
        on_global: Callable[[Any, str, Any, str], None],
        on_cell: Callable[[types.CellType, Any, str], None],
        on_object: Callable[[Any, str], None],
    ) -> None:
        self._on_global, self._on_cell, self._on_object = on_global, on_cell, on_object
        self._seen: set[Any] = set()

    def of_callable(self, fn: Any, cls: type | None = None) -> None:
        """What `fn` reads, and the functions that it refers to. `cls` is the class whose methods it may call."""
        while isinstance(fn, functools.partial | functools.partialmethod):
            fn = fn.func
        if isinstance(fn, types.MethodType):
            fn, cls = fn.__func__, type(fn.__self__) if cls is None else cls
        if isinstance(fn, staticmethod | classmethod):
            fn = fn.__func__
        if isinstance(fn, property):
            fn = fn.fget
        fn = inspect.unwrap(fn) if callable(fn) else fn
        if not isinstance(fn, types.FunctionType) or (fn.__code__, cls) in self._seen:
            return
        if not is_of_model(fn.__code__.co_filename):
            return
        self._seen.add((fn.__code__, cls))
        names = names_in(fn.__code__)
        for name, cell in zip(names.free, fn.__closure__ or (), strict=False):
            self._of_cell(name, cell, names)
        for chain in names.chains:
            self._of_global(fn.__globals__, chain, names)
        if cls is not None:
            self.of_methods(cls, names.attributes)

    def of_methods(self, cls: type, names: Iterable[str]) -> None:
        """What the methods of a class with these names read."""
        for name in names:
            found = class_attribute(cls, name)[1]
            if isinstance(found, types.FunctionType | staticmethod | classmethod | property):
                self.of_callable(found, cls)

    def _of_cell(self, name: str, cell: types.CellType, names: Names) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # not bound yet
            return
        self._on_cell(cell, value, name)
        self._of_value(name, value, names)

    def _of_global(self, table: dict[str, Any], chain: tuple[str, ...], names: Names) -> None:
        for i, key in enumerate(chain):
            if key not in table:
                return  # a builtin, or made later
            value, text = table[key], ".".join(chain[: i + 1])
            if not isinstance(value, types.ModuleType):
                self._on_global(table, key, value, text)
                self._of_value(text, value, names)
                if isinstance(value, type) and i + 1 < len(chain):
                    self._of_class(value, chain[i + 1], text)
                return
            if not is_of_model(getattr(value, "__file__", None) or "<frozen"):
                return
            table = value.__dict__

    def _of_class(self, cls: type, key: str, name: str) -> None:
        """An attribute of a class that code names: `Config.SCALE`."""
        table, value = class_attribute(cls, key)
        if value is not MISSING and not hasattr(type(value), "__get__"):
            self._on_global(table, key, value, f"{name}.{key}")

    def _of_value(self, name: str, value: Any, names: Names) -> None:
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            self.of_callable(value)
        elif not isinstance(value, type) and isinstance(getattr(value, "__dict__", None), dict):
            self._on_object(value, name)
            self.of_methods(type(value), {*names.attributes, "__call__"})
