"""Whether two modules are equal but for their tensors' data and what the forward never reads of them.

Data flow:
    two modules -> their classes, hooks, submodules, parameters, buffers and attributes, gone along side by side
    an attribute that the first was not asked for -> left out; one of equal value -> the same
    modules, tensors and objects -> pairs, each in one pair only, so that what is shared in one is in the other
    anything else -> Differs, which says what
"""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from scopetrace._compat.tensors import (
    is_conj_of,
    is_inference_of,
    is_neg_of,
    nbytes_of,
    offset_of,
    requires_grad_of,
    storage_id,
    stride_of,
    tags_of,
)
from scopetrace.ir.reads import MISSING, Missing, content_of
from scopetrace.record.code import ATOMS, is_users
from scopetrace.record.model import Saved, attributes_and_slots, own_dict, own_names, short, slots_of

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TENSOR_TABLES = ("_parameters", "_buffers")
_WITHOUT_STATE = (type, types.ModuleType, enum.Enum, types.GenericAlias)
_STATEFUL = {
    "array",
    "itertools",
    "queue",
    "io",
    "_io",
    "socket",
    "sqlite3",
    "mmap",
    "ctypes",
    "shelve",
    "dbm",
    "tempfile",
}
_OF_PROCESS = {
    "ctypes",
    "decimal",
    "fcntl",
    "gc",
    "locale",
    "mmap",
    "multiprocessing",
    "resource",
    "signal",
    "tracemalloc",
}
"""The modules of Python that tell of state, or change it, which no object holds."""
_LIBRARIES = (sys.stdlib_module_names - _STATEFUL) | {"torch", "numpy", "sympy"}
"""The packages of which objects without known content have no state that a forward writes."""


class Differs(Exception):
    """Two modules, or calls, are not equal, for the reason that the text says."""


class Watch:
    """What may be shared by two calls. `objects` are those whose contents are known, by id."""

    def __init__(self, objects: Mapping[int, Saved]) -> None:
        self._objects = objects
        self._known: dict[int, str] = {}
        self._has_slots: dict[type, bool] = {}
        self._keep: list[Any] = []

    def attributes(self, x: Any) -> dict[str, Any]:
        """What an object has under names of its own."""
        kind = type(x)
        if kind not in self._has_slots:
            self._has_slots[kind] = bool(slots_of(kind)) or not kind.__dictoffset__
        return attributes_and_slots(x) if self._has_slots[kind] else own_dict(x)

    def has_attributes(self, x: Any) -> bool:
        """Whether it is an object of the users that consists of attributes."""
        saved = self._objects.get(id(x))
        return saved is not None and saved.kind.entries == "."

    def problem(self, x: Any) -> str:
        """What stands against sharing an object: `module` where it leads to one; `unwatched`; else nothing."""
        kind = type(x)
        if kind in ATOMS or issubclass(kind, (torch.Tensor, Missing)):
            return ""
        known = self._known.get(id(x))
        if known is None:
            self._known[id(x)] = ""
            self._keep.append(x)
            known = self._known[id(x)] = self._problem(x)
        return known

    def _problem(self, x: Any) -> str:
        if isinstance(x, torch.nn.Module):
            return "module"
        if (x.__name__ if isinstance(x, types.ModuleType) else getattr(x, "__module__", "")) in _OF_PROCESS:
            return "unwatched"
        inside = self._inside(x)
        if inside is not None:
            return next(filter(None, map(self.problem, inside)), "")
        root = str(getattr(x if callable(x) else type(x), "__module__", None) or "builtins").partition(".")[0]
        is_stateful = hasattr(type(x), "__next__") or isinstance(x, list | dict | set | memoryview | torch.Generator)
        return "unwatched" if is_stateful or root not in _LIBRARIES else ""

    def _inside(self, x: Any) -> Any:
        """What an object leads to that is known to have no other state; None where that is not known."""
        if isinstance(x, types.FunctionType):
            return [content_of(cell) for cell in x.__closure__ or ()] if is_users(x.__code__.co_filename) else ()
        if isinstance(x, types.BuiltinFunctionType | types.MethodWrapperType):
            owner = getattr(x, "__self__", None)
            return None if owner is None or isinstance(owner, types.ModuleType) else [owner]
        if isinstance(x, functools.partial | types.MethodType):
            return _items(type(x), x)
        if isinstance(x, _WITHOUT_STATE) or x is sys.stdout or x is sys.stderr:
            return ()
        if isinstance(x, tuple | frozenset):
            return x
        saved = self._objects.get(id(x))
        before = None if saved is None else saved.before
        if isinstance(before, dict):
            return [*before, *before.values()]
        return before if saved is None or isinstance(before, list | set) else ()


