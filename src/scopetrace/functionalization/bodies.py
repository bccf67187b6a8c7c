"""Bodies of higher-order ops in a program without mutation: what they give, and what they may not hold."""

from __future__ import annotations

import torch

from scopetrace._compat.symbols import example, to_expr
from scopetrace.functionalization.refusals import refusal
from scopetrace.ir.tape import BodyTape, Op, Value
from scopetrace.ops.view_inverses import Emit

_aten = torch.ops.aten


def as_laid_out(emit: Emit, new: Value, old: torch.Tensor) -> Value:
    """`new` with the strides of `old`. Raises FunctionalizationError where its memory has gaps or repeats."""
    if old.layout is not torch.strided or to_expr(new.fake.stride()) == to_expr(old.stride()):
        return new
    turned = in_order_of(emit, new, old)
    if to_expr(turned.fake.stride()) != to_expr(old.stride()):
        turned = emit(_aten.clone.default, turned)
    sizes = zip(turned.fake.size(), turned.fake.stride(), old.stride(), strict=True)
    if any(to_expr(n) != 1 and to_expr(a) != to_expr(b) for n, a, b in sizes):
        raise refusal("a tensor that goes into or out of a body has gaps in its memory", turned.op)
    return turned


def lift_constants(bodies: list[BodyTape]) -> list[torch.Tensor]:
    """Make the constants that the bodies hold inputs of all of them; gives the constants."""
    constants: list[torch.Tensor] = []
    for body in bodies:
        for op in [op for op in body.ops if op.kind == "get_attr"]:
            constants.append(body.attributes.pop(op.name))
            for other in bodies:
                _take(other, op)
    return constants


def _take(body: BodyTape, constant: Op) -> None:
    """One more placeholder for a constant, in the place of the op that reads it where there is one."""
    is_read = constant in body.ops
    first = sum(op.kind == "placeholder" for op in body.ops)
    read = body.ops.index(constant) if is_read else len(body.ops)
    for call in body.calls:
        call.start += call.start <= read
        call.stop += call.stop <= read
    like = constant.result
    value = like if is_read else like.copy(like.storage)
    placeholder = constant.replace(
        kind="placeholder",
        target=f"{constant.target}_{first}".lstrip("_"),
        outputs=value,
        scope=body.root,
        call=body.ops[0].call if body.ops else constant.call,
    )
    if is_read:
        placeholder.take_values()
        body.ops.remove(constant)
    body.ops.insert(first, placeholder)
    body.inputs.append(value)


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
