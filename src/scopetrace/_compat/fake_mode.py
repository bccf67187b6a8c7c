"""The fake mode of a trace: torch's own, beside what that does not do, or does with guards that no answer needs."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from scopetrace._compat.layout_questions import asked_without_guards

_GIVING_ONE_TWICE = (torch.ops.aten.mkldnn_rnn_layer_backward.default,)
"""Ops of which two results are one tensor. Torch's cache of fake tensors gives two where it knows the op."""
_LOSS, _BACKWARD = torch.ops.aten._ctc_loss.Tensor, torch.ops.aten._ctc_loss_backward.Tensor
CTC_LIBRARIES = frozenset(
    getattr(torch.ops.aten, name).Tensor
    for name in ("_use_cudnn_ctc_loss", "_use_miopen_ctc_loss")
    if hasattr(torch.ops.aten, name)
)
"""Ops that tell whether a library computes the loss of tensors on a GPU. Its parts in a trace are those without."""


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
    if func in CTC_LIBRARIES:
        return False
    if func is _LOSS:
        return _ctc_loss(mode, *args[:4])
    if func is _BACKWARD:
        return _empty_fake(mode, args[1].size(), args[1])
    assert mode.shape_env is not None
    before, mode.cache_enabled = mode.cache_enabled, mode.cache_enabled and func not in _GIVING_ONE_TWICE
    try:
        with asked_without_guards(func) if mode.shape_env.var_to_range else contextlib.nullcontext():
            return FakeTensorMode.dispatch(mode, func, types, args, kwargs)
    finally:
        mode.cache_enabled = before


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
