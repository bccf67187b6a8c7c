"""Process groups, reductions and work handles of torch.distributed, in the form in which c10d ops take and return them.

A c10d op takes TorchScript objects in place of Python's `ProcessGroup` and `ReduceOp`, and returns one for `Work`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Group(NamedTuple):
    """A process group as functional collectives name it."""

    name: str
    size: int
    rank: int
    """Of this process, in the group."""


def unboxed(x: Any) -> Any:
    """An argument of a c10d op: a Group, or the name of a reduction, for the TorchScript object of one, else `x`."""
    if not isinstance(x, torch.ScriptObject):
        return x
    if "c10d.ReduceOp" in str(x):
        return torch.distributed.ReduceOp.RedOpType(x.op()).name.lower()  # type: ignore[attr-defined]
    group = torch.distributed.ProcessGroup.unbox(x)
    return Group(group.group_name, group.size(), group.rank())


def functional_collectives() -> Any:
    """The namespace of ops `_c10d_functional`, with their shape functions registered."""
    importlib.import_module("torch.distributed._functional_collectives")
    return torch.ops._c10d_functional


_Work: Any = torch.distributed.Work if torch.distributed.is_available() else object


class _RecordedWork(_Work):
    def __init__(self, tensors: Any, finish: Callable[[], None]) -> None:
        super().__init__()
        self._tensors = tensors
        self._finish = finish

    def wait(self, timeout: Any = None) -> bool:
        self._finish()
        return True

    def is_completed(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._finish()

    def result(self) -> Any:
        self._finish()
        return self._tensors

    def get_future(self) -> Any:
        self._finish()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


recorded_work: Callable[[Any, Callable[[], None]], Any] = _RecordedWork
"""Gives a handle that calls a function when it is waited for. It has to live as long as its TorchScript object."""
