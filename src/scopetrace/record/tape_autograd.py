"""Derivatives by the tape: what autograd's engine does, without a graph of autograd.

Data flow:
    what the forward differentiates -> the ops on the tape that lead to it -> from the last one back
    an op, which of its inputs need a gradient, the gradients of its results -> `Formula`, by their metadata
        of the first such op: torch runs it again on tensors of its own, with autograd, and its backward is recorded
        those of torch's own ops for fixed sizes are kept as long as the process lasts
    a Formula -> its ops again, at the end of the tape, on the values of this op
    gradients of one value that meet -> their sum, in the order in which autograd's engine meets them
    what is not known here, such as a view that is written -> Retrace: torch runs every op, and differentiates

Autograd runs the nodes of its graph in the order of their numbers, the last one first; each comes after all that read
what it made. So does each op on the tape, from the last one back.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch

from scopetrace._compat.gradients import gradients_of, saved_storages
from scopetrace._compat.ops import (
    BelowAutograd,
    autocast_enabled,
    autocast_may_change,
    in_transform,
    is_collective,
    is_op,
    is_recording,
    schema_of,
)
from scopetrace._compat.questions import setting_values
from scopetrace._compat.tensors import (
    FakeFactory,
    is_inference_of,
    nbytes_of,
    offset_of,
    requires_grad_of,
    run_op,
    stride_of,
    without_dispatch,
)
from scopetrace.errors import ForeignTensorError, ScopetraceError
from scopetrace.infer.inference import is_same_in_every_trace
from scopetrace.infer.rules import OutputMeta, Outputs
from scopetrace.ir.scopes import Scope
from scopetrace.ir.tape import BackwardNode, Op, Phase, Value, checks_enabled, flat, map_argument, renamed
from scopetrace.ops.functional_variants import functional_variant, undeclared_writes
from scopetrace.ops.higher_order import FUNCTIONS
from scopetrace.record.builder import TapeBuilder, ValueTable
from scopetrace.record.copying import NotRepeated, Step
from scopetrace.record.ops import OpRecorder
from scopetrace.record.phases import PhaseRecorder

_aten = torch.ops.aten
_SUM = _aten.add.Tensor


@dataclasses.dataclass(eq=False)
class Formula:
    """The backward of an op, for inputs, results and gradients of some metadata."""

    places: list[Value]
    """What stands for the inputs of the op, its results, and the gradients of these that there are."""
    steps: list[Step]
    gradients: list[Value | None]
    """Of each input that needs one."""
    reads: list[int]
    """Which of the inputs and results the steps read, or autograd has saved."""

    @property
    def is_noted(self) -> bool:
        """Whether the trace that found it may have noted more than its ops, such as that one has the default dtype."""
        return any(not step.inputs for step in self.steps)

    @property
    def may_be_cast(self) -> bool:
        """Whether autocast would cast the inputs of one of its ops."""
        return any(autocast_may_change(step.op.target) for step in self.steps)

    def without_trace(self) -> Formula:
        """A copy that holds nothing of the trace that found it: its values have no tensors, its ops no scopes."""
        values: dict[Value, Value] = {}
        for v in (*self.places, *(v for step in self.steps for v in step.values)):
            values[v] = new = Value.__new__(Value)
            new.op, new.slot = None, v.slot  # type: ignore[assignment]
        steps = []
        for step in self.steps:
            op = step.op
            parts = renamed(op.args, values), renamed(op.kwargs, values), renamed(op.outputs, values)
            new_op = Op(op.kind, op.target, *parts, _NOWHERE, None, (), op.grad, renamed(op.writes, values))
            steps.append(Step.of(new_op, step.outputs))
        gradients = [v and values[v] for v in self.gradients]
        return Formula([values[v] for v in self.places], steps, gradients, self.reads)


_NOWHERE = Scope("", "")
_of_torch: dict[Any, Formula] = {}
"""The formulas that are the same in every trace, by the settings of torch and all that decides them."""
_MANY = 20_000
"""So many of them are kept."""


class TapeAutograd:
    """Differentiates what is on the tape of one recording. Raises Retrace where only autograd can."""

    def __init__(
        self, builder: TapeBuilder, values: ValueTable, ops: OpRecorder, factory: FakeFactory, phases: PhaseRecorder
    ) -> None:
        self._builder = builder
        self._values = values
        self._ops = ops
        self._inference = ops.inference
        self._copier = ops.copier
        self._factory = factory
        self._phases = phases
        self._formulas: dict[Any, Formula] = {}
        self._sums: dict[tuple[int | None, int | None], Step] = {}
        """By the keys of two gradients, how their sum is repeated."""
        self._keys: dict[Op, Any] = {}
        """Of ops, what stands for all that decides the metadata of their results: the same for copies."""
        self._settings: tuple[Any, ...] = ()
        self._inputs: dict[Op, list[Value]] = {}
        """Of each op that a gradient was asked through, the inputs."""
        self._writes: dict[int, list[int]] = {}
        """By storage, the positions of the ops that write to it, and count the write."""
        self._scanned = 0
        self._position: dict[Op, int] = {}
        self._done: set[Op] = set()
        """The ops through which the forward has differentiated once and for all."""
        self._check = checks_enabled()

    def retrace(self, why: str) -> NoReturn:
        """Record again with autograd."""
        apart = any(op.target in FUNCTIONS for op in self._builder.tape.ops)
        self._builder.expect_no_tape(why, functions_apart=apart)
        raise AssertionError(why)

    # ---------------------------------------------------------------- what leads where

    def leaves_of(self, outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """As `_compat.gradients.leaves_of`, in its order."""
        return [v.fake for v in self._reached(map(self._values.value_of, outputs)) if isinstance(v, Value)]

    def _reached(self, outputs: Iterable[Value]) -> list[Op | Value]:
        """The ops and leaves that a gradient gets to, in the order in which autograd's graph is gone through."""
        seen: dict[Op | Value, None] = {}
        work = list(map(self._node, outputs))
        while work:
            node = work.pop()
            if node not in seen:
                seen[node] = None
                if isinstance(node, Op):
                    work += [self._node(v) for v in self._given(node) if v.requires_grad]
        return list(seen)

    def _node(self, v: Value) -> Op | Value:
        if v.op.kind in ("placeholder", "get_attr"):
            return v
        if v.op.kind != "call_function" or not v.op.grad or not is_op(v.op.target) or v.op.autocast is not None:
            self.retrace("the forward differentiates through what is no plain op")
        return v.op

    def _given(self, op: Op) -> list[Value]:
        found = self._inputs.get(op)
        if found is None:
            found = self._inputs[op] = op.inputs()
        return found

    # ---------------------------------------------------------------- differentiating

    def gradients(
        self,
        outputs: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor | None],
        by: Sequence[torch.Tensor],
        *,
        keeps_graph: bool,
        may_miss: bool,
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients of `outputs`, with `given` as theirs, by some tensors; None where there are none.

        `may_miss` says that it is no error where a tensor has none.
        """
        self._refuse_unknown([*outputs, *by])
        last = [(self._values.value_of(t), g) for t, g in zip(outputs, given, strict=True)]
        self._scan()
        now = setting_values()
        if now != self._settings:
            self._formulas.clear()
            self._sums.clear()
            self._keys.clear()
            self._settings = now
        nodes = self._reached([v for v, _ in last])
        leaves = {id(n.fake): n for n in nodes if isinstance(n, Value)}  # a write since gives a leaf another value
        wanted = [leaves.get(id(t)) or self._values.value_of(t) for t in by]
        ops = sorted((n for n in nodes if isinstance(n, Op)), key=self._position.__getitem__)
        self._refuse_stale([v for v, _ in last], len(self._builder.tape.ops))
        for op in ops:  # also where no gradient is needed: what was written has another history, with other leaves
            self._refuse_stale(self._given(op), self._position[op])
        needed = set(wanted)
        used = [op for op in ops if self._needs(op, needed)]
        recording = is_recording()
        outer, self._builder.op_frames = self._builder.op_frames, self._builder.frames()
        if recording:
            self._ops.mode.switch(False)
        try:
            with torch.no_grad():
                found = self._differentiate(used, last, wanted, needed, keeps_graph=keeps_graph)
        finally:
            self._builder.op_frames = outer
            if recording:
                self._ops.mode.switch(True)
        if not may_miss and None in found:
            self.retrace("a gradient is missing")
        return tuple([None if v is None else v.fake for v in found])

    def _refuse_unknown(self, tensors: list[torch.Tensor]) -> None:
        builder, values = self._builder, self._values
        is_plain = builder.is_plain() and builder.opaque_to_autograd is None
        if builder.regions:
            self.retrace("the forward checkpoints a region")
        if torch.is_anomaly_enabled():
            self.retrace("autograd looks at the data of gradients")
        flagged = builder.former_leaves or builder.detached or values.made_leaves()
        same = any(v.requires_grad for v, _ in values.same)
        if not is_plain or flagged or same or in_transform() or autocast_enabled() or builder.autocast is not None:
            self.retrace("the forward differentiates what only autograd knows")
        if not all(requires_grad_of(t) for t in tensors):
            self.retrace("the forward differentiates what does not require grad")

    def _scan(self) -> None:
        """Note the positions of the ops on the tape, and which of them write."""
        ops = self._builder.tape.ops
        for i in range(self._scanned, len(ops)):
            op = ops[i]
            self._position[op] = i
            if op.writes and not (is_op(op.target) and undeclared_writes(op.target, op.args, op.kwargs)):
                for v in op.writes:
                    self._writes.setdefault(v.storage, []).append(i)
        self._scanned = len(ops)

    def _needs(self, op: Op, needed: set[Value]) -> bool:
        """Whether a gradient through an op gets to what is needed; then its results are."""
        if needed.isdisjoint(self._given(op)):
            return False
        needed.update([v for v in op.values() if v.requires_grad])
        return True

    def _differentiate(
        self,
        ops: list[Op],
        last: list[tuple[Value, torch.Tensor | None]],
        wanted: list[Value],
        needed: set[Value],
        *,
        keeps_graph: bool,
    ) -> list[Value | None]:
        gradients: dict[Value, Value] = {}
        taken = set(wanted)
        for v, t in last:
            if t is not None:
                self._add(gradients, v, self._first_gradient(v, t))
        tape = self._builder.tape
        for op in reversed(ops):
            if op in self._done:
                self.retrace("the forward differentiates through an op again")
            results = op.values()
            own = [gradients.get(v) if v in taken else gradients.pop(v, None) for v in results]
            inputs = self._given(op)
            needs = tuple([v.requires_grad and v in needed for v in inputs])
            found: list[Value | None] = []
            if any(g is not None for g in own):
                found = self._of_op(op, inputs, results, own, needs)
            tape.backwards[-1].append(BackwardNode(op, len(tape.ops), False, not (keeps_graph or in_transform())))
            if not keeps_graph:
                self._done.add(op)
            for v, g in zip([v for v, n in zip(inputs, needs, strict=True) if n], found, strict=False):
                if g is not None:
                    self._add(gradients, v, g)
        return [gradients.get(v) for v in wanted]

    def _first_gradient(self, v: Value, t: torch.Tensor) -> Value:
        gradient = self._values.value_of(t)
        same = v.fake.size() == t.size() and v.fake.dtype == t.dtype and v.fake.device == t.device
        if not same or gradient.requires_grad or gradient.key is None:
            self.retrace("a gradient is not as autograd takes it")
        return gradient

    def _add(self, gradients: dict[Value, Value], v: Value, new: Value) -> None:
        """Add to the gradient of a value."""
        old = gradients.get(v)
        gradients[v] = new if old is None else self._sum(old, new, self._phases.of_value(v))

    def _sum(self, one: Value, other: Value, phase: Phase | None) -> Value:
        """The sum of two gradients, which is recorded once for equal metadata."""
        ops, keys = self._builder.tape.ops, (one.key, other.key)
        step = self._sums.get(keys)
        if step is None or one is other or self._check:
            self._builder.phase = _always(phase)
            self._ops.record(_SUM, (one.fake, other.fake), {})
            step = None if one is other or None in keys else self._copier.step(ops[-1])
            if step is not None and step.outputs is not None:
                self._sums[keys] = step
        else:
            with without_dispatch() as quiet:
                self._copier.copy(step, dict(zip(step.inputs, (one, other), strict=True)), phase, quiet)
        return ops[-1].result

    # ---------------------------------------------------------------- memory that is written

    def _refuse_stale(self, read: Iterable[Value], stop: int) -> None:
        """Retrace where a value is older than a write to its memory before `stop`, which gave it another history."""
        for v in read:
            writes = self._writes.get(v.storage) if v.requires_grad else None
            if writes:
                start = self._position[v.op]
                if any(start < i < stop for i in writes):
                    self.retrace("an op reads a tensor that was written by another alias")

    def _refuse_written(self, op: Op, v: Value, func: Any) -> None:
        """Retrace where backward reads what was written since: autograd raises, or has kept a copy.

        It takes what the op itself writes beside its results, such as statistics, as it is then.
        """
        writes = self._writes.get(v.storage)
        if writes:
            own, start = self._position[op], self._position[v.op]
            if any(i > start and (i != own or func is not op.target) for i in writes):
                self.retrace("backward reads a tensor that was written since")

    # ---------------------------------------------------------------- one op

    def _of_op(
        self, op: Op, inputs: list[Value], results: list[Value], own: list[Value | None], needs: tuple[bool, ...]
    ) -> list[Value | None]:
        """The gradients of the inputs that need one."""
        func = op.target if not op.writes else self._without_writes(op, inputs)
        key = self._key(op, func)
        gradient_keys = tuple([None if g is None else g.key if g.key is not None else -1 for g in own])
        if key is None or -1 in gradient_keys:
            self.retrace("the metadata of a tensor is not known")
        of = key, needs, gradient_keys
        formula = self._formulas.get(of)
        if formula is None:
            known = _of_torch.get((self._settings, of))
            if known is None or self._check:
                formula = self._formula(op, func, inputs, results, own, needs)
                if known is not None:
                    _expect_same(known, formula)
                self._keep(formula, of, [*inputs, *(g for g in own if g is not None)])
            else:
                formula = known
                if self._ops.reads.awaits_cast and formula.may_be_cast:
                    self._ops.reads.on_cast_op()
            self._formulas[of] = formula
        elif self._check:
            _expect_same(formula, self._formula(op, func, inputs, results, own, needs))
        present = [*inputs, *results, *(g for g in own if g is not None)]
        present[:1] = [self._builder.copied_before.get(op, present[0])]
        for i in formula.reads:
            self._refuse_written(op, present[i], func)
        now = dict(zip(formula.places, present, strict=True))
        phase = self._phases.of_op(op)
        try:
            with without_dispatch() as quiet:
                for step in formula.steps:
                    self._copier.copy(step, now, phase, quiet)
        except (NotRepeated, ForeignTensorError):  # also a tensor of a call that is a copy, which is not made yet
            self.retrace("an op of a backward does something else when it is repeated")
        return [v and now[v] for v in formula.gradients]

    def _key(self, op: Op, func: Any) -> Any:
        original = self._builder.originals.get(op, op)
        found = self._keys.get(original)
        if found is None or self._check:
            with torch.enable_grad():
                key = self._inference.key_of_call(func, op.args, op.kwargs)
            assert found is None or found == key, op
            found = self._keys[original] = key
        return found

    def _without_writes(self, op: Op, inputs: list[Value]) -> Any:
        """The op that computes what an op in place does, where autograd takes both in the same way."""
        if not schema_of(op.target).is_mutable or self._ops.updates(op.target):
            return op.target  # such as batch_norm, which writes statistics
        assert is_op(op.target)
        variant = functional_variant(op.target)
        plain = variant is not None and not variant.dropped and isinstance(op.outputs, Value) and len(op.writes) == 1
        if not plain or op.args[0] is not op.writes[0] or torch.Tag.inplace not in op.target.tags:
            self.retrace("an op writes")
        assert variant is not None
        if schema_of(variant.op).names != schema_of(op.target).names:
            self.retrace("an op writes")
        target = inputs[0]
        others = (v for v in self._values.in_storage(target.storage) if v.fake is not target.fake)
        if any(v.requires_grad and self._position.get(v.op, -1) < self._position[op] for v in others):
            self.retrace("an op writes to a tensor that has views")
        return variant.op

    # ---------------------------------------------------------------- formulas

    def _keep(self, formula: Formula, of: Any, values: list[Value]) -> None:
        """Keep a formula for later traces, where it holds in these."""
        if not formula.is_noted and is_same_in_every_trace(of[0], values):
            if len(_of_torch) >= _MANY:
                _of_torch.clear()
            _of_torch[self._settings, of] = formula.without_trace()

    def _formula(
        self,
        op: Op,
        func: Any,
        inputs: list[Value],
        results: list[Value],
        own: list[Value | None],
        needs: tuple[bool, ...],
    ) -> Formula:
        """What torch's backward of an op does, found by running both on tensors that are on no tape."""
        if is_collective(func):
            self.retrace("a collective is differentiated")
        builder, values, tape = self._builder, self._values, self._builder.tape
        mark, start = values.mark(), len(tape.ops)
        frames, builder.op_frames = builder.op_frames, None
        phase, builder.phase = builder.phase, None
        try:
            places = [self._place(v, v.requires_grad) for v in inputs]
            gradients = [None if g is None else self._place(g, False) for g in own]
            Op("placeholder", "given", (), {}, [*places, *(g for g in gradients if g)], tape.root, None, ())
            made = self._run(func, op, places)
            with BelowAutograd(self._detach):
                saved = saved_storages([v.fake for v in made])
            for v, known in zip(made, results, strict=True):
                t, other = v.fake, known.fake
                if (t.size(), stride_of(t), t.dtype) != (other.size(), stride_of(other), other.dtype):
                    self.retrace("an op gives something else without writing")
            pairs = [(v.fake, g.fake) for v, g in zip(made, gradients, strict=True) if g is not None]
            by = [v.fake for v, n in zip(places, needs, strict=True) if n]
            with BelowAutograd(self._detach):
                found = self._ops.recorded(lambda: gradients_of([t for t, _ in pairs], [g for _, g in pairs], by))
            wanted = [None if t is None else values.value_of(t) for t in found]
            steps = [self._step(o) for o in tape.ops[start:]]
        except (RuntimeError, ScopetraceError):  # with the step as it is, autograd raises what eager does
            self.retrace("torch does not differentiate an op alone")
        finally:
            builder.op_frames, builder.phase = frames, phase
            del tape.ops[start:]
            values.return_to(mark)
        given = [*places, *made]
        read = {v for step in steps for v in step.inputs}
        inner = {v for step in steps for v in step.values}.union(given, (g for g in gradients if g))
        written = [v for step in steps for v in step.op.writes]
        if any(v not in inner or v in given for v in written) or any(
            v not in inner for v in (*read, *filter(None, wanted))
        ):
            self.retrace("the backward of an op reads or writes something else")
        # autograd looks at all that a node has saved, also at what the gradients that are wanted do not need
        reads = [i for i, v in enumerate(given) if v in read or v in wanted or v.storage in saved]
        return Formula([*given, *(g for g in gradients if g)], steps, wanted, reads)

    def _place(self, v: Value, requires_grad: bool) -> Value:
        """What stands for a value, alone in its memory, which it shares with nothing else."""
        fake = v.fake
        if is_inference_of(fake):
            self.retrace("a tensor of inference mode is differentiated")
        place = nbytes_of(fake.untyped_storage()), tuple(fake.size()), tuple(stride_of(fake)), offset_of(fake)
        with without_dispatch():
            t = self._factory.placed(place, fake.dtype, fake.device, requires_grad)
        return self._values.new_result(t)

    def _run(self, func: Any, op: Op, places: list[Value]) -> list[Value]:
        """The results of an op, with autograd."""
        fakes = iter([v.fake for v in places])
        args, kwargs = map_argument(lambda x: next(fakes) if isinstance(x, Value) else x, (op.args, op.kwargs))
        with torch.enable_grad(), self._below_autograd(func, op, places):
            out = run_op(self._factory.mode, func, args, kwargs)
        found = [t for t in flat(out) if isinstance(t, torch.Tensor)]
        known = [self._values.by_id.get(id(t)) for t in found]
        made = [v or self._values.new_result(t) for t, v in zip(found, known, strict=True)]
        tape = self._builder.tape
        Op("placeholder", "made", (), {}, tuple(made), tape.root, None, ())
        return made

    def _below_autograd(self, func: Any, op: Op, places: list[Value]) -> contextlib.AbstractContextManager[Any]:
        """What sees the op after autograd: its results are known from the metadata of its inputs."""
        outputs = self._inference.outputs_of(func, op.args, op.kwargs)
        if outputs is None or not all(m is None or isinstance(m, OutputMeta) for m in outputs.tensors):
            return BelowAutograd(self._detach)
        plain = [m._replace(requires_grad=False) if isinstance(m, OutputMeta) else None for m in outputs.tensors]
        known = Outputs(outputs.container, tuple(plain))

        def on_op(called: Any, args: Any, kwargs: Any) -> Any:
            if called is func:
                with without_dispatch():
                    return known.contained(known.make(self._factory, places))
            return self._detach(called, args, kwargs)

        return BelowAutograd(on_op)

    def _detach(self, called: Any, args: Any, kwargs: Any) -> Any:
        """An op below autograd, which detaches the results that it saves, and again when it reads them."""
        return self._factory.detached(args[0]) if called is _aten.detach.default else called(*args, **kwargs)

    def _step(self, op: Op) -> Step:
        step = None if op.grad else self._copier.step(op)
        if step is None:
            self.retrace("the backward of an op does what is no op")
        return step


def _always(phase: Phase | None) -> Callable[[Any, Any], Phase | None]:
    return lambda *_: phase


def _expect_same(known: Formula, again: Formula) -> None:
    """Raise AssertionError where the backward of an op is another than that of one of equal metadata."""
    numbers = [
        {v: i for i, v in enumerate([*f.places, *(v for s in f.steps for v in s.values)])} for f in (known, again)
    ]

    def told(f: Formula, number: dict[Value, int]) -> Any:
        tell = lambda x: map_argument(lambda v: ("value", number[v]) if isinstance(v, Value) else v, x)  # noqa: E731
        steps = [(s.op.target, tell(s.op.args), tell(s.op.kwargs), _keyless(s.outputs)) for s in f.steps]
        return steps, [v and number[v] for v in f.gradients], f.reads

    assert told(known, numbers[0]) == told(again, numbers[1]), known.steps


def _keyless(outputs: Outputs | None) -> Any:
    return outputs and [m._replace(key=None) if isinstance(m, OutputMeta) else m for m in outputs.tensors]
