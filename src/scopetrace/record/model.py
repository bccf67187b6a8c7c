"""The traced model: the names of its modules and tensors, and what it and other Python objects hold before the trace.

Data flow:
    callable -> the modules that it can reach -> fully qualified names of modules, parameters and buffers
    the attributes of each module, saved -> after the forward: which were bound to other tensors, and all put back
    objects with names -> Snapshot.add, which follows items and attributes -> a copy of the content of each
    after the forward -> restore -> a Change for each entry that differed

Lists, dicts, sets and deques and their subclasses, objects with attributes, arrays of NumPy, and random generators of
Python and NumPy have contents. Modules, tensors, classes and objects of torch and the standard library have none.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import contextvars
import enum
import functools
import gc
import itertools
import operator
import os
import pickle
import queue
import random
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeVar

import torch
import torch.fx

from scopetrace._compat.symbols import Symbolic
from scopetrace._compat.tensors import FakeTensor, unsaved_buffers_of
from scopetrace.ir.reads import MISSING, SUBMODULES, Missing, TablesOfModule, content_of, own_dict, value_of
from scopetrace.ir.registered import Registered, RegisteredModule, RegisteredParam
from scopetrace.ir.tape import Value
from scopetrace.record.code import ATOMS, HOOKS, MEMO, is_users_class, methods_of

_TABLES = ("_parameters", "_buffers", "_modules")
BOOKKEEPING = frozenset(torch.nn.Module().__dict__) - {"training"} | {"_compiled_call_impl"}
"""The attributes of a module by which nn.Module works, and no model."""
_OF_RECURRENT_LAYERS = BOOKKEEPING | {"_flat_weights", "_flat_weight_refs"}
"""They list their parameters anew where these are others than at the last call, as under `functional_call`."""


def bookkeeping_of(kind: type) -> frozenset[str]:
    """The attributes of a class of modules by which the classes of torch work."""
    return _OF_RECURRENT_LAYERS if issubclass(kind, torch.nn.RNNBase) else BOOKKEEPING


@functools.lru_cache(maxsize=4096)
def own_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the names in a module's `__dict__` that are no bookkeeping of nn.Module."""
    return tuple([name for name in names if name not in BOOKKEEPING])


class Layout:
    """The names in the tables of a module. Modules with the same names in the same order share one."""

    __slots__ = ("ends", "flat", "names", "own")

    def __init__(self, flat: tuple[str | None, ...]) -> None:
        """`flat` has the names of one table after the other, with None after each."""
        self.flat = [*flat]
        tables: list[list[str]] = [[]]
        for name in flat:
            if name is None:
                tables.append([])
            else:
                tables[-1].append(name)
        self.names = tuple(map(tuple, tables[:-1]))
        """Of each of `SavedModule.live`."""
        self.own = own_names(self.names[0])
        self.ends = tuple(itertools.accumulate(map(len, self.names)))
        """Where each table ends if one follows the other."""


_layout_of = functools.lru_cache(maxsize=4096)(Layout)


def plain_attributes(own: Mapping[str, Any]) -> dict[str, Any]:
    """Of the `__dict__` of a module: what is neither tensors, modules nor nn.Module's own bookkeeping."""
    return {
        name: own[name]
        for name in own_names(tuple(own))
        if name[0] != "_" and (type(own[name]) in _PLAIN or not isinstance(own[name], _OTHERS))
    }


_OTHERS = (torch.Tensor, torch.nn.Module, Value)
_PLAIN = frozenset({bool, int, float, str, tuple})  # the classes of most attributes: isinstance takes longer

_HOOK_TABLES = (*HOOKS, *(name for name in sorted(BOOKKEEPING) if name.endswith(("_with_kwargs", "_always_called"))))
"""The tables of a module that have its hooks, and how these are called."""
READ_BY_A_CALL = frozenset({"training", *HOOKS})
"""The attributes of a module that its call reads."""


_is = operator.is_
T = TypeVar("T")


class Owners:
    """As `Model.owner`, of all parameters, buffers and tensor attributes."""

    def __init__(self, names: Mapping[int, str], places: Mapping[int, tuple[torch.nn.Module, str]]) -> None:
        self._names, self._places = names, places

    def __iter__(self) -> Iterator[tuple[str, torch.nn.Module, str]]:
        for key, name in self._names.items():
            yield name, *self._places[key]


