"""FLOPs, parameters and bytes of the ops of a tape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from scopetrace._compat.ops import can_decompose, is_op
from scopetrace._compat.symbols import Symbolic
from scopetrace.containers.structure import instantiate
from scopetrace.errors import PlanError
from scopetrace.ir.registered import RegisteredParam
from scopetrace.ir.tape import Op, ProgramTape, Value, flat


def _grouped_mm_flops(a: Any, b: Any, *args: Any, **kwargs: Any) -> int:
    """FLOPs of a grouped matrix product; either operand may have the groups as its first dimension."""
    if len(a) == 3 and len(b) == 2:
        return int(2 * a[-2] * torch.Size(b).numel())
    return int(2 * torch.Size(a).numel() * b[-1])


_MORE = {torch.ops.aten._grouped_mm: _grouped_mm_flops}
"""Formulas that `torch.utils.flop_counter` does not have."""


def nbytes(value: Value) -> int:
    """The bytes of a tensor's elements."""
    return int(value.fake.numel()) * value.fake.element_size()


def params_read(tape: ProgramTape) -> list[set[str]]:
    """For each op, the names of the parameters that it reads."""
    names = {}
    for attribute, value in tape.attribute_reads():
        name = tape.registered.param(attribute)
        if name is not None:
            names[value] = name
    return [{names[v] for v in op.inputs() if v in names} for op in tape.ops]


def op_params(tape: ProgramTape) -> list[int]:
    """For each op, the number of elements of the parameters that it is the first to read."""
    return [sum(torch.Size(param.shape).numel() for param in params) for params in _first_read(tape)]


def op_bytes(tape: ProgramTape) -> list[int]:
    """For each op, the bytes of the parameters that it is the first to read, and of the storages that it allocates."""
    read = zip(_first_read(tape), op_results(tape), strict=True)
    return [sum(param.nbytes for param in params) + made for params, made in read]


def _first_read(tape: ProgramTape) -> Iterator[list[RegisteredParam]]:
    """For each op, the parameters that it is the first to read."""
    seen: set[str] = set()
    for names in params_read(tape):
        yield [tape.registered.params[name] for name in names - seen]
        seen |= names


def op_results(tape: ProgramTape) -> list[int]:
    """For each op, the bytes of the storages that it allocates; 0 for a view."""
    known = {v.storage for op in tape.ops if op.kind in ("placeholder", "get_attr") for v in op.values()}
    found = [0] * len(tape.ops)
    for i, op in enumerate(tape.ops):
        for value in op.values():
            if value.storage not in known:
                known.add(value.storage)
                found[i] += nbytes(value)
    return found


def op_flops(tape: ProgramTape) -> list[int]:
    """For each op, its floating-point operations as `torch.utils.flop_counter` counts them.

    Matrix products, convolutions and attention count; a multiplication and an addition are two operations. Ops with
    bodies (`torch.cond`) count as 0.

    Raises PlanError for a trace with dynamic sizes.
    """
    counted: dict[Any, int] = {}

    def flops(op: Op) -> int:
        if not _has_flops(op):
            return 0
        sizes = [size for v in op.inputs() for size in v.fake.shape]
        if any(isinstance(x, Symbolic) for x in (*flat((op.args, op.kwargs)), *sizes)):
            raise PlanError("FLOPs need sizes: trace with the sizes of one micro-batch, without dynamic_shapes")
        key = op.target, tuple(map(_leaf_key, flat((op.args, op.kwargs))))
        if key not in counted:
            counted[key] = _count(op)
        return counted[key]

    return list(map(flops, tape.ops))


def _has_flops(op: Op) -> bool:
    """Whether an op, or one that it may consist of, is counted: those of an optimizer may take numbers of tensors."""
    if op.kind != "call_function" or op.bodies() or not op.values() or not is_op(op.target):
        return False
    packet = op.target.overloadpacket
    return packet in flop_registry or packet in _MORE or can_decompose(op.target)


def _leaf_key(x: Any) -> Any:
    return (tuple(x.fake.shape), x.fake.stride(), x.fake.dtype) if isinstance(x, Value) else (type(x), str(x))


def _count(op: Op) -> int:
    args, kwargs = instantiate(lambda v: v.fake.detach(), (op.args, op.kwargs), Value)
    mode = next((v.fake.fake_mode for v in op.inputs()), None)  # type: ignore[attr-defined]
    if mode is None or isinstance(op.target, str):
        return 0
    with torch.no_grad(), mode, FlopCounterMode(display=False, custom_mapping=_MORE) as counter:
        op.target(*args, **kwargs)
    return int(counter.get_total_flops())
