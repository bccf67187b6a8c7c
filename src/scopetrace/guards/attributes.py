"""What a forward reads of the attributes of modules, seen through the modules themselves.

Data flow:
    a module -> its `__dict__` is a `WatchedDict` while the forward runs, in which plain attributes and the tables of
        parameters, buffers and submodules are hidden
    `self.eps` -> Python does not find it -> `nn.Module.__getattr__` looks into `self.__dict__["_parameters"]`
    -> WatchedDict gives it an `_Answer`, which knows all attributes -> a read is noted
    -> the attribute is in its place again, and found by Python from then on
    `vars(self)`, `self.__dict__["eps"]` -> the methods of WatchedDict -> the same
    after the forward -> the module has its own `__dict__` again, with what the forward has written

No class is changed, that of torch neither: CPython 3.13 stops to cache the methods of a class that changed a thousand
times, and of all its subclasses. Attributes that the class has too, and those of classes with a `__getattr__`, are not
hidden: they count as read.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from scopetrace._compat.ops import to_undo
from scopetrace._compat.questions import MISSING
from scopetrace.ir.guards import MODULE_TABLES

Note = Callable[[torch.nn.Module, str], bool]
"""Told of each attribute that is asked for, also of one that there is not; `_modules` for all submodules at once.

Returns whether the forward asks, rather than the recorder: only then Python finds the attribute from then on."""

BOOKKEEPING = frozenset(torch.nn.Module().__dict__) - {"training"} | {"_compiled_call_impl"}
"""The attributes of a module by which nn.Module works, and no model."""
ALL_SUBMODULES = "_modules"
OURS, ORIGINAL = ("forward", "_call_impl"), "_scopetrace_original"
"""What a trace puts into the `__dict__` of a module, so that its calls are seen, and by what it is known."""
_NOT_HIDDEN = BOOKKEEPING.difference(MODULE_TABLES).union(OURS)
GETATTR = torch.nn.Module.__getattr__.__code__


class _Answer:
    """Stands for a module's parameters where `nn.Module.__getattr__` looks an attribute up: it finds all there are."""

    __slots__ = ("_attributes", "_value")

    def __init__(self, attributes: WatchedDict) -> None:
        self._attributes = attributes

    def __contains__(self, name: str) -> bool:
        self._value = self._attributes.ask(name)
        return self._value is not MISSING

    def __getitem__(self, name: str) -> Any:
        return self._value


def _is_ours(x: Any) -> bool:
    """Whether it is a method that a trace has put into a module, so that its calls are seen."""
    return type(x) is types.MethodType and hasattr(x, ORIGINAL)


