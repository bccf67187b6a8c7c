"""Functional tapes of GraphModules, in ATen ops or in the functions and methods that the graph itself calls.

Data flow:
    GraphModule -> RecordedTape of ATen ops, with the node behind each -> nodes as single ops again where that is right
    -> FunctionalTape
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.fx

from scopetrace.errors import FunctionalizationError
from scopetrace.functionalization.functionalizer import Functionalizer
from scopetrace.functionalization.refusals import draws_differ, refusal, refuse_overlap
from scopetrace.ir.tape import FunctionalTape, Op, RecordedTape, checks_enabled
from scopetrace.ir.verify import verify
from scopetrace.program.traced import functional_tape
from scopetrace.torch_level.lift import Lifter
from scopetrace.torch_level.step import OpTemplate, Renew
from scopetrace.torch_level.stepping import record_steps


def aten_tapes(gm: torch.fx.GraphModule, args: tuple[Any, ...]) -> tuple[RecordedTape, FunctionalTape]:
    """The recorded and the functional tape of `gm(*args)`, in ATen ops; raises as `torch_level_tapes`."""
    tape, _ = record_steps(gm, args, with_trials=False)
    return tape, functional_tape(tape)


def torch_level_tapes(gm: torch.fx.GraphModule, args: tuple[Any, ...]) -> tuple[RecordedTape, FunctionalTape]:
    """The recorded tape of `gm(*args)` in ATen ops, and the functional one in `OpTemplate`s and ATen ops.

    Raises FunctionalizationError for a mutation without a functional form.
    """
    tape, nodes = record_steps(gm, args, with_trials=True)
    lifter = Lifter(tape, nodes)
    lifted = lifter.run()
    if not lifted.has_writes():
        return tape, FunctionalTape.of(lifted)
    work = _TorchLevel(lifted)
    try:
        functional = work.run()
    except FunctionalizationError as error:
        record = None if work.op is None else lifter.origins[lifted.ops.index(work.op)]
        if record is None:
            raise
        hint = "write it out of place, or run this part eagerly (torch.compiler.disable)"
        op = f"{error.op} (node {record.node.name})"
        raise FunctionalizationError(
            error.problem, op=op, module=error.module, source=error.source, hint=hint
        ) from error
    if checks_enabled():
        verify(functional, "functionalization at torch level")
    return tape, functional


class _TorchLevel(Functionalizer):
    """Functionalization with the two kinds of targets that ATen does not have."""

    def _write(self, op: Op) -> None:
        if not isinstance(op.target, Renew):
            super()._write(op)
            return
        for write in op.target.writes:
            refuse_overlap(write)
            if draws_differ(write.target, write.args, write.kwargs):
                raise refusal("one seed would give other random numbers (fill a contiguous tensor, then copy_)", op)
        target, new = op.tensor(0), op.tensor(1)
        self.assign(op, target, self.read(new, op))
        self._rename(target, op.outputs)

    def _run(self, op: Op, func: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(func, OpTemplate) and func.kind == "call_method" and func.target == "view":
            func = dataclasses.replace(func, target="reshape")  # the present strides may be others
        return super()._run(op, func, args, kwargs)
