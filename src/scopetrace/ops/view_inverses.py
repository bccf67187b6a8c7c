"""Views as functions: `forward(base)` is the view, `inverse(base, new)` the base after `new` was written to the view.

    the view op and its arguments, or positions of base and view in their storage (exact sizes)
    -> `ViewFunction` -> ops of ATen on either side: `select` and `select_scatter`, `permute` and `permute`, ...

For each pair `forward(inverse(base, new)) == new`, and `inverse(base, forward(base)) == base`. torch's own
functionalization has the same pairs in FunctionalInverses.cpp, one for each view op; here one serves all ops that give
the same positions, and a view of a view is related to either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from scopetrace._compat.symbols import example, to_expr
from scopetrace._compat.tensors import is_symbolic
from scopetrace.ir.tape import Value
from scopetrace.ops import views

_aten = torch.ops.aten
Emit = Callable[..., Any]
"""Appends an op to a tape: `emit(op, *args)` returns the Value of its result."""


class Geometry(NamedTuple):
    """The positions of the elements of a tensor in its storage, counted in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    exact: bool = True
    """Whether these hold in every call; False where they are those of the example inputs."""

    @classmethod
    def of(cls, tensor: torch.Tensor, offset: int | torch.SymInt) -> Geometry:
        """The geometry of a strided tensor that begins `offset` elements after its storage does."""
        if is_symbolic(tensor):
            size, stride = tuple(map(example, tensor.size())), tuple(map(example, tensor.stride()))
            return cls(size, stride, example(offset), exact=False)
        return cls(tuple(tensor.size()), tuple(tensor.stride()), int(offset))

    def positions(self) -> torch.Tensor:
        """The position of each element, in row-major order: int64[numel]."""
        places = torch.full((1,), self.offset, dtype=torch.int64, device="cpu")
        for n, s in zip(self.size, self.stride, strict=True):
            places = (places[:, None] + torch.arange(n, dtype=torch.int64, device="cpu") * s).reshape(-1)
        return places

    @property
    def dims(self) -> list[tuple[int, int]]:
        """(size, stride) of the dimensions of more than one element."""
        return [(n, s) for n, s in zip(self.size, self.stride, strict=True) if n != 1]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.size)

    def overlaps_itself(self) -> bool:
        """Whether two elements may share a position. False is certain; True is not, for unusual strides."""
        if self.numel == 0:
            return False
        reach = 0
        for s, n in sorted((s, n) for n, s in self.dims):
            if s <= reach:
                return True
            reach += s * (n - 1)
        return False

    def span(self) -> tuple[int, int]:
        """The first and the last position; (0, -1) without elements."""
        if self.numel == 0:
            return 0, -1
        return self.offset, self.offset + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))


def geometry_of(value: Value) -> Geometry:
    """The positions of the elements of a recorded value in its storage."""
    return Geometry.of(value.fake, value.offset)


def overlaps_itself(value: Value) -> bool:
    """As `Geometry.overlaps_itself`."""
    fake = value.fake
    is_plain = fake.layout is torch.strided and not is_symbolic(fake) and fake.is_contiguous()
    return not is_plain and geometry_of(value).overlaps_itself()


def spans_meet(a: Value, b: Value) -> bool:
    """Whether the memory between first and last element is shared by two values of one storage."""
    (a0, a1), (b0, b1) = geometry_of(a).span(), geometry_of(b).span()
    m, n = a.fake.dtype.itemsize, b.fake.dtype.itemsize
    return a0 * m < (b1 + 1) * n and b0 * n < (a1 + 1) * m


class ViewFunction(NamedTuple):
    """A view as a pair of functions."""

    forward: Callable[[Emit, Any], Any]
    """`forward(emit, base)`: the value of the view."""
    inverse: Callable[[Emit, Any, Any], Any]
    """`inverse(emit, base, new)`: the value of the base after `new` was written to the view."""


def reshape(base_size: Sequence[Any], view_size: Sequence[Any]) -> ViewFunction:
    """All elements of the base in the same order."""
    if to_expr(tuple(base_size)) == to_expr(tuple(view_size)):
        return ViewFunction(lambda _, base: base, lambda _, base, new: new)
    return ViewFunction(
        lambda emit, base: emit(_aten.reshape.default, base, list(view_size)),
        lambda emit, _, new: emit(_aten.reshape.default, new, list(base_size)),
    )


