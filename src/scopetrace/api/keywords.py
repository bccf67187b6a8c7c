"""What is said of a keyword that a function does not take: which one is meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from scopetrace.errors import ArgumentTypeError

P = ParamSpec("P")
T = TypeVar("T")


def knows_others(name: str, otherwise: str = "", **others: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Have a function raise ArgumentTypeError for a keyword that it does not take.

    Args:
        name: what users call the function.
        otherwise: what is said of keywords like none of its own.
        others: what to write, by keywords of other libraries.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        known = [p for p in inspect.signature(function).parameters if p != "self"]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            for wrong in kwargs.keys() - known:
                near = [f"{match}=" for match in difflib.get_close_matches(wrong, known, n=1)]
                hint = others.get(wrong) or (f"write {near[0]}" if near else otherwise)
                raise ArgumentTypeError(f"{name} has no argument {wrong}=" + (f": {hint}" if hint else ""))
            return function(*args, **kwargs)

        return checked

    return decorate
