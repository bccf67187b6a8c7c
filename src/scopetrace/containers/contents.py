"""What Python objects hold: one walker that copies, compares and puts back.

Data flow:
    the class of an object -> `form_of`, one table -> a Form: how its content is read and put back, its kind of entries
    an object -> `snapshot` -> lists, dicts and `Attributes` that later writes do not change -> `same` compares by value
    roots -> Contents.add: each object that they lead to, with a shallow copy of its content
    later -> Contents.restore: everything as it was, and a Change for each entry that holds another value

Modules, tensors, functions, classes and objects of torch and the standard library without a Form are compared by
identity, and are not entered.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import contextvars
import functools
import itertools
import operator
import queue
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from scopetrace._compat.questions import MISSING, Missing
from scopetrace._compat.tensors import FakeTensor, is_inference_of, version_of
from scopetrace.containers.stand_ins import STAND_INS, StandIn, plain
from scopetrace.containers.structure import weak_cache

ATOMS = frozenset(
    {bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, range, type(...)}
)
"""The classes of values that have no content and run no code."""

MEMO = type(functools.cache(len))
"""The class of functions under `functools.cache`."""

_LIBRARIES = frozenset(sys.stdlib_module_names) - {"types"} | {"torch", "torchgen", "sympy", "numpy", "scopetrace"}


@functools.cache
def is_library(module: object) -> bool:
    """Whether a module name is of Python's library, torch, NumPy, sympy or scopetrace: no content of theirs counts."""
    return str(module).partition(".")[0] in _LIBRARIES


def is_users_class(kind: Any) -> bool:
    """Whether a class, or function, comes from outside of these libraries."""
    return not is_library(kind.__module__)


# Forms of content -----------------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """How the content of a class of objects is read and put back."""

    read: Callable[[Any], Any]
    """The content: a new list, dict, set or tuple, or any value that is compared as a whole."""
    write: Callable[[Any, Any], None]
    """(object, content)."""
    entries: str = ""
    """How an entry is named: `[]` by key, `.` by attribute; empty for what is named as a whole."""
    is_generator: bool = False
    """Whether it is the state of a random generator."""
    by_identity: bool = False
    """Whether it is compared by identity; what it holds is put back all the same."""


class Attributes(NamedTuple):
    """The snapshot of an object with attributes."""

    kind: type
    values: dict[str, Any]

    def __repr__(self) -> str:
        return f"{self.kind.__name__}({', '.join(f'{k}={v!r}' for k, v in self.values.items())})"


def own_dict(x: Any) -> dict[str, Any]:
    """The `__dict__` of an object, past a `__getattribute__` of its class; of a `threading.local`, this thread's."""
    if issubclass(type(x), threading.local):  # isinstance may call a `__getattribute__` too
        return x.__dict__
    return object.__getattribute__(x, "__dict__")


@weak_cache
def slots_of(kind: type) -> list[str]:
    """The names of its `__slots__`."""
    members = {name: member for base in kind.__mro__ for name, member in vars(base).items() if name[:2] != "__"}
    return [name for name, member in members.items() if isinstance(member, types.MemberDescriptorType)]


def attributes_and_slots(x: Any) -> dict[str, Any]:
    """The attributes that an object itself has."""
    attributes = dict(own_dict(x)) if type(x).__dictoffset__ or issubclass(type(x), threading.local) else {}
    for name in slots_of(type(x)):
        with contextlib.suppress(AttributeError):
            attributes[name] = getattr(x, name)
    return attributes


def _write_attributes(x: Any, before: dict[str, Any]) -> None:
    for name, old, _ in changed_entries(before, attributes_and_slots(x)):
        Place(x, name).put(old)


