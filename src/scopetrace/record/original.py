"""A recorded module call that others may repeat, and how each of its ops is repeated.

Data flow:
    a call that has ended, its ops and the calls inside -> Original: why it cannot be repeated, or
    at the first repetition: a step for each op, and whether the ops of repetitions can wait until they are read
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from scopetrace._compat.ops import is_collective, is_op
from scopetrace._compat.tensors import is_leaf_of, is_plain_real, offset_of
from scopetrace.containers.structure import leaves
from scopetrace.infer.rules import OutputMeta, Outputs
from scopetrace.ir.scopes import Frames, Scope
from scopetrace.ir.tape import Call, Op, Value
from scopetrace.record.copying import Step
from scopetrace.record.reads import Noted, Watched

_aten = torch.ops.aten
_LITERAL = _aten.lift_fresh_copy.default
"""The op of `torch.tensor([...])`."""
_ALIASES = (_aten.detach.default, _aten.as_strided.default)
"""What aliases that Python made are recorded as, for which no op was called."""


@dataclasses.dataclass(slots=True, eq=False)
class StepOfCall(Step):
    """How an op of a call is repeated."""

    is_inner: bool = False
    """Whether nothing but copied ops reads its results, or what shares memory with them."""
    is_plain_read: bool = False
    """Whether it is an attribute, and its tensor one of which no op makes the metadata."""


LayoutOfModel = tuple[torch.Tensor, str, Noted]
"""A tensor of the model, what was asked of its layout, and where."""


@dataclasses.dataclass(eq=False)
class Original:
    """A recorded call that others may repeat."""

    call: Call
    ops: list[Op]
    calls: list[Call]
    """Those inside, in order."""
    inputs: list[Value]
    """The tensors among its arguments."""
    asked: list[Value]
    """The tensors whose layout it asked for."""
    layouts: list[LayoutOfModel]
    """Of the tensors of its modules, what was asked, and where."""
    contiguous: list[tuple[Value, int, Frames]]
    """What `contiguous()` gave back as it was, the number of ops then, and the frames."""
    outside: list[Value] = dataclasses.field(default_factory=list)
    """The parameters, buffers and constants that it reads and that were on the tape before."""
    read_first: list[Value] = dataclasses.field(default_factory=list)
    """The attributes that it was the first to read."""
    literals: set[Op] = dataclasses.field(default_factory=set)
    """Those of them that are constants written in the code."""
    steps: list[StepOfCall] = dataclasses.field(default_factory=list)
    """One for each op, known since the first repetition."""
    makers: dict[int, Callable[[], torch.Tensor]] = dataclasses.field(default_factory=dict)
    """By id of the metadata in a step, what makes such a tensor in memory of its own."""
    inside: dict[Call, list[Call]] = dataclasses.field(default_factory=dict)
    """The calls in each call."""
    reads: list[tuple[int, Op]] = dataclasses.field(default_factory=list)
    """The ops of `read_first`, each with the position of its step."""
    results: dict[Value, tuple[int, OutputMeta]] = dataclasses.field(default_factory=dict)
    """The tensors that it makes and gives back, each with its number among the outputs of its op."""
    sharing: dict[Value, Value] = dataclasses.field(default_factory=dict)
    """By value that it makes in memory of its arguments, of what was there before, or of its results: one of these."""
    owners: dict[int, Any] = dataclasses.field(default_factory=dict)
    """By id, those of its modules and objects of which the next three are known."""
    seen: list[tuple[Watched, int]] = dataclasses.field(default_factory=list)
    """What was read of its modules and objects, by id of these."""
    unfound: list[tuple[Any, str, Noted]] = dataclasses.field(default_factory=list)
    """The names that they did not have, each with where it was asked for."""
    whole: list[tuple[Any, Noted]] = dataclasses.field(default_factory=list)
    """Those of them whose `__dict__` was asked for, each with where it was."""
    facts: dict[int, Any] = dataclasses.field(default_factory=dict)
    """By id of one of its modules and their tensors, what is known of it: see `Pairs`."""
    members: list[torch.Tensor] = dataclasses.field(default_factory=list)
    """The tensors of its modules that code has asked for, beside ops."""
    scopes: list[tuple[int, Scope]] = dataclasses.field(default_factory=list)
    """The scopes of users inside, each with the position of the first op that is in it."""
    can_wait: bool = False
    """Whether the ops of a repetition can be made when they are read, and its results now."""

    def problem(self, owners: Any) -> str:
        """Why the call cannot be repeated; empty where it can. `owners` has the names of the model's own tensors."""
        literals = {op.inputs()[0].op for op in self.ops if op.target is _LITERAL}
        for op in self.ops:
            is_call = op.kind == "call_function" and is_op(op.target) and not is_collective(op.target)
            if op.kind == "get_attr":
                self.read_first.append(op.result)
                if op.name not in owners:
                    if op not in literals:
                        return "it makes a constant"
                    self.literals.add(op)
                if any(v.storage == op.result.storage for v in self.inputs):
                    return "it takes a view of a tensor of its own"
            elif not is_call or op.target in _ALIASES or op.unbacked or op.meta or op.phase:
                return f"it has the op {op.target}"
        if any(c.raised is not None or c.leaf or c.replaced for c in (self.call, *self.calls)):
            return "a call in it raised an error, or is a leaf"
        known = {v for op in self.ops for v in op.values()}.union(self.inputs)
        templates = [(c.args, c.kwargs, c.outputs) for c in (self.call, *self.calls)]
        used = [*(v for op in self.ops for v in op.inputs()), *leaves(templates, Value), *self.asked]
        self.outside = [v for v in dict.fromkeys(used) if v not in known]
        if any(v.op.kind != "get_attr" for v in self.outside):
            return "it reads a tensor that is none of its arguments"
        return ""

    def prepare(self, outputs_of: Callable[[Op], Outputs | None]) -> None:
        """Find how each op is repeated; `outputs_of` says what the results of one are, None where it is not known."""
        steps = [StepOfCall.of(op, outputs_of(op)) for op in self.ops]
        seen = [*self.inputs, *self.outside, *self.asked, *leaves(self.call.outputs, Value)]
        seen += [v for v, _, _ in self.contiguous]
        for step in steps:
            if step.outputs is None or not step.outputs.is_static():
                seen += step.values if step.op.kind == "get_attr" else (*step.inputs, *step.values)
        shared = {v.storage for v in seen}
        for step in steps:
            op = step.op
            step.is_inner = all(v.storage not in shared for v in step.values)
            step.is_plain_read = op.kind == "get_attr" and op not in self.literals and _is_plain(op.result.real)
        self.steps = steps
        self.inside = {}
        for inner in self.calls:
            assert inner.parent is not None
            self.inside.setdefault(inner.parent, []).append(inner)
        self.can_wait = self._find_what_waits()

    @functools.cached_property
    def modules(self) -> list[torch.nn.Module | None]:
        """Those of the calls inside."""
        return [inner.module for inner in self.calls]

    @functools.cached_property
    def runs_first(self) -> list[int]:
        """Of the calls inside, the numbers of those that are the first ones of their modules there."""
        found: dict[int, int] = {}
        for i, inner in enumerate(self.calls):
            found.setdefault(id(inner.module), i)
        return list(found.values())

    @functools.cached_property
    def is_first(self) -> bool:
        """Whether none of its modules was called before."""
        return not self.call.index and not any(self.calls[i].index for i in self.runs_first)

    def _find_what_waits(self) -> bool:
        self.reads = [(i, step.op) for i, step in enumerate(self.steps) if step.op.kind == "get_attr"]
        known = {*self.inputs, *self.outside}
        wanted = [v for v in leaves(self.call.outputs, Value) if v not in known]
        made = {v: step for step in self.steps for v in step.values}
        for v in wanted:
            step = made[v]
            meta = None if step.outputs is None else step.outputs.tensors[v.slot]
            if not isinstance(meta, OutputMeta) or meta.base is not None:
                return False
            self.results[v] = v.slot, meta
        entered: dict[Scope, int] = {}
        for i, step in enumerate(self.steps, self.call.start):
            entered.setdefault(step.op.scope, i)
        self.scopes = [(i, scope) for scope, i in entered.items() if not scope.is_module]
        first: dict[int, Value] = {}
        for v in (*self.inputs, *self.outside, *(op.result for _, op in self.reads), *self.results):
            first.setdefault(v.storage, v)
        if len({op.result.storage for _, op in self.reads}) < len(self.reads):
            return False
        for step in self.steps:
            if step.outputs is None or not step.outputs.is_static():
                if not step.is_plain_read or offset_of(step.op.result.fake):
                    return False
            else:
                hidden = [v for v in step.values if v.storage in first and v not in self.results]
                self.sharing.update((v, first[v.storage]) for v in hidden)
        # what it makes for itself has no layout that a later write or a result could be asked for
        return all(v.storage not in first for v, _, _ in self.contiguous)


def _is_plain(real: torch.Tensor | None) -> bool:
    return real is not None and is_leaf_of(real) and is_plain_real(real)
