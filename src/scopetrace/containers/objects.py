"""Arguments that the callable changes: objects that hold tensors, and what is put into containers.

Data flow:
    arguments and results -> tensor_holders -> the classes, unknown to pytree, whose instances a recording opens
    arguments before and after the forward -> Watch.effects -> Effects: containers that now hold other things
    Effects, in a call of the trace -> apply_effects -> the same change in the caller's containers

An object may hold tensors only after the forward has run, as an empty cache does. Then its class is opened, what the
forward did to the arguments is undone, and the forward is recorded again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence, Set, ValuesView
from typing import Any, Protocol

import torch

from scopetrace.containers.structure import (
    Children,
    is_plain_object,
    is_registered,
    leaves,
    leaves_with_path,
    map_structure,
    open_container,
    open_like,
)
from scopetrace.errors import ExportError, OpaqueOutputError


def tensor_holders(x: Any) -> frozenset[type]:
    """The classes of the plain objects in `x`, at any depth, that hold tensors.

    Objects that lead back to themselves are left out: they cannot be copied part by part.
    """
    search = _Search((torch.Tensor,))
    search.holds(x)
    return frozenset(search.found - search.cyclic)


class _Search:
    """Looks for instances of `kinds` in containers and plain objects at any depth."""

    def __init__(self, kinds: tuple[type, ...]) -> None:
        self._kinds = kinds
        self.found: set[type] = set()
        self.cyclic: set[type] = set()
        self._known: dict[int, bool] = {}
        self._path: list[Any] = []

    def holds(self, x: Any) -> bool:
        """Whether there is one in it."""
        if isinstance(x, self._kinds):
            return True
        children = _children(x)
        if children is None:
            return False
        if id(x) in self._known:
            if any(x is outer for outer in self._path):
                self.cyclic.update(type(outer) for outer in self._path if is_plain_object(outer))
            return self._known[id(x)]
        self._known[id(x)] = False
        self._path.append(x)
        result = any([self.holds(child) for child in children])
        self._path.pop()
        self._known[id(x)] = result
        if result and is_plain_object(x):
            self.found.add(type(x))
        return result


def _children(x: Any) -> list[Any] | None:
    if type(x) is set:
        return list(x)
    opened = open_container(x)
    if opened is not None:
        return [child for _, child in opened]
    return list(vars(x).values()) if is_plain_object(x) else None


def refuse_hidden(x: Any, kinds: tuple[type, ...], where: str, object_types: Collection[type]) -> None:
    """Raise OpaqueOutputError where an object that is not opened holds an instance of `kinds` in its attributes."""
    for path, item in leaves_with_path(x, "", object_types):
        if isinstance(item, (*kinds, torch.nn.Module, type)) or not hasattr(item, "__dict__"):
            continue
        for name, value in vars(item).items():
            if _Search(kinds).holds(value):
                kind = type(item)
                if isinstance(item, torch.Tensor):
                    raise OpaqueOutputError(
                        f"{where}{path} is a {kind.__name__}, a tensor subclass, whose parts (.{name}) a trace does "
                        "not follow",
                        hint="pass and return the tensors in it",
                    )
                raise OpaqueOutputError(
                    f"{where}{path} is a {kind.__module__}.{kind.__qualname__} with tensors in it (.{name}), "
                    "and scopetrace cannot see inside objects of this type",
                    hint="make it a dataclass, or register it with torch.utils._pytree.register_pytree_node",
                )


def refuse_without_structure(result: Any, kinds: tuple[type, ...], object_types: Collection[type]) -> None:
    """Raise OpaqueOutputError where a result has an iterator, or a collection without keys of instances of `kinds`."""
    for path, item in leaves_with_path(result, "", object_types):
        what = f"the result{path} is a {type(item).__name__}"
        if isinstance(item, Iterator):
            raise OpaqueOutputError(
                f"{what}, which can be gone through once and computes later",
                hint="return a list or tuple of what it gives",
            )
        if isinstance(item, (Set, ValuesView)) and any(isinstance(inner, kinds) for inner in item):
            raise OpaqueOutputError(
                f"{what} with tensors in it, which has no order or keys that a trace could keep",
                hint="return a list, tuple or dict",
            )


@dataclasses.dataclass
class Effect:
    """A container among the arguments into which the forward put other things."""

    path: tuple[str, ...]
    """The keys, as text, that lead to it from (args, kwargs)."""
    content: Any
    """A template of the container as it is afterwards."""


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

    def __init__(self, arguments: Any, object_types: Collection[type]) -> None:
        self._object_types = object_types
        self._before = [found for found in _walk(arguments, (), object_types) if not isinstance(found[1], tuple)]

    def effects(self, leaf_of: Callable[[torch.Tensor], Any]) -> list[Effect]:
        """The containers that have changed; in the templates of what they hold, `leaf_of` a tensor stands for it."""
        found = []
        for path, x, before in self._before:
            now = open_container(x, self._object_types) or []
            if [key for key, _ in now] != [key for key, _ in before] or not all(
                map(_same, [a for _, a in now], [b for _, b in before])
            ):
                found.append(Effect(path, map_structure(leaf_of, x, torch.Tensor, self._object_types)))
        return found


def _walk(
    x: Any, path: tuple[str, ...], object_types: Collection[type]
) -> Iterator[tuple[tuple[str, ...], Any, Children]]:
    children = open_container(x, object_types)
    if children is not None:
        yield path, x, children
        for key, child in children:
            yield from _walk(child, (*path, key), object_types)


def _same(now: Any, before: Any) -> bool:
    return now is before or (type(now) is type(before) and isinstance(now, (bool, int, float, str)) and now == before)


class InArguments(Protocol):
    """Something with a place in the arguments."""

    @property
    def path(self) -> tuple[str, ...]:
        """The keys, as text, that lead to it from (args, kwargs)."""


def effect_targets(effects: Sequence[InArguments], template: Any, arguments: Any) -> list[Any]:
    """The caller's containers, found before any of them changes; `template` is that of the arguments."""
    found = []
    for effect in effects:
        form, x = template, arguments
        for key in effect.path:
            x = dict(open_like(form, x) or [])[key]
            form = dict(open_container(form) or [])[key]
        found.append(x)
    return found


def apply_effects(effects: list[Effect], containers: list[Any]) -> None:
    """Put what the forward put into its containers into the caller's; `effects` hold tensors here."""
    for effect, x in zip(effects, containers, strict=True):
        if isinstance(x, list):
            x[:] = effect.content
        elif isinstance(x, dict):
            now = dict(effect.content)
            x.clear()
            x.update(now)
        elif is_registered(type(x)):
            vars(x).update(vars(effect.content))
        elif dataclasses.is_dataclass(x):
            for key, item in open_container(effect.content) or []:
                object.__setattr__(x, key[1:], item)
        else:
            vars(x).clear()
            vars(x).update(vars(effect.content))
