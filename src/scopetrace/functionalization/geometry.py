"""How one tensor lies in another: the relation of a view to its base, read off sizes, strides and offsets.

A relation goes both ways. Forward, it takes the view out of the base's value; backward, it puts a new value of the view
into the base. Neither writes: the backward ops are torch's `*_scatter` family. What has no name of its own is a list of
positions.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

_aten = torch.ops.aten
Emit = Callable[..., Any]
"""Puts an op on the tape under construction: `emit(op, *args)` gives its value."""


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Where the elements of a tensor lie, in elements from the start of its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    exact: bool = True
    """False: the numbers are those of the example, and other calls have others."""

    def positions(self) -> torch.Tensor:
        """The position of each element, in row-major order: int64[numel]."""
        found = torch.full((1,), self.offset, dtype=torch.int64, device="cpu")
        for n, s in zip(self.size, self.stride, strict=True):
            found = (found[:, None] + torch.arange(n, dtype=torch.int64, device="cpu") * s).reshape(-1)
        return found

    @property
    def dims(self) -> list[tuple[int, int]]:
        """(size, stride) of the dimensions that matter: those of more than one element."""
        return [(n, s) for n, s in zip(self.size, self.stride, strict=True) if n != 1]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return int(torch.Size(self.size).numel())

    def overlaps_itself(self) -> bool:
        """Whether two elements share a position, as far as that is known without looking at each."""
        if self.numel == 0:
            return False
        reach = 0
        for s, n in sorted((s, n) for n, s in self.dims):
            if s <= reach:
                return True
            reach += s * (n - 1)
        return False

    def is_dense(self) -> bool:
        """Whether the elements fill a stretch of memory, each place once."""
        reach = 1
        for s, n in sorted((s, n) for n, s in self.dims):
            if s != reach:
                return False
            reach *= n
        return True

    def span(self) -> tuple[int, int]:
        """First and last position; (0, -1) without elements."""
        if self.numel == 0:
            return 0, -1
        return self.offset, self.offset + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))


class Relation(abc.ABC):
    """A way from a base to its view and back. `base_size` and `view_size` are the sizes of the two."""

    @abc.abstractmethod
    def take(self, emit: Emit, base: Any) -> Any:
        """The view's value, from the base's."""

    @abc.abstractmethod
    def put(self, emit: Emit, base: Any, new: Any) -> Any:
        """The base's value with `new` in the place of the view."""


@dataclasses.dataclass(frozen=True)
class Reshape(Relation):
    """All elements of the base in the same order; with equal sizes, the base itself."""

    base_size: tuple[int, ...]
    view_size: tuple[int, ...]

    def take(self, emit: Emit, base: Any) -> Any:
        """The view, taken out."""
        return base if self.base_size == self.view_size else emit(_aten.reshape.default, base, list(self.view_size))

    def put(self, emit: Emit, base: Any, new: Any) -> Any:
        """The base, with the view put in."""
        return new if self.base_size == self.view_size else emit(_aten.reshape.default, new, list(self.base_size))


@dataclasses.dataclass(frozen=True)
class Permute(Relation):
    """The dimensions of the base in another order."""

    dims: tuple[int, ...]

    def take(self, emit: Emit, base: Any) -> Any:
        """The view, taken out."""
        return emit(_aten.permute.default, base, list(self.dims))

    def put(self, emit: Emit, base: Any, new: Any) -> Any:
        """The base, with the view put in."""
        back = [self.dims.index(i) for i in range(len(self.dims))]
        return emit(_aten.permute.default, new, back)


@dataclasses.dataclass(frozen=True)
class Slice(Relation):
    """Some indices of one dimension."""

    dim: int
    start: Any
    end: Any
    step: int

    def take(self, emit: Emit, base: Any) -> Any:
        """The view, taken out."""
        return emit(_aten.slice.Tensor, base, self.dim, self.start, self.end, self.step)

    def put(self, emit: Emit, base: Any, new: Any) -> Any:
        """The base, with the view put in."""
        return emit(_aten.slice_scatter.default, base, new, self.dim, self.start, self.end, self.step)


@dataclasses.dataclass(frozen=True)
class Select(Relation):
    """One index of one dimension, which is gone."""

    dim: int
    index: int

    def take(self, emit: Emit, base: Any) -> Any:
        """The view, taken out."""
        return emit(_aten.select.int, base, self.dim, self.index)

    def put(self, emit: Emit, base: Any, new: Any) -> Any:
        """The base, with the view put in."""
        return emit(_aten.select_scatter.default, base, new, self.dim, self.index)