class Model:
    """The modules and tensors that belong to a traced callable, with their names.

    An `nn.Module` has its own names (`named_modules`), a bound method those of its module. For any other callable, the
    modules among its arguments and in its closure, globals, defaults and partial arguments are named after their
    variables, and those of the functions that it refers to.
    """

    def __init__(self, fn: Callable[..., Any], arguments: Sequence[tuple[str, Any]] = ()) -> None:
        """`arguments` are those of the call that is traced, with their names."""
        self.root, self.forward = _unwrap(fn)
        self._fn = self.forward.forward if isinstance(self.forward, torch.nn.Module) else fn
        self.type_name = type(self.root).__name__ if self.root is not None else _name_of(fn)
        self.modules: list[torch.nn.Module] = []
        # Not more objects for each module and tensor than these take: a model may have many thousands.
        self._first_names: dict[int, str] = {}
        self._names: dict[int, list[str]] = {}  # of those that have several
        self.tensors: list[torch.Tensor] = []
        """The parameters, buffers and tensor attributes, each once."""
        self._tensor_names: dict[int, str] = {}
        self._places: dict[int, tuple[torch.nn.Module, str]] = {}
        self.has_shared_tensors = False
        """Whether a tensor is in several places of the model."""
        self._saved: dict[int, SavedModule] = {}
        self.state_names: dict[int, str] = {}
        """By id, names for tensors of optimizers."""
        self.snapshot = Snapshot()
        """The contents of the objects in the modules' attributes."""
        if self.root is not None:
            self._visit("", self.root, set())
        else:
            for name, module in _found_around(fn, torch.nn.Module, arguments):
                self._visit(name, module, set())

    def _visit(self, fqn: str, module: torch.nn.Module, path: set[int]) -> None:
        prefix = f"{fqn}." if fqn else ""
        first = self._first_names.get(id(module))
        if first is not None:
            self._names.setdefault(id(module), [first]).append(fqn)
        else:
            self._first_names[id(module)] = fqn
            self.modules.append(module)
            for table in self._save(fqn, module).tensor_tables():
                for name, t in table.items():
                    if issubclass(type(t), torch.Tensor):
                        if id(t) in self._places:
                            self.has_shared_tensors = True
                            continue
                        self.tensors.append(t)
                        self._tensor_names[id(t)] = prefix + name
                        self._places[id(t)] = module, name
        for name, child in module.__dict__.get("_modules", _EMPTY).items():
            if child is not None and id(child) not in path:
                path.add(id(child))
                self._visit(prefix + name, child, path)
                path.discard(id(child))

    def _save(self, fqn: str, module: torch.nn.Module) -> SavedModule:
        name = fqn if self.root is None else f"self.{fqn}" if fqn else "self"
        saved = self._saved[id(module)] = SavedModule(fqn, module, self.snapshot, name)
        return saved

    def save_outside(self, name: str, module: torch.nn.Module) -> list[torch.nn.Module]:
        """Save a module that is not in the model's tree, and those in it; `name` is that in source. Returns them."""
        if id(module) in self._saved:
            return []
        found = [(inner, m) for inner, m in module.named_modules() if id(m) not in self._saved]
        for inner, m in found:
            self._saved[id(m)] = SavedModule("", m, self.snapshot, f"{name}.{inner}" if inner else name)
        return [m for _, m in found]

    def name_state(self, t: torch.Tensor, of: torch.Tensor, key: str) -> None:
        """Name a tensor of an optimizer's state after the parameter that it belongs to."""
        owner = self.owner(of)
        if owner is not None:
            self.state_names[id(t)] = f"{owner[0]}_{key}"

    @functools.cached_property
    def variables(self) -> dict[int, str]:
        """By id, the names in source of tensors that are in no module: `w`, `scales[0]`."""
        found = _found_around(self._fn, torch.Tensor)
        return {id(t): re.sub(r"\.(\d+)", r"[\1]", path) for path, t in reversed(found)}

    def names_of_tensors(self, tensors: Iterable[torch.Tensor]) -> list[str]:
        """The first fqns of tensors of the model."""
        return [self._tensor_names[id(t)] for t in tensors]

    def owner(self, t: torch.Tensor) -> tuple[str, torch.nn.Module, str] | None:
        """(first fqn, module, name there) of a parameter, buffer or tensor attribute; None for other tensors."""
        place = self._places.get(id(t))
        return None if place is None else (self._tensor_names[id(t)], *place)

    def add_gradient(self, t: torch.Tensor, fqn: str, module: torch.nn.Module, name: str) -> None:
        """The `grad` of one of the tensors, whose owner is given, is a tensor of the model too."""
        self._tensor_names[id(t)], self._places[id(t)] = f"{fqn}_grad", (module, f"{name}.grad")

    @property
    def owners(self) -> Owners:
        """As `owner`, of all."""
        return Owners(self._tensor_names, self._places)

    @functools.cached_property
    def tensor_names(self) -> set[str]:
        """The first fqn of each parameter, buffer and tensor attribute."""
        return {*self._tensor_names.values()}

    def names_of(self, module: torch.nn.Module) -> Sequence[str]:
        """All fqns of a module; none of one that is not in the model."""
        first = self._first_names.get(id(module))
        return () if first is None else self._names.get(id(module), [first])

    def module_name(self, module: torch.nn.Module, inside: str | None) -> str | None:
        """The fqn of a module; of several, one inside the module `inside`. None for one that is not in the model."""
        if inside and id(module) in self._names:
            inner = (name for name in self._names[id(module)] if name.startswith(inside + "."))
            return next(inner, self._first_names[id(module)])
        return self._first_names.get(id(module))

    def registered(self) -> Registered:
        """All names of the modules and parameters, in the order of registration."""
        own = [module.__dict__ for module in self.modules]
        tables = [each.get("_parameters") or _EMPTY for each in own]
        params = [p for table in tables for p in table.values()]
        columns = _Columns(
            [*self._first_names.values()],
            {names[0]: names for names in self._names.values()},
            [*map(type, self.modules)],
            ["forward" in each for each in own],
            [*map(len, tables)],
            [name for table in tables for name in table.keys()],  # noqa: SIM118 - scripted modules have other tables
            params,
            [None if p is None else p.shape for p in params],  # which may be others when they are asked for
            [None if p is None else p.dtype for p in params],
        )
        found = Registered.__new__(Registered)
        vars(found)["make"] = columns.tables
        return found

    @property
    def saved_modules(self) -> Collection[SavedModule]:
        """The model's modules, and those that only its objects, globals and closures hold."""
        return self._saved.values()

    def bound_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that attributes of the modules are now, with the attributes' names in the model."""
        for saved in self.saved_modules:
            for table in (saved.own, saved.buffers):
                for name, t in table.items():
                    if isinstance(t, torch.Tensor):
                        yield f"{saved.fqn}.{name}" if saved.fqn else name, t

    def tables(self) -> Callable[[], list[TablesOfModule]]:
        """What gives the tables that the modules have now, with their fqns, or outside the model names in source."""
        methods = {kind: methods_of(kind) for kind in {saved.kind for saved in self.saved_modules}}
        return functools.partial(_tables_then, [*self.saved_modules], len(self.modules), methods)

    def is_outside(self, module: torch.nn.Module) -> bool:
        """Whether only objects, globals or closures hold a saved module."""
        return id(module) not in self._first_names

    def replaced(self, module: torch.nn.Module) -> tuple[str, ...]:
        """The fqns of a module's parameters in whose place it has other tensors, as in `functional_call`."""
        saved = self._saved.get(id(module))
        return saved.replaced() if saved is not None else ()

    def restore(self, *, outside: bool = False) -> list[Change]:
        """Put every module back as it was before the trace, with what its attributes hold, and say what had changed.

        `outside` is as for `Snapshot.restore`.
        """
        found = [change for saved in self._saved.values() for change in saved.restore()]
        return [*found, *self.snapshot.restore(outside=outside)]


