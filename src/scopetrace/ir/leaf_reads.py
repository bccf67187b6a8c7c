"""Reads of whether leaves require grad, and of the grad mode: where another answer would make another program.

Data flow:
    an op beside which autograd would do another thing if a leaf required grad -> a Read of `leaf.requires_grad`
    in a trace without autograd -> a Read of `torch.is_grad_enabled()` too
"""

from __future__ import annotations

from collections.abc import Iterable

from scopetrace.ir.reads import Flag, OfInput, OfTensor, Place, Read
from scopetrace.ir.tape import Op, RecordedTape, Value


def note_leaves(tape: RecordedTape, leaves: Iterable[tuple[Value, Op]]) -> None:
    """Put reads on the tape for leaves, inputs and attributes, on which the program would depend in a call.

    Args:
        tape: gets each read once.
        leaves: each leaf with the op that autograd would take otherwise.
    """
    known: set[Place] = {r.place for r in tape.reads if isinstance(r.place, (Flag, OfInput, OfTensor))}

    def note(name: str, place: Place, op: Op) -> None:
        if place not in known:
            known.add(place)
            tape.reads.append(Read(name, False, place, op.frames, op.scope.path))

    for leaf, op in leaves:
        if not tape.grad:
            note("torch.is_grad_enabled()", Flag("torch.is_grad_enabled", ()), op)
            if not op.grad or leaf.requires_grad or not tape.written_storages():
                continue  # the graph of a program that does not write switches autograd on
        if leaf in tape.inputs:
            index = tape.inputs.index(leaf)
            note(f"{tape.input_paths[index]}.requires_grad", OfInput(index, "requires_grad"), op)
        elif leaf.op.kind == "get_attr" and leaf.op.name in tape.owners:
            module, attribute = tape.owners[leaf.op.name]
            if module is not None:
                note(f"{leaf.op.name}.requires_grad", OfTensor(module, attribute, "requires_grad"), op)
