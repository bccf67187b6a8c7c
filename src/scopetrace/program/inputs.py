"""The boundary of a trace: what comes in must be what was traced, and the model's state is the model's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from scopetrace._compat.symbols import Symbolic
from scopetrace._compat.tensors import buffers_of, is_symbolic, parameters_of, storage_id
from scopetrace.containers.objects import Returned, apply_effects, effect_targets
from scopetrace.containers.structure import instantiate, match
from scopetrace.errors import InputMismatchError
from scopetrace.ir.arguments import bind
from scopetrace.ir.tape import FunctionalTape, ProgramTape, Value
from scopetrace.record import argument_names


def match_inputs(tape: ProgramTape, args: tuple[Any, ...], kwargs: dict[str, Any], forward: Any = None) -> list[Any]:
    """The tensors among the arguments and then the dynamic numbers, in the order of the placeholders.

    With `forward`, arguments may be given by name or by position, and defaults given or left out, as to the model.
    Raises InputMismatchError where the arguments are not those of the trace.
    """
    traced_args, traced_kwargs = tape.args
    args, kwargs = _in_traced_form(tape, args, kwargs, forward)
    if len(args) != len(traced_args) or set(kwargs) != set(traced_kwargs):
        raise InputMismatchError(
            f"traced with {_count(traced_args, traced_kwargs)}, called with {_count(args, kwargs)}: "
            "pass the same arguments in the same way"
        )
    found: list[tuple[str, Any]] = []
    for i, (old, new) in enumerate(zip(traced_args, args, strict=True)):
        match(old, new, Value, found, f"argument {i}")
    for name, old in traced_kwargs.items():
        match(old, kwargs[name], Value, found, name)
    tensors = [x for _, x in found if isinstance(x, torch.Tensor)]
    numbers = [x for _, x in found if not isinstance(x, torch.Tensor)]
    for path, value, tensor in zip(tape.input_paths, tape.inputs, tensors, strict=True):
        _check_tensor(path, value.fake, tensor)
        if value.storage in tape.uses_absolute_offset and tensor.storage_offset() != value.offset:
            raise InputMismatchError(
                f"{path}: began at element {value.offset} of its memory when traced and begins at "
                f"{tensor.storage_offset()} now, and as_strided counts from the start; clone() it"
            )
    if tape.sizes is not None:
        tape.sizes.check(tensors, numbers)
    _check_sharing(tape, tensors)
    return [*tensors, *numbers]


def _in_traced_form(
    tape: ProgramTape, args: tuple[Any, ...], kwargs: dict[str, Any], forward: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments, passed as they were in the trace; as they are when they do not fit forward's signature."""
    traced_args, traced_kwargs = tape.args
    if forward is None or (len(args) == len(traced_args) and set(kwargs) == set(traced_kwargs)):
        return args, kwargs
    names = argument_names(forward, len(traced_args))
    given = bind(forward, args, kwargs)
    traced = bind(forward, traced_args, traced_kwargs)
    if given.keys() != traced.keys() or not {*names, *traced_kwargs} <= given.keys():
        return args, kwargs
    for name in given.keys() - {*names, *traced_kwargs}:
        match(traced[name], given[name], Value, [], name)
    return tuple(given[name] for name in names), {name: given[name] for name in traced_kwargs}


