"""What mutable Python objects hold before a forward, to find what it changed and to put it back.

Data flow:
    objects with names -> Snapshot.add, which follows items and attributes -> a copy of the content of each
    after the forward -> restore -> a Change for each entry that differed

Lists, dicts, sets and deques and their subclasses, objects with attributes, arrays of NumPy, and random generators of
Python and NumPy have contents. Modules, tensors, classes and objects of torch and the standard library have none.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import enum
import functools
import gc
import operator
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from scopetrace._compat.tensors import FakeTensor
from scopetrace.record.code import ATOMS, is_users_class

_NO_CONTENT = (torch.Tensor, torch.nn.Module, type, types.ModuleType, enum.Enum, types.BuiltinFunctionType)


class Missing:
    """Stands for an entry that is not there."""

    def __repr__(self) -> str:
        return "missing"


MISSING = Missing()


class Change(NamedTuple):
    """An entry that is not what it was."""

    name: str
    """In source: `self.n`, `self.stats['n']`; of a list or set, that of the whole."""
    key: str
    """The name by which Python reaches what changed: a variable `stats`, or an attribute `.stats`."""
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
        self.functions: list[types.FunctionType] = []
        """The functions that were found on the way."""
        self.modules: list[tuple[str, torch.nn.Module]] = []
        """The modules that were found on the way, with their names; they are not saved."""
        self.outside = False
        """Whether what is added belongs neither to the model nor to its arguments."""
        self.classes: set[type] = set()
        """The classes of the objects."""
        self._kinds: dict[type, Kind | None] = {}

    def take_found(self) -> tuple[list[types.FunctionType], list[tuple[str, torch.nn.Module]], set[type]]:
        """The functions, modules and classes that were found since the last call."""
        found = self.functions, self.modules, self.classes
        self.functions, self.modules, self.classes = [], [], set()
        return found

    def add(self, name: str, key: str, x: Any, holder: Any = None) -> None:
        """Save what `x` holds, and what its items and attributes hold. The others are as in Change."""
        kind = type(x)
        if kind in ATOMS or id(x) in self.saved:
            return
        if isinstance(x, (tuple, functools.partial, types.MethodType)):
            for i, item in enumerate(_parts(x)):
                self.add(f"{name}[{i}]", key, item, holder)
        elif isinstance(x, torch.nn.Module):
            self.modules.append((name, x))
        else:
            if kind is types.FunctionType:
                self.functions.append(x)
            how = self._kinds[kind] if kind in self._kinds else self._kinds.setdefault(kind, _kind_of(kind))
            if how is not None and (kind is not types.FunctionType or x.__dict__):
                self.saved[id(x)] = Saved(name, key, holder, x, how.copy(x), how, self.outside)
                self._add_inside(self.saved[id(x)])

    def _add_inside(self, saved: Saved) -> None:
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
                    self.add(f"{name}[{short(inner)}]", key, item, holder)
        elif type(before) in (list, set):
            for item in before:
                if type(item) not in ATOMS:
                    self.add(f"{name}[…]", key, item, holder)

    def restore(self, *, outside: bool = False) -> list[Change]:
        """Put everything back that belongs to the model or its arguments, and say what had changed.

        Globals and closures keep what the forward wrote, but for fake tensors; with `outside` they are put back too.
        """
        found: list[Change] = []
        for saved in self.saved.values():
            now = saved.kind.copy(saved.owner)
            if not saved.kind.unchanged(now, saved.before):
                found += _changes(saved, now)
                if outside or not saved.outside or saved.kind.words is not None or holds_fake(now):
                    saved.kind.restore(saved.owner, saved.before)
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
            yield Change(f"{saved.name}[{short(entry)}]", saved.key, old, new, saved.holder)


def _parts(x: Any) -> tuple[Any, ...]:
    if isinstance(x, functools.partial):
        return (x.func, *x.args, *x.keywords.values())
    return x if isinstance(x, tuple) else (x.__func__, x.__self__)


def same(old: Any, new: Any) -> bool:
    """Whether an entry is what it was: the same object, or an equal number or text."""
    if old is new:
        return True
    return type(old) is type(new) and isinstance(old, (bool, int, float, str, bytes, complex)) and bool(old == new)


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
    if issubclass(kind, (types.SimpleNamespace, argparse.Namespace, types.FunctionType)):
        return _ATTRIBUTES
    if not is_users_class(kind):
        return None
    if _slots(kind):
        return _ATTRIBUTES._replace(copy=_attributes_and_slots)
    return _ATTRIBUTES if kind.__dictoffset__ else None


def _slots(kind: type) -> list[str]:
    members = {name: member for base in kind.__mro__ for name, member in vars(base).items() if name[:2] != "__"}
    return [name for name, member in members.items() if isinstance(member, types.MemberDescriptorType)]


def _attributes_of(x: Any) -> dict[str, Any]:
    return dict(x.__dict__)


def _attributes_and_slots(x: Any) -> dict[str, Any]:
    found = dict(getattr(x, "__dict__", ()))
    for name in _slots(type(x)):
        with contextlib.suppress(AttributeError):
            found[name] = getattr(x, name)
    return found


def _restore_attributes(x: Any, before: dict[str, Any]) -> None:
    now = _attributes_and_slots(x)
    for name in now.keys() - before.keys():
        object.__delattr__(x, name)
    for name, value in before.items():
        if now.get(name, MISSING) is not value:
            object.__setattr__(x, name, value)


# The methods of the built-in class: those of a subclass may do anything, as a table that makes what is asked for.


def _base_of(x: Any) -> Any:
    return next(base for base in (list, collections.deque, collections.OrderedDict, dict, set) if isinstance(x, base))


def _items_of(x: Any) -> list[Any]:
    return list(_base_of(x).__iter__(x))


def _members_of(x: Any) -> set[Any]:
    return set(set.__iter__(x))


def _entries_of(x: Any) -> dict[Any, Any]:
    return dict(_base_of(x).items(x))


def _restore_list(x: Any, before: list[Any]) -> None:
    _base_of(x).clear(x)
    _base_of(x).extend(x, before)


def _restore_dict(x: Any, before: dict[Any, Any]) -> None:
    _base_of(x).clear(x)
    for key, item in before.items():
        _base_of(x).__setitem__(x, key, item)


def _restore_set(x: set[Any], before: set[Any]) -> None:
    set.clear(x)
    set.update(x, before)


def _same_items(now: Any, before: Any) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _same_dicts(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return _same_items(now, before) and all(map(operator.is_, now.values(), before.values()))


def _restore_random(x: random.Random, before: Any) -> None:
    x.setstate(before)


def _same_memo(now: tuple[Any, int], before: tuple[Any, int]) -> bool:
    """Whether a memo of a function got no tensor of the trace: it may remember anything else."""
    return now[1] == before[1] or not holds_fake(gc.get_referents(now[0]), depth=3)


def holds_fake(x: Any, depth: int = 5) -> bool:
    """Whether there is a fake tensor in containers, at most `depth` deep."""
    if isinstance(x, FakeTensor):
        return True
    if depth == 0 or not isinstance(x, (list, tuple, set, dict, collections.deque)):
        return False
    return any(holds_fake(item, depth - 1) for item in (x.values() if isinstance(x, dict) else x))


_MEMO = type(functools.cache(len))
_STATES = Words("in one state"), Words("in another")
_ATTRIBUTES = Kind(_attributes_of, _restore_attributes, _same_dicts, ".")
_LIST = Kind(_items_of, _restore_list, _same_items)
_BUILTIN: dict[type, Kind] = {
    list: _LIST,
    collections.deque: _LIST,
    dict: Kind(_entries_of, _restore_dict, _same_dicts, "[]"),
    set: Kind(_members_of, _restore_set, operator.eq),
    bytearray: Kind(bytes, lambda x, before: x.__setitem__(slice(None), before), operator.eq),
    _MEMO: Kind(
        lambda x: (x, x.cache_info().misses),
        lambda x, _: x.cache_clear(),
        _same_memo,
        words=(Words("a memo"), Words("a memo with tensors of the trace")),
    ),
    random.Random: Kind(random.Random.getstate, _restore_random, operator.eq, "", _STATES, True),
}


def _numpy_kind(kind: type) -> Kind | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if issubclass(kind, numpy.ndarray):
        return Kind(numpy.copy, numpy.copyto, lambda now, before: bool((now == before).all()))
    if issubclass(kind, numpy.random.RandomState):
        return Kind(
            lambda x: x.get_state(legacy=True),
            lambda x, before: x.set_state(before),
            lambda now, before: repr(now[2:]) == repr(before[2:]) and bool((now[1] == before[1]).all()),
            "",
            _STATES,
            True,
        )
    if issubclass(kind, numpy.random.Generator):
        return Kind(
            lambda x: x.bit_generator.state,
            lambda x, before: setattr(x.bit_generator, "state", before),
            lambda now, before: repr(now) == repr(before),
            "",
            _STATES,
            True,
        )
    return None
