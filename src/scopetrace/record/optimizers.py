"""The state of optimizers that step inside a forward.

Data flow:
    an optimizer steps for the first time -> its state, made before the program begins: tensors of zeros
    ops of the step -> read and write these, as any tensors from outside
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from scopetrace.errors import UnsupportedOpError

_BEGIN_WITH_ZEROS = ("SGD", "Adam", "AdamW", "RMSprop", "Adadelta", "Adamax", "RAdam", "Muon")
"""The classes of torch.optim whose first step does with a state of zeros what it does without one."""


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
    state = [x for state in optimizer.state.values() for x in state.values()]
    return [*params, *(id(x) for x in state if isinstance(x, torch.Tensor))]


def state_of(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], int]:
    """The tensors of an optimizer's state: by the id of the parameter and the name, their ids."""
    entries = [(p, key, x) for p, state in optimizer.state.items() for key, x in state.items()]
    return {(id(p), key): id(x) for p, key, x in entries if isinstance(x, torch.Tensor)}


def new_state(optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> dict[torch.Tensor, dict[str, Any]]:
    """The state that an optimizer needs for those of the parameters for which it has none.

    Its class steps once, on tensors without data. Raises UnsupportedOpError for one of torch.optim whose state does not
    begin with zeros; others have theirs, or need none.
    """
    wanted = {id(p) for p in params if not optimizer.state.get(p)}
    made: dict[torch.Tensor, dict[str, Any]] = {}
    for group in optimizer.param_groups if wanted else ():
        chosen = [p for p in group["params"] if id(p) in wanted]
        shadows = [torch.empty_like(p, device="meta").requires_grad_() for p in chosen]
        for shadow in shadows:
            shadow.grad = torch.zeros_like(shadow)
        plain: dict[str, Any] = {**group, "params": shadows}
        plain.update((name, False) for name in ("foreach", "fused", "capturable") if name in group)
        if shadows and _begins_with_zeros(optimizer, group):
            make: Any = type(optimizer)
            shadow_optimizer = make([plain])
            shadow_optimizer.step()
            on_device = group.get("capturable") or group.get("fused")
            for p, shadow in zip(chosen, shadows, strict=True):
                if shadow in shadow_optimizer.state:
                    state = shadow_optimizer.state[shadow]
                    made[p] = {name: _zeros(x, p, on_device=bool(on_device)) for name, x in state.items()}
        elif shadows and _is_torchs(optimizer):
            raise UnsupportedOpError(
                f"{type(optimizer).__name__} has no state yet, and its first step is not like the others",
                op=f"{type(optimizer).__name__}.step",
                hint="run optimizer.step() once before the trace",
            )
    return made


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def _begins_with_zeros(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    is_known = _is_torchs(optimizer) and type(optimizer).__name__ in _BEGIN_WITH_ZEROS
    return is_known and not (group.get("momentum") and group.get("dampening"))


def _zeros(x: Any, p: torch.Tensor, *, on_device: bool) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return torch.zeros_like(x, device=p.device if on_device or x.device.type == "meta" else x.device)
