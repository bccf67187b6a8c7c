"""A call of a trace as `torch.compile` traces it: one graph, and guards of Dynamo for what the call was compared with.

Data flow:
    torch.compile meets a call -> the state is compared with the trace, and a PlainCall made
    arguments -> compared -> the graph -> write-back -> result, in Python and on data that Dynamo can trace

Dynamo guards what that reads: arguments, the modes of autograd and autocast, parameters, plain values of attributes.
Other state is compared when torch.compile compiles. What such Python cannot say is an error, and then a call without
`fullgraph=True` runs as it does without torch.compile.
"""

from __future__ import annotations

from typing import Any

import torch

from scopetrace._compat.compilers import constant_to_dynamo, leave_to_python
from scopetrace._compat.graph_module import parts_that_switch_grad
from scopetrace._compat.questions import fact_of
from scopetrace._compat.symbols import Symbolic
from scopetrace.containers.structure import Returned, leaves
from scopetrace.errors import ExportError, InputMismatchError, ScopetraceError, StateMismatchError
from scopetrace.ir.guards import OfInput
from scopetrace.ops.history import NOT_COMPILED
from scopetrace.program.boundary import CallBoundary, without_autocast
from scopetrace.watch.entries import Items

FACTS = ("layout", "stride", "is_contiguous", "requires_grad")
"""What Dynamo can ask an input tensor."""


class PlainCall:
    """A call of a program, in Python that Dynamo can trace.

    Raises ExportError for what it cannot say.
    """

    def __init__(self, boundary: CallBoundary, graph_module: Any) -> None:
        tape = boundary.tape
        followed = {op.target for op in tape.ops if op.grad and any(v.requires_grad for v in op.inputs())}
        if of_lstm := not followed.isdisjoint(NOT_COMPILED):
            graph_module.real_recompile()
            leave_to_python(type(graph_module).forward)
        _refuse(boundary, of_lstm)
        self.boundary, self.graph_module, self.grad = boundary, graph_module, tape.grad
        self.switches = bool(parts_that_switch_grad(graph_module))
        self.sizes_hold = None if tape.sizes is None else tape.sizes.all_hold()
        first = [id(value.fake) for value in tape.inputs]
        self.first = [first.index(one) for one in first]
        written = tape.written_storages()
        self.written = [(i, value.requires_grad) for i, value in enumerate(tape.inputs) if value.storage in written]
        facts = [(guard.name, guard.value, guard.source) for guard in boundary.facts]
        self.facts = [(*fact, x.index, x.fact, x.args) for *fact, x in facts if isinstance(x, OfInput)]

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As a call of the program. Raises InputMismatchError and StateMismatchError as that does."""
        args, kwargs = self.boundary.in_traced_form(args, kwargs)
        tensors, numbers = self.boundary.expected.match(args, kwargs)
        self._check(tensors, numbers)
        if self.switches and torch.is_grad_enabled() != self.grad:
            raise StateMismatchError("the graph switches autograd, and was traced in another mode; trace again in this")
        self.boundary.check_numbers()
        for module, attribute, holder, leaf in self.boundary.state.places:
            if getattr(module, attribute) is not getattr(holder, leaf):
                raise StateMismatchError(f"{attribute} of a module is another tensor now; compile again")
        with without_autocast():
            values = self.graph_module(*tensors, *numbers)
        return self.boundary.leave([*tensors, *numbers], values)

    def _check(self, tensors: list[torch.Tensor], numbers: list[int]) -> None:
        if self.sizes_hold is not None and not self.sizes_hold(tensors, numbers):
            raise InputMismatchError("the trace does not hold for these sizes; a call without torch.compile says why")
        for name, value, index, fact, fact_args in self.facts:
            current = fact_of(tensors[index], fact, fact_args)
            if current != value:
                raise InputMismatchError(f"{name}: {value} when traced and {current} now; trace again with such inputs")
        if any(t is not tensors[same] for t, same in zip(tensors, self.first, strict=True)):
            raise InputMismatchError("inputs were one tensor when traced and are two now; trace again with such inputs")
        for i, requires_grad in self.written:
            t = tensors[i]
            if t.requires_grad and torch.is_grad_enabled() and not (requires_grad and self.grad):
                raise InputMismatchError("an input that the model writes requires grad now, and did not when traced")
            if any(other is t for other, first in zip(tensors, self.first, strict=True) if first != self.first[i]):
                raise InputMismatchError("an input that the model writes is given twice; trace again with such inputs")
            if any(stride == 0 and n > 1 for n, stride in zip(t.shape, t.stride(), strict=True)):
                raise InputMismatchError("an input that the model writes is expanded; pass x.clone()")


def _refuse(boundary: CallBoundary, of_lstm: bool) -> None:
    """Raise ExportError for a program of which a call has no form that Dynamo can trace."""
    tape = boundary.tape
    facts = {guard.source.fact for guard in tape.guards if isinstance(guard.source, OfInput)}
    storages = [storage for storage, _ in {(value.storage, id(value.fake)) for value in tape.inputs}]
    reasons = {
        "it changes gradients": bool(tape.cleared) or any(w.of is not None for w in tape.attribute_writes),
        "the forward makes an input require grad": bool(boundary.made_leaves),
        "compilers give no gradient of an lstm": of_lstm,
        "it keeps a tuple of tensors": any(isinstance(vars(w.module or tape), Items) for w in tape.attribute_writes),
        "it depends on side effects of the forward": any(e.baked_in for e in tape.side_effects),
        "the forward puts tensors into containers among its arguments": isinstance(tape.outputs, Returned),
        "it returns objects among its arguments": bool(tape.given),
        "it depends on numbers in objects among the arguments": any(n.attributes for n in tape.argument_numbers),
        "inputs are views of one memory": len(set(storages)) < len(storages),
        "it reads an input's memory by absolute offset": not tape.uses_absolute_offset.isdisjoint(storages),
        f"the forward asks inputs for {', '.join(sorted(facts - {*FACTS}))}": not facts <= {*FACTS},
        "dynamic sizes are among the views that it returns": bool(leaves(tape.write_back, Symbolic)),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ExportError(
                f"torch.compile cannot trace a call of this trace whole: {reason}",
                module=tape.root.path,
                hint="compile the graph alone, tr.run(torch.compile(tr.graph_module), *args)",
            )


@constant_to_dynamo
def prepare(program: Any) -> str | None:
    """Make what Dynamo cannot trace, and compare the state with that of the trace, while torch.compile compiles.

    Returns why the call cannot be traced: an error in here would be one of torch.compile.
    """
    try:
        program.boundary.state.refresh()
        program.boundary.check_state()
        program.__dict__["plain_call"] = PlainCall(program.boundary, program.graph_module)
    except ScopetraceError as error:
        return f"{type(error).__name__}: {error}"
    return None
