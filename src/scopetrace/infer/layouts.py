"""How tensors of symbolic size lie in memory, by their expressions: an answer holds at all sizes, or there is none.

Tensors without elements are left out: their strides say nothing.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any, Literal

import torch

from scopetrace._compat.symbols import difference, example, is_static, quotient, surely_equal, to_expr, without_floor

Sizes = Sequence[Any]
"""Numbers, symbolic ones too."""


def gapless_strides(t: torch.Tensor) -> tuple[Any, ...] | None:
    """The strides of a tensor that is laid out without gaps, as products of its sizes; None for other layouts."""
    strides: list[Any] = list(t.stride())
    left = [d for d, n in enumerate(t.size()) if not _is_one(n)]
    given = _strides(t)
    reach: Any = 1
    while left:
        found = next((d for d in left if surely_equal(given[d], reach)), None)
        if found is None:
            return None
        strides[found] = reach
        reach = reach * t.size(found)
        left.remove(found)
    return tuple(strides)


def row_major(t: torch.Tensor) -> bool:
    """Whether the strides are those of a new tensor of this size, in dimensions of size 1 too."""
    reach: Any = 1
    inner: Any = 1
    for n, stride in zip(reversed(t.size()), reversed(t.stride()), strict=True):
        reach = reach * inner
        if not surely_equal(stride, reach):
            return False
        inner = n
    return True


def keeps_order(t: torch.Tensor) -> bool:
    """Whether the order of the dimensions in memory is the same for all sizes, and none reaches into the next one."""
    if is_static(t.stride()) or gapless_strides(t) is not None:
        return True
    given = _strides(t)
    order = [d for d, n in enumerate(t.size()) if not _is_one(n) and not _is_zero(given[d])]
    order.sort(key=lambda d: (example(t.stride(d)), -d))
    return all(_holds(given[outer], given[inner], t.size(inner)) for inner, outer in itertools.pairwise(order))


def _holds(outer: Any, inner: Any, n: Any) -> bool:
    """Whether a step of `outer` passes over `n` steps of `inner`."""
    steps = quotient(outer, inner)
    if steps is None:
        return False
    more = difference(steps, n)
    return more >= 0 if type(more) is int else quotient(steps, to_expr(n)) is not None


def dense_strides(sizes: Sizes, out: torch.Tensor) -> list[Any] | None:
    """Strides without gaps in the order that `out` has; None where that is not the layout of `out`."""
    strides: list[Any] = [1] * len(sizes)
    reach: Any = 1
    for d in sorted(range(len(sizes)), key=lambda d: (out.stride(d), out.shape[d] != 1, -d)):
        if example(reach) != out.stride(d):
            return None
        strides[d] = reach
        reach = reach * sizes[d]
    return strides


def view_strides(t: torch.Tensor, shape: Sizes) -> list[Any] | Literal[False] | None:
    """The strides of `t` seen in another shape with as many elements.

    False where it cannot be seen so at any size, None where that is not sure. As in torch's `computeStride`, the
    dimensions fall into groups with equal products, each without gaps inside.
    """
    if _contiguous(t):
        return list(itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1))[::-1][: len(shape)]
    return _Regrouped(t, shape).strides()


class _Regrouped:
    """Walks through the dimensions of a tensor and those of a shape, from the last to the first."""

    def __init__(self, t: torch.Tensor, shape: Sizes) -> None:
        self.size, self.stride, self.shape = list(t.size()), list(t.stride()), shape
        self.given = _strides(t)
        self.found: list[Any] = [1] * len(shape)
        self.old, self.new = len(self.size) - 1, len(shape) - 1
        self.by_the_rest = False  # whether one group is as large as it must be if all others are

    def strides(self) -> list[Any] | Literal[False] | None:
        """The strides of the shape, as `view_strides` gives them."""
        while self.new >= 0:
            self._skip_ones()
            if _is_one(self.shape[self.new]):
                self.found[self.new] = self._beside(self.new)
                self.new -= 1
                continue
            fits = self._group() if self.old >= 0 else None
            if fits is None or not fits:
                return None if fits is None else False
        self._skip_ones()
        return self.found if self.old < 0 else None

    def _skip_ones(self) -> None:
        while self.old >= 0 and _is_one(self.size[self.old]):
            self.old -= 1

    def _beside(self, d: int) -> Any:
        return self.found[d + 1] * self.shape[d + 1] if d + 1 < len(self.shape) else self.stride[-1]

    def _group(self) -> bool | None:
        """Take the next dimensions of both that have the same product."""
        base, reach, wanted = self.stride[self.old], self.size[self.old], self.shape[self.new]
        self.found[self.new] = base
        self.old, self.new = self.old - 1, self.new - 1
        while not surely_equal(reach, wanted):
            if self.old >= 0 and quotient(to_expr(wanted), to_expr(reach)) is not None:
                gap = self.given[self.old], to_expr(base) * to_expr(reach)
                if not surely_equal(*gap):
                    return False if _differ(*gap) else None
                reach, self.old = reach * self.size[self.old], self.old - 1
            elif self.new >= 0 and example(reach) >= example(wanted * self.shape[self.new]):
                self.found[self.new] = base * wanted
                wanted, self.new = wanted * self.shape[self.new], self.new - 1
            else:
                sure = not self.by_the_rest and example(reach) == example(wanted)
                self.by_the_rest = True
                return sure or None
        return True


def _is_one(n: Any) -> bool:
    return type(n) is int and n == 1


def _differ(a: Any, b: Any) -> bool:
    """Whether two strides are surely not equal, as one is a multiple of the other."""
    return any(type(q) is int and q != 1 for q in (quotient(a, b), quotient(b, a)))


def _contiguous(t: torch.Tensor) -> bool:
    found, reach = gapless_strides(t), 1
    for n, stride in zip(reversed(t.size()), reversed(found or ()), strict=False):
        if not surely_equal(stride, reach) and not _is_one(n):
            return False
        reach = reach * n
    return found is not None


def _strides(t: torch.Tensor) -> list[Any]:
    """The strides as expressions. torch counts at least one element in each dimension."""
    sizes = [to_expr(n) for n in t.size()]
    return [without_floor(s, sizes) if isinstance(s, torch.SymInt) else s for s in t.stride()]


def _is_zero(n: Any) -> bool:
    return type(n) is int and n == 0
