"""The ops, values and calls of one module call again, at the end of the tape, with the tensors of another call.

Data flow:
    ops of the Original, in order -> values of this call in place of its values
    an op whose result follows from metadata -> the result made from that, and a new Op, without dispatcher or Python
    any other op, such as one that writes -> recorded as if Python had called it, on the tensors of this call
    an attribute that the Original was the first to read -> that of the other module, unless it is on the tape already
    calls inside, and what was read -> the same of the other module's modules, with its scopes and frames
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from scopetrace._compat.ops import eager, is_op
from scopetrace._compat.questions import inference_mode_enabled
from scopetrace._compat.tensors import (
    FakeFactory,
    FakeMaker,
    in_inference_mode,
    storage_id,
    without_dispatch,
)
from scopetrace.containers.structure import instantiate, map_structure
from scopetrace.infer.rules import Identity, OutputMeta, Outputs
from scopetrace.ir.scopes import Frames, Scope
from scopetrace.ir.tape import Call, CallList, Op, OpList, Value, map_argument
from scopetrace.ir.unmade import UnmadeValue, WaitingValue
from scopetrace.record.builder import Assumptions, Retrace, TapeBuilder, ValueTable
from scopetrace.record.model import Model
from scopetrace.record.object_reads import ObjectReads
from scopetrace.record.ops import OpRecorder
from scopetrace.record.original import Original, StepOfCall
from scopetrace.record.pairs import Differs, Pairs
from scopetrace.record.reads import ReadRecorder
from scopetrace.record.repeated_reads import Elsewhere, Repeated


class CallOpener(Protocol):
    """Puts calls on the tape."""

    @property
    def reports(self) -> bool:
        """Whether somebody is told of each call when it begins."""

    def number(self, modules: Sequence[Any]) -> tuple[int, list[int]]:
        """The position of the first of the next calls, and of each module in turn how many calls of it were before."""

    def open_copy(
        self,
        call: Call,
        module: Any,
        place: tuple[Call, Scope],
        frames: Frames,
        start: int,
        given: Any,
        number: tuple[int, int],
    ) -> Call:
        """A call of `module` inside of a repetition, as `call` is inside of the original.

        `place` is the call and the scope around it, and `given` the templates of its arguments, or a function that
        makes these and the results of `call`. `number` is that of the method of this name.
        """


@dataclasses.dataclass(eq=False)
class Tools:
    """What a repetition works with: the parts of the recording."""

    builder: TapeBuilder
    values: ValueTable
    ops: OpRecorder
    maker: FakeFactory
    model: Model
    object_reads: ObjectReads
    reads: ReadRecorder


class Replay:
    """One repetition: `call` is to be what the call of the original was."""

    def __init__(
        self,
        original: Original,
        call: Call,
        pairs: Pairs,
        tensors: list[torch.Tensor],
        inputs: list[Value],
        tools: Tools,
        calls: CallOpener,
    ) -> None:
        """`tensors` are those among the arguments, and `inputs` their values.

        Raises Differs where the tape has not what the call begins with.
        """
        self.original, self._call, self._pairs, self._tools = original, call, pairs, tools
        self._calls = calls
        self._builder, self._values = tools.builder, tools.values
        self._given = dict(zip(reversed(inputs), reversed(tensors), strict=True))
        self._now = dict(zip(original.inputs, inputs, strict=True))
        for v in original.outside:
            self._now[v] = self._known(v)
        self._own = pairs.partners([value.real for value in original.read_first if value.real is not None])
        self._refuse_other_memory(inputs)
        taken = self._builder.tape.inputs
        if any(v in taken or self._now.get(v) in taken for v in original.asked):
            raise Differs("the layout of an input of the model is asked for")
        self._scopes = {id(original.call.scope): call.scope}
        self._place = Elsewhere(original.call, call)
        self._frames_of, self._frames = self._place.frames, self._place.known
        self._starts: list[int] = []
        self._first, self._indices = 0, list[int]()  # of the calls inside: see `CallOpener.number`
        self._opened: list[Call] | None = None
        self.call_count = len(original.calls)
        self.call, self.repeated, self.count, self._waits = call, original.call, 0, False
        self._results: dict[Value, WaitingValue] = {}
        self._reads: dict[Op, WaitingValue] = {}
        self._copies: dict[Call, Call] = {original.call: call}
        self._late: dict[int, list[Value]] = {}
        self._counts: dict[int, int] = {}
        self._known_reads: list[int] = []
        self._storages: list[int] = []  # of the tensors that it is the first to use
        self._tape = tools.builder.tape
        self._quiet = without_dispatch()
        self._in_inference = inference_mode_enabled()

    def _known(self, v: Value) -> Value:
        """The value of the tensor that stands for one that was on the tape before the original."""
        known = self._values.by_id
        found = known.get(id(self._pairs.partner(v.real)))
        if found is None or known.get(id(v.real)) is not v:
            raise Differs("it is the first to use one of its tensors")
        return found

    def _refuse_other_memory(self, inputs: list[Value]) -> None:
        before, now = [v.storage for v in self._now], [v.storage for v in self._now.values()]
        if list(map(before.index, before)) != list(map(now.index, now)):
            raise Differs("its tensors share memory otherwise")
        known = self._values.by_id
        given, used = {v.storage for v in inputs}, map(id, self._own)
        if any(known[key].storage in given for key in known.keys() & used):
            raise Differs("it takes a view of a tensor of its own")

    # ---------------------------------------------------------------- what stands for what

    def _scope_of(self, old: Scope) -> Scope:
        found = self._scopes.get(id(old))
        if found is None:
            parent = old.parent and self._scope_of(old.parent)
            found = old if parent is old.parent or parent is None else parent.child(old.name, old.type_name)
            self._scopes[id(old)] = found
        return found

    def _template(self, x: Any) -> Any:
        return map_structure(self._now.__getitem__, x, Value, (), self._pairs.partner)

    def _tensor(self, v: Value) -> torch.Tensor:
        """What Python has for a value."""
        if v in self._given:
            return self._given[v]
        return v.real if v.real is not None and self._values.by_id.get(id(v.real)) is v else v.fake

    # ---------------------------------------------------------------- the calls

    def run(self) -> Any:
        """Put everything on the tape. Returns what the module would."""
        original = self.original
        if not original.steps:
            original.prepare(self._outputs_of)
        if original.can_wait and self._can_wait():
            self._wait()
        else:
            self._make_now()
        self._note_reads()
        self._call.outputs = self._template(original.call.outputs)
        return instantiate(self._tensor, self._call.outputs, Value)

    def _note_reads(self) -> None:
        """Note of the objects of this call what was read of those of the original."""
        original, tools, partner, noted = self.original, self._tools, self._pairs.partner, self._place.noted
        reads = tools.object_reads
        original.members = [t for t in self._pairs.tensors if id(t) in tools.reads.members]
        # the next repetition may have others for more of them, where this one shares some with the original
        new = [x for x in self._pairs.owners if id(x) not in original.owners]
        if new:
            original.owners.update([(id(x), x) for x in new])
            original.seen += reads.seen(new)
            original.unfound += reads.unfound(new)
            original.whole += reads.whole(new)
        del self._pairs.owners, self._pairs.tensors
        is_first = not self.call.index and not any(self._indices[i] for i in original.runs_first)
        repeated = Repeated(original, self.call, partner, self._pairs.others(original.owners))
        reads.repeat(repeated, at_once=not (original.is_first and is_first))
        for owner, name, where in original.unfound:
            reads.note_unfound(partner(owner), name, noted(where))
        for owner, where in original.whole:
            reads.note_whole(partner(owner), noted(where))
        tools.reads.members.update([(id(t), t) for t in self._pairs.partners(original.members)])
        for t, question, where in original.layouts:
            tools.reads.on_layout_of_model(partner(t), question, noted(where))

    def _make_now(self) -> None:
        original, tools = self.original, self._tools
        outer, self._builder.op_frames = self._builder.op_frames, None
        try:
            with self._quiet:
                self._repeat_inside(original.call, self._call)
        finally:
            self._builder.op_frames = outer
        self._starts.append(len(self._builder.tape.ops))
        for v, position, frames in original.contiguous:
            start = self._starts[position - original.call.start]
            tools.reads.contiguous.append((self._now[v], start, self._frames_of(frames)))

    # ---------------------------------------------------------------- ops that wait

    def _can_wait(self) -> bool:
        """Whether nothing else is known of the tensors that it is the first to use, and the ops are not soon read."""
        if self._builder.derives_by_tape:
            return False
        known, storages = self._values.by_id, self._pairs.storages
        new = [id(real) for real in self._own if id(real) not in known]
        if not self._tools.model.has_all(new):
            return False
        lies_in = self._storages = [storages[key] for key in new]
        return self._tools.maker.has_none(lies_in) and self._values.waiting.isdisjoint(lies_in)

    def _wait(self) -> None:
        """Make what Python gets, and the calls. The ops and all other values are made by `make`."""
        values, ops, original = self._values, self._builder.tape.ops, self.original
        assert isinstance(ops, OpList)
        fill = ops.fill
        if not ops.waiting:
            values.inserted.clear()
        reals = list[torch.Tensor]()
        for (position, op), real, value in zip(original.reads, self._own, original.read_first, strict=True):
            found = values.by_id.get(id(real))
            if found is None:
                found = self._reads[op] = WaitingValue(fill, real)
                reals.append(real)
            else:
                self._known_reads.append(position)
            self._now[value] = found
        values.enter_waiting(reals, [*self._reads.values()], self._storages)
        with self._quiet:
            for v, (slot, meta) in original.results.items():
                new = self._results[v] = self._now[v] = WaitingValue(fill, None)
                fake = meta.make(self._tools.maker, None)
                new.know(fake, slot, storage_id(fake), meta.key, meta.requires_grad)
                values.enter(new)
        there = [v for v in dict.fromkeys(original.sharing.values()) if v.op not in self._reads]
        shared = [self._now[v].storage for v in there]
        self._counts = {storage: values.count_in(storage) for storage in shared}
        values.waiting.update(shared)
        self._waits, self.count = True, len(original.steps) - len(self._known_reads)
        self._give = self._given_to
        self._first, self._indices = self._calls.number(self._pairs.partners(original.modules))
        calls = self._tape.calls
        assert isinstance(calls, CallList)
        calls.wait(self)
        ops.wait(self)
        if self._calls.reports:
            calls.fill()

    def called(self) -> Iterator[tuple[torch.nn.Module | None, Frames, str]]:
        """As `Repetition.called`."""
        own, new = self.original.call.scope.path, self._call.scope.path
        modules = self._pairs.partners(self.original.modules)
        for inner, module in zip(self.original.calls, modules, strict=True):
            yield module, self._frames_of(inner.frames), new + inner.scope.path[len(own) :]

    def calls(self) -> list[Call]:
        """As `Repetition.calls`."""
        if self._opened is None:
            self._opened = self._open_inside()
        return self._opened

    def _position(self, old: int) -> int:
        """Where on the tape stands what stands at `old` for the original."""
        step = old - self.original.call.start
        left_out = bisect.bisect_left(self._known_reads, step) if self._known_reads else 0
        return self._call.start + step - left_out

    def _open_inside(self) -> list[Call]:
        """The calls inside, of which the arguments wait. Scopes of users are entered in their order too."""
        original, copies, opened = self.original, self._copies, list[Call]()
        scopes = original.scopes[::-1]
        for i, module in enumerate(self._pairs.partners(original.modules)):
            inner = original.calls[i]
            while scopes and scopes[-1][0] < inner.start:
                self._scope_of(scopes.pop()[1])
            assert inner.parent is not None and inner.scope.parent is not None
            place, start = (copies[inner.parent], self._scope_of(inner.scope.parent)), self._position(inner.start)
            number = self._first + i, self._indices[i]
            copy = self._calls.open_copy(inner, module, place, self._frames_of(inner.frames), start, self._give, number)
            copy.stop = self._position(inner.stop)
            copies[inner], self._scopes[id(inner.scope)] = copy, copy.scope
            opened.append(copy)
        for _, scope in reversed(scopes):
            self._scope_of(scope)
        return opened

    def _given_to(self, inner: Call) -> tuple[Any, ...]:
        """The fields of a call inside that wait."""
        self._tape.fill()
        return tuple([self._template(x) for x in (inner.args, inner.kwargs, inner.outputs)])

    def make(self) -> list[Op]:
        """As `Repetition.make`."""
        self.calls()
        ops: list[Op] = []
        for step in self.original.steps:
            op = step.op
            assert op.call is not None
            place = self._scope_of(op.scope), self._copies[op.call], self._frames_of(op.frames)
            if step.outputs is not None:
                ops.append(self._copy(step, step.outputs, place))
            elif op in self._reads:
                ops.append(self._read_late(op, self._reads[op], place))
        for storage, late in self._late.items():
            self._values.enter_late(storage, self._counts.get(storage, 0), late)
        self._values.waiting.clear()
        del self._tools, self._values, self._builder, self._calls
        return ops

    def now(self, value: Value) -> Value:
        """As `Repetition.now`."""
        return self._now[value]

    def operands(self) -> list[Value]:
        """As `Repetition.operands`."""
        return [self._now[v] for v in (*self.original.inputs, *self.original.outside)]

    def reads(self, call: Call | None) -> list[tuple[Value, Op]]:
        """As `Repetition.reads`."""
        found: list[tuple[Value, Op]] = []
        for old, value in self._reads.items():
            like, real = old.result, value.real
            assert real is not None
            owner = self._tools.model.owner(real)
            assert owner is not None
            make = functools.partial(self._tools.maker.from_real_like, real, like.fake)
            new = UnmadeValue(make, 0, self._values.new_storage(), like.key, 0, like.requires_grad)
            new.real, new.autograd_placeholder = real, like.autograd_placeholder
            place = self._scope_of(old.scope), call, self._frames_of(old.frames)
            read = Op("get_attr", owner[0], (), {}, new, *place, old.grad, autocast=old.autocast)
            found.append((value, read))
        return found

    def _read_late(self, op: Op, value: WaitingValue, place: tuple[Scope, Call, Frames]) -> Op:
        real = value.real
        assert real is not None
        fake = self._tools.maker.from_real_like(real, op.result.fake)
        value.know(fake, 0, storage_id(fake), op.result.key, op.result.autograd_placeholder)
        self._values.enter_late(value.storage, 0, [value])
        owner = self._tools.model.owner(real)
        assert owner is not None
        return Op("get_attr", owner[0], (), {}, value, *place, op.grad, autocast=op.autocast)

    def _outputs_of(self, op: Op) -> Outputs | None:
        if op.kind != "call_function" or op.writes or not is_op(op.target):
            return None
        return self._tools.ops.inference.known(op.target, op.args, op.kwargs)

    def _repeat_inside(self, old: Call, new: Call) -> None:
        """The ops and calls in a call."""
        position = old.start
        for inner in self.original.inside.get(old, ()):
            self._repeat_ops(position, inner.start, new)
            self._repeat_call(inner, new)
            position = inner.stop
        self._repeat_ops(position, old.stop, new)

    def _repeat_call(self, old: Call, parent: Call) -> None:
        builder, same = self._builder, self._values.same
        around = old.scope.parent
        assert around is not None
        module = None if old.module is None else self._pairs.partner(old.module)
        given, frames = self._template((old.args, old.kwargs)), self._frames_of(old.frames)
        place, start = (parent, self._scope_of(around)), len(builder.tape.ops)
        position, (index,) = self._calls.number([module])
        self._indices.append(index)
        new = self._calls.open_copy(old, module, place, frames, start, given, (position, index))
        self._tape.calls.append(new)
        self._scopes[id(old.scope)], self._frames[id(old.frames)] = new.scope, frames
        begin = len(same)
        builder.in_call(new, lambda: self._repeat_inside(old, new))
        new.outputs = self._template(old.outputs)
        if len(same) > begin:
            self._values.leave(begin, new.outputs)

    # ---------------------------------------------------------------- the ops

    def _repeat_ops(self, start: int, stop: int, call: Call) -> None:
        first, ops, scopes, known = self.original.call.start, self._builder.tape.ops, self._scopes, self._frames
        for step in self.original.steps[start - first : stop - first]:
            self._starts.append(len(ops))
            op = step.op
            scope, frames = scopes.get(id(op.scope)), known.get(id(op.frames))
            place = scope or self._scope_of(op.scope), call, frames or self._frames_of(op.frames)
            if step.outputs is not None:
                new = self._copy(step, step.outputs, place)
                ops.append(new)
                self._builder.originals[new] = op
            elif op.kind == "get_attr" and self._is_known(op):
                pass
            elif step.is_plain_read:
                read = self._read_like(op, place)
                if read is not None:
                    ops.append(read)
                else:
                    self._anew(op, *place)
            else:
                self._quiet.__exit__(None, None, None)
                try:
                    self._anew(op, *place)
                finally:
                    self._quiet.__enter__()

    def _anew(self, op: Op, scope: Scope, call: Call, frames: Frames) -> None:
        """An op that is recorded as if Python had called it."""
        mark = self._builder.state.enter_module(scope)
        self._builder.op_frames, self._builder.autocast = frames, op.autocast
        try:
            if op.kind == "get_attr":
                self._read(op)
            else:
                self._record(op)
        finally:
            self._builder.op_frames = self._builder.autocast = None
            self._builder.state.leave_module(mark, raising=False)

    def _copy(self, step: StepOfCall, outputs: Outputs, place: tuple[Scope, Call, Frames]) -> Op:
        """An op whose results follow from the metadata of its inputs."""
        op, now = step.op, self._now
        args, kwargs = step.operands(now)
        inputs = [now[v] for v in step.inputs]
        made: list[Value | None]
        if self._waits:
            old = {v.slot: v for v in step.values}
            made = [self._made_late(old.get(slot), meta, slot, inputs) for slot, meta in enumerate(outputs.tensors)]
        elif step.is_inner:
            made = [self._later(meta, slot, inputs) for slot, meta in enumerate(outputs.tensors)]
        else:
            made = self._values.new_inferred(outputs, outputs.make(self._tools.maker, inputs), inputs)
        if len(made) == 1 and made[0] is not None:
            now[step.values[0]] = made[0]
        else:
            now.update(zip(step.values, [v for v in made if v is not None], strict=True))
        out = outputs.contained(made)
        return Op(op.kind, op.target, args, kwargs, out, *place, op.grad, autocast=op.autocast)

    def _made_late(
        self, old: Value | None, meta: OutputMeta | Identity | None, slot: int, inputs: list[Value]
    ) -> Value | None:
        """As `_later`, of an op that waits: its result may be there."""
        if old in self._results:
            return self._results[old]
        new = self._later(meta, slot, inputs)
        if new is not None and old in self.original.sharing:
            self._late.setdefault(new.storage, []).append(new)
        return new

    def _later(self, meta: OutputMeta | Identity | None, slot: int, inputs: list[Value]) -> Value | None:
        """As `ValueTable.new_inferred`, of a result that Python never gets. Its tensor is made when it is asked for."""
        if meta is None:
            return None
        if isinstance(meta, Identity):
            same = inputs[meta.input]
            make: Callable[[], torch.Tensor] = functools.partial(getattr, same, "fake")
            new = UnmadeValue(make, slot, same.storage, same.key, same.offset, same.requires_grad)
            new.autograd_placeholder = same.autograd_placeholder
            return new
        if meta.base is None:
            storage, start = self._values.new_storage(), meta.offset
            make = self.original.makers.get(id(meta)) or self._maker_of(meta)
        else:
            base = inputs[meta.base]
            storage, start = base.storage, base.offset + meta.offset
            make = functools.partial(_made, self._tools.maker, meta, base, self._in_inference)
        new = UnmadeValue(make, slot, storage, meta.key, start, meta.requires_grad)
        new.autograd_placeholder = meta.requires_grad
        return new

    def _maker_of(self, meta: OutputMeta) -> Callable[[], torch.Tensor]:
        """What makes a tensor in memory of its own."""
        make = self.original.makers[id(meta)] = functools.partial(
            _made, self._tools.maker, meta, None, self._in_inference
        )
        return make

    def _is_known(self, op: Op) -> bool:
        """Whether the attribute that stands for one that is read here is on the tape already."""
        found = self._values.by_id.get(id(self._pairs.partner(op.result.real)))
        if found is None or op in self.original.literals:
            return False
        self._now[op.result] = found
        return True

    def _read_like(self, op: Op, place: tuple[Scope, Call, Frames]) -> Op | None:
        """An attribute that the original was the first to read, where nothing else is known of its memory."""
        real = self._pairs.partner(op.result.real)
        owner = self._tools.model.owner(real)
        may_share = storage_id(real) in self._values.waiting or self._tools.maker.shares_storage(real)
        if owner is None or may_share:
            return None
        value = self._now[op.result] = self._values.adopt_like(real, owner, op.result)
        return Op("get_attr", owner[0], (), {}, value, *place, op.grad, autocast=op.autocast)

    def _read(self, op: Op) -> None:
        """An attribute that the original was the first to read."""
        real = op.result.real
        assert real is not None
        if op in self.original.literals:
            with eager():
                real = real.clone()
        self._now[op.result] = self._values.value_of(self._pairs.partner(real))

    def _record(self, op: Op) -> None:
        """Any other op."""
        ops = self._builder.tape.ops
        inputs, start = [self._now[v] for v in op.inputs()], len(ops)
        if not self._tools.ops.repeat_write(op, self._now):
            args, kwargs = map_argument(
                lambda x: self._tensor(self._now[x]) if isinstance(x, Value) else x, (op.args, op.kwargs)
            )
            self._tools.ops.record(op.target, args, kwargs)
        new = ops[-1]
        made = list(zip(op.values(), new.values(), strict=False))
        same = (
            len(ops) == start + 1 and new.target is op.target and list(map(id, new.inputs())) == list(map(id, inputs))
        )
        if not same or len(new.writes) != len(op.writes) or len(made) != len(op.values()):
            raise Retrace("an op does something else when it is repeated", Assumptions(records_all=True))
        self._now.update(made)


def _made(maker: FakeMaker, meta: OutputMeta, base: Value | None, in_inference: bool) -> torch.Tensor:
    fake = None if base is None else base.fake
    with without_dispatch(), in_inference_mode(in_inference):
        return meta.make(maker, fake)
