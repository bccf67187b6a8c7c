"""Arguments and results as trees of containers with tensors and constants for leaves.

Data flow:
    a value of the user -> map_structure -> a template: copies of its containers with other leaves (tape values, nodes)
    a template          -> map_structure -> a template with other leaves
    a template          -> instantiate   -> a value of the user, with tensors for leaves
    arguments before and after the forward -> Watch.effects -> Effects: containers that now hold other things
    Effects, in a call of the trace -> apply_effects -> the same change in the caller's containers
    arguments and results -> tensor_holders -> the classes, unknown to pytree, whose instances a recording opens

Containers are those of `torch.utils._pytree` (lists, tuples, dicts, named tuples, registered types such as
transformers' ModelOutput), dataclass instances, and instances of the classes that the caller names as `object_types`:
those whose attributes were found to hold tensors. Everything else is a leaf and is kept as it is. A template describes
itself: it can be opened, mapped, compared and instantiated without knowing `object_types`.

An argument may hold tensors only after the forward has run, as an empty cache does. Then its class is opened, what the
forward did to the arguments is undone, and the forward is recorded again.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import keyword
import math
import re
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.fx
from torch.utils import _pytree as pytree

from scopetrace.containers.stand_ins import StandIn
from scopetrace.errors import ExportError, InputMismatchError

_NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
STATEFUL = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
"""What a program belongs to, also where it is an argument: a call takes these objects and no others."""
_WITH_ORDER_OR_DEFAULT = (collections.OrderedDict, collections.defaultdict, torch.Size)
_NOT_PLAIN = (*STATEFUL, torch.fx.Node, type, types.ModuleType, types.FunctionType, enum.Enum, functools.partial)
_PLAIN = (type(None), bool, int, float, str, bytes, complex, torch.dtype, torch.device)
_RESERVED = {"self", "torch", "device", "inf", "nan", "fx_pytree", "pytree"}  # in the code that torch.fx generates

K = TypeVar("K")
V = TypeVar("V")


def weak_cache(make: Callable[[K], V]) -> Callable[[K], V]:
    """`make`, called once for each object. A WeakKeyDictionary makes a reference each time, and asks `__eq__`."""
    known: dict[int, tuple[V, weakref.ref[K]]] = {}

    def get(x: K) -> V:
        key = id(x)
        entry = known.get(key)
        if entry is None:
            entry = known[key] = make(x), weakref.ref(x, lambda _: known.pop(key, None))
        return entry[0]

    get.__doc__ = make.__doc__
    return get


Leaf = type | tuple[type, ...]
Children = list[tuple[str, Any]]
"""The children of a container, each with the path to it in Python's own notation: `[0]`, `['k']`, `.keys`."""


class OpaqueContainer:
    """In a template, a container whose class cannot hold the template's leaves, or is unknown to pytree.

    transformers' caches are one example: their constructor computes with the tensors that it gets, and a template has
    none. `instantiate` makes an instance of the class again. The attributes of the original can be read here too.
    """

    __slots__ = ("context", "items", "keys", "kind")

    def __init__(self, kind: type, context: Any, keys: list[str], items: list[Any]) -> None:
        self.kind = kind
        self.context = context  # of a type that pytree knows: what its flattening gives beside the children
        self.keys = keys
        self.items = items

    def __getattr__(self, name: str) -> Any:
        try:
            return self.items[self.keys.index(f".{name}")]
        except ValueError:
            raise AttributeError(f"{self.kind.__name__} has no {name!r} in the trace") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return OpaqueContainer, (self.kind, self.context, self.keys, self.items)

    def __repr__(self) -> str:
        fields = (f"{key.removeprefix('.')}={item!r}" for key, item in zip(self.keys, self.items, strict=True))
        return f"{self.kind.__name__}({', '.join(fields)})"


@dataclasses.dataclass(eq=False, repr=False)
class Removed:
    """Stands in the template of a call for a value that an edit of the graph removed."""

    name: str
    """The name that its node had."""

    def __repr__(self) -> str:
        return f"<removed: {self.name}>"


