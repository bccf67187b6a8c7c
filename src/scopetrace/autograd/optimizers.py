"""The state of optimizers that step inside a forward.

Data flow:
    an optimizer steps for the first time -> its state, made before the program begins
    ops of the step -> read and write these, as any tensors from outside
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from scopetrace._compat.gradients import first_state, is_torchs
from scopetrace.errors import UnsupportedOpError


def settings_of(optimizer: torch.optim.Optimizer) -> list[tuple[int, str]]:
    """The settings of each group of parameters, such as `(0, "lr")`."""
    groups = enumerate(optimizer.param_groups)
    return [(i, key) for i, group in groups for key in sorted(group) if key != "params"]


def setting_of(optimizer: torch.optim.Optimizer, i: int, key: str) -> Any:
    """One setting; None where there is none any more."""
    return optimizer.param_groups[i].get(key) if i < len(optimizer.param_groups) else None


def tensors_of(optimizer: torch.optim.Optimizer) -> list[int]:
    """Which parameters and tensors of its state an optimizer has, by their ids."""
    params = [id(p) for group in optimizer.param_groups for p in group["params"]]
    return [*params, *(id(x) for _, _, x in state_tensors(optimizer))]


def how_many(tensors: list[int]) -> str:
    """What an error says of `tensors_of`."""
    return f"{len(tensors)} tensors"


def state_tensors(optimizer: torch.optim.Optimizer) -> list[tuple[Any, str, torch.Tensor]]:
    """The tensors of an optimizer's state, each with its key there, which is mostly a parameter, and its name below."""
    entries = [(p, state if isinstance(state, dict) else {"": state}) for p, state in optimizer.state.items()]
    return [(p, str(k), x) for p, state in entries for k, x in state.items() if isinstance(x, torch.Tensor)]


def are_held(places: Sequence[tuple[torch.nn.Module, str, torch.Tensor]]) -> bool:
    """Whether modules still have some tensors at these names."""
    return all(getattr(module, name, None) is t for module, name, t in places)


def has_gradient(t: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether the `grad` of a tensor is this one."""
    return t.grad is gradient


def state_of(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], int]:
    """The tensors of an optimizer's state: by the id of the parameter and the name, their ids."""
    return {(id(p), key): id(x) for p, key, x in state_tensors(optimizer)}


def new_state(optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> dict[torch.Tensor, dict[str, Any]]:
    """The state that an optimizer needs for those of the parameters for which it has none.

    It is what its first step makes before it computes. Classes other than those of torch.optim make theirs in their
    step. Raises UnsupportedOpError where the first step is not like the others.
    """
    wanted = {id(p) for p in params if not optimizer.state.get(p)}
    states: dict[torch.Tensor, dict[str, Any]] = {}
    for group in optimizer.param_groups if wanted and is_torchs(optimizer) else ():
        for p in (p for p in group["params"] if id(p) in wanted):
            state = first_state(optimizer, group, p)
            if type(optimizer) is torch.optim.SGD and group["momentum"]:
                state = {"momentum_buffer": _momentum(p, group["dampening"])}
            if state:
                states[p] = state
    return states


def _momentum(p: torch.Tensor, dampening: float) -> torch.Tensor:
    """The momentum from which a step of SGD makes what its first step makes without one: the gradient."""
    if dampening:
        raise UnsupportedOpError(
            "SGD has no state yet, and with dampening= its first step is not like the others",
            op="SGD.step",
            hint="run optimizer.step() once before the trace",
        )
    return torch.zeros_like(p, memory_format=torch.preserve_format)
