"""Where modules have their tensors, and which of the tensors that a graph module holds are those of the model."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from scopetrace._compat.ops import eager
from scopetrace._compat.tensors import buffers_of, parameters_of
from scopetrace.ir.tape import ProgramTape


def submodule(module: torch.nn.Module, path: str) -> torch.nn.Module:
    """A submodule of a loaded trace, which has no model; an empty one for attributes that the graph does not read."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return torch.nn.Module()


def give_gradient(t: torch.Tensor, gradient: torch.Tensor, *, adds: bool) -> None:
    """Bind the `grad` of a tensor, or add to it as autograd does: in place, but where gradients flow through it."""
    if not adds or t.grad is None:
        t.grad = gradient
    elif gradient.requires_grad:
        t.grad = t.grad + gradient
    else:
        with torch.no_grad():
            t.grad += gradient


def table_of(module: torch.nn.Module, name: str) -> dict[str, Any] | None:
    """Where a module has a tensor of this name; None where it has none."""
    tables: tuple[dict[str, Any], ...] = (parameters_of(module), buffers_of(module), module.__dict__)
    return next((table for table in tables if isinstance(table.get(name), torch.Tensor)), None)


def look_up(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    """A tensor of a module, or the gradient of one, `weight.grad`."""
    if name.endswith(".grad"):
        t = getattr(module, name.removesuffix(".grad"), None)
        return None if t is None else t.grad
    table = table_of(module, name)
    return None if table is None else table[name]


def put_tensor(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put a tensor where the module has one of this name, else into its attributes."""
    tables: tuple[dict[str, Any], ...] = (parameters_of(module), buffers_of(module))
    next((table for table in tables if name in table), module.__dict__)[name] = tensor


# An edited graph module ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Held:
    """A tensor of an edited graph."""

    tensor: torch.Tensor
    owner: tuple[torch.nn.Module | None, str] | None
    """As in `Tape.owners`; None for a constant."""
    is_known: bool
    """Whether the trace has it under this name already, or had one of the same metadata."""


@dataclasses.dataclass(frozen=True)
class HeldTensors:
    """Finds the tensors of an edited graph.

    A tensor is the model's where the graph module holds the very tensor of the model, now or when it last ran, or a
    copy with equal values, as a deepcopy of the graph module has. Any other tensor belongs to the graph module.
    """

    current: dict[str, torch.Tensor]
    """By name on the tape, the model's present tensors."""
    bound: dict[str, torch.Tensor]
    """By name, what was last bound to the graph module."""

    def name_of(self, tape: ProgramTape, name: str, t: torch.Tensor) -> str:
        """The name by which the tape knows a tensor that the graph module holds as `name`; else `name` itself."""
        if t is tape.attributes.get(name) or t is self.current.get(name):
            return name
        return next((other for other, held in (tape.attributes | self.current).items() if held is t), name)

    def find(self, tape: ProgramTape, root: torch.nn.Module, name: str, t: torch.Tensor) -> Held:
        """The tensor that a `get_attr` node of this name stands for, where the graph module `root` holds `t`."""
        old = tape.attributes.get(name)
        if old is not None:
            present = self.current.get(name, old)
            if any(t is known for known in (old, present, self.bound.get(name))) or _is_copy(t, present):
                return Held(present, tape.owners.get(name), True)
        path, _, leaf = name.rpartition(".")
        holder = root.get_submodule(path)
        is_constant = name in tape.constants and not isinstance(t, torch.nn.Parameter)
        is_owned = not is_constant and (leaf in parameters_of(holder) or leaf in buffers_of(holder))
        return Held(t, (holder, leaf) if is_owned else None, old is not None and _metadata(old) == _metadata(t))

    def module(self, tape: ProgramTape, root: torch.nn.Module, name: str) -> torch.nn.Module | None:
        """The leaf module of this name, where the graph module holds it or a copy; None where it holds another one."""
        old, module = tape.modules.get(name), root.get_submodule(name)
        return module if module is old or (old is not None and type(module) is type(old)) else None


def _is_copy(t: torch.Tensor, present: torch.Tensor) -> bool:
    if _metadata(t) != _metadata(present) or t.layout is not torch.strided or t.is_quantized:
        return False
    if t.device.type == "meta":
        return True
    with eager():
        return torch.equal(t, present)


def _metadata(t: torch.Tensor) -> tuple[object, ...]:
    stride = t.stride() if t.layout is torch.strided else ()
    return type(t), t.size(), stride, t.dtype, t.device, t.layout, t.requires_grad
