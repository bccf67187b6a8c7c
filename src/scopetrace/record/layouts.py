"""How tensors of symbolic size lie in memory, by their expressions: an answer holds at all sizes, or there is none.

Tensors without elements are left out: their strides say nothing.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any, Literal

import torch

from scopetrace._compat.symbols import bare, difference, example, is_static, quotient, surely_equal, without_floor

Sizes = Sequence[Any]
"""Numbers, symbolic ones too."""


def gapless_strides(t: torch.Tensor) -> tuple[Any, ...] | None:
    """The strides of a tensor that is laid out without gaps, as products of its sizes; None for other layouts."""
    strides: list[Any] = list(t.stride())
    left = [d for d, n in enumerate(t.size()) if not (type(n) is int and n == 1)]
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


def keeps_order(t: torch.Tensor) -> bool:
    """Whether the order of the dimensions in memory is the same for all sizes, and none reaches into the next one."""
    if is_static(t.stride()) or gapless_strides(t) is not None:
        return True
    given = _strides(t)
    order = [d for d, n in enumerate(t.size()) if not (type(n) is int and n == 1) and not _is_zero(given[d])]
    order.sort(key=lambda d: (example(t.stride(d)), -d))
    return all(_holds(given[outer], given[inner], t.size(inner)) for inner, outer in itertools.pairwise(order))


def _holds(outer: Any, inner: Any, n: Any) -> bool:
    """Whether a step of `outer` passes over `n` steps of `inner`."""
    steps = quotient(outer, inner)
    if steps is None:
        return False
    more = difference(steps, n)
    return more >= 0 if type(more) is int else quotient(steps, bare(n)) is not None


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
    size, stride = list(t.size()), list(t.stride())
    if _contiguous(t):
        return list(itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1))[::-1][: len(shape)]
    found: list[Any] = [1] * len(shape)
    old, new = len(size) - 1, len(shape) - 1
    given = _strides(t)
    while new >= 0:
        if type(shape[new]) is int and shape[new] == 1:
            found[new] = found[new + 1] * shape[new + 1] if new + 1 < len(shape) else stride[-1]
            new -= 1
            continue
        while old >= 0 and type(size[old]) is int and size[old] == 1:
            old -= 1
        if old < 0:
            return None
        base, reach, wanted = stride[old], size[old], shape[new]
        found[new] = base
        old, new = old - 1, new - 1
        while not surely_equal(reach, wanted):
            if old >= 0 and quotient(bare(wanted), bare(reach)) is not None:  # the new one takes in one more old one
                if not surely_equal(given[old], bare(base) * bare(reach)):
                    return False if _differ(given[old], bare(base) * bare(reach)) else None
                reach, old = reach * size[old], old - 1
            elif new >= 0 and quotient(bare(reach), bare(wanted)) is not None:  # the old one takes in one more new one
                found[new] = base * wanted
                wanted, new = wanted * shape[new], new - 1
            else:
                return None
    return found if all(type(n) is int and n == 1 for n in size[: old + 1]) else None


def _differ(a: Any, b: Any) -> bool:
    """Whether two strides are surely not equal, as one is a multiple of the other."""
    return any(type(q) is int and q != 1 for q in (quotient(a, b), quotient(b, a)))


def _contiguous(t: torch.Tensor) -> bool:
    found, reach = gapless_strides(t), 1
    for n, stride in zip(reversed(t.size()), reversed(found or ()), strict=False):
        if not surely_equal(stride, reach) and not (type(n) is int and n == 1):
            return False
        reach = reach * n
    return found is not None


def _strides(t: torch.Tensor) -> list[Any]:
    """The strides as expressions. torch counts at least one element in each dimension."""
    sizes = [bare(n) for n in t.size()]
    return [without_floor(s, sizes) if isinstance(s, torch.SymInt) else s for s in t.stride()]


def _is_zero(n: Any) -> bool:
    return type(n) is int and n == 0
