"""Geometry of the commonest views where sizes are symbolic: for each op its size, stride and offset from its input.

Dimensions that a rule computes with are plain numbers; where they are not, or an argument is out of range, the rule
gives None, and torch says what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Geometry = tuple[Sequence[Any], Sequence[Any], int]


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
    if type(n) is not int or type(stride[d]) is not int or any(type(m) is not int for m in numbers) or step < 1:
        return None
    first, last, step = slice(start, stop, step).indices(n)
    size = list(x.size())
    size[d] = len(range(first, last, step))
    offset = first * stride[d]
    stride[d] *= step
    return size, stride, offset


_aten = torch.ops.aten
VIEWS: dict[Any, Callable[..., Geometry | None]] = {
    _aten.permute.default: _permute,
    _aten.transpose.int: _transpose,
    _aten.t.default: _t,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.select.int: _select,
    _aten.slice.Tensor: _slice,
}
