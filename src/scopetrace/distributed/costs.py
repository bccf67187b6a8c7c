"""FLOPs, parameters and bytes of the ops of a tape."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from scopetrace._compat.symbols import Symbolic
from scopetrace.containers.structure import instantiate
from scopetrace.errors import PlanError
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


def op_params(tape: ProgramTape) -> list[int]:
    """For each op, the number of elements of the parameters that it is the first to read."""
    return _of_params(tape, lambda name: torch.Size(tape.registered.params[name].shape).numel())


def op_bytes(tape: ProgramTape) -> list[int]:
    """For each op, the bytes of the parameters that it is the first to read, and of the storages that it allocates."""
    params = _of_params(tape, lambda name: tape.registered.params[name].nbytes)
    return [param + made for param, made in zip(params, op_results(tape), strict=True)]


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


def _of_params(tape: ProgramTape, size: Callable[[str], int]) -> list[int]:
    params = {}
    for op in tape.ops:
        name = tape.registered.param(op.target) if op.kind == "get_attr" else None
        if name is not None:
            params[op.outputs] = name
    seen: set[str] = set()
    found = [0] * len(tape.ops)
    for i, op in enumerate(tape.ops):
        new = {params[v] for v in op.inputs() if v in params} - seen
        seen |= new
        found[i] = sum(map(size, new))
    return found


def op_flops(tape: ProgramTape) -> list[int]:
    """For each op, its floating-point operations as `torch.utils.flop_counter` counts them.

    Matrix products, convolutions and attention count; a multiplication and an addition are two operations. Ops with
    bodies (`torch.cond`) count as 0.

    Raises PlanError for a trace with dynamic sizes.
    """
    counted: dict[Any, int] = {}
    found = []
    for op in tape.ops:
        flops = 0
        if op.kind == "call_function" and not op.bodies():
            key = _key(op)
            if key not in counted:
                counted[key] = _count(op)
            flops = counted[key]
        found.append(flops)
    return found


def _key(op: Op) -> Any:
    return op.target, tuple(map(_leaf_key, flat((op.args, op.kwargs))))


def _leaf_key(x: Any) -> Any:
    return (tuple(x.fake.shape), x.fake.stride(), x.fake.dtype) if isinstance(x, Value) else (type(x), str(x))


def _count(op: Op) -> int:
    if any(isinstance(x, Symbolic) for x in flat((op.args, op.kwargs))) or _has_dynamic_sizes(op.inputs()):
        raise PlanError("FLOPs need sizes: trace with the sizes of one micro-batch, without dynamic_shapes")
    args, kwargs = instantiate(lambda v: v.fake.detach(), (op.args, op.kwargs), Value)
    mode = next((v.fake.fake_mode for v in op.inputs()), None)  # type: ignore[attr-defined]
    if mode is None:
        return 0
    with torch.no_grad(), mode, FlopCounterMode(display=False, custom_mapping=_MORE) as counter:
        op.target(*args, **kwargs)
    return int(counter.get_total_flops())


def _has_dynamic_sizes(values: Sequence[Value]) -> bool:
    return any(isinstance(n, torch.SymInt) for v in values for n in v.fake.shape)


def call_flops(tape: ProgramTape) -> dict[int, tuple[int, int]]:
    """By position of a call, the FLOPs of all ops before its begin, and before its end."""
    before = [0, *itertools.accumulate(op_flops(tape))]
    ranges: dict[int, tuple[int, int]] = {}
    for i, op in enumerate(tape.ops):
        call = op.call if op.kind.startswith("call") else None
        while call is not None:
            start, _ = ranges.get(call.position, (i, i))
            ranges[call.position] = start, i + 1
            call = call.parent
    return {position: (before[start], before[stop]) for position, (start, stop) in ranges.items()}
