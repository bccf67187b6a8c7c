"""FLOPs, parameters and bytes of the ops of a tape."""

from __future__ import annotations

import torch

from scopetrace._compat.symbols import Symbolic
from scopetrace.errors import PlanError
from scopetrace.ir.tape import Op, ProgramTape, flat
from scopetrace.view.measures import byte_count, flops_of


def param_uses(tape: ProgramTape) -> dict[str, list[int]]:
    """By parameter, the ops that read it, in order."""
    named = ((value, tape.registered.param(attribute)) for attribute, value in tape.attribute_reads())
    names = {value: name for value, name in named if name is not None}
    uses: dict[str, list[int]] = {}
    for i, op in enumerate(tape.ops):
        for name in dict.fromkeys(names[v] for v in op.inputs() if v in names):
            uses.setdefault(name, []).append(i)
    return uses


def op_params(tape: ProgramTape) -> list[int]:
    """For each op, the number of elements of the parameters that it is the first to read."""
    counts = [0] * len(tape.ops)
    for name, uses in param_uses(tape).items():
        counts[uses[0]] += torch.Size(tape.registered.params[name].shape).numel()
    return counts


def op_bytes(tape: ProgramTape) -> list[int]:
    """For each op, the bytes of the parameters that it is the first to read, and of the storages that it allocates."""
    sizes = list(map(op_results, tape.ops))
    for name, uses in param_uses(tape).items():
        sizes[uses[0]] += tape.registered.params[name].nbytes
    return sizes


def op_results(op: Op) -> int:
    """The bytes of the storages that an op allocates; 0 for a view."""
    read = {v.storage for v in op.inputs()}
    new = {v.storage: v for v in op.values() if v.storage not in read and op.kind not in ("placeholder", "get_attr")}
    return sum(byte_count(v.fake) for v in new.values())


def op_flops(tape: ProgramTape) -> list[int]:
    """For each op, its floating-point operations as `torch.utils.flop_counter` counts them.

    Matrix products, convolutions and attention count; a multiplication and an addition are two operations. Ops with
    bodies (`torch.cond`) count as 0.

    Raises PlanError for a trace with dynamic sizes.
    """

    def flops(op: Op) -> int:
        if op.kind != "call_function" or op.bodies() or not op.values():
            return 0
        count = flops_of(op.target, op.args, op.kwargs)
        sizes = [size for v in op.inputs() for size in v.fake.shape]
        if count and any(isinstance(x, Symbolic) for x in (*flat((op.args, op.kwargs)), *sizes)):
            raise PlanError("FLOPs need sizes: trace with the sizes of one micro-batch, without dynamic_shapes")
        return count

    return list(map(flops, tape.ops))
