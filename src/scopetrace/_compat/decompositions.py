"""Tables of decompositions, and how torch takes composite ops apart."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._export.utils import _is_cia_op, _is_preservable_cia_op
from torch._ops import OpOverload

Rule = Callable[..., Any]


@functools.cache
def core_aten() -> dict[Any, Rule]:
    """`torch.export.default_decompositions()`, read once: making it takes half a second."""
    return dict(torch.export.default_decompositions().items())


class Decompositions:
    """What stands for each op in a table, as `ExportedProgram.run_decompositions` reads it."""

    def __init__(self, table: Mapping[Any, Rule] | None) -> None:
        """`table` is by op; None for `core_aten`."""
        self._table: Mapping[Any, Rule] = core_aten() if table is None else table
        self.rule = functools.cache(self._rule)

    def _rule(self, op: OpOverload) -> Rule | None:
        """What to run in the place of an op; None for an op that stays.

        Composite ops that return their argument or a view of it on some inputs, such as `reshape`, `dropout` and
        `to`, are always taken apart, since other compilers cannot know which.
        """
        if op in self._table:
            return self._table[op]
        has_kernel = torch._C._dispatch_has_kernel(op.name())
        return op.decompose if has_kernel and _is_cia_op(op) and not _is_preservable_cia_op(op) else None
