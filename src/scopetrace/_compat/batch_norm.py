"""BatchNorm with `momentum=None` in training, in tensors only.

torch reads the number of batches as a Python float there, which would stay what it was in the trace: the second batch
would be averaged as the first. The running statistics come out the same from the statistics of the batch alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.nn.modules.batchnorm import _BatchNorm

Forward = Callable[[_BatchNorm, torch.Tensor], torch.Tensor]


@contextlib.contextmanager
def averaging_in_tensors(mine: Callable[[], bool]) -> Iterator[None]:
    """While `mine()`, cumulative averages are taken by ops that hold for any number of batches."""
    original: Forward = _BatchNorm.forward

    def forward(self: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
        counts = self.training and self.momentum is None and self.track_running_stats
        if not mine() or not counts or self.num_batches_tracked is None:
            return original(self, input)
        return _forward(self, input)

    _BatchNorm.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        _BatchNorm.forward = original  # type: ignore[method-assign, assignment]


def _forward(self: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
    self._check_input_dim(input)
    assert self.num_batches_tracked is not None and self.running_mean is not None and self.running_var is not None
    self.num_batches_tracked.add_(1)
    mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
    out = torch.nn.functional.batch_norm(input, mean, var, self.weight, self.bias, True, 1.0, self.eps)
    share = self.num_batches_tracked.reciprocal().to(mean.dtype)
    self.running_mean.lerp_(mean, share)
    self.running_var.lerp_(var, share)
    return out
