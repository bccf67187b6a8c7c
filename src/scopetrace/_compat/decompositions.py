"""Which ops torch.export takes apart, and what it runs in their place."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._export.utils import _is_cia_op, _is_preservable_cia_op
from torch._ops import OpOverload

from scopetrace._compat.encoder_layer import FUSED, encoder_layer

Rule = Callable[..., Any]
RuleOf = Callable[[OpOverload], Rule | None]
"""Gives what to run in the place of an op, None for one that stays."""


@functools.cache
def core_aten() -> dict[Any, Rule]:
    """`torch.export.default_decompositions()`, read once, as it takes half a second; and a fused op that it lacks."""
    return {**dict(torch.export.default_decompositions().items()), FUSED: encoder_layer}


@contextlib.contextmanager
def without_mkldnn() -> Iterator[None]:
    """With MKL-DNN on, torch decomposes an lstm on a CPU into its kernel, which is no core ATen op."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def decomposition_rules(table: Mapping[Any, Rule] | None) -> RuleOf:
    """The rules of a table, as `run_decompositions` reads it.

    `table` is by op; None for `core_aten`. Composite ops that return their argument or a view of it on some inputs,
    such as `reshape`, `dropout` and `to`, are always taken apart, since other compilers cannot know which.
    """
    rules = core_aten() if table is None else table

    @functools.cache
    def rule(op: OpOverload) -> Rule | None:
        if op in rules:
            return rules[op]
        has_kernel = torch._C._dispatch_has_kernel(op.name())
        return op.decompose if has_kernel and _is_cia_op(op) and not _is_preservable_cia_op(op) else None

    return rule
