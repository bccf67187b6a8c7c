"""View ops: what their arguments say, and how tensors and their views lie in memory.

Data flow:
    op + size of the base + arguments after the base -> one of the classes here, with dimensions counted from the front
    fake tensor + that class, or a new size -> strides as products of sizes, for plain and symbolic sizes; or None

`infer` derives sizes, strides and offset of the view from it; functionalization derives the op that puts a new value of
the view into its base. Sizes and indices may be symbolic. None: the op is not in the table, or an argument is out of
range.

An answer on strides holds for every value of the symbols; None means that no answer does, or that it is not known.
Nothing here asks the ShapeEnv, so no guard is added. Tensors without elements are left to torch: their strides follow
other rules.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from scopetrace._compat.symbols import (
    example,
    is_static,
    row_major_strides,
    surely_equal,
    to_expr,
    whole_quotient,
    without_floor,
)
from scopetrace._compat.tensors import without_dispatch

Int = int | torch.SymInt
Sizes = Sequence[Int]
TO_THE_END = 2**63 - 1
"""The `end` that Python's `x[1:]` becomes."""


@dataclasses.dataclass(frozen=True)
class Permute:
    """Dimension i of the view is dimension `dims[i]` of the base."""

    dims: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Unsqueeze:
    """A new dimension of size 1 before dimension `dim` of the base."""

    dim: int


@dataclasses.dataclass(frozen=True)
class Select:
    """The elements at one index of dimension `dim`, which the view lacks. A negative index counts from the end."""

    dim: int
    index: Int


@dataclasses.dataclass(frozen=True)
class Slice:
    """`base[start:end:step]` in dimension `dim`, as in Python: negative bounds count from the end."""

    dim: int
    start: Int
    end: Int
    step: Int

    def is_whole(self) -> bool:
        """Whether it takes every element, whatever the size."""
        return _is(self.start, 0) and _is(self.end, TO_THE_END) and _is(self.step, 1)


@dataclasses.dataclass(frozen=True)
class Expand:
    """Dimensions of size 1 repeated, and new ones in front; -1 keeps the size of the base."""

    size: tuple[Int, ...]


@dataclasses.dataclass(frozen=True)
class Reshape:
    """All elements in the same order, in another size."""

    size: tuple[Int, ...]


@dataclasses.dataclass(frozen=True)
class Parts:
    """Several views of the base, as `split` and `unbind` give."""

    count: Int | None
    """None where it is not known."""
    part: Callable[[int], Slice | Select]
    """The view at a position. Of a slice, the end may be past that of the dimension."""


ViewArguments = Permute | Unsqueeze | Select | Slice | Expand | Reshape | Parts


def view_arguments(func: Any, size: Sizes, args: Sequence[Any]) -> ViewArguments | None:
    """What `func(base, *args)` makes of a base of this size."""
    parse = _PARSERS.get(func)
    try:
        return None if parse is None else parse(size, *args)
    except IndexError:
        return None


def _dim(dim: int, rank: int) -> int:
    """The dimension counted from the front. Raises IndexError where there is none."""
    return range(rank)[dim]


def _permute(size: Sizes, dims: Sequence[int]) -> Permute | None:
    order = tuple([_dim(d, len(size)) for d in dims])
    return Permute(order) if sorted(order) == list(range(len(size))) else None


def _transpose(size: Sizes, first: int, second: int) -> Permute:
    a, b = _dim(first, len(size)), _dim(second, len(size))
    dims = list(range(len(size)))
    dims[a], dims[b] = b, a
    return Permute(tuple(dims))


def _reverse(size: Sizes) -> Permute:
    return Permute(tuple(reversed(range(len(size)))))


def _slice(size: Sizes, dim: int = 0, start: Int | None = None, end: Int | None = None, step: Int = 1) -> Slice:
    return Slice(_dim(dim, len(size)), 0 if start is None else start, TO_THE_END if end is None else end, step)


def _narrow(size: Sizes, dim: int, start: Int, length: Int) -> Slice | None:
    d = _dim(dim, len(size))
    if isinstance(start, torch.Tensor):
        return None
    if all(type(n) is int for n in (size[d], start, length)):
        start = start + size[d] if start < 0 else start
        if not 0 <= start <= start + length <= size[d]:
            return None
    return Slice(d, start, start + length, 1)


def _expand(size: Sizes, wanted: Sizes, *, implicit: bool = False) -> Expand | None:
    return Expand(tuple(wanted)) if len(wanted) >= len(size) else None


