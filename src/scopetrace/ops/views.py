"""What a view op says of its view: the arguments of `transpose`, `slice`, `split` and their kind, read in one place.

    op + size of the base + arguments after the base -> one of the classes here, with dimensions counted from the front

`infer` derives sizes, strides and offset of the view from it; functionalization derives the op that puts a new value of
the view into its base. Sizes and indices may be symbolic. None: the op is not in the table, or an argument is out of
range.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

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
        given = (self.start, self.end, self.step)
        return all(type(n) is int for n in given) and given == (0, TO_THE_END, 1)


@dataclasses.dataclass(frozen=True)
class Expand:
    """Dimensions of size 1 repeated, and new ones in front; -1 keeps the size of the base."""

    size: tuple[Int, ...]


@dataclasses.dataclass(frozen=True)
class Reshape:
    """All elements in the same order, in another size; one -1 stands for what is left."""

    size: tuple[Int, ...]


@dataclasses.dataclass(frozen=True)
class Flatten:
    """Dimensions `start` to `end`, both counted in, as one."""

    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Split:
    """Parts along dimension `dim`; `lengths` is None where their number follows from a symbolic size."""

    dim: int
    lengths: tuple[Int, ...] | None


@dataclasses.dataclass(frozen=True)
class Unbind:
    """A `Select` for each index of dimension `dim`."""

    dim: int


ViewArguments = Permute | Unsqueeze | Select | Slice | Expand | Reshape | Flatten | Split | Unbind


def view_arguments(func: Any, size: Sizes, args: Sequence[Any]) -> ViewArguments | None:
    """What `func(base, *args)` makes of a base of this size."""
    parse = _PARSERS.get(func)
    return None if parse is None else parse(size, *args)


def _dim(dim: int, rank: int) -> int | None:
    """The dimension counted from the front; None where there is no such dimension."""
    return dim % rank if -rank <= dim < rank else None


def _permute(size: Sizes, dims: Sequence[int]) -> Permute | None:
    found = tuple([d + len(size) if d < 0 else d for d in dims])
    return Permute(found) if sorted(found) == list(range(len(size))) else None


def _transpose(size: Sizes, first: int, second: int) -> Permute | None:
    a, b = _dim(first, len(size)), _dim(second, len(size))
    if a is None or b is None:
        return None
    dims = list(range(len(size)))
    dims[a], dims[b] = b, a
    return Permute(tuple(dims))


def _t(size: Sizes) -> Permute | None:
    return Permute(tuple(reversed(range(len(size))))) if len(size) <= 2 else None


def _reverse(size: Sizes) -> Permute:
    return Permute(tuple(reversed(range(len(size)))))


def _matrix_t(size: Sizes) -> Permute | None:
    return _transpose(size, -2, -1) if len(size) >= 2 else None


def _unsqueeze(size: Sizes, dim: int) -> Unsqueeze | None:
    d = _dim(dim, len(size) + 1)
    return None if d is None else Unsqueeze(d)


def _select(size: Sizes, dim: int, index: Int) -> Select | None:
    d = _dim(dim, len(size))
    return None if d is None else Select(d, index)


def _slice(size: Sizes, dim: int = 0, start: Int | None = None, end: Int | None = None, step: Int = 1) -> Slice | None:
    d = _dim(dim, len(size))
    return None if d is None else Slice(d, 0 if start is None else start, TO_THE_END if end is None else end, step)


def _narrow(size: Sizes, dim: int, start: Int, length: Int) -> Slice | None:
    d = _dim(dim, len(size))
    if d is None or isinstance(start, torch.Tensor):
        return None
    if all(type(n) is int for n in (size[d], start, length)):
        start = start + size[d] if start < 0 else start
        if not 0 <= start <= start + length <= size[d]:
            return None
    return Slice(d, start, start + length, 1)


def _expand(size: Sizes, wanted: Sizes, *, implicit: bool = False) -> Expand | None:
    return Expand(tuple(wanted)) if len(wanted) >= len(size) else None


def _reshape(size: Sizes, wanted: Sizes) -> Reshape:
    return Reshape(tuple(wanted))


def _flatten(size: Sizes, start: int = 0, end: int = -1) -> Flatten | None:
    first, last = _dim(start, len(size)), _dim(end, len(size))
    return None if first is None or last is None or first > last else Flatten(first, last)


def _split(size: Sizes, lengths: Int | Sizes, dim: int = 0) -> Split | None:
    d = _dim(dim, len(size))
    if d is None:
        return None
    if isinstance(lengths, (list, tuple)):
        return Split(d, tuple(lengths))
    return _in_equal_parts(size[d], lengths, d)  # type: ignore[arg-type]


def _chunk(size: Sizes, chunks: int, dim: int = 0) -> Split | None:
    d = _dim(dim, len(size))
    if d is None or chunks < 1:
        return None
    n = size[d]
    return _in_equal_parts(n, -(-n // chunks), d) if type(n) is int else Split(d, None)


def _in_equal_parts(n: Int, length: Int, dim: int) -> Split | None:
    """Parts of one length along a dimension of size `n`; the last one has what is left."""
    if type(n) is not int or type(length) is not int:
        return Split(dim, None)
    if n < 1 or length < 1:
        return None
    return Split(dim, tuple([min(length, n - start) for start in range(0, n, length)]))


def _unbind(size: Sizes, dim: int = 0) -> Unbind | None:
    d = _dim(dim, len(size))
    return None if d is None else Unbind(d)


_aten = torch.ops.aten
_PARSERS: dict[Any, Callable[..., ViewArguments | None]] = {
    _aten.permute.default: _permute,
    _aten.transpose.int: _transpose,
    _aten.swapaxes.default: _transpose,
    _aten.swapdims.default: _transpose,
    _aten.t.default: _t,
    _aten.numpy_T.default: _reverse,
    _aten.mT.default: _matrix_t,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.select.int: _select,
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