def _tables_then(found: list[SavedModule], count: int, methods: dict[type, frozenset[str]]) -> list[TablesOfModule]:
    """The tables of modules, of which the first `count` are in the model, as they were when these were saved."""
    tables = []
    for i, saved in enumerate(found):
        if isinstance(saved.module, torch.jit.ScriptModule):  # theirs are in C++
            continue
        own, _, _, modules = saved.tables
        filled = dict(saved.hooks)
        if modules:
            filled[SUBMODULES] = modules
        name, names = saved.fqn if i < count else saved.name, methods[saved.kind]
        tables.append(
            TablesOfModule(name, saved.module, saved.kind, names - own.keys(), own.get("forward", MISSING), filled)
        )
    return tables


_NO_FORWARD = torch.nn.Module.forward


class _Columns(NamedTuple):
    """What a `Registered` is made from."""

    fqns: list[str]
    """Of each module, the first."""
    all_fqns: dict[str, list[str]]
    """By the first, of those that have several."""
    kinds: list[type]
    has_own_forward: list[bool]
    counts: list[int]
    """How many parameters of its own each module has; the lists below are of all, one module after the other."""
    names: list[str]
    params: list[torch.Tensor | None]
    shapes: list[torch.Size | None]
    dtypes: list[torch.dtype | None]

    def tables(self) -> tuple[dict[str, RegisteredModule], dict[str, RegisteredParam]]:
        """The modules and the parameters, by the first names."""
        modules: dict[str, RegisteredModule] = {}
        found: dict[int, tuple[list[str], tuple[int, ...], torch.dtype]] = {}
        left = zip(self.names, self.params, self.shapes, self.dtypes, strict=True)
        for first, kind, has_own, count in zip(self.fqns, self.kinds, self.has_own_forward, self.counts, strict=True):
            fqns = self.all_fqns.get(first, [first])
            of_class = getattr(kind, "forward", None)  # scripted modules have theirs elsewhere
            modules[first] = RegisteredModule(tuple(fqns), kind.__name__, has_own or of_class is not _NO_FORWARD)
            for name, p, size, dtype in itertools.islice(left, count):
                if size is not None and dtype is not None:
                    names, _, _ = found.setdefault(id(p), ([], tuple(size), dtype))
                    names.extend([f"{fqn}.{name}" if fqn else name for fqn in fqns])
        params = [RegisteredParam(tuple(names), size, dtype) for names, size, dtype in found.values()]
        return modules, {param.names[0]: param for param in params}


_EMPTY: dict[str, Any] = {}  # in the place of the many copies of empty tables
_NOTHING: frozenset[str] = frozenset()


