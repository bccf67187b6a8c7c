"""What a forward may read and write beside arguments, tensors and its modules, and whether it is as it was.

Data flow:
    what code reaches, and the contents of objects before the forward -> State: globals, closures, classes, objects
    the same later -> `is_unchanged`; where something was written, `renewed` begins with what is there now
"""

from __future__ import annotations

import abc
import functools
import gc
import itertools
import operator
import os
import threading
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from scopetrace._compat.function_mode import depth as function_modes
from scopetrace.ir.reads import MISSING, content_of, own_dict
from scopetrace.record.code import ATOMS, MEMO, Reach, is_installed
from scopetrace.record.effects import EffectWatch
from scopetrace.record.model import ATTRIBUTES, Kind, Model, Saved, Snapshot
from scopetrace.record.pairs import Watch
from scopetrace.record.reads import Watched

_ENVIRONMENT: dict[Any, Any] = vars(os.environ)["_data"]  # of which os.environ makes text, which takes long


_METHODS = (types.FunctionType, staticmethod, classmethod, property, type)


class State:
    """What the forward may read and write beside arguments, tensors and its modules, as it is now.

    `objects` are the contents of what code reaches, by id; `watch` knows what may be shared by calls.
    """

    def __init__(self, effects: EffectWatch, model: Model, objects: dict[int, Saved], tables: list[_Table]) -> None:
        self.watch = Watch(objects)
        self._effects, self._model = effects, model
        self._objects = objects
        watched = [s for s in objects.values() if s.kind.words is None or s.kind.is_draw]  # memos may remember anything
        watched = [s for s in watched if s.owner is not os.environ]
        held = [(s, _live_content(s)) for s in watched]
        by_identity = [(now, s.before) for s, now in held if now is not None]
        self._contents = _Entries(
            [view for now, _ in by_identity for view in _views(now)],
            [view for _, before in by_identity for view in _views(before)],
        )
        self._own_dicts = [(s.owner, now) for s, now in held if now is not None and now is not s.owner]
        others = [s for s, now in held if now is None]
        self._others = [(s.owner, s.kind, s.before) for s in others if not s.kind.is_draw]
        self._draws = [(s.owner, s.kind, s.before) for s in others if s.kind.is_draw]
        self._environment = dict(_ENVIRONMENT)
        self._filters, self._registered = list(warnings.filters), abc.get_cache_token()
        self._tables = tables
        self._values = [x for _, _, values in tables for x in values]
        self._cells = _cells_of(effects)
        classes = [vars(kind).values() for kind in effects.reach.classes | effects.reach.bases]
        self._classes = _Entries(classes, classes)
        self._functions = [f for f in effects.reach.functions if not is_installed(f)]
        self._parts = list(_parts(self._functions))
        self._outside: list[torch.nn.Module] = []
        if len(model.saved_modules) > len(model.modules):
            self._outside = [saved.module for saved in model.saved_modules if model.is_outside(saved.module)]
        self._modes = function_modes()
        self._memos = [x.owner for x in objects.values() if type(x.owner) is MEMO]

    @classmethod
    def of_now(cls, effects: EffectWatch, model: Model, objects: dict[int, Saved]) -> State:
        """The state of now; `objects` are the contents that were known before."""
        more, tables = Snapshot(), list(_by_table(effects))
        more.outside = True
        now = {key: s._replace(before=s.kind.copy(s.owner)) for key, s in objects.items()}
        for key, saved in objects.items():
            if not saved.kind.unchanged(now[key].before, saved.before):
                more.add(saved.name, saved.key, now[key].before)
        for _, _, values in tables:
            more.add("a global", "", values)
        for _, content in _cells_of(effects):
            more.add("a closure", "", content)
        return cls(effects, model, {**more.saved, **now}, tables)

    def renewed(self) -> State:
        """The state of now."""
        return State.of_now(self._effects, self._model, self._objects)

    def is_unchanged(self, *, draws: bool = True) -> bool:
        """Whether all is as it was; with `draws`, random generators too."""
        now = itertools.chain.from_iterable([get(table) for table, get, _ in self._tables])
        return (
            function_modes() == self._modes
            and self._environment == _ENVIRONMENT
            and self._registered == abc.get_cache_token()
            and self._filters == warnings.filters
            and all(map(operator.is_, now, self._values))
            and self._contents.are_same()
            and all([object.__getattribute__(x, "__dict__") is own for x, own in self._own_dicts])
            and self._classes.are_same()
            and all(map(operator.is_, _parts(self._functions), self._parts))
            and all([_is_unchanged(*found) for found in self._others])
            and not (draws and not all([_is_unchanged(*found) for found in self._draws]))
            and all([content_of(cell) is old for cell, old in self._cells])
            and all(map(self.is_same, self._outside))
        )

    def asked_memos(self) -> list[tuple[int, ...]]:
        """Of each memo, how often it was asked for what it knew, and for what it did not."""
        return [memo.cache_info()[:2] for memo in self._memos]

    def has_memo_with_state(self, before: list[tuple[int, ...]]) -> bool:
        """Whether a memo that was asked since `asked_memos` gave `before` has something that code may write to.

        Tensors that it had before are on the tape, with what is done to them.
        """
        asked = zip(self._memos, before, self.asked_memos(), strict=True)
        return any(
            not _is_fixed(x) and (old[1] != new[1] or not isinstance(x, torch.Tensor))
            for memo, old, new in asked
            if old != new
            for x in _remembered(memo)
        )

    def is_same(self, module: torch.nn.Module) -> bool:
        """Whether a module has the attributes, parameters, buffers and submodules that it had before the forward."""
        saved = self._model.saved(module)
        return saved is not None and saved.is_unchanged()

    def knows(self, module: torch.nn.Module | None) -> bool:
        """Whether a module was there before the forward."""
        return module is not None and self._model.saved(module) is not None

    def tells_modules_apart(self) -> bool:
        """Whether code inside of the modules may find one, or what cannot be watched, without being given it."""
        reach = self._effects.reach
        outside = (saved.owner for saved in self._objects.values() if saved.outside)
        found = [x for x in outside if id(x) not in reach.outer_objects]
        classes = filter(reach.is_inner, reach.classes | reach.bases)
        names = reach.names - {"forward"}  # in whose place another one stands now
        named = (x for kind in classes for name, x in vars(kind).items() if name in names and name[:2] != "__")
        named = (x.value if isinstance(x, Watched) else x for x in named)
        found += [x for x in named if not isinstance(x, _METHODS)]
        if reach.inner is None:
            found += [*self._values, *(x for _, x in self._cells)]
        else:
            found += [table.get(name) for key, (table, name) in _named(reach).items() if key in reach.inner.names]
            found += [content_of(cell) for key, (_, cell) in reach.cells.items() if key in reach.inner.cells]
        return any(map(self.watch.problem, found))


