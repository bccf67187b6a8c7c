"""Tensors over memory that torch did not make, as `torch.from_numpy` gives: what Python does to it is no op.

Data flow:
    a tensor of the model, or one that the forward made of an array, is read -> its data then
    at the end of the forward, and once more when Python's state is put back -> other data: an array has changed
    the recorded program -> an op writes to such memory, which the forward reads as an array too
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from scopetrace._compat.tensors import without_dispatch
from scopetrace.errors import UnsupportedOpError
from scopetrace.ir.guards import NO_CALL
from scopetrace.ir.tape import Op, RecordedTape
from scopetrace.record.builder import place_of

_LIFTED = torch.ops.aten.lift_fresh_copy.default
_HINT = "keep it as a tensor alone, self.a = torch.from_numpy(a).clone() in __init__, and change it by ops of torch"


class ForeignTensor(NamedTuple):
    """A tensor whose memory torch did not make, as an op reads it."""

    op: Op
    tensor: torch.Tensor
    data: torch.Tensor
    """Its bytes when the op read it: u8[n]."""


def refuse_changes(tensors: Sequence[ForeignTensor]) -> None:
    """Raise UnsupportedOpError where Python has changed the data of one since its op read it."""
    for op, t, data in tensors:
        if not torch.equal(data_of(t), data):
            _refuse(op, "the forward changes a NumPy array in whose memory this tensor lies")


def refuse_writes(tensors: Sequence[ForeignTensor], tape: RecordedTape) -> None:
    """Raise UnsupportedOpError where an op writes to the memory of one, and the forward may read it as an array."""
    written = tape.written_storages()
    for op, t, _ in tensors:
        lifted = (o.result for o in tape.ops if o.target is _LIFTED and o.args[0] is op.result)
        if next(lifted, op.result).storage in written:  # lifted: what `torch.from_numpy` gave
            start, stop = _bytes_of(t)
            others = [_bytes_of(other.tensor) for other in tensors if other.op is not op]
            if any(a < stop and start < b for a, b in (*others, *_arrays_read(tape))):
                _refuse(op, "the forward writes to this tensor, which lies in the memory of a NumPy array")


def _refuse(op: Op, what: str) -> None:
    raise UnsupportedOpError(f"{what}: {op.name}", **{**place_of(op), "op": "torch.from_numpy"}, hint=_HINT)


def is_foreign(t: torch.Tensor) -> bool:
    """Whether torch did not make the memory of a tensor. Weights may be a file that is mapped."""
    is_plain = t.layout is torch.strided and t.device.type == "cpu" and not isinstance(t, torch.nn.Parameter)
    return is_plain and not t.untyped_storage().resizable()


def data_of(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: u8[n]."""
    with without_dispatch(), torch.no_grad():
        return t.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _bytes_of(t: torch.Tensor) -> tuple[int, int]:
    storage = t.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _arrays_read(tape: RecordedTape) -> Iterator[tuple[int, int]]:
    """The addresses of the arrays that the forward read."""
    for guard in tape.guards:
        array: Any = None if guard.source.kind == "input" else guard.source.current(NO_CALL)
        if hasattr(array, "__array_interface__"):
            start = array.__array_interface__["data"][0]
            yield start, start + array.nbytes
