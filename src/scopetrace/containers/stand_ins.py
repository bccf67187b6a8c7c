"""Stand-ins for values that a forward has changed: they note what else is asked of them than the change itself.

Data flow:
    the value that a run of the forward left -> a subclass of int, float, list or dict with the same value
    `self.n += 1`, `self.log.append(y)` -> the result is a stand-in again, and nothing is noted
    `self.n % 10`, `if self.n > 3`, `len(self.log)`, `self.log[-1]` -> `asked` is called

What C code takes of a subclass of int without a method (`table[n]`, `range(n)`) is not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Asked = Callable[[], None]


class _StandIn:
    """What all stand-ins have."""

    asked: Asked


def stand_in(x: Any, asked: Asked) -> Any:
    """One for a number, list or dict, and for those in it; other values as they are."""
    kind = _CLASSES.get(type(x))
    if kind is None:
        return x
    inner = x
    if type(x) is list:
        inner = [stand_in(item, asked) for item in x]
    elif type(x) is dict:
        inner = {key: stand_in(item, asked) for key, item in x.items()}
    made = kind(inner)
    made.asked = asked
    return made


def plain(x: Any) -> Any:
    """The value that a stand-in, or a container with some, stands for."""
    base = next((base for base, kind in _CLASSES.items() if type(x) is kind), type(x))
    if base is list:
        return [plain(item) for item in list.__iter__(x)]
    if base is dict:
        return {key: plain(item) for key, item in dict.items(x)}
    if base is tuple:
        return tuple([plain(item) for item in x])
    return base.__pos__(x) if isinstance(x, _StandIn) else x  # by the method of int, which notes nothing


def is_watched(x: Any) -> bool:
    """Whether a value has a stand-in; of others it counts as asked where they are read."""
    return type(x) in _CLASSES or isinstance(x, _StandIn)


def _changing(kind: type, name: str) -> Callable[..., Any]:
    """An arithmetic method, whose result with a plain number is a stand-in; it tells nobody what the number is."""
    method = getattr(kind, name)

    def change(self: Any, *args: Any) -> Any:
        found = method(plain(self), *map(plain, args))
        return found if found is NotImplemented else stand_in(found, self.asked)

    return change


def _asking(kind: type, name: str) -> Callable[..., Any]:
    method = getattr(kind, name)

    def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.asked()
        return method(self, *args, **kwargs)

    return ask


def _made(kind: type, changing: str, asking: str) -> type:
    members: dict[str, Any] = {f"__{name}__": _changing(kind, f"__{name}__") for name in changing.split()}
    for name in asking.split():
        key = name if hasattr(kind, name) and not hasattr(kind, f"__{name}__") else f"__{name}__"
        members[key] = _asking(kind, key)
    if "__eq__" in members:
        members.setdefault("__hash__", kind.__hash__ and _asking(kind, "__hash__"))
    members["__reduce_ex__"] = lambda self, protocol: (plain, (plain(self),))
    return type(f"{kind.__name__}", (_StandIn, kind), members)


_ARITHMETIC = "add radd sub rsub mul rmul truediv rtruediv neg pos"
_COMPARED = "eq ne lt le gt ge"
_OF_NUMBERS = f"{_COMPARED} bool mod rmod floordiv rfloordiv divmod rdivmod pow rpow int float round trunc abs"
_CLASSES: dict[type, Any] = {
    int: _made(int, _ARITHMETIC, f"{_OF_NUMBERS} index and rand or ror xor rxor lshift rshift invert"),
    float: _made(float, _ARITHMETIC, f"{_OF_NUMBERS} is_integer"),
    list: _made(list, "", f"{_COMPARED} len iter getitem contains reversed add mul index count pop copy"),
    dict: _made(
        dict, "", "eq ne len iter getitem contains reversed or get keys values items pop popitem copy setdefault"
    ),
}
STAND_INS = frozenset({_CLASSES[int], _CLASSES[float]})
"""The classes of stand-ins without content."""