def container_type(x: Any) -> type:
    """The class of a value, or the class that a template's container stands for."""
    return x.kind if isinstance(x, OpaqueContainer) else type(x)


def is_object(x: Any) -> bool:
    """Whether a container of a template is an instance of a class, rather than a list, tuple, dict or the like."""
    kind = container_type(x)
    if issubclass(kind, (list, tuple, dict)) and (is_registered(kind) or not isinstance(x, OpaqueContainer)):
        return False
    return isinstance(x, OpaqueContainer) or is_registered(kind) or dataclasses.is_dataclass(kind)


def object_classes(x: Any, object_types: Collection[type] = ()) -> set[type]:
    """The classes of the containers in a value of the user that are objects."""
    containers = (part for _, part, children in walk(x, object_types) if children is not None)
    return {type(part) for part in containers} - {list, tuple, dict}


def map_structure(
    fn: Callable[[Any], Any],
    x: Any,
    leaf: Leaf,
    object_types: Collection[type] = (),
    other: Callable[[Any], Any] | None = None,
    close: Callable[[Any, list[Any]], Any] | None = None,
) -> Any:
    """A template of `x` in which each instance of `leaf` is replaced by `fn` of it, and any other object by `other`.

    `object_types` are needed where `x` is a value of the user; a template has all that it takes. `close` makes other
    containers than lists, tuples and dicts, as `close_container` does.
    """
    if isinstance(x, leaf):
        return fn(x)
    kind = type(x)
    if kind in _PLAIN:
        return x
    if kind is tuple or kind is list:
        return kind([map_structure(fn, item, leaf, object_types, other, close) for item in x])
    if kind is dict:
        return {key: map_structure(fn, item, leaf, object_types, other, close) for key, item in x.items()}
    children = open_container(x, object_types)
    if children is None:
        return x if other is None else other(x)
    items = [map_structure(fn, item, leaf, object_types, other, close) for _, item in children]
    return (close or close_container)(x, items)


def instantiate(fn: Callable[[Any], Any], template: Any, leaf: Leaf) -> Any:
    """The value of the user that a template describes: `fn` gives what stands for each instance of `leaf`.

    Where a registered class does not take what `fn` gives (a cache that computes with its leaves, given nodes), its
    place keeps the OpaqueContainer.
    """
    return map_structure(fn, template, leaf, close=close_instance)


def leaves(x: Any, leaf: Leaf) -> list[Any]:
    """The instances of `leaf` in a template, in the order of `torch.utils._pytree`."""
    collected: list[Any] = []
    _add_leaves([x], leaf, collected)
    return collected


def _add_leaves(items: Iterable[Any], leaf: Leaf, collected: list[Any]) -> None:
    for x in items:
        kind = type(x)
        if isinstance(x, leaf):
            collected.append(x)
        elif kind is tuple or kind is list:
            _add_leaves(x, leaf, collected)
        elif kind is dict:
            _add_leaves(x.values(), leaf, collected)
        elif kind not in _PLAIN:
            _add_leaves([item for _, item in open_container(x) or ()], leaf, collected)


def walk(
    x: Any, object_types: Collection[type] = (), path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, Children | None]]:
    """Each container and leaf, outer before inner: the keys that lead to it, itself, and its children."""
    children = open_container(x, object_types)
    yield path, x, children
    for key, child in children or ():
        yield from walk(child, object_types, (*path, key))


def leaves_with_path(x: Any, path: str = "", object_types: Collection[type] = ()) -> Iterator[tuple[str, Any]]:
    """Each leaf with its path in Python's own notation, such as `"[0]['mask']"` or `".logits"`."""
    return ((path + "".join(keys), leaf) for keys, leaf, children in walk(x, object_types) if children is None)


