"""What Python, and torch's C++, ask of symbolic numbers in a trace: answers as of Python's numbers."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import is_batchedtensor
from torch._prims_common import number_type, type_to_dtype
from torch.utils._pytree import tree_leaves

from scopetrace._compat.replaced import Interception
from scopetrace._compat.symbols import Symbolic
from scopetrace.sources import TORCH_DIRECTORY, asked_by_model, asking_frame, prefixes

_PYTHON_TYPES: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


def behave_as_numbers(torch_calls: Interception) -> None:
    """`isinstance` and `__class__` say to the model's code what they say of Python's numbers."""
    is_observed = torch_calls.is_observed

    def get(self: Any, name: str) -> Any:
        if name == "__class__" and is_observed() and asked_by_model():
            return _PYTHON_TYPES.get(type(self), type(self))
        return object.__getattribute__(self, name)

    def rounded(ask: Callable[..., Any], number: torch.SymInt, ndigits: int | None = None) -> Any:
        """Torch's gives the number itself for negative `ndigits` too."""
        return ask(number, ndigits) if ndigits is None or ndigits >= 0 else round(int(number), ndigits)

    def equal(ask: Callable[..., Any], number: Any, other: Any) -> Any:
        """As of a bool, which equals numbers."""
        if isinstance(other, torch.SymBool):
            return ask(number, other)
        if isinstance(other, bool):
            return number if other else torch.sym_not(number)
        return number + 0 == other

    for cls in _PYTHON_TYPES:
        torch_calls.put(cls, "__getattribute__", get)
    torch_calls.replace(torch.SymInt, "__round__", rounded)
    torch_calls.replace(torch.SymBool, "__eq__", equal)
    torch_calls.replace(torch.SymBool, "__ne__", lambda _, number, other: torch.sym_not(number == other))
    torch_calls.put(torch.SymBool, "__index__", lambda self: int(bool(self)))


_SHAPE_FUNCTIONS = prefixes(TORCH_DIRECTORY, "_meta_registrations.py")


def index_with_symbols(torch_calls: Interception) -> None:
    """Handle indexing, `torch.tensor`, `as_tensor` and `ctc_loss`: C++ asks for the values of symbolic integers.

    In an index it also asks for those of tensors without dimensions, which are numbers there: `table[step]`.
    """

    def getitem(ask: Callable[..., Any], t: torch.Tensor, index: Any) -> Any:
        index, items = _with_numbers(index)
        if not any(isinstance(item, torch.SymInt) for item in items):
            return ask(t, index)
        selected, rest = _select_symbols(t, items)
        is_whole = all(item is Ellipsis or (isinstance(item, slice) and item == slice(None)) for item in rest)
        return selected if is_whole else ask(selected, rest)

    def setitem(ask: Callable[..., Any], t: torch.Tensor, index: Any, value: Any) -> None:
        index, items = _with_numbers(index)
        if any(isinstance(item, torch.SymInt) for item in items):
            t, items = _select_symbols(t, items)
            index = items or ...
        ask(t, index, value)

    def ctc_loss(ask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def as_tensor(lengths: Any) -> Any:
            return torch._refs.tensor(lengths, device="cpu") if isinstance(lengths, (list, tuple)) else lengths

        if any(isinstance(n, Symbolic) for n in tree_leaves((args, kwargs))):
            args, kwargs = tuple(map(as_tensor, args)), {name: as_tensor(x) for name, x in kwargs.items()}
        return ask(*args, **kwargs)

    torch_calls.on(torch.ctc_loss, ctc_loss)
    torch_calls.on(torch.tensor, _tensor)
    torch_calls.on(torch.as_tensor, _tensor)
    torch_calls.on(torch.Tensor.__getitem__, getitem)
    torch_calls.on(torch.Tensor.__setitem__, setitem)


_NUMBERS = (bool, int, float, complex, *Symbolic)


def _tensor(ask: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
    items = tree_leaves(data)
    if not all(type(a) in _NUMBERS or isinstance(a, torch.Tensor) for a in items):
        return ask(data, *args, **kwargs)  # numbers of NumPy have dtypes
    if isinstance(data, (list, tuple)) and any(isinstance(a, torch.Tensor) for a in items):
        return _stack(ask, data, items, *args, **kwargs)
    symbolic = any(isinstance(a, Symbolic) for a in items)
    frame = asking_frame() if symbolic else None
    if frame is not None and frame.f_code.co_filename.startswith(_SHAPE_FUNCTIONS):
        data, symbolic = 1, False  # only its dtype matters there: that of a whole number
    return (torch._refs.tensor if symbolic else ask)(data, *args, **kwargs)


def _stack(ask: Callable[..., Any], x: Any, items: list[Any], dtype: Any = None, device: Any = None, **kw: Any) -> Any:
    """The tensor of a list with tensors of one element in it, for whose data C++ would ask."""
    dtypes = [a.dtype if isinstance(a, torch.Tensor) else type_to_dtype(number_type(a)) for a in items]
    common = functools.reduce(torch.promote_types, dtypes)
    if any(kw.values()) or not torch.can_cast(common, dtype or common):
        return ask(x, dtype=dtype, device=device, **kw)
    if isinstance(x, (list, tuple)):
        return torch.stack([_stack(ask, item, items, dtype, device) for item in x])
    if isinstance(x, torch.Tensor):
        return x.detach().reshape(()).to(device or torch.get_default_device(), dtype or common)
    return (torch._refs.tensor if isinstance(x, Symbolic) else ask)(x, dtype=dtype or common, device=device)


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


def _with_numbers(index: Any) -> tuple[Any, tuple[Any, ...]]:
    """An index with numbers in the place of tensors that stand for them, and its items."""
    items = index if isinstance(index, tuple) else (index,)
    numbers = tuple(map(_number_of, items))
    if all(map(operator.is_, numbers, items)):
        return index, items
    return (numbers if items is index else numbers[0]), numbers


def _number_of(item: Any) -> Any:
    """An item of an index, with the numbers of tensors without dimensions in their place."""
    if isinstance(item, torch.Tensor) and item.dim() == 0 and item.dtype in _INTEGERS and not is_batchedtensor(item):
        return item.item()  # a batched one, of torch.vmap, is many numbers
    if isinstance(item, slice) and any(isinstance(n, torch.Tensor) for n in (item.start, item.stop, item.step)):
        return slice(*map(_number_of, (item.start, item.stop, item.step)))
    return item


def _select_symbols(t: torch.Tensor, items: tuple[Any, ...]) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Apply the symbolic integers of an index, as `select`; torch too applies integers before the other items.

    Returns the selected tensor and the other items.
    """
    ellipsis = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    skipped = t.dim() - sum(map(_dims, items))
    for i in reversed(range(len(items))):
        if isinstance(items[i], torch.SymInt):
            t = t.select(sum(map(_dims, items[:i])) + (skipped if i > ellipsis else 0), items[i])
    return t, tuple(item for item in items if not isinstance(item, torch.SymInt))


def _dims(item: Any) -> int:
    """How many dimensions an item of an index consumes."""
    if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.dim()
    return 0 if item is None or item is Ellipsis or isinstance(item, bool) else 1
