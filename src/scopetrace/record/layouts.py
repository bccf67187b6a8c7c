"""Which inputs must be laid out in a call as in the trace, since an op gave a view there and gives a copy otherwise.

Data flow:
    ops such as `reshape`, calls of `x.contiguous()` that gave x itself -> those whose memory is written later, or that
    give the memory of an input back -> the inputs that their operand is computed from

Where nothing is written and nothing is given back, a view and a copy have the same values.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from scopetrace.containers.structure import leaves
from scopetrace.ir.scopes import Frames
from scopetrace.ir.tape import Tape, Value

_aten = torch.ops.aten
_VIEWS_OR_COPIES = frozenset(
    {
        *(_aten.reshape.default, _aten.reshape_as.default, _aten.flatten.using_ints, _aten.ravel.default),
        *(_aten.contiguous.default, _aten.to.dtype, _aten.to.other, _aten.to.device, _aten.to.dtype_layout),
    }
)


def inputs_of_layouts(tape: Tape, contiguous: list[tuple[Value, int, Frames]]) -> dict[int, Frames]:
    """The positions of these inputs, with the frames of the op.

    `contiguous` has what `x.contiguous()` gave back, the number of ops then, and the frames.
    """
    last_write = {v.storage: i for i, op in enumerate(tape.ops) for v in op.writes}
    if not last_write and not contiguous:
        return {}
    of_inputs = {v.storage for v in tape.inputs}
    returned = {v.storage for v in leaves(tape.calls[0].outputs, Value)} & of_inputs
    found = [(v, at) for v, i, at in contiguous if v.storage in returned or last_write.get(v.storage, -1) >= i]
    for i, op in enumerate(tape.ops):
        if op.target in _VIEWS_OR_COPIES and op.inputs():
            operand = op.inputs()[0]
            if any(last_write.get(v.storage, -1) > i for v in (operand, *op.values())):
                found.append((operand, op.frames))
    positions = {v: i for i, v in enumerate(tape.inputs)}
    return {positions[v]: at for operand, at in reversed(found) for v in _computed_from(operand) if v in positions}


def _computed_from(value: Value) -> Iterator[Value]:
    """The values that `value` is computed from, itself included."""
    seen: set[Value] = set()
    values = [value]
    while values:
        value = values.pop()
        if value not in seen:
            seen.add(value)
            yield value
            values += value.op.inputs()