def identifier(path: str, taken: set[str]) -> str:
    """A placeholder's name, as torch.export makes it: `ys[0]['k']` gives `ys_0_k`. It is added to `taken`."""
    name = base = re.sub(r"\W+", "_", path).strip("_") or "arg"
    count = 0
    if keyword.iskeyword(name) or name in _RESERVED or name[0].isdigit():
        name = base = f"{name}_" if not name[0].isdigit() else f"_{name}"
    while name in taken:
        count += 1
        name = f"{base}_{count}"
    taken.add(name)
    return name


def flattened(x: Any, object_types: Collection[type] = ()) -> tuple[type, Any, Children] | None:
    """Class, context and children of a container, of the user or of a template; None for a leaf.

    `unflattened` is the inverse. The context is what the class needs beside the children.
    """
    kind = type(x)
    if kind in _PLAIN or isinstance(x, torch.Tensor) or (kind is torch.Size and all(type(n) is int for n in x)):
        return None
    if kind is tuple or kind is list:
        return kind, None, [(f"[{i}]", item) for i, item in enumerate(x)]
    if kind is dict:
        return kind, [*x], [(f"[{key!r}]", item) for key, item in x.items()]
    if kind is OpaqueContainer:
        return x.kind, x.context, list(zip(x.keys, x.items, strict=True))
    node = _pytree_node(kind)
    if node is not None:
        items, context = node.flatten_fn(x)  # that of torch's other function is another one for dataclasses
        keyed = node.flatten_with_keys_fn(x)[0] if node.flatten_with_keys_fn else enumerate(items)
        keys = [str(key) if node.flatten_with_keys_fn else f"[{key}]" for key, _ in keyed]
        return kind, None if pytree.is_namedtuple_class(kind) else context, list(zip(keys, items, strict=True))
    if _is_dataclass(kind):
        fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if hasattr(x, f.name)}
        return kind, {}, [(f".{name}", item) for name, item in {**fields, **getattr(x, "__dict__", {})}.items()]
    return (kind, *opened_object(x)) if kind in object_types else None


def opened_object(x: Any) -> tuple[Any, Children]:
    """Context and children of a plain object: items, if its class derives from list, tuple or dict, and attributes."""
    is_own_dict = vars(x) is x  # as in `self.__dict__ = self`
    attributes = [] if is_own_dict else [(f".{name}", item) for name, item in vars(x).items()]
    if isinstance(x, dict):
        return ([*dict.keys(x)], is_own_dict), [*((f"[{key!r}]", item) for key, item in dict.items(x)), *attributes]
    items = enumerate(x) if isinstance(x, (list, tuple)) else ()
    return None, [*((f"[{i}]", item) for i, item in items), *attributes]


def open_container(x: Any, object_types: Collection[type] = ()) -> Children | None:
    """The children of a container, or None for a leaf."""
    whole = flattened(x, object_types)
    return None if whole is None else whole[2]


def is_registered(kind: type) -> bool:
    """Whether pytree knows the class."""
    return _pytree_node(kind) is not None


def is_plain_object(x: Any) -> bool:
    """Whether `x` is no container of pytree, and its attributes, and items, suffice to make it again."""
    kind: Any = type(x)
    if not hasattr(x, "__dict__") or isinstance(x, (torch.Tensor, OpaqueContainer, StandIn, *_NUMBERS, *_NOT_PLAIN)):
        return False
    if is_registered(kind) or _is_dataclass(kind) or issubclass(kind, _WITH_ORDER_OR_DEFAULT):
        return False
    try:
        _empty(kind)
    except TypeError:  # it inherits from a built-in type, whose instances hold more than attributes
        return False
    return True


def _is_dataclass(kind: type) -> bool:
    """Whether its fields are all that an instance holds."""
    return dataclasses.is_dataclass(kind) and not issubclass(kind, (dict, list, set))


def _empty(kind: type) -> Any:
    """An instance without attributes and items."""
    bases = (types.SimpleNamespace, list, tuple, dict, object)
    return next(base for base in bases if issubclass(kind, base)).__new__(kind)


