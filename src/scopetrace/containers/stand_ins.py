"""Stand-ins for values that a forward has changed: they note what else is asked of them than the change itself.

Data flow:
    the value that a run of the forward left -> a subclass of int, float, list, deque, set or dict with the same value
    `self.n += 1`, `self.log.append(y)` -> the result is a stand-in again, and nothing is noted
    `self.n % 10`, `if self.n > 3`, `len(self.log)`, `self.log[-1]` -> `asked` is called

What C code takes of a subclass of int without a method (`table[n]`, `range(n)`) is not seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

Asked = Callable[[], None]


class StandIn:
    """What all stand-ins have."""

    asked: Asked
    fresh: set[Any] | None
    """Of a container, the keys of entries that were written since; None for all."""


def stand_in(x: Any, asked: Asked) -> Any:
    """One for a number or container, and for those in it; other values as they are."""
    kind = _CLASSES.get(type(x))
    if kind is None:
        return x
    inner = x
    if type(x) in (list, deque):
        inner = [stand_in(item, asked) for item in x]
    elif type(x) is dict:
        inner = {key: stand_in(item, asked) for key, item in x.items()}
    new = kind(inner, x.maxlen) if type(x) is deque else kind(inner)
    new.asked, new.fresh = asked, set()
    return new


def plain(x: Any) -> Any:
    """The value that a stand-in, or a container with some, stands for."""
    base: Any = next((base for base, kind in _CLASSES.items() if type(x) is kind), type(x))
    if base is list:
        return [plain(item) for item in list.__iter__(x)]
    if base is dict:
        return {key: plain(item) for key, item in dict.items(x)}
    if base is deque:
        return deque(map(plain, deque.__iter__(x)), x.maxlen)
    if base is set:
        return {*set.__iter__(x)}
    if base is tuple:
        return tuple([plain(item) for item in x])
    return base.__pos__(x) if isinstance(x, StandIn) else x  # by the method of int, which notes nothing


def is_watched(x: Any) -> bool:
    """Whether a value has a stand-in; of others it counts as asked where they are read."""
    return type(x) in _CLASSES or isinstance(x, StandIn)


def _changing(kind: type, name: str) -> Callable[..., Any]:
    """An arithmetic method, whose result with a plain number is a stand-in; it tells nobody what the number is."""
    method = getattr(kind, name)

    def change(self: Any, *args: Any) -> Any:
        result = method(plain(self), *map(plain, args))
        return result if result is NotImplemented else stand_in(result, self.asked)

    return change


def _asking(kind: type, name: str) -> Callable[..., Any]:
    method = getattr(kind, name)

    def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.asked()
        return method(self, *args, **kwargs)

    return ask


def _kind(kind: type, changing: str, asking: str) -> type:
    members: dict[str, Any] = {f"__{name}__": _changing(kind, f"__{name}__") for name in changing.split()}
    for name in asking.split():
        key = name if hasattr(kind, name) and not hasattr(kind, f"__{name}__") else f"__{name}__"
        members[key] = _asking(kind, key)
    if "__eq__" in members:
        members.setdefault("__hash__", _asking(kind, "__hash__") if kind in (int, float) else None)
    members["__reduce_ex__"] = lambda self, protocol: (plain, (plain(self),))
    return type(f"{kind.__name__}", (StandIn, kind), members)


def _with_fresh(kind: Any) -> type:
    """A container in which entries that were written since are fresh: to ask for these alone tells nothing old."""
    ask, put, clear = kind.__getitem__, kind.__setitem__, kind.clear
    base = kind.__mro__[2]

    def __getitem__(self: Any, key: Any) -> Any:
        place = key + list.__len__(self) if base is list and type(key) is int and key < 0 else key
        is_fresh = isinstance(key, (int, str, tuple)) and (self.fresh is None or place in self.fresh)
        return base.__getitem__(self, key) if is_fresh else ask(self, key)

    def __setitem__(self: Any, key: Any, value: Any) -> None:
        put(self, key, value)
        if self.fresh is not None and (base is dict or isinstance(key, int)):
            self.fresh.add(key if base is dict or key >= 0 else key + list.__len__(self))

    def __iter__(self: Any) -> Any:
        if self.fresh is not None and len(self.fresh) < base.__len__(self):
            self.asked()
        return base.__iter__(self)

    def emptied(self: Any) -> None:
        self.fresh = None
        clear(self)

    return type(
        kind.__name__, (kind,), {f.__name__: f for f in (__getitem__, __setitem__, __iter__)} | {"clear": emptied}
    )


_ARITHMETIC = "add radd sub rsub mul rmul truediv rtruediv neg pos"
_COMPARED = "eq ne lt le gt ge"
_OF_NUMBERS = f"{_COMPARED} bool mod rmod floordiv rfloordiv divmod rdivmod pow rpow int float round trunc abs"
_OF_SETS = "and rand or ror sub rsub xor rxor issubset issuperset isdisjoint union intersection difference"
_CLASSES: dict[type, Any] = {
    int: _kind(int, _ARITHMETIC, f"{_OF_NUMBERS} index and rand or ror xor rxor lshift rshift invert"),
    float: _kind(float, _ARITHMETIC, f"{_OF_NUMBERS} is_integer"),
    list: _with_fresh(_kind(list, "", f"{_COMPARED} len iter getitem contains reversed add mul index count pop copy")),
    deque: _kind(deque, "", f"{_COMPARED} len iter getitem contains reversed add mul index count pop popleft copy"),
    set: _kind(set, "", f"{_COMPARED} len iter contains pop copy symmetric_difference {_OF_SETS}"),
    dict: _with_fresh(
        _kind(dict, "", "eq ne len iter getitem contains reversed or get keys values items pop popitem copy setdefault")
    ),
}
STAND_INS = frozenset({_CLASSES[int], _CLASSES[float]})
"""The classes of stand-ins without content."""
