"""The submodules and hooks of a model's modules, which decide what its forward runs beside the code.

Data flow:
    modules of the model, before the forward -> their tables as they are, and a copy of each
    a call -> all tables are compared with the copies at once -> a Change for each entry that differs
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

SUBMODULES = "_modules"

_WORDS = {
    "_forward_pre_hooks": "forward pre-hooks",
    "_forward_hooks": "forward hooks",
    "_backward_pre_hooks": "backward pre-hooks",
    "_backward_hooks": "backward hooks",
}


_TABLES = (SUBMODULES, *_WORDS)
_tables_of: Callable[[dict[str, Any]], tuple[dict[Any, Any], ...]] = operator.itemgetter(*_TABLES)


class Change(NamedTuple):
    """A table of a module that is not what it was."""

    module: torch.nn.Module
    name: str
    """The module's name in the model."""
    table: str
    """`_modules`, or the attribute that has the hooks."""
    old: dict[Any, Any]
    new: dict[Any, Any]

    @property
    def text(self) -> str:
        """What changed: `forward hooks of fc: 0 when traced and 1 now`."""
        if self.table != SUBMODULES:
            hooks = f"{_WORDS[self.table]} of {self.name or 'the model'}"
            return f"{hooks}: {len(self.old)} when traced and {len(self.new)} now"
        found = []
        for key in dict.fromkeys((*self.old, *self.new)):
            old, new = (type(t[key]).__name__ if key in t else "missing" for t in (self.old, self.new))
            if self.old.get(key) is not self.new.get(key):
                name = f"{self.name}.{key}" if self.name else key
                found.append(f"{name}: {old} when traced and {'another ' if old == new else ''}{new} now")
        return "; ".join(found) or f"the submodules of {self.name or 'the model'} are in another order"


class ModuleTables:
    """The tables of a model's modules, and what they held in the trace. `names` has those of a module by its id."""

    def __init__(self, modules: Iterable[torch.nn.Module], names: Mapping[int, Sequence[str]]) -> None:
        self._modules = [m for m in modules if not isinstance(m, torch.jit.ScriptModule)]  # they have theirs in C++
        self._names = names
        self._now: list[dict[Any, Any]] = [table for m in self._modules for table in _tables_of(m.__dict__)]
        self._then = [table.copy() if table else _EMPTY for table in self._now]

    def changes(self) -> Iterator[Change]:
        """The tables that are not what they were."""
        if self._now == self._then:
            return
        owners = itertools.product(self._modules, _TABLES)
        for (module, table), new, old in zip(owners, self._now, self._then, strict=True):
            if new != old:
                yield Change(module, self._names[id(module)][0], table, old, new)


_EMPTY: dict[Any, Any] = {}
