"""Objects that hold tensors in their attributes and that pytree does not know, such as transformers' caches.

Data flow:
    arguments and results -> the classes of such objects, learned when one is met first; from then on these are opened
    arguments before and after a forward -> effects: containers that the forward put other things into
    effects, in a call of the trace -> the same put into the caller's containers

A class that turns out to hold tensors only when the forward has run (an empty cache) is learned then, the arguments are
put back, and the forward is recorded again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from scopetrace.containers.structure import (
    OBJECT_TYPES,
    close_container,
    container_context,
    is_plain_object,
    leaves,
    leaves_with_path,
    open_container,
)
from scopetrace.errors import ExportError

_CONTAINERS = (list, dict, set)


class NeedsOpening(Exception):
    """Objects of a class that was taken for a constant hold tensors now."""


def learn(x: Any) -> bool:
    """Open the classes of all objects in `x` that hold tensors. Returns whether there were new ones."""
    search = _Search()
    search.holds(x)
    new = search.found - search.cyclic - OBJECT_TYPES
    OBJECT_TYPES.update(new)
    return bool(new)


class _Search:
    """Looks for tensors in containers and plain objects at any depth."""

    def __init__(self) -> None:
        self.found: set[type] = set()
        self.cyclic: set[type] = set()
        """The classes of objects that lead back to themselves: these cannot be copied part by part."""
        self._known: dict[int, bool] = {}
        self._path: list[Any] = []

    def holds(self, x: Any) -> bool:
        """Whether there is a tensor in it."""
        if isinstance(x, torch.Tensor):
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


class Saved:
    """The contents of the objects in `x` that are not opened, with the lists, dicts, sets and objects in them."""

    def __init__(self, x: Any) -> None:
        self._contents: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        for _, leaf in leaves_with_path(x):
            if is_plain_object(leaf):
                self._save(leaf)

    def _save(self, x: Any) -> None:
        if id(x) in self._seen or not (type(x) in _CONTAINERS or is_plain_object(x)):
            return
        self._seen.add(id(x))
        inside = vars(x) if is_plain_object(x) else x
        self._contents.append((inside, inside.copy()))
        for child in inside.values() if isinstance(inside, dict) else inside:
            self._save(child)

    def restore(self) -> None:
        """Put everything back."""
        for inside, before in self._contents:
            inside.clear()
            inside.extend(before) if isinstance(inside, list) else inside.update(before)


@dataclasses.dataclass
class Effect:
    """A container among the arguments that the forward put other things into."""

    path: tuple[str, ...]
    """The keys, as text, that lead to it from (args, kwargs)."""
    keys: list[Any]
    """Of a dict, its keys; of an object with attributes, their names; else nothing."""
    items: list[Any]
    """What it holds now: a template."""
    context: Any = None
    """Of a type that pytree knows, what its flattening gives beside the children."""


@dataclasses.dataclass
class Returned:
    """What a program gives where its forward has effects."""

    result: Any
    effects: list[Effect]


def only_result(outputs: Any, leaf: type) -> Any:
    """The result of a program, for forms that have nothing beside it; `leaf` is the type of its tensors.

    Raises ExportError where the forward puts a tensor into a container that it does not return too.
    """
    if not isinstance(outputs, Returned):
        return outputs
    returned = set(map(id, leaves(outputs.result, leaf)))
    for effect in outputs.effects:
        if not returned.issuperset(map(id, leaves(effect.items, leaf))):
            raise ExportError(
                f"the forward puts new tensors into a container among its arguments, {''.join(effect.path[1:])}",
                hint="return them, or the container",
            )
    return outputs.result


def object_types(x: Any) -> set[type]:
    """The classes in a template that are opened because they hold tensors."""
    return {type(item) for _, item, _ in _walk(x, ()) if type(item) in OBJECT_TYPES}


class Watch:
    """The containers among the arguments of a forward, and what they hold before it."""

    def __init__(self, arguments: Any) -> None:
        self._before = [(path, x, children) for path, x, children in _walk(arguments, ()) if _is_mutable(x)]

    def effects(self, template: Callable[[Any], Any]) -> list[Effect]:
        """What has changed; `template` makes templates of what is there now."""
        found = []
        for path, x, before in self._before:
            now = open_container(x) or []
            if [key for key, _ in now] != [key for key, _ in before] or not all(
                map(_same, [a for _, a in now], [b for _, b in before])
            ):
                items = [template(item) for _, item in now]
                found.append(Effect(path, _keys(x, now), items, container_context(x)))
        return found


def _walk(x: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any, list[tuple[str, Any]]]]:
    children = open_container(x)
    if children is not None:
        yield path, x, children
        for key, child in children:
            yield from _walk(child, (*path, key))


def _is_mutable(x: Any) -> bool:
    return not isinstance(x, tuple)


def _same(now: Any, before: Any) -> bool:
    return now is before or (type(now) is type(before) and isinstance(now, (bool, int, float, str)) and now == before)


def _keys(x: Any, children: list[tuple[str, Any]]) -> list[Any]:
    if isinstance(x, dict):
        return list(x)
    return [] if isinstance(x, list) else [key.removeprefix(".") for key, _ in children]


def targets(effects: list[Effect], arguments: Any) -> list[Any]:
    """The caller's containers, found before any of them changes."""
    found = []
    for effect in effects:
        x = arguments
        for key in effect.path:
            x = dict(open_container(x) or [])[key]
        found.append(x)
    return found


def apply(effects: list[Effect], containers: list[Any]) -> None:
    """Put what the forward put into its containers into the caller's; `effects` hold tensors here."""
    for effect, x in zip(effects, containers, strict=True):
        if isinstance(x, list):
            x[:] = effect.items
        elif isinstance(x, dict):
            x.clear()
            x.update(zip(effect.keys, effect.items, strict=True))
        elif effect.context is not None:
            vars(x).update(vars(close_container(x, effect.items, effect.context)))
        else:
            now = dict(zip(effect.keys, effect.items, strict=True))
            for name in [name for name in vars(x) if name not in now and type(x) in OBJECT_TYPES]:
                delattr(x, name)
            for name, item in now.items():
                object.__setattr__(x, name, item)