def close_container(like: Any, items: list[Any]) -> Any:
    """A template's container as `like`, holding `items` in place of its children."""
    whole = flattened(like, (type(like),))
    assert whole is not None, "it has children"
    return _unflattened(whole[0], whole[1], [key for key, _ in whole[2]], items)


def close_instance(template: Any, items: list[Any]) -> Any:
    """As `close_container`; of an unregistered class an instance, not an OpaqueContainer."""
    if not isinstance(template, OpaqueContainer) or is_registered(template.kind):
        return close_container(template, items)
    kind, parts = template.kind, [*zip(template.keys, items, strict=True)]
    inside = [item for key, item in parts if key[0] == "["]
    new: Any = tuple.__new__(kind, inside) if issubclass(kind, tuple) else _empty(kind)
    if issubclass(kind, list):
        list.extend(new, inside)
    elif issubclass(kind, dict):
        keys, is_own_dict = template.context
        dict.update(new, zip(keys, inside, strict=True))
        if is_own_dict:
            object.__setattr__(new, "__dict__", new)
    new.__dict__.update({key[1:]: item for key, item in parts if key[0] == "."})
    return new


def unflattened(kind: type, context: Any, children: Children) -> Any:
    """A template's container from what `flattened` gave."""
    keys, items = [key for key, _ in children], [item for _, item in children]
    try:
        return _unflattened(kind, context, keys, items)
    except Exception:  # a foreign class may raise anything for what an older version of it gave
        return OpaqueContainer(kind, context, keys, items)


def _unflattened(kind: type, context: Any, keys: list[str], items: list[Any]) -> Any:
    """The inverse of `flattened`; an OpaqueContainer where a class does not take these items and give them back."""
    if kind is tuple or kind is list:
        return kind(items)
    if kind is dict:
        return dict(zip(context, items, strict=True))
    if kind is torch.Size:  # which holds numbers only
        return torch.Size(items) if all(isinstance(item, (int, torch.SymInt)) for item in items) else tuple(items)
    if pytree.is_namedtuple_class(kind):
        return tuple.__new__(kind, items)  # the class's own __new__ may look at the items, as PackedSequence's does
    node = _pytree_node(kind)
    if node is None and _is_dataclass(kind):
        new: Any = object.__new__(kind)
        for key, item in zip(keys, items, strict=True):
            object.__setattr__(new, key[1:], item)
        return new
    if node is None:
        return OpaqueContainer(kind, context, keys, items)
    if all(isinstance(leaf, (torch.Tensor, *_NUMBERS)) for _, leaf in leaves_with_path(items)):
        return node.unflatten_fn(items, context)
    try:
        new = node.unflatten_fn(items, context)
        children = open_container(new) or []
    except Exception:  # a foreign class may raise anything for leaves that are no tensors
        return OpaqueContainer(kind, context, keys, items)
    same = [key for key, _ in children] == keys and all(a is b for (_, a), b in zip(children, items, strict=True))
    return new if same else OpaqueContainer(kind, context, keys, items)


def _pytree_node(kind: type) -> Any:
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is None and pytree.is_namedtuple_class(kind):
        node = pytree.SUPPORTED_NODES.get(collections.namedtuple)  # type: ignore[call-overload]  # pytree's own key
    return node


def match(
    template: Any, actual: Any, leaf: type, matches: list[tuple[str, Any]], path: str, number: type = torch.SymInt
) -> None:
    """Collect in `matches` what stands in `actual` where `template` has leaves, with its path.

    Leaves are of type `leaf`, which stands for a tensor, or `number`, which stands for a whole number.

    Raises InputMismatchError, naming the path, where containers or other values differ.
    """
    if isinstance(template, (leaf, number)):
        kind, word = (torch.Tensor, "tensor") if isinstance(template, leaf) else (int, "whole number")
        if not isinstance(actual, kind) or isinstance(actual, bool):
            raise InputMismatchError(f"{path} was a {word} when traced and is {_short(actual)} now: pass a {word}")
        matches.append((path, actual))
        return
    children = open_container(template)
    if children is None:
        match_constant(template, actual, path)
        return
    for (key, old), new in zip(children, children_like(template, actual, path), strict=True):
        match(old, new, leaf, matches, path + key, number)


