"""Recording a callable: inputs become fake, the callable runs once, the tape comes out.

Traces of several threads take turns: the flags and methods that a trace changes belong to the whole process.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch

from scopetrace._compat.dispatch import dispatching_to
from scopetrace._compat.patches import observing, python_random_state_kept
from scopetrace._compat.tensors import FakeTensor
from scopetrace.containers.objects import Returned, SavedContents, Watch, tensor_holders
from scopetrace.containers.structure import identifier, instantiate, leaves_with_path, map_structure, refuse_hidden
from scopetrace.errors import ControlFlowError, UnsupportedOpError
from scopetrace.ir import scopes
from scopetrace.ir.tape import RecordedTape, Value, garbage_collection_paused
from scopetrace.ir.verify import checked
from scopetrace.record.explain import explained
from scopetrace.record.leaves import leaf_rule
from scopetrace.record.model import Model
from scopetrace.record.observe import CallObserver, Progress
from scopetrace.record.recorder import Recorder
from scopetrace.record.retrace import Assumptions, Retrace
from scopetrace.record.sizes import DynamicSizes, read_dynamic_shapes, refuse_shared, symbolic_strides

_one_at_a_time = threading.RLock()

T = TypeVar("T")


def record(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    dynamic_shapes: Any = None,
    leaves: Any = (),
    specialize: bool = False,
    progress: Progress | None = None,
) -> RecordedTape:
    """The tape of `fn(*args, **kwargs)`. Raises what `fn` raises, and the subclasses of TraceError."""

    def attempt(assumptions: Assumptions) -> RecordedTape:
        model = Model(fn)
        _refuse_sharded(model)
        root = scopes.Scope("", model.type_name)
        recorder = Recorder(model, root, assumptions, specialize=specialize)
        observer = CallObserver(recorder, leaf_rule(leaves, model), progress)
        return run_recorded(observer, fn, model.forward, args, kwargs, dynamic_shapes)

    return retraced(attempt)


def _refuse_sharded(model: Model) -> None:
    """FSDP2's hooks would gather in the trace, for real and into its own tensors."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # where it was never imported, nothing is sharded
        return
    for module in model.modules:
        if isinstance(module, fsdp.FSDPModule):
            raise UnsupportedOpError(
                "the model is sharded by fully_shard",
                module=f"{model.type_name}, {model.names[id(module)][0] or 'the root'}",
                hint="trace it before it is sharded; a model of the same config on the meta device does as well",
            )


def retraced(attempt: Callable[[Assumptions], T]) -> T:
    """What `attempt` returns; where it raises Retrace, it is tried again with the assumptions that failed corrected."""
    assumptions = Assumptions()
    with _one_at_a_time, garbage_collection_paused():
        while True:
            try:
                return attempt(assumptions)
            except Retrace as failed:
                assumptions = assumptions.corrected(failed)


def run_recorded(
    observer: CallObserver,
    fn: Callable[..., Any],
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any = None,
) -> RecordedTape:
    """The tape of the observer's recorder after `fn(*args, **kwargs)`; `forward` names the arguments."""
    recorder = observer.recorder
    model, tape = recorder.model, recorder.tape
    tape.registered = model.registered()
    recorder.object_types |= tensor_holders((args, kwargs))
    fake_args, fake_kwargs = _add_inputs(recorder, forward, args, kwargs, dynamic_shapes)
    saved = SavedContents((args, kwargs), recorder.object_types)
    watch = Watch((fake_args, fake_kwargs), recorder.object_types)
    try:
        with python_random_state_kept(), explained(recorder), scopes.activate(recorder.state):
            with observing(observer, model.modules), dispatching_to(recorder.mode, recorder.factory.mode):
                out = observer.run_root(fn, fake_args, fake_kwargs)
            missed = tensor_holders((out, fake_args, fake_kwargs)) - recorder.object_types
            if missed:
                saved.restore()
                raise Retrace("objects hold tensors that held none before the forward", object_types=missed)
            effects = watch.effects(recorder.value_of)
            result = tape.calls[0].outputs
            tape.outputs = Returned(result, effects) if effects else result
            refuse_hidden(out, (FakeTensor,), "the result", recorder.object_types)
            refuse_hidden((fake_args, fake_kwargs), (FakeTensor,), "the arguments", recorder.object_types)
    finally:
        tape.attribute_writes = model.restore(recorder.known_value)
    if recorder.broken is not None:
        hint = "let the body return what others need, and do the rest outside"
        raise ControlFlowError(f"torch.cond and its kind: {recorder.broken}", module=tape.root.path, hint=hint)
    if tape.sizes is not None:
        tape.sizes.refuse_fixed()
    return checked(tape, "recording")


