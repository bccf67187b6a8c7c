"""Modules of torch that take another path in eager than on fake tensors: their calls are refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from scopetrace._compat.questions import fast_path_enabled, grad_enabled
from scopetrace._compat.tensors import parameters_of
from scopetrace.record.reads import ReadRecorder

HasOtherPath = (nn.TransformerEncoder, nn.RNNBase)
"""The classes that `other_path` knows."""


def other_path(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reads: ReadRecorder
) -> tuple[str, str] | None:
    """What the trace would do otherwise than eager, and what to write instead. None where both do the same.

    What decides it, and may be otherwise at a call, is told to `reads`.
    """
    if isinstance(module, nn.TransformerEncoder):
        return _NESTED if _takes_nested_path(module, args, kwargs, reads) else None
    packed = isinstance(args[0] if args else kwargs.get("input"), PackedSequence)
    return _PACKED if packed else None


_NESTED = (
    "nn.TransformerEncoder with a padding mask computes on nested tensors here, which are no ops of a graph; "
    "rows of padding would differ",
    "make it with nn.TransformerEncoder(..., enable_nested_tensor=False), or set encoder.use_nested_tensor = False",
)
_PACKED = (
    "a packed sequence, whose sizes depend on data, is given to a recurrent layer",
    "give the padded tensor, and pick the last valid step of each sequence (torch.gather); "
    "or name the layer and what packs for it in leaf_modules=",
)


def _takes_nested_path(
    module: nn.TransformerEncoder, args: tuple[Any, ...], kwargs: dict[str, Any], reads: ReadRecorder
) -> bool:
    """The conditions of `nn.TransformerEncoder.forward`, but whether the padding is at the end, which is data."""
    operands: Any = dict(zip(("src", "mask", "src_key_padding_mask"), args, strict=False)) | kwargs
    src, padding, first = operands["src"], operands.get("src_key_padding_mask"), module.layers[0]
    if not getattr(module, "use_nested_tensor", False) or torch.is_autocast_enabled():
        return False
    if first.training or padding is None or operands.get("mask") is not None or src.dim() != 3:
        return False
    if not fast_path_enabled():
        reads.on_flag("torch.backends.mha.get_fastpath_enabled", (), False)
        return False
    parameters = [p for part in first.modules() for p in parameters_of(part).values() if p is not None]
    needs = next((t for t in (*parameters, src) if t.requires_grad), None)
    if needs is None or not grad_enabled():
        return True
    reads.on_gradient(needs)
    return False
