"""Whether two modules are equal but for their tensors' data and what the forward never reads of them.

Data flow:
    two modules -> their classes, hooks, submodules, parameters, buffers and attributes, gone along side by side: of
        the first as they were before the forward, and when its call was recorded; of the second as they are, and were
    an attribute that the first was not asked for -> left out; one of equal value -> the same
    modules, tensors and objects -> pairs, each in one pair only, so that what is shared in one is in the other
    anything else -> Differs, which says what
"""

from __future__ import annotations

import enum
import functools
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from scopetrace._compat.tensors import (
    id_of_storage,
    is_conj_of,
    is_inference_of,
    is_neg_of,
    nbytes_of,
    offset_of,
    requires_grad_of,
    stride_of,
    tags_of,
)
from scopetrace.ir.reads import MISSING, Missing, content_of, own_dict
from scopetrace.record.code import ATOMS, TOLD_BY_TEXT, has_hooks, is_users
from scopetrace.record.model import Saved, SavedModule, attributes_and_slots, own_names, short, slots_of

T = TypeVar("T")
_TABLES = ("parameters", "buffers", "submodules")
_SIZE = torch.nn.Module.__basicsize__
"""Of an object that holds what is in its `__dict__`, and no more."""
_WITHOUT_STATE = (type, types.ModuleType, types.GenericAlias)
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
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
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
    """Two modules, or calls, are not equal, for the reason that the text says.

    The text is made when it is read: most comparisons that fail are tried again with another call.
    """

    def __init__(self, reason: str, what: str = "", before: str = "") -> None:
        """`reason` follows the name of what differs, if it has one, else `what`; `before` comes before both."""
        super().__init__(reason)
        self._reason, self._what, self._before = reason, what, before
        self._names: list[str] = []

    def inside(self, name: str) -> Differs:
        """Name what differs, or that in which it is. Returns itself."""
        self._names.append(name)
        return self

    def __str__(self) -> str:
        names = [*self._names[::-1], *([self._what] if self._before else ())]
        name = "".join(name if name[0] == "[" or i == 0 else f".{name}" for i, name in enumerate(names))
        return f"{self._before}{name or self._what}{self._reason}"


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
        if kind in ATOMS or issubclass(kind, Missing):
            return ""
        if issubclass(kind, torch.Tensor):
            return "unwatched" if tags_of(x) else ""
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
        if isinstance(x, _WEAK):
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
        if isinstance(x, enum.Enum):  # which nobody changes, but for what it has beside its value
            return None if any(name[0] != "_" for name in vars(x)) else [x.value]
        if isinstance(x, enum.EnumMeta):
            return list(x)
        if isinstance(x, _WITHOUT_STATE) or x is sys.stdout or x is sys.stderr:
            return ()
        if isinstance(x, tuple | frozenset):
            return x
        saved = self._objects.get(id(x))
        before = None if saved is None else saved.before
        if isinstance(before, dict):
            return [*before, *before.values()]
        return before if saved is None or isinstance(before, list | set) else ()


class _Seen(NamedTuple):
    """What two modules are compared by, of the first one: an attribute with its place in `SavedModule.values`.

    They are its parameters, buffers and submodules, and the attributes of its own that the forward may have read.
    """

    saved: SavedModule
    atoms: list[tuple[int, str, Any]]
    """Those without content."""
    others: list[tuple[int, str, Any, Callable[[Pairs, Any, Any], None]]]
    """Each with what compares two that have its class."""