class Pairs:
    """What of one module stands for what of another."""

    def __init__(self, may_have_read: Callable[[Any, str], bool], watch: Watch, facts: dict[int, Any]) -> None:
        """`facts` has what is known of tensors of the first module, by id."""
        self._facts = facts
        self._may_have_read = may_have_read
        self._watch = watch
        self._partner: dict[int, Any] = {}
        self._taken: set[int] = set()
        self.owners: list[tuple[Any, Any]] = []
        """The modules and objects with attributes."""
        self.tensors: list[tuple[torch.Tensor, torch.Tensor]] = []

    def partner(self, x: Any) -> Any:
        """What stands for an object; itself where it belongs to neither of the modules."""
        return self._partner.get(id(x), x)

    def _is_new(self, name: str, a: Any, b: Any) -> bool:
        found = self._partner.get(id(a), MISSING)
        if found is MISSING and id(b) not in self._taken:
            self._partner[id(a)] = b
            self._taken.add(id(b))
            return True
        if found is not b:
            raise Differs(f"{name} is shared with others in one of them")
        return False

    def module(self, name: str, a: Any, b: Any) -> None:
        """Pair two modules. Raises Differs."""
        if not self._is_new(name or "the module", a, b):
            return
        own, other = a.__dict__, b.__dict__
        if type(a) is not type(b):
            raise Differs(f"{name or 'the class'} differs: {type(a).__name__}, {type(b).__name__}")
        if isinstance(a, torch.jit.ScriptModule):
            raise Differs(f"{name or 'it'} is scripted")
        for table in (own, other):
            if "forward" in table:
                raise Differs(f"{name or 'it'} has a forward of its own")
            if any(map(table.__getitem__, _HOOKS)):
                raise Differs(f"{name or 'it'} has hooks")
        self.owners.append((a, b))
        prefix = f"{name}." if name else ""
        for table in _TENSOR_TABLES:
            self._same_keys(f"{prefix}{table[1:]}", own[table], other[table])
            for key, t in own[table].items():
                self.value(prefix + key, t, other[table][key])
        self._same_keys(f"{prefix}submodules", own["_modules"], other["_modules"])
        for key, child in own["_modules"].items():
            self.value(prefix + key, child, other["_modules"][key])
        self._attributes(prefix, a, b)

    def _attributes(self, prefix: str, a: Any, b: Any) -> None:
        left, right = self._watch.attributes(a), self._watch.attributes(b)
        names = tuple(left if left.keys() == right.keys() else dict.fromkeys((*left, *right)))
        for key in own_names(names) if isinstance(a, torch.nn.Module) else names:
            x, y = left.get(key, MISSING), right.get(key, MISSING)
            if not (x is y and type(x) in ATOMS) and self._may_have_read(a, key):
                self.value(prefix + key, x, y)

    @staticmethod
    def _same_keys(name: str, a: dict[Any, Any], b: dict[Any, Any]) -> None:
        if list(a) != list(b):
            raise Differs(f"the {name} differ")

    def tensor(self, name: str, a: torch.Tensor, b: torch.Tensor) -> None:
        """Pair two real tensors. Raises Differs."""
        if not self._is_new(name, a, b):
            return
        first = self._facts.get(id(a)) or self._facts.setdefault(id(a), _facts(a))
        if first is None:
            raise Differs(
                f"{name}, a {type(a).__name__} with attributes of its own or of a special kind, is not compared"
            )
        if first != _facts(b):
            raise Differs(f"{name} differs: {_described(a)}, {_described(b)}")
        self._storages(name, storage_id(a), storage_id(b))
        self.tensors.append((a, b))

    def _storages(self, name: str, a: int, b: int) -> None:
        found = self._partner.get(-a, MISSING)
        if found is MISSING and -b not in self._taken:
            self._partner[-a] = b
            self._taken.add(-b)
        elif found != b:
            raise Differs(f"{name} shares memory with others in one of them")

    def value(self, name: str, a: Any, b: Any) -> None:
        """Pair two values of attributes, or of arguments. Raises Differs."""
        kind = type(a)
        if kind is not type(b):
            raise _unequal(name, a, b)
        if kind in ATOMS:
            if not (a is b or (repr(a) == repr(b) if kind in (float, complex) else a == b)):
                raise _unequal(name, a, b)
        elif issubclass(kind, torch.nn.Module):
            self.module(name, a, b)
        elif issubclass(kind, torch.Tensor):
            self.tensor(name, a, b)
        elif a is b and self._watch.problem(a) != "module":
            if self._watch.problem(a):
                raise Differs(f"{name}, a {kind.__name__}, cannot be watched")
        else:
            self._inside(name, kind, a, b)

    def _inside(self, name: str, kind: type, a: Any, b: Any) -> None:
        left, right = _items(kind, a), _items(kind, b)
        if left is not None and right is not None:
            if kind in (tuple, functools.partial, types.MethodType) or self._is_new(name, a, b):
                self._all(name, left, right)
        elif kind is dict and list(map(repr, a)) == list(map(repr, b)) and all(type(key) in ATOMS for key in a):
            if self._is_new(name, a, b):
                self._all(name, list(a.values()), list(b.values()))
        elif kind in (set, frozenset) and a == b and all(type(x) in ATOMS for x in a):
            self._is_new(name, a, b)
        elif self._watch.has_attributes(a) and self._watch.has_attributes(b):
            if self._is_new(name, a, b):
                self.owners.append((a, b))
                self._attributes(f"{name}.", a, b)
        else:
            raise _unequal(name, a, b)

    def _all(self, name: str, left: list[Any], right: list[Any]) -> None:
        if len(left) != len(right):
            raise Differs(f"{name} differs in length: {len(left)}, {len(right)}")
        for i, (x, y) in enumerate(zip(left, right, strict=True)):
            self.value(f"{name}[{i}]", x, y)


def _items(kind: type, x: Any) -> list[Any] | None:
    """What an object of some classes consists of, beside its class."""
    if kind in (list, tuple):
        return list(x)
    if kind is functools.partial:
        return [x.func, list(x.keywords), *x.args, *x.keywords.values()]
    if kind is types.MethodType:
        return [x.__func__, x.__self__]
    if kind is types.FunctionType and not x.__dict__:
        defaults = [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
        return [x.__code__, id(x.__globals__), *defaults, *map(content_of, x.__closure__ or ())]
    return None


def _facts(t: torch.Tensor) -> Any:
    """What ops see of a real tensor beside its data; None where that is not known."""
    plain = type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout is torch.strided and not tags_of(t)
    if not plain or (requires_grad_of(t) and type(t) is torch.Tensor) or is_conj_of(t) or is_neg_of(t):
        return None
    place = t.size(), stride_of(t), offset_of(t), nbytes_of(t.untyped_storage())
    return type(t), t.dtype, t.device, place, requires_grad_of(t), is_inference_of(t)


def _described(t: torch.Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.size())}"


def _unequal(name: str, a: Any, b: Any) -> Differs:
    return Differs(f"{name} differs: {short(a)}, {short(b)}")
