"""Tensors that a forward itself makes require grad: a graph of ops does not have that.

Data flow:
    inputs and attributes that require grad -> along the ops that autograd records: `kept`, which require grad in calls
    other tensors that require grad in the forward -> along the same ops: `made`
    a result that is `made` and not `kept` -> UnsupportedOpError
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from scopetrace._compat.tensors import is_view
from scopetrace.errors import UnsupportedOpError
from scopetrace.ir.scopes import source_of
from scopetrace.ir.tape import Op, RecordedTape, Value

_CUT = (torch.ops.aten.detach.default,)
"""Ops whose results autograd does not lead to."""


def refuse_lost_gradients(tape: RecordedTape, results: Iterable[Value], examples: Mapping[Value, torch.Tensor]) -> None:
    """Raise UnsupportedOpError for a result that requires grad only by `requires_grad_()` or the like in the forward.

    `examples` are the inputs themselves, as they were given.
    """
    leaves = {v for op in tape.ops if not op.writes for v in op.values() if _is_leaf(v, examples)}
    if not leaves:
        return
    kept, made = _Reach(), _Reach()
    parameters = {v.storage for op in tape.ops if op.kind == "get_attr" for v in op.values() if v.fake.requires_grad}
    for op in tape.ops:
        if op.kind in ("placeholder", "get_attr"):
            for v in op.values():
                (made if v in leaves else kept).start(v)
        elif not kept.follow(op) and not made.follow(op):
            for v in leaves.intersection(op.values()):
                if v.storage not in parameters:  # Module.to makes parameters of the same memory anew
                    made.start(v)
    for value in results:
        if made.has(value) and not kept.has(value):
            raise UnsupportedOpError(
                "the forward itself makes a tensor require grad (requires_grad_(), requires_grad=True, nn.Parameter), "
                "and a result depends on it, which a graph of ops does not have",
                op=str(value.op.target),
                module=str(value.op.scope),
                source=source_of(value.op.frames),
                hint="give the tensor as an argument that requires grad, or make it a parameter of the model; "
                "or return x.detach(); or trace under torch.no_grad()",
            )


class _Reach:
    """The values that autograd leads to from some tensors."""

    def __init__(self) -> None:
        self._values: set[Value] = set()
        self._written: set[int] = set()

    def start(self, v: Value) -> None:
        """Add a value, if it requires grad."""
        if v.fake.requires_grad:
            self._values.add(v)

    def has(self, v: Value) -> bool:
        """Whether it is reached, or lies in memory that an op wrote which reads what is reached."""
        return v in self._values or v.storage in self._written

    def follow(self, op: Op) -> bool:
        """Go on to the results of an op. A leaf module has parameters of its own."""
        if op.target in _CUT:
            return False
        if not op.grad:  # views of what requires grad are tied to it all the same
            storages = {v.storage for v in op.inputs() if v in self._values}
            self._values.update(v for v in op.values() if v.storage in storages)
            return False
        if op.kind != "call_module" and not any(map(self.has, op.inputs())):
            return False
        self._values.update(v for v in op.values() if v.fake.is_floating_point() or v.fake.is_complex())
        self._written.update(v.storage for v in op.writes)
        return True


def _is_leaf(v: Value, examples: Mapping[Value, torch.Tensor]) -> bool:
    """Whether the forward made this tensor require grad; inputs and attributes that did before are none."""
    if v.autograd_placeholder or not v.fake.requires_grad or is_view(v.fake) or not v.fake.is_leaf:
        return False
    real = v.real if v.real is not None else examples.get(v)
    return not real.requires_grad if real is not None else v.op.kind == "call_function"
