"""Autograd's history as sets of leaves: from which of them gradients of a tensor go to, read off the ops of a tape.

    leaves, a bit each -> along the ops that autograd records -> the bits of each value

Autograd has one history for a tensor and all its views: a write to one of them is a write to all. `detach()` begins
another one in the same memory.

`scopetrace::overwrite(old, new)` has the value of `new` and the gradient of `old`. That is what a write hidden from
autograd means (under `no_grad`, through `detach()` or `.data`): the data changes, the history does not. No op of ATen
says it. `scopetrace::once_differentiable` is what torch makes of the gradients of a function that is so marked, and
`scopetrace::no_gradient` raises in the place of a backward that no graph can have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from scopetrace._compat.ops import is_op, schema_of
from scopetrace.errors import UnsupportedOpError
from scopetrace.ir.guards import Flag, Guard, OfInput, OfTensor, Source
from scopetrace.ir.tape import Op, RecordedTape, Value, values_in
from scopetrace.ops.functional_variants import is_factory


@torch.library.custom_op("scopetrace::overwrite", mutates_args=())
def overwrite(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """A copy of `new` (same shape and dtype as `old`), through which gradients flow to `old`."""
    return new.clone()


@overwrite.register_fake
def _(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(new)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return grad, None


def _setup(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    if not ctx.needs_input_grad[0]:
        ctx.mark_non_differentiable(output)


overwrite.register_autograd(_backward, setup_context=_setup)

KEEP_MORE = (torch.ops.aten.mkldnn_rnn_layer.default,)
"""Ops that give what their backward reads only where autograd records them, whatever their arguments say."""
NOT_COMPILED = (*KEEP_MORE, torch.ops.aten.lstm.input)
"""Ops that need autograd around them, and what comes apart into these."""
OVERWRITE = torch.ops.scopetrace.overwrite.default
torch.library.define("scopetrace::once_differentiable", "(Tensor gradient, Tensor[] given) -> Tensor")


def differentiated_once(gradient: torch.Tensor, error: Exception) -> torch.Tensor:
    """A copy of a gradient, with a history that raises `error` where it is differentiated. Call with autograd on."""

    def refuse(*_: Any) -> None:
        raise error

    copy = gradient.detach().requires_grad_().clone()
    copy.grad_fn.register_prehook(refuse)  # type: ignore[union-attr]
    return copy


@torch.library.impl("scopetrace::once_differentiable", "CompositeImplicitAutograd")
def once_differentiable(gradient: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """A gradient computed from `gradients`, by a function that cannot be differentiated, as torch marks it."""
    twice = torch.is_grad_enabled() and any(t.requires_grad for t in gradients)
    if not twice:
        return gradient.detach().clone()
    error = RuntimeError("trying to differentiate twice a function that was marked with @once_differentiable")
    return differentiated_once(gradient, error)


@torch.library.custom_op("scopetrace::no_gradient", mutates_args=())
def no_gradient(like: torch.Tensor, why: str) -> torch.Tensor:
    """In the place of the gradient of `like`."""
    raise UnsupportedOpError(why)


@no_gradient.register_fake
def _(like: torch.Tensor, why: str) -> torch.Tensor:
    return torch.empty_like(like)


NO_GRADIENT = torch.ops.scopetrace.no_gradient.default
ONCE_DIFFERENTIABLE = torch.ops.scopetrace.once_differentiable.default

DETACHED = (torch.ops.aten.detach.default, torch.ops.aten.detach_.default, torch.ops.aten.view.dtype)
"""Ops that give memory of their argument without its history."""

NO_VIEWS = (*DETACHED, torch.ops.aten._unsafe_view.default)
"""Ops that give memory of their argument, and whose result autograd takes for a tensor of its own."""


class History:
    """The bits of the values of some ops."""

    def __init__(
        self, ops: Iterable[Op], leaves: Mapping[Value, int], of_modules: int = 0, *, assumed: bool = False
    ) -> None:
        """Go along the ops.

        Args:
            ops: in the order in which they run.
            leaves: the bits of each leaf.
            of_modules: the bits of what a leaf module makes, which has parameters of its own.
            assumed: whether all leaves count as if they required grad.
        """
        self._assumed, self._leaves, self._of_modules = assumed, leaves, of_modules
        self._family: dict[Value, Value] = {}  # of views that of their base
        self._bits: dict[Value, int] = {}  # of the first of each family
        for op in ops:
            self.add(op)

    def add(self, op: Op) -> None:
        """Go on by an op."""
        results = op.values()
        self._follow(op, results)
        for v in results:
            if v in self._leaves:
                self._family[v] = v
                self._bits[v] = self._leaves[v]

    def of(self, v: Value) -> int:
        """The bits of the leaves that autograd leads to from a value, as the last op left it."""
        return self._bits.get(self._family.get(v, v), 0)

    def is_detached(self, v: Value) -> bool:
        """Whether autograd takes a value for a tensor of its own, in the memory of another."""
        return self._family.get(v, v).op.target in NO_VIEWS

    def _follow(self, op: Op, results: list[Value]) -> None:
        inputs = op.inputs()
        for v in results if inputs else ():
            base = _base(v, inputs)
            if base is not None:
                self._family[v] = self._family.get(base, base)
        bits = self._of_modules if op.kind == "call_module" else 0
        if not (bits or self._bits) or not (op.grad or self._assumed) or op.target in DETACHED or is_factory(op):
            return
        if not op.writes:
            self._add_bits(op, inputs, results, bits)
            return
        for sources, changed in _parts(op, inputs, results):
            self._add_bits(op, sources, changed, bits)

    def _add_bits(self, op: Op, sources: list[Value], changed: list[Value], bits: int) -> None:
        """Add `bits`, and those of `sources`, to those of what an op changes."""
        for v in sources[:1] if op.target is OVERWRITE else sources:
            bits |= self.of(v)
        for v in changed if bits else ():
            gains = self._assumed or v in op.writes
            if v.ever_requires_grad or (gains and can_require_grad(v)):
                family = self._family.get(v, v)
                self._bits[family] = self._bits.get(family, 0) | bits


def _parts(op: Op, inputs: list[Value], results: list[Value]) -> Iterator[tuple[list[Value], list[Value]]]:
    """What an op that writes reads, and makes or writes of it; of a foreach op, for each tensor alone."""
    changed = [*results, *op.writes]
    if not (is_op(op.target) and schema_of(op.target).op_name.startswith("_foreach_")):
        yield inputs, changed
        return
    for i, t in enumerate(values_in(op.args[0])):
        arguments = [a[i] if isinstance(a, (list, tuple)) else a for a in (*op.args, *op.kwargs.values())]
        yield values_in(arguments), [v for v in changed if v.fake is t.fake]


def is_cut(v: Value) -> bool:
    """Whether a value requires grad as its base does, to which no gradient goes: a view made without autograd."""
    while (base := _base(v, v.op.inputs())) is not None:
        if not (v.op.grad or base.fake is v.fake):
            return v.fake.requires_grad
        v = base
    return False


def is_view(v: Value) -> bool:
    """Whether autograd takes a value for a view of another."""
    base = _base(v, v.op.inputs())
    if base is not None and is_op(v.op.target) and torch.Tag.inplace_view in v.op.target.tags:
        return is_view(base)  # the same tensor in another shape, as by `t_`
    return base is not None and base.fake is not v.fake


def _base(v: Value, inputs: list[Value]) -> Value | None:
    """What a value is for autograd a view of, or the same tensor as, among the inputs of its op."""
    storage = v.storage
    sharing = [i for i in inputs if i.storage == storage]
    if not sharing or v.op.target in NO_VIEWS:
        return None
    return next((i for i in sharing if i.fake is v.fake), sharing[0])


def root_of(v: Value) -> Value:
    """The first value of the memory of a value: an input, an attribute, or what an op made."""
    while (base := next((i for i in v.op.inputs() if i.storage == v.storage), None)) is not None:
        v = base
    return v


def plain_leaves(tape: RecordedTape) -> dict[Value, int]:
    """The inputs and parameters that could require grad in a call and do not in the trace, with a bit each.

    In a trace without autograd, no tensor counts as one that requires grad.
    """
    switches = tape.grad and not any(op.writes or op.phase for op in tape.ops)  # the graph does, for inputs
    plain = [
        v
        for op in tape.ops
        if op.kind == "get_attr" or (op.kind == "placeholder" and not switches)
        for v in op.values()
        if op.kind == "placeholder" or isinstance(v.real, torch.nn.Parameter)
        if can_require_grad(v) and not (v.requires_grad and tape.grad)
    ]
    return {v: 1 << i for i, v in enumerate(plain)}


def can_require_grad(v: Value) -> bool:
    """Whether its dtype has gradients."""
    return v.fake.is_floating_point() or v.fake.is_complex()


def note_leaf(tape: RecordedTape, leaf: Value, op: Op) -> None:
    """Put reads on the tape, once each, for an input or attribute on which the program would depend in a call.

    Args:
        tape: that of the program.
        leaf: a tensor that may require grad in a call, and does not in the trace.
        op: what autograd would take otherwise.
    """
    if not tape.grad:
        _note_read(tape, "torch.is_grad_enabled()", Flag("torch.is_grad_enabled", ()), op)
        if not op.grad or leaf.requires_grad or not tape.written_storages():
            return  # the graph of a program that does not write switches autograd on
    if leaf in tape.inputs:
        index = tape.inputs.index(leaf)
        _note_read(tape, f"{tape.input_paths[index]}.requires_grad", OfInput(index, "requires_grad"), op)
    elif leaf.op.kind == "get_attr" and leaf.op.name in tape.owners:
        module, attribute = tape.owners[leaf.op.name]
        if module is not None:
            _note_read(tape, f"{leaf.op.name}.requires_grad", OfTensor(module, attribute, "requires_grad"), op)


def _note_read(tape: RecordedTape, name: str, source: Source, op: Op) -> None:
    if not any(type(guard.source) is type(source) and guard.source == source for guard in tape.guards):
        tape.guards.append(Guard(name, False, source, op.frames, op.scope.path))
