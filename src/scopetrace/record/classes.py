"""The classes of modules.

`torch.nn.utils.parametrize` makes a class for each module: equal ones are one class in a trace.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils import parametrize


class Classes:
    """The classes of the modules of one trace."""

    def __init__(self) -> None:
        self._first: dict[Any, type] = {}

    def of(self, module: torch.nn.Module) -> type:
        """The module's class; of parametrized modules, that of the first with the same parametrizations."""
        own = type(module)
        if own.__module__ != parametrize.__name__ or not parametrize.is_parametrized(module):
            return own
        lists: Any = module.parametrizations
        kinds = tuple((name, tuple(map(type, chain))) for name, chain in lists.items())
        return self._first.setdefault((parametrize.type_before_parametrizations(module), kinds), own)
