"""The state of optimizers that step inside a forward.

Data flow:
    an optimizer steps for the first time -> its state, made before the program begins
    ops of the step -> read and write these, as any tensors from outside
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from numbers import Real
from typing import Any

import torch

from scopetrace._compat.gradients import counts_as_stepped, first_state, is_torchs
from scopetrace._compat.ops import eager
from scopetrace._compat.shape_env import evaluated
from scopetrace.ir.guards import CallInputs, Source


def settings_of(optimizer: torch.optim.Optimizer) -> list[tuple[int, str]]:
    """The settings of each group of parameters, such as `(0, "lr")`."""
    groups = enumerate(optimizer.param_groups)
    return [(i, key) for i, group in groups for key in sorted(group) if key != "params"]


def setting_of(optimizer: torch.optim.Optimizer, i: int, key: str) -> Any:
    """One setting; None where there is none any more."""
    return optimizer.param_groups[i].get(key) if i < len(optimizer.param_groups) else None


@dataclasses.dataclass(frozen=True)
class Number(Source):
    """That a setting is a number still. The program has it in a tensor, which a call fills."""

    optimizer: torch.optim.Optimizer
    group: int
    key: str
    position: int | None
    """In a tuple, as `betas`; None for what is no tuple."""
    tensor: torch.Tensor

    def value(self) -> Any:
        """What is there now; None where there is no such tuple."""
        x = setting_of(self.optimizer, self.group, self.key)
        return x if self.position is None else dict(enumerate(x)).get(self.position) if type(x) is tuple else None

    def current(self, call: CallInputs) -> str:
        """`a number`, or the class of what is there in its place."""
        value = self.value()
        counts_as_stepped(self.optimizer)
        if not isinstance(value, Real):
            return type(value).__name__
        with eager():
            self.tensor.fill_(float(value))
        return "a number"

    def __str__(self) -> str:
        inside = [self.group, self.key, *([] if self.position is None else [self.position])]
        return f"{type(self.optimizer).__name__}.param_groups" + "".join(f"[{part!r}]" for part in inside)


def answer_of(expr: Any, numbers: Sequence[tuple[Any, Number]]) -> Any:
    """What a comparison, or other expression, of numbers gives now."""
    return evaluated(expr, {symbol: number.value() for symbol, number in numbers})


def varied(optimizer: torch.optim.Optimizer) -> Iterator[list[Number]]:
    """The numbers of each setting that schedules change: not one of zero that turns a part of the step off.

    Powers of betas are asserted to be small, so that they are if a scheduler says so. A fused op takes the rate alone.
    """
    for i, key in settings_of(optimizer):
        x, group = setting_of(optimizer, i, key), optimizer.param_groups[i]
        is_varied = (key in ("momentum", "weight_decay") and x != 0) or (key == "betas" and "max_momentum" in group)
        parts = [*enumerate(x)] if type(x) is tuple else [(None, x)]
        if (key == "lr" or (is_varied and not group.get("fused"))) and all(isinstance(n, Real) for _, n in parts):
            with eager():
                tensors = [(at, torch.tensor(float(n), dtype=torch.float64, device="cpu")) for at, n in parts]
            yield [Number(optimizer, i, key, at, t) for at, t in tensors]


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
    step, and so does SGD with dampening, whose first step is not like the others.
    """
    wanted = {id(p) for p in params if not optimizer.state.get(p)}
    states: dict[torch.Tensor, dict[str, Any]] = {}
    for group in optimizer.param_groups if wanted and is_torchs(optimizer) else ():
        for p in (p for p in group["params"] if id(p) in wanted):
            state = first_state(optimizer, group, p)
            if type(optimizer) is torch.optim.SGD and group["momentum"] != 0 and not group["dampening"]:
                # from which a step makes what its first step makes without one: the gradient
                state = {"momentum_buffer": torch.zeros_like(p, memory_format=torch.preserve_format)}
            if state:
                states[p] = state
    return states
