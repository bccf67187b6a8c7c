"""The traced model: the names of its modules and tensors, and its state before the trace.

Data flow:
    callable -> the modules that it can reach -> fully qualified names of modules, parameters and buffers
    the attributes of each module, saved -> after the forward: which were bound to other tensors, and all put back
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.fx

from scopetrace.ir.registered import Registered, RegisteredModule, RegisteredParam
from scopetrace.record.code import ATOMS
from scopetrace.record.snapshot import MISSING, Change, Snapshot, is_memo, same

_TABLES = ("_parameters", "_buffers", "_modules")
_BOOKKEEPING = frozenset(torch.nn.Module().__dict__) - {"training"} | {"_compiled_call_impl"}


@functools.lru_cache(maxsize=4096)
def own_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the names in a module's `__dict__` that are no bookkeeping of nn.Module."""
    return tuple([name for name in names if name not in _BOOKKEEPING])


_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class Model:
    """The modules and tensors that belong to a traced callable, with their names.

    An `nn.Module` has its own names (`named_modules`), a bound method those of its module. For any other callable, the
    modules in its closure, globals and partial arguments are named after their variables.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.root, self.forward = _unwrap(fn)
        self.type_name = type(self.root).__name__ if self.root is not None else _name_of(fn)
        self.names: dict[int, list[str]] = {}
        self.modules: list[torch.nn.Module] = []
        self._tensors: dict[int, tuple[str, torch.nn.Module, str]] = {}
        self._saved: dict[int, SavedModule] = {}
        self.snapshot = Snapshot()
        """The contents of the objects in the modules' attributes."""
        if self.root is not None:
            self._visit("", self.root, set())
        else:
            for name, module in _modules_around(fn):
                self._visit(name, module, set())

    def _visit(self, fqn: str, module: torch.nn.Module, path: set[int]) -> None:
        known = self.names.setdefault(id(module), [])
        known.append(fqn)
        prefix = f"{fqn}." if fqn else ""
        if len(known) == 1:
            self.modules.append(module)
            self._save(fqn, module)
            for table in self._saved[id(module)].tensor_tables():
                for name, t in table.items():
                    if isinstance(t, torch.Tensor):
                        self._tensors.setdefault(id(t), (prefix + name, module, name))
        for name, child in module.__dict__.get("_modules", {}).items():
            if child is not None and id(child) not in path:
                self._visit(prefix + name, child, path | {id(child)})

    def _save(self, fqn: str, module: torch.nn.Module) -> None:
        name = fqn if self.root is None else f"self.{fqn}" if fqn else "self"
        self._saved[id(module)] = SavedModule(fqn, module, self.snapshot, name)

    def save_outside(self, name: str, module: torch.nn.Module) -> list[torch.nn.Module]:
        """Save a module that is not in the model's tree, and those in it; `name` is that in source. Returns them."""
        if id(module) in self._saved:
            return []
        found = [(inner, m) for inner, m in module.named_modules() if id(m) not in self._saved]
        for inner, m in found:
            self._saved[id(m)] = SavedModule("", m, self.snapshot, f"{name}.{inner}" if inner else name)
        return [m for _, m in found]

    def owner(self, t: torch.Tensor) -> tuple[str, torch.nn.Module, str] | None:
        """(first fqn, module, name there) of a parameter, buffer or tensor attribute; None for other tensors."""
        return self._tensors.get(id(t))

    @functools.cached_property
    def tensor_names(self) -> set[str]:
        """The first fqn of each parameter, buffer and tensor attribute."""
        return {name for name, _, _ in self._tensors.values()}

    def module_name(self, module: torch.nn.Module, inside: str | None) -> str | None:
        """The fqn of a module; of several, one inside the module `inside`. None for one that is not in the model."""
        names = self.names.get(id(module))
        if not names:
            return None
        if len(names) > 1 and inside:
            return next((n for n in names if n.startswith(inside + ".")), names[0])
        return names[0]

    def registered(self) -> Registered:
        """All names of the modules and parameters, in the order of registration."""
        names: dict[int, list[str]] = {}
        params: dict[int, torch.Tensor] = {}
        for module in self.modules:
            for name, param in module.__dict__.get("_parameters", {}).items():
                if param is not None:
                    params.setdefault(id(param), param)
                    prefixes = (f"{fqn}." if fqn else "" for fqn in self.names[id(module)])
                    names.setdefault(id(param), []).extend(prefix + name for prefix in prefixes)
        modules = {self.names[id(m)][0]: _registered(m, self.names[id(m)]) for m in self.modules}
        found = {names[i][0]: RegisteredParam(tuple(names[i]), tuple(p.shape), p.dtype) for i, p in params.items()}
        return Registered(modules, found)

    @property
    def saved_modules(self) -> Collection[SavedModule]:
        """The model's modules, and those that only its objects, globals and closures hold."""
        return self._saved.values()

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