def _reshape(size: Sizes, wanted: Sizes) -> Reshape | None:
    rest = [d for d, n in enumerate(wanted) if _is(n, -1)]
    new: list[Any] = list(wanted)
    numel, known = math.prod(size), math.prod(n for n in wanted if not _is(n, -1))
    if len(rest) == 1:
        new[rest[0]] = whole_quotient(numel, known)
        if new[rest[0]] is None or example(new[rest[0]]) * example(known) != example(numel):
            return None
    elif rest or not surely_equal(known, numel):
        return None
    return Reshape(tuple(new))


def _flatten(size: Sizes, start: int = 0, end: int = -1) -> Reshape | None:
    first, last = _dim(start, len(size)), _dim(end, len(size))
    if first >= last:
        return None  # torch gives the tensor itself, or raises
    return Reshape((*size[:first], math.prod(size[first : last + 1]), *size[last + 1 :]))


def _split(size: Sizes, length: Int | Sizes, dim: int = 0) -> Parts | None:
    d = _dim(dim, len(size))
    if not isinstance(length, Sequence):
        count = -(-size[d] // length) if is_static((size[d], length)) and length > 0 else None
        return Parts(count, lambda i: Slice(d, i * length, (i + 1) * length, 1))
    if is_static((size[d], *length)) and (sum(length) != size[d] or min(length, default=0) < 0):
        return None  # torch raises
    ends = [*itertools.accumulate(length, initial=0)]
    return Parts(len(length), lambda i: Slice(d, ends[i], ends[i + 1], 1))


def _chunk(size: Sizes, chunks: int, dim: int = 0) -> Parts | None:
    d = _dim(dim, len(size))
    return _split(size, (size[d] + chunks - 1) // chunks, d) if chunks >= 1 else None


def _unbind(size: Sizes, dim: int = 0) -> Parts:
    d = _dim(dim, len(size))
    return Parts(size[d], lambda i: Select(d, i))


_aten = torch.ops.aten
_PARSERS: dict[Any, Callable[..., ViewArguments | None]] = {
    _aten.permute.default: _permute,
    _aten.transpose.int: _transpose,
    _aten.swapaxes.default: _transpose,
    _aten.swapdims.default: _transpose,
    _aten.t.default: lambda size: _reverse(size) if len(size) <= 2 else None,
    _aten.numpy_T.default: _reverse,
    _aten.mT.default: lambda size: _transpose(size, -2, -1),
    _aten.unsqueeze.default: lambda size, dim: Unsqueeze(_dim(dim, len(size) + 1)),
    _aten.select.int: lambda size, dim, index: Select(_dim(dim, len(size)), index),
    _aten.slice.Tensor: _slice,
    _aten.narrow.default: _narrow,
    _aten.expand.default: _expand,
    _aten.reshape.default: _reshape,
    _aten.view.default: _reshape,
    _aten._unsafe_view.default: _reshape,
    _aten.flatten.using_ints: _flatten,
    _aten.split.Tensor: _split,
    _aten.split.sizes: _split,
    _aten.split_with_sizes.default: _split,
    _aten.chunk.default: _chunk,
    _aten.unbind.int: _unbind,
}
VIEW_OPS = _PARSERS.keys()
"""The ops that `view_arguments` knows."""


# ---------------------------------------------------------------- layouts of whole tensors


def dense_strides(t: torch.Tensor) -> tuple[Int, ...] | None:
    """As products of sizes, those of one without gaps or overlaps, its dimensions in any order; None for others."""
    strides: list[Any] = list(t.stride())
    left = [d for d, n in enumerate(t.size()) if not _is(n, 1)]
    sizes = [to_expr(n) for n in t.size()]
    # without the `Max(1, n)` by which torch counts empty dimensions as one element
    exprs = [without_floor(s, sizes) if isinstance(s, torch.SymInt) else s for s in t.stride()]
    reach: Any = 1
    while left:
        innermost = next((d for d in left if surely_equal(exprs[d], reach)), None)
        if innermost is None:
            return None
        strides[innermost] = reach
        reach = reach * t.size(innermost)
        left.remove(innermost)
    return tuple(strides)


def is_contiguous(t: torch.Tensor) -> bool:
    """Whether the elements lie in row-major order, without gaps."""
    dense = dense_strides(t)
    rows = zip(t.size(), dense or (), row_major_strides(t.size()), strict=False)
    return dense is not None and all(_is(n, 1) or surely_equal(a, b) for n, a, b in rows)


def strides_in_order_of(strides: Sizes, size: Sizes, number: Callable[[Any], int]) -> tuple[Int, ...] | None:
    """Dense strides for `size` in the order of `strides`; None where these are not so for `number` of `size`."""
    new: list[Any] = [1] * len(size)
    reach: Any = 1
    for d in sorted(range(len(size)), key=lambda d: (strides[d], number(size[d]) != 1, -d)):
        if number(reach) != strides[d]:
            return None
        new[d] = reach
        reach = reach * size[d]
    return tuple(new)


def reshape_strides(t: torch.Tensor, size: Sizes) -> tuple[Int, ...] | None:
    """The strides of `t` seen in another size; None where it cannot be seen so, or that is not known for all sizes."""
    is_fixed = is_static((*t.size(), *t.stride(), *size))
    if not is_fixed and not is_contiguous(t):
        return None
    old, stride, new = ([example(n) for n in numbers] for numbers in (t.size(), t.stride(), size))
    with without_dispatch():
        try:
            of_example = torch.empty_strided(old, stride, device="meta").view(new).stride()
        except RuntimeError:
            return None
    strides = of_example if is_fixed else row_major_strides(size)
    return strides if of_example == tuple([example(n) for n in strides]) else None


# ---------------------------------------------------------------- views


class Placement(NamedTuple):
    """Where a view lies: its size and strides, and how many elements it starts after its base."""

    size: tuple[Int, ...]
    stride: tuple[Int, ...]
    offset: Int


def place_view(t: torch.Tensor, view: ViewArguments) -> Placement | list[Placement] | None:
    """Where the view, or each of the views, lies in `t`. None where that is not known, or torch would raise."""
    size, stride = tuple(t.size()), tuple(t.stride())
    match view:
        case Permute(dims):
            return Placement(tuple([size[d] for d in dims]), tuple([stride[d] for d in dims]), 0)
        case Unsqueeze(d):
            new = size[d] * stride[d] if d < len(size) else 1
            return Placement((*size[:d], 1, *size[d:]), (*stride[:d], new, *stride[d:]), 0)
        case Select(d, index):
            if type(size[d]) is int and type(index) is int and type(stride[d]) is int and -size[d] <= index < size[d]:
                return Placement(size[:d] + size[d + 1 :], stride[:d] + stride[d + 1 :], index % size[d] * stride[d])
        case Parts(count, part):
            places = [place_view(t, part(i)) for i in range(count if type(count) is int else 0)]
            return [p for p in places if isinstance(p, Placement)] if places and None not in places else None
        case Slice():
            return _place_slice(size, stride, view)
        case Expand():
            return _place_expanded(size, stride, view)
        case Reshape(wanted):
            strides = reshape_strides(t, wanted)
            return None if strides is None else Placement(wanted, strides, 0)
    return None


def _place_slice(size: tuple[Int, ...], stride: tuple[Int, ...], view: Slice) -> Placement | None:
    d, n, step = view.dim, size[view.dim], stride[view.dim]
    if view.is_whole():
        return Placement(size, stride, 0)
    if type(n) is not int or type(step) is not int or not is_static((view.start, view.end, view.step)) or view.step < 1:
        return None
    taken = range(n)[view.start : view.end : view.step]
    return Placement(
        (*size[:d], len(taken), *size[d + 1 :]), (*stride[:d], step * view.step, *stride[d + 1 :]), taken.start * step
    )


def _place_expanded(old_size: tuple[Int, ...], old_stride: tuple[Int, ...], view: Expand) -> Placement | None:
    size: list[Any] = list(view.size)
    stride: list[Any] = [0] * len(size)
    new = len(size) - len(old_size)
    for d in range(len(size) - 1, -1, -1):
        outside = size[d + 1] * stride[d + 1] if d + 1 < len(size) else 0
        old, step = (old_size[d - new], old_stride[d - new]) if d >= new else (1, outside)
        if (_is(size[d], -1) and d >= new) or surely_equal(size[d], old):
            size[d], stride[d] = old, step
        elif not _is(old, 1) or (type(size[d]) is int and size[d] < 1):
            return None
    return Placement(tuple(size), tuple(stride), 0)


def _is(n: Any, value: int) -> bool:
    """Whether a size is this plain number; to compare a symbolic one would add a guard."""
    return type(n) is int and n == value
