"""`--step`: a training step of a model that has only a forward.

Data flow:
    model + names of a loss and an optimizer -> a function with the model's signature: forward, loss, backward(), step
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch

from scopetrace.containers.structure import leaves
from scopetrace.errors import UsageError

_NOT_IN_A_STEP = ("Adafactor", "ASGD", "LBFGS", "Optimizer", "RAdam", "SparseAdam")
"""Those that branch on the values of tensors, need a closure or sparse gradients, and their base."""

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in _NOT_IN_A_STEP
}
"""The optimizers of torch.optim whose step can be traced, by their names in lower case."""


@dataclasses.dataclass(frozen=True)
class TrainingStep:
    """What a training step does after the forward."""

    loss: str | None = None
    """The name of the loss in the model's result; None for `loss` where it has that, else the sum of its floats."""
    optimizer: str | None = None
    """A key of OPTIMIZERS; None for a step that only computes gradients."""

    def of(self, model: torch.nn.Module) -> Callable[..., Any]:
        """The step of a model, with the arguments of its forward; it returns the loss.

        Raises UsageError for an optimizer of a model without parameters.
        """
        if self.optimizer is not None and next(model.parameters(), None) is None:
            raise UsageError(f"--optimizer {self.optimizer}: {type(model).__name__} has no parameters; leave it out")
        optimizer = None if self.optimizer is None else OPTIMIZERS[self.optimizer](model.parameters())

        def step(*args: Any, **kwargs: Any) -> torch.Tensor:
            loss = self._loss(model(*args, **kwargs))
            loss.backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            return loss

        step.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
        return step

    def _loss(self, result: Any) -> torch.Tensor:
        """Raises UsageError for a result without the loss, or without a float of which there are gradients."""
        name = self.loss or "loss"
        loss = result.get(name) if isinstance(result, dict) else getattr(result, name, None)
        if isinstance(loss, torch.Tensor):
            return loss.float().sum()
        if self.loss is not None:
            kind = "tensor" if isinstance(result, torch.Tensor) else type(result).__name__
            has = f"it has {', '.join(result)}" if isinstance(result, dict) else f"it is a {kind}"
            raise UsageError(f"--loss {self.loss}: the model's result has no such tensor; {has}")
        floats = [t for t in leaves(result, torch.Tensor) if t.is_floating_point() and t.requires_grad]
        if not floats:
            raise UsageError("--step: no result of the model is a float that requires grad; name one with --loss")
        return torch.stack([t.float().sum() for t in floats]).sum()