def _registered(module: torch.nn.Module, names: list[str]) -> RegisteredModule:
    of_class = getattr(type(module), "forward", None)  # scripted modules have theirs elsewhere
    has_forward = of_class is not torch.nn.Module.forward or "forward" in module.__dict__
    return RegisteredModule(tuple(names), type(module).__name__, has_forward)


class SavedModule:
    """A copy of the attributes of one module. What their values hold is saved in a Snapshot.

    `fqn` is the module's name in the model, and `name` that in source.
    """

    __slots__ = ("contents", "fqn", "module", "name", "tables")

    def __init__(self, fqn: str, module: torch.nn.Module, snapshot: Snapshot, name: str = "self") -> None:
        self.fqn = fqn
        self.module = module
        self.name = name
        self.tables = [table.copy() for table in attribute_tables(module)]
        own = module.__dict__
        self.contents = {k: own[k] for k in own_names(tuple(own)) if type(own[k]) not in ATOMS}
        """The attributes of its own that hold something."""
        for key, x in self.contents.items():
            snapshot.add(f"{name}.{key}", f".{key}", x, module)
        for hooks in _HOOKS:
            for hook in own[hooks].values() if own.get(hooks) else ():
                snapshot.add(f"{name}'s hook", "", hook)

    def replaced(self) -> tuple[str, ...]:
        """As `Model.replaced`."""
        now = self.module.__dict__.get("_parameters")
        if not isinstance(now, dict):  # a scripted module makes them anew each time
            return ()
        prefix, old = f"{self.fqn}." if self.fqn else "", self.tables[1]
        return tuple([prefix + name for name, p in old.items() if p is not None and now.get(name) is not p])

    def tensor_tables(self) -> Iterable[Mapping[str, Any]]:
        """Parameters, buffers and other attributes, by name."""
        if isinstance(self.module, torch.jit.ScriptModule):  # in C++
            return dict(self.module.named_parameters(recurse=False)), dict(self.module.named_buffers(recurse=False))
        return *self.tables[1:3], self.contents

    def restore(self) -> list[Change]:
        """Put the module back as it was, and say which attributes, parameters, buffers and modules were others."""
        found: list[Change] = []
        for table, old in zip(attribute_tables(self.module), self.tables, strict=False):
            if (table or old) and not _unchanged(table, old):
                found += self._changes(table, old)
                table.clear()
                table.update(old)
        return found

    def _changes(self, table: dict[str, Any], old: dict[str, Any]) -> Iterator[Change]:
        compiles = isinstance(self.module, torch.fx.GraphModule)  # it keeps its code in private attributes
        for name in dict.fromkeys((*old, *table)):
            before, now = old.get(name, MISSING), table.get(name, MISSING)
            if name in _BOOKKEEPING or (compiles and name[0] == "_") or same(before, now):
                continue
            if isinstance(now, torch.Tensor) or not is_memo(self.module, name, before):
                yield Change(f"{self.name}.{name}", f".{name}", before, now, self.module, name)


def attribute_tables(owner: Any) -> list[dict[str, Any]]:
    """The attributes of an object; then, of a module that is not scripted, its parameters, buffers and modules."""
    own = getattr(owner, "__dict__", {})
    return [own, *[own[name] for name in _TABLES if isinstance(own.get(name), dict)]]


def _unchanged(now: dict[str, Any], old: dict[str, Any]) -> bool:
    same_names = len(now) == len(old) and all(map(operator.is_, now, old))
    return same_names and all(map(operator.is_, now.values(), old.values()))


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


def _modules_around(fn: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules that a function can reach by name."""
    if isinstance(fn, functools.partial):
        yield from ((f"arg{i}", a) for i, a in enumerate(fn.args) if isinstance(a, torch.nn.Module))
        yield from ((k, a) for k, a in fn.keywords.items() if isinstance(a, torch.nn.Module))
        fn = fn.func
    fn = getattr(fn, "__wrapped__", fn)
    code = getattr(fn, "__code__", None)
    if code is None:
        owner = vars(fn) if hasattr(fn, "__dict__") else {}
        yield from ((k, m) for k, m in owner.items() if isinstance(m, torch.nn.Module))
        return
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=False):
        try:
            found = cell.cell_contents
        except ValueError:  # a variable that is not bound yet
            continue
        if isinstance(found, torch.nn.Module):
            yield name, found
    for name in code.co_names:
        found = fn.__globals__.get(name)
        if isinstance(found, torch.nn.Module):
            yield name, found
