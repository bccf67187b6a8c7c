"""The memory order of what random ops draw for: their numbers come in that order.

The value of a tensor in a pure graph may be laid out otherwise than that of eager: after `x.t().copy_(y)`, x.t() is y.
"""

from __future__ import annotations

from typing import Any

import torch

from scopetrace._compat.symbols import example
from scopetrace.passes.geometry import Emit
from scopetrace.record.tape import Value

_aten = torch.ops.aten


def in_order_of(emit: Emit, new: Value, old: torch.Tensor) -> Value:
    """`new`, with its dimensions in memory in the order of `old`."""
    if old.layout is not torch.strided or old.dim() < 2:
        return new
    try:
        if _order(new.fake) == _order(old):
            return new
        order = _order(old, all_dims=True)
    except ValueError:  # sizes that depend on data: no region has such
        return new
    turned = emit(_aten.permute.default, new, order)
    dense = emit(_aten.contiguous.default, turned)
    found: Value = emit(_aten.permute.default, dense, [order.index(d) for d in range(len(order))])
    return found


def is_random(target: Any) -> bool:
    """Whether an op draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _order(t: torch.Tensor, *, all_dims: bool = False) -> list[int]:
    """The dimensions of more than one element, or all, from the slowest in memory to the fastest."""
    strides = [example(s) for s in t.stride()]
    dims = [d for d in range(t.dim()) if all_dims or example(t.size(d)) != 1]
    return sorted(dims, key=lambda d: -strides[d])
