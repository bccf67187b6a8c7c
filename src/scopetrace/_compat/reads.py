"""Python's ways to the value of a tensor or symbolic number on which torch asks nobody, or has no C++ for symbols."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from scopetrace._compat.dispatch import eager
from scopetrace._compat.shape_env import MACHINERY

_Symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Reader(Protocol):
    """Who is asked for values."""

    def on_number(self, x: Any) -> Any:
        """A tensor with one element, or a symbolic number, becomes text or a key. The number, or NotImplemented."""

    def on_numpy(self, t: torch.Tensor) -> Any:
        """A tensor becomes an array of NumPy. The tensor to take it from, or NotImplemented."""


def report_reads(stack: contextlib.ExitStack, observer: Reader, mine: Callable[[], bool]) -> None:
    """The ways from a tensor or a symbolic number to its value on which torch asks nobody; until `stack` is left."""
    to_array, to_text, take, make = torch.Tensor.numpy, torch.Tensor.__format__, torch.Tensor.__getitem__, torch.tensor

    def numpy(self: torch.Tensor, *, force: bool = False) -> Any:
        found = observer.on_numpy(self) if mine() else NotImplemented
        if found is NotImplemented:
            return to_array(self, force=force)
        with eager():
            array = to_array(found, force=force)
        array.flags.writeable = False  # what is written to it would not be in the graph
        return array

    def __format__(self: torch.Tensor, spec: str) -> str:
        found = observer.on_number(self) if mine() and self.dim() == 0 else NotImplemented
        return to_text(self, spec) if found is NotImplemented else format(found, spec)

    def __getitem__(self: torch.Tensor, index: Any) -> Any:
        items = index if isinstance(index, tuple) else (index,)
        if not (mine() and any(isinstance(item, torch.SymInt) for item in items)):
            return take(self, index)
        selected, rest = _select_symbols(self, items)
        return selected if all(map(_is_everything, rest)) else take(selected, rest)

    def tensor(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        symbolic = mine() and any(isinstance(a, _Symbolic) for a in pytree.tree_leaves(data))
        found: torch.Tensor = (torch._refs.tensor if symbolic else make)(data, *args, **kwargs)
        return found

    _patch(stack, torch, "tensor", tensor)
    _patch(stack, torch.Tensor, "__getitem__", __getitem__)
    _patch(stack, torch.Tensor, "numpy", numpy)
    _patch(stack, torch.Tensor, "__format__", __format__)
    for cls in (torch.SymInt, torch.SymFloat):
        for name in ("__hash__", "__str__"):
            _patch(stack, cls, name, _read_by_the_model(getattr(cls, name), observer, mine))


def _read_by_the_model(outer: Callable[[Any], Any], observer: Reader, mine: Callable[[], bool]) -> Callable[[Any], Any]:
    """`hash` and `str` of a symbolic number: those of the number itself where the model's own code asks."""

    def read(self: Any) -> Any:
        asks = mine() and not sys._getframe(1).f_code.co_filename.startswith(MACHINERY)
        found = observer.on_number(self) if asks else NotImplemented
        return outer(self) if found is NotImplemented else getattr(found, outer.__name__)()

    read.__name__ = outer.__name__
    return read


def _select_symbols(t: torch.Tensor, items: tuple[Any, ...]) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Take the symbolic integers of an index first, as torch does with all integers, and say what is left to take.

    C++ takes them too, but asks for their values.
    """
    ellipsis = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    skipped = t.dim() - sum(map(_dims, items))
    for i in reversed(range(len(items))):
        if isinstance(items[i], torch.SymInt):
            t = t.select(sum(map(_dims, items[:i])) + (skipped if i > ellipsis else 0), items[i])
    return t, tuple(item for item in items if not isinstance(item, torch.SymInt))


def _is_everything(item: Any) -> bool:
    return item is Ellipsis or (isinstance(item, slice) and item == slice(None))


def _dims(item: Any) -> int:
    """How many dimensions an item of an index is about."""
    if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.dim()
    return 0 if item is None or item is Ellipsis or isinstance(item, bool) else 1


def _patch(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a class until `stack` is left."""
    if name in owner.__dict__:
        stack.callback(setattr, owner, name, owner.__dict__[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)
