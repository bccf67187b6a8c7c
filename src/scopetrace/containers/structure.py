"""Nested arguments and results: copies of their containers with other leaves.

A *template* is a value whose tensors were replaced by tape values and whose containers are copies, so that what the
model does to a list after a call does not change what the call received. Containers are those of
`torch.utils._pytree` (lists, tuples, dicts, named tuples, registered types such as transformers' ModelOutput) and,
beyond pytree, plain dataclass instances and objects of classes that were found to hold tensors (`record.objects`).
Everything else is kept as it is.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

from scopetrace.errors import InputMismatchError, OpaqueOutputError

_NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
_NOT_PLAIN = (torch.nn.Module, torch.fx.Node, type, types.ModuleType, types.FunctionType, enum.Enum, functools.partial)
_PLAIN = (type(None), bool, int, float, str, bytes, complex, torch.dtype, torch.device)


OBJECT_TYPES: set[type] = set()
"""The classes, unknown to pytree, whose instances are opened: attribute by attribute. `record.objects` finds them."""


@dataclasses.dataclass(slots=True)
class Opened:
    """A container of a registered type whose class does not take the leaves that it has.

    transformers' caches compute with the tensors that they are made of; a template has none. With tensors for its
    leaves it is an instance of its class again.
    """

    kind: type
    context: Any
    """What pytree's flattening gives beside the children."""
    keys: list[str]
    items: list[Any]


def container_type(x: Any) -> type:
    """The class of a value, which may be opened."""
    return x.kind if isinstance(x, Opened) else type(x)


def is_object(x: Any) -> bool:
    """Whether a container is an instance of a class of its own kind: no list, tuple, dict or the like."""
    kind = container_type(x)
    if issubclass(kind, (list, tuple, dict)):
        return False
    return _pytree_node(kind) is not None or dataclasses.is_dataclass(kind) or kind in OBJECT_TYPES


def map_structure(fn: Callable[[Any], Any], x: Any, leaf: type | tuple[type, ...]) -> Any:
    """A copy of `x` in which each instance of `leaf` is replaced by `fn` of it."""
    if isinstance(x, leaf):
        return fn(x)
    kind = type(x)
    if kind in _PLAIN:
        return x
    if kind is tuple or kind is list:
        return kind([map_structure(fn, item, leaf) for item in x])
    if kind is dict:
        return {key: map_structure(fn, item, leaf) for key, item in x.items()}
    children = open_container(x)
    if children is None:
        return x
    return close_container(x, [map_structure(fn, item, leaf) for _, item in children])


def leaves(x: Any, leaf: type | tuple[type, ...]) -> list[Any]:
    """The instances of `leaf` in `x`, in the order of `torch.utils._pytree`."""
    return [item for _, item in leaves_with_path(x) if isinstance(item, leaf)]


