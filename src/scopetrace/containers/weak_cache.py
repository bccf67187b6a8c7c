"""What is known of a class or of code, kept for as long as that lives.

Data flow:
    an object, by its id -> what was made of it before, or is made now -> gone with the object
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

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
