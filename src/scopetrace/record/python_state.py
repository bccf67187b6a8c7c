"""What a forward may read and write beside arguments, tensors and its modules, and whether it is as it was.

Data flow:
    what code reaches, and the contents of objects before the forward -> State: globals, closures, classes, objects
    the same later -> `is_unchanged`; where something was written, `renewed` begins with what is there now
"""

from __future__ import annotations

import functools
import operator
import os
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from scopetrace._compat.questions import function_modes
from scopetrace.ir.reads import MISSING, content_of
from scopetrace.record.code import Reach, is_users, is_users_class
from scopetrace.record.effects import EffectWatch
from scopetrace.record.model import Model, Saved, Snapshot
from scopetrace.record.pairs import Watch

_ENVIRONMENT: dict[Any, Any] = vars(os.environ)["_data"]  # of which os.environ makes text, which takes long

_BUILTIN = frozenset({dict, list, set})
"""The containers that are compared without a copy."""


class State:
    """What the forward may read and write beside arguments, tensors and its modules, as it is now.

    `objects` are the contents of what code reaches, by id; `watch` knows what may be shared by calls.
    """

    def __init__(self, effects: EffectWatch, model: Model, objects: dict[int, Saved]) -> None:
        reach = effects.reach
        self.watch = Watch(objects)
        self._effects, self._model = effects, model
        self._objects = objects
        watched = [s for s in objects.values() if s.kind.words is None or s.kind.is_draw]  # memos may remember anything
        self._watched = [(s.owner, s.kind, s.before) for s in watched if s.owner is not os.environ]
        self._environment = dict(_ENVIRONMENT)
        self._tables = list(_by_table(_named(reach).values()))
        self._cells = [(cell, content_of(cell)) for _, cell in reach.cells.values()]
        self._classes = [(kind, list(vars(kind).values())) for kind in reach.classes | reach.bases]
        self._modules = {id(saved.module): saved for saved in model.saved_modules}
        self._outside = [saved.module for saved in model.saved_modules if model.is_outside(saved.module)]
        self._modes = function_modes()

    def is_unchanged(self, *, draws: bool = True) -> bool:
        """Whether all is as it was; with `draws`, random generators too."""
        return (
            function_modes() == self._modes
            and self._environment == _ENVIRONMENT
            and all([_are_same(get(table), old) for table, get, old in self._tables])
            and all(
                kind.unchanged(owner if type(owner) in _BUILTIN else kind.copy(owner), before)
                for owner, kind, before in self._watched
                if draws or not kind.is_draw
            )
            and all(content_of(cell) is old for cell, old in self._cells)
            and all([_are_same(vars(kind).values(), old) for kind, old in self._classes])
            and all(map(self.is_same, self._outside))
        )

    def is_same(self, module: torch.nn.Module) -> bool:
        """Whether a module has the attributes, parameters, buffers and submodules that it had before the forward."""
        saved = self._modules.get(id(module))
        return saved is not None and saved.is_unchanged()

    def knows(self, module: torch.nn.Module | None) -> bool:
        """Whether a module was there before the forward."""
        return id(module) in self._modules

    def tells_modules_apart(self) -> bool:
        """Whether code inside of the modules may find one, or what cannot be watched, without being given it."""
        reach = self._effects.reach
        found = [
            saved.owner for key, saved in self._objects.items() if saved.outside and key not in reach.outer_objects
        ]
        if reach.inner is None:
            found += [x for _, _, values in self._tables for x in values] + [x for _, x in self._cells]
        else:
            found += [table.get(name) for key, (table, name) in _named(reach).items() if key in reach.inner.names]
            found += [content_of(cell) for key, (_, cell) in reach.cells.items() if key in reach.inner.cells]
        return any(map(self.watch.problem, found))

    def is_within(self, x: Any) -> bool:
        """Whether what a function, a class or an object of the users leads to was looked at for code in the modules."""
        reach = self._effects.reach
        if reach.inner is None:
            return True
        if isinstance(x, types.FunctionType):
            return id(x) in reach.inner.functions or not is_users(x.__code__.co_filename)
        if isinstance(x, type):
            return x in reach.inner.classes or not is_users_class(x)
        return id(x) not in reach.outer_objects

    def renewed(self) -> State:
        """The state of now."""
        more = Snapshot()
        more.outside = True
        now = {key: s._replace(before=s.kind.copy(s.owner)) for key, s in self._objects.items()}
        for key, saved in self._objects.items():
            if not saved.kind.unchanged(now[key].before, saved.before):
                more.add(saved.name, saved.key, now[key].before)
        for table, get, _ in self._tables:
            more.add("a global", "", get(table))
        for cell, _ in self._cells:
            more.add("a closure", "", content_of(cell))
        return State(self._effects, self._model, {**more.saved, **now})


def _named(reach: Reach) -> dict[tuple[int, str], tuple[dict[str, Any], str]]:
    """The globals that code reads or binds."""
    return {**reach.globals, **{key: found[:2] for key, found in reach.looked_up.items()}}


def _by_table(named: Iterable[tuple[dict[str, Any], str]]) -> Iterator[tuple[Any, Callable[[Any], Any], Any]]:
    """Of each table, what gets the named entries, and these; MISSING for those that there are not."""
    names: dict[int, list[str]] = {}
    tables: dict[int, dict[str, Any]] = {}
    for table, name in named:
        tables[id(table)] = table
        names.setdefault(id(table), []).append(name)
    for key, table in tables.items():
        get = functools.partial(_entries, names[key], operator.itemgetter(*names[key], names[key][0]))
        yield table, get, get(table)


def _entries(names: list[str], get: Callable[[Any], Any], table: dict[str, Any]) -> Any:
    try:
        return get(table)
    except KeyError:
        return tuple([table.get(name, MISSING) for name in names])


def _are_same(now: Collection[Any], before: Collection[Any]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))