def leaves_with_path(x: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each leaf with its path in Python's own notation, such as `"[0]['mask']"` or `".logits"`."""
    children = open_container(x)
    if children is None:
        yield path, x
        return
    for key, item in children:
        yield from leaves_with_path(item, path + key)


def open_container(x: Any) -> list[tuple[str, Any]] | None:
    """The children of a container with their keys as text, or None for a leaf."""
    kind = type(x)
    if kind in _PLAIN or isinstance(x, torch.Tensor) or (kind is torch.Size and all(type(n) is int for n in x)):
        return None
    if kind is tuple or kind is list:
        return [(f"[{i}]", item) for i, item in enumerate(x)]
    if kind is dict:
        return [(f"[{key!r}]", item) for key, item in x.items()]
    if kind is Opened:
        return list(zip(x.keys, x.items, strict=True))
    node = _pytree_node(kind)
    if node is not None:
        if node.flatten_with_keys_fn is not None:
            keyed, _ = node.flatten_with_keys_fn(x)
            return [(str(key), item) for key, item in keyed]
        items, _ = node.flatten_fn(x)
        return [(f"[{i}]", item) for i, item in enumerate(items)]
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return [(f".{f.name}", getattr(x, f.name)) for f in dataclasses.fields(x) if hasattr(x, f.name)]
    if kind in OBJECT_TYPES:
        return [(f".{name}", item) for name, item in vars(x).items()]
    return None


def is_plain_object(x: Any) -> bool:
    """Whether a value that is no container is nothing but its attributes, so that these make it anew."""
    kind: Any = type(x)
    return hasattr(x, "__dict__") and not isinstance(x, (torch.Tensor, *_NOT_PLAIN)) and _is_plain(kind)


@functools.cache
def _is_plain(kind: Any) -> bool:
    if _pytree_node(kind) is not None or dataclasses.is_dataclass(kind):
        return False
    try:
        _empty(kind)
    except TypeError:  # of a built-in kind, that holds more
        return False
    return True


def _empty(kind: type) -> Any:
    """An instance without attributes."""
    return (types.SimpleNamespace if issubclass(kind, types.SimpleNamespace) else object).__new__(kind)


def container_context(x: Any) -> Any:
    """What a container of a registered object type holds beside its children; None for all others."""
    node = _pytree_node(type(x)) if is_object(x) else None
    return None if node is None else node.flatten_fn(x)[1]


def close_container(like: Any, items: list[Any], context: Any = None) -> Any:
    """A container as `like`, holding `items` in place of its children.

    `context` is that of its flattening, where it is not the same as for `like`.
    """
    kind = type(like)
    if kind is tuple or kind is list:
        return kind(items)
    if kind is dict:
        return dict(zip(like, items, strict=True))
    if kind is torch.Size:  # only of numbers; in a template it is a tuple
        numbers = all(isinstance(item, (int, torch.SymInt)) for item in items)
        return torch.Size(items) if numbers else tuple(items)
    if pytree.is_namedtuple_class(kind):
        return tuple.__new__(kind, items)  # not the class's own: PackedSequence looks at its tensors there
    if kind is Opened:
        return _close_registered(like.kind, like.context, like.keys, items)
    node = _pytree_node(kind)
    if node is not None and context is not None:
        return node.unflatten_fn(items, context)
    if node is not None:
        children = open_container(like) or []
        return _close_registered(kind, node.flatten_fn(like)[1], [key for key, _ in children], items)
    if kind in OBJECT_TYPES:
        new = _empty(kind)
        new.__dict__.update(zip(like.__dict__, items, strict=True))
        return new
    new = copy.copy(like)
    for (key, _), item in zip(open_container(like) or [], items, strict=True):
        object.__setattr__(new, key[1:], item)
    return new


def _close_registered(kind: type, context: Any, keys: list[str], items: list[Any]) -> Any:
    """An instance of a registered type; opened, where it does not take these leaves or does not give them back."""
    node = _pytree_node(kind)
    if all(isinstance(leaf, (torch.Tensor, *_NUMBERS)) for _, leaf in leaves_with_path(items)):
        return node.unflatten_fn(items, context)
    try:
        made = node.unflatten_fn(items, context)
        found = open_container(made) or []
    except Exception:  # whatever a foreign class says of leaves that are no tensors
        return Opened(kind, context, keys, items)
    same = [key for key, _ in found] == keys and all(a is b for (_, a), b in zip(found, items, strict=True))
    return made if same else Opened(kind, context, keys, items)


def _pytree_node(kind: type) -> Any:
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is None and pytree.is_namedtuple_class(kind):
        node = pytree.SUPPORTED_NODES.get(collections.namedtuple)  # type: ignore[call-overload]  # pytree's own key
    return node


def match(template: Any, actual: Any, leaf: type, found: list[tuple[str, Any]], path: str) -> None:
    """Collect in `found` what stands in `actual` where `template` has leaves of type `leaf`, with its path.

    Symbolic numbers are leaves too.

    Raises InputMismatchError, naming the path, where containers or other values differ.
    """
    if isinstance(template, (leaf, torch.SymInt)):
        kind, word = (torch.Tensor, "tensor") if isinstance(template, leaf) else (int, "whole number")
        if not isinstance(actual, kind) or isinstance(actual, bool):
            raise InputMismatchError(f"{path} was a {word} when traced and is {_short(actual)} now: pass a {word}")
        found.append((path, actual))
        return
    inner = open_container(template)
    if inner is None:
        _match_constant(template, actual, path)
        return
    given = open_container(actual) if type(actual) is container_type(template) else None
    if given is None:
        raise InputMismatchError(
            f"{path} was a {container_type(template).__name__} when traced and is {_short(actual)} now"
        )
    if type(template) is dict:
        given = _in_order(inner, given)
    if [key for key, _ in inner] != [key for key, _ in given]:
        raise InputMismatchError(
            f"{path} had {_keys(inner)} when traced and has {_keys(given)} now: pass the same structure, or trace again"
        )
    _match_context(template, actual, path)
    for (key, old), (_, new) in zip(inner, given, strict=True):
        match(old, new, leaf, found, path + key)


def _match_context(template: Any, actual: Any, path: str) -> None:
    """What a registered container holds beside its children."""
    node = None if type(template) in (tuple, list, dict) else _pytree_node(container_type(template))
    if node is not None:
        fixed = template.context if isinstance(template, Opened) else node.flatten_fn(template)[1]
        _match_constant(fixed, node.flatten_fn(actual)[1], f"the fixed part of {path}")


def _in_order(inner: list[tuple[str, Any]], given: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Dicts are equal in any order of their keys."""
    table = dict(given)
    if set(table) != {key for key, _ in inner}:
        return given
    return [(key, table[key]) for key, _ in inner]


def _match_constant(old: Any, new: Any, path: str) -> None:
    if old is new:
        return
    if type(old) is type(new):
        try:
            same = old == new
            if bool(same if isinstance(same, bool) or not hasattr(same, "all") else same.all()):
                return
            if bool(old != old) and bool(new != new):  # not a number, both of them
                return
        except (TypeError, ValueError, RuntimeError):  # arrays and the like have no single truth value
            pass
    raise InputMismatchError(
        f"{path} was {_short(old)} when traced and is {_short(new)} now: "
        "Python values are fixed in a trace; trace again with this one, or pass it as a tensor"
    )


def _short(x: Any) -> str:
    text = repr(x) if type(x) in _PLAIN else f"a {type(x).__name__}"
    return text if len(text) < 60 else text[:57] + "..."


def _keys(children: list[tuple[str, Any]]) -> str:
    names = ", ".join(key for key, _ in children[:8])
    return f"{len(children)} items ({names}{', …' if len(children) > 8 else ''})"


def refuse_hidden(x: Any, kinds: tuple[type, ...], where: str) -> None:
    """Raise OpaqueOutputError when an object that pytree does not know holds one of `kinds` in its attributes."""
    for path, item in leaves_with_path(x):
        if isinstance(item, (*kinds, torch.nn.Module, type)) or not hasattr(item, "__dict__"):
            continue
        for name, value in vars(item).items():
            if _has_leaf(value, kinds, set()):
                kind = type(item)
                raise OpaqueOutputError(
                    f"{where}{path} is a {kind.__module__}.{kind.__qualname__} with tensors in it (.{name}), "
                    "and scopetrace cannot see inside objects of this type",
                    hint="make it a dataclass, or register it with torch.utils._pytree.register_pytree_node",
                )


def _has_leaf(x: Any, kinds: tuple[type, ...], seen: set[int]) -> bool:
    """Whether one of `kinds` is in a value, in containers and objects at any depth."""
    if isinstance(x, kinds):
        return True
    if id(x) in seen:
        return False
    seen.add(id(x))
    children = [child for _, child in open_container(x) or []]
    if not children and is_plain_object(x):
        children = list(vars(x).values())
    return any(_has_leaf(child, kinds, seen) for child in children)