@dataclasses.dataclass(frozen=True, eq=False)
class Positions(Relation):
    """Any elements of the base in any order, by their row-major index in it: `indices`, int64[numel of the view]."""

    base_size: tuple[int, ...]
    view_size: tuple[int, ...]
    indices: torch.Tensor

    def take(self, emit: Emit, base: Any) -> Any:
        """The view, taken out."""
        row = emit(_aten.reshape.default, base, [-1])
        found = emit(_aten.index.Tensor, row, [self.indices])
        return emit(_aten.reshape.default, found, list(self.view_size))

    def put(self, emit: Emit, base: Any, new: Any) -> Any:
        """The base, with the view put in."""
        row = emit(_aten.reshape.default, base, [-1])
        values = emit(_aten.reshape.default, new, [-1])
        filled = emit(_aten.index_put.default, row, [self.indices], values)
        return emit(_aten.reshape.default, filled, list(self.base_size))


def relate(base: Geometry, view: Geometry) -> Relation | None:
    """How `view` lies in `base`; None when it reaches elements outside of it."""
    if base.numel == view.numel and _same_order(base, view):
        return Reshape(base.size, view.size)
    return _as_permute(base, view) or _as_slice(base, view) or _as_select(base, view) or _as_positions(base, view)


def _same_order(base: Geometry, view: Geometry) -> bool:
    """Whether both visit the same positions in the same order."""
    if base.numel == 0:
        return True
    return base.offset == view.offset and _merged(base) == _merged(view)


def _merged(g: Geometry) -> list[tuple[int, int]]:
    """Neighbouring dimensions that form one run, joined."""
    runs: list[tuple[int, int]] = []
    for n, s in g.dims:
        if runs and runs[-1][1] == n * s:
            runs[-1] = (runs[-1][0] * n, s)
        else:
            runs.append((n, s))
    return runs


def _as_permute(base: Geometry, view: Geometry) -> Permute | None:
    if len(base.size) != len(view.size) or base.offset != view.offset or base.numel == 0:
        return None
    free = list(range(len(base.size)))
    dims: list[int] = []
    for n, s in zip(view.size, view.stride, strict=True):
        match = next((i for i in free if base.size[i] == n and (n == 1 or base.stride[i] == s)), None)
        if match is None:
            return None
        free.remove(match)
        dims.append(match)
    return None if base.overlaps_itself() else Permute(tuple(dims))


def _as_slice(base: Geometry, view: Geometry) -> Slice | None:
    if len(base.size) != len(view.size) or view.numel == 0 or base.overlaps_itself():
        return None
    dims = zip(base.size, view.size, base.stride, view.stride, strict=True)
    other = [i for i, (bn, vn, bs, vs) in enumerate(dims) if bn != vn or (vn != 1 and bs != vs)]
    if len(other) != 1:
        return None
    (d,) = other
    n, bs, vs = view.size[d], base.stride[d], view.stride[d]
    step = vs // bs if n > 1 and bs else 1
    start, rest = divmod(view.offset - base.offset, bs) if bs else (0, 0)
    if rest or step < 1 or start < 0 or (n > 1 and step * bs != vs) or start + (n - 1) * step >= base.size[d]:
        return None
    return Slice(d, start, min(start + (n - 1) * step + 1, base.size[d]), step)


def _as_select(base: Geometry, view: Geometry) -> Select | None:
    if len(base.size) != len(view.size) + 1 or view.numel == 0 or base.overlaps_itself():
        return None
    for d, (n, s) in enumerate(zip(base.size, base.stride, strict=True)):
        rest_size, rest_stride = base.size[:d] + base.size[d + 1 :], base.stride[:d] + base.stride[d + 1 :]
        same = all(m == 1 or a == b for m, a, b in zip(view.size, rest_stride, view.stride, strict=True))
        if rest_size != view.size or not same:
            continue
        index, rest = divmod(view.offset - base.offset, s) if s else (0, view.offset - base.offset)
        if rest == 0 and 0 <= index < n:
            return Select(d, index)
    return None


def _as_positions(base: Geometry, view: Geometry) -> Positions | None:
    if view.numel == 0:
        return Positions(base.size, view.size, torch.zeros(0, dtype=torch.int64, device="cpu"))
    indices = index_in(base.positions(), view.positions())
    return None if indices is None else Positions(base.size, view.size, indices)


def index_in(base: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor | None:
    """For each of `wanted` (int64[m]) its index in `base` (int64[n]); None when one is not there."""
    if base.numel() == 0:
        return None if wanted.numel() else wanted
    order = torch.argsort(base, stable=True)
    places = torch.searchsorted(base[order], wanted).clamp(max=base.numel() - 1)
    found = order[places]
    return found if bool((base[found] == wanted).all()) else None
