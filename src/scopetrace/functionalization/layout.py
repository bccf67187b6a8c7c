"""The memory order of what random ops draw for: their numbers come in that order.

The value of a tensor in a pure graph may be laid out otherwise than that of eager: after `x.t().copy_(y)`, x.t() is y.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from scopetrace._compat.schema import schema_of
from scopetrace._compat.symbols import example
from scopetrace.functionalization.geometry import Emit
from scopetrace.ir.tape import Value
from scopetrace.ops.functional_variants import by_name, is_out_argument, tensor_of, written_arguments

_aten = torch.ops.aten


def in_order_of(emit: Emit, new: Value, old: torch.Tensor) -> Value:
    """`new`, with its dimensions in memory in the order of `old`."""
    if old.layout is not torch.strided or old.dim() < 2:
        return new
    if _order(new.fake) == _order(old):
        return new
    order = _order(old, all_dims=True)
    turned = emit(_aten.permute.default, new, order)
    dense = emit(_aten.contiguous.default, turned)
    found: Value = emit(_aten.permute.default, dense, [order.index(d) for d in range(len(order))])
    return found


def is_random(target: Any) -> bool:
    """Whether an op draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


_VECTORIZED = 16  # with fewer elements normal_ draws one number after the other, whatever the layout


def draws_differ(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the twin of this random op may give its elements other random numbers than eager does, from one seed.

    A twin fills a fresh tensor in its memory order; `func` fills what is there, in its order and dtype.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = by_name(func, args, kwargs)
    outs = [tensor_of(given.get(name)) for name in written_arguments(func)]
    out = next((t for t in outs if isinstance(t, torch.Tensor) and example(t.numel()) > 0), None)
    if (
        out is None
        or (example(out.numel()) < _VECTORIZED and out.dim() < 2)
        or (out.is_contiguous() and schema_of(func).name != "aten::normal")
    ):
        return False
    if any(is_out_argument(a) for a in schema_of(func).arguments):
        tensors = [tensor_of(given.get(name)) for name in ("mean", "std")]
        return not out.is_contiguous() or any(isinstance(t, torch.Tensor) and t.dtype != out.dtype for t in tensors)
    # `bernoulli` does not keep the strides of its input. The others do where they can; the vectorized way to draw
    # normal numbers, for contiguous tensors only, is another stream.
    keeps = schema_of(func).name != "aten::bernoulli_"
    return not (keeps and (schema_of(func).name != "aten::normal_" or _is_dense(out)))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a stretch of memory without holes and overlaps, in whatever order."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _order(t: torch.Tensor, *, all_dims: bool = False) -> list[int]:
    """The dimensions of more than one element, or all, from the slowest in memory to the fastest."""
    strides = [example(s) for s in t.stride()]
    dims = [d for d in range(t.dim()) if all_dims or example(t.size(d)) != 1]
    return sorted(dims, key=lambda d: -strides[d])