def permute(dims: tuple[int, ...]) -> ViewFunction:
    """Dimension i of the view is dimension `dims[i]` of the base."""
    back = [dims.index(i) for i in range(len(dims))]
    return ViewFunction(
        lambda emit, base: emit(_aten.permute.default, base, list(dims)),
        lambda emit, _, new: emit(_aten.permute.default, new, list(back)),
    )


_NOT_COMPLEX = (_aten.select_scatter.default, _aten.slice_scatter.default)


def scatter(view: Any, scatter: Any, *args: Any) -> ViewFunction:
    """A view op and the scatter op with the same arguments, such as `select` and `select_scatter`."""

    def inverse(emit: Emit, base: Any, new: Any) -> Any:
        if scatter in _NOT_COMPLEX and base.fake.is_complex():  # no derivative there: pairs of real numbers
            pairs = [emit(_aten.view_as_real.default, emit(_aten.resolve_conj.default, x)) for x in (base, new)]
            return emit(_aten.view_as_complex.default, emit(scatter, *pairs, *args))
        return emit(scatter, base, new, *args)

    return ViewFunction(lambda emit, base: emit(view, base, *args), inverse)


def select(dim: int, index: Any) -> ViewFunction:
    """The elements at one index of a dimension."""
    return scatter(_aten.select.int, _aten.select_scatter.default, dim, index)


def slice_(dim: int, start: Any, end: Any, step: Any = 1) -> ViewFunction:
    """The elements at some indices of a dimension."""
    return scatter(_aten.slice.Tensor, _aten.slice_scatter.default, dim, start, end, step)


def _elements(base_size: Sequence[Any], view_size: Sequence[Any], indices: Callable[[Emit, Any], Any]) -> ViewFunction:
    """Any elements of the base, by their row-major indices in it, int64[numel of the view]: a constant, or a Value."""

    def forward(emit: Emit, base: Any) -> Any:
        taken = emit(_aten.index.Tensor, _row(emit, base), [indices(emit, base)])
        return emit(_aten.reshape.default, taken, list(view_size))

    def inverse(emit: Emit, base: Any, new: Any) -> Any:
        filled = emit(_aten.index_put.default, _row(emit, base), [indices(emit, base)], _row(emit, new))
        return emit(_aten.reshape.default, filled, list(base_size))

    return ViewFunction(forward, inverse)


def indexed(base_size: Sequence[Any], view_size: Sequence[Any], indices: torch.Tensor) -> ViewFunction:
    """Elements by constant indices."""
    return _elements(base_size, view_size, lambda emit, base: indices)


def strided(base_size: Sequence[Any], view_size: Sequence[Any], stride: Sequence[Any], shift: Any) -> ViewFunction:
    """`as_strided` of a row-major base, from its element `shift` on. All numbers may be symbolic."""

    def indices(emit: Emit, base: Any) -> Any:
        every = emit(_aten.arange.default, base.fake.numel(), device=base.fake.device)
        return _row(emit, emit(_aten.as_strided.default, every, list(view_size), list(stride), shift))

    return _elements(base_size, view_size, indices)


def _row(emit: Emit, x: Any) -> Any:
    return emit(_aten.reshape.default, x, [-1])


_BACK: dict[Any, Callable[[Emit, Any, Any], Any]] = {
    _aten.view_as_real.default: lambda emit, _, new: emit(_aten.view_as_complex.default, _dense(emit, new)),
    _aten.view_as_complex.default: lambda emit, _, new: emit(
        _aten.view_as_real.default, emit(_aten.resolve_conj.default, new)
    ),
    _aten.real.default: lambda emit, base, new: emit(_aten.complex.default, new, emit(_aten.imag.default, base)),
    _aten.imag.default: lambda emit, base, new: emit(_aten.complex.default, emit(_aten.real.default, base), new),
    _aten.view.dtype: lambda emit, base, new: emit(_aten.view.dtype, _dense(emit, new), base.fake.dtype),
    _aten.conj.default: lambda emit, _, new: emit(_aten.conj_physical.default, new),
    _aten._conj.default: lambda emit, _, new: emit(_aten.conj_physical.default, new),
    _aten._neg_view.default: lambda emit, _, new: emit(_aten.neg.default, new),
}
"""By view op that reads bits as other numbers: from base and new view, the new base."""


