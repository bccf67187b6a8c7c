"""Numbers in objects among the arguments: a trace fixes those that the forward may read.

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

from scopetrace.containers.effects import effect_targets
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
    changes: bool = False
    """Whether the forward sets it to another value."""


def numbers_read(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: Sequence[str],
    object_types: Collection[type],
    attributes: Collection[str] | None,
) -> list[ArgumentNumber]:
    """The numbers in objects that stand in one of `attributes`, or in any; `names` are of the positional arguments."""

    def in_containers(x: Any, name: str, path: tuple[str, ...]) -> Iterator[ArgumentNumber]:
        children = open_container(x, object_types)
        if children is None:
            yield from _in_object(x, ArgumentNumber(name, 0, path, ()), attributes, [])
        for key, child in children or ():
            if key[0] != "." or type(child) not in (int, float):
                yield from in_containers(child, name + key, (*path, key))
            elif attributes is None or key[1:] in attributes:
                yield ArgumentNumber(name + key, child, (*path, key), ())

    places = [("[0]", f"[{i}]") for i in range(len(args))] + [("[1]", f"[{name!r}]") for name in kwargs]
    arguments = zip((*args, *kwargs.values()), (*names, *kwargs), places, strict=True)
    return [number for argument in arguments for number in in_containers(*argument)]


def _in_object(
    x: Any, place: ArgumentNumber, names: Collection[str] | None, outer: list[Any]
) -> Iterator[ArgumentNumber]:
    if not is_plain_object(x) or any(x is seen for seen in outer):
        return
    for key, value in vars(x).items():
        number = ArgumentNumber(f"{place.name}.{key}", value, place.path, (*place.attributes, key))
        if type(value) not in (int, float):
            yield from _in_object(value, number, names, [*outer, x])
        elif names is None or key in names:
            yield number


def check_numbers(numbers: Sequence[ArgumentNumber], template: Any, arguments: Any) -> None:
    """Raise InputMismatchError where an object among the arguments, (args, kwargs), has another number."""
    inside = [n for n in numbers if n.attributes]
    for number, x in zip(inside, effect_targets(inside, template, arguments), strict=True):
        now = functools.reduce(lambda part, key: getattr(part, key, None), number.attributes, x)
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
