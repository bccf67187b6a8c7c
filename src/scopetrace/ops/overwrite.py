"""`scopetrace::overwrite(old, new)`: the value of `new`, the gradient of `old`.

That is what a write hidden from autograd means (under `no_grad`, through `detach()` or `.data`): the data changes, the
history does not. No op of ATen says it.
"""

from __future__ import annotations

from typing import Any

import torch


@torch.library.custom_op("scopetrace::overwrite", mutates_args=())
def overwrite(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """A copy of `new` (same shape and dtype as `old`), through which gradients flow to `old`."""
    return new.clone()


@overwrite.register_fake
def _(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(new)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return grad, None


overwrite.register_autograd(_backward)

OVERWRITE = torch.ops.scopetrace.overwrite.default
