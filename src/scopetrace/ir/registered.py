"""The modules and parameters of a model with all their names, in the order of registration, and their tensors."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from scopetrace._compat.gradients import Leaf
from scopetrace._compat.tensors import buffers_of, parameters_of


@dataclasses.dataclass(slots=True, unsafe_hash=True)  # a frozen one takes four times as long to make
class RegisteredParam:
    """A parameter of the model, without its data."""

    names: tuple[str, ...]
    """All its fqns, several where it is tied. The first is that of `named_parameters()`."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class RegisteredModule:
    """A module of the model."""

    names: tuple[str, ...]
    """All its fqns, `("",)` for the root. The first is that of `named_modules()`."""
    type_name: str
    """The class's name."""
    has_forward: bool
    """Whether its class has a forward, which `nn.ModuleList` has not."""


def inside(names: Iterable[str], module: str) -> Iterator[str]:
    """Those of some names that are of a module or inside it, from there: `""` for the module itself."""
    for name in names:
        if name == module or not module or name.startswith(f"{module}."):
            yield name.removeprefix(module).removeprefix("." if module else "")


def modules_around(name: str) -> Iterator[str]:
    """The names of the modules around a parameter or module, from the innermost to the root."""
    while name:
        name = name.rpartition(".")[0]
        yield name


@dataclasses.dataclass(frozen=True)
class Registered:
    """All modules and parameters by the first of their names."""

    modules: dict[str, RegisteredModule] = dataclasses.field(default_factory=dict)
    params: dict[str, RegisteredParam] = dataclasses.field(default_factory=dict)

    def owners(self, param: str) -> list[str]:
        """The fqns of the modules that hold a parameter, one for each of its names."""
        return [name.rpartition(".")[0] for name in self.params[param].names]

    def param(self, name: str) -> str | None:
        """The first name of the parameter that has this name; None where there is none."""
        return self._params_by_name.get(name)

    def module(self, name: str | None) -> str | None:
        """The first name of the module that has this name; None where there is none, and for None."""
        return self._modules_by_name.get(name)

    def inside(self, module: str) -> list[str]:
        """The parameters of a module and of its submodules, in the order of registration."""
        return list(self._inside.get(module, ()))

    def without(self, names: Collection[str]) -> Registered:
        """The same without some parameters, given by their first names."""
        return Registered(self.modules, {name: param for name, param in self.params.items() if name not in names})

    def within(self, module: str) -> Registered:
        """Those of a module and inside it, by names from there."""
        modules = ((tuple(inside(m.names, module)), m) for m in self.modules.values())
        params = ((tuple(inside(p.names, module)), p) for p in self.params.values())
        return Registered(
            {names[0]: dataclasses.replace(m, names=names) for names, m in modules if names},
            {names[0]: dataclasses.replace(p, names=names) for names, p in params if names},
        )

    @functools.cached_property
    def _inside(self) -> dict[str, dict[str, None]]:
        params: dict[str, dict[str, None]] = {}
        for first, param in self.params.items():
            for around in itertools.chain.from_iterable(map(modules_around, param.names)):
                params.setdefault(around, {})[first] = None
        return params

    @functools.cached_property
    def _params_by_name(self) -> dict[str, str]:
        return {name: first for first, param in self.params.items() for name in param.names}

    @functools.cached_property
    def _modules_by_name(self) -> dict[str | None, str]:
        return {name: first for first, module in self.modules.items() for name in module.names}


# Where modules have their tensors ------------------------------------------------------------------------------------


def table_of(module: torch.nn.Module, name: str) -> dict[str, Any] | None:
    """Where a module has a tensor of this name; None where it has none."""
    for table in (parameters_of(module), buffers_of(module), module.__dict__):
        # what a scripted module has for a dict has no `get`
        x: Any = table.get(name) if hasattr(table, "get") else dict(table.items()).get(name)
        if isinstance(x, torch.Tensor):
            return table
    return None


def tensor_in(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    """A tensor of a module, or the gradient of one, `weight.grad`."""
    is_gradient = name[-5:] == ".grad"
    leaf = name[:-5] if is_gradient else name
    table = table_of(module, leaf)
    return None if table is None else Leaf.grad(table[leaf]) if is_gradient else table[leaf]


def put_tensor(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put a tensor where the module has one of this name, else into its attributes."""
    tables: tuple[dict[str, Any], ...] = (parameters_of(module), buffers_of(module))
    next((table for table in tables if name in table), module.__dict__)[name] = tensor
