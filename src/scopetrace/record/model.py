"""The traced model: the names of its modules and tensors, and what it and other Python objects hold before the trace.

Data flow:
    callable -> the modules that it can reach -> fully qualified names of modules, parameters and buffers
    the attributes of each module, saved -> after the forward: which were bound to other tensors, and all put back
    objects with names -> Contents.add, which follows items and attributes -> a copy of the content of each
    after the forward -> restore -> a Change for each entry that differed

Lists, dicts, sets and deques and their subclasses, objects with attributes, arrays of NumPy, and random generators of
Python and NumPy have contents. Modules, tensors, classes and objects of torch and the standard library have none.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from scopetrace._compat.tensors import unsaved_buffers_of
from scopetrace.containers.contents import (
    ATOMS,
    Change,
    Contents,
    Place,
    attributes_and_slots,
    changed_entries,
    same_entries,
    write_dict,
)
from scopetrace.guards.attributes import BOOKKEEPING, current_attributes, is_watchable
from scopetrace.guards.reach import Reach
from scopetrace.ir.guards import HOOKS, MODULE_TABLES
from scopetrace.ir.registered import Registered, RegisteredModule, RegisteredParam
from scopetrace.ir.tape import Value
from scopetrace.record.nodes import root_class


def lists_weights(module: torch.nn.Module, name: str) -> bool:
    """Whether a recurrent layer lists its parameters there, anew where they are others, as under `functional_call`."""
    return name in ("_flat_weights", "_flat_weight_refs") and isinstance(module, torch.nn.RNNBase)


def plain_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Of the `__dict__` of a module: what is neither tensors, modules nor nn.Module's own bookkeeping."""
    return {
        name: x
        for name, x in attributes.items()
        if name not in _NOT_OWN and name[0] != "_" and (type(x) in _PLAIN or not isinstance(x, _OTHERS))
    }


_OTHERS = (torch.Tensor, torch.nn.Module, Value)
_PLAIN = frozenset({bool, int, float, str, tuple})  # the classes of most attributes: isinstance takes longer

_HOOK_TABLES = (*HOOKS, *(name for name in sorted(BOOKKEEPING) if name.endswith(("_with_kwargs", "_always_called"))))
"""The tables of a module that have its hooks, and how these are called."""
_NOT_OWN = BOOKKEEPING | {"forward"}


