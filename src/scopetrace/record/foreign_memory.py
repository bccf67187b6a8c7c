"""Tensors over memory that torch did not make, as `torch.from_numpy` gives: what Python does to it is no op.

Data flow:
    a tensor of the model, or one that the forward made of an array, is read -> its data then
    at the end of the forward, and once more when Python's state is put back -> other data: an array has changed
    the recorded program -> an op writes to such memory, which the forward reads as an array too
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from scopetrace._compat.tensors import without_dispatch
from scopetrace.errors import UnsupportedOpError
from scopetrace.ir.reads import NO_CALL
from scopetrace.ir.scopes import source_of
from scopetrace.ir.tape import Op, RecordedTape

_LIFTED = torch.ops.aten.lift_fresh_copy.default
_HINT = "keep it as a tensor alone, self.a = torch.from_numpy(a).clone() in __init__, and change it by ops of torch"


class _Seen(NamedTuple):
    op: Op
    tensor: torch.Tensor
    data: torch.Tensor


class ForeignMemory:
    """Refuses what a program cannot say about memory that NumPy and torch share."""

    def __init__(self) -> None:
        self._seen: list[_Seen] = []

    def add(self, real: torch.Tensor, op: Op) -> None:
        """Keep the data of a tensor that `op` reads, if torch did not make its memory."""
        if is_foreign(real) and not isinstance(real, torch.nn.Parameter):  # weights may be a file that is mapped
            self._seen.append(_Seen(op, real, _data_of(real)))

    def refuse_changes(self) -> None:
        """Raise UnsupportedOpError where Python has changed the data of one of them since an op read it."""
        for op, tensor, data in self._seen:
            if not torch.equal(_data_of(tensor), data):
                self._refuse(op, "the forward changes a NumPy array in whose memory this tensor lies")

    def refuse_writes(self, tape: RecordedTape) -> None:
        """Raise UnsupportedOpError where an op writes to memory that the forward may read as an array."""
        if not self._seen:
            return
        written = tape.written_storages()
        lifted = {o.args[0]: o for o in tape.ops if o.target is _LIFTED}  # what `torch.from_numpy` gave
        for op, tensor, _ in self._seen:
            value = lifted.get(op.result, op).result
            if value.storage in written and self._is_read_otherwise(tensor, tape):
                self._refuse(op, "the forward writes to this tensor, which lies in the memory of a NumPy array")

    def _is_read_otherwise(self, tensor: torch.Tensor, tape: RecordedTape) -> bool:
        start, stop = _bytes_of(tensor)
        others = [_bytes_of(other) for _, other, _ in self._seen if other is not tensor]
        return any(a < stop and start < b for a, b in (*others, *_arrays_read(tape)))

    def _refuse(self, op: Op, what: str) -> None:
        where = {"module": str(op.scope), "source": source_of(op.frames)}
        raise UnsupportedOpError(f"{what}: {op.name}", op="torch.from_numpy", **where, hint=_HINT)


def is_foreign(t: torch.Tensor) -> bool:
    """Whether torch did not make the memory of a tensor."""
    is_plain = t.layout is torch.strided and t.device.type == "cpu"
    return is_plain and not t.untyped_storage().resizable()


def _data_of(t: torch.Tensor) -> torch.Tensor:
    with without_dispatch(), torch.no_grad():
        return t.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _bytes_of(t: torch.Tensor) -> tuple[int, int]:
    storage = t.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _arrays_read(tape: RecordedTape) -> Iterator[tuple[int, int]]:
    """The addresses of the arrays that the forward read."""
    for read in tape.reads:
        array: Any = None if read.place.kind == "input" else read.place.now(NO_CALL)
        if hasattr(array, "__array_interface__"):
            start = array.__array_interface__["data"][0]
            yield start, start + array.nbytes
