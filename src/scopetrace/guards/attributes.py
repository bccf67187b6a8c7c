"""What a forward reads of the attributes of modules, seen through the modules themselves.

Data flow:
    a module -> its `__dict__` is a `WatchedDict` while the forward runs, in which plain attributes are hidden
    `self.eps` -> Python does not find it -> `nn.Module.__getattr__`, replaced once for all modules -> a read is noted
    -> the attribute is in its place again, and found by Python from then on
    `vars(self)`, `self.__dict__["eps"]` -> the methods of WatchedDict -> the same
    after the forward -> the module has its own `__dict__` again, with what the forward has written

No class of a model is changed. Attributes that the class has too, and those of classes with a `__getattr__`, are not
hidden: they count as read.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from scopetrace._compat.ops import to_undo
from scopetrace._compat.questions import MISSING, Mine, Replace

Note = Callable[[torch.nn.Module, str], bool]
"""Told of each attribute that is asked for, also of one that there is not; `_modules` for all submodules at once.

Returns whether the forward asks, rather than the recorder: only then Python finds the attribute from then on."""

MODULE_TABLES = ("_parameters", "_buffers", "_modules")
BOOKKEEPING = frozenset(torch.nn.Module().__dict__) - {"training"} | {"_compiled_call_impl"}
"""The attributes of a module by which nn.Module works, and no model."""
ALL_SUBMODULES = "_modules"


class WatchedDict(dict[str, Any]):
    """The `__dict__` of a module while its forward runs. Python itself finds in it what is not hidden."""

    __slots__ = ("_tell", "hidden", "module")

    def __init__(self, module: torch.nn.Module, tell: Note, before: dict[str, Any], hidden: dict[str, Any]) -> None:
        super().__init__({key: x for key, x in before.items() if key not in hidden})
        self.module, self._tell, self.hidden = module, tell, hidden

    def ask(self, name: str) -> Any:
        """What the module has under a name in any of its tables; MISSING for nothing. It is noted."""
        if name in self.hidden:
            value = self.hidden[name]
            self._show_one(name)
            return value
        for table in self.tables():
            if name in table:
                self._tell(self.module, name)
                return table[name]
        if name[:2] != "__":
            self._tell(self.module, name)
        return MISSING

    def tables(self) -> list[dict[str, Any]]:
        """Parameters, buffers and submodules, without being noted."""
        return [dict.get(self, name) or self.hidden.get(name) or {} for name in MODULE_TABLES]

    def current(self) -> dict[str, Any]:
        """All attributes, in no order, without being noted."""
        return {**self.hidden, **dict(dict.items(self))}  # `dict.copy` asks for `keys()`

    def show_deleted(self, name: Any) -> None:
        """Before Python deletes an attribute: nn.Module looks among the submodules first, which are hidden."""
        if name in self.hidden:
            self._show(name)

    def _show(self, name: str) -> None:
        value = self.hidden.pop(name)
        if not dict.__contains__(self, name):
            dict.__setitem__(self, name, value)

    def _show_all(self) -> None:
        for name in list(self.hidden):
            if name != ALL_SUBMODULES:
                self._tell(self.module, name)
            self._show(name)

    def _show_one(self, name: Any) -> None:
        if dict.__contains__(self, name) or type(name) is not str:
            return
        if self._tell(self.module, name) and name in self.hidden:
            self._show(name)

    def __getitem__(self, name: str) -> Any:
        self._show_one(name)
        return dict.__getitem__(self, name) if dict.__contains__(self, name) else self.hidden[name]

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dict."""
        self._show_one(name)
        return dict.get(self, name, self.hidden.get(name, default))

    def __contains__(self, name: object) -> bool:
        self._show_one(name)
        return dict.__contains__(self, name) or name in self.hidden

    def __setitem__(self, name: str, value: Any) -> None:
        dict.__setitem__(self, name, value)

    def setdefault(self, name: str, default: Any = None) -> Any:
        """As of a dict."""
        self._show_one(name)
        return dict.setdefault(self, name, default)

    def __delitem__(self, name: str) -> None:
        self._show_one(name)
        self.hidden.pop(name, None)
        dict.__delitem__(self, name)

    def pop(self, name: str, *default: Any) -> Any:
        """As of a dict."""
        self._show_one(name)
        return dict.pop(self, name, *default)


