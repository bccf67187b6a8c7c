"""Derivatives inside a forward: `torch.autograd.grad` and `backward()`, and the `grad` of tensors from outside.

Data flow:
    backward() -> the leaves that autograd reaches -> torch differentiates by them, its ops are recorded as any
    a gradient -> added to the `grad` of its leaf, as hooks leave it -> the program reads and writes that from here on
    after the forward -> an AttributeWrite for each `grad` that is another one, `ProgramTape.cleared` for None

What a leaf had as `grad` before the forward is asked only where the forward reads it. Otherwise a call adds to whatever
is there: the same program holds for the first of several micro-batches and for the next.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from scopetrace._compat.gradients import (
    give_hooks,
    has_other_gradient,
    have_node_hooks,
    hooks_of,
    hooks_of_all_optimizers,
    hooks_of_optimizer,
    leaves_of,
    run_after_accumulation,
)
from scopetrace._compat.ops import eager, in_transform, paused, unwrapped
from scopetrace._compat.patches import exporting
from scopetrace._compat.symbols import Symbolic, named_text
from scopetrace._compat.tensors import FakeTensor, dense_order, is_view, requires_grad_of, storage_id
from scopetrace.autograd import optimizers
from scopetrace.autograd.flags import FlagRecorder
from scopetrace.autograd.phases import OTHER, PhaseRecorder
from scopetrace.containers.contents import Place, same
from scopetrace.containers.structure import leaves
from scopetrace.ir.guards import Asked, Flag, GradientOfInput, Guard, HasGradient, OfInput, OfTensor, Source
from scopetrace.ir.tape import AttributeWrite, Value
from scopetrace.ir.write_back import GraphInput, StateRef
from scopetrace.record.builder import Retrace
from scopetrace.record.explanations import sparse_gradient
from scopetrace.record.reads import ReadRecorder
from scopetrace.record.values import ValueTable

_SET_DATA = torch.ops.aten.set_.source_Tensor


@dataclasses.dataclass
class _Gradient:
    """The `grad` of a tensor from outside, while the forward runs."""

    tensor: torch.Tensor
    """The tensor itself: a parameter, or the fake tensor of an input."""
    value: Value
    index: int | None
    """Of an input its position; None of all else."""
    name: str
    """Where it stands in the arguments, or its name in the model."""
    added: list[torch.Tensor] = dataclasses.field(default_factory=list)
    """What was added to it, while nobody knows what it was before."""
    is_known: bool = False
    """Whether the forward has read or set it, so that it is `current`."""
    current: torch.Tensor | None = None
    before: torch.Tensor | None = None
    """Where the forward has read it, what it was before, as a tensor of the trace."""
    is_read: bool = False
    there: torch.Tensor | None = None
    """What it was before, where something was added before it was known."""


@dataclasses.dataclass
class _OptimizerStep:
    optimizer: torch.optim.Optimizer
    is_inside: bool
    """Whether the forward has made the optimizer."""
    stack: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    """The scope and phase of its ops."""
    flags: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    """What it sets in the process."""
    state: dict[tuple[Any, Any], Any] = dataclasses.field(default_factory=dict)
    """Its `state_of` before it writes."""


class GradientRecorder:
    """Records what one forward does with gradients; `_compat.gradients` tells it of that."""

    def __init__(self, values: ValueTable, reads: ReadRecorder, flags: FlagRecorder) -> None:
        self._builder, self._values, self._model = values.builder, values, values.model
        self._reads, self._flags = reads, flags
        self._tape = self._builder.tape
        self._phases = PhaseRecorder(values)
        self._gradients: dict[Value, _Gradient] = {}
        self._taken: set[int] = set()  # the storages of gradients that a leaf has
        self._hooks_keep = False  # whether hooks have seen gradients of the last backward, which they may keep
        self._stepping: list[_OptimizerStep] = []  # those that have begun, the innermost last
        self.new_optimizers: list[torch.optim.Optimizer] = []
        """Those that the forward has made: what they keep is of this call alone."""
        self._settings: list[tuple[torch.optim.Optimizer, int, str, Any]] = []  # as they were when optimizers stepped
        self._varied: list[tuple[Place, Any, Any]] = []  # before the forward, and in it
        self._counts: list[tuple[Place, Any, Any, optimizers.Number]] = []  # the same of what steps count
        self._numbers: dict[Any, optimizers.Number] = {}  # by symbol

    # ---------------------------------------------------------------- differentiating

    def on_backward(
        self,
        run: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor | None]],
        outputs: Sequence[torch.Tensor],
        grad_outputs: Iterable[torch.Tensor | None],
        inputs: Sequence[torch.Tensor],
        *,
        accumulates: bool,
        create_graph: bool,
        keeps_graph: bool,
    ) -> Any:
        """The forward differentiates `outputs`, with `grad_outputs` as their gradients.

        That is by `inputs`; with `accumulates`, into their `grad`, or that of all leaves where there are none. `run` is
        torch's engine: the gradients by some tensors, None for one that the outputs do not depend on.
        """
        self._refuse_without_history()
        by = list(map(self.differentiated, inputs))
        if accumulates and not by:
            by = self._flags.without_frozen(leaves_of(outputs))
            self._reads.on_requires_grad(outputs[0])
            if any(unwrapped(t) is t and id(t) not in self._values.by_id for t in by):
                self._refuse_beyond()
        for t in by if accumulates else ():
            if self._outside(t) is t and not t.is_leaf:
                t.retain_grad()  # as torch's engine does: the gradient of a result is put there by this hook
        self._refuse_other([self._outside(t) for t in by], accumulates=accumulates)
        params = [(p, t) for t in by if isinstance(p := self._outside(t), torch.nn.Parameter)]
        known = [p for p, _ in params]
        places = tuple([(self._model.owner(p), p) for p in known])
        self._reads.note_once("hooks on gradients", hooks_of(*known), Asked(_hooks_at, places, kind="hooks"))
        self._note_what_eager_needs(outputs, by)
        for p, t in params:
            give_hooks(p, t)
        grad_outputs = list(grad_outputs)
        with self._phases.backward(outputs, grad_outputs, keeps_graph=keeps_graph):
            gradients = run(by or outputs)[: len(by)]  # without leaves, torch raises where there should be one
        self._refuse_lost([t for t, gradient in zip(by, gradients, strict=False) if gradient is None])
        if not accumulates:
            return gradients
        self._taken |= {self._values.value_of(t).storage for t in grad_outputs if t is not None}
        self._hooks_keep = bool(self._builder.hooked) or any(map(any, hooks_of(*by)))
        for t, gradient in zip(by, gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise sparse_gradient("Tensor.backward", **self._builder.where())
            if gradient is not None:
                with self._phases.of(self._phases.of_op(self._values.value_of(t).op)):
                    self._add(t, gradient, create_graph=create_graph)
        return None

    def _note_what_eager_needs(self, outputs: Sequence[torch.Tensor], by: Sequence[torch.Tensor]) -> None:
        """Autograd, and leaves that require grad: eager raises without. A transform of torch.func brings its own."""
        if self._tape.grad and unwrapped(outputs[0]) is outputs[0]:
            self._reads.note_once("torch.is_grad_enabled()", True, Flag("torch.is_grad_enabled"))
            for t, outside in [(t, x) for t in by if (x := self._outside(t)) is not t]:
                self._reads.on_requires_grad(outside if isinstance(outside, torch.nn.Parameter) else t)

    def differentiated(self, t: torch.Tensor) -> torch.Tensor:
        """What stands for a tensor in autograd's graph of the forward: of a parameter, its fake tensor."""
        tensor = unwrapped(t)
        return t if tensor is not t or isinstance(tensor, FakeTensor) else self._values.value_of(t).fake

    def _outside(self, t: torch.Tensor) -> torch.Tensor:
        """The tensor from outside that a fake tensor stands for; itself where the forward made it."""
        value = self._values.by_id.get(id(t))
        if value is None or value.fake is not t:
            return t
        value = self._first(value)
        example = self._values.examples.get(value)
        return value.real if value.real is not None else t if example is None else example

    def on_leaf(self, ask: Callable[..., Any], t: torch.Tensor, more: torch.Tensor | None = None) -> Any:
        """A call of another trace reads a `grad`, or adds to it; the hooks of the leaf have run in its program."""
        if more is None:
            recorded = self.get(t)
            return ask(t) if recorded is NotImplemented else recorded
        self._add(self.differentiated(t), more, create_graph=more.requires_grad, runs_hooks=False)

    def _add(self, t: torch.Tensor, gradient: torch.Tensor, *, create_graph: bool, runs_hooks: bool = True) -> None:
        """Add to the `grad` of a leaf; a tensor that the forward made has its own."""
        outside = self._outside(t)
        if outside is t:
            if not t.retains_grad:
                with torch.set_grad_enabled(create_graph):
                    t.grad = self._sum(t.grad, gradient, t)
            if runs_hooks:
                run_after_accumulation(t)
            return
        entry = self._of(t)
        if not entry.is_known and outside.grad is not None:
            if self._builder.assumptions.gradients_shared:
                self._read(entry)  # others see what is added, as a buffer that all gradients are views of
            else:
                entry.there = outside.grad
        with torch.set_grad_enabled(create_graph):
            self._add_to(entry, gradient)
        if runs_hooks:
            run_after_accumulation(entry.tensor)

    def _add_to(self, entry: _Gradient, gradient: torch.Tensor) -> None:
        current = self._sum(entry.current, gradient, entry.value.fake)
        if entry.is_known:
            entry.current = current
        else:
            entry.added.append(current)

    def _sum(self, current: torch.Tensor | None, gradient: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        if current is None:
            return self._in_memory_of_its_own(gradient, leaf)
        return current + gradient if torch.is_grad_enabled() else current.add_(gradient)

    def _in_memory_of_its_own(self, gradient: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        """A gradient as autograd keeps it: nobody else has its memory, and it is laid out as the leaf."""
        sharing = self._values.sharing(gradient)
        of_forward = any(v.op.kind != "call_function" or v.op.phase is None for v in sharing)
        kept = self._hooks_keep or sharing[0].storage in self._phases.seen
        shared = kept or of_forward or sharing[0].storage in self._taken
        order = dense_order(leaf) or list(range(leaf.dim()))
        if shared or dense_order(gradient) != order:
            gradient = gradient.permute(order).clone(memory_format=torch.contiguous_format)
            gradient = gradient.permute([order.index(i) for i in range(leaf.dim())])
        self._taken.add(self._values.value_of(gradient).storage)
        if not gradient.requires_grad:
            self._builder.accumulated.add(id(gradient))
        return gradient

    # ---------------------------------------------------------------- the `grad` of tensors

    def get(self, t: torch.Tensor) -> Any:
        """`t.grad`; NotImplemented for a tensor that the forward made."""
        if not self._values.is_outside(t):
            return NotImplemented
        entry = self._of(t)
        if not entry.is_known:
            self._read(entry)
        return entry.current

    def set(self, t: torch.Tensor, new: torch.Tensor | None) -> bool:
        """`t.grad = new`. False for a tensor that the forward made."""
        if not self._values.is_outside(t):
            return False
        entry = self._of(t)
        entry.is_known, entry.current, entry.added = True, new, []
        if new is not None:
            self._taken.add(self._values.value_of(new).storage)
        return True

    def _of(self, t: torch.Tensor) -> _Gradient:
        value = self._first(self._flags.value_of(t))
        gradient = self._gradients.get(value)
        if gradient is None:
            index = self._tape.inputs.index(value) if value in self._tape.inputs else None
            name = value.op.name if index is None else self._tape.input_paths[index]
            tensor = t if value.real is None else value.real
            gradient = self._gradients[value] = _Gradient(tensor, value, index, name)
        return gradient

    def _first(self, value: Value) -> Value:
        """What a tensor from outside was before the forward wrote it in place, or set its `.data`."""
        if value.op.kind != "call_function":
            return value
        ops = [v.op for v in self._values.in_storage(value.storage) if v.fake is value.fake]
        if (set_to := next((op for op in ops if op.target is _SET_DATA), None)) is not None:
            return self._first(set_to.tensor(0))
        outside = (*self._tape.inputs, *(v for _, v in self._tape.attribute_reads()))
        return next((v for v in outside if v.fake is value.fake), value)

    def _read(self, entry: _Gradient) -> None:
        """Find out what a `grad` is: whether it was None before is a fact that each call is compared with."""
        outside, owner = self._outside(entry.value.fake), self._model.owner(entry.tensor)
        before, variables = outside.grad, self._model.contents.tensors
        name = next((name for name, held in variables if held is entry.tensor), entry.name)
        place: Source = HasGradient(entry.tensor) if owner is None else OfTensor(*owner[1:], "has_grad")
        if entry.index is not None:
            place = OfInput(entry.index, "has_grad")
        self._reads.note_once(f"{name}.grad is not None", before is not None, place)
        entry.is_known = entry.is_read = True
        if before is not None:
            if entry.added and id(before) in self._values.by_id:
                self._run_again()
            owner = self._model.owner(outside)
            if owner is not None:
                self._model.add_gradient(before, *owner)
            else:  # the program has that tensor, wherever a call has another
                place = Asked(optimizers.has_gradient, (entry.tensor, before))
                if entry.index is not None:
                    place = GradientOfInput(entry.index, before)
                self._reads.note_once(f"{name}.grad as the same tensor", True, place)
            entry.before = entry.current = self._values.value_of(before).fake
        added, entry.added = entry.added, []
        with torch.no_grad():
            for gradient in added:
                self._taken.discard(self._values.value_of(gradient).storage)
                self._add_to(entry, gradient)

    def finish(self) -> None:
        """Put on the tape what the gradients are after the forward."""
        self._refuse_other_settings()
        self._write_counts()
        self._note_asked()
        self._look_for_shared()
        for entry in self._gradients.values():
            placeholder = entry.value.op.name
            of = StateRef(placeholder) if entry.index is None else GraphInput(entry.index, placeholder)
            new = [] if entry.current is None or entry.current is entry.before else [entry.current]
            for t in [*entry.added, *new]:
                write = AttributeWrite(None, entry.name, "grad", self._values.value_of(t), of, bool(entry.added))
                self._tape.attribute_writes.append(write)
            if entry.is_known and entry.current is None and (entry.before is not None or not entry.is_read):
                self._tape.cleared.append(of)

    def _look_for_shared(self) -> None:
        """Run the forward again where it takes the memory of a `grad` that something was added to as another tensor."""
        # what is added while nobody knows what was there comes later in the program than in eager
        late = {
            storage_id(e.there): None if e.added else e.there for e in self._gradients.values() if e.there is not None
        }
        attributes = [v.real for _, v in self._tape.attribute_reads()] if late else []
        outside = [t for t in (*attributes, *self._values.examples.values()) if late and t is not None]
        if any(late.get(storage_id(t), t) is not t for t in outside):
            self._run_again()

    def _run_again(self) -> NoReturn:
        raise Retrace("a gradient shares its memory", gradients_shared=True)

    # ---------------------------------------------------------------- optimizers

    def begin(self) -> None:
        """Let numbers that schedules and steps change, of optimizers around the forward, stand for those of a call."""
        for optimizer in self._model.contents.of_class(torch.optim.Optimizer):
            for place, numbers in optimizers.varied(optimizer):
                parts, before = list(map(self._read_number, numbers)), place.current()
                self._varied.append((place, before, tuple(parts) if type(before) is tuple else parts[0]))
                place.put(self._varied[-1][-1])
            for place, number in optimizers.counts(optimizer, lambda p: (self._model.owner(p) or (None,))[0]):
                self._counts.append((place, place.current(), self._read_number(number), number))
                place.put(self._counts[-1][2])

    def _read_number(self, number: optimizers.Number) -> Any:
        """A symbol for a number; its tensor for an op that takes no symbols, as the fused ones."""
        self._tape.guards.append(Guard(number.name, "a number", number, (), self._tape.root.path))
        self._model.state_names[id(number.tensor)] = number.tensor_name
        if number.takes_tensor:
            return number.tensor
        symbol: Any = self._values.value_of(number.tensor).fake.item()
        self._numbers[symbol.node.expr] = number
        self._values.factory.shape_env.live_numbers[symbol.node.expr] = number.value()
        return symbol

    def _note_asked(self) -> None:
        """What Python asked of these numbers is another fact of a call."""
        names = {symbol: number.name for symbol, number in self._numbers.items()}
        hint = "leave it as it is, or compute with the number without asking for its value (`x ** 0.5`, no math.sqrt)"
        for expr, (answer, frames) in self._values.factory.shape_env.asked.items():
            places = tuple([item for item in self._numbers.items() if item[0] in expr.free_symbols])
            asked = Asked(optimizers.answer_of, (expr, places), hint=hint)
            self._reads.note_once(named_text(expr, names), answer, asked, frames)

    def _write_counts(self) -> None:
        """Put on the tape what became of the numbers that steps count."""
        for place, before, symbol, number in self._counts:
            if (new := place.current()) is not symbol:
                if (new.node.pytype if isinstance(new, Symbolic) else type(new)) is not type(before):
                    hint = f"keep it of class {type(before).__name__}, or a tensor that is written in place"
                    step = f"{type(number.optimizer).__name__}.step"
                    self._refuse(f"the step puts an object of another class in the place of {number.name}", hint, step)
                with self._of_optimizer(number.optimizer), torch.no_grad():
                    value = self._values.value_of(torch.scalar_tensor(new, dtype=number.tensor.dtype, device="cpu"))
                name = self._values.value_of(number.tensor).op.name
                self._tape.owners[name] = None, name  # a loaded trace counts there
                self._tape.attribute_writes.append(AttributeWrite(None, "", name, value, place=place))

    def on_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, hooks: list[Callable[..., Any]]
    ) -> Callable[[], Any] | None:
        """An optimizer begins a step: its ops have a scope of their own. A call is compared with its settings.

        Returns what it is to call in place of `closure`, whose ops are none of the step.
        """
        self._reads.note_once("the hooks of all optimizers", hooks, Asked(hooks_of_all_optimizers, (), kind="hooks"))
        self._note(f"the hooks of {type(optimizer).__name__}", hooks_of_optimizer, optimizer, kind="hooks")
        step = _OptimizerStep(optimizer, optimizer in self.new_optimizers)
        self._stepping.append(step)
        if not step.is_inside:
            self._note_settings(optimizer)
        self._enter(step, has_gradients=closure is None)
        if closure is None:
            return None

        def run() -> Any:
            step.stack.close()
            loss = closure()
            self._enter(step, has_gradients=True)
            return loss

        return run

    def _enter(self, step: _OptimizerStep, *, has_gradients: bool) -> None:
        """`has_gradients`: whether those are known that the step takes."""
        if has_gradients and not step.is_inside:
            self._make_state(step.optimizer)
            step.state = optimizers.state_of(step.optimizer)
        step.stack.enter_context(self._of_optimizer(step.optimizer))
        self._builder.optimizer = step.optimizer
        step.stack.callback(setattr, self._builder, "optimizer", None)
        flags = step.stack.enter_context(step.flags)
        flags.enter_context(exporting(False))  # optimizers that are compiled compute in other ways

    def _note_settings(self, optimizer: torch.optim.Optimizer) -> None:
        name = type(optimizer).__name__
        self._note(f"the settings of {name}", optimizers.settings_of, optimizer)
        for i, key in optimizers.settings_of(optimizer):
            setting, hint = optimizers.setting_of(optimizer, i, key), ""
            if isinstance(setting, torch.Tensor):
                self._model.state_names.setdefault(id(setting), f"{name}_{key}")
                hint = f'write another value into the tensor that is there, as in `group["{key}"].copy_(new)`'
            if all(setting is not current for *_, current in self._varied):
                self._note(f"{name}.param_groups[{i}][{key!r}]", optimizers.setting_of, optimizer, i, key, hint=hint)
            self._settings.append((optimizer, i, key, setting))

    def _refuse_other_settings(self) -> None:
        """Raise where the forward has changed what an optimizer stepped by, after it is put back."""
        current = [(*s, optimizers.setting_of(*s[:3])) for s in self._settings]
        changed = [s[:4] for s in current if not (s[3] is s[4] or same(s[3], s[4]))]
        for optimizer, i, key, setting in reversed(changed):
            optimizer.param_groups[i][key] = setting
        if changed:
            name, key = type(changed[0][0]).__name__, changed[0][2]
            self._refuse(
                f"the step changes a setting of {name}, {key!r}, by which it has stepped",
                f"keep it in the state of a parameter, as optimizer.state[p][{key!r}]; or change it, as a scheduler's "
                "step does, after each call of the trace, which reads what is there then",
                f"{name}.param_groups",
            )

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The step has ended."""
        step = self._stepping.pop()
        step.stack.close()
        if step.is_inside:
            return
        name, state = type(optimizer).__name__, optimizers.state_of(optimizer)
        if any(isinstance(x, torch.Tensor) and state.get(key) is not x for key, x in step.state.items()):
            hint = 'write them in place: `state["x"].copy_(new)`'
            self._refuse(f"{name} puts other tensors in its state", hint, f"{name}.step")
        if new := {key: x for key, x in state.items() if key not in step.state}:
            hint = "run optimizer.step() once before the trace"
            error = self._builder.refusal(f"{name} makes its state in its first step", op=f"{name}.step", hint=hint)
            values = {key: self._values.value_of(x) for key, x in new.items() if isinstance(x, torch.Tensor)}
            first = {id(v.fake): v for op in reversed(self._tape.ops) for v in op.values()}
            new |= {key: first[id(v.fake)] for key, v in values.items()}
            self._builder.first_states.append(optimizers.FirstState(optimizer, new, error))
        self._note(f"the parameters and state of {name}", optimizers.tensors_of, optimizer, text=optimizers.how_many)
        self._note_held(optimizer)

    def _note(self, what: str, ask: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Let a call be compared with what a function gives now."""
        self._reads.note_once(what, ask(*args), Asked(ask, args, **options))

    def on_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer sets the gradients of its parameters to None."""
        if optimizer not in self.new_optimizers:
            self._note_held(optimizer)

    def _note_held(self, optimizer: torch.optim.Optimizer) -> None:
        """A call is compared with it that the parameters of an optimizer are those of the model."""
        params = [(p, self._model.owner(p)) for group in optimizer.param_groups for p in group["params"]]
        places = tuple([(*owner[1:], p) for p, owner in params if owner is not None])
        place = Asked(optimizers.are_held, (places,))  # else it steps others than the model reads
        self._reads.note_once(f"{type(optimizer).__name__} has the parameters of the model", True, place)

    def close(self) -> None:
        """End the steps that an error has left, and put numbers back."""
        while self._stepping:
            self._stepping.pop().flags.close()
        for place, before, current in self._varied:
            if place.current() is current:
                place.put(before)
        for place, before, *_ in self._counts:
            place.put(before)

    def _make_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the state that an optimizer does not have yet, and name it."""
        params = [p for group in optimizer.param_groups for p in group["params"] if self.get(p) is not None]
        with eager():
            states = optimizers.new_state(optimizer, params)
        for p, state in states.items():
            optimizer.state[p] = state
            self._model.contents.accept(optimizer.state, p)
        for p, key, x in optimizers.state_tensors(optimizer):
            if (owner := self._model.owner(p)) is not None:
                self._model.state_names[id(x)] = f"{owner[0]}_{key}"

    def on_scaled_step(
        self, optimizer: torch.optim.Optimizer, found_infs: Iterable[torch.Tensor], step: Callable[[], Any]
    ) -> Any:
        """A scaler lets an optimizer step where gradients are finite: its ops run, and take back what they wrote."""
        if optimizer not in self.new_optimizers:  # else its state is not there before the step, and not after the call
            self._make_state(optimizer)
        settings = [optimizers.setting_of(optimizer, i, key) for i, key in optimizers.settings_of(optimizer)]
        kept = [list(x.values()) if isinstance(x, dict) else x for x in optimizer.state.values()]
        state = leaves([kept, settings], torch.Tensor)
        tensors = [*(p for group in optimizer.param_groups for p in group["params"]), *state]
        with self._of_optimizer(optimizer), torch.no_grad():
            skips = {d: torch.stack([n.to(d) for n in found_infs]).sum() != 0 for d in {t.device for t in tensors}}
            before = {id(t): (t, t.clone()) for t in tensors}
        start = len(self._tape.ops)
        out = step()
        written = {v.storage for op in self._tape.ops[start:] for v in op.writes}
        with self._of_optimizer(optimizer), torch.no_grad():
            for t, old in before.values():
                if self._values.value_of(t).storage in written:
                    t.copy_(torch.where(skips[t.device], old, t))
        return out

    @contextlib.contextmanager
    def _of_optimizer(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Inside, ops are of a step of the optimizer."""
        self._builder.state.push_scope(f"{type(optimizer).__name__}.step")
        with self._phases.of(OTHER):
            yield
        self._builder.state.pop_scope()  # not after an error, which ends the recording

    def on_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Name a scaler's tensors, which it has from now on."""
        for name, t in vars(scaler).items():
            if isinstance(t, torch.Tensor):
                self._model.contents.accept(vars(scaler), name)
                self._model.state_names[id(t)] = f"GradScaler{name}"

    def on_begun_scaler(self, problem: str) -> NoReturn:
        """A scaler is between `unscale_` or `step` and `update` where the forward begins to use it, or ends."""
        self._refuse(problem, "trace scale, unscale_, step and update in one step", "GradScaler.step")

    # ---------------------------------------------------------------- refusals

    def _refuse_without_history(self) -> None:
        op = self._builder.opaque_to_autograd
        if not in_transform() or op == str(torch.ops.higher_order.autograd_function_apply):
            self._builder.expect_backward("the forward differentiates")
        if op is not None:
            hint = "trace the forward alone, without torch.autograd.grad in it"
            self._refuse(f"the forward differentiates, and has {op} of tensors that require grad", hint, op)
        if self._values.transformed and not in_transform():
            self._refuse(
                "the forward differentiates, and a transform such as torch.vmap took a parameter as its argument, "
                "from where no gradient would come",
                "give the transform `parameter * 1`, or use the parameter inside of its function",
            )

    def _refuse_other(self, by: list[torch.Tensor], *, accumulates: bool) -> None:
        """Refuse where derivatives are not what the ops say: autograd knows more of the tensors from outside."""
        examples = list(self._values.examples.items())
        example_inputs = [t for _, t in examples]
        if accumulates and any(t.grad_fn is not None for t in by if not isinstance(t, FakeTensor)):
            self._refuse_beyond()
        by = [t for t in by if unwrapped(t) is t and not isinstance(t, FakeTensor)]
        with eager():
            if accumulates and have_node_hooks(t for t in by if t.is_leaf and requires_grad_of(t)):
                self._refuse(
                    "a hook hangs on the node of autograd's graph that adds to the gradient of a parameter",
                    "register_post_accumulate_grad_hook of the parameter runs at the same time, and can be traced",
                    "Node.register_hook",
                )
        written, sharing = self._tape.written_storages(), collections.Counter(v.storage for v, _ in examples)
        rewritten = [(v, t) for v, t in examples if v.requires_grad and v.storage in written and is_view(t)]
        depends = any(sharing[v.storage] > 1 or any(t is other for other in by) for v, t in rewritten)
        brought = {v.storage for op in self._tape.ops if op.grad and op.tracked for v in op.writes}
        objects = {(v.storage, id(v.fake)) for v, _ in examples if v.storage in brought}
        depends = depends or len(objects) > len({storage for storage, _ in objects})  # in eager all have what one gets
        with paused() if not depends else contextlib.nullcontext():
            depends = depends or has_other_gradient(by, [*example_inputs, *self._tape.attributes.values()])
        if depends:
            self._refuse(
                "the forward differentiates by an input that has a hook, or by a parameter or an input from which "
                "another input was computed, or that is a view made under no_grad or written; or inputs are written "
                "that share memory",
                "differentiate by `x.view_as(x)` of an input, or by an input that is detached first; clone() one of "
                "those that share memory; or differentiate outside of the forward",
            )

    def _refuse_lost(self, by: list[torch.Tensor]) -> None:
        """Refuse where autograd gives no gradient by a tensor that got other memory."""
        if any(v.op.target is _SET_DATA for t in by for v in self._values.names_of(t)):
            problem = "the forward sets `.data` of a tensor between what it computes from that and the backward"
            self._refuse(problem, "do so before or after, or write in place: `p.data.copy_(new)`", "Tensor.data")

    def _refuse_beyond(self) -> NoReturn:
        self._refuse("backward() goes on beyond an input that was itself computed", "give the input detached")

    def _refuse(self, problem: str, hint: str, op: str = "torch.autograd.grad") -> NoReturn:
        raise self._builder.refusal(problem, op=op, hint=hint)


def _hooks_at(*places: tuple[tuple[str, torch.nn.Module, str] | None, torch.Tensor]) -> list[list[Callable[..., Any]]]:
    """The hooks on the gradients of parameters, of which the model may have put others at their names."""
    current = [t if owner is None else getattr(owner[1], owner[2], None) for owner, t in places]
    return hooks_of(*(t for t in current if isinstance(t, torch.Tensor)))