class Model:
    """The modules and tensors that belong to a traced callable, with their names.

    An `nn.Module` has its own names (`named_modules`), a bound method those of its module. For any other callable, the
    modules among its arguments and in its closure, globals, defaults and partial arguments are named after their
    variables, and so are those of the functions that it refers to; of two with one name the second is `model_1`.
    """

    def __init__(self, fn: Callable[..., Any], arguments: Sequence[tuple[str, Any]] = ()) -> None:
        """`arguments` are those of the call that is traced, with their names."""
        owner = getattr(fn, "__self__", None) if isinstance(fn, types.MethodType) else fn
        self.root, self.forward = owner if isinstance(owner, torch.nn.Module) else None, fn
        self.kind = root_class(self.root) if isinstance(self.root, torch.fx.GraphModule) else None
        """Of a graph, the class of the module that it came from."""
        self.type_name = _name_of(fn) if self.root is None else (self.kind or type(self.root)).__name__
        self.modules: list[torch.nn.Module] = []
        # Not more objects for each module and tensor than these take: a model may have many thousands.
        self._first_names: dict[int, str] = {}
        self._names: dict[int, list[str]] = {}  # of those that have several
        self.tensors: list[torch.Tensor] = []
        """The parameters, buffers and tensor attributes, each once."""
        self._owners: dict[int, tuple[str, torch.nn.Module, str]] = {}  # by id of a tensor
        self.has_shared_tensors = False
        """Whether a tensor is in several places of the model."""
        self._saved: dict[int, ModuleSnapshot] = {}
        self.state_names: dict[int, str] = {}
        """By id, names for tensors of optimizers."""
        self.contents = Contents()
        """The contents of the objects in the modules' attributes."""
        if self.root is not None:
            self._visit("", self.root, set())
        else:
            for name, module in _reachable(fn, arguments).items():
                self._visit(name, module, set())

    def _visit(self, fqn: str, module: torch.nn.Module, path: set[int]) -> None:
        prefix = f"{fqn}." if fqn else ""
        first = self._first_names.get(id(module))
        if first is not None:
            self._names.setdefault(id(module), [first]).append(fqn)
        else:
            self._first_names[id(module)] = fqn
            self.modules.append(module)
            in_source = fqn if self.root is None else f"self.{fqn}" if fqn else "self"
            saved = self._saved[id(module)] = ModuleSnapshot(fqn, module, self.contents, in_source)
            tables: Sequence[Mapping[str, Any]] = (saved.live[1], saved.live[2], saved.contents)
            if isinstance(module, torch.jit.ScriptModule):  # in C++
                tables = dict(module.named_parameters(recurse=False)), dict(module.named_buffers(recurse=False))
            for table in tables:
                for name, t in table.items():
                    if issubclass(type(t), torch.Tensor):
                        if id(t) in self._owners:
                            self.has_shared_tensors = True
                            continue
                        self.tensors.append(t)
                        self._owners[id(t)] = prefix + name, module, name
        for name, child in module.__dict__.get("_modules", _EMPTY).items():
            if child is not None and id(child) not in path:
                path.add(id(child))
                self._visit(prefix + name, child, path)
                path.discard(id(child))

    def save_outside(self, name: str, module: torch.nn.Module) -> list[torch.nn.Module]:
        """Save a module that is not in the model's tree, and those in it; `name` is that in source. Returns them."""
        if id(module) in self._saved:
            return []
        unsaved = [(inner, m) for inner, m in module.named_modules() if id(m) not in self._saved]
        for inner, m in unsaved:
            self._saved[id(m)] = ModuleSnapshot("", m, self.contents, f"{name}.{inner}" if inner else name)
        return [m for _, m in unsaved]

    def owner(self, t: torch.Tensor) -> tuple[str, torch.nn.Module, str] | None:
        """(first fqn, module, name there) of a parameter, buffer or tensor attribute; None for other tensors."""
        return self._owners.get(id(t))

    def add_gradient(self, t: torch.Tensor, fqn: str, module: torch.nn.Module, name: str) -> None:
        """The `grad` of one of the tensors, whose owner is given, is a tensor of the model too."""
        self._owners[id(t)] = f"{fqn}_grad", module, f"{name}.grad"

    @property
    def owners(self) -> tuple[tuple[str, torch.nn.Module, str], ...]:
        """As `owner`, of all."""
        return tuple(self._owners.values())

    @functools.cached_property
    def tensor_names(self) -> set[str]:
        """The first fqn of each parameter, buffer and tensor attribute."""
        return {fqn for fqn, _, _ in self._owners.values()}

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
        modules: dict[str, RegisteredModule] = {}
        parameters: dict[int, tuple[list[str], torch.Tensor]] = {}
        for module in self.modules:
            fqns, kind = self.names_of(module), type(module)
            of_class = getattr(kind, "forward", None)  # scripted modules have theirs elsewhere
            has_forward = "forward" in module.__dict__ or of_class is not torch.nn.Module.forward
            modules[fqns[0]] = RegisteredModule(tuple(fqns), kind.__name__, has_forward)
            for name, p in (module.__dict__.get("_parameters") or _EMPTY).items():
                if p is not None:
                    names, _ = parameters.setdefault(id(p), ([], p))
                    names.extend([f"{fqn}.{name}" if fqn else name for fqn in fqns])
        params = [RegisteredParam(tuple(names), tuple(p.shape), p.dtype) for names, p in parameters.values()]
        return Registered(modules, {param.names[0]: param for param in params})

    @property
    def saved_modules(self) -> Collection[ModuleSnapshot]:
        """The model's modules, and those that only its objects, globals and closures hold."""
        return self._saved.values()

    def saved(self, module: Any) -> ModuleSnapshot | None:
        """What a module was before the forward; None for one that was not there."""
        return self._saved.get(id(module))

    def bound_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The current tensors of the modules' attributes, with the attributes' names in the model."""
        for saved in self.saved_modules:
            for table in (current_attributes(saved.module), saved.live[2]):
                for name, t in table.items():
                    if isinstance(t, torch.Tensor):
                        yield f"{saved.fqn}.{name}" if saved.fqn else name, t

    def replaced(self, module: torch.nn.Module) -> tuple[str, ...]:
        """The fqns of a module's parameters in whose place it has other tensors, as in `functional_call`."""
        saved, current = self._saved.get(id(module)), module.__dict__.get("_parameters")
        if saved is None or not isinstance(current, dict):  # a scripted module makes them anew each time
            return ()
        changed = [name for name, p in saved.tables[1].items() if p is not None and current.get(name) is not p]
        return tuple([f"{saved.fqn}.{name}" if saved.fqn else name for name in changed])

    def restore(self) -> list[Change]:
        """Put every module back as it was before the trace, and say which attributes had changed."""
        return [change for saved in self._saved.values() for change in saved.restore()]


_EMPTY: dict[str, Any] = {}  # in the place of the many copies of empty tables
_NOTHING: frozenset[str] = frozenset()


