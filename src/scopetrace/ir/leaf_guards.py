"""Guards of whether a leaf requires grad, and of the grad mode: where another answer would make another program.

Data flow:
    an op beside which autograd would do another thing if a leaf required grad -> a Guard of `leaf.requires_grad`
    in a trace without autograd -> a Guard of `torch.is_grad_enabled()` too
"""

from __future__ import annotations

from scopetrace.ir.guards import Flag, Guard, OfInput, OfTensor, Source
from scopetrace.ir.tape import Op, RecordedTape, Value


def note_leaf(tape: RecordedTape, leaf: Value, op: Op) -> None:
    """Put reads on the tape, once each, for an input or attribute on which the program would depend in a call.

    Args:
        tape: that of the program.
        leaf: a tensor that may require grad in a call, and does not in the trace.
        op: what autograd would take otherwise.
    """
    if not tape.grad:
        _note(tape, "torch.is_grad_enabled()", Flag("torch.is_grad_enabled", ()), op)
        if not op.grad or leaf.requires_grad or not tape.written_storages():
            return  # the graph of a program that does not write switches autograd on
    if leaf in tape.inputs:
        index = tape.inputs.index(leaf)
        _note(tape, f"{tape.input_paths[index]}.requires_grad", OfInput(index, "requires_grad"), op)
    elif leaf.op.kind == "get_attr" and leaf.op.name in tape.owners:
        module, attribute = tape.owners[leaf.op.name]
        if module is not None:
            _note(tape, f"{leaf.op.name}.requires_grad", OfTensor(module, attribute, "requires_grad"), op)


def _note(tape: RecordedTape, name: str, source: Source, op: Op) -> None:
    if not any(type(guard.source) is type(source) and guard.source == source for guard in tape.guards):
        tape.guards.append(Guard(name, False, source, op.frames, op.scope.path))
