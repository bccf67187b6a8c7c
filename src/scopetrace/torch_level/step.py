"""Targets of ops that ATen does not have: a function or method of torch, the write of its result, and calls of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from scopetrace.ir.tape import Op, Value


@dataclasses.dataclass(frozen=True, eq=False)
class OpTemplate:
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


@dataclasses.dataclass(frozen=True, eq=False)
class Renew:
    """The write of the second argument into the first, as a target. `writes` are the ATen ops that it stands for."""

    name: str
    writes: tuple[Op, ...]
    tags: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass
class NodeCall:
    """What a node calls: values of the tape in place of tensors."""

    step: OpTemplate
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any = None


@dataclasses.dataclass
class Trial(NodeCall):
    """The pure form of a node, which returns the new values of what the node writes. It is run on trial."""

    _: dataclasses.KW_ONLY
    written: tuple[torch.Tensor, ...]
    is_out: bool = False
    """Whether the node got the tensors that it writes as `out=`."""
    ops: list[Op] = dataclasses.field(default_factory=list)
    """The ops that it ran, which are off the tape again."""
    before: list[Value] = dataclasses.field(default_factory=list)
    """The tensors that the node writes, before it did."""
    after: list[Value] = dataclasses.field(default_factory=list)
    """The same tensors, after it."""