def _count(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    names = f" and {', '.join(sorted(kwargs))}" if kwargs else ""
    return f"{len(args)} positional{names}"


def _check_tensor(path: str, fake: torch.Tensor, tensor: torch.Tensor) -> None:
    if tensor.dim() != fake.dim():
        raise InputMismatchError(f"{path}: traced with shape {list(fake.shape)}, called with {list(tensor.shape)}")
    if is_symbolic(fake) or tensor.shape != fake.shape:
        for dim, (old, new) in enumerate(zip(fake.shape, tensor.shape, strict=True)):
            if isinstance(old, int) and old != new:
                raise InputMismatchError(
                    f"{path}: dimension {dim} was {old} when traced and is {new} now; "
                    "trace again for this size, or with dynamic_shapes= for sizes that differ from call to call"
                )
    for what in ("dtype", "device", "layout"):
        old, new = getattr(fake, what), getattr(tensor, what)
        if old != new:
            raise InputMismatchError(f"{path}: {what} was {old} when traced and is {new} now")


def _check_sharing(tape: ProgramTape, tensors: list[torch.Tensor]) -> None:
    """Inputs that shared memory must still share it, and those that are written must not share it anew."""
    written = tape.written_storages()
    old = [v.storage for v in tape.inputs]
    if len(set(old)) == len(old) and written.isdisjoint(old):
        return
    new = [storage_id(t) for t in tensors]
    first_old, first_new = [old.index(s) for s in old], [new.index(s) for s in new]
    for i, (a, b) in enumerate(zip(first_old, first_new, strict=True)):
        if a != b and (a != i or old[i] in written or old[b] in written):
            this, other = tape.input_paths[i], tape.input_paths[a if a != i else b]
            was = "shared memory" if a != i else "did not share memory"
            raise InputMismatchError(f"{this} and {other} {was} when traced; trace again with inputs like these")


class Entered(list[Any]):
    """The tensors and numbers of a call, and the caller's containers that the forward puts something into."""

    containers: list[Any]


class CallBoundary:
    """Where a program meets the outside: `enter` before its graph runs, `leave` after it.

    Both raise what `match_inputs` raises, or torch for results that cannot be written back.
    """

    def __init__(self, tape: ProgramTape, graph_module: torch.nn.Module, forward: Any = None) -> None:
        self.tape = tape
        self.forward = forward
        self.state = LiveState(tape, graph_module)

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The tensors and numbers that the graph takes. The graph module gets those that the model holds now."""
        tensors = Entered(match_inputs(self.tape, args, kwargs, self.forward))
        if isinstance(self.tape.outputs, Returned):
            form = _in_traced_form(self.tape, args, kwargs, self.forward)
            tensors.containers = effect_targets(self.tape.outputs.effects, self.tape.args, form)
        self.state.refresh()
        return tensors

    def leave(self, inputs: Sequence[Any], values: Sequence[Any]) -> Any:
        """The result of the program, from what the graph gave; what the program changes outside is changed."""
        count = len(self.tape.graph_outputs())
        program = self.tape.write_back if isinstance(self.tape, FunctionalTape) else None
        found = values[:count]
        results = iter(found if program is None else program.run(inputs, self.state.held, found, self._number(inputs)))
        out = instantiate(lambda _: next(results), self.tape.outputs, (Value, *Symbolic))
        self.state.write(iter(values[count:]))
        if not isinstance(out, Returned):
            return out
        apply_effects(out.effects, getattr(inputs, "containers", []))
        return out.result

    def _number(self, inputs: Sequence[Any]) -> Callable[[Any], Any]:
        """Gives the value of a symbolic size in a call with these inputs."""
        rules, count = self.tape.sizes, len(self.tape.inputs)
        return (lambda n: n) if rules is None else rules.values(inputs[:count], inputs[count:])


class LiveState:
    """The model's tensors as they are now: a module may have got a new buffer since the trace."""

    def __init__(self, tape: ProgramTape, graph_module: torch.nn.Module) -> None:
        self._writes = [(w.module or _submodule(graph_module, w.fqn), w.name) for w in tape.attribute_writes]
        self._owners = _owners(tape)
        self._attributes = tape.attributes
        self._held: list[tuple[torch.nn.Module, str, torch.nn.Module, str]] = []
        targets = {n.target for n in graph_module.graph.nodes if n.op == "get_attr"}  # type: ignore[union-attr]
        for name, (module, attribute) in self._owners.items():
            if name in targets:
                path, _, leaf = name.rpartition(".")
                self._held.append((graph_module.get_submodule(path), leaf, module, attribute))

    def refresh(self) -> None:
        """Give the graph module the tensors that the model holds now."""
        for holder, leaf, module, attribute in self._held:
            now = _look_up(module, attribute)
            if now is not None and now is not _look_up(holder, leaf):
                _bind(holder, leaf, now)

    def held(self, name: str) -> torch.Tensor:
        """A tensor of the graph module by its name."""
        module, attribute = self._owners.get(name, (None, ""))
        found = None if module is None else _look_up(module, attribute)
        return self._attributes[name] if found is None else found

    def write(self, results: Iterator[torch.Tensor]) -> None:
        """Bind what the forward bound to the model's attributes."""
        for (module, name), tensor in zip(self._writes, results, strict=True):
            _bind(module, name, tensor)


def held_now(tape: ProgramTape) -> dict[str, torch.Tensor]:
    """By name, the tensors that the model holds now."""
    found = {name: _look_up(module, attribute) for name, (module, attribute) in _owners(tape).items()}
    return {name: t for name, t in found.items() if t is not None}


def _owners(tape: ProgramTape) -> dict[str, tuple[torch.nn.Module, str]]:
    """Without script modules, which keep their tensors in C++."""
    return {n: owner for n, owner in tape.owners.items() if not isinstance(owner[0], torch.jit.ScriptModule)}


def _submodule(module: torch.nn.Module, path: str) -> torch.nn.Module:
    """For a loaded trace, whose model is not here; attributes that the graph does not read have no place in it."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return torch.nn.Module()


def _look_up(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    for table in (parameters_of(module), buffers_of(module), module.__dict__):
        found = table.get(name)
        if isinstance(found, torch.Tensor):
            return found
    return None


def _bind(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    for table in (parameters_of(module), buffers_of(module)):
        if name in table:
            table[name] = tensor  # type: ignore[assignment]
            return
    module.__dict__[name] = tensor


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """The graph has the casts of the trace; autocast at the call would add others."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