def children_like(template: Any, actual: Any, path: str) -> list[Any]:
    """The children of a container that is as that of a template. Raises InputMismatchError where it is not."""
    whole = flattened(template)
    assert whole is not None, "it is a container"
    container, context, inner = whole
    current = flattened(actual, (container,)) if type(actual) is container else None
    if current is None:
        raise InputMismatchError(f"{path} was a {container.__name__} when traced and is {_short(actual)} now")
    children = current[2]
    if [key for key, _ in inner] != [key for key, _ in children]:
        is_order = sorted(key for key, _ in inner) == sorted(key for key, _ in children)
        hint = "in the order of the trace, which forward may have read" if is_order else "the same structure"
        raise InputMismatchError(
            f"{path} had {_keys(inner)} when traced and has {_keys(children)} now: pass {hint}, or trace again"
        )
    if container not in (tuple, list, dict) and is_registered(container):
        match_constant(context, current[1], f"the fixed part of {path}")
    return [child for _, child in children]


def match_constant(old: Any, new: Any, path: str) -> None:
    """Raise InputMismatchError where a value that is no container differs from that of a template."""
    if old is new:
        return
    if type(old) is type(new):
        try:
            same = old == new
            if type(old) is float and old == 0:
                same = math.copysign(1, old) == math.copysign(1, new) and new == 0
            if bool(same if isinstance(same, bool) or not hasattr(same, "all") else same.all()):
                return
            if bool(old != old) and bool(new != new):  # both are NaN
                return
        except (TypeError, ValueError, RuntimeError):  # arrays and the like have no single truth value
            pass
    traced, current = _short(old), _short(new)
    text: Any = type(old).__repr__
    if traced == current and text is not object.__repr__:  # which shows addresses
        with contextlib.suppress(Exception):
            traced, current = (_cut(" ".join(repr(x).split())) for x in (old, new))
    by_identity = "or pass the same object" if callable(old) else "pass the same object, or make its class a dataclass"
    equality: Any = type(old).__eq__
    is_by_identity = type(old) is type(new) and equality is object.__eq__
    raise InputMismatchError(
        f"{path} was {traced} when traced and is {'another one' if traced == current else current} now: "
        "Python values are fixed in a trace; trace again with this one, "
        + (by_identity if is_by_identity else "or pass it as a tensor")
        + (", or as Dim.DYNAMIC in dynamic_shapes=" if type(old) is int else "")
    )


def _short(x: Any) -> str:
    name = getattr(x, "__name__", "") if callable(x) else ""  # others may have a `__getattr__` that raises anything
    return _cut(repr(x) if type(x) in _PLAIN else str(name) or f"a {type(x).__name__}")


def _cut(text: str) -> str:
    return text if len(text) < 60 else text[:57] + "..."


def _keys(children: Children) -> str:
    names = ", ".join(key for key, _ in children[:8])
    return f"{len(children)} items ({names}{', …' if len(children) > 8 else ''})"


# Objects that hold tensors -------------------------------------------------------------------------------------------


def tensor_holders(x: Any) -> frozenset[type]:
    """The classes of the plain objects in `x`, at any depth, that hold tensors.

    Objects that lead back to themselves are left out: they cannot be copied part by part.
    """
    holders, cyclic = set[type](), set[type]()
    known: dict[int, bool] = {}
    path: list[Any] = []

    def holds(x: Any) -> bool:
        if isinstance(x, torch.Tensor):
            return True
        parts = parts_of(x)
        if not parts:
            return False
        if id(x) in known:
            if any(x is outer for outer in path):
                cyclic.update(type(outer) for outer in path if is_plain_object(outer))
            return known[id(x)]
        known[id(x)] = False
        path.append(x)
        known[id(x)] = any([holds(part) for part in parts])
        path.pop()
        if known[id(x)] and is_plain_object(x):
            holders.add(type(x))
        return known[id(x)]

    holds(x)
    return frozenset(holders - cyclic)


