"""Where modules have their tensors, and which of the tensors that a graph module holds are those of the model."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from scopetrace._compat.ops import eager
from scopetrace._compat.tensors import buffers_of, parameters_of


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


class HeldTensors(NamedTuple):
    """The tensors that a program and its graph module hold, by name on the tape.

    In an edited graph, a tensor is the model's where it is one of these, or a copy with equal values of the model's, as
    a deepcopy of the graph module has. Any other tensor belongs to the graph module.
    """

    current: dict[str, torch.Tensor]
    """What the model has now."""
    bound: dict[str, torch.Tensor]
    """What was last bound to the graph module."""


def is_copy(t: torch.Tensor, present: torch.Tensor) -> bool:
    """Whether a tensor has the metadata and values of the model's."""
    if metadata_of(t) != metadata_of(present) or t.layout is not torch.strided or t.is_quantized:
        return False
    if t.device.type == "meta":
        return True
    with eager():
        return torch.equal(t, present)


def metadata_of(t: torch.Tensor) -> tuple[object, ...]:
    """All that a tensor is, beside its values."""
    stride = t.stride() if t.layout is torch.strided else ()
    return type(t), t.size(), stride, t.dtype, t.device, t.layout, t.requires_grad
