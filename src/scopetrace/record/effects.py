"""Finds what a forward writes into Python objects.

Data flow:
    the modules, functions, globals, closures and arguments of a forward -> their contents, saved before it runs
    after it -> what differs -> model and arguments put back -> a SideEffect each, with the line that wrote it
    a SideEffect whose name the forward reads elsewhere, and each draw -> baked into the program

Tensors that the graph carries are none: those that it binds to attributes of modules.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Callable, Collection
from typing import Any

import torch

from scopetrace.containers.structure import leaves_with_path, object_classes
from scopetrace.ir.effects import SideEffect
from scopetrace.ir.scopes import user_line, walk_frames
from scopetrace.ir.tape import Call
from scopetrace.record.draws import Draw
from scopetrace.record.model import Model
from scopetrace.record.reach import Reach, is_users_class, names_of
from scopetrace.record.snapshot import MISSING, Change, Words, holds_fake, same, short
from scopetrace.record.syntax import is_discarded, uses


class EffectWatch:
    """What a forward may write to, saved: made before it runs."""

    def __init__(self, fn: Any, model: Model, arguments: list[tuple[str, Any]], object_types: Collection[type]) -> None:
        self._model = model
        self._snapshot = model.snapshot
        self.reach = Reach(self._add_outside)
        for name, argument in arguments:
            for path, leaf in leaves_with_path(argument, name, object_types):
                self._snapshot.add(path, f"{name}=", leaf)
            for kind in object_classes(argument, object_types):
                self.reach.add_class(kind)
        for name, module in (("random", random), ("numpy.random", getattr(sys.modules.get("numpy"), "random", None))):
            if module is not None:
                self._snapshot.add(name, name, module.random.__self__)
        self._follow(fn)
        self._bindings = [(t, name, t.get(name, MISSING)) for t, name in self.reach.globals.values()]
        self._cells = [(name, cell, _content(cell)) for name, cell in self.reach.cells.values()]
        self._classes = [(kind, dict(vars(kind))) for kind in self.reach.classes | self.reach.bases]

    def _add_outside(self, name: str, key: str, x: Any) -> None:
        self._snapshot.outside = True
        self._snapshot.add(name, key, x)
        self._snapshot.outside = False

    def _follow(self, fn: Any) -> None:
        """Everything that `fn` and the model's modules may run, and the objects that they may write to."""
        snapshot, reach = self._snapshot, self.reach
        reach.add(fn)
        snapshot.add("self" if hasattr(fn, "__self__") else "callable", "self", fn)
        for kind in {type(module): None for module in self._model.modules}:
            reach.add_class(kind)
        while snapshot.modules or snapshot.functions or snapshot.classes:
            functions, modules, classes = snapshot.take_found()
            for name, module in modules:
                for found in self._model.save_outside(name, module):
                    reach.add_class(type(found))
            for function in functions:
                reach.add(function)
            for kind in classes:
                reach.add_class(kind)

    def restore(self, *, outside: bool = False) -> list[Change]:
        """Put the model and its arguments back, and say what had changed; elsewhere fake tensors are removed.

        With `outside`, all else is put back too.
        """
        found = self._model.restore(outside=outside)
        for table, name, old in self._bindings:
            new = table.get(name, MISSING)
            if new is not old:
                if outside or holds_fake(new):
                    _bind(table.__setitem__, table.__delitem__, name, old)
                found.append(Change(f"globals()[{name!r}]", name, old, new, None))
        for name, cell, old in self._cells:
            new = _content(cell)
            if new is not old:
                if outside or holds_fake(new):
                    _bind(functools.partial(setattr, cell), functools.partial(delattr, cell), "cell_contents", old)
                found.append(Change(f"closure {name}", name, old, new, None))
        for kind, before in self._classes:
            now = dict(vars(kind))
            for name in () if now == before else before.keys() | now.keys():
                old, new = before.get(name, MISSING), now.get(name, MISSING)
                if new is not old and name[:2] != "__":
                    _bind(functools.partial(setattr, kind), functools.partial(delattr, kind), name, old)
                    found.append(Change(f"{kind.__name__}.{name}", f".{name}", old, new, kind))
        return [change for change in found if not same(change.old, change.new)]


def _bind(put: Callable[[str, Any], None], remove: Callable[[str], None], name: str, value: Any) -> None:
    if value is MISSING:
        remove(name)
    else:
        put(name, value)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


# What the changes mean -----------------------------------------------------------------------------------------------


def side_effects(
    changes: list[Change], draws: list[Draw], functions: list[types.FunctionType], calls: list[Call]
) -> list[SideEffect]:
    """The effects of a forward that called `calls` and may have run `functions`."""
    if not changes and not draws:
        return []
    at = {id(call.module): call for call in reversed(calls) if call.module is not None}
    drawn = any(draw.name.startswith(("random.", "numpy.random.")) for draw in draws)
    changes = [change for change in changes if not (drawn and _is_process_state(change))]
    found = [_of_change(change, functions, calls, at) for change in changes]
    return [*found, *map(_of_draw, draws)]


def _is_process_state(change: Change) -> bool:
    """Whether it is the state of the generators of the process, whose draws are known one by one."""
    return change.name in ("random", "numpy.random")


def _of_change(
    change: Change, functions: list[types.FunctionType], calls: list[Call], at: dict[int, Call]
) -> SideEffect:
    kind = change.holder if isinstance(change.holder, type) else type(change.holder)
    methods = _codes_of(kind)
    line, reads = None, change.is_draw or change.key == ".training" or _read_by_torch(kind, change.key)
    writer = None
    for function in functions:
        foreign = change.key[0] == "." and function.__code__ not in methods and "." in function.__qualname__
        use = uses(function, change.key, foreign_self=foreign)
        reads = reads or use.reads
        if line is None and use.lines:
            line, writer = user_line([(function.__code__, use.lines[0])]), function.__code__
    is_memo = change.is_memo or (isinstance(change.new, Words) and not change.is_draw)
    call = at.get(id(change.holder)) or _caller(writer, calls)
    return SideEffect(change.name, short(change.old), short(change.new), call.scope.path, line, reads and not is_memo)


def _codes_of(kind: Any) -> set[types.CodeType]:
    """The code of the methods of a class."""
    return {m.__code__ for base in kind.__mro__ for m in vars(base).values() if isinstance(m, types.FunctionType)}


def _read_by_torch(kind: Any, key: str) -> bool:
    """Whether torch's own part of a module's class reads an attribute."""
    bases: list[Any] = [b for b in kind.__mro__ if issubclass(b, torch.nn.Module) and b is not torch.nn.Module]
    codes = [code for base in bases if not is_users_class(base) for code in _codes_of(base)]
    return any(key[1:] in names_of(code).all for code in codes)


def _caller(code: types.CodeType | None, calls: list[Call]) -> Call:
    """The first call of a module whose class has a method of this code; the root call where there is none."""
    found = (c for c in calls if c.module_type is not None and code in _codes_of(c.module_type))
    return next(found, calls[0]) if code is not None else calls[0]


def _of_draw(draw: Draw) -> SideEffect:
    frames = walk_frames(draw.frames)
    called = draw.name.removesuffix("()").rpartition(".")[2]
    baked_in = draw.baked_in and not (frames and is_discarded(*frames[-1], called))
    return SideEffect(draw.name, "", short(draw.value), draw.module, user_line(frames), baked_in)