class Pairs:
    """What of one module stands for what of another."""

    def __init__(
        self,
        may_have_read: Callable[[Any, str], bool],
        watch: Watch,
        saved: Callable[[torch.nn.Module], SavedModule | None],
        facts: dict[int, Any],
    ) -> None:
        """`saved` gives what a module was before the forward; None for one that was not there.

        The first of two modules is compared as it was then, and the second one has to be as it was.

        `facts` has what is known of modules and tensors of the first module, by id. It is of a call that has ended, so
        that its code reads no more.
        """
        self._facts = facts
        self._saved = saved
        self._may_have_read = may_have_read
        self._watch = watch
        self._partner: dict[int, Any] = {}
        self._taken: set[int] = set()
        self.owners: list[Any] = []
        """The first modules, and objects with attributes."""
        self.tensors: list[torch.Tensor] = []
        """The first tensors."""
        self.storages: dict[int, int] = {}
        """By id of a second tensor, what stands for its memory: see `storage_id`."""

    def partner(self, x: Any) -> Any:
        """What stands for an object; itself where it belongs to neither of the modules."""
        return self._partner.get(id(x), x)

    def partners(self, objects: Sequence[T]) -> list[T]:
        """As `partner`, of each."""
        ids = list(map(id, objects))
        return [*map(self._partner.get, ids, objects)]

    def others(self, owners: Mapping[int, Any]) -> list[int]:
        """The ids of what stands for these, given by id; none for those that belong to neither, or to both."""
        found = map(self._partner.get, owners, owners.values())
        return [id(new) for key, new in zip(owners, found, strict=True) if id(new) != key]

    def _is_new(self, a: Any, b: Any, default: str = "") -> bool:
        found = self._partner.get(id(a), MISSING)
        if found is MISSING and id(b) not in self._taken:
            self._partner[id(a)] = b
            self._taken.add(id(b))
            return True
        if found is not b:
            raise Differs(" is shared with others in one of them", default)
        return False

    def module(self, a: Any, b: Any) -> None:
        """Pair two modules. Raises Differs."""
        if not self._is_new(a, b, "the module"):
            return
        if type(a) is not type(b):
            raise Differs(f" differs: {type(a).__name__}, {type(b).__name__}", "the class")
        if isinstance(a, torch.jit.ScriptModule):
            raise Differs(" is scripted", "it")
        seen = self._facts.get(id(a)) or self._seen(a)
        second = self._usual(b)
        self.owners.append(a)
        if seen.saved.layout is not second.layout:
            self._tables(a, seen.saved, second)
            return
        values, name = second.values, ""
        try:
            for i, key, x in seen.atoms:
                if values[i] is not x:
                    name = key
                    self.value(x, values[i])
            for i, key, x, compare in seen.others:
                name, y = key, values[i]
                if type(x) is not type(y):
                    raise _unequal(x, y)
                compare(self, x, y)
        except Differs as unlike:
            raise unlike.inside(name) from None

    def _seen(self, a: torch.nn.Module) -> _Seen:
        saved = self._usual(a)
        names, end = list(itertools.chain(*saved.layout.names)), saved.layout.ends[0]
        own = [i for i in range(end) if names[i] in saved.layout.own and self._may_have_read(a, names[i])]
        compared = [(i, names[i], saved.values[i]) for i in (*range(end, len(names)), *own)]
        atoms = [each for each in compared if type(each[-1]) in ATOMS]
        others = [(*each, _comparison(type(each[-1]))) for each in compared if type(each[-1]) not in ATOMS]
        found = self._facts[id(a)] = _Seen(saved, atoms, others)
        return found

    def _usual(self, module: torch.nn.Module) -> SavedModule:
        """What a module was before the forward. Raises Differs where it has changed, or runs other code."""
        saved, own = self._saved(module), module.__dict__
        if saved is None or not saved.has_tables or not saved.is_unchanged():
            raise Differs(" has changed", "the module")
        if "forward" in own:
            raise Differs(" has a forward of its own", "it")
        if has_hooks(own):
            raise Differs(" has hooks", "it")
        if type(module).__basicsize__ != _SIZE:
            raise Differs(" has __slots__, or is a list or dict too", "it")
        return saved

    def _tables(self, a: torch.nn.Module, first: SavedModule, second: SavedModule) -> None:
        """Pair what two modules have that have not the same names, or not in the same order."""
        (own, *left), (other, *right) = first.tables, second.tables
        for what, x, y in zip(_TABLES, left, right, strict=True):
            if list(x) != list(y):
                raise Differs(" differ", what, "the ")
            for name, value in x.items():
                self._value(name, value, y[name])
        self._attributes(own, other, a, own_names(tuple(dict.fromkeys((*own, *other)))))

    def _attributes(self, left: dict[str, Any], right: dict[str, Any], a: Any, names: Iterable[str]) -> None:
        for key in names:
            x, y = left.get(key, MISSING), right.get(key, MISSING)
            if not (x is y and type(x) in ATOMS) and self._may_have_read(a, key):
                self._value(key, x, y)

    def tensor(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Pair two real tensors. Raises Differs."""
        if not self._is_new(a, b):
            return
        first, storage = self._facts.get(id(a)) or self._facts.setdefault(id(a), _facts(a))
        if first is None:
            raise Differs(f", a {type(a).__name__} with attributes of its own or of a special kind, is not compared")
        second, other = _facts(b)
        if first != second:
            raise Differs(f" differs: {_described(a)}, {_described(b)}")
        found = self._partner.get(-storage)
        if found is None and -other not in self._taken:
            self._partner[-storage] = other
            self._taken.add(-other)
        elif found != other:
            raise Differs(" shares memory with others in one of them")
        self.storages[id(b)] = other
        self.tensors.append(a)

    def argument(self, a: Any, b: Any) -> None:
        """Pair two modules or real tensors among the arguments of calls. Raises Differs."""
        self._value("an argument", a, b)

    def _value(self, name: str, a: Any, b: Any) -> None:
        try:
            self.value(a, b)
        except Differs as unlike:
            raise unlike.inside(name) from None

    def value(self, a: Any, b: Any) -> None:
        """Pair two values of attributes, or of arguments. Raises Differs."""
        kind = type(a)
        if kind is not type(b):
            raise _unequal(a, b)
        if kind in ATOMS:
            if not (a is b or (repr(a) == repr(b) if kind in TOLD_BY_TEXT else a == b)):
                raise _unequal(a, b)
        else:
            _comparison(kind)(self, a, b)

    def _object(self, a: Any, b: Any) -> None:
        if a is b and self._watch.problem(a) != "module":
            if self._watch.problem(a):
                raise Differs(f", a {type(a).__name__}, cannot be watched")
        else:
            self._inside(type(a), a, b)

    def _inside(self, kind: type, a: Any, b: Any) -> None:
        left, right = _items(kind, a), _items(kind, b)
        if left is not None and right is not None:
            if kind in (tuple, functools.partial, types.MethodType) or self._is_new(a, b):
                self._all(left, right)
        elif kind is dict and list(map(repr, a)) == list(map(repr, b)) and all(type(key) in ATOMS for key in a):
            if self._is_new(a, b):
                self._all(list(a.values()), list(b.values()))
        elif kind in (set, frozenset) and list(map(repr, a)) == list(map(repr, b)) and all(type(x) in ATOMS for x in a):
            self._is_new(a, b)
        elif self._watch.has_attributes(a) and self._watch.has_attributes(b):
            if self._is_new(a, b):
                self.owners.append(a)
                own, other = self._watch.attributes(a), self._watch.attributes(b)
                self._attributes(own, other, a, dict.fromkeys((*own, *other)))
        else:
            raise _unequal(a, b)

    def _all(self, left: list[Any], right: list[Any]) -> None:
        if len(left) != len(right):
            raise Differs(f" differs in length: {len(left)}, {len(right)}")
        for i, (x, y) in enumerate(zip(left, right, strict=True)):
            self._value(f"[{i}]", x, y)


def _comparison(kind: type) -> Callable[[Pairs, Any, Any], None]:
    """What compares two objects of a class that have content."""
    if issubclass(kind, torch.nn.Module):
        return Pairs.module
    return Pairs.tensor if issubclass(kind, torch.Tensor) else Pairs._object


def _items(kind: type, x: Any) -> list[Any] | None:
    """What an object of some classes consists of, beside its class."""
    if kind in (list, tuple):
        return list(x)
    if kind is functools.partial and not x.__dict__:
        return [x.func, x.args, tuple(x.keywords), *x.keywords.values()]
    if kind is types.MethodType:
        return [x.__func__, x.__self__]
    if kind is types.FunctionType and not x.__dict__:
        named = x.__kwdefaults__ or {}
        told = [x.__name__, x.__qualname__, x.__doc__, _annotations(x), x.__defaults__, tuple(named), *named.values()]
        return [x.__code__, id(x.__globals__), *told, *map(content_of, x.__closure__ or ())]
    return None


def _annotations(function: types.FunctionType) -> dict[str, Any]:
    """Those of its parameters, which Python 3.14 computes when it is asked; it may lack names for that."""
    try:
        return function.__annotations__
    except Exception:
        return {}


def _facts(t: torch.Tensor) -> tuple[Any, int]:
    """What ops see of a real tensor beside its data, None where that is not known; and its `storage_id`."""
    kind, required = type(t), requires_grad_of(t)
    plain = kind in (torch.Tensor, torch.nn.Parameter) and t.layout is torch.strided and not tags_of(t)
    if not plain or (required and kind is torch.Tensor) or is_conj_of(t) or is_neg_of(t):
        return None, 0
    storage = t.untyped_storage()
    place = t.size(), stride_of(t), offset_of(t), nbytes_of(storage), t.dtype, t.device
    return (kind, place, required, is_inference_of(t)), id_of_storage(storage)


def _described(t: torch.Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.size())}"


def _unequal(a: Any, b: Any) -> Differs:
    return Differs(f" differs: {short(a)}, {short(b)}")
