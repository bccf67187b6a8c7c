"""What a forward puts into the containers of its arguments, and which objects among these it gives back.

Data flow:
    arguments before and after the forward -> Watch.effects -> Effects: containers that now hold other things
    Effects, in a call of the trace -> apply_effects -> the same change in the caller's containers
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from scopetrace.containers.structure import (
    NOT_PLAIN,
    NUMBERS,
    PLAIN,
    Leaf,
    close_container,
    is_registered,
    leaves,
    leaves_with_path,
    map_structure,
    open_container,
    open_like,
    walk,
)
from scopetrace.errors import ExportError

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
        self._object_types = object_types
        ids = set(map(id, inputs))
        walked = [(path, x, children) for path, x, children in walk(arguments, object_types) if children is not None]
        self._before = [container for container in walked if not isinstance(container[1], tuple)]
        parts = [((*path, key), child) for path, _, children in walked for key, child in children]
        whole = [part for part in parts if _has_identity(part[1]) and ids.issuperset(map(id, self._tensors(part[1])))]
        self._known = {id(x): path for path, x in reversed(whole)}

    def effects(self, leaf_of: Callable[[torch.Tensor], Any]) -> list[Effect]:
        """The containers that have changed; in the templates of what they hold, `leaf_of` a tensor stands for it."""
        effects = []
        for path, x, before in self._before:
            after = open_container(x, self._object_types) or []
            if [key for key, _ in after] != [key for key, _ in before] or not all(
                map(_same, [a for _, a in after], [b for _, b in before])
            ):
                parts = [part for key, child in after for part in self.argument_parts(child, (key,))]
                effects.append(Effect(path, map_structure(leaf_of, x, torch.Tensor, self._object_types), parts))
        return effects

    def _tensors(self, x: Any) -> Iterator[torch.Tensor]:
        return (t for _, t in leaves_with_path(x, "", self._object_types) if isinstance(t, torch.Tensor))

    def argument_parts(self, x: Any, path: tuple[str, ...] = ()) -> list[GivenPart]:
        """The parts of what the forward gives that are objects among its arguments."""
        known = self._known.get(id(x))
        if known is not None:
            return [(path, known)]
        children = open_container(x, self._object_types) or []
        return [part for key, child in children for part in self.argument_parts(child, (*path, key))]


def _has_identity(x: Any) -> bool:
    """Whether it is an object that a caller may know again, rather than a number, a text or a tensor."""
    return type(x) not in PLAIN and not isinstance(x, (torch.Tensor, *NUMBERS, *NOT_PLAIN))


def with_given(template: Any, given_parts: list[GivenPart], leaf: Leaf) -> Any:
    """A template in which each part that is an object among the arguments is a Given."""
    parts = dict(given_parts)

    def put(x: Any, path: tuple[str, ...]) -> Any:
        if path in parts:
            return Given(parts[path], len(leaves(x, leaf)))
        if not any(part[: len(path)] == path for part in parts):
            return x
        return close_container(x, [put(child, (*path, key)) for key, child in open_container(x) or []])

    return put(template, ()) if parts else template


def _same(now: Any, before: Any) -> bool:
    return now is before or (type(now) is type(before) and isinstance(now, (bool, int, float, str)) and now == before)


def effect_targets(effects: Sequence[Any], template: Any, arguments: Any) -> list[Any]:
    """The caller's objects at the `path` of each effect in (args, kwargs), of which `template` is the template."""
    targets = []
    for effect in effects:
        form, x = template, arguments
        for key in effect.path:
            x = dict(open_like(form, x) or [])[key]
            form = dict(open_container(form) or [])[key]
        targets.append(x)
    return targets


def apply_effects(effects: list[Effect], containers: list[Any]) -> None:
    """Put what the forward put into its containers into the caller's; `effects` hold tensors here."""
    for effect, x in zip(effects, containers, strict=True):
        if isinstance(x, list):
            x[:] = effect.content
        elif isinstance(x, dict):
            entries = dict(effect.content)
            x.clear()
            x.update(entries)
        elif is_registered(type(x)):
            vars(x).update(vars(effect.content))
        elif dataclasses.is_dataclass(x):
            for key, item in open_container(effect.content) or []:
                object.__setattr__(x, key[1:], item)
        else:
            vars(x).clear()
            vars(x).update(vars(effect.content))
