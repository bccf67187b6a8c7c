"""Parameters that a forward freezes for a part: `requires_grad` of tensors that it has not made.

Data flow:
    `p.requires_grad_(False)` -> ops read `p.detach()` in place of p, until p requires grad again
    `p.requires_grad_(True)` of one that does not -> its fake tensor is a leaf, until p does not require grad again
    at the end -> the flags are again what they were, which a call is compared with; else UnsupportedOpError
"""

from __future__ import annotations

import dataclasses
from typing import NoReturn

import torch

from scopetrace._compat.gradients import hooks_of
from scopetrace._compat.questions import fact_of
from scopetrace._compat.tensors import requires_grad_of, set_requires_grad
from scopetrace.ir.guards import Asked
from scopetrace.ir.tape import Value
from scopetrace.record.reads import ReadRecorder
from scopetrace.record.values import ValueTable


@dataclasses.dataclass
class _Flagged:
    tensor: torch.Tensor
    value: Value
    """What it is where its flag is as before the forward."""
    before: bool


class FlagRecorder:
    """Records what one forward sets `requires_grad` of, among the tensors that are not fake."""

    def __init__(self, values: ValueTable, reads: ReadRecorder) -> None:
        self._builder, self._values, self._reads = values.builder, values, reads
        self._flagged: dict[int, _Flagged] = {}  # by the id of the tensor

    def set(self, t: torch.Tensor, required: bool) -> None:
        """The forward is about to set the flag of a tensor of the model, or from a closure or global."""
        entry = self._flagged.get(id(t))
        value = self._values.value_of(t)
        if value.real is None if entry is None else value.storage != entry.value.storage:
            self._refuse("the forward sets `.data` of a tensor that it freezes", "write it in place: `p.copy_(new)`")
        if entry is None:
            requires_grad = requires_grad_of(t)
            if not self._reads.on_outside(t, "requires_grad", requires_grad):
                place = Asked(fact_of, (t, "requires_grad", ()))
                self._reads.note_once(f"{value.op.name}.requires_grad", requires_grad, place)
        if required == requires_grad_of(t):
            return
        if entry is None:
            entry = self._flagged[id(t)] = _Flagged(t, value, not required)
        fake = entry.value.fake
        if not entry.before:
            set_requires_grad(fake, required)
            self._builder.former_leaves += [] if required else self._values.names_of(fake)
        elif required:
            self._values.by_id[id(t)] = entry.value
        else:
            self._values.by_id[id(t)] = self._values.value_of(fake.detach())

    def value_of(self, t: torch.Tensor) -> Value:
        """The value of a tensor, whether it is frozen or not."""
        entry, current = self._flagged.get(id(t)), self._values.value_of(t)
        return current if entry is None or current.storage != entry.value.storage else entry.value

    def without_frozen(self, by: list[torch.Tensor]) -> list[torch.Tensor]:
        """Those of the leaves of autograd's graph into whose `grad` it adds now."""
        real = {id(e.value.fake): e.tensor for e in self._flagged.values()}
        differentiable = [t for t in by if requires_grad_of(real.get(id(t), t))]
        late = [t for leaf in by if not requires_grad_of(t := real.get(id(leaf), leaf))]
        if late and (not differentiable or any(map(any, hooks_of(*late)))):
            self._refuse(
                "the forward freezes tensors with hooks, or all that requires grad, between what was computed from "
                "them and its backward",
                "freeze after backward()",
            )
        return differentiable

    def finish(self) -> None:
        """Refuse flags that are not put back."""
        for entry in self._flagged.values():
            if requires_grad_of(entry.tensor) != entry.before:
                self._refuse(
                    f"the forward leaves requires_grad of {entry.value.op.name} at {not entry.before}, which was "
                    f"{entry.before} before",
                    "set it back at the end, or set it so before the trace",
                )

    def close(self) -> None:
        """Put the flags back."""
        for entry in self._flagged.values():
            set_requires_grad(entry.tensor, entry.before)

    def _refuse(self, problem: str, hint: str) -> NoReturn:
        raise self._builder.refusal(problem, op="Tensor.requires_grad", hint=hint)
