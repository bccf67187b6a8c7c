"""Module calls of a program chosen by name, class or predicate: `Trace.calls[...]`, and what takes the same targets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, SupportsIndex, overload

import torch

from scopetrace.errors import CallNotFoundError
from scopetrace.ir.selection import Selection, is_named, near_names, several, target_text
from scopetrace.program.traced import ModuleCall

_LISTED = 6  # names in a message or a repr


class Calls(list[ModuleCall]):
    """Module calls in forward order. An index or slice is that of a list; targets give the calls that they name."""

    @overload
    def __getitem__(self, key: SupportsIndex, /) -> ModuleCall: ...
    @overload
    def __getitem__(self, key: slice | Selection, /) -> Calls: ...
    def __getitem__(self, key: Any, /) -> Any:
        """One call for an index; for a slice or a target the calls, in order.

        Raises CallNotFoundError where a class, module or pattern names no call, IndexError for an index.
        """
        if isinstance(key, slice):
            return Calls(super().__getitem__(key))
        if isinstance(key, SupportsIndex):
            return super().__getitem__(key)
        targets = several(key)
        for target in targets:
            if isinstance(target, (str, type, torch.nn.Module)) and not any(is_named(call, target) for call in self):
                raise CallNotFoundError(f"no module call is named {target_text(target)}; {self._near(target)}")
        return Calls(call for call in self if is_named(call, targets))

    def of(self, fqn: str, index: int = 0) -> ModuleCall:
        """The call of the module with this exact name; `index` 1 is its second call. Raises CallNotFoundError."""
        matches = [call for call in self if call.fqn == fqn]
        for call in matches:
            if call.index == index:
                return call
        if matches:
            times = "once" if len(matches) == 1 else f"{len(matches)} times"
            raise CallNotFoundError(f"{fqn!r} is called {times}: there is no call with index {index}")
        raise CallNotFoundError(f"no module call has the name {fqn!r}; {self._near(fqn)}")

    def _near(self, key: Any) -> str:
        names = names_near(key, self)
        return f"there are {_names(names)}" if names else "only the model itself is called"

    def __repr__(self) -> str:
        if len(self) <= _LISTED:
            return super().__repr__()
        return f"[{', '.join(map(repr, super().__getitem__(slice(_LISTED - 1))))}, … {len(self) - _LISTED + 1} more]"


def names_near(key: Any, calls: Iterable[ModuleCall]) -> list[str]:
    """Names of called modules, or of their classes, that are like `key`."""
    calls = [call for call in calls if call.fqn]
    return near_names(key, [str(call.fqn) for call in calls], [call.scope.type_name for call in calls])


def _names(names: list[str]) -> str:
    return ", ".join(map(repr, names[:_LISTED])) + (", …" if len(names) > _LISTED else "")
