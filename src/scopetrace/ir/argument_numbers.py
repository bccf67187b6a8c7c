"""Numbers in objects among the arguments, such as the length in a cache: the program has those of the example.

Data flow:
    arguments of the trace + the names in the forward's code -> an ArgumentNumber for each number that it may read
    a call -> the same places in its arguments -> InputMismatchError where a number differs
    a file made from the trace, which cannot check -> FixedValueWarning
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from scopetrace.containers.objects import effect_targets
from scopetrace.containers.structure import is_plain_object, open_container
from scopetrace.errors import FixedValueWarning, InputMismatchError


@dataclasses.dataclass(frozen=True)
class ArgumentNumber:
    """A number in an object among the arguments that the forward may read."""

    name: str
    """In source: `past_key_values.layers[0].cumulative_length`."""
    value: int | float
    """That of the example, which the program has."""
    path: tuple[str, ...]
    """The keys that lead from (args, kwargs) to the object that is no container of tensors."""
    attributes: tuple[str, ...]
    """The attributes that lead from there to the number; empty in a container, whose numbers are compared anyway."""


def numbers_read(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: Sequence[str],
    object_types: Collection[type],
    attributes: Collection[str],
) -> list[ArgumentNumber]:
    """The numbers in objects that stand in one of `attributes`; `names` are those of the positional arguments."""
    search = _Search(object_types, attributes)
    found = [
        n for i, (name, x) in enumerate(zip(names, args, strict=True)) for n in search.of(x, name, ("[0]", f"[{i}]"))
    ]
    return [*found, *(n for name, x in kwargs.items() for n in search.of(x, name, ("[1]", f"[{name!r}]")))]


class _Search:
    def __init__(self, object_types: Collection[type], attributes: Collection[str]) -> None:
        self._object_types = object_types
        self._attributes = attributes

    def of(self, x: Any, name: str, path: tuple[str, ...]) -> Iterator[ArgumentNumber]:
        children = open_container(x, self._object_types)
        if children is None:
            yield from self._in_object(x, name, path, (), [])
        for key, child in children or ():
            if key[0] == "." and type(child) in (int, float):
                if key[1:] in self._attributes:
                    yield ArgumentNumber(name + key, child, (*path, key), ())
            else:
                yield from self.of(child, name + key, (*path, key))

    def _in_object(
        self, x: Any, name: str, path: tuple[str, ...], attributes: tuple[str, ...], outer: list[Any]
    ) -> Iterator[ArgumentNumber]:
        if not is_plain_object(x) or any(x is seen for seen in outer):
            return
        for key, value in vars(x).items():
            if type(value) not in (int, float):
                yield from self._in_object(value, f"{name}.{key}", path, (*attributes, key), [*outer, x])
            elif key in self._attributes:
                yield ArgumentNumber(f"{name}.{key}", value, path, (*attributes, key))


def check_numbers(numbers: Sequence[ArgumentNumber], template: Any, arguments: Any) -> None:
    """Raise InputMismatchError where an object among the arguments, (args, kwargs), has another number."""
    inside = [n for n in numbers if n.attributes]
    for number, x in zip(inside, effect_targets(inside, template, arguments), strict=True):
        now = functools.reduce(lambda found, key: getattr(found, key, None), number.attributes, x)
        if type(now) is not type(number.value) or now != number.value:
            raise InputMismatchError(
                f"{number.name} was {number.value} when traced and is {now!r} now: numbers in objects are fixed in a "
                "trace; pass it as a tensor, or as an argument of its own that dynamic_shapes= makes dynamic"
            )


def warn_of_numbers(numbers: Sequence[ArgumentNumber], what: str) -> None:
    """Give a FixedValueWarning that names the numbers which `what`, a file or program, has and cannot check."""
    if numbers:
        some = ", ".join(f"{n.name} = {n.value}" for n in numbers[:_SHOWN])
        more = f", and {len(numbers) - _SHOWN} more, in Trace.specializations" if len(numbers) > _SHOWN else ""
        warnings.warn(
            f"{what} is right only where objects among the arguments have the numbers of the trace, and cannot check "
            f"that: {some}{more}; keep such a number in a tensor, or pass it as an argument of its own with "
            "dynamic_shapes=",
            FixedValueWarning,
            stacklevel=4,
        )


_SHOWN = 5