class WatchedDict(dict[str, Any]):
    """The `__dict__` of a module while its forward runs. Python itself finds in it what is not hidden."""

    __slots__ = ("_tell", "hidden", "module")

    def __init__(self, module: torch.nn.Module, tell: Note, before: dict[str, Any], hidden: dict[str, Any]) -> None:
        super().__init__({key: x for key, x in before.items() if key not in hidden})
        self.module, self._tell, self.hidden = module, tell, hidden

    def ask(self, name: str) -> Any:
        """What the module has under a name in any of its tables; MISSING for nothing. It is noted."""
        if name in self.hidden:
            deletes = name == "_parameters" and (asker := sys._getframe(3)).f_code.co_name == "__delattr__"
            # nn.Module looks for what it deletes among the parameters first, which are always hidden
            if deletes and (deleted := asker.f_locals.get("name")) in self.hidden:
                self._show(deleted)
            return self.get(name)
        for table in map(self.table, MODULE_TABLES):
            if name in table:
                self._tell(self.module, name)
                return table[name]
        if name[:2] != "__":
            self._tell(self.module, name)
        return MISSING

    def table(self, name: str) -> dict[str, Any]:
        """Parameters, buffers or submodules, without being noted."""
        return dict.get(self, name) or self.hidden.get(name) or {}

    def current(self) -> dict[str, Any]:
        """All attributes, in no order, without being noted."""
        return {**self.hidden, **dict(dict.items(self))}  # `dict.copy` asks for `keys()`

    def _show(self, name: str) -> None:
        value = self.hidden.pop(name)
        if not dict.__contains__(self, name):
            dict.__setitem__(self, name, value)

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dict. Python finds it from then on if the forward asks."""
        if dict.__contains__(self, name) or type(name) is not str:
            value = dict.get(self, name, default)
            return default if _is_ours(value) else value
        value = self.hidden.get(name, default)
        if self._tell(self.module, name) and name in self.hidden and name != "_parameters":
            self._show(name)
        return value

    def _all(self) -> dict[str, Any]:
        """All attributes, which are noted, but for what a trace has put there."""
        for name in self.hidden:
            if name not in MODULE_TABLES:
                self._tell(self.module, name)
        return {key: x for key, x in self.current().items() if not _is_ours(x)}

    def __getitem__(self, name: str) -> Any:
        if name == "_parameters" and sys._getframe(1).f_code is GETATTR:
            return _Answer(self)
        value = self.get(name, MISSING)
        return dict.__getitem__(self, name) if value is MISSING else value

    def __contains__(self, name: Any) -> bool:
        if name in MODULE_TABLES and sys._getframe(1).f_code is GETATTR:
            return name == "_parameters"
        return self.get(name, MISSING) is not MISSING

    def setdefault(self, name: str, default: Any = None) -> Any:
        """As of a dict."""
        self.get(name)
        return dict.setdefault(self, name, default)

    def __delitem__(self, name: str) -> None:
        self.get(name)
        self.hidden.pop(name, None)
        dict.__delitem__(self, name)

    def pop(self, name: str, *default: Any) -> Any:
        """As of a dict."""
        self.get(name)
        return dict.pop(self, name, *default)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self._all(),)


def _of_all(name: str) -> Any:
    method = getattr(dict, name)
    return lambda self, *args: method(self._all(), *args)


for _name in (
    *("keys", "values", "items", "copy", "__iter__", "__len__", "__reversed__", "__repr__"),
    *("__eq__", "__ne__", "__or__", "__ror__"),
):
    setattr(WatchedDict, _name, _of_all(_name))


def current_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """The `__dict__` of a module, for reading by the recorder: nothing is noted."""
    attributes = module.__dict__
    return attributes.current() if type(attributes) is WatchedDict else attributes


def static_lookup(ask: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """`inspect.getattr_static` for instances of Protocols, from Python 3.12 on: it finds what is hidden too."""
    lookup = ask()

    def getattr_static(x: Any, name: str, *default: Any) -> Any:
        if isinstance(x, torch.nn.Module):
            x.__dict__.get(name)
        return lookup(x, name, *default)

    return getattr_static


def is_watchable(module: torch.nn.Module) -> bool:
    """Whether attributes of a module may be hidden: Python asks `nn.Module.__getattr__` for what it does not find."""
    kind = type(module)
    return (
        kind.__getattr__ is torch.nn.Module.__getattr__
        and kind.__getattribute__ is object.__getattribute__
        and type(module.__dict__) is dict
        and not isinstance(module, torch.jit.ScriptModule)
    )


@contextlib.contextmanager
def watching(modules: Iterable[torch.nn.Module], tell: Note) -> Iterator[None]:
    """Inside, attributes of modules are hidden until they are read, and `tell` is told of each read."""
    watched: list[tuple[torch.nn.Module, dict[str, Any], WatchedDict]] = []
    names_of_class: dict[type, frozenset[str]] = {}

    def put_back() -> None:
        for module, before, of_module in watched:
            current = of_module.current()
            if current.keys() != before.keys() or any(current[key] is not x for key, x in before.items()):
                new = [key for key in dict.keys(of_module) if key not in before]
                ordered = {key: current[key] for key in (*before, *new) if key in current}
                before.clear()
                before.update(ordered)
            object.__setattr__(module, "__dict__", before)

    with to_undo(put_back):
        for module in filter(is_watchable, modules):
            before, kind = module.__dict__, type(module)
            if kind not in names_of_class:
                names_of_class[kind] = frozenset(name for base in kind.__mro__ for name in vars(base))
            of_class = names_of_class[kind]
            hidden = {key: x for key, x in before.items() if key not in _NOT_HIDDEN and key not in of_class}
            watched.append((module, before, WatchedDict(module, tell, before, hidden)))
            object.__setattr__(module, "__dict__", watched[-1][2])
        yield
