"""Targets of ops that ATen does not have: functions and methods of torch."""

from __future__ import annotations

import dataclasses
from typing import Any

ORIGIN = "torch_level"
"""The key of `Op.meta` by which an ATen op knows the node of the graph that ran it."""


@dataclasses.dataclass(frozen=True, eq=False)
class TorchTarget:
    """A function or method of a torch-level graph as the target of an op."""

    kind: str
    """`call_function`, `call_method` or, before it is on a tape, `call_module`."""
    target: Any
    """A function, the name of a method, or a module."""
    tags: tuple[Any, ...] = ()
    """Those tags of the ATen ops that it runs which keep it in the graph although nothing reads it."""

    @property
    def __name__(self) -> str:
        """The name that torch.fx gives its node."""
        return str(self.target) if self.kind == "call_method" else str(getattr(self.target, "__name__", "op"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.kind == "call_method":
            return getattr(args[0], self.target)(*args[1:], **kwargs)
        return self.target(*args, **kwargs)

    def __str__(self) -> str:
        return f".{self.target}" if self.kind == "call_method" else str(getattr(self.target, "__name__", self.target))