class ModuleSnapshot:
    """A copy of the attributes of a module, `fqn` in the model and `name` in source; Contents has what they hold."""

    def __init__(self, fqn: str, module: torch.nn.Module, contents: Contents, name: str = "self") -> None:
        self.fqn = fqn
        self.module = module
        self.kind = type(module)
        self.name = name
        self.is_watched = is_watchable(module)
        """Whether reads of its attributes are seen."""
        module_dict = module.__dict__
        self.live = module_dict, *[t if isinstance(t, dict) else _EMPTY for t in map(module_dict.get, MODULE_TABLES)]
        """Its attributes, parameters, buffers and modules, as the tables that it had before the trace."""
        self.tables = [table.copy() if table else _EMPTY for table in self.live]
        """What `live` held."""
        self.unsaved = frozenset(module_dict.get("_non_persistent_buffers_set") or _NOTHING)
        self.contents = {
            k: x for k, x in module_dict.items() if type(x) not in ATOMS and k not in BOOKKEEPING
        } or _EMPTY
        """The attributes of its own that hold something."""
        for key, x in self.contents.items():
            contents.add(f"{name}.{key}", x, module, Place(module_dict, key))
        self.hooks = {table: module_dict[table].copy() for table in _HOOK_TABLES if module_dict.get(table)} or _EMPTY
        for hook in [hook for table in HOOKS for hook in self.hooks.get(table, _EMPTY).values()]:
            contents.add(f"{name}'s hook", hook)

    def restore(self) -> list[Change]:
        """Put the module back as it was, and say which attributes, parameters, buffers and modules were others."""
        changes: list[Change] = []
        for table, old in zip(self.live, self.tables, strict=True):
            if not same_entries(table, old):
                changes += self._changes(table, old)
                write_dict(table, old)
        if type(self.module) is not self.kind:  # as of a module that gets a parametrization
            place = Place(self.module, "__class__")
            changes.append(Change(f"{self.name}.__class__", self.kind, type(self.module), place, *place))
            place.put(self.kind)
        unsaved = self.live[0].get("_non_persistent_buffers_set")
        if unsaved is not None and unsaved != self.unsaved:
            unsaved.clear()
            unsaved.update(self.unsaved)
        return [*changes, *self._restore_hooks()]

    def _restore_hooks(self) -> Iterator[Change]:
        module_dict = self.module.__dict__
        for name in _HOOK_TABLES:
            table, old = module_dict.get(name), self.hooks.get(name, {})
            if (table or old) and isinstance(table, dict) and not same_entries(table, old):
                if name in HOOKS:
                    yield Change(f"{HOOKS[name]} of {self.name}", old, dict(table), Place(table), self.module, name)
                write_dict(table, old)

    def _changes(self, table: dict[str, Any], old: dict[str, Any]) -> Iterator[Change]:
        compiles = isinstance(self.module, torch.fx.GraphModule)  # it keeps its code in private attributes
        for name, before, after in changed_entries(old, table):
            if name in BOOKKEEPING or lists_weights(self.module, name) or (compiles and name[0] == "_"):
                continue
            buffer = name not in unsaved_buffers_of(self.module) if table is self.live[2] else None
            yield Change(f"{self.name}.{name}", before, after, Place(table, name), self.module, name, buffer)


def _name_of(fn: Callable[..., Any]) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    name: str = getattr(fn, "__name__", type(fn).__name__)
    return "function" if name == "<lambda>" else name


def _reachable(fn: Any, arguments: Sequence[tuple[str, Any]]) -> dict[str, torch.nn.Module]:
    """The modules that a function can reach by name, itself and by the functions that it refers to."""
    contents, reached = Contents(), dict[str, torch.nn.Module]()
    owner, function = (fn.__self__, fn.__func__) if isinstance(fn, types.MethodType) else (fn, fn)
    attributes = () if isinstance(owner, functools.partial) else attributes_and_slots(owner).items()
    for name, x in (*arguments, *attributes, ("func", getattr(fn, "__wrapped__", None))):  # the last as of a trace
        contents.add(name, x)
    reach = Reach(contents.add)
    reach.add(function)
    if isinstance(function, types.FunctionType) and not reach.functions:  # one of scopetrace, around a model
        reach.look_into(function, 1)
    reach.follow(list)
    for name, module in contents.modules:
        path = re.sub(r"\['?(\w+)'?\]", r".\1", name.replace(".__self__", ""))  # `models[0]` as `models.0`
        names = itertools.chain([path], map(f"{path}_{{}}".format, itertools.count(1)))
        if re.fullmatch(r"\w+(\.\w+)*", path):
            next(unique for unique in names if reached.setdefault(unique, module) is module)
    return reached


# What a forward calls its arguments ----------------------------------------------------------------------------------


def signature_of_forward(forward: Any) -> inspect.Signature:
    """That of a function or of a module's forward. Raises TypeError and ValueError where it has none."""
    return inspect.signature(forward.forward if isinstance(forward, torch.nn.Module) else forward)


def _parameters_of(forward: Any) -> list[inspect.Parameter]:
    try:
        return list(signature_of_forward(forward).parameters.values())
    except (TypeError, ValueError):  # built-in callables have no signature
        return []


def argument_names(forward: Any, count: int) -> list[str]:
    """What forward calls its first `count` positional arguments; `args[0]` and so on past `*args`."""
    names: list[str] = []
    for p in _parameters_of(forward):
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            names.append(p.name)
        elif p.kind is p.VAR_POSITIONAL:
            names += [f"{p.name}[{i}]" for i in range(count - len(names))]
    names += [f"arg[{i}]" for i in range(count - len(names))]
    return names[:count]


def named_arguments(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Each argument with what forward calls it."""
    return [*zip(argument_names(forward, len(args)), args, strict=True), *kwargs.items()]


def more_keywords(forward: Any, keywords: Iterable[str]) -> list[str]:
    """Those of the keywords that forward takes by `**kwargs`; none where its signature is not known."""
    names = {p.name for p in _parameters_of(forward)}
    return [name for name in keywords if names and name not in names]
