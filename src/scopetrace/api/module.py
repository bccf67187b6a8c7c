"""A trace as an `nn.Module`: `Trace.to_module`.

Data flow:
    tape of the trace -> modules that hold its parameters and buffers under the model's names
    the same tape, whose tensors are now found in these modules -> TracedProgram, which a call runs
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch

from scopetrace._compat.graph_module import holder_of
from scopetrace._compat.tensors import persistent_buffers_of
from scopetrace.errors import ModeError
from scopetrace.ir.tape import ProgramTape
from scopetrace.program.boundary import current_tensors
from scopetrace.program.traced import TracedProgram

Program = TypeVar("Program", bound=ProgramTape)


class Stored(NamedTuple):
    """A parameter or buffer of a TracedModule."""

    name: str
    """Its fqn in the model."""
    tensor: torch.Tensor
    persistent: bool
    """Whether it is in `state_dict`."""


class _Holder(torch.nn.Module):
    """Holds tensors under the names of a module of the model. The program is one graph, which calls no submodule."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises ModeError, as all that waits for a call does."""
        raise ModeError(
            "the module of a trace is one graph, which calls no submodule: its submodules hold tensors alone, and have "
            "no hooks. Call the model's, or put the hook on the model and trace it again"
        )

    register_forward_hook = register_forward_pre_hook = register_backward_hook = forward
    register_full_backward_hook = register_full_backward_pre_hook = forward


class TracedModule(torch.nn.Module):
    """A traced program that is called, trained, moved and saved as any `nn.Module`; see `Trace.to_module`."""

    def __init__(self, program: TracedProgram, stored: list[Stored]) -> None:
        super().__init__()
        for name, tensor, persistent in stored:
            holder, leaf = holder_of(self, name, _Holder)
            if isinstance(tensor, torch.nn.Parameter):
                holder.register_parameter(leaf, tensor)
            else:
                holder.register_buffer(leaf, tensor, persistent)
        self._program = _bound_to(self, program, {entry.name: entry.tensor for entry in stored})
        calls = program.tape.calls  # of a function, the mode is that of its modules
        calls = calls if calls[0].module_type is None else calls[:1]
        for module in self.modules():
            module.training = any(call.attributes.get("training") is True for call in calls)
        _ = self._program.boundary  # made now, since under `torch.jit.trace` fake tensors do not say their sizes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program with the parameters and buffers that the module has now; takes what the model takes.

        Raises InputMismatchError as a call of the trace does.
        """
        return self._program(*args, **kwargs)

    def train(self, mode: bool = True) -> TracedModule:
        """Nothing where `mode` is that of the trace.

        Raises ModeError otherwise: the program is what the model did in one mode.
        """
        if mode != self.training:
            wanted, traced = ("training", "eval") if mode else ("eval", "training")
            raise ModeError(
                f"{self._program.tape.root.path} was traced in {traced} mode, and its program has no {wanted} mode: "
                f"call model.{'train' if mode else 'eval'}() and trace it again"
            )
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> TracedModule:
        for kind in {(t.dtype, t.device) for t in (*self.parameters(), *self.buffers())}:
            moved = fn(torch.empty(0, dtype=kind[0], device=kind[1]))
            for old, new in zip(kind, (moved.dtype, moved.device), strict=True):
                if old != new:  # ops of the program name it
                    raise ModeError(
                        f"the program was traced with {old} and cannot run with {new}: call model.to({new}) and trace "
                        "it again"
                    )
        super()._apply(fn, recurse)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedModule:
        memo[id(self)] = new = TracedModule(self._program, copy.deepcopy([*_stored_in(self)], memo))
        return new

    def __reduce__(self) -> Any:
        read = {id(t): name for name, t in current_tensors(self._program.tape).items()}
        entries = [(name, read.get(id(t), t), persistent) for name, t, persistent in _stored_in(self)]
        return _from_pickle, (self._program, entries)


def to_module(program: TracedProgram) -> TracedModule:
    """The module of a program; see `Trace.to_module`."""
    tape, model = program.tape, program.model
    if tape.modules:
        raise ModeError(
            f"the trace runs leaf modules, {', '.join(tape.modules)}, which hold tensors of their own: "
            "trace without leaf_modules= for a module"
        )
    held = tape.attributes | current_tensors(tape)
    root = getattr(model, "__self__", model)
    entries = list(_stored_in(root)) if isinstance(root, torch.nn.Module) else []
    known = {entry.name for entry in entries}
    entries += [Stored(n, held[n], isinstance(held[n], torch.nn.Parameter)) for n in tape.owners if n not in known]
    new = {id(t): t for t in [held.get(entry.name, entry.tensor) for entry in entries]}
    for key, t in new.items():  # on the same memory, so that moving the module leaves the model where it is
        new[key] = torch.nn.Parameter(t.detach(), t.requires_grad) if isinstance(t, torch.nn.Parameter) else t
    return TracedModule(program, [e._replace(tensor=new[id(held.get(e.name, e.tensor))]) for e in entries])


def _stored_in(root: torch.nn.Module) -> Iterator[Stored]:
    for name, param in root.named_parameters(remove_duplicate=False):
        yield Stored(name, param, True)
    for fqn, module in root.named_modules(remove_duplicate=False):
        kept = persistent_buffers_of(module)
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            yield Stored(f"{fqn}.{name}" if fqn else name, buffer, name in kept)


def _bound_to(module: TracedModule, program: TracedProgram, tensors: dict[str, torch.Tensor]) -> TracedProgram:
    holder = functools.partial(holder_of, module, make=_Holder)

    def bound(tape: Program) -> Program:
        attributes = {name: tensors.get(name, t) for name, t in tape.attributes.items()}
        owners: dict[str, tuple[torch.nn.Module | None, str]] = {n: holder(n) for n in tensors if n in attributes}
        modules = [None if w.of is not None else holder(w.path)[0] for w in tape.attribute_writes]
        writes = [dataclasses.replace(w, module=m) for w, m in zip(tape.attribute_writes, modules, strict=True)]
        return dataclasses.replace(tape, attributes=attributes, owners=owners, attribute_writes=writes)

    return TracedProgram(bound(program.recorded), bound(program.tape), program.model)


def _from_pickle(program: TracedProgram, entries: list[tuple[str, torch.Tensor | str, bool]]) -> TracedModule:
    """The module of a pickle. For a tensor that the program reads, `entries` has its name there."""
    held = program.tape.attributes
    return TracedModule(program, [Stored(n, held[t] if isinstance(t, str) else t, p) for n, t, p in entries])
