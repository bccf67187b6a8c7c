"""Geometry of the commonest views where sizes are symbolic: for each op its size, stride and offset from its input.

Dimensions that a rule computes with are plain numbers; where they are not, or an argument is out of range, the rule
gives None, and torch says what comes out.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from scopetrace._compat.symbols import example, is_static, surely_equal, whole_quotient
from scopetrace.infer.layouts import row_major

Geometry = tuple[Sequence[Any], Sequence[Any], int]
_END = 2**63 - 1
"""The `stop` of a slice that goes to the end."""


def _permute(x: torch.Tensor, dims: Sequence[int]) -> Geometry | None:
    if sorted(d % max(1, x.dim()) for d in dims) != list(range(x.dim())):
        return None
    return [x.size(d) for d in dims], [x.stride(d) for d in dims], 0


def _transpose(x: torch.Tensor, a: int, b: int) -> Geometry | None:
    if not (-x.dim() <= a < x.dim() and -x.dim() <= b < x.dim()):
        return None
    dims = list(range(x.dim()))
    dims[a], dims[b] = dims[b], dims[a]
    return _permute(x, dims)


def _t(x: torch.Tensor) -> Geometry | None:
    return _permute(x, (1, 0)) if x.dim() == 2 else None


def _unsqueeze(x: torch.Tensor, d: int) -> Geometry | None:
    if not -x.dim() - 1 <= d <= x.dim():
        return None
    d %= x.dim() + 1
    new = x.size(d) * x.stride(d) if d < x.dim() else 1
    size, stride = list(x.size()), list(x.stride())
    return [*size[:d], 1, *size[d:]], [*stride[:d], new, *stride[d:]], 0


def _select(x: torch.Tensor, d: int, index: Any) -> Geometry | None:
    if not -x.dim() <= d < x.dim():
        return None
    d %= x.dim()
    n, step = x.size(d), x.stride(d)
    if type(n) is not int or type(index) is not int or type(step) is not int or not -n <= index < n:
        return None
    size, stride = list(x.size()), list(x.stride())
    return size[:d] + size[d + 1 :], stride[:d] + stride[d + 1 :], index % n * step


def _slice(x: torch.Tensor, d: int = 0, start: Any = None, stop: Any = None, step: Any = 1) -> Geometry | None:
    if not -x.dim() <= d < x.dim():
        return None
    n, stride = x.size(d), list(x.stride())
    numbers = [m for m in (start, stop, step) if m is not None]
    if any(type(m) is not int for m in numbers) or step < 1:
        return None
    if (start or 0) == 0 and (stop is None or stop == _END) and step == 1:
        return x.size(), stride, 0
    if type(n) is not int or type(stride[d]) is not int:
        return None
    first, last, step = slice(start, stop, step).indices(n)
    size = list(x.size())
    size[d] = len(range(first, last, step))
    offset = first * stride[d]
    stride[d] *= step
    return size, stride, offset


def _expand(x: torch.Tensor, shape: Sequence[Any]) -> Geometry | None:
    more = len(shape) - x.dim()
    if more < 0:
        return None
    size, stride = list(shape), [0] * len(shape)
    for d in range(len(shape) - 1, -1, -1):
        outside = size[d + 1] * stride[d + 1] if d + 1 < len(shape) else 0
        old, step = (x.size(d - more), x.stride(d - more)) if d >= more else (1, outside)
        if (type(shape[d]) is int and shape[d] == -1 and d >= more) or surely_equal(shape[d], old):
            size[d], stride[d] = old, step
        elif type(old) is not int or old != 1:
            return None
    return size, stride, 0


def _unbind(x: torch.Tensor, d: int = 0) -> list[Geometry] | None:
    n = x.size(d) if -x.dim() <= d < x.dim() else None
    return _all([_select(x, d, i) for i in range(n)]) if type(n) is int else None


def _split(x: torch.Tensor, sizes: Any, d: int = 0) -> list[Geometry] | None:
    """Into parts of one size, the last one smaller, or into parts of these sizes."""
    n = x.size(d) if -x.dim() <= d < x.dim() else None
    if type(n) is not int or n == 0 or not is_static(sizes if isinstance(sizes, (list, tuple)) else (sizes,)):
        return None
    if not isinstance(sizes, (list, tuple)):
        if sizes < 1:
            return None
        sizes = [min(sizes, n - first) for first in range(0, n, sizes)]
    ends = list(itertools.accumulate(sizes))
    if min(sizes) < 0 or ends[-1] != n:
        return None
    return _all([_slice(x, d, end - m, end) for m, end in zip(sizes, ends, strict=True)])


def _chunk(x: torch.Tensor, chunks: int, d: int = 0) -> list[Geometry] | None:
    n = x.size(d) if -x.dim() <= d < x.dim() else None
    return _split(x, -(-n // chunks), d) if type(n) is int and n > 0 and chunks > 0 else None


def _reshape(x: torch.Tensor, shape: Sequence[Any]) -> Geometry | None:
    """Another shape of what lies in rows, each a plain number but for sizes that stay as they are, or one of them."""
    if not row_major(x):
        return None
    rest = [d for d, n in enumerate(shape) if type(n) is int and n == -1]
    size, known = list(shape), math.prod(n for n in shape if not (type(n) is int and n == -1))
    if len(rest) == 1:
        size[rest[0]] = whole_quotient(x.numel(), known)
        if size[rest[0]] is None or example(size[rest[0]]) * example(known) != example(x.numel()):
            return None
    elif rest or not surely_equal(known, x.numel()):
        return None
    return size, [*itertools.accumulate(reversed(size[1:]), operator.mul, initial=1)][::-1][: len(size)], 0


def _flatten(x: torch.Tensor, start: int = 0, stop: int = -1) -> Geometry | None:
    rank = x.dim()
    if not (-rank <= start < rank and -rank <= stop < rank) or start % rank >= stop % rank:
        return None
    size = list(x.size())
    first, last = start % rank, stop % rank
    return _reshape(x, [*size[:first], math.prod(size[first : last + 1]), *size[last + 1 :]])


def _all(found: list[Geometry | None]) -> list[Geometry] | None:
    known = [geometry for geometry in found if geometry is not None]
    return known if len(known) == len(found) else None


_aten = torch.ops.aten
VIEWS: dict[Any, Callable[..., Geometry | list[Geometry] | None]] = {
    _aten.permute.default: _permute,
    _aten.transpose.int: _transpose,
    _aten.t.default: _t,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.select.int: _select,
    _aten.slice.Tensor: _slice,
    _aten.expand.default: _expand,
    _aten.unbind.int: _unbind,
    _aten.split.Tensor: _split,
    _aten.split.sizes: _split,
    _aten.split_with_sizes.default: _split,
    _aten.chunk.default: _chunk,
    _aten.reshape.default: _reshape,
    _aten.view.default: _reshape,
    _aten._unsafe_view.default: _reshape,
    _aten.flatten.using_ints: _flatten,
}
