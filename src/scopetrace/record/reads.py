"""What the forward asks: torch and the process, for facts of tensors, flags and environment variables; its objects.

Data flow:
    facts of tensors, flags of torch, environment variables -> `watch.questions` -> Read, once for each
    ops whose result autocast or the default dtype decides, blocks that switch autograd -> a Guard of that state
    ops that gave a view and give a copy otherwise, such as `reshape` -> the strides of the inputs, where that matters
    an attribute of a class -> Watched, in its place meanwhile -> by owner, where it was first read or written
    errors of scopetrace, of torch for want of data, and of ops -> those that the forward caught, by their tracebacks
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

import torch

from scopetrace._compat import questions
from scopetrace._compat.ops import in_gradient_transform, unwrapped
from scopetrace._compat.tensors import FakeTensor, is_symbolic, requires_grad_of, tags_of
from scopetrace.containers.contents import snapshot
from scopetrace.containers.structure import leaves
from scopetrace.ir.guards import NO_CALL, CallInputs, Flag, Guard, OfInput, OfTensor, Source, WhichInputs
from scopetrace.ir.scopes import Frames, source_of
from scopetrace.ir.tape import Op, RecordedTape, Tape, Value
from scopetrace.ops.history import History
from scopetrace.record.values import ValueTable
from scopetrace.sources import NOT_THE_MODEL, SCOPETRACE, asked_by_model

FAST_PATH = "aten::_transformer_encoder_layer_fwd"
"""The op without derivative that a module of torch chooses where no gradient is recorded."""


class ReadRecorder:
    """Puts what the forward reads on the tape."""

    def __init__(self, values: ValueTable) -> None:
        self._builder, self._values, self._model = values.builder, values, values.model
        self._guards = self._builder.tape.guards
        self._known: set[Any] = set()
        """The places of reads, and of flags with the answers."""
        self._grad = questions.grad_enabled()
        self.contiguous: list[tuple[Value, int, Frames]] = []
        """What `contiguous()` gave back as it was, the number of ops before it, and the frames."""
        self._blocks: list[int | None] = []
        """Of each open block that switches autograd, its first op where it sets what is set anyway; else None."""
        self._hidden: list[range] = []
        """The ops of such blocks that have ended."""
        self._autocast = questions.autocast_state()
        self._autocast_depth = 0
        self._noted_owners = 0
        """How many of the tensors of the model that were read were asked whether they require grad."""
        self.awaits_cast = True
        """Whether an op that autocast may change is to be told by `on_cast_op`."""
        self._default_device = questions.flag("torch.get_default_device", ())
        self._default_dtype = questions.default_dtype()

    @contextlib.contextmanager
    def watching(self, names: Set[str]) -> Iterator[None]:
        """Around the forward. Attributes that users have set on an input are noted if they are in `names`."""
        for i, value in enumerate(self._builder.tape.inputs):
            for name, x in tags_of(value.fake).items():
                if name in names:
                    text = f"{self._builder.tape.input_paths[i]}.{name}"
                    self.note_once(text, snapshot(x), OfInput(i, f".{name}"), ())
        yield
        self._note_hidden_blocks()
        for i, frames in sorted(inputs_of_layouts(self._builder.tape, self.contiguous).items()):
            self._layout(i, frames)

    def note_once(
        self, name: str, value: Any, source: Source, frames: Frames | None = None, known_as: Any = None
    ) -> None:
        """Note what the forward read, once for each place; frames default to the current ones."""
        if (known_as or source) not in self._known:
            self._known.add(known_as or source)
            frames = self._builder.frames() if frames is None else frames
            self._guards.append(Guard(name, value, source, frames, self._builder.state.current_scope.path))

    def was_asked(self, source: Source) -> bool:
        """Whether the forward has read this."""
        return source in self._known

    def on_guard(self, guard: Guard, inputs: Sequence[Any]) -> None:
        """What another trace depends on, which was called with these inputs, this one does too."""
        source = guard.source
        if isinstance(source, OfInput) and source.fact in ("layout", "storage_offset"):
            self.on_layout(offset=source.fact == "storage_offset")
        elif isinstance(source, OfInput):
            t = inputs[source.index]
            self.on_fact(t, source.fact, source.args, questions.fact_of(t, source.fact, source.args))
        elif source.kind == "input":  # which of them are one object
            which, call = WhichInputs(), CallInputs((), {}, [v.fake for v in self._builder.tape.inputs])
            self.note_once("which arguments are one tensor", which.current(call), which)
        elif isinstance(source, Flag):
            self.on_flag(source.function, source.args, guard.value)
        elif guard not in self._guards:
            self._guards.append(guard)

    # ---------------------------------------------------------------- questions to torch

    def on_flag(self, name: str, args: tuple[Any, ...] | None, answer: Any) -> None:
        """A question about the state of the process: `torch.is_grad_enabled`; no `args` for what is no function."""
        if name == "torch.is_grad_enabled" and answer:
            self.refuse_in_reentrant(None, name)
        text = name if args is None else f"{name}({', '.join(map(repr, args))})"
        self.note_once(text, answer, Flag(name, args or ()), known_as=(name, args, answer))

    def refuse_in_reentrant(self, t: torch.Tensor | None, question: str) -> None:
        """Raise where Python asks whether autograd is on, or follows `t`, in a region under reentrant checkpointing.

        Eager runs the region without autograd, and in backward again with it: the answers differ, and what Python makes
        of them.
        """
        builder = self._builder
        if builder.reentrant is None or not asked_by_model(SCOPETRACE):
            return
        value = None if t is None else self._values.by_id.get(id(t))
        if t is not None and (value is None or value.op not in builder.tape.ops[builder.reentrant :]):
            return
        raise builder.refusal(
            "the forward asks whether autograd is on, or hangs a hook on a tensor, in a region under reentrant "
            "checkpointing, which runs without autograd first and with it in backward",
            op=question,
            hint="give checkpoint use_reentrant=False, which runs the region with autograd both times, or ask before",
        )

    def drop_inner_flags(self) -> None:
        """After the forward: a flag that has another value than it was read with was set by the forward itself."""
        stays = [g for g in self._guards if type(g.source) is not Flag or g.source.current(NO_CALL) == g.value]
        self._guards[:] = stays

    def on_gradients_of_inputs(self) -> None:
        """Autograd may decide what happens, as whether there was the error of an op that the forward has caught."""
        for value in self._builder.tape.inputs:
            self.on_gradient(value.fake)

    def on_grad_mode(self, enabled: bool) -> None:
        """The forward switches autograd on or off. A block that sets what is set anyway leaves no trace in the ops."""
        is_hidden = enabled == self._grad and not (enabled and in_gradient_transform())
        self._blocks.append(len(self._builder.tape.ops) if is_hidden else None)

    def on_grad_block_end(self) -> None:
        """A block ends, and autograd is as before it."""
        start = self._blocks.pop() if self._blocks else None
        if start is not None:
            self._hidden.append(range(start, len(self._builder.tape.ops)))

    def _note_hidden_blocks(self) -> None:
        """Autograd matters in a block where an op takes what a parameter or an input may give a gradient.

        Without autograd around the block, that is one of these or a view of it, or a leaf that the forward makes.
        """
        ops = self._builder.tape.ops
        self._hidden += [range(start, len(ops)) for start in self._blocks if start is not None]
        if not self._hidden:
            return
        ops = ops[: max(hidden.stop for hidden in self._hidden)]
        inputs = [v for op in ops if op.kind == "placeholder" for v in op.values()]
        state = [v for op in ops if op.kind == "get_attr" for v in op.values()]
        outside = [*inputs, *(v for v in state if v.real is not None and v.real.requires_grad)]
        leaves = dict.fromkeys([*outside, *map(self._values.value_of, self._values.made_leaves())], 1)
        frozen = [v for v in state if isinstance(v.real, torch.nn.Parameter) and v not in leaves]
        leaves |= {v: 2 << i for i, v in enumerate(frozen)}  # which may require grad in a call
        sources = {v.op for v in leaves}
        used = [op for op in ops if not self._grad or op in sources or _is_source_or_alias(op)]
        history = History(used, leaves, assumed=True)
        first: dict[int, Op] = {}
        for op in (op for hidden in self._hidden for op in ops[hidden.start : hidden.stop]):
            bits = functools.reduce(operator.or_, map(history.of, op.inputs()), int(op.kind == "call_module"))
            if bits & 1:
                self.note_once("torch.is_grad_enabled()", self._grad, Flag("torch.is_grad_enabled", ()), op.frames)
                return
            first |= {i: op for i in range(len(frozen)) if bits & 2 << i and i not in first} if bits else {}
        for i, op in first.items():
            real = frozen[i].real
            if real is not None and (owner := self._model.owner(real)) is not None:
                source, name = OfTensor(*owner[1:], "requires_grad"), f"{owner[0]}.requires_grad"
                if source not in self._known:
                    self._known.add(source)
                    self._guards.append(Guard(name, requires_grad_of(real), source, op.frames, op.scope.path))

    def on_autocast(self, entered: bool) -> None:
        """A block under `torch.autocast` begins or ends."""
        self._autocast_depth += 1 if entered else -1
        self.awaits_cast = not self._autocast_depth

    def on_cast_op(self) -> None:
        """An op runs that autocast may give other dtypes."""
        self.awaits_cast = False
        self.note_once("torch.autocast", self._autocast, Flag("torch.autocast", ()))

    def on_default_dtype(self, func: Any = None) -> None:
        """The dtype of a new tensor is the default one, which the forward may have set itself.

        `func` is the op where it decides by itself, as of a division of integers, rather than taking a dtype.
        """
        if questions.default_dtype() is self._default_dtype:
            self.on_flag("torch.get_default_dtype", (), self._default_dtype)
        elif func is not None:
            raise self._builder.refusal(
                f"the forward has set the default dtype, {questions.default_dtype()}, and an op of integers gives it",
                op=str(func),
                hint="convert the operand first: x.to(torch.get_default_dtype())",
            )

    def on_default_device(self, device: torch.device | None) -> None:
        """A new tensor is on `device`, which may be the default one: the op does not tell whether it was given."""
        default = questions.flag("torch.get_default_device", ())
        if default == self._default_device and (device is None or device == default):
            self.on_flag("torch.get_default_device", (), default)

    # ---------------------------------------------------------------- facts of tensors

    def on_fact(self, t: torch.Tensor, name: str, args: tuple[Any, ...], answer: Any) -> None:
        """A question of `_compat.questions.methods` or `properties` to a tensor."""
        if name in ("requires_grad", "is_leaf", "grad_fn") and answer != (name == "is_leaf"):
            self.refuse_in_reentrant(t, f"Tensor.{name}")
        if name != "is_coalesced":
            self._note_fact(t, name, args, answer)
        elif (
            not self.on_outside(t, name, answer)  # fake tensors do not say it
            and isinstance(t, FakeTensor)
            and self._values.value_of(t).op.target not in (_aten.coalesce.default, _aten._coalesce.default)
        ):
            problem = "the forward asks whether a sparse tensor that it has made is coalesced"
            hint = "ask the input, or write x.coalesce(), which does nothing to one that is"
            raise self._builder.refusal(problem, op="Tensor.is_coalesced", hint=hint)

    def _note_fact(self, t: torch.Tensor, name: str, args: tuple[Any, ...], answer: Any) -> None:
        """The facts of a tensor made in the forward follow from those of the inputs."""
        value = self._values.by_id.get(id(t))
        inputs = self._builder.tape.inputs
        answer = snapshot(answer) if name[0] == "." else answer
        if name == "_version" and (value not in inputs or value.storage in self._builder.tape.written_storages()):
            raise self._builder.refusal(
                "the forward reads the version of a tensor that it has made or written, which counts other writes in "
                "a trace",
                op="Tensor._version",
                hint="read that of an input, before the first write",
            )
        if name in ("requires_grad", "is_leaf", "grad_fn") and value is not None and self._is_shared(value.storage):
            raise self._builder.refusal(
                "the forward asks for the gradient of a tensor in memory that several inputs share, and that it has "
                "written",
                op=f"Tensor.{name}",
                hint="ask before the first write, or clone() one of the inputs",
            )
        if name == "contiguous":
            if value is not None and answer is t:
                self.contiguous.append((value, len(self._builder.tape.ops), self._builder.frames()))
        elif value in inputs or name[0] == ".":
            self.on_outside(t, name, answer, args)
        elif name in ("stride", "is_contiguous", "dim_order", "storage_offset"):
            self.on_layout(offset=name == "storage_offset")
            fact = "storage_offset" if name == "storage_offset" else "layout"
            if unwrapped(t) is t and t.layout is torch.strided:
                self.on_outside(t, fact, questions.fact_of(t, fact, ()))
        elif name in ("requires_grad", "is_leaf", "grad_fn") and unwrapped(t) is t:  # else a transform's own history
            self.note_once("torch.is_grad_enabled()", self._grad, Flag("torch.is_grad_enabled", ()))
            self.on_requires_grad(t)

    def _is_shared(self, storage: int) -> bool:
        tape = self._builder.tape
        objects = {id(v.fake) for v in tape.inputs if v.storage == storage}
        return len(objects) > 1 and storage in tape.written_storages()

    def on_gradient(self, t: torch.Tensor) -> None:
        """It matters whether autograd records what is done to a tensor."""
        if not questions.grad_enabled() and self._grad:
            return  # a block of the forward itself switches autograd off
        self.note_once("torch.is_grad_enabled()", self._grad, Flag("torch.is_grad_enabled", ()))
        self._note_fact(t, "requires_grad", (), requires_grad_of(t))

    def on_layout(self, *, offset: bool = False) -> None:
        """Something depends on the strides of a tensor made in the forward: all inputs must be laid out as here."""
        for i, value in enumerate(self._builder.tape.inputs):
            self._layout(i)
            if offset and value.fake.layout is torch.strided:
                self._fact(i, "storage_offset", value.offset)

    def _layout(self, index: int, frames: Frames | None = None) -> None:
        fake = self._builder.tape.inputs[index].fake
        if fake.layout is torch.strided:
            self._fact(index, "layout", questions.fact_of(fake, "layout", ()), (), frames)

    def _fact(
        self, index: int, fact: str, answer: Any, args: tuple[Any, ...] = (), frames: Frames | None = None
    ) -> None:
        name = _text_of(self._builder.tape.input_paths[index], fact, args)
        self.note_once(name, answer, OfInput(index, fact, args), frames)

    def on_outside(self, t: torch.Tensor, fact: str, answer: Any, args: tuple[Any, ...] = ()) -> bool:
        """Note a fact of an input, or of a tensor of the model. False for others."""
        value, inputs, owner = self._values.by_id.get(id(t)), self._builder.tape.inputs, self._model.owner(t)
        if value in inputs:
            self._fact(inputs.index(value), fact, answer, args)
        elif owner is not None:
            self.note_once(_text_of(owner[0], fact, args), answer, OfTensor(*owner[1:], fact))
        return value in inputs or owner is not None

    def on_requires_grad(self, t: torch.Tensor) -> None:
        """It matters whether a tensor requires grad, where autograd is on."""
        tape = self._builder.tape
        value, examples = self._values.by_id.get(id(t)), self._values.examples.items()
        set_here = [v for v, real in examples if v.requires_grad and not real.requires_grad]  # calls do so too
        known = value.requires_grad if value in tape.inputs else requires_grad_of(t)
        if value in set_here or self.on_outside(t, "requires_grad", known):
            return
        for i, v in enumerate(tape.inputs):
            if v not in set_here:
                self._fact(i, "requires_grad", v.requires_grad)
        noted, self._noted_owners = self._noted_owners, len(tape.owners)
        for fqn in itertools.islice(tape.owners, noted, None):
            self.on_outside(tape.attributes[fqn], "requires_grad", requires_grad_of(tape.attributes[fqn]))

    def on_fast_path(self, tensors: Iterable[torch.Tensor]) -> None:
        """A module chose an op without derivative, as autograd is off or none of what it takes requires grad."""
        if questions.grad_enabled():
            for t in tensors:
                self.on_requires_grad(t)
        elif not self._grad:
            self.note_once("torch.is_grad_enabled()", False, Flag("torch.is_grad_enabled", ()))

    def on_recomputed(self, op: Op) -> None:
        """With gradients, eager would run an op again in backward, and would give other results."""
        if not self._grad:
            self.note_once("torch.is_grad_enabled()", False, Flag("torch.is_grad_enabled", ()), op.frames)
        else:
            self.on_requires_grad(next(iter(op.values())).fake)


def _text_of(name: str, fact: str, args: tuple[Any, ...]) -> str:
    if fact == "layout":
        return f"{name}'s strides"
    asked = f"({', '.join(map(repr, args))})" if fact in questions.methods else ""
    return f"{name}.{fact.removeprefix('.')}{asked}"


def _is_source_or_alias(op: Op) -> bool:
    """Whether the results of an op come from outside, or share memory with its inputs."""
    return not op.inputs() or not {v.storage for v in op.values()}.isdisjoint(v.storage for v in op.inputs())


_aten = torch.ops.aten


# Ops that give a view or a copy, as the layout of what they take is --------------------------------------------------

_RESHAPES = (_aten.reshape.default, _aten.reshape_as.default, _aten.flatten.using_ints, _aten.ravel.default)
_MAYBE_VIEWS = frozenset((*_RESHAPES, _aten.contiguous.default))
_VIEWS_OR_COPIES = _MAYBE_VIEWS | {_aten.to.dtype, _aten.to.other, _aten.to.device, _aten.to.dtype_layout}


def inputs_of_layouts(tape: Tape, contiguous: list[tuple[Value, int, Frames]]) -> dict[int, Frames]:
    """The positions of these inputs, with the frames of the op.

    `contiguous` has what `x.contiguous()` gave back, the number of ops before it, and the frames.
    """
    has_writes = any(op.writes for op in tape.ops)
    last_write = {v.storage: i for i, op in enumerate(tape.ops) for v in op.writes} if has_writes else {}
    if not last_write and not contiguous:
        return {}
    before_writes = tape.ops[: max(last_write.values(), default=0)]
    of_inputs = {v.storage for v in tape.inputs}
    returned = {v.storage for v in leaves(tape.calls[0].outputs, Value)} & of_inputs
    reads = [(v, at) for v, i, at in contiguous if v.storage in returned or last_write.get(v.storage, -1) >= i]
    for i, op in enumerate(before_writes):
        if op.target in _VIEWS_OR_COPIES and op.inputs():
            operand = op.inputs()[0]
            if any(last_write.get(v.storage, -1) > i for v in (operand, *op.values())):
                reads.append((operand, op.frames))
    positions = {v: i for i, v in enumerate(tape.inputs)}
    return {positions[v]: at for operand, at in reversed(reads) for v in _computed_from(operand) if v in positions}


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


def expect_copies(tape: RecordedTape) -> None:
    """Record that a call has no size 1 where the program depends on it that an op copies, and is no view.

    `x.transpose(0, 1).flatten()` copies where both dimensions have two elements or more, and is a view where one has
    one. A later write to one of both, before the other is read, then changes what that read gives.
    """
    sources = [(i, op, _source(op)) for i, op in enumerate(tape.ops)]
    copies = [(i, op, v) for i, op, v in sources if v and is_symbolic(v.fake) and op.result.storage != v.storage]
    if not copies:
        return
    writes, last_read = _uses(tape)

    def matters(start: int, written: int, other: int) -> bool:
        at = writes.get(written, [])
        first = bisect.bisect_right(at, start)
        return first < len(at) and at[first] < last_read.get(other, -1)

    for i, op, source in copies:
        copy = op.result
        if matters(i, source.storage, copy.storage) or matters(i, copy.storage, source.storage):
            place = {"module": str(op.scope), "source": source_of(op.frames)}
            for size in source.fake.size():
                if isinstance(size, torch.SymInt):
                    size.node.shape_env.take_for_more_than_one(size, place)


def _source(op: Op) -> Value | None:
    """What an op may give a view of; in a step, where the parts of composite ops are recorded, those of a copy."""
    if op.target in _MAYBE_VIEWS or (
        op.target is _aten.clone.default and op.kwargs.get("memory_format") is torch.contiguous_format
    ):
        return op.inputs()[0]
    return _source(op.inputs()[0].op) if op.target is _aten._unsafe_view.default else None


def _uses(tape: RecordedTape) -> tuple[dict[int, list[int]], dict[int, int]]:
    """By storage, where it is written, and where it is read last: at the end, where somebody outside sees it."""
    writes: dict[int, list[int]] = {}
    last_read: dict[int, int] = {}
    for i, op in enumerate(tape.ops):
        for v in op.inputs():
            last_read[v.storage] = i
        for v in op.writes:
            writes.setdefault(v.storage, []).append(i)
    outside = [v for op in tape.ops if op.kind in ("placeholder", "get_attr") for v in op.values()]
    bound = [write.value for write in tape.attribute_writes]
    for v in (*outside, *bound, *leaves(tape.outputs, Value)):
        last_read[v.storage] = len(tape.ops)
    return writes, last_read


# Errors that the forward catches -------------------------------------------------------------------------------------


def caught(raised: Iterable[tuple[BaseException, Any]]) -> Iterator[BaseException]:
    """The errors that code of the model has caught, rather than torch's or scopetrace's, each once."""
    seen = set()
    for error, _ in raised:
        tb = error.__traceback__
        if tb is not None and not tb.tb_frame.f_code.co_filename.startswith(NOT_THE_MODEL) and id(error) not in seen:
            seen.add(id(error))
            yield error
