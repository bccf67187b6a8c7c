"""Training steps made around a model: forward, loss, `backward()`, an optimizer."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from scopetrace.containers.structure import leaves
from scopetrace.errors import ArgumentError

_NOT_IN_A_STEP = ("LBFGS", "Optimizer", "SparseAdam")
"""Those that need a closure or sparse gradients, and their base."""

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in _NOT_IN_A_STEP
}
"""The optimizers of torch.optim whose step can be traced, by their names in lower case."""


@dataclasses.dataclass(frozen=True)
class TrainingStep:
    """What a training step does after the forward."""

    loss: str | Callable[[Any], torch.Tensor] | None = None
    """The name of the loss in the model's result, or a function of the result; None for `loss` where it has that, else
    the sum of its floats."""
    optimizer: str | None = None
    """The name of a class of torch.optim, in any case; None for a step that only computes gradients."""

    def optimizer_of(
        self, params: Iterable[torch.nn.Parameter], *, foreach: bool = False
    ) -> torch.optim.Optimizer | None:
        """The optimizer of some parameters; `foreach`: as on a GPU, where its class can.

        Raises ArgumentError for a name of no such class, and without parameters.
        """
        if self.optimizer is None:
            return None
        kind, params = OPTIMIZERS.get(self.optimizer.lower()), list(params)
        if kind is None:
            raise ArgumentError(f"optimizer {self.optimizer}: give one of {', '.join(OPTIMIZERS)}")
        if not params:
            raise ArgumentError(f"optimizer {self.optimizer}: the model has no parameters; leave it out")
        takes = foreach and "foreach" in inspect.signature(kind).parameters
        return kind(params, foreach=True) if takes else kind(params)

    def of(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Callable[..., Any]:
        """The step of a model, with the arguments of its forward; it returns the loss."""

        def step(*args: Any, **kwargs: Any) -> torch.Tensor:
            loss = self._loss(model(*args, **kwargs))
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise ArgumentError("the loss is not one float that requires grad: name one, or take no training step")
            loss.backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            return loss

        step.__qualname__ = type(model).__name__  # for errors
        step.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
        return step

    def _loss(self, result: Any) -> Any:
        """None without a float that requires grad. Raises ArgumentError for a result without the named loss."""
        if callable(self.loss):
            return self.loss(result)
        name = self.loss or "loss"
        loss = result.get(name) if isinstance(result, dict) else getattr(result, name, None)
        if isinstance(loss, torch.Tensor):
            return loss.float().sum()
        if self.loss is not None:
            kind = "tensor" if isinstance(result, torch.Tensor) else type(result).__name__
            has = f"it has {', '.join(result)}" if isinstance(result, dict) else f"it is a {kind}"
            raise ArgumentError(f"loss {self.loss}: the model's result has no such tensor; {has}")
        floats = [t for t in leaves(result, torch.Tensor) if t.is_floating_point() and t.requires_grad]
        return torch.stack([t.float().sum() for t in floats]).sum() if floats else None