def _of_all(name: str) -> Any:
    """A method of dict that looks at all entries."""
    method = getattr(dict, name)

    def shown(self: WatchedDict, *args: Any) -> Any:
        self._show_all()
        return method(self, *args)

    return shown


for _name in (
    *("keys", "values", "items", "copy", "clear", "popitem", "__iter__", "__len__", "__reversed__", "__repr__"),
    *("__eq__", "__ne__", "__or__", "__ror__"),
):
    setattr(WatchedDict, _name, _of_all(_name))


def current_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """The `__dict__` of a module, for reading by the recorder: nothing is noted."""
    attributes = module.__dict__
    return attributes.current() if type(attributes) is WatchedDict else attributes


def is_watchable(module: torch.nn.Module) -> bool:
    """Whether attributes of a module may be hidden: Python asks `nn.Module.__getattr__` for what it does not find."""
    kind = type(module)
    return (
        kind.__getattr__ is torch.nn.Module.__getattr__
        and kind.__getattribute__ is object.__getattribute__
        and type(module.__dict__) is dict
        and not isinstance(module, torch.jit.ScriptModule)
    )


class AttributeWatch:
    """Notes what this thread reads of the attributes of some modules, while `watching` is entered."""

    def __init__(self, modules: Iterable[torch.nn.Module], tell: Note) -> None:
        """`tell` is told of each read."""
        self._tell = tell
        self._modules = list(modules)
        self._watched: list[tuple[torch.nn.Module, dict[str, Any], WatchedDict]] = []
        self._of_class: dict[type, frozenset[str]] = {}

    @contextlib.contextmanager
    def watching(self, replace: Replace, mine: Mine) -> Iterator[None]:
        """Inside, attributes are hidden until they are read."""
        replace(torch.nn.Module, "__getattr__", _getattr(torch.nn.Module.__getattr__, mine))
        with to_undo(self._put_back):
            for module in self._modules:
                if is_watchable(module):
                    self._hide(module)
            yield

    def _hide(self, module: torch.nn.Module) -> None:
        before, kind = module.__dict__, type(module)
        if kind not in self._of_class:
            self._of_class[kind] = frozenset(name for base in kind.__mro__ for name in vars(base))
        of_class = self._of_class[kind]
        hidden = {key: x for key, x in before.items() if key not in BOOKKEEPING and key not in of_class}
        if ALL_SUBMODULES in before:
            hidden[ALL_SUBMODULES] = before[ALL_SUBMODULES]
        watched = WatchedDict(module, self._tell, before, hidden)
        self._watched.append((module, before, watched))
        object.__setattr__(module, "__dict__", watched)

    def _put_back(self) -> None:
        for module, before, watched in self._watched:
            _put_back(module, before, watched)


def _put_back(module: torch.nn.Module, before: dict[str, Any], watched: WatchedDict) -> None:
    """Give a module the `__dict__` that it had, with what it holds now."""
    current = watched.current()
    if current.keys() != before.keys() or any(current[key] is not x for key, x in before.items()):
        order = [key for key in before if key in current] + [key for key in dict.keys(watched) if key not in before]
        ordered = {key: current[key] for key in order}
        before.clear()
        before.update(ordered)
    object.__setattr__(module, "__dict__", before)


def _getattr(ask: Callable[..., Any], mine: Mine) -> Callable[..., Any]:
    def __getattr__(self: torch.nn.Module, name: str) -> Any:
        attributes = self.__dict__
        if type(attributes) is not WatchedDict:
            return ask(self, name)
        if not mine():  # another thread, or the recorder itself
            for table in (attributes.hidden, *attributes.tables()):
                if name in table:
                    return table[name]
        elif name == ALL_SUBMODULES and (asker := sys._getframe(1)).f_code.co_name == "__delattr__":
            attributes.show_deleted(asker.f_locals.get("name"))
            return attributes.hidden[name]
        elif (value := attributes.ask(name)) is not MISSING:
            return value
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    return __getattr__
