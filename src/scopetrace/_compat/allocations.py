"""What an op allocates while it runs, by fake tensors.

The idea, storages with weak references to them under a dispatch mode, is that of `torch.distributed._tools.MemTracker`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scopetrace._compat.shape_env import WatchedShapeEnv
from scopetrace._compat.symbols import example
from scopetrace._compat.tensors import FakeTensorMode, run_op


def peak_of_op(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> int:
    """The most bytes that an op has allocated at one time, its results included. Raises what the op raises."""
    env = mode.shape_env
    with env.unchanged() if isinstance(env, WatchedShapeEnv) else contextlib.nullcontext(), mode:
        return peak_of(lambda: run_op(mode, func, args, kwargs), tree_leaves((args, kwargs)))


def peak_of(run: Callable[[], Any], there: list[Any]) -> int:
    """The same of a function on fake or meta tensors, besides those that were `there` before."""
    with torch.no_grad(), _Allocations(there) as seen:
        out = run()
    del out
    return seen.peak


class _Allocations(TorchDispatchMode):
    """Counts the bytes of the storages that ops make, as long as something holds these."""

    def __init__(self, operands: list[Any]) -> None:
        """The storages of `operands` are there before."""
        super().__init__()
        self.allocated = self.peak = 0
        self._known = weakref.WeakSet(t.untyped_storage() for t in operands if _has_storage(t))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in filter(_has_storage, tree_leaves(out)):
            storage = t.untyped_storage()
            if storage not in self._known:
                self._known.add(storage)
                size = example(storage.nbytes())
                self.allocated += size
                self.peak = max(self.peak, self.allocated)
                weakref.finalize(storage, self._free, size).atexit = False
        return out

    def _free(self, size: int) -> None:
        self.allocated -= size


def _has_storage(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.layout is torch.strided