class SavedModule:
    """A copy of the attributes of one module. What their values hold is saved in a Snapshot.

    `fqn` is the module's name in the model, and `name` that in source.
    """

    __slots__ = (
        *("buffers", "contents", "fqn", "hooks", "kind", "layout", "module", "modules", "name", "own", "params"),
        *("unsaved", "values"),
    )

    def __init__(self, fqn: str, module: torch.nn.Module, snapshot: Snapshot, name: str = "self") -> None:
        self.fqn = fqn
        self.module = module
        self.kind = type(module)
        self.name = name
        self.own, self.params, self.buffers, self.modules = own, params, buffers, modules = _tables_of(module)
        # Not as dicts, which take four times the memory: to go through it takes most of the time to compare them.
        self.layout = layout = _layout_of((*own, None, *params, None, *buffers, None, *modules, None))
        self.values = [*own.values(), *params.values(), *buffers.values(), *modules.values()]
        """What was in the tables, one after the other."""
        unsaved = own.get("_non_persistent_buffers_set")
        self.unsaved = frozenset(unsaved) if unsaved else _NOTHING
        self.contents = {k: own[k] for k in layout.own if type(own[k]) not in ATOMS} or _EMPTY
        """The attributes of its own that hold something."""
        for key, x in self.contents.items():
            snapshot.add(f"{name}.{key}", f".{key}", x, module)
        has_hooks = any(map(own.get, _HOOK_TABLES))
        self.hooks = {table: own[table].copy() for table in _HOOK_TABLES if own.get(table)} if has_hooks else _EMPTY
        for hooks in HOOKS if has_hooks else ():
            for hook in self.hooks.get(hooks, {}).values():
                snapshot.add(f"{name}'s hook", "", hook)

    def is_unchanged(self) -> bool:
        """Whether the class is that which it was, and all attributes are the same objects, in the same order."""
        own, params, buffers, modules = self.own, self.params, self.buffers, self.modules
        return (
            type(self.module) is self.kind
            and [*own, None, *params, None, *buffers, None, *modules, None] == self.layout.flat
            and all(map(_is, [*own.values(), *params.values(), *buffers.values(), *modules.values()], self.values))
        )

    @property
    def live(self) -> tuple[dict[str, Any], ...]:
        """Its attributes, parameters, buffers and modules, as the tables that it had before the trace."""
        return self.own, self.params, self.buffers, self.modules

    @property
    def has_tables(self) -> bool:
        """Whether it keeps parameters, buffers and modules in dicts, as a module does that is not scripted."""
        return self.params is not _EMPTY

    @property
    def tables(self) -> list[dict[str, Any]]:
        """What `live` held."""
        values = iter(self.values)
        return [dict(zip(names, values, strict=False)) for names in self.layout.names]

    @property
    def parameters(self) -> list[torch.nn.Parameter | None]:
        """Those of its own, in the order of its table."""
        ends = self.layout.ends
        return self.values[ends[0] : ends[1]]

    @property
    def members(self) -> list[torch.Tensor | None]:
        """Its own parameters and buffers."""
        ends = self.layout.ends
        return self.values[ends[0] : ends[2]]

    def replaced(self) -> tuple[str, ...]:
        """As `Model.replaced`."""
        now = self.module.__dict__.get("_parameters")
        if not isinstance(now, dict) or not self.parameters:  # a scripted module makes them anew each time
            return ()
        before = zip(self.layout.names[1], self.parameters, strict=True)
        changed = [name for name, p in before if p is not None and now.get(name) is not p]
        return tuple([f"{self.fqn}.{name}" if self.fqn else name for name in changed])

    def tensor_tables(self) -> Iterable[Mapping[str, Any]]:
        """Parameters, buffers and other attributes, by name, as they are now."""
        if isinstance(self.module, torch.jit.ScriptModule):  # in C++
            return dict(self.module.named_parameters(recurse=False)), dict(self.module.named_buffers(recurse=False))
        return self.params, self.buffers, self.contents

    def restore(self) -> list[Change]:
        """Put the module back as it was, and say which attributes, parameters, buffers and modules were others."""
        has_hooks = self.hooks or any(map(self.own.get, _HOOK_TABLES))
        unsaved = self.own.get("_non_persistent_buffers_set") or _NOTHING
        if not has_hooks and unsaved == self.unsaved and self.is_unchanged():
            return []
        found: list[Change] = []
        for table, old in () if self.is_unchanged() else zip(self.live, self.tables, strict=True):
            if not same_tables(table, old):
                found += self._changes(table, old)
                table.clear()
                table.update(old)
        if self.has_tables and unsaved_buffers_of(self.module) != self.unsaved:
            _restore_set(unsaved_buffers_of(self.module), self.unsaved)
        return [*found, *self._restore_hooks()]

    def _restore_hooks(self) -> Iterator[Change]:
        own = self.module.__dict__
        for name in _HOOK_TABLES:
            table, old = own.get(name), self.hooks.get(name, {})
            if (table or old) and isinstance(table, dict) and not same_tables(table, old):
                if name in HOOKS:
                    hooks = name.strip("_").replace("_", " ")
                    yield Change(f"{hooks} of {self.name}", f".{name}", len(old), len(table), self.module)
                table.clear()
                table.update(old)

    def _changes(self, table: dict[str, Any], old: dict[str, Any]) -> Iterator[Change]:
        compiles = isinstance(self.module, torch.fx.GraphModule)  # it keeps its code in private attributes
        bookkeeping = bookkeeping_of(type(self.module))
        for name in dict.fromkeys((*old, *table)):
            before, now = old.get(name, MISSING), table.get(name, MISSING)
            if name in bookkeeping or (compiles and name[0] == "_") or same(before, now):
                continue
            if isinstance(now, torch.Tensor) or not is_memo(self.module, name, before):
                found = Change(f"{self.name}.{name}", f".{name}", before, now, self.module, name)
                is_buffer = table is self.buffers
                yield found._replace(buffer=name not in unsaved_buffers_of(self.module)) if is_buffer else found


def is_torchs(module: torch.nn.Module) -> bool:
    """Whether its class is one of those of torch.nn."""
    return type(module).__module__.startswith("torch.nn.modules.")


