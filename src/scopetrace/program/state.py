"""Which of the tensors and modules that a graph module holds are those of the model."""

from __future__ import annotations

import dataclasses

import torch

from scopetrace._compat.ops import eager
from scopetrace._compat.tensors import buffers_of, parameters_of
from scopetrace.ir.tape import ProgramTape


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

    now: dict[str, torch.Tensor]
    """By name on the tape, the model's present tensors."""
    bound: dict[str, torch.Tensor]
    """By name, what was last bound to the graph module."""

    def name_of(self, tape: ProgramTape, name: str, t: torch.Tensor) -> str:
        """The name by which the tape knows a tensor that the graph module holds as `name`; else `name` itself."""
        known = tape.attributes.get(name)
        if t is known or t is self.now.get(name):
            return name
        return next((other for other, held in {**tape.attributes, **self.now}.items() if held is t), name)

    def find(self, tape: ProgramTape, root: torch.nn.Module, name: str, t: torch.Tensor) -> Held:
        """The tensor that a `get_attr` node of this name stands for, where the graph module `root` holds `t`."""
        old = tape.attributes.get(name)
        if old is not None:
            present = self.now.get(name, old)
            if any(t is known for known in (old, present, self.bound.get(name))) or _is_copy(t, present):
                return Held(present, tape.owners.get(name), True)
        path, _, leaf = name.rpartition(".")
        holder = root.get_submodule(path)
        is_constant = name in tape.constants and not isinstance(t, torch.nn.Parameter)
        is_owned = not is_constant and (leaf in parameters_of(holder) or leaf in buffers_of(holder))
        return Held(t, (holder, leaf) if is_owned else None, old is not None and _metadata(old) == _metadata(t))

    def module(self, tape: ProgramTape, root: torch.nn.Module, name: str) -> torch.nn.Module | None:
        """The leaf module of this name, where the graph module holds it or a copy; None where it holds another one."""
        old, now = tape.modules.get(name), root.get_submodule(name)
        return now if now is old or (old is not None and type(now) is type(old)) else None


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
