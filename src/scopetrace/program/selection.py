"""Module calls chosen by name, class or predicate: one rule wherever a caller names calls.

target + call -> is_named: a class by `issubclass`, a module by identity, a pattern by fnmatch, a predicate by a call
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable
from typing import Any, SupportsIndex, overload

import torch

from scopetrace.errors import ArgumentTypeError, CallNotFoundError
from scopetrace.ir.scopes import Scope
from scopetrace.program.traced import ModuleCall

Target = type | torch.nn.Module | str | Callable[[ModuleCall], bool]
"""A class; a module of the model; a pattern of names, scope paths or class names; a predicate."""

_LISTED = 6  # names in a message or a repr


def is_scope_named(scope: Scope, pattern: str) -> bool:
    """Whether an fnmatch pattern matches a scope's path, its name in the model (`"layers.0.mlp"`) or its class's name.

    Brackets stand for themselves in a path, since most paths contain them; in names they are a set of characters.
    """
    if fnmatch.fnmatchcase(scope.path, pattern.replace("[", "[[]")):
        return True
    name = ".".join(s.name for s in [*scope.ancestors()][::-1] if s.is_module and s.name)
    return scope.is_module and (fnmatch.fnmatchcase(scope.type_name, pattern) or fnmatch.fnmatchcase(name, pattern))


def is_named(call: ModuleCall, target: Any) -> bool:
    """Whether a target names a call. Raises ArgumentTypeError for what is no target.

    A pattern is compared with the call's fqn (`"layers.*.attn"`, `"layers.[0-3]"`), the path of its scope, in which
    brackets stand for themselves (`"*/Attention[attn]"`), and the name of its class.
    """
    if isinstance(target, type):
        own = call.module_type if call.module is None else type(call.module)
        return own is not None and issubclass(own, target)
    if isinstance(target, torch.nn.Module):
        return call.module is target
    if isinstance(target, str):
        if call.fqn is not None and fnmatch.fnmatchcase(call.fqn, target):
            return True
        return is_scope_named(call.scope, target)
    if callable(target):
        return bool(target(call))
    raise ArgumentTypeError(
        f"{target!r} is a {type(target).__name__}; give a module class, a module of the model, a pattern of names "
        "such as 'layers.*.attn', or a predicate on a ModuleCall"
    )


class Calls(list[ModuleCall]):
    """Module calls in forward order. An index or slice is that of a list; a target gives the calls that it names."""

    @overload
    def __getitem__(self, key: SupportsIndex, /) -> ModuleCall: ...
    @overload
    def __getitem__(self, key: slice | Target, /) -> Calls: ...
    def __getitem__(self, key: Any, /) -> Any:
        """One call for an index; for a slice or a target the calls, in order.

        Raises CallNotFoundError where a class, module or pattern names no call, IndexError for an index.
        """
        if isinstance(key, slice):
            return Calls(super().__getitem__(key))
        if isinstance(key, SupportsIndex):
            return super().__getitem__(key)
        found = Calls(call for call in self if is_named(call, key))
        if not found and (isinstance(key, (str, type, torch.nn.Module))):
            raise CallNotFoundError(f"no module call is named {_text(key)}; {self._near(key)}")
        return found

    def of(self, fqn: str, index: int = 0) -> ModuleCall:
        """The call of the module with this exact name; `index` 1 is its second call. Raises CallNotFoundError."""
        found = [call for call in self if call.fqn == fqn]
        for call in found:
            if call.index == index:
                return call
        if found:
            times = "once" if len(found) == 1 else f"{len(found)} times"
            raise CallNotFoundError(f"{fqn!r} is called {times}: there is no call with index {index}")
        raise CallNotFoundError(f"no module call has the name {fqn!r}; {self._near(fqn)}")

    def _near(self, key: Any) -> str:
        names = list(dict.fromkeys(call.fqn for call in self if call.fqn))
        near = difflib.get_close_matches(key, names, n=3, cutoff=0.4) if isinstance(key, str) else []
        return f"there are {_names(near or names)}" if names else "only the model itself is called"

    def __repr__(self) -> str:
        if len(self) <= _LISTED:
            return super().__repr__()
        return f"[{', '.join(map(repr, super().__getitem__(slice(_LISTED - 1))))}, … {len(self) - _LISTED + 1} more]"


def outermost(calls: Iterable[ModuleCall]) -> Calls:
    """The calls that are inside no other one of them."""
    given = Calls(calls)
    known = set(given)
    return Calls(call for call in given if known.isdisjoint(around(call.parent)))


def around(call: ModuleCall | None) -> Iterable[ModuleCall]:
    """A call, then those around it up to the root."""
    while call is not None:
        yield call
        call = call.parent


def _text(target: Any) -> str:
    if isinstance(target, torch.nn.Module):
        return f"this {type(target).__name__}"
    return target.__name__ if isinstance(target, type) else repr(target)


def _names(names: list[str]) -> str:
    return ", ".join(map(repr, names[:_LISTED])) + (", …" if len(names) > _LISTED else "")