_Table = tuple[dict[str, Any], Callable[[Any], Collection[Any]], Collection[Any]]
"""A table of globals, what gets those of them that code names, and these; MISSING for those that there are not."""


class _Entries:
    """Which objects are in some collections, in their order."""

    def __init__(self, now: Sequence[Collection[Any]], before: Sequence[Collection[Any]]) -> None:
        """`now` are views, which follow what they are of; `before` is what they held."""
        self._now = now
        self._lengths = list(map(len, before))
        self._before = list(itertools.chain.from_iterable(before))

    def are_same(self) -> bool:
        """Whether they hold the same objects as before."""
        now = itertools.chain.from_iterable(self._now)
        return list(map(len, self._now)) == self._lengths and all(map(operator.is_, now, self._before))


def _remembered(memo: Any) -> Iterable[Any]:
    """What a memo gives for what it was asked; only the garbage collector tells.

    A dict by key stands before the function. With a limit it has links, and the keys and values come before it.
    """
    found = gc.get_referents(memo)
    end = [x is memo.__wrapped__ for x in found].index(True) - 1
    table = found[end]
    if type(table) is not dict:
        return ()
    keys = set(map(id, table))
    is_limited = memo.cache_parameters()["maxsize"] is not None
    return [x for x in found[:end] if id(x) not in keys and type(x) is not type] if is_limited else table.values()


def _is_fixed(x: Any) -> bool:
    return type(x) in ATOMS or (isinstance(x, tuple | frozenset) and all(map(_is_fixed, x)))


_parts_of = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")


def _parts(functions: list[types.FunctionType]) -> Iterator[Any]:
    """What functions are made of, which code can put others in the place of."""
    return itertools.chain.from_iterable(map(_parts_of, functions))


def _live_content(saved: Saved) -> dict[Any, Any] | list[Any] | None:
    """What holds the content of an object, and is compared by identity; None for what has to be copied for that."""
    kind = type(saved.owner)
    if kind is dict or kind is list:
        return saved.owner
    is_plain = saved.kind is ATTRIBUTES and not issubclass(kind, threading.local)
    return own_dict(saved.owner) if is_plain else None


def _views(content: Any) -> tuple[Collection[Any], ...]:
    return (content.keys(), content.values()) if type(content) is dict else (content,)


def _is_unchanged(owner: Any, kind: Kind, before: Any) -> bool:
    return kind.unchanged(owner if type(owner) is set else kind.copy(owner), before)


def _cells_of(effects: EffectWatch) -> list[tuple[types.CellType, Any]]:
    return [(cell, content_of(cell)) for _, cell in effects.reach.cells.values()]


def _named(reach: Reach) -> dict[tuple[int, str], tuple[dict[str, Any], str]]:
    """The globals that code reads or binds."""
    return {**reach.globals, **{key: found[:2] for key, found in reach.looked_up.items()}}


def _by_table(effects: EffectWatch) -> Iterator[_Table]:
    """The tables of the globals that code names."""
    named = _named(effects.reach)
    names: dict[int, list[str]] = {}
    tables: dict[int, dict[str, Any]] = {}
    for table, name in named.values():
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
