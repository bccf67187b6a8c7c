"""The fake mode of a trace: torch's, and the shapes of what the CTC loss gives, which that one refuses to tell."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

_LOSS, _BACKWARD = torch.ops.aten._ctc_loss.Tensor, torch.ops.aten._ctc_loss_backward.Tensor


class TraceFakeTensorMode(FakeTensorMode):
    """As torch's. What `_ctc_loss` saves for its backward has a size that depends on the lengths of the targets."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As torch's: what an op gives for fake tensors."""
        if func is _LOSS:
            return self._ctc_loss(args[0])
        if func is _BACKWARD:
            return self._empty(args[1].size(), args[1])
        return super().dispatch(func, types, args, kwargs)

    def _ctc_loss(self, log_probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of each sequence, (N,), and what its backward reads, (N, T, 2 * the longest target + 1)."""
        times, count, _ = log_probs.size()
        env = self.shape_env
        assert env is not None
        states = env.create_unbacked_symint()
        env.ignorable_fresh_unbacked_symbols.append(states.node.expr)  # `ctc_loss` keeps it to itself
        return self._empty((count,), log_probs), self._empty((count, times, states), log_probs)

    def _empty(self, size: Any, like: torch.Tensor) -> torch.Tensor:
        with self:
            return torch.empty(size, dtype=like.dtype, device=like.device)