def attribute_tables(owner: Any) -> list[dict[str, Any]]:
    """The attributes of an object; then, of a module that is not scripted, its parameters, buffers and modules."""
    own = getattr(owner, "__dict__", {})
    return [own, *[table for table in map(own.get, _TABLES) if isinstance(table, dict)]]


def _tables_of(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    """As `attribute_tables`, of which none is left out: empty ones stand for those of a scripted module."""
    own = module.__dict__
    params, buffers, modules = own.get("_parameters"), own.get("_buffers"), own.get("_modules")
    if type(params) is type(buffers) is type(modules) is dict:  # as of most modules
        return own, params, buffers, modules
    return own, *[table if isinstance(table, dict) else _EMPTY for table in (params, buffers, modules)]


def _unwrap(fn: Callable[..., Any]) -> tuple[torch.nn.Module | None, Callable[..., Any]]:
    if isinstance(fn, torch.nn.Module):
        return fn, fn
    owner = getattr(fn, "__self__", None)
    if isinstance(fn, types.MethodType) and isinstance(owner, torch.nn.Module):
        return owner, fn
    return None, fn


def _name_of(fn: Callable[..., Any]) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    name: str = getattr(fn, "__name__", type(fn).__name__)
    return "function" if name == "<lambda>" else name


def _found_around(fn: Any, kind: type[T], arguments: Sequence[tuple[str, Any]] = ()) -> list[tuple[str, T]]:
    """The modules, or tensors, that a function can reach by name, itself and by the functions that it refers to."""
    found = {path: each for name, x in arguments for path, each in _found_in(_as_submodule(name), x, kind)}
    functions, known = [("", fn)], {id(fn)}
    for around, function in functions:  # which grows meanwhile
        for name, x in _variables(function):
            if type(x) is types.FunctionType and is_users_class(x) and id(x) not in known:
                known.add(id(x))
                functions.append((f"{around}{name}.", x))
            for path, each in _found_in(name, x, kind):
                if found.setdefault(path, each) is not each:
                    found.setdefault(around + path, each)
    return [*found.items()]


def _as_submodule(name: str) -> str:
    """`models[0]` as `models.0`."""
    return re.sub(r"\[(\w+)\]", r".\1", name)


def _variables(fn: Any) -> list[tuple[str, Any]]:
    """What a function can reach by name, or the attributes of a callable object."""
    found: list[tuple[str, Any]] = []
    if isinstance(fn, functools.partial):
        names = _parameters(fn.func)
        found += [(names[i] if i < len(names) else f"arg{i}", a) for i, a in enumerate(fn.args)]
        found += fn.keywords.items()
        fn = fn.func
    fn = getattr(fn, "__wrapped__", fn)
    code = getattr(fn, "__code__", None)
    if isinstance(fn, torch.nn.Module):
        found.append(("func", fn))
    elif code is None:
        found += attributes_and_slots(fn).items()
    else:
        found += [(name, content_of(cell)) for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=False)]
        defaults = fn.__defaults__ or ()
        found += zip(_parameters(fn)[::-1], defaults[::-1], strict=False)
        found += (fn.__kwdefaults__ or {}).items()
        found += [(name, fn.__globals__.get(name)) for name in code.co_names]
    found += attributes_and_slots(fn.__self__).items() if isinstance(fn, types.MethodType) else ()
    return found


def _parameters(fn: Any) -> list[str]:
    """The names of the positional parameters of a function; none of another callable."""
    code = getattr(fn, "__code__", None)
    return [] if code is None or isinstance(fn, types.MethodType) else [*code.co_varnames[: code.co_argcount]]


def _found_in(name: str, x: Any, kind: type[T], depth: int = 2) -> Iterator[tuple[str, T]]:
    """The modules, or tensors, in lists, dicts and users' objects, with names as of submodules."""
    if isinstance(x, kind):
        yield name, x
    elif depth and not isinstance(x, torch.nn.Module) and (items := _named_items(x)):
        for key, item in items:
            yield from _found_in(f"{name}.{key}", item, kind, depth - 1)


def _named_items(x: Any) -> Iterable[tuple[Any, Any]]:
    if type(x) in (list, tuple):
        return enumerate(x)
    if type(x) is dict:
        return [(key, item) for key, item in x.items() if isinstance(key, str) and key.isidentifier()]
    if isinstance(x, (type, torch.Tensor, dict, list, tuple)) or not is_users_class(type(x)):
        return ()
    return attributes_and_slots(x).items()


# Snapshots of objects ------------------------------------------------------------------------------------------------


_NO_CONTENT = (torch.Tensor, torch.nn.Module, type, types.ModuleType, enum.Enum, types.BuiltinFunctionType)


class Change(NamedTuple):
    """An entry that is not what it was."""

    name: str
    """In source: `self.n`, `self.stats['n']`; of a list or set, that of the whole."""
    key: str
    """The name by which Python reaches what changed: `stats`, a parameter `stats=`, an attribute `.stats`."""
    old: Any
    new: Any
    holder: Any
    """The module, object or class whose attribute `key` is; None where `key` is a variable."""
    attribute: str = ""
    """The attribute of `holder` that is another one; empty where an entry in its value is."""
    is_draw: bool = False
    """Whether it is the state of a random generator."""
    is_memo: bool = False
    """Whether it is a tensor that each call would compute again, to the same values."""
    buffer: bool | None = None
    """Of a buffer that is new or another one, whether it is in the state dict."""


