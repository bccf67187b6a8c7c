"""Training steps in a trace: optimizers, scalers of gradients and schedulers tell the `gradients` of a listener (see
`_compat.gradients`).

torch has hooks around the steps of all optimizers; what else they do is seen by replacing the methods that do it.
"""

from __future__ import annotations

import contextlib
import functools
import operator
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


def _report_scalers(replace: Replace, listener: Any, mine: Mine) -> None:
    """Scalers of gradients."""
    scaler = torch.amp.GradScaler
    begin, scale, decide = scaler._lazy_init_scale_growth_tracker, scaler.scale, scaler._maybe_opt_step

    def begins(self: torch.amp.GradScaler, device: torch.device) -> None:
        with eager() if mine() else contextlib.nullcontext():
            begin(self, device)
        if mine():
            listener.gradients.on_scaler(self)

    def scales(self: torch.amp.GradScaler, outputs: Any) -> Any:
        if mine():
            listener.gradients.on_scaler(self)
        return scale(self, outputs)

    def decides(
        self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        if not mine():
            return decide(self, optimizer, state, *args, **kwargs)
        overflows = state["found_inf_per_device"].values()
        step = functools.partial(optimizer.step, *args, **kwargs)
        return listener.gradients.on_scaled_step(optimizer, overflows, step)

    replace(scaler, "_lazy_init_scale_growth_tracker", begins)
    replace(scaler, "scale", scales)
    replace(scaler, "_maybe_opt_step", decides)


def _report_schedulers(replace: Replace, listener: Any, mine: Mine) -> None:
    """Schedulers of learning rates, by what their `step` calls, since that may be bound before the trace."""

    def reported(run: Callable[..., Any], scheduler_of: Callable[[tuple[Any, ...]], Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            if mine():
                scheduler = scheduler_of(args)
                listener.gradients.on_python_step(scheduler, scheduler.optimizer)
            return run(*args, **kwargs)

        return method

    replace(ReduceLROnPlateau, "_is_better", reported(ReduceLROnPlateau._is_better, operator.itemgetter(0)))
    replace(_enable_get_lr_call, "__init__", reported(_enable_get_lr_call.__init__, operator.itemgetter(1)))


def _put_scalers_back(stack: contextlib.ExitStack, replace: Replace, listener: Any, mine: Mine) -> None:
    """What a scaler has noted of optimizers since its last `update()` is put back when the stack ends."""
    check = torch.amp.GradScaler._check_scale_growth_tracker
    used: dict[int, tuple[torch.amp.GradScaler, dict[int, Any]]] = {}

    def checks(self: torch.amp.GradScaler, asker: str) -> Any:
        if mine() and id(self) not in used:
            if self._per_optimizer_states:
                listener.gradients.on_begun_scaler("GradScaler.unscale_ or step was called before what is traced")
            used[id(self)] = self, self._per_optimizer_states
        return check(self, asker)

    def put_back(kind: type[BaseException] | None, *_: object) -> None:
        left = [self for self, _ in used.values() if self._per_optimizer_states]
        for self, states in used.values():
            states.clear()
            self._per_optimizer_states = states
        if left and kind is None:
            listener.gradients.on_begun_scaler("GradScaler.update is not called after unscale_ or step")

    replace(torch.amp.GradScaler, "_check_scale_growth_tracker", checks)
    stack.push(put_back)
