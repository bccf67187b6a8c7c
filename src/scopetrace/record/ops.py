"""One op on its way to the tape.

Data flow:
    op and arguments as Python gave them -> OpCall: tape values for the tensors
    an op whose result `infer` knows -> the result is made from the metadata of the arguments
    any other op                     -> torch runs it on the fake tensors
    either                           -> an Op on the tape

The first way makes recording fast: a layer's ops repeat in the next layer, and no kernel, dispatcher or autograd runs
for them. Its results have no autograd history. That shows only when the forward itself differentiates, or writes to a
view of them; then `Retrace` ends the recording, and it starts again with torch running every op.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from scopetrace._compat.gradients import next_sequence_number
from scopetrace._compat.ops import (
    CASTS_INSIDE,
    BelowAutograd,
    PreDispatchMode,
    autocast_dtype,
    autocast_rule,
    can_decompose,
    custom_function_call,
    dispatch_functorch,
    eager_kernel,
    in_transform,
    interrupts,
    with_mode,
)
from scopetrace._compat.questions import attention_kernels, autocast_enabled, grad_enabled
from scopetrace._compat.tensors import (
    RECURRENT,
    FakeTensor,
    is_inference_of,
    is_symbolic,
    requires_grad_of,
    run_op,
    run_parts,
    storage_id,
)
from scopetrace.errors import ForeignTensorError, RandomStateError
from scopetrace.infer.inference import Inferred
from scopetrace.infer.rules import Identity, Outputs
from scopetrace.ir.tape import Autocast, Value, flat, map_argument
from scopetrace.ops.functional_variants import undeclared_variant, undeclared_writes
from scopetrace.ops.higher_order import CHECKPOINTS, FORMS
from scopetrace.record.collectives import CollectiveRecorder, Finish
from scopetrace.record.data import DataReader
from scopetrace.record.higher_order import BodyRecorder, FlexRecorder
from scopetrace.record.nodes import NodeRunner
from scopetrace.record.op_call import BeforeWrite, OpCall, OpFacts, facts_of, tensors_in, version_counter
from scopetrace.record.reads import ReadRecorder
from scopetrace.record.rewritten_ops import record_in_transform, refuse_lost_dropout
from scopetrace.record.values import ValueTable

_aten = torch.ops.aten
_Parameter = torch.nn.Parameter

_NOTHING = contextlib.nullcontext()


class OpRecorder:
    """Records the ops that arrive at its `mode`."""

    def __init__(self, values: ValueTable, reads: ReadRecorder, *, specialize: bool) -> None:
        self.mode = PreDispatchMode(self.on_op, self.on_higher_order)
        self.values, self.reads = values, reads
        self.builder, self.factory, self.inference = values.builder, values.factory, values.inference
        self._by_id = values.by_id
        self.exact = self.builder.tape.exact_autograd
        self._facts: dict[int, OpFacts] = {}
        self.specialize = specialize
        self._pending: dict[int, Finish] = {}  # by storage: the collective under way that will write there
        self._given_away: dict[int, int] = {}  # by storage: the id of the tensor that `set_` has given it to
        self.at_end = contextlib.ExitStack()
        """Around the forward: at its end, collectives that are under way are finished."""
        self.attention_kernels = attention_kernels()
        """Those that were on before the forward."""

    @functools.cached_property
    def data(self) -> DataReader:
        """Answers what Python asks of the data of tensors."""
        return DataReader(self.values, self.reads, specialize=self.specialize)

    @functools.cached_property
    def collectives(self) -> CollectiveRecorder:
        """Records collectives."""
        recorder = CollectiveRecorder(self.values, self.recorded, self._pending)
        self.at_end.enter_context(recorder.finishing())
        return recorder

    # ---------------------------------------------------------------- arrival

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op arrives; transforms and autocast come first. What this returns goes back to the model."""
        if interrupts.pending:
            interrupts.act()
        builder = self.builder
        outer, builder.op_frames = builder.op_frames, builder.frames()
        try:
            if in_transform():
                return record_in_transform(self, func, args, kwargs)
            if autocast_enabled():
                return self._on_op_under_autocast(func, args, kwargs)
            return self.record(func, args, kwargs)
        finally:
            builder.op_frames = outer

    def _on_op_under_autocast(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = next((t.device.type for t in tensors_in((args, kwargs))), "cpu")
        dtype = autocast_dtype(device)
        if dtype is None:
            return self.record(func, args, kwargs)
        rule, casts = autocast_rule(func, device)
        before, self.builder.autocast = self.builder.autocast, Autocast(device, dtype, casts)
        try:
            casts_inside = func in CASTS_INSIDE or (func in RECURRENT and device == "cuda")
            if casts_inside and any(t.dtype is not torch.float64 for t in tensors_in((args, kwargs))):
                hint = f"put it under torch.autocast({device!r}, enabled=False), and cast its inputs"
                if facts_of(func).is_fast_path:
                    hint = "call torch.backends.mha.set_fastpath_enabled(False), so that torch.nn runs its parts"
                problem = "autocast is on and casts inside of its kernel, where a trace cannot follow"
                raise self.builder.refusal(problem, op=str(func), hint=hint)
            if rule is None:
                return self.record(func, args, kwargs)
            return self.recorded(lambda: rule(*args, **kwargs))
        finally:
            self.builder.autocast = before

    def on_higher_order(self, hop: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """torch.cond and its kind arrive."""
        if hop in CHECKPOINTS:
            mark = self.builder.mark()
            out = self.run_callable(args[0], args[1:])
            self.builder.end_region(CHECKPOINTS[0], mark)
            return out
        if hop is custom_function_call:
            self.builder.expect_history("a transform such as torch.vmap runs")
            return self.recorded(lambda: dispatch_functorch(hop, args, {}))
        kernel = eager_kernel(hop)
        if hop not in FORMS and kernel and any(map(callable, args)) and not _requires_grad(args, kwargs):
            return self.recorded(lambda: kernel(*args, **kwargs))
        if hop not in FORMS or kwargs:
            raise self.builder.refusal(
                "a higher-order op that is not recorded" + (f" with {', '.join(kwargs)}" if hop in FORMS else ""),
                op=str(hop),
                hint="write the branch or loop so that Python decides it"
                + ("; or trace under torch.no_grad()" if kernel and hop not in FORMS else ""),
            )
        recorder = FlexRecorder if hop is torch.ops.higher_order.flex_attention else BodyRecorder
        return recorder(self.values, hop, args, self.run_callable).run()

    def run_callable(self, fn: Any, args: Any) -> Any:
        """Call what a higher-order op was given, recording its ops. A graph is no module call: its nodes run."""
        if isinstance(fn, torch.fx.GraphModule):
            return self.recorded(lambda: NodeRunner(fn, self.builder).run(*args))
        return self.recorded(lambda: fn(*args))

    def recorded(self, run: Callable[[], Any]) -> Any:
        """What `run` returns; the ops that it calls are recorded."""
        outer, self.builder.op_frames = self.builder.op_frames, None
        try:
            return with_mode(self.mode, run)
        finally:
            self.builder.op_frames = outer

    # ---------------------------------------------------------------- the path of an op

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Put an op on the tape. Returns what it gives to the model."""
        facts = self._facts.get(id(func)) or self._facts.setdefault(id(func), facts_of(func))
        if facts.may_be_cast and (self.reads.awaits_cast or facts.is_fast_path):
            self.reads.on_cast_op()
        if facts.is_fast_path:
            self.reads.on_fast_path(tensors_in((args, kwargs)))
        if facts.rewrite is not None:
            out = facts.rewrite(self, *args, **kwargs)
            if out is not NotImplemented:
                return out
        decomposes = facts.is_composite and self.builder.differentiates and not in_transform()  # which decomposes it
        if decomposes and _requires_grad(args, kwargs):
            refuse_lost_dropout(self.builder, func, args)
            return self.recorded(lambda: run_parts(func, *args, **kwargs))
        if facts.reshapes and self._is_set_to_itself(facts, args, kwargs):
            return args[0]
        call = self._lifted(facts, args, kwargs)
        if facts.reads:
            answer = self._answer(call)
            if answer is not NotImplemented:
                return answer
        if self.exact and self._needs_autograd(call):
            return self._run(call, None)
        return self._run(call, self.inference.key_of_call(func, call.args, call.kwargs))

    def _needs_autograd(self, call: OpCall) -> bool:
        """Whether autograd may keep something of the op; under no_grad, a view of what requires grad.

        It keeps views of all tensors: a write may give them a history.
        """
        grad, view = grad_enabled(), call.facts.may_alias and not call.facts.keeps_layout
        if not grad:
            return view and any(requires_grad_of(v.fake) for v in call.inputs)
        return view or any(map(requires_grad_of, (*call.fakes(), *tensors_in(call.python_arguments))))

    def _answer(self, call: OpCall) -> Any:
        """What an op that reads data gives to Python; NotImplemented where it gives a symbol, which torch makes."""
        func = call.facts.func
        answer = self.data.answer(func, call.args, call.kwargs)
        if answer is NotImplemented and func is _aten.is_nonzero.default and call.python_arguments[0][0].numel() == 1:
            with self.builder.run_by_torch(func):
                number = self.recorded(call.python_arguments[0][0].item)
            return self.data.is_true(func, number)
        return answer

    # ---------------------------------------------------------------- arguments

    def _is_set_to_itself(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a tensor gets the memory that it has, `x.set_(x)`.

        Of what gets another shape, aliases that Python made outside of the dispatcher get values of their own.
        """
        sets_memory = facts.func is _aten.set_.source_Tensor
        if sets_memory and self.values.are_one_view(*args):
            return True
        if sets_memory:
            self._refuse_memory_given_away(*args)
        for position, name in facts.written:
            a = args[position] if position < len(args) else kwargs.get(name)
            for t in a if isinstance(a, (list, tuple)) else (a,):
                if isinstance(t, FakeTensor):
                    if not sets_memory:
                        self._refuse_lost_shape(t, str(facts.func))
                    self.values.detach_alias(t)
        return False

    def _refuse_memory_given_away(self, t: torch.Tensor, source: torch.Tensor) -> None:
        """A tensor gets the memory of another. That one counts as the same tensor from then on, and stays there."""
        if self._given_away.get(self.values.value_of(t).storage, id(t)) != id(t):
            problem = "a tensor gets other memory after another tensor has got its memory, as where two are swapped"
            hint = "swap the values: keep a clone() of one, and use copy_"
            raise self.builder.refusal(problem, op="Tensor.set_", hint=hint)
        self._given_away[self.values.value_of(source).storage] = id(t)

    def _refuse_lost_shape(self, t: torch.Tensor, op: str) -> None:
        """Autograd would go on with the shape that a tensor had before an op without autograd changed it."""
        if self.exact and requires_grad_of(t) and not grad_enabled():
            problem = "a tensor that requires grad changes its shape in place under no_grad"
            hint = "use the op that gives a view, such as x.t() in place of x.t_()"
            raise self.builder.refusal(problem, op=op, hint=hint)

    def _lifted(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpCall:
        call = OpCall(facts, args, kwargs)
        try:
            call.args = tuple([self._lift(a, call.inputs) for a in args])
            call.kwargs = {name: self._lift(a, call.inputs) for name, a in kwargs.items()}
        except ForeignTensorError as error:
            if not self.exact:
                raise
            self.builder.expect_backward("backward reads what a composite op has saved")
            raise ForeignTensorError(
                error.problem,
                op=str(facts.func),
                **self.builder.where(),
                hint="torch made it inside an op and reads it in backward, or another thread did: take gradients "
                "outside of the forward, and make tensors in its thread",
            ) from None
        for value in call.inputs if self._pending else ():
            if value.storage in self._pending:
                self._pending[value.storage]()
        if facts.func is _aten.as_strided.default and (call.args[3:] or call.kwargs) not in ((None,), {}):
            self.builder.tape.uses_absolute_offset.add(call.args[0].storage)
        if facts.takes_one_dtype:
            call.refuse_other_dtypes(self.builder)
        return call

    def _lift(self, a: Any, inputs: list[Value]) -> Any:
        """The tape's form of an argument; its values are added to `inputs`."""
        kind = type(a)
        if kind is FakeTensor or kind is _Parameter:
            value = self._by_id.get(id(a))
            if value is None or (kind is FakeTensor and value.storage != storage_id(a)):
                value = self.values.value_of(a)
        elif kind is list or kind is tuple:
            return kind([self._lift(item, inputs) for item in a])
        elif isinstance(a, torch.Tensor):
            value = self._by_id.get(id(a)) or self.values.value_of(a)
        else:
            return a
        inputs.append(value)
        return value

    # ---------------------------------------------------------------- results by metadata alone

    def _known(self, call: OpCall, key: Any, undeclared: Sequence[str], *, unseen: bool = False) -> Inferred | None:
        """The results of an op where the cache or a rule has them; None where torch has to run it.

        Of ops that write, these are those in place that change values alone, and those that write statistics beside
        their results. `unseen` is as `_prepare_write` gives it.
        """
        facts = call.facts
        if key is None or not (facts.inferable or facts.written):
            return None
        if facts.written or undeclared:
            is_beside = facts.updates or not facts.written
            if not (facts.keeps_layout or is_beside) or facts.is_custom or call.overlaps(undeclared):
                return None
            if any(map(is_inference_of, call.fakes())):
                return None
            if facts.keeps_layout and not unseen and grad_enabled() and any(map(requires_grad_of, call.fakes())):
                return None
        with torch.no_grad() if unseen else _NOTHING:
            return self.inference.infer(key, facts.func, call.args, call.kwargs, call.inputs)

    def _append_inferred(
        self, call: OpCall, outputs: Outputs, fakes: list[torch.Tensor | None], *writes: tuple[Value, ...]
    ) -> Any:
        """Put the op on the tape with these results; `writes` are `Op.writes` and `Op.tracked` of one that writes."""
        written, tracked = writes or ((), ())
        results = self.values.new_inferred(outputs, fakes, call.inputs, is_written=bool(written))
        self._append(call, outputs.contained(results), written, None, tracked)
        if outputs.container is None and fakes[0] is not None and isinstance(outputs.tensors[0], Identity):
            return call.python_tensor(fakes[0])
        return outputs.contained(fakes)

    def _append(self, call: OpCall, outputs: Any, *rest: Any) -> None:
        """Put the op on the tape; `rest` are the further fields of Op."""
        kwargs = call.kwargs
        if isinstance(kwargs.get("generator"), torch.Generator):
            problem = "an op draws from a random generator of its own, which no graph can hold"
            hint = "draw from torch's default generator, or outside of the model"
            raise RandomStateError(problem, op=str(call.facts.func), **self.builder.where(), hint=hint)
        if call.facts.has_dtype and not call.inputs and isinstance(outputs, Value):
            kwargs = {**kwargs, "dtype": outputs.fake.dtype}  # the default is that of the trace
        if call.takes_default_dtype(outputs):
            self.reads.on_default_dtype(call.facts.func if call.inputs else None)
        if call.facts.has_dtype and not call.inputs:
            self.reads.on_default_device(kwargs.get("device"))
        if call.facts.is_new and isinstance(outputs, Value):
            self.values.new_tensors.append(outputs.fake)
        self.builder.append("call_function", call.facts.func, call.args, kwargs, outputs, *rest)

    def _run(self, call: OpCall, key: Any) -> Any:
        """Put an op on the tape, with results by metadata alone where these follow from `key` (None: they do not)."""
        facts = call.facts
        undeclared = undeclared_writes(facts.func, call.args, call.kwargs) if facts.may_write_undeclared else ()
        if undeclared and undeclared_variant(facts.func, call.args, call.kwargs) is None and can_decompose(facts.func):
            args, kwargs = call.python_arguments  # instance_norm: its parts say what they write
            return self.recorded(lambda: facts.func.decompose(*args, **kwargs))
        unseen = bool(facts.written) and self._prepare_write(call)
        known = self._known(call, key, undeclared, unseen=unseen)
        if known is None:
            return self._run_by_torch(call, key, undeclared, unseen=unseen)
        if not (facts.written or undeclared):
            return self._append_inferred(call, *known)
        for v in dict.fromkeys(call.written(facts.written)):
            torch.autograd.graph.increment_version(v.fake)
        tracked = [v for v in call.inputs if requires_grad_of(v.fake)] if facts.written else ()
        writes = tuple(dict.fromkeys(call.all_written(undeclared)))
        return self._append_inferred(call, *known, writes, tuple(tracked))

    # ---------------------------------------------------------------- results of torch

    def _run_by_torch(self, call: OpCall, key: Any, undeclared: tuple[str, ...], *, unseen: bool) -> Any:
        """Let torch run the op on fake tensors, and keep how its results follow from `key` (None: they do not)."""
        facts = call.facts
        fake_of = self.values.fake_of
        args, kwargs = map_argument(lambda x: fake_of(x) if isinstance(x, torch.Tensor) else x, call.python_arguments)
        if facts.reshapes:
            self.values.keep_memory(v.fake for v in call.inputs)
        before = BeforeWrite(call, tensors_in((args, kwargs)), undeclared)
        first = next_sequence_number() if self.exact else 0
        self._note_squeeze(call)
        with torch.no_grad() if unseen else contextlib.nullcontext():
            out = self._execute(call, args, kwargs, key)
        moved = before.moved()
        for value, layout in moved:
            self.values.freeze(value, layout)
        written = before.written()
        unbacked = self.factory.unbacked_bindings(out)
        returned = [v for v, t in zip(call.inputs, before.fakes, strict=True) if t is out]
        follows = (facts.updates or before.is_undeclared_alone()) if written else facts.inferable
        if key is not None and unbacked is None and follows:
            # Python may hold an input as another object than its value does
            self.inference.cache_result(key, call.inputs, returned[0].fake if returned else out)
            known = self._known(call, key, undeclared)
            if known is not None:
                return self._append_inferred(call, *known, written, before.tracked)
        if not (written or unbacked is not None or out is None or tensors_in(out)):
            return out  # a question about metadata, answered
        is_same = returned and not written
        results = self.values.new_same(out, 0, returned[0]) if is_same else self.values.new_results(out)
        self._append(call, results, written, unbacked, before.tracked)
        if self.exact and next_sequence_number() > first:
            self.builder.made_nodes.append((first, self.builder.tape.ops[-1]))
        if moved:
            self.values.follow(tensors_in(call.python_arguments), before.fakes, str(facts.func))
        return call.python_tensor(out) if returned else out

    def _execute(self, call: OpCall, args: Any, kwargs: Any, key: Any) -> Any:
        facts = call.facts
        # A convolution asks for sizes to choose a kernel, which is no guard; but it does fix the channels.
        free = facts.convolves and not any(isinstance(n, torch.SymInt) for t in call.fakes() for n in t.size()[1:2])
        compared = facts.is_custom and self.factory.mode.propagate_real_tensors
        has_history = self.exact and any(map(requires_grad_of, tensors_in((args, kwargs))))
        with (
            self.builder.run_by_torch(facts.func),
            self.factory.shape_env.suppress_guards() if free else contextlib.nullcontext(),
            self.data.real_tensors(call.inputs) if compared else contextlib.nullcontext(),
            self._below_autograd(call) if has_history else contextlib.nullcontext(),
        ):
            out = run_op(self.factory.mode, facts.func, args, kwargs)
        if facts.keeps_layout and key is not None:
            self.inference.cache_result(key, call.inputs, out)
        return out

    def _below_autograd(self, call: OpCall) -> contextlib.AbstractContextManager[Any]:
        """What sees the op after autograd. There the result may come from metadata alone; the history is torch's.

        Autograd may also copy there what the op is about to write, since backward reads it: an op of its own.
        """
        facts = call.facts
        keeps_shapes = (facts.in_place or facts.updates) and not call.overlaps()
        known = facts.is_atomic and (facts.inferable or keeps_shapes)
        written = {id(v.fake): (v, version_counter(v.fake)) for v in call.written(facts.written) if grad_enabled()}
        if not (known or written):
            return contextlib.nullcontext()

        def on_op(func: Any, args: Any, kwargs: Any) -> Any:
            run = functools.partial(func, *args, **kwargs)
            # autograd may also make a view of a written tensor again, by an op of this name
            if known and func is facts.func and all(map(operator.is_, tensors_in((args, kwargs)), call.fakes())):
                with torch.no_grad():
                    return self.inference.below_autograd(func, call.args, call.kwargs, call.inputs, run)
            if func is _aten.detach.default and self.inference.key_of(args[0]) is not None:
                return self.factory.detached(args[0])  # what autograd saves of a result
            value, version = written.get(id(args[0]), (None, 0)) if func is _aten.clone.default else (None, 0)
            if value is None or version != version_counter(value.fake):
                return run()
            with torch.no_grad():
                out = self.inference.below_autograd(func, (value,), kwargs, [value], run)
            self.values.append_op(func, (value,), out)
            return out

        return BelowAutograd(on_op)

    def _note_squeeze(self, call: OpCall) -> None:
        """Where an op squeezes, calls with size 1 would lose a dimension."""
        if not call.facts.squeezes or not is_symbolic(call.inputs[0].fake):
            return
        t, dims = call.inputs[0].fake, call.args[1:]
        for size in [t.size(d) for d in flat(dims)] if dims else t.size():
            if isinstance(size, torch.SymInt):
                self.factory.shape_env.take_for_more_than_one(size)

    def _prepare_write(self, call: OpCall) -> bool:
        """Before autograd sees a write: give results that were made from metadata the history that it expects.

        True where autograd need not see it: all tensors in the storage have a history before and after.
        """
        if self.exact or not grad_enabled() or not any(requires_grad_of(v.fake) for v in call.inputs):
            return False
        written = call.written(call.facts.written)
        if call.facts.in_place and all(_has_history(v) for w in written for v in self.values.in_storage(w.storage)):
            return True
        for value in written:
            same_memory = self.values.in_storage(value.storage)
            if any(v.fake is not value.fake for v in same_memory):
                self.builder.expect_history("an op writes to a view of a tensor that requires grad")
            if any(v.autograd_placeholder for v in same_memory):
                self.factory.give_history(value.fake)
            for v in same_memory:
                v.autograd_placeholder = False
        return False


def _requires_grad(args: Any, kwargs: Any) -> bool:
    return grad_enabled() and any(map(requires_grad_of, tensors_in((args, kwargs))))


def _has_history(value: Value) -> bool:
    """Whether autograd would let eager write to this result of an op, and it requires grad already."""
    op = value.op
    if not requires_grad_of(value.fake) or op.kind != "call_function" or not op.grad:
        return False
    if not isinstance(op.outputs, (list, tuple)):
        return True
    return all(v.storage != value.storage for v in op.inputs())  # it refuses writes to one of several views