def _dense(emit: Emit, x: Any) -> Any:
    return emit(_aten.contiguous.default, x)


_IDENTITY_OF_REAL = (_aten.real.default, _aten.conj.default, _aten._conj.default)


def by_own_inverse(func: Any, args: tuple[Any, ...], base: torch.Tensor) -> ViewFunction | None:
    """The function of an op that reads the bits of `base` as other numbers, or of `diagonal`; None for other ops."""
    if func is _aten.diagonal.default:
        return scatter(_aten.diagonal.default, _aten.diagonal_scatter.default, *args)
    back = _BACK.get(func)
    if back is None or (func in _IDENTITY_OF_REAL and not base.is_complex()):
        return None
    if func is _aten.view.dtype and args[0] == base.dtype:
        return None
    # on memory without gaps, which those that change the number of elements need
    return ViewFunction(lambda emit, base: emit(func, _dense(emit, base), *args), back)


# By geometry: exact sizes, where the op says nothing ------------------------------------------------------------------


def by_geometry(base: Geometry, view: Geometry) -> ViewFunction | None:
    """The function of a view of the same dtype; None when it reaches elements outside of the base."""
    if base.numel == view.numel and base.offset == view.offset and _merged(base) == _merged(view):
        return reshape(base.size, view.size)
    if view.numel == 0:
        return indexed(base.size, view.size, torch.zeros(0, dtype=torch.int64, device="cpu"))
    indices = index_in(base.positions(), view.positions())
    return None if indices is None else indexed(base.size, view.size, indices)


def _merged(g: Geometry) -> list[tuple[int, int]]:
    """(size, stride) of the dimensions, neighbours joined where one stride reaches over both."""
    runs: list[tuple[int, int]] = []
    for n, s in g.dims:
        if runs and runs[-1][1] == n * s:
            runs[-1] = (runs[-1][0] * n, s)
        else:
            runs.append((n, s))
    return runs


def index_in(base: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor | None:
    """For each of `wanted` (int64[m]) its first index in `base` (int64[n]); None when one is not there."""
    if base.numel() == 0:
        return None if wanted.numel() else wanted
    order = torch.argsort(base, stable=True)
    places = torch.searchsorted(base[order], wanted).clamp(max=base.numel() - 1)
    first = order[places]
    return first if bool((base[first] == wanted).all()) else None


_SAME_ORDER = {
    _aten.reshape.default,
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.flatten.using_ints,
    _aten.unsqueeze.default,
    _aten.view_as.default,
    _aten.reshape_as.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.unflatten.int,
    _aten.alias.default,
    _aten.detach.default,
    _aten.contiguous.default,
    _aten.to.dtype,
    _aten.dropout.default,
}


def by_op(
    func: Any, args: tuple[Any, ...], slot: int | None, base: torch.Tensor, view: torch.Tensor
) -> ViewFunction | None:
    """The function of result `slot` of `func(base, *args)`, of the same dtype; None for an op that is not known."""
    if func in _SAME_ORDER:
        return reshape(base.size(), view.size())
    if func in (_aten.movedim.int, _aten.movedim.intlist):
        sizes = range(2, base.dim() + 2)  # by which the dimensions can be told apart
        return permute(tuple([n - 2 for n in func(torch.empty(tuple(sizes), device="meta"), *args).shape]))
    match views.view_arguments(func, base.size(), args):
        case views.Permute(dims):
            return permute(dims)
        case views.Select(dim, index):
            return select(dim, index)
        case views.Slice(dim, start, end, step):
            return slice_(dim, start, end, step)
        case views.Parts(_, part) if slot is not None:
            one = part(slot)
            if isinstance(one, views.Select):
                return select(one.dim, slot)
            return slice_(one.dim, one.start, one.start + view.size(one.dim))
    return None
