"""What a call passes to its function, and what it gets: the leaves of forward's arguments and of its result."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

from scopetrace.containers.structure import close_container, is_object, leaves_with_path, map_structure, open_container
from scopetrace.ir.tape import Value


@dataclasses.dataclass(frozen=True)
class Given:
    """One leaf of the arguments."""

    place: str
    """Where it stands: a path that equal calls have in common."""
    name: str
    """Its path in this call, `mask` or `past_key_values.layers[2].keys`."""
    leaf: Any

    @property
    def is_absent(self) -> bool:
        """Whether it is an argument that is None."""
        return self.leaf is None and self.place.isidentifier()


def given(named: dict[str, Any], read: set[Value]) -> list[Given]:
    """The leaves of forward's arguments in order. `read` are the values that the call reads (of a result: makes).

    Of an object with tensors in it, such as a cache of all layers, only those that are read, each in the place that it
    has among these.
    """
    return [g for name, argument in named.items() for g in _given(name, argument, read)]


def _given(path: str, x: Any, read: set[Value]) -> Iterator[Given]:
    if is_object(x):
        found = [(p, v) for p, v in leaves_with_path(x, path) if isinstance(v, Value) and v in read]
        yield from (Given(f"{path}[{i}]", p, v) for i, (p, v) in enumerate(found))
        return
    children = open_container(x)
    if children is None:
        yield Given(path, path, x)
    for key, item in children or ():
        yield from _given(path + key, item, read)


def without_unread(x: Any, read: set[Value]) -> Any:
    """Arguments or results of a call in a body: objects have None for the values that the body does not read."""
    if is_object(x):
        return map_structure(lambda v: v if v in read else None, x, Value)
    items = [item for _, item in open_container(x) or ()]
    kept = [without_unread(item, read) for item in items]
    return x if all(map(operator.is_, items, kept)) else close_container(x, kept)