class Saved(NamedTuple):
    """One object with a copy of its content."""

    name: str
    key: str
    holder: Any
    owner: Any
    before: Any
    kind: Kind
    outside: bool
    """Whether it belongs neither to the model nor to its arguments: a global, or in a closure."""


class Words(str):
    """Text that describes a value."""


class Kind(NamedTuple):
    """How the content of a class of objects is read and put back."""

    copy: Callable[[Any], Any]
    """The content, as list, dict, set, or anything that `unchanged` compares."""
    restore: Callable[[Any, Any], None]
    """(object, content)."""
    unchanged: Callable[[Any, Any], bool]
    """(content now, content before)."""
    entries: str = ""
    """How an entry is named: `[]` by key, `.` by attribute; empty for what is named as a whole."""
    words: tuple[Words, Words] | None = None
    """What to say of a content that means nothing to a reader, before and after."""
    is_draw: bool = False
    """As in Change."""


class Snapshot:
    """The contents of all objects that `add` was led to."""

    def __init__(self) -> None:
        self.saved: dict[int, Saved] = {}
        self.functions: list[Callable[..., Any]] = []
        """The functions that were found on the way."""
        self.modules: list[tuple[str, torch.nn.Module]] = []
        """The modules that were found on the way, with their names; they are not saved."""
        self.tensors: list[tuple[str, torch.Tensor]] = []
        """The tensors that were found on the way, with their names."""
        self.outside = False
        """Whether what is added belongs neither to the model nor to its arguments."""
        self.classes: set[type] = set()
        """The classes of the objects."""
        self.builtins: set[int] = set()
        """The ids of the functions in C that objects hold."""
        self._kinds: dict[type, Kind | None] = {}

    def take_found(self) -> tuple[list[Callable[..., Any]], list[tuple[str, torch.nn.Module]], set[type]]:
        """The functions, modules and classes that were found since the last call."""
        found = self.functions, self.modules, self.classes
        self.functions, self.modules, self.classes = [], [], set()
        return found

    def add(self, name: str, key: str, x: Any, holder: Any = None) -> None:
        """Save what `x` holds, and what its items and attributes hold. The others are as in Change."""
        kind = type(x)
        if kind in ATOMS or id(x) in self.saved:
            return
        if isinstance(x, torch.nn.Module):
            self.modules.append((name, x))
            return
        if isinstance(x, (tuple, functools.partial, types.MethodType)):
            for i, item in enumerate(_parts(x)):
                self.add(f"{name}[{i}]", key, item, holder)
        else:
            self._note(name, x)
            how = self._kinds[kind] if kind in self._kinds else self._kinds.setdefault(kind, _kind_of(kind))
            if how is not None and (kind is not types.FunctionType or x.__dict__):
                self._save(id(x), Saved(name, key, holder, x, how.copy(x), how, self.outside))
        if kind.__dictoffset__ and issubclass(kind, _WITH_MORE):
            own = own_dict(x)
            if own or kind not in (collections.OrderedDict, functools.partial):  # to which hardly anybody gives some
                self._save(id(own), Saved(name, key, holder, x, dict(own), ATTRIBUTES, self.outside))

    def _note(self, name: str, x: Any) -> None:
        """Keep what is followed elsewhere: functions and tensors."""
        if type(x) is types.FunctionType or type(x) is operator.attrgetter:
            self.functions.append(x)
        elif type(x) is types.BuiltinFunctionType:
            self.builtins.add(id(x))
        elif isinstance(x, torch.Tensor):
            self.tensors.append((name, x))

    def _save(self, number: int, saved: Saved) -> None:
        self.saved[number] = saved
        name, key, holder, x, before, how, _ = saved
        if how.entries == ".":
            self.classes.add(type(x))
        if how.entries:
            attribute = how.entries == "."
            for inner, item in before.items():
                if type(item) in ATOMS:
                    continue
                if attribute:
                    self.add(f"{name}.{inner}", f".{inner}", item, x)
                else:
                    self.add(f"{name}[{short(inner)}]", _key_of(saved, inner), item, holder)
        elif type(before) in (list, set):
            for item in before:
                if type(item) not in ATOMS:
                    self.add(f"{name}[…]", key, item, holder)
        elif isinstance(x, contextvars.ContextVar):
            self.add(f"{name}.get()", key, before, holder)

    def accept(self, table: Any, key: Any) -> None:
        """Keep an entry that was put into a saved dict, as if it had been there."""
        if id(table) in self.saved:
            self.saved[id(table)].before[key] = table[key]
            self.add(f"{self.saved[id(table)].name}[{short(key)}]", self.saved[id(table)].key, table[key])

    def restore(self, *, outside: bool = False) -> list[Change]:
        """Put everything back that belongs to the model or its arguments, and say what had changed.

        Globals and closures keep what the forward wrote, but for fake tensors; with `outside` they are put back too.
        """
        contents = [(saved, saved.kind.copy(saved.owner)) for saved in self.saved.values()]
        changed = [(saved, now) for saved, now in contents if not saved.kind.unchanged(now, saved.before)]
        found = [change for saved, now in changed for change in _changes(saved, now)]  # several may show one content
        for saved, now in changed:
            if outside or not saved.outside or saved.kind.words is not None or holds_fake(now):
                saved.kind.restore(saved.owner, saved.before)
        self.tensors.clear()
        self.saved.clear()  # what a weak reference leads to lives no longer than without a trace
        return found


