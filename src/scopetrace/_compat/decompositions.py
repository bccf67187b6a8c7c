"""Which ops torch.export takes apart, and what it runs in their place."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._export.utils import _is_cia_op, _is_preservable_cia_op
from torch._ops import OpOverload
from torch.nn import functional as F

Rule = Callable[..., Any]
RuleOf = Callable[[OpOverload], Rule | None]
"""Gives what to run in the place of an op, None for one that stays."""

FUSED = torch.ops.aten._transformer_encoder_layer_fwd.default
"""The fused op of `nn.TransformerEncoderLayer`."""


@functools.cache
def core_aten() -> dict[Any, Rule]:
    """`torch.export.default_decompositions()`, read once, as it takes half a second; with two rules of ours."""
    ours = {FUSED: _encoder_layer, torch.ops.aten._safe_softmax.default: _safe_softmax}
    return {**dict(torch.export.default_decompositions().items()), **ours}


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


def _safe_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Zeros for rows that are masked as a whole, of which torch's rule gives NaN as gradient."""
    if not torch.is_grad_enabled():
        return decomposition_table[torch.ops.aten._safe_softmax.default](x, dim, dtype)
    masked = x.eq(-math.inf).all(dim, keepdim=True)
    return x.masked_fill(masked, 0.0).softmax(dim, dtype).masked_fill(masked, 0.0)


def _encoder_layer(*args: Any, **kwargs: Any) -> torch.Tensor:
    """`FUSED` in ops that every backend has, of which torch has no such form: `src` is `[batch, length, embed_dim]`.

    `mask` is True, or not 0, where a key is left out: `[length, length]` for a `mask_type` of 0, `[batch, length]` for
    1, all four sizes of the attention for 2.
    """
    names = [argument.name for argument in FUSED._schema.arguments]
    op = types.SimpleNamespace(**{"mask": None, **dict(zip(names, args, strict=False)), **kwargs})

    first, second = (
        functools.partial(F.layer_norm, normalized_shape=(op.embed_dim,), weight=weight, bias=bias, eps=op.eps)
        for weight, bias in ((op.norm_weight_1, op.norm_bias_1), (op.norm_weight_2, op.norm_bias_2))
    )

    def attention(x: torch.Tensor) -> torch.Tensor:
        heads = F.linear(x, op.qkv_weight, op.qkv_bias).unflatten(-1, (3, op.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()
        kept = None if op.mask is None else op.mask.to(torch.bool).logical_not()
        if kept is not None and op.mask_type == 1:
            kept = kept[:, None, None, :]
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=kept)
        return F.linear(mixed.transpose(1, 2).flatten(2), op.proj_weight, op.proj_bias)

    def feed_forward(x: torch.Tensor) -> torch.Tensor:
        inner = F.linear(x, op.ffn_weight_1, op.ffn_bias_1)
        return F.linear(F.gelu(inner) if op.use_gelu else F.relu(inner), op.ffn_weight_2, op.ffn_bias_2)

    src: torch.Tensor = op.src
    if op.norm_first:
        src = src + attention(first(src))
        return src + feed_forward(second(src))
    src = first(src + attention(src))
    return second(src + feed_forward(src))