def changed_entries(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """(key, old, new) of the entries that are other objects; MISSING for what is not there."""
    for key in dict.fromkeys((*before, *after)):
        old, new = before.get(key, MISSING), after.get(key, MISSING)
        if old is not new:
            yield key, old, new


def _base_of(x: Any) -> Any:
    """The built-in class of a container: methods of a subclass may do anything, as a table that makes what is asked."""
    return next(base for base in (collections.OrderedDict, list, collections.deque, dict, set) if isinstance(x, base))


def _write_items(x: Any, before: Iterable[Any]) -> None:
    base = _base_of(x)
    base.clear(x)
    (base.update if base is set else base.extend)(x, before)


def write_dict(x: Any, before: Mapping[Any, Any]) -> None:
    """Give a dict these entries, past the methods of its class."""
    _base_of(x).clear(x)
    for key, item in before.items():
        _base_of(x).__setitem__(x, key, item)


def _write_slice(x: Any, before: Any) -> None:
    x[:] = before


def _write_nothing(x: Any, before: Any) -> None:
    """For what cannot be put back: an iterator, a view of something else."""


def value_of(variable: contextvars.ContextVar[Any]) -> Any:
    """The value in the present context, which may be the default; MISSING where there is none."""
    try:
        return variable.get()
    except LookupError:
        return MISSING


def content_of(cell: types.CellType) -> Any:
    """The variable of an enclosing function; MISSING where it is not bound."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _position(x: Any) -> Any:
    """How far an iterator of Python has gone, without asking for an item; of a generator, where it stands."""
    if isinstance(x, types.GeneratorType):
        frame = x.gi_frame
        return MISSING if frame is None else (frame.f_lasti, snapshot(frame.f_locals))
    if isinstance(x, itertools.count):  # Python 3.12 warns of `__reduce__`
        return repr(x)
    try:
        _, *parts = x.__reduce__()
    except Exception:  # it cannot be pickled, as a file, or an iterator of a DataLoader
        return MISSING
    return [_position(part) if is_iterator(part) else part for part in pytree.tree_leaves(parts)]


def is_iterator(x: Any) -> bool:
    """Whether `x` is an iterator or generator, which gives another item to each call."""
    return hasattr(type(x), "__next__") and type(x) not in weakref.ProxyTypes


def entries_of(x: dict[Any, Any]) -> dict[Any, Any]:
    """The entries of a dict, past the methods of its class."""
    return dict(_base_of(x).items(x))


ATTRIBUTES = Form(attributes_and_slots, _write_attributes, ".")
"""Of objects whose attributes are what code of users gives them."""
_INNER = Form(attributes_and_slots, _write_attributes, ".")
"""Of objects of libraries that hold something in attributes."""
_FORMS: dict[type, Form] = {
    **dict.fromkeys((list, collections.deque), Form(lambda x: list(_base_of(x).__iter__(x)), _write_items)),
    dict: Form(entries_of, write_dict, "[]"),
    types.MappingProxyType: Form(dict, _write_nothing, "[]"),
    set: Form(lambda x: set(set.__iter__(x)), _write_items),
    tuple: Form(lambda x: tuple(tuple.__iter__(x)), _write_nothing),
    bytearray: Form(bytes, _write_slice),
    array.array: Form(
        lambda x: (x.typecode, *x), lambda x, before: _write_slice(x, array.array(before[0], before[1:]))
    ),
    queue.Queue: Form(lambda x: list(x.queue), lambda x, before: _write_items(x.queue, before)),
    functools.partial: Form(lambda x: {k: getattr(x, k) for k in ("func", "args", "keywords")}, _write_nothing, "."),
    types.MethodType: Form(lambda x: {k: getattr(x, k) for k in ("__func__", "__self__")}, _write_nothing, "."),
    weakref.ref: Form(lambda x: x(), _write_nothing),
    contextvars.ContextVar: Form(value_of, lambda x, before: x.set(before) if before is not MISSING else None),
    random.Random: Form(random.Random.getstate, lambda x, before: x.setstate(before), is_generator=True),
    **dict.fromkeys((types.SimpleNamespace, argparse.Namespace, threading.local), ATTRIBUTES),
    **dict.fromkeys((collections.UserDict, collections.UserList, collections.ChainMap), _INNER),
    **dict.fromkeys((weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet), _INNER),
    torch.optim.Optimizer: Form(attributes_and_slots, _write_attributes, ".", by_identity=True),
    torch.optim.lr_scheduler.LRScheduler: _INNER,
}
_WITHOUT = (torch.Tensor, torch.nn.Module, type, types.ModuleType, types.BuiltinFunctionType)
_WITH_MORE = (list, collections.deque, dict, set, tuple, functools.partial)
"""What holds items, and in a subclass attributes too."""


@weak_cache
def form_of(kind: Any) -> Form | None:
    """How the objects of a class hold something; None for those that are compared by identity."""
    if kind in ATOMS or kind in STAND_INS or issubclass(kind, _WITHOUT):
        return None
    for base, form in _FORMS.items():
        if issubclass(kind, base):
            return form
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.ndarray):
        return Form(numpy.copy, numpy.copyto)
    if numpy is not None and issubclass(kind, numpy.random.RandomState):
        return Form(lambda x: x.get_state(legacy=False), lambda x, c: x.set_state(c), is_generator=True)
    if numpy is not None and issubclass(kind, numpy.random.Generator):
        bits = operator.attrgetter("bit_generator.state")
        return Form(bits, lambda x, c: setattr(x.bit_generator, "state", c), is_generator=True)
    if hasattr(kind, "__next__"):
        return Form(_position, _write_nothing) if is_library(kind.__module__) else ATTRIBUTES
    has_attributes = bool(kind.__dictoffset__) or bool(slots_of(kind))
    return ATTRIBUTES if has_attributes and is_users_class(kind) else None


def extra_attributes(x: Any) -> dict[str, Any]:
    """The attributes of a container of a subclass, beside its items."""
    kind = type(x)
    has_both = kind.__dictoffset__ and issubclass(kind, _WITH_MORE)
    if not has_both or issubclass(kind, (collections.OrderedDict, StandIn)):
        return _NONE
    attributes = own_dict(x)
    return _NONE if attributes is x else attributes  # a dict that is its own `__dict__`


_NONE: dict[str, Any] = {}


# By value -------------------------------------------------------------------------------------------------------------


def snapshot(x: Any, names: Set[str] | None = None, skip: Set[tuple[int, Any]] = frozenset()) -> Any:
    """`x`, with copies of what holds values in it; one copy of each object.

    Args:
        x: any object.
        names: of objects with attributes, those that count; None for all.
        skip: entries that do not count: the id of what holds them, and their key.
    """
    if type(x) in ATOMS:
        return x
    try:
        return _Snapshots(names, skip).of(x)
    except RecursionError:  # nested deeper than Python can follow: compared by identity
        return x


def _is_read_by_a_library(kind: type) -> bool:
    """Whether methods of a library may read the attributes of users' objects, as those of `enum.Enum` do."""
    bases = [base for base in kind.__mro__[1:] if base is not object and base.__module__ not in ("typing", "abc")]
    return is_users_class(kind) and any(not is_users_class(base) for base in bases)


class _Snapshots:
    def __init__(self, names: Set[str] | None, skip: Set[tuple[int, Any]]) -> None:
        self._names, self._skip = names, skip
        self._taken: dict[int, tuple[Any, Any]] = {}
        """By id, the objects inside with their snapshots; while that is made, the position stands for it."""

    def of(self, x: Any) -> Any:
        kind = type(x)  # isinstance would ask an object for its `__class__`
        if kind in ATOMS or kind is types.FunctionType or (kind is tuple and ATOMS.issuperset(map(type, x))):
            return x
        form = form_of(kind)
        if form is None or form.by_identity:
            return x if kind not in STAND_INS else self.of(plain(x))
        if id(x) not in self._taken:
            self._taken[id(x)] = x, f"<container {len(self._taken)}>"
            self._taken[id(x)] = x, self._content(x, form)
        return self._taken[id(x)][1]

    def _content(self, x: Any, form: Form) -> Any:
        content = form.read(x)
        if form.entries:
            names = self._names if form is ATTRIBUTES and not _is_read_by_a_library(type(x)) else None
            entries = {
                key: self.of(item)
                for key, item in content.items()
                if (names is None or key in names) and (id(x), key) not in self._skip
            }
            return Attributes(type(x), entries) if form.entries == "." else {**entries, **self._more(x)}
        if type(content) in (list, tuple):
            return type(content)((*map(self.of, content), *self._more(x).items()))
        if type(content).__module__ == "numpy" and hasattr(content, "tobytes"):
            return ArrayContent(str(content.dtype), content.shape, content.tobytes())
        return content if form.is_generator or type(content) is set else self.of(content)

    def _more(self, x: Any) -> dict[str, Any]:
        return {f".{key}": self.of(item) for key, item in extra_attributes(x).items()}


_BY_EQUALITY = frozenset({int, bool, str, bytes, torch.Size, torch.device, types.CodeType})
"""Classes of values that are the same if they are equal."""


def same(a: Any, b: Any, known: set[tuple[int, int]] | None = None) -> bool:
    """Whether two snapshots are equal: one object, containers of such, or equal values of one type and text.

    0.0 is no -0.0, and Decimal("1.0") no Decimal("1.00"). A `TensorLike` is any tensor that it fits. `known` has the
    ids of containers that are equal: those in many places are compared once.
    """
    if a is b:
        return True
    kind: Any = type(a)
    if kind is TensorLike:
        return isinstance(b, torch.Tensor) and a.fits(b)
    if kind is not type(b):
        return False
    is_dict = kind is dict
    if is_dict or issubclass(kind, (list, tuple)):
        pair, known = (id(a), id(b)), set() if known is None else known
        if pair not in known and len(a) == len(b):
            items = zip(*([*x, *x.values()] if is_dict else x for x in (a, b)), strict=True)
            if all(same(x, y, known) for x, y in items):
                known.add(pair)
        return pair in known
    if kind is types.FunctionType:  # as that of a GraphModule that is compiled again
        parts = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__", "__closure__")
        return all(same(x, y, known) for x, y in zip(parts(a), parts(b), strict=True))
    if kind in _BY_EQUALITY:  # outside of `try`, which would take the exception of an alarm for one of theirs
        return bool(a == b)
    try:
        is_equal = not isinstance(a, torch.Tensor) and bool(a == b or a != a)
        return is_equal and (issubclass(kind, (set, frozenset)) or repr(a) == repr(b))
    except Exception:  # objects of others may raise anything, as tables of numbers do
        return False


def is_another_object(old: Any, new: Any) -> bool:
    """Whether one of two is an object with attributes and they are not one: `is` tells equal ones apart."""
    return old is not new and ATTRIBUTES in (form_of(type(old)), form_of(type(new)))


class ArrayContent(NamedTuple):
    """The snapshot of an array of NumPy."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __repr__(self) -> str:
        return f"an array of {self.dtype} {list(self.shape)}"


class TensorLike:
    """Any tensor of the dtype, device and fixed sizes of `like` and, if given, the values of `data` up to rounding.

    Values are compared once for each tensor, and again when it was written.
    """

    def __init__(self, like: torch.Tensor, data: torch.Tensor | None) -> None:
        self._metadata, self._data = (like.dtype, like.device, like.dim()), data
        self._sizes = [(dim, n) for dim, n in enumerate(like.shape) if type(n) is int]
        self._fitting: tuple[torch.Tensor, int] | None = None

    def fits(self, t: torch.Tensor) -> bool:
        """Whether `t` is one."""
        is_alike = (t.dtype, t.device, t.dim()) == self._metadata
        if not (is_alike and all(t.size(dim) == n for dim, n in self._sizes)):
            return False
        if self._data is None or isinstance(t, FakeTensor):
            return True
        version = -1 if is_inference_of(t) else version_of(t)
        known = self._fitting is not None and self._fitting[0] is t and self._fitting[1] == version >= 0
        if not known:
            with torch.no_grad():
                is_close = functools.partial(torch.allclose, equal_nan=True) if t.is_floating_point() else torch.equal
                if not is_close(t, self._data):
                    return False
            self._fitting = t, version
        return True


def difference(traced: Any, current: Any, name: str) -> tuple[str, Any, Any]:
    """Where two snapshots differ first: its name below `name`, and both values there."""
    if type(traced) is type(current):
        if isinstance(traced, Attributes) and traced.kind is current.kind:
            return _first_difference(traced.values, current.values, name, "{}.{}")
        if type(traced) is dict:
            return _first_difference(traced, current, name, "{}[{!r}]")
        if type(traced) in (list, tuple) and len(traced) == len(current):
            return _first_difference(dict(enumerate(traced)), dict(enumerate(current)), name, "{}[{!r}]")
    return name, traced, current


def _first_difference(traced: dict[Any, Any], current: dict[Any, Any], name: str, form: str) -> tuple[str, Any, Any]:
    for key, old, new in changed_entries(traced, current):
        if not same(old, new):
            return difference(old, new, form.format(name, key))
    return f"the order of {name}", list(traced), list(current)


# Put back -------------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where an object is held."""

    owner: Any
    """A dict, a class or other object with attributes, the cell of a variable; a list or set for its whole content."""
    key: Any = MISSING
    """Of an entry or attribute; MISSING for the whole content."""

    @property
    def id(self) -> tuple[int, Any]:
        """Equal for equal places."""
        return id(self.owner), self.key

    @property
    def question(self) -> tuple[Any, ...]:
        """A function with its arguments that gives what it holds; MISSING for nothing."""
        if type(self.owner) is types.CellType:
            return content_of, self.owner
        return dict.get if issubclass(type(self.owner), dict) else getattr, self.owner, self.key, MISSING

    def current(self) -> Any:
        """What it holds; MISSING for nothing."""
        return operator.call(*self.question)

    def put(self, value: Any) -> None:
        """Let it hold a value; MISSING takes away what it holds."""
        owner, key = self
        kind: Any = type(owner)
        if key is MISSING:
            form = form_of(kind)
            assert form is not None, "it has content"
            form.write(owner, value)
        elif issubclass(kind, dict):
            base = _base_of(owner)
            base.pop(owner, key, None) if value is MISSING else base.__setitem__(owner, key, value)
        else:  # not by methods of its class, nor by those of descriptors there
            base = next(base for base in (type, threading.local, object) if issubclass(kind, base))
            table = own_dict(owner) if base is object and kind.__dictoffset__ else {}
            if value is not MISSING and key in table:
                dict.__setitem__(table, key, value)
            elif value is not MISSING:
                base.__setattr__(owner, key, value)
            elif key in attributes_and_slots(owner):
                base.__delattr__(owner, key)


class Change(NamedTuple):
    """A value that is not what it was."""

    name: str
    """In source: `self.n`, `self.stats['n']`; of a list or set, that of the whole."""
    old: Any
    new: Any
    place: Place
    holder: Any = None
    """The module, object or class that has it; None for a variable."""
    attribute: str = ""
    """The attribute of `holder`; empty where an entry in its value is another one."""
    buffer: bool | None = None
    """Of a buffer that is new or another one, whether it is in the state dict."""
    is_generator: bool = False
    """Whether it is the state of a random generator."""
    places: Sequence[Place] = ()
    """Of the content of a list or set, where that is held."""


class _ObjectSnapshot(NamedTuple):
    name: str
    holder: Any
    owner: Any
    before: Any
    form: Form
    places: list[Place]


class Contents:
    """The contents of all objects that `add` was led to."""

    def __init__(self) -> None:
        self._saved: dict[int, _ObjectSnapshot] = {}
        self._memos: list[tuple[Any, int]] = []
        self.functions: list[Any] = []
        """The functions on the way; they are not entered."""
        self.modules: list[tuple[str, torch.nn.Module]] = []
        """The modules on the way, with their names; they are not entered."""
        self.tensors: list[tuple[str, torch.Tensor]] = []
        """The tensors on the way, with their names."""
        self.instances: dict[type, Any] = {}
        """By class, an object with attributes."""

    def add(self, name: str, x: Any, holder: Any = None, place: Place | None = None) -> None:
        """Save what `x`, which a place holds, has in it, and what its items and attributes have."""
        kind = type(x)
        if kind in ATOMS:
            return
        places = [] if place is None else [place]
        if id(x) in self._saved:
            self._saved[id(x)].places.extend(places)
            return
        form = form_of(kind)
        if form is None:
            self._pass(name, x)
            return
        content = form.read(x)
        self._saved[id(x)] = _ObjectSnapshot(name, holder, x, content, form, places)
        if form.entries == ".":
            self.instances[kind] = x
        for entry, item, part in _items(name, content, form):
            if type(item) not in ATOMS:
                inner = Place(x, entry) if form.entries else None
                self.add(part, item, x if form.entries == "." and entry else holder, inner)
        more = extra_attributes(x)
        if more is not _NONE:
            self._saved[id(more)] = _ObjectSnapshot(name, holder, x, dict(more), _EXTRA, [])
            for key, item in more.items():
                self.add(f"{name}.{key}", item, x)

    def _pass(self, name: str, x: Any) -> None:
        if isinstance(x, torch.nn.Module):
            self.modules.append((name, x))
        elif isinstance(x, torch.Tensor):
            self.tensors.append((name, x))
        elif isinstance(x, MEMO):
            self._memos.append((x, x.cache_info().misses))
        elif isinstance(x, (types.FunctionType, type, operator.attrgetter)):
            self.functions.append(x)
        elif isinstance(wrapped := getattr(type(x), "__wrapped__", None), property):  # a trace, of a model
            self.add(name, wrapped.__get__(x))

    def of_class(self, kind: type) -> list[Any]:
        """The objects of a class."""
        return [saved.owner for saved in self._saved.values() if isinstance(saved.owner, kind)]

    def name_of(self, x: Any) -> str:
        """What an object with content is called; nothing for one that is not saved."""
        return self._saved[id(x)].name if id(x) in self._saved else ""

    def places_of(self, x: Any) -> list[Place]:
        """Where others hold an object, as far as these have keys."""
        return self._saved[id(x)].places if id(x) in self._saved else []

    def accept(self, table: Any, key: Any) -> None:
        """Keep an entry that was put into a saved dict, as if it had been there."""
        if id(table) in self._saved:
            self._saved[id(table)].before[key] = table[key]
            self.add(f"{self._saved[id(table)].name}[{short(key)}]", table[key])

    def clear(self) -> None:
        """Break reference cycles: forget everything."""
        for kept in (self._saved, self.functions, self.modules, self.tensors, self.instances):
            kept.clear()

    def restore(self) -> list[Change]:
        """Put everything back, and say what had changed, by value. Memos that have a new result forget all."""
        for memo, misses in self._memos:
            if memo.cache_info().misses != misses:
                memo.cache_clear()
        contents = [(saved, saved.form.read(saved.owner)) for saved in self._saved.values()]
        changed = [(saved, after) for saved, after in contents if not same_objects(saved.before, after)]
        entries = [entry for saved, after in changed for entry in _entries(saved, after)]
        new = [snapshot(change.new) for change in entries]
        for saved, _ in changed:
            saved.form.write(saved.owner, saved.before)
        return [c for c, x in zip(entries, new, strict=True) if not same(snapshot(c.old), x)]


_EXTRA = Form(lambda x: dict(extra_attributes(x)), lambda x, before: write_dict(own_dict(x), before), ".")


def _items(name: str, content: Any, form: Form) -> Iterator[tuple[Any, Any, str]]:
    """(key, item, name) of what a content holds; without key, an item of a list or set."""
    if form.entries:
        yield from ((key, item, _name_of_entry(name, form, key)) for key, item in content.items())
    elif type(content) in (list, tuple, set) and not form.is_generator:
        yield from ((None, item, f"{name}[{i}]") for i, item in enumerate(content))


def _name_of_entry(name: str, form: Form, key: Any) -> str:
    return f"{name}.{key}" if form.entries == "." else f"{name}[{short(key)}]"


def same_entries(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> bool:
    """Whether two tables have the same keys in the same order, with the same objects."""
    return len(after) == len(before) and (
        not before
        or (all(map(operator.is_, after, before)) and all(map(operator.is_, after.values(), before.values())))
    )


def same_objects(before: Any, after: Any) -> bool:
    """Whether two contents have the same objects; numbers and text by value."""
    if type(before) is dict and type(after) is dict:
        return same_entries(before, after)
    if type(before) is type(after) and type(before) in (list, tuple):
        return len(before) == len(after) and all(map(operator.is_, before, after))
    return same(snapshot(before), snapshot(after))


def _entries(saved: _ObjectSnapshot, after: Any) -> Iterator[Change]:
    """The entries of a content that are other objects, or the content as a whole."""
    name, holder, owner, before, form, places = saved
    if not form.entries:
        yield Change(name, before, after, Place(owner), holder, is_generator=form.is_generator, places=places)
    elif form.entries == ".":
        yield from changed_attributes(name, owner, before, after, own_dict(owner) if form is _EXTRA else owner)
    else:
        for key, old, new in changed_entries(before, after):
            yield Change(_name_of_entry(name, form, key), old, new, Place(owner, key), holder)


def changed_attributes(
    name: str, holder: Any, before: Mapping[str, Any], after: Mapping[str, Any], owner: Any
) -> Iterator[Change]:
    """The attributes of an object of this name that are others; they are put back in `owner`, it or its `__dict__`."""
    for key, old, new in changed_entries(before, after):
        yield Change(f"{name}.{key}", old, new, Place(owner, key), holder, key)


_SHOWN, _WIDTH = 8, 60


def short(x: Any) -> str:
    """A value as short text."""
    if isinstance(x, torch.Tensor):
        return f"a tensor {list(x.shape)}"
    kind = type(x)
    if kind in ATOMS or kind is Missing:
        text = repr(x)
    elif kind in (list, tuple, set, dict) and len(x) <= _SHOWN:
        inside = [f"{short(k)}: {short(v)}" for k, v in x.items()] if kind is dict else list(map(short, x))
        left, right = ("[", "]") if kind is list else ("(", ")") if kind is tuple else ("{", "}")
        text = left + ", ".join(inside) + right
    else:
        text = f"a {kind.__name__}" + (f" of {len(x)}" if isinstance(x, (list, tuple, set, dict)) else "")
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."