def parts_of(x: Any) -> list[Any]:
    """What a container, set or plain object holds."""
    if type(x) is set:
        return list(x)
    opened = open_container(x)
    if opened is not None:
        return [child for _, child in opened]
    return [child for _, child in opened_object(x)[1]] if is_plain_object(x) else []


# What the forward puts into its arguments --------------------------------------------------------------------------


GivenPart = tuple[tuple[str, ...], tuple[str, ...]]
"""A part of what a forward gives that is an object among its arguments: its place, and that in (args, kwargs)."""


@dataclasses.dataclass(frozen=True)
class Given:
    """In a template, an object among the arguments, which a call gives back as it is."""

    path: tuple[str, ...]
    """The keys, as text, that lead to it from (args, kwargs)."""
    leaves: int
    """How many leaves it has in the template."""


@dataclasses.dataclass
class Effect:
    """A container among the arguments into which the forward put other things."""

    path: tuple[str, ...]
    """The keys, as text, that lead to it from (args, kwargs)."""
    content: Any
    """A template of the container as it is afterwards."""
    given: list[GivenPart] = dataclasses.field(default_factory=list)
    """The parts of `content` that are parts of the arguments."""


@dataclasses.dataclass
class Returned:
    """What a program gives where its forward has effects."""

    result: Any
    effects: list[Effect]


def without_argument_mutation(outputs: Any, leaf: type) -> Any:
    """The result of a program, for forms that have nothing beside it; `leaf` is the type of its tensors.

    Raises ExportError where the forward puts a tensor into a container that it does not return too.
    """
    if not isinstance(outputs, Returned):
        return outputs
    returned = set(map(id, leaves(outputs.result, leaf)))
    for effect in outputs.effects:
        if not returned.issuperset(map(id, leaves(effect.content, leaf))):
            raise ExportError(
                f"the forward puts new tensors into a container among its arguments, {''.join(effect.path[1:])}",
                hint="return them, or the container",
            )
    return outputs.result


class Watch:
    """The containers among the arguments of a forward, and what they hold before it."""

    def __init__(self, arguments: Any, object_types: Collection[type], inputs: Collection[torch.Tensor]) -> None:
        """`inputs` are the tensors among the arguments; a registered class may have computed others from them."""
        self.object_types = object_types
        """The classes of the objects that are opened."""
        ids = set(map(id, inputs))
        walked = [(path, x, children) for path, x, children in walk(arguments, object_types) if children is not None]
        changeable = {id(c[1]): c for c in reversed(walked) if not isinstance(c[1], tuple)}
        self._before = [*reversed(changeable.values())]
        parts = [((*path, key), child) for path, _, children in walked for key, child in children]
        # objects that a caller may know again, rather than numbers, texts or tensors
        others = (torch.Tensor, *_NUMBERS, *_NOT_PLAIN, *_PLAIN)
        whole = [(path, x) for path, x in parts if not isinstance(x, others) and ids.issuperset(self._tensors(x))]
        self._known = {id(x): path for path, x in reversed(whole)}

    def effects(self, leaf_of: Callable[[torch.Tensor], Any]) -> list[Effect]:
        """The containers that have changed; in the templates of what they hold, `leaf_of` a tensor stands for it."""
        effects = []
        for path, x, before in self._before:
            after = open_container(x, self.object_types) or []
            pairs = zip(after, before, strict=False)
            if len(after) != len(before) or not all(key == old and _same(a, b) for (key, a), (old, b) in pairs):
                parts = [part for key, child in after for part in self.argument_parts(child, (key,))]
                effects.append(Effect(path, map_structure(leaf_of, x, torch.Tensor, self.object_types), parts))
        return effects

    def _tensors(self, x: Any) -> Iterator[int]:
        return (id(t) for _, t in leaves_with_path(x, "", self.object_types) if isinstance(t, torch.Tensor))

    def argument_parts(self, x: Any, path: tuple[str, ...] = ()) -> list[GivenPart]:
        """The parts of what the forward gives that are objects among its arguments."""
        known = self._known.get(id(x))
        if known is not None:
            return [(path, known)]
        children = open_container(x, self.object_types) or []
        return [part for key, child in children for part in self.argument_parts(child, (*path, key))]


