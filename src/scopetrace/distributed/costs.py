"""FLOPs, parameters and bytes of the ops of a tape."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from scopetrace._compat.symbols import Symbolic
from scopetrace.errors import PlanError
from scopetrace.ir.registered import RegisteredParam
from scopetrace.ir.tape import Op, ProgramTape, flat
from scopetrace.view.measures import FlopCounts, byte_count


def params_read(tape: ProgramTape) -> list[set[str]]:
    """For each op, the names of the parameters that it reads."""
    named = ((value, tape.registered.param(attribute)) for attribute, value in tape.attribute_reads())
    names = {value: name for value, name in named if name is not None}
    return [{names[v] for v in op.inputs() if v in names} for op in tape.ops]


def op_params(tape: ProgramTape) -> list[int]:
    """For each op, the number of elements of the parameters that it is the first to read."""
    return [sum(torch.Size(param.shape).numel() for param in params) for params in _first_read(tape)]


def op_bytes(tape: ProgramTape) -> list[int]:
    """For each op, the bytes of the parameters that it is the first to read, and of the storages that it allocates."""
    costs = zip(_first_read(tape), op_results(tape), strict=True)
    return [sum(param.nbytes for param in params) + allocated for params, allocated in costs]


def _first_read(tape: ProgramTape) -> Iterator[list[RegisteredParam]]:
    """For each op, the parameters that it is the first to read."""
    seen: set[str] = set()
    for names in params_read(tape):
        yield [tape.registered.params[name] for name in names - seen]
        seen |= names


def op_results(tape: ProgramTape) -> list[int]:
    """For each op, the bytes of the storages that it allocates; 0 for a view."""
    known = {v.storage for op in tape.ops if op.kind in ("placeholder", "get_attr") for v in op.values()}
    sizes = [0] * len(tape.ops)
    for i, op in enumerate(tape.ops):
        for value in op.values():
            if value.storage not in known:
                known.add(value.storage)
                sizes[i] += byte_count(value.fake)
    return sizes


def op_flops(tape: ProgramTape) -> list[int]:
    """For each op, its floating-point operations as `torch.utils.flop_counter` counts them.

    Matrix products, convolutions and attention count; a multiplication and an addition are two operations. Ops with
    bodies (`torch.cond`) count as 0.

    Raises PlanError for a trace with dynamic sizes.
    """
    counts = FlopCounts()

    def flops(op: Op) -> int:
        if op.kind != "call_function" or op.bodies() or not op.values():
            return 0
        count = counts.of(op.target, op.args, op.kwargs)
        sizes = [size for v in op.inputs() for size in v.fake.shape]
        if count and any(isinstance(x, Symbolic) for x in (*flat((op.args, op.kwargs)), *sizes)):
            raise PlanError("FLOPs need sizes: trace with the sizes of one micro-batch, without dynamic_shapes")
        return count

    return list(map(flops, tape.ops))
