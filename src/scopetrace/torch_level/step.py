"""Ops of a tape that are not ATen's: functions and methods of torch, and new values for tensors that they wrote to."""

from __future__ import annotations

import dataclasses
from typing import Any

from scopetrace.ir.tape import Op


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A function or method of a torch-level graph as the target of an op."""

    kind: str
    """`call_function` or `call_method`."""
    target: Any
    tags: tuple[Any, ...] = ()
    """Of the ATen ops that it runs, those that keep it in the graph although nothing reads it."""
    stack_trace: str | None = None

    @property
    def __name__(self) -> str:
        """What torch.fx names its node after."""
        return str(self.target) if self.kind == "call_method" else str(getattr(self.target, "__name__", "op"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.kind == "call_method":
            return getattr(args[0], self.target)(*args[1:], **kwargs)
        return self.target(*args, **kwargs)

    def __str__(self) -> str:
        return f".{self.target}" if self.kind == "call_method" else str(getattr(self.target, "__name__", self.target))


@dataclasses.dataclass(frozen=True, eq=False)
class Renew:
    """As a target: the first argument takes the value of the second. `writes` are the ATen ops behind it."""

    name: str
    writes: tuple[Op, ...]
    tags: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return self.name
