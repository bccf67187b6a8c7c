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
from typing import Any, Literal, NamedTuple

import torch

from scopetrace._compat.symbols import (
    example,
    is_static,
    quotient,
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
class Split:
    """Parts along dimension `dim`: of these lengths, or of one length each but for the last one."""

    dim: int
    length: Int | tuple[Int, ...]

    def start(self, part: int) -> Int:
        """Where a part begins."""
        return sum(self.length[:part]) if isinstance(self.length, tuple) else part * self.length


@dataclasses.dataclass(frozen=True)
class Unbind:
    """A `Select` for each index of dimension `dim`."""

    dim: int


ViewArguments = Permute | Unsqueeze | Select | Slice | Expand | Reshape | Split | Unbind


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


def _split(size: Sizes, length: Int | Sizes, dim: int = 0) -> Split:
    return Split(_dim(dim, len(size)), tuple(length) if isinstance(length, Sequence) else length)


def _chunk(size: Sizes, chunks: int, dim: int = 0) -> Split | None:
    d = _dim(dim, len(size))
    return Split(d, (size[d] + chunks - 1) // chunks) if chunks >= 1 else None


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
    _aten.unbind.int: lambda size, dim=0: Unbind(_dim(dim, len(size))),
}
VIEW_OPS = _PARSERS.keys()
"""The ops that `view_arguments` knows."""


# ---------------------------------------------------------------- layouts of whole tensors


def dense_strides(t: torch.Tensor) -> tuple[Int, ...] | None:
    """As products of sizes, those of one without gaps or overlaps, its dimensions in any order; None for others."""
    strides: list[Any] = list(t.stride())
    left = [d for d, n in enumerate(t.size()) if not _is(n, 1)]
    exprs = _strides(t)
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


def has_fixed_order(t: torch.Tensor) -> bool:
    """Whether the dimensions are known to lie in memory in one order for all sizes."""
    return is_static(t.stride()) or dense_strides(t) is not None


def strides_in_order_of(out: torch.Tensor, size: Sizes, number: Callable[[Any], int]) -> tuple[Int, ...] | None:
    """Dense strides for `size` in the order of `out`; None where those of `out`, for `number` of these, are others."""
    strides: list[Any] = [1] * len(size)
    reach: Any = 1
    for d in sorted(range(len(size)), key=lambda d: (out.stride(d), out.shape[d] != 1, -d)):
        if number(reach) != out.stride(d):
            return None
        strides[d] = reach
        reach = reach * size[d]
    return tuple(strides)


# ---------------------------------------------------------------- the same memory in another shape


def reshape_strides(t: torch.Tensor, size: Sizes) -> tuple[Int, ...] | Literal[False] | None:
    """The strides of `t` seen in another size; False where it cannot be, at any size; None where it is not known."""
    of_example = _example_strides(t, size)
    if is_static((*t.size(), *t.stride(), *size)):
        return of_example
    strides = row_major_strides(size) if is_contiguous(t) else _Regrouping(t, size).strides()
    if strides is None or strides is False:
        return False if strides is False and of_example is False else None
    return strides if of_example == tuple([example(n) for n in strides]) else None


def _example_strides(t: torch.Tensor, size: Sizes) -> tuple[int, ...] | Literal[False]:
    """As `reshape_strides`, for the example's sizes."""
    old, stride, new = ([example(n) for n in numbers] for numbers in (t.size(), t.stride(), size))
    with without_dispatch():
        try:
            return torch.empty_strided(old, stride, device="meta").view(new).stride()
        except RuntimeError:
            return False


class _Regrouping:
    """torch's `computeStride` (aten/src/ATen/TensorUtils.cpp), where products are equal if their expressions are.

    The old dimensions fall into groups without gaps. New dimensions are made of one group after the other, from the
    last to the first.
    """

    def __init__(self, t: torch.Tensor, new_size: Sizes) -> None:
        self.size, self.stride, self.new_size = list(t.size()), list(t.stride()), new_size
        self.exprs = _strides(t)
        self.result: list[Any] = [1] * len(new_size)
        self.old, self.new = len(self.size) - 1, len(new_size) - 1
        self.matched_by_rest = False
        """Whether the products of one group are equal only because those of all other groups and of the whole are."""

    def strides(self) -> tuple[Int, ...] | Literal[False] | None:
        """The strides for the new size, as `reshape_strides` gives them."""
        while self.new >= 0:
            self._skip_ones()
            if _is(self.new_size[self.new], 1):
                self.result[self.new] = self._stride_of_one(self.new)
                self.new -= 1
                continue
            fits = self._match_group() if self.old >= 0 else None
            if fits is None or not fits:
                return None if fits is None else False
        self._skip_ones()
        return tuple(self.result) if self.old < 0 else None

    def _skip_ones(self) -> None:
        while self.old >= 0 and _is(self.size[self.old], 1):
            self.old -= 1

    def _stride_of_one(self, d: int) -> Any:
        return self.result[d + 1] * self.new_size[d + 1] if d + 1 < len(self.new_size) else self.stride[-1]

    def _match_group(self) -> bool | None:
        """Take the next dimensions of both that have the same product. False: they have a gap; None: not known."""
        base, reach, wanted = self.stride[self.old], self.size[self.old], self.new_size[self.new]
        self.result[self.new] = base
        self.old, self.new = self.old - 1, self.new - 1
        while not surely_equal(reach, wanted):
            if self.old >= 0 and quotient(to_expr(wanted), to_expr(reach)) is not None:
                gap = self.exprs[self.old], to_expr(base) * to_expr(reach)
                if not surely_equal(*gap):
                    return False if _differ(*gap) else None
                reach, self.old = reach * self.size[self.old], self.old - 1
            elif self.new >= 0 and example(reach) >= example(wanted * self.new_size[self.new]):
                self.result[self.new] = base * wanted
                wanted, self.new = wanted * self.new_size[self.new], self.new - 1
            else:
                sure = not self.matched_by_rest and example(reach) == example(wanted)
                self.matched_by_rest = True
                return sure or None
        return True


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
        case Select():
            return _place_selected(size, stride, view)
        case Unbind(d):
            n = size[d]
            places = [_place_selected(size, stride, Select(d, i)) for i in range(n if type(n) is int else 0)]
            return [place for place in places if place is not None] if places and None not in places else None
        case Slice():
            return _place_slice(size, stride, view)
        case Split():
            return _place_parts(size, stride, view)
        case Expand():
            return _place_expanded(size, stride, view)
        case Reshape(wanted):
            strides = reshape_strides(t, wanted)
            return None if strides is None or strides is False else Placement(wanted, strides, 0)
    return None


def _place_selected(size: tuple[Int, ...], stride: tuple[Int, ...], view: Select) -> Placement | None:
    d, index = view.dim, view.index
    n, step = size[d], stride[d]
    if type(n) is not int or type(index) is not int or type(step) is not int or not -n <= index < n:
        return None
    return Placement(size[:d] + size[d + 1 :], stride[:d] + stride[d + 1 :], index % n * step)


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


def _place_parts(size: tuple[Int, ...], stride: tuple[Int, ...], view: Split) -> list[Placement] | None:
    n, length = size[view.dim], view.length
    if not is_static((n, *(length if isinstance(length, tuple) else (length,)))):
        return None
    if not isinstance(length, tuple):
        length = (length,) * -(-n // length) if length > 0 else ()  # the last part ends with the dimension
    elif sum(length) != n or min(length, default=0) < 0:
        return None
    starts = itertools.accumulate(length, initial=0)
    parts = [Slice(view.dim, start, start + part, 1) for start, part in zip(starts, length, strict=False)]
    places = [_place_slice(size, stride, part) for part in parts]
    return [place for place in places if place is not None] if places and None not in places else None


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


# ---------------------------------------------------------------- numbers


def _strides(t: torch.Tensor) -> list[Any]:
    """The strides as expressions, without the `Max(1, n)` by which torch counts empty dimensions as one element."""
    sizes = [to_expr(n) for n in t.size()]
    return [without_floor(s, sizes) if isinstance(s, torch.SymInt) else s for s in t.stride()]


def _differ(a: Any, b: Any) -> bool:
    """Whether two strides differ at all sizes, since one is a multiple of the other."""
    return any(type(q) is int and q != 1 for q in (quotient(a, b), quotient(b, a)))


def _is(n: Any, value: int) -> bool:
    """Whether a size is this plain number; to compare a symbolic one would add a guard."""
    return type(n) is int and n == value
