"""Where modules have their tensors."""

from __future__ import annotations

from typing import Any

import torch

from scopetrace._compat.gradients import Leaf
from scopetrace._compat.tensors import buffers_of, parameters_of


def submodule(module: torch.nn.Module, path: str) -> torch.nn.Module:
    """A submodule of a loaded trace, which has no model; an empty one for attributes that the graph does not read."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return torch.nn.Module()


def give_gradient(t: torch.Tensor, gradient: torch.Tensor, *, adds: bool) -> None:
    """Bind the `grad` of a tensor, or add to it as autograd does."""
    if adds:
        Leaf.grad(t, gradient)
    else:
        t.grad = gradient


def table_of(module: torch.nn.Module, name: str) -> dict[str, Any] | None:
    """Where a module has a tensor of this name; None where it has none."""
    tables: tuple[dict[str, Any], ...] = (parameters_of(module), buffers_of(module), module.__dict__)
    return next((table for table in tables if isinstance(table.get(name), torch.Tensor)), None)


def tensor_in(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    """A tensor of a module, or the gradient of one, `weight.grad`."""
    if name.endswith(".grad"):
        t = getattr(module, name.removesuffix(".grad"), None)
        return None if t is None else Leaf.grad(t)
    table = table_of(module, name)
    return None if table is None else table[name]


def put_tensor(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put a tensor where the module has one of this name, else into its attributes."""
    tables: tuple[dict[str, Any], ...] = (parameters_of(module), buffers_of(module))
    next((table for table in tables if name in table), module.__dict__)[name] = tensor
