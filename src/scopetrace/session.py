"""One recording: inputs become placeholders and fake tensors, the callable runs, and the tape comes out.

Data flow:
    callable + example inputs -> Recording: a builder, a value table, and recorders of ops, calls and data reads
    arguments -> placeholders, fake tensors in their place -> the callable runs once, under patches and modes
    its result, changed arguments and bound attributes -> outputs of the tape

The callable runs again where an assumption turns out to be wrong (`Retrace`): see `record`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from scopetrace._compat.export import additional_inputs, without_wrappers
from scopetrace._compat.ops import building, dispatching_to, eager, in_large_stack
from scopetrace._compat.patches import observing
from scopetrace._compat.questions import hooks_of_all_modules, settings
from scopetrace._compat.tensors import FakeFactory, FakeTensor, is_symbolic, tags_of, with_version
from scopetrace.autograd.checkpoints import refuse_recomputed
from scopetrace.autograd.history import note_leaves, refuse_lost_history
from scopetrace.autograd.optimizers import begun
from scopetrace.autograd.recorder import AutogradRecorder
from scopetrace.containers.contents import Attributes, Change, same, snapshot
from scopetrace.containers.structure import (
    Returned,
    Watch,
    effect_targets,
    identifier,
    instantiate,
    leaves,
    leaves_with_path,
    map_structure,
    object_classes,
    tensor_holders,
    with_shared,
)
from scopetrace.errors import DynamicShapeError, InputMismatchError, RandomStateError, TraceError, UnsupportedOpError
from scopetrace.infer.inference import Inference
from scopetrace.ir import scopes
from scopetrace.ir.guards import ArgumentNumber, At, CallInputs, Guard, WhichContainers, numbers_read
from scopetrace.ir.segment import CHECKPOINT, keep_regions
from scopetrace.ir.tape import AttributeWrite, RecordedTape, Value, checks_enabled
from scopetrace.ir.verify import verify
from scopetrace.record.builder import Assumptions, Retrace, TapeBuilder
from scopetrace.record.calls import CallRecorder, Progress, leaf_targets, refuse_unmatched
from scopetrace.record.data import ExampleRun, NoRealValue
from scopetrace.record.dynamic_shapes import DynamicShapes, collected, symbolic_strides
from scopetrace.record.explanations import errors_explained, explained, text_used
from scopetrace.record.model import Model, named_arguments
from scopetrace.record.ops import OpRecorder
from scopetrace.record.reads import ReadRecorder, caught, expect_copies
from scopetrace.record.values import ValueTable, refuse_changes, refuse_writes
from scopetrace.watch.effects import EffectWatch, refuse_hidden, refuse_leak, refuse_tags, settings_left
from scopetrace.watch.entries import are_alike, bind_entries
from scopetrace.watch.programs import what_is_left
from scopetrace.watch.questions import watch_questions
from scopetrace.watch.settle import Run, judged, random_like
from scopetrace.watch.table import StateReads

T = TypeVar("T")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def record(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    dynamic_shapes: Any = None,
    leaf_modules: Any = (),
    specialize: bool = False,
    progress: Progress | None = None,
) -> RecordedTape:
    """The tape of `fn(*args, **kwargs)`. Raises what `fn` raises, and the subclasses of TraceError.

    `fn` runs once. It runs a second time where it differentiates and none of its functions names `backward`, or one
    does and it does not; where it turns out to use a transform such as torch.vmap, or to write to a view of a tensor
    that requires grad: then torch has to run every op, for autograd's history. And it runs again where it puts the
    first tensors into an argument, as into an empty cache, or an optimizer of a user makes its state. Modules,
    arguments and the random state are as before when it starts again; what else it changes (globals, files) is changed
    twice.

    Traces of several threads take turns.
    """

    def attempt(assumptions: Assumptions, before: RecordedTape | None = None) -> Run:
        model = Model(fn, named_arguments(fn, args, kwargs))
        _refuse_untraceable(model)
        recording = Recording(model, assumptions, leaf_modules=leaf_modules, specialize=specialize, progress=progress)
        return recording.run(fn, args, kwargs, dynamic_shapes, before)

    first = retraced(attempt)
    if first.first_states:
        first = begun(first, lambda: retraced(attempt))
    return judged(first, lambda: retraced(functools.partial(attempt, before=first.tape)))


def _refuse_untraceable(model: Model) -> None:
    """DistributedDataParallel reads Dynamo's state; FSDP2's hooks would gather for real, into tensors of the trace.

    A lazy module makes its parameters when it first runs, of sizes that a trace would have to write into it. The ops of
    a DTensor are Python of its own, on the real tensor of this rank.
    """

    def refuse(problem: str, module: str, hint: str) -> None:
        raise UnsupportedOpError(problem, module=f"{model.type_name}, {module or 'the root'}", hint=hint)

    parts = ("fsdp", "FSDPModule"), ("tensor", "DTensor")  # where one was never imported, nothing is of its class
    sharded, dtensor = (getattr(sys.modules.get(f"torch.distributed.{name}"), kind, ()) for name, kind in parts)
    meta = "a model of the same config on the meta device does as well"
    for module in model.modules:
        name = model.names_of(module)[0]
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            refuse("the model is wrapped by DistributedDataParallel", name, "trace the module inside, ddp.module")
        if isinstance(module, sharded):
            refuse("the model is sharded by fully_shard", name, f"trace it before it is sharded; {meta}")
    for (fqn, *_), t in zip(model.owners, model.tensors, strict=True):
        if torch.nn.parameter.is_lazy(t):
            problem, hint = "a lazy module has no parameters yet", "run the model once before it is traced"
            refuse(problem, fqn.rpartition(".")[0], hint)
        if isinstance(t, dtensor):
            problem = "the model has a DTensor, as parallelize_module and distribute_tensor make them"
            hint = f"trace it before it is distributed; {meta}. A graph of one rank is that of a forward on plain "
            hint += "tensors, in which collectives that it calls are ops"
            refuse(problem, fqn.rpartition(".")[0], hint)


def retraced(attempt: Callable[[Assumptions], T]) -> T:
    """What `attempt` returns; where it raises Retrace, it is tried again with the assumptions that failed corrected."""
    assumptions = Assumptions()
    with building():
        while True:
            try:
                return in_large_stack(attempt, assumptions)
            except Retrace as failed:
                assumptions = dataclasses.replace(assumptions, **failed.needed)


class Recording:
    """The parts of one recording, put together."""

    def __init__(
        self,
        model: Model,
        assumptions: Assumptions,
        *,
        leaf_modules: Any = (),
        specialize: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.model = model
        self.object_types = assumptions.object_types
        self.factory = FakeFactory()
        inference = Inference(self.factory)
        self.tape = RecordedTape(
            scopes.Scope("", model.type_name),
            shape_env=self.factory.shape_env,
            fake_mode=self.factory.mode,
            inference=inference,
            exact_autograd=assumptions.exact_autograd or bool(assumptions.differentiates),
            registered=model.registered(),
            grad=torch.is_grad_enabled(),
        )
        self.builder = TapeBuilder(self.tape, assumptions)
        self.values = ValueTable(self.builder, self.factory, inference, model)
        specialize = specialize or self.factory.mode.propagate_real_tensors
        self.reads = ReadRecorder(self.values)
        self.ops = OpRecorder(self.values, self.reads, specialize=specialize)
        self.factory.shape_env.watch(self.builder, self.ops)
        self._leaves = leaf_targets(leaf_modules, model) if leaf_modules != () else []
        self._progress = progress
        self.containers: Watch | None = None
        """Those among the arguments, as the forward has them."""

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dynamic_shapes: Any = None,
        first: RecordedTape | None = None,
    ) -> Run:
        """The recording of `fn(*args, **kwargs)`; `first` is that which this one is to judge."""
        tape, forward = self.tape, self.model.forward
        others: list[Any] = []
        if callable(getattr(dynamic_shapes, "dynamic_shapes", None)):  # ShapesCollection, AdditionalInputs
            others = additional_inputs(dynamic_shapes)
            dynamic_shapes = collected(dynamic_shapes, forward, args, kwargs)
            args, kwargs = without_wrappers((args, kwargs))
        tape.example_inputs = args, kwargs
        self.object_types |= tensor_holders((args, kwargs))
        arguments = named_arguments(forward, args, kwargs)
        self._add_inputs(arguments, args, kwargs, dynamic_shapes)
        inputs = [(path, v.fake) for path, v in zip(tape.input_paths, tape.inputs, strict=True)]
        effects = EffectWatch(fn, self.model, arguments, self.object_types, inputs)
        names, differentiates = effects.reach.names, self.builder.assumptions.differentiates
        guessed = differentiates is None and ("backward" in names or {"autograd", "grad"} <= names)
        if guessed:
            self.builder.differentiates = self.tape.exact_autograd = self.ops.exact = True
        reads = StateReads(self.values, effects)
        hooks = {name: (table, table.copy()) for name, table in hooks_of_all_modules().items()}
        changes: list[Change] = []
        try:
            with self._expecting_backward() if guessed else contextlib.nullcontext():
                fakes = self._run_forward(fn, effects, reads)
        except Exception as error:
            if self.containers is not None and not isinstance(error, TraceError):
                copied = effect_targets(self.containers.effects(lambda t: t), (args, kwargs))
                effects.refuse_held({*map(id, copied), *(id(change.place.owner) for change in effects.restore())})
            raise
        finally:
            bound = {id(v.fake): v for op in self.tape.ops for v in op.values()}
            changes += effects.restore()
            for table, before in hooks.values():
                if table != before:
                    table.clear()
                    table.update(before)
        self.reads.drop_inner_flags()
        guards = reads.guards(fn, changes)
        guards += self._of_containers((args, kwargs), effects, {id(change.place.owner) for change in changes}, guards)
        tape.guards += guards
        entries = bind_entries(self.values, changes, first) if changes else frozenset()
        changes = self._without_bound([c for c in changes if c.place.id not in entries], reads)
        note_leaves(self.values, self.reads)
        positional = [name for name, _ in arguments[: len(args)]]
        tape.argument_numbers = self._argument_numbers((args, kwargs), fakes, positional, reads.names)
        self._refuse(others)
        # break reference cycles, which Python's garbage collector would take a tenth of a trace to free
        self.builder.phase = None
        self.model.contents.clear()
        if self.builder.regions and not self.builder.differentiated:  # their backward may be a part of the program
            keep_regions(tape, self.builder.regions)
        if tape.backwards:
            tape.checkpointed = [(r.start, r.stop) for r in self.builder.regions if r.hop is CHECKPOINT]
        if checks_enabled():
            verify(tape, "recording")
        return Run(tape, changes, bound, reads.was_read, self._differs, self._data_of, self.builder.first_states)

    def _of_containers(
        self, arguments: Arguments, effects: EffectWatch, changed: set[int], guards: list[Guard]
    ) -> Iterator[Guard]:
        """Where the forward changes containers among the arguments: which are one, or what it reads elsewhere."""
        targets = effect_targets(getattr(self.tape.outputs, "effects", ()), arguments)
        effects.refuse_held({*map(id, targets), *changed}, guards)
        if targets:
            containers = [guard for guard in guards if type(guard.value) in (list, dict, Attributes)]
            held = [(guard.name, guard.source) for guard in containers if isinstance(guard.source, At)]
            which, name = WhichContainers(tuple(held)), "which containers among the arguments are one object"
            shared = which.current(CallInputs(*arguments, (), self.object_types))
            yield Guard(name, shared, which, module=self.tape.root.path)

    def _argument_numbers(
        self, before: Arguments, after: Arguments, positional: list[str], names: frozenset[str] | None
    ) -> list[ArgumentNumber]:
        """The numbers in objects among the arguments, which are `after` as the forward has left them."""
        dynamic = {d.path for d in self.tape.sizes.dynamic} if self.tape.sizes is not None else set()
        left = {n.name: n.value for n in numbers_read(after, positional, self.object_types, names)}
        read = numbers_read(before, positional, self.object_types, names)
        return [dataclasses.replace(n, changes=left.get(n.name) != n.value) for n in read if n.name not in dynamic]

    def _without_bound(self, changes: list[Change], reads: StateReads) -> list[Change]:
        """The changes but for tensors that are state of the program; those that are bound are put on the tape."""
        left = []
        for change in changes:
            if same(snapshot(change.old), self._as_traced(snapshot(change.new))) and not reads.asks_identity(change):
                continue
            names, value = self.model.names_of(change.holder), None
            if names and change.attribute and isinstance(change.new, torch.Tensor):
                value = self.values.bound_value(change.new)
            if names and value is not None:
                if isinstance(change.old, torch.nn.Parameter):
                    name = f"{names[0]}.{change.attribute}".lstrip(".")
                    raise UnsupportedOpError(
                        f"the forward puts another tensor in the place of the parameter {name}, as .double() and "
                        ".float() do",
                        module=self.model.type_name,
                        hint="convert modules before the trace, or cast what the op takes; write it in place under "
                        "torch.no_grad()",
                    )
                write = AttributeWrite(change.holder, names[0], change.attribute, value, buffer=change.buffer)
                self.tape.attribute_writes.append(write)
                if are_alike(change.old, value.fake):
                    continue
            left.append(change)
        return left

    def _as_traced(self, x: Any) -> Any:
        """A snapshot, with tensors of the model in the place of what stands for them in the trace."""

        def real_of(t: torch.Tensor) -> torch.Tensor:
            value = self.values.by_id.get(id(t))
            return t if value is None or value.op.kind != "get_attr" or value.real is None else value.real

        return map_structure(real_of, x, FakeTensor)

    def _example_run(self, tape: RecordedTape, seed: int = 0) -> ExampleRun:
        """Of a recording, on the example inputs; with a seed, on random ones like them."""
        inputs = self.values.examples.values()
        by_input = {v: random_like(t, seed) if seed else t for v, t in zip(tape.inputs, inputs, strict=True)}
        return ExampleRun(self.values, tape, by_input)

    @functools.cached_property
    def _run_on_example(self) -> ExampleRun:
        return self._example_run(self.tape)

    def _data_of(self, value: Value, before: int | None = None) -> torch.Tensor | None:
        """What a value is for the example inputs, before so many ops; None without data, or where sizes are dynamic."""
        try:
            return None if is_symbolic(value.fake) else self._run_on_example.tensor(value, before)
        except NoRealValue:
            return None

    def _differs(self, other: RecordedTape, begins: Mapping[Any, tuple[Any, Any]] | None = None) -> bool:
        """Whether two recordings give or leave other values, for the example inputs and for random ones like them.

        True where it cannot be told: tensors have no data, or an op does not take that of random inputs. `begins` has
        what this recording has left in new places, and what the other one begins with there.
        """
        left = what_is_left(self.tape) | {key: new for key, (new, _) in (begins or {}).items()}
        others = {key: begin for key, (_, begin) in (begins or {}).items()} | what_is_left(other)
        if others.keys() - left.keys() or (begins and left.keys() - others.keys()):
            return True
        try:
            for seed in range(3):
                runs = self._example_run(self.tape, seed), self._example_run(other, seed)
                for pair in [(left[key], y) for key, y in others.items()]:
                    now = [run.tensor(x) if isinstance(x, Value) else x for run, x in zip(runs, pair, strict=True)]
                    with eager():
                        if not _are_equal(*now):
                            return True
        except Exception:  # ops of users, and checks of the program, raise anything on random inputs
            return True
        return False

    @contextlib.contextmanager
    def _expecting_backward(self) -> Iterator[None]:
        """Start again where the forward was taken to differentiate for the names in it, and has not when it ends."""
        wrong = Retrace("the forward does not differentiate", differentiates=False)
        try:
            yield
        except Exception:
            if not self.tape.backwards:
                raise wrong from None
            raise
        if not self.tape.backwards:
            raise wrong

    def _run_forward(self, fn: Callable[..., Any], effects: EffectWatch, reads: StateReads) -> Arguments:
        """Run `fn` on fake tensors, with everything on the tape that it does. Gives (args, kwargs) after it."""
        tape, object_types, examples = self.tape, self.object_types, self.tape.example_inputs
        assert examples is not None
        fakes: Any = None

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal fakes
            copies = instantiate(lambda v: v.fake, (args, kwargs), Value)  # registered classes may compute here
            fakes = with_shared(copies, examples, object_types)
            self.containers = Watch(fakes, object_types, [v.fake for v in tape.inputs])
            if not effects.reach.names.isdisjoint(("step", "param_groups")):
                autograd.gradients.begin()
            with self.ops.at_end:
                return fn(*fakes[0], **fakes[1])

        autograd = AutogradRecorder(self.ops)
        calls = CallRecorder(self.ops, object_types, self._leaves, self._progress, autograd.finish, effects.reach.names)
        questions = functools.partial(watch_questions, self.ops)
        modules = [saved.module for saved in self.model.saved_modules]
        with scopes.activate(self.builder.state):
            with (
                errors_explained(self.builder, self.ops),
                self._unseeded(),
                contextlib.closing(autograd),  # what this puts back is nothing that the forward does
                observing(calls, autograd, questions, modules) as is_observed,
                self.reads.watching(effects.reach.names),
                reads.watching(is_observed),
                dispatching_to(self.ops.mode, self.factory.mode),
            ):
                before = settings()
                out = calls.run_root(run, *tape.args)
                self._refuse_caught()
                tape.side_effects += settings_left(before, settings(), tape.root.path)
            refuse_changes(self.values.foreign)
            if self._leaves:
                refuse_unmatched(self._leaves, tape.calls)
            missed = (calls.result_types | tensor_holders(fakes)) - object_types
            is_settled = calls.templates.settle(missed)
            if missed and (not is_settled or object_classes(fakes, missed) & missed):
                why = "objects hold tensors that held none before the forward"
                raise Retrace(why, object_types=object_types | missed)
            object_types |= missed
            containers = self.containers
            assert containers is not None
            containers.object_types = object_types
            changed = containers.effects(self.values.value_of)
            tape.outputs = Returned(tape.calls[0].outputs, changed) if changed else tape.calls[0].outputs
            tape.given = containers.argument_parts(out)
            for x, where in ((out, "the result"), (fakes, "the arguments")):
                for path, leaf in leaves_with_path(x, where, object_types):
                    shown = f"{path}: {leaf}" if isinstance(leaf, str) else path
                    if any(text in shown for text in self.builder.texts):
                        raise text_used("returns", module=tape.root.path, source=None)
                    if not isinstance(leaf, FakeTensor):
                        refuse_leak(leaf, path, is_result=x is out)
        return fakes

    def _refuse_caught(self) -> None:
        """Raise where the forward has caught an error that eager does not raise, or that it may not."""
        for error in caught(self.builder.raised):
            mistake: BaseException | None = error
            if isinstance(error, Exception) and not isinstance(error, TraceError):
                mistake = explained(error, self.builder, self.ops)
            if mistake is not None:
                mistake.add_note("scopetrace: the forward has caught this error, which is none of the model's")
                raise mistake
            self.reads.on_gradients_of_inputs()
        self.builder.raised.clear()

    def _refuse(self, others: list[Any]) -> None:
        """Raise where the tape is not what the forward does, or does not take the sizes that it is to take."""
        tape = self.tape
        if self.builder.deferred:
            raise self.builder.deferred[0]
        if self.values.foreign:
            refuse_changes(self.values.foreign)
            refuse_writes(self.values.foreign, tape)
        results = leaves(tape.outputs, Value)
        if self.builder.loses_device is not None and any(v.fake.is_meta for v in results):
            raise self.builder.loses_device
        refuse_tags(results)
        refuse_lost_history(self.values, results)
        if self.builder.regions:
            passed = {op for number, op in self.builder.made_nodes if number in self.builder.differentiated}
            op = refuse_recomputed(tape, self.builder.regions, passed, self.builder.run_again)
            if op is not None:
                self.reads.on_recomputed(op)
        if tape.sizes is not None:
            expect_copies(tape)
            for number in leaves([(op.args, op.kwargs) for op in tape.ops], torch.SymFloat):
                tape.sizes.env.take_for_defined(number)
            tape.sizes.refuse_fixed()
            tape.sizes.name_equal()
            self._refuse_others(others)

    def _refuse_others(self, others: list[Any]) -> None:
        """Raise DynamicShapeError for inputs of `AdditionalInputs` of which the model does not take the sizes."""
        assert self.tape.sizes is not None
        numbered = {d.path for d in self.tape.sizes.dynamic if d.dim is None}
        for args, kwargs in others:
            inputs = self._leaves_of(named_arguments(self.model.forward, args, kwargs))
            numbers = [leaf for path, leaf in inputs if path in numbered]
            try:
                self.tape.sizes.check([leaf for _, leaf in inputs if isinstance(leaf, torch.Tensor)], numbers)
            except InputMismatchError as error:
                raise DynamicShapeError(f"an input of AdditionalInputs does not fit the model: {error}") from None

    # ---------------------------------------------------------------- inputs

    def _add_inputs(
        self, arguments: list[tuple[str, Any]], args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
    ) -> None:
        """Append the placeholders: the tensors in order, then the dynamic numbers, and set the tape's arguments."""
        tape, taken = self.tape, set[str]()
        leaves = self._leaves_of(arguments)
        for path, leaf in leaves:
            if not _may_vary(leaf):
                refuse_hidden(leaf, path)
        dynamic = None
        if dynamic_shapes:
            env, forward = self.factory.shape_env, self.model.forward
            dynamic = DynamicShapes(env, dynamic_shapes, forward, (args, kwargs), self.object_types)
            tape.sizes = dynamic.rules
        fakes: dict[int, torch.Tensor] = {}
        numbers: list[tuple[str, Any]] = []

        def input_of(path: str, leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                if id(leaf) not in fakes:
                    fakes[id(leaf)] = self._fake_input(leaf, path, dynamic)
                value = self.values.append_input(identifier(path, taken), fakes[id(leaf)], leaf)
                tape.input_paths.append(path)
                return value
            number = None
            if dynamic is not None and type(leaf) is int:
                number = dynamic.number_of(path, leaf, len(numbers))
            if number is None:
                return leaf
            numbers.append((path, number))
            return number

        inputs = iter([input_of(path, leaf) for path, leaf in leaves if _may_vary(leaf)])
        for path, number in numbers:
            self.builder.append("placeholder", identifier(path, taken), (), {}, number)
            tape.numbers.append(number)
        tape.args = map_structure(
            lambda leaf: next(inputs) if _may_vary(leaf) else leaf,
            (args, kwargs),
            (torch.Tensor, int),
            self.object_types,
        )

    def _leaves_of(self, arguments: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return [leaf for name, arg in arguments for leaf in leaves_with_path(arg, name, self.object_types)]

    def _fake_input(self, real: torch.Tensor, path: str, dynamic: DynamicShapes | None) -> torch.Tensor:
        if real.is_nested or real.is_quantized or real.layout not in _LAYOUTS:
            kind = "nested" if real.is_nested else "quantized" if real.is_quantized else str(real.layout)
            raise UnsupportedOpError(
                f"the argument {path} is a {kind} tensor, for which torch has no fake tensor",
                hint="give a plain tensor: nested.to_padded_tensor(0.0) and a mask, or dequantize(), or to_dense()",
            )
        sizes = None if dynamic is None else dynamic.sizes_of(real, path, len(self.tape.inputs))
        if sizes is None:
            cls: Any = type(real)
            if cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and not isinstance(real, FakeTensor):
                raise UnsupportedOpError(  # its Python would get real tensors, and write to them
                    f"the argument {path} is a {cls.__name__}, a tensor subclass that takes ops in Python",
                    hint="pass plain tensors, such as those that it consists of",
                )
            fake = self.factory.from_real(real)
        else:
            fake = self.factory.symbolic(real, sizes, symbolic_strides(real, sizes))
        vars(fake).update(tags_of(real))
        return with_version(fake, real)

    @contextlib.contextmanager
    def _unseeded(self) -> Iterator[None]:
        """Refuse a forward that sets the state of torch's generator: fake tensors draw no numbers from it.

        Other threads may draw from it meanwhile, which changes its state, but not its seed.
        """
        before, seed = torch.get_rng_state(), torch.initial_seed()
        yield
        alone = threading.active_count() == 1
        with eager():  # a FakeTensorMode may be active outside of the trace
            same = torch.equal(before, torch.get_rng_state())
        if torch.initial_seed() != seed or (alone and not same):
            torch.set_rng_state(before)
            problem = "the forward sets the state of torch's random generator, which no graph can repeat"
            hint = "seed outside the model"
            raise RandomStateError(problem, module=self.model.type_name, hint=hint)


_LAYOUTS = {torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


def _are_equal(a: Any, b: Any) -> bool:
    """Whether two tensors are equal, or two values of Python, one of which may be in a tensor."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return same(a, b.item() if isinstance(b, torch.Tensor) else b)


def _may_vary(leaf: Any) -> bool:
    """Whether an argument may be an input: a tensor or a whole number."""
    return isinstance(leaf, (torch.Tensor, int)) and not isinstance(leaf, bool)
