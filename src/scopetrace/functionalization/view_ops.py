"""How a view lies in its base, read off the op that made it: for symbolic sizes, whose geometry is not known."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from scopetrace._compat.symbols import to_expr
from scopetrace.functionalization.geometry import Emit, Permute, Relation, Select, Slice

_aten = torch.ops.aten
_SAME_ORDER = {
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.reshape.default,
    _aten.unsqueeze.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.flatten.using_ints,
    _aten.unflatten.int,
    _aten.alias.default,
    _aten.detach.default,
    _aten.contiguous.default,
    _aten.view_as.default,
    _aten.reshape_as.default,
    _aten.to.dtype,
    _aten.dropout.default,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Itself(Relation):
    """All elements of the base in the same order, with symbolic sizes."""

    base: torch.Tensor
    view: torch.Tensor

    def take(self, emit: Emit, base: Any) -> Any:
        """The view, taken out."""
        same = to_expr(self.base.size()) == to_expr(self.view.size())
        return base if same else emit(_aten.reshape.default, base, list(self.view.size()))

    def put(self, emit: Emit, base: Any, new: Any) -> Any:
        """The base, with the view put in."""
        same = to_expr(self.base.size()) == to_expr(self.view.size())
        return new if same else emit(_aten.reshape.default, new, list(self.base.size()))


def relate_by_op(
    func: Any, args: tuple[Any, ...], slot: int | None, base: torch.Tensor, view: torch.Tensor
) -> Relation | None:
    """The relation that view op `func`, called with `args` after the base, made; None for ops without an inverse."""
    if func in _SAME_ORDER:
        return Itself(base, view)
    dims = _permutation(func, args, base.dim())
    if dims is not None:
        return Permute(dims)
    if func is _aten.select.int:
        return Select(*args)
    if func is _aten.slice.Tensor:
        defaults: tuple[Any, ...] = (0, None, None, 1)
        dim, start, end, step = args + defaults[len(args) :]
        return Slice(dim, 0 if start is None else start, base.size(dim) if end is None else end, step)
    if func is _aten.narrow.default:
        dim, start, length = args
        return Slice(dim, start, start + length, 1)
    return None if slot is None else _piece(func, args, slot, base, view)


def _permutation(func: Any, args: tuple[Any, ...], rank: int) -> tuple[int, ...] | None:
    dims = list(range(rank))
    if func is _aten.permute.default:
        return tuple(d % rank for d in args[0])
    if func in (_aten.transpose.int, _aten.swapaxes.default, _aten.swapdims.default):
        a, b = args[0] % rank, args[1] % rank
        dims[a], dims[b] = dims[b], dims[a]
        return tuple(dims)
    if func in (_aten.t.default, _aten.numpy_T.default, _aten.mT.default):
        return (*dims[:-2], dims[-1], dims[-2]) if func is _aten.mT.default else tuple(dims[::-1])
    return None


def _piece(func: Any, args: tuple[Any, ...], slot: int, base: torch.Tensor, view: torch.Tensor) -> Relation | None:
    """One of the results of `split` and its kind."""
    if func is _aten.unbind.int:
        return Select(args[0] if args else 0, slot)
    if func in (_aten.split_with_sizes.default, _aten.split.sizes):
        dim = args[1] if len(args) > 1 else 0
        start = sum(args[0][:slot])
        return Slice(dim, start, start + args[0][slot], 1)
    if func in (_aten.split.Tensor, _aten.chunk.default):
        dim = args[1] if len(args) > 1 else 0
        count = args[0]
        each = count if func is _aten.split.Tensor else (base.size(dim) + count - 1) // count
        return Slice(dim, slot * each, slot * each + view.size(dim), 1)
    return None