def _add_inputs(
    recorder: Recorder, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Placeholders for the tensors in the arguments, and the arguments with fake tensors in their place."""
    inputs = _Inputs(recorder, _dynamic_sizes(recorder, forward, args, kwargs, dynamic_shapes))
    for path, leaf in _named_leaves(forward, args, kwargs, recorder.object_types):
        if _may_be_input(leaf):
            inputs.add(path, leaf)
    inputs.add_numbers()
    on_tape = iter(inputs.on_tape)
    recorder.tape.args = map_structure(
        lambda leaf: next(on_tape) if _may_be_input(leaf) else leaf,
        (args, kwargs),
        (torch.Tensor, int),
        recorder.object_types,
    )
    faked: tuple[Any, Any] = instantiate(lambda v: v.fake, recorder.tape.args, Value)
    return faked


def _may_be_input(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, int)) and not isinstance(leaf, bool)


class _Inputs:
    """Makes placeholders: the tensors in order, then the dynamic numbers."""

    def __init__(self, recorder: Recorder, dynamic: DynamicSizes | None) -> None:
        self._recorder = recorder
        self._dynamic = dynamic
        self._taken: set[str] = set()
        self._fakes: dict[int, torch.Tensor] = {}
        self._numbers: dict[str, Any] = {}
        self.on_tape: list[Any] = []

    def add(self, path: str, leaf: Any) -> None:
        """A tensor, or a whole number that may be dynamic."""
        if isinstance(leaf, torch.Tensor):
            fake = self._fake(path, leaf)
            value = self._recorder.add_input(identifier(path, self._taken), fake)
            self._recorder.values.add_input(value, leaf)
            self.on_tape.append(value)
            self._recorder.tape.input_paths.append(path)
            return
        number = None
        if self._dynamic is not None and type(leaf) is int:
            number = self._dynamic.number_of(path, leaf, len(self._numbers))
        if number is not None:
            self._numbers[path] = number
        self.on_tape.append(leaf if number is None else number)

    def add_numbers(self) -> None:
        """The placeholders of the dynamic numbers."""
        for path, number in self._numbers.items():
            self._recorder.add_number(identifier(path, self._taken), number)

    def _fake(self, path: str, real: torch.Tensor) -> torch.Tensor:
        fake = self._fakes.get(id(real))
        if fake is None:
            index = len(self._recorder.tape.inputs)
            sizes = None if self._dynamic is None else self._dynamic.sizes_of(real, path, index)
            fake = self._fakes[id(real)] = _fake_input(self._recorder, real, sizes)
        return fake


def _fake_input(recorder: Recorder, real: torch.Tensor, sizes: list[Any] | None) -> torch.Tensor:
    if sizes is None:
        return recorder.factory.from_real(real)
    return recorder.factory.symbolic(real, sizes, symbolic_strides(real, sizes))


def _dynamic_sizes(
    recorder: Recorder, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], spec: Any
) -> DynamicSizes | None:
    if callable(getattr(spec, "dynamic_shapes", None)):  # ShapesCollection and AdditionalInputs of torch.export
        spec = spec.dynamic_shapes(forward, args, kwargs)
    if not spec:
        return None
    named = [*zip(argument_names(forward, len(args)), args, strict=True), *kwargs.items()]
    specs = read_dynamic_shapes(spec, named, lambda: bound_arguments(forward, args, kwargs), recorder.object_types)
    refuse_shared(
        [t for _, t, _ in specs if isinstance(t, torch.Tensor)],
        [leaf for _, leaf in _named_leaves(forward, args, kwargs, recorder.object_types)],
    )
    dynamic = DynamicSizes(recorder.factory.shape_env, specs)
    recorder.tape.sizes = dynamic.rules
    return dynamic


def bound_arguments(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by the names of forward's parameters, `*args` and `**kwargs` under their own."""
    target = forward.forward if isinstance(forward, torch.nn.Module) else forward
    return dict(inspect.signature(target).bind(*args, **kwargs).arguments)


def _named_leaves(
    forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any], object_types: Collection[type]
) -> list[tuple[str, Any]]:
    """Each leaf with its path from the name of forward's parameter: `"ys[0]['k']"`."""
    named = [*zip(argument_names(forward, len(args)), args, strict=True), *kwargs.items()]
    return [found for name, arg in named for found in leaves_with_path(arg, name, object_types)]


def argument_names(forward: Any, count: int) -> list[str]:
    """What forward calls its first `count` positional arguments; `args[0]` and so on past `*args`."""
    target = forward.forward if isinstance(forward, torch.nn.Module) else forward
    names: list[str] = []
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):  # built-in callables have no signature
        parameters = []
    for p in parameters:
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            names.append(p.name)
        elif p.kind is p.VAR_POSITIONAL:
            names += [f"{p.name}[{i}]" for i in range(count - len(names))]
    names += [f"arg[{i}]" for i in range(count - len(names))]
    return names[:count]


__all__ = ["RecordedTape", "Value", "argument_names", "record", "retraced", "run_recorded"]
