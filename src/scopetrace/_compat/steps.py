"""Training steps in a trace: optimizers, scalers of gradients and schedulers tell the `gradients` of a listener (see
`_compat.gradients`).

torch has hooks around the steps of all optimizers; what else they do is seen by replacing the methods that do it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, _enable_get_lr_call
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from scopetrace._compat.gradients import hooks_of_all_optimizers
from scopetrace._compat.ops import eager
from scopetrace._compat.questions import Mine, Replace


def report_steps(stack: contextlib.ExitStack, replace: Replace, listener: Any, mine: Mine) -> None:
    """Tell of optimizers, scalers and schedulers until the stack ends."""
    _report_optimizers(stack, replace, listener, mine)
    _report_scalers(replace, listener, mine)
    _report_schedulers(replace, listener, mine)
    _put_scalers_back(stack, replace, listener, mine)


def _report_optimizers(stack: contextlib.ExitStack, replace: Replace, listener: Any, mine: Mine) -> None:
    """Optimizers that are made, and the steps of all."""
    make, hooks = torch.optim.Optimizer.__init__, hooks_of_all_optimizers()

    def init(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if mine():
            listener.gradients.on_optimizer(self)

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if not mine():
            return None
        is_named = len(args) < 2  # the optimizer is the first
        closure = kwargs.get("closure") if is_named else args[1]
        run = listener.gradients.on_step(optimizer, closure if callable(closure) else None, hooks)
        if run is None:
            return None
        return (args, {**kwargs, "closure": run}) if is_named else ((args[0], run, *args[2:]), kwargs)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if mine():
            listener.gradients.after_step(optimizer)

    replace(torch.optim.Optimizer, "__init__", init)
    stack.callback(register_optimizer_step_pre_hook(before).remove)
    stack.callback(register_optimizer_step_post_hook(after).remove)


def _tell_before(replace: Replace, owner: Any, name: str, tell: Callable[..., None], mine: Mine) -> None:
    """Call `tell` with the arguments of a method before it runs."""
    run = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        if mine():
            tell(*args, **kwargs)
        return run(*args, **kwargs)

    replace(owner, name, method)


def _report_scalers(replace: Replace, listener: Any, mine: Mine) -> None:
    """Scalers of gradients."""
    scaler = torch.amp.GradScaler
    begin, decide = scaler._lazy_init_scale_growth_tracker, scaler._maybe_opt_step

    def begins(self: torch.amp.GradScaler, device: torch.device) -> None:
        with eager() if mine() else contextlib.nullcontext():
            begin(self, device)
        if mine():
            listener.gradients.on_scaler(self)

    def decides(
        self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        if not mine():
            return decide(self, optimizer, state, *args, **kwargs)
        overflows = state["found_inf_per_device"].values()
        step = functools.partial(optimizer.step, *args, **kwargs)
        return listener.gradients.on_scaled_step(optimizer, overflows, step)

    replace(scaler, "_lazy_init_scale_growth_tracker", begins)
    replace(scaler, "_maybe_opt_step", decides)
    _tell_before(replace, scaler, "scale", lambda self, *_, **__: listener.gradients.on_scaler(self), mine)


def _report_schedulers(replace: Replace, listener: Any, mine: Mine) -> None:
    """Schedulers of learning rates, by what their `step` calls, since that may be bound before the trace."""

    def tell(scheduler: Any) -> None:
        listener.gradients.on_python_step(scheduler, scheduler.optimizer)

    _tell_before(replace, ReduceLROnPlateau, "_is_better", lambda scheduler, *_, **__: tell(scheduler), mine)
    _tell_before(replace, _enable_get_lr_call, "__init__", lambda _, scheduler: tell(scheduler), mine)


def _put_scalers_back(stack: contextlib.ExitStack, replace: Replace, listener: Any, mine: Mine) -> None:
    """What a scaler has noted of optimizers since its last `update()` is put back when the stack ends."""
    used: dict[int, tuple[torch.amp.GradScaler, dict[int, Any]]] = {}

    def note(scaler: torch.amp.GradScaler, *_: Any) -> None:
        if id(scaler) not in used:
            if scaler._per_optimizer_states:
                listener.gradients.on_begun_scaler("GradScaler.unscale_ or step was called before what is traced")
            used[id(scaler)] = scaler, scaler._per_optimizer_states

    def put_back(kind: type[BaseException] | None, *_: object) -> None:
        left = [scaler for scaler, _ in used.values() if scaler._per_optimizer_states]
        for scaler, states in used.values():
            states.clear()
            scaler._per_optimizer_states = states
        if left and kind is None:
            listener.gradients.on_begun_scaler("GradScaler.update is not called after unscale_ or step")

    _tell_before(replace, torch.amp.GradScaler, "_check_scale_growth_tracker", note, mine)
    stack.push(put_back)
