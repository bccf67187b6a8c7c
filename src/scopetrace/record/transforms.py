"""Ops inside of torch.vmap, grad and other transforms of torch.func.

Data flow:
    an op and its arguments -> torch's transforms and its autograd -> the ops that are left of it -> the tape
"""

from __future__ import annotations

import bisect
import functools
import operator
from typing import Any

import torch
import torch.fx

from scopetrace._compat.gradients import next_sequence_number
from scopetrace._compat.ops import BelowAutograd, unwrapped, without_transforms
from scopetrace._compat.tensors import FakeTensor, requires_grad_of
from scopetrace.ir.tape import map_argument
from scopetrace.record.values import ValueTable

_aten = torch.ops.aten
_NUMBERS = (int, float, complex, torch.SymInt, torch.SymFloat)
_OF_NUMBERS = {
    getattr(op, tensor): getattr(op, tensor.replace("Tensor", "Scalar"))
    for kind in ("mul", "multiply", "div", "divide", "true_divide")
    for op in (getattr(_aten, kind), getattr(_aten, f"{kind}_"))
    for tensor in op.overloads()
    if tensor in ("Tensor", "Tensor_mode")
}
"""Ops whose backward reads both operands, with that for a number: a tensor of a number is none that torch could show to
Python as the operand of a transform's backward."""


def record_in_transform(ops: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let torch transform an op, and the OpRecorder `ops` record what is left of it. Gives what the model gets."""
    builder, tape = ops.builder, ops.builder.tape
    builder.expect_history("a transform such as torch.vmap runs")
    args, kwargs = map_argument(functools.partial(_differentiable, ops.values), (args, kwargs))
    if func in _OF_NUMBERS and isinstance(args[1], _NUMBERS):
        func = _OF_NUMBERS[func]
    start, first = len(tape.ops), next_sequence_number()
    with BelowAutograd(ops.record):
        out = func(*args, **kwargs)
    if next_sequence_number() > first and len(tape.ops) > start:
        bisect.insort(builder.made_nodes, (first, tape.ops[start]), key=operator.itemgetter(0))
    for v in [v for op in tape.ops[start:] for v in op.values()]:
        v.requires_grad = requires_grad_of(v.fake)  # autograd around the transform sees an op last
        if v.op.target is _aten._to_copy.default and v.fake.is_meta and not v.op.tensor(0).fake.is_meta:
            builder.loses_device = builder.refusal(
                "torch computes this derivative in forward mode with a tensor of zeros that is on no device",
                op=str(func),
                hint="use a derivative in reverse mode (torch.func.grad, vjp, jacrev), or compute it outside",
            )
    return out


def _differentiable(values: ValueTable, x: Any) -> Any:
    """A tensor of the model as the fake one by which autograd around a transform differentiates."""
    tensor = unwrapped(x) if isinstance(x, torch.Tensor) else None
    if tensor is None or isinstance(tensor, FakeTensor):
        return x
    if tensor is not x:
        values.transformed = True
        return x
    with without_transforms():
        return values.value_of(x).fake