def _changes(saved: Saved, now: Any) -> Iterator[Change]:
    if not saved.kind.entries:
        old, new = saved.kind.words or (saved.before, now)
        yield Change(saved.name, saved.key, old, new, saved.holder, is_draw=saved.kind.is_draw)
        return
    for entry in dict.fromkeys((*saved.before, *now)):
        old, new = saved.before.get(entry, MISSING), now.get(entry, MISSING)
        if same(old, new) or is_memo(saved.owner, entry, old):
            continue
        if saved.kind.entries == ".":
            yield Change(f"{saved.name}.{entry}", f".{entry}", old, new, saved.owner, entry)
        else:
            yield Change(f"{saved.name}[{short(entry)}]", _key_of(saved, entry), old, new, saved.holder)


def _key_of(saved: Saved, entry: Any) -> str:
    """By what Python reaches an entry of a table; of one of default arguments, their names."""
    return f"{entry}=" if saved.key == "=" else saved.key


def _parts(x: Any) -> tuple[Any, ...]:
    if isinstance(x, functools.partial):
        return (x.func, *x.args, *x.keywords.values())
    return x if isinstance(x, tuple) else (x.__func__, x.__self__)


def same(old: Any, new: Any) -> bool:
    """Whether an entry is what it was: the same object, or an equal number or text."""
    if old is new:
        return True
    is_plain = type(old) is type(new) and isinstance(old, (bool, int, float, str, bytes, complex))
    return is_plain and repr(old) == repr(new)  # 0.0 is no -0.0


def is_memo(owner: Any, name: Any, old: Any) -> bool:
    """Whether an attribute is one that `functools.cached_property` computes when it is first asked for."""
    found = getattr(type(owner), name, None) if isinstance(name, str) and old is MISSING else None
    return isinstance(found, functools.cached_property)


_SHOWN, _WIDTH = 8, 60


def short(x: Any) -> str:
    """A value as short text."""
    if isinstance(x, torch.Tensor):
        return f"a tensor {list(x.shape)}"
    kind = type(x)
    if kind is Words:
        return str(x)
    if kind in ATOMS or kind is Missing:
        text = repr(x)
    elif kind in (list, tuple, set, dict) and len(x) <= _SHOWN:
        inside = [f"{short(k)}: {short(v)}" for k, v in x.items()] if kind is dict else list(map(short, x))
        left, right = ("[", "]") if kind is list else ("(", ")") if kind is tuple else ("{", "}")
        text = left + ", ".join(inside) + right
    else:
        text = f"a {kind.__name__}" + (f" of {len(x)}" if isinstance(x, (list, tuple, set, dict)) else "")
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."


# Kinds of objects ----------------------------------------------------------------------------------------------------


def _kind_of(kind: Any) -> Kind | None:
    """How the objects of a class are saved; None for those without content."""
    for base, found in _BUILTIN.items():
        if issubclass(kind, base):
            return found
    if issubclass(kind, _NO_CONTENT):
        return None
    array = _numpy_kind(kind)
    if array is not None:
        return array
    if issubclass(kind, _WITH_ATTRIBUTES):
        return ATTRIBUTES
    if not is_users_class(kind):
        return None
    if slots_of(kind):
        return ATTRIBUTES._replace(copy=attributes_and_slots)
    return ATTRIBUTES if kind.__dictoffset__ else None


def slots_of(kind: type) -> list[str]:
    """The names of its `__slots__`."""
    members = {name: member for base in kind.__mro__ for name, member in vars(base).items() if name[:2] != "__"}
    return [name for name, member in members.items() if isinstance(member, types.MemberDescriptorType)]


def attributes_and_slots(x: Any) -> dict[str, Any]:
    """The attributes that an object itself has."""
    found = dict(own_dict(x)) if type(x).__dictoffset__ or issubclass(type(x), threading.local) else {}
    for name in slots_of(type(x)):
        with contextlib.suppress(AttributeError):
            found[name] = getattr(x, name)
    return found


def _restore_attributes(x: Any, before: dict[str, Any]) -> None:
    now = attributes_and_slots(x)
    plain: Any = threading.local if isinstance(x, threading.local) else object  # not by methods of the class
    for name in now.keys() - before.keys():
        plain.__delattr__(x, name)
    for name, value in before.items():
        if now.get(name, MISSING) is not value:
            plain.__setattr__(x, name, value)


# The methods of the built-in class: those of a subclass may do anything, as a table that makes what is asked for.


def _base_of(x: Any) -> Any:
    return next(base for base in (collections.OrderedDict, *_CONTAINERS) if isinstance(x, base))


def _restore_list(x: Any, before: list[Any]) -> None:
    _base_of(x).clear(x)
    _base_of(x).extend(x, before)


def _restore_dict(x: Any, before: dict[Any, Any]) -> None:
    _base_of(x).clear(x)
    for key, item in before.items():
        _base_of(x).__setitem__(x, key, item)


def _restore_dict_by_methods(x: Any, before: dict[Any, Any]) -> None:
    for key in x.keys() - before.keys():
        del x[key]
    x.update(before)


