"""Torch's questions of the memory of a fake tensor, without guards where the answer does not depend on a size.

Torch's shape rules ask first which sizes are 1, as these dimensions count in no stride. With a dynamic size, as that of
`x[1:]`, each such question is a guard, also where the answer is the same either way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import _prims_common, _refs

from scopetrace._compat.symbols import is_static, surely_equal

_COPY = torch.ops.aten.copy_.default
_overlap = torch._debug_has_internal_overlap
_is_contiguous = _prims_common.check_contiguous_sizes_strides
_expanded = _refs.expand
_stride_of: Any = torch._C.TensorBase.stride


def _internal_overlap(input: torch.Tensor) -> int:
    """As torch's: 1 where elements share memory, 0 where none do, 2 where that is not known."""
    if not any(isinstance(n, torch.SymInt) for n in (*input.size(), *input.stride())):
        return _overlap(input)
    expanded = [size for size, stride in zip(input.size(), input.stride(), strict=True) if surely_equal(stride, 0)]
    return 1 if any(size > 1 for size in expanded) else 2


def _contiguous(sizes: Sequence[Any], strides: Sequence[Any], false_if_dde: bool = False) -> bool:
    """As torch's: whether the strides are those of a contiguous tensor."""
    expected: Any = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if not surely_equal(stride, expected):
            return _is_contiguous(sizes, strides, false_if_dde)
        expected = expected * size
    return True


def _expand(a: torch.Tensor, *size: Any, **options: Any) -> Any:
    """As torch's, for the rule of `copy_`, which asks only whether it may be."""
    wanted = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    same = len(a.size()) == len(wanted) and all(map(surely_equal, a.size(), wanted))
    return a if same else _expanded(a, *size, **options)


@contextlib.contextmanager
def asked_without_guards(func: Any) -> Iterator[None]:
    """Inside, where torch runs the rule of `func`, they make a guard only where the answer depends on it."""
    torch._debug_has_internal_overlap = _internal_overlap
    _prims_common.check_contiguous_sizes_strides = _contiguous
    if func is _COPY:
        _refs.expand = _expand
    try:
        yield
    finally:
        torch._debug_has_internal_overlap = _overlap
        _prims_common.check_contiguous_sizes_strides = _is_contiguous
        _refs.expand = _expanded


def dense_order(t: torch.Tensor) -> list[int]:
    """The dimensions by stride, the longest first, of a tensor without gaps in memory; empty for any other."""
    size, stride = t.size(), _stride_of(t)
    dims = range(len(size))
    order = sorted(dims, key=lambda i: (-stride[i], i)) if is_static((*size, *stride)) else list(dims)
    expected = 1
    for i in reversed(order):
        if size[i] != 1 and stride[i] != expected:
            return []
        expected *= size[i]
    return order
