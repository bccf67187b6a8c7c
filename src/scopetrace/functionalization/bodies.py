"""The layout of operands of ops that do not take any, and of what goes into and out of bodies of higher-order ops."""

from __future__ import annotations

import torch

from scopetrace._compat.symbols import example, to_expr
from scopetrace.functionalization.refusals import refusal
from scopetrace.ir.tape import Value
from scopetrace.ops.view_inverses import Emit

_aten = torch.ops.aten


def as_laid_out(emit: Emit, new: Value, old: torch.Tensor) -> Value:
    """`new` with the strides of `old`. Raises FunctionalizationError where its memory has gaps or repeats."""
    turned = laid_out(emit, new, old)
    if turned is new:
        return new
    sizes = zip(turned.fake.size(), turned.fake.stride(), old.stride(), strict=True)
    if any(to_expr(n) != 1 and to_expr(a) != to_expr(b) for n, a, b in sizes):
        raise refusal("a tensor that goes into or out of a body has gaps in its memory", turned.op)
    return turned


def laid_out(emit: Emit, new: Value, old: torch.Tensor) -> Value:
    """`new` with the strides of `old`; dense where the memory of `old` has gaps or repeats."""
    if old.layout is not torch.strided or to_expr(new.fake.stride()) == to_expr(old.stride()):
        return new
    turned = in_order_of(emit, new, old)
    is_like_old = to_expr(turned.fake.stride()) == to_expr(old.stride())
    return turned if is_like_old else emit(_aten.clone.default, turned)


def in_order_of(emit: Emit, new: Value, old: torch.Tensor) -> Value:
    """`new`, with its dimensions in memory in the order of `old`."""
    if old.layout is not torch.strided or old.dim() < 2 or _order(new.fake) == _order(old):
        return new
    order = _order(old, all_dims=True)
    turned = emit(_aten.permute.default, new, order)
    dense = emit(_aten.clone.default, turned, memory_format=torch.contiguous_format)
    result: Value = emit(_aten.permute.default, dense, [order.index(d) for d in range(len(order))])
    return result


def _order(t: torch.Tensor, *, all_dims: bool = False) -> list[int]:
    """The dimensions of more than one element, or all, slowest in memory first; of an expanded tensor as in a copy."""
    strides = [example(s) for s in t.stride()]
    if 0 in strides:
        sizes = [example(n) for n in t.size()]
        strides = list(torch.empty_like(torch.empty_strided(sizes, strides, device="meta")).stride())
    dims = [d for d in range(t.dim()) if all_dims or example(t.size(d)) != 1]
    return sorted(dims, key=lambda d: -strides[d])