def _restore_set(x: set[Any], before: Set[Any]) -> None:
    set.clear(x)
    set.update(x, before)


def _same_items(now: Any, before: Any) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


def same_tables(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    """Whether two tables have the same keys in the same order, with the same objects."""
    return len(now) == len(before) and (
        not before or (all(map(operator.is_, now, before)) and all(map(operator.is_, now.values(), before.values())))
    )


def _same_state(now: Any, before: Any) -> bool:
    """Whether two states of a generator of NumPy are one: dicts of numbers, texts and arrays."""
    if isinstance(now, dict) and isinstance(before, dict):
        return now.keys() == before.keys() and all(_same_state(x, before[key]) for key, x in now.items())
    if isinstance(now, bool | int | float | str) or type(now) is not type(before):
        return type(now) is type(before) and bool(now == before)
    if type(now).__module__ == "numpy" and hasattr(now, "tobytes"):
        return bool(now.dtype == before.dtype and now.tobytes() == before.tobytes())
    return pickle.dumps(now) == pickle.dumps(before)


def _same_memo(now: tuple[Any, int], before: tuple[Any, int]) -> bool:
    """Whether a memo of a function got no tensor of the trace: it may remember anything else."""
    return now[1] == before[1] or not holds_fake(gc.get_referents(now[0]), depth=3)


def holds_fake(x: Any, depth: int = 5) -> bool:
    """Whether there is a fake tensor, or a number of one, in containers, at most `depth` deep."""
    if isinstance(x, (FakeTensor, *Symbolic)):
        return True
    if depth == 0 or not isinstance(x, (list, tuple, set, dict, collections.deque)):
        return False
    return any(holds_fake(item, depth - 1) for item in (x.values() if isinstance(x, dict) else x))


def holds_iterator(x: Any, depth: int = 3) -> bool:
    """Whether `x` is an iterator, or a container with one at most `depth` deep."""
    kind = type(x)
    if kind not in (list, tuple, dict):
        return hasattr(kind, "__next__") and kind not in weakref.ProxyTypes
    items = x.values() if kind is dict else x
    return depth > 0 and not ATOMS.issuperset(map(type, items)) and any(holds_iterator(i, depth - 1) for i in items)


_STATES = Words("in one state"), Words("in another")
ATTRIBUTES = Kind(lambda x: dict(own_dict(x)), _restore_attributes, same_tables, ".")
"""Of objects that consist of attributes in a `__dict__`."""
_GENERATOR = functools.partial(Kind, words=_STATES, is_draw=True)
_CONTAINERS = list, collections.deque, dict, set
_WITH_MORE = (*_CONTAINERS, tuple, functools.partial)
"""The classes of what holds items, and may have attributes too."""
_LIST = Kind(lambda x: list(_base_of(x).__iter__(x)), _restore_list, _same_items)
_WITH_ATTRIBUTES = (
    *(types.SimpleNamespace, argparse.Namespace, types.FunctionType),
    *(collections.UserDict, collections.UserList, collections.ChainMap, threading.local),
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
    *(torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler),
)
"""The classes of torch and the standard library whose objects have attributes that people write to."""
_BUILTIN: dict[type, Kind] = {
    list: _LIST,
    collections.deque: _LIST,
    dict: Kind(lambda x: dict(_base_of(x).items(x)), _restore_dict, same_tables, "[]"),
    types.MappingProxyType: Kind(dict, lambda *_: None, same_tables, "[]"),
    set: Kind(lambda x: set(set.__iter__(x)), _restore_set, operator.eq),
    weakref.ref: Kind(lambda x: [x()], lambda *_: None, _same_items),
    weakref.ProxyType: Kind(lambda x: [x.__init__.__self__], lambda *_: None, _same_items),
    bytearray: Kind(bytes, lambda x, before: x.__setitem__(slice(None), before), operator.eq),
    array.array: Kind(lambda x: x[:], lambda x, before: x.__setitem__(slice(None), before), operator.eq),
    queue.Queue: Kind(lambda x: list(x.queue), lambda x, before: _restore_list(x.queue, before), _same_items),
    MEMO: Kind(
        lambda x: (x, x.cache_info().misses),
        lambda x, _: x.cache_clear(),
        _same_memo,
        words=(Words("a memo"), Words("a memo with tensors of the trace")),
    ),
    type(os.environ): Kind(dict, _restore_dict_by_methods, operator.eq, "[]"),
    contextvars.ContextVar: Kind(value_of, lambda x, before: x.set(before), operator.is_),
    random.Random: _GENERATOR(random.Random.getstate, lambda x, before: x.setstate(before), operator.eq),
}


def _numpy_kind(kind: type) -> Kind | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if issubclass(kind, numpy.ndarray):
        return Kind(numpy.copy, numpy.copyto, lambda now, before: bool((now == before).all()))
    if issubclass(kind, numpy.random.RandomState):
        return _GENERATOR(lambda x: x.get_state(legacy=False), lambda x, before: x.set_state(before), _same_state)
    if issubclass(kind, numpy.random.Generator):
        return _GENERATOR(
            lambda x: x.bit_generator.state,
            lambda x, before: setattr(x.bit_generator, "state", before),
            _same_state,
        )
    return None