def with_given(template: Any, given_parts: list[GivenPart], leaf: Leaf) -> Any:
    """A template in which each part that is an object among the arguments is a Given."""
    parts = [(path, argument, leaves(_at(template, path), leaf)) for path, argument in given_parts]
    return with_parts(template, {path: Given(argument, len(inside)) for path, argument, inside in parts})


def with_parts(
    x: Any, parts: Mapping[tuple[str, ...], Any], close: Callable[[Any, list[Any]], Any] = close_container
) -> Any:
    """A container with other parts at these places; `close` makes those around them."""

    def put(x: Any, path: tuple[str, ...]) -> Any:
        if path in parts:
            return parts[path]
        if not any(part[: len(path)] == path for part in parts):
            return x
        items = [put(child, (*path, key)) for key, child in open_container(x, (type(x),)) or []]
        return close(x, items)

    return put(x, ()) if parts else x


def _at(x: Any, path: Sequence[str]) -> Any:
    """The part of a container at a place."""
    for key in path:
        x = dict(open_container(x, (type(x),)) or [])[key]
    return x


def shared_parts(
    x: Any, object_types: Collection[type] = (), outside: Iterable[tuple[str, Any]] = ()
) -> list[GivenPart]:
    """The containers in several places, tuples apart: each of these places, and the first one that holds the same.

    `outside` are objects with names, which stand in the place of that: `("", name)`.
    """
    first: dict[int, tuple[Any, tuple[str, ...]]] = {id(held): (held, ("", name)) for name, held in outside}

    def repeated(x: Any, path: tuple[str, ...]) -> Iterator[GivenPart]:
        children, known = open_container(x, object_types), first.get(id(x))
        if children is not None and known is not None:
            yield path, known[1]
        elif children is not None:
            if not isinstance(x, tuple):
                first[id(x)] = x, path
            for key, child in children:
                yield from repeated(child, (*path, key))

    return list(repeated(x, ()))


def with_shared(new: Any, old: Any, object_types: Collection[type] = ()) -> Any:
    """`new`, a copy of `old` with other leaves, in which containers are one object where they are in that."""

    def close(x: Any, items: list[Any]) -> Any:
        return close_instance(close_container(x, items), items)  # of other objects the first gives a template

    for path, first in shared_parts(old, object_types):
        new = with_parts(new, {path: _at(new, first)}, close)
    return new


def _same(x: Any, before: Any) -> bool:
    return x is before or (type(x) is type(before) and isinstance(x, (bool, int, float, str)) and x == before)


def effect_targets(effects: Sequence[Any], arguments: Any) -> list[Any]:
    """The caller's objects at the `path` of each effect in (args, kwargs), which have been compared with the trace."""
    return [_at(arguments, effect.path) for effect in effects]


def apply_effects(effects: list[Effect], containers: list[Any]) -> None:
    """Put what the forward put into its containers into the caller's; `effects` hold tensors here."""
    for effect, x in zip(effects, containers, strict=True):
        if isinstance(x, (list, collections.deque, dict)):
            content: Any = (dict if isinstance(x, dict) else list)(effect.content)
            x.clear()
            (x.update if isinstance(x, dict) else x.extend)(content)
        elif is_registered(type(x)):
            vars(x).update(vars(effect.content))
        elif dataclasses.is_dataclass(x):
            for key, item in open_container(effect.content) or []:
                object.__setattr__(x, key[1:], item)
        else:
            vars(x).clear()
            vars(x).update(vars(effect.content))
        if isinstance(x, (list, dict)) and hasattr(x, "__dict__") and vars(x) is not x:
            vars(x).update(vars(effect.content))
