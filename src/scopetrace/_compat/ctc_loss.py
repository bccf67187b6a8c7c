"""What the ops of `ctc_loss` with lengths in tensors give for fake tensors, of which torch says nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def _ctc_loss(
    mode: FakeTensorMode,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each sequence, (N,), and what its backward reads, (N, T, 2 * the longest target + 1).

    Raises RuntimeError for shapes and dtypes that the kernel refuses.
    """
    if log_probs.dim() != 3 or log_probs.dtype not in (torch.float32, torch.float64):
        raise RuntimeError(
            f"ctc_loss takes log_probs of (T, N, C) or (T, C) in float32 or float64, not {_shown(log_probs)}"
        )
    times, count, _ = log_probs.size()
    if targets.dim() not in (1, 2) or (targets.dim() == 2 and targets.size(0) != count):
        raise RuntimeError(f"ctc_loss takes targets of (N, S), N = {count}, or all in a row, not {_shown(targets)}")
    for name, lengths in (("input_lengths", input_lengths), ("target_lengths", target_lengths)):
        if lengths.numel() != count or lengths.is_floating_point():
            raise RuntimeError(f"ctc_loss takes N = {count} integers as {name}, not {_shown(lengths)}")
    env = mode.shape_env
    assert env is not None
    states = env.create_unbacked_symint()
    env.ignorable_fresh_unbacked_symbols.append(states.node.expr)  # `ctc_loss` keeps it to itself
    return _empty_fake(mode, (count,), log_probs), _empty_fake(mode, (count, times, states), log_probs)


def _shown(t: torch.Tensor) -> str:
    return f"{t.dtype} of shape {list(t.size())}"


def _empty_fake(mode: FakeTensorMode, size: Any, like: torch.Tensor) -> torch.Tensor:
    with mode:
        return torch.empty(size, dtype=like.dtype, device=like.device)


CTC_LIBRARIES = frozenset(
    getattr(torch.ops.aten, name).Tensor
    for name in ("_use_cudnn_ctc_loss", "_use_miopen_ctc_loss")
    if hasattr(torch.ops.aten, name)
)
"""Ops that tell whether a library computes the loss of tensors on a GPU. Its parts in a trace are those without."""
CTC_RULES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._ctc_loss.Tensor: lambda mode, *args: _ctc_loss(mode, *args[:4]),
    torch.ops.aten._ctc_loss_backward.Tensor: lambda mode, _, x, *rest: _empty_fake(mode, x.size(), x),
    **dict.fromkeys(CTC_LIBRARIES, lambda *_: False),
}
"""By op; they get the mode and the arguments."""
