"""The fake mode of a trace: torch's, and the shapes of what the CTC loss gives, which that one refuses to tell."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

_LOSS, _BACKWARD = torch.ops.aten._ctc_loss.Tensor, torch.ops.aten._ctc_loss_backward.Tensor


def fake_mode_of(shape_env: ShapeEnv) -> FakeTensorMode:
    """A FakeTensorMode of torch's own class, by which higher-order ops know it, that runs the parts of `ctc_loss`."""
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True, static_shapes=True)
    mode.dispatch = functools.partial(_dispatch, weakref.ref(mode))  # type: ignore[method-assign]
    return mode


def _dispatch(
    mode_ref: Callable[[], FakeTensorMode | None], func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    """As `FakeTensorMode.dispatch`: what an op gives for fake tensors."""
    mode = mode_ref()
    assert mode is not None
    if func is _LOSS:
        return _ctc_loss(mode, args[0])
    if func is _BACKWARD:
        return _empty(mode, args[1].size(), args[1])
    return FakeTensorMode.dispatch(mode, func, types, args, kwargs)


def _ctc_loss(mode: FakeTensorMode, log_probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each sequence, (N,), and what its backward reads, (N, T, 2 * the longest target + 1)."""
    times, count, _ = log_probs.size()
    env = mode.shape_env
    assert env is not None
    states = env.create_unbacked_symint()
    env.ignorable_fresh_unbacked_symbols.append(states.node.expr)  # `ctc_loss` keeps it to itself
    return _empty(mode, (count,), log_probs), _empty(mode, (count, times, states), log_probs)


def _empty(mode: FakeTensorMode, size: Any, like: torch.Tensor) -> torch.Tensor:
    with mode:
        return torch.empty(size, dtype=like.dtype, device=like.device)
