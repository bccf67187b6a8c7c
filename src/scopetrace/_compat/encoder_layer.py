"""What the fused op of `nn.TransformerEncoderLayer` computes, in ops that every backend has; torch has no such form."""

from __future__ import annotations

import torch
from torch.nn import functional as F

FUSED = torch.ops.aten._transformer_encoder_layer_fwd.default


def encoder_layer(
    src: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: torch.Tensor,
    norm_bias_1: torch.Tensor,
    norm_weight_2: torch.Tensor,
    norm_bias_2: torch.Tensor,
    ffn_weight_1: torch.Tensor,
    ffn_bias_1: torch.Tensor,
    ffn_weight_2: torch.Tensor,
    ffn_bias_2: torch.Tensor,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
) -> torch.Tensor:
    """The op, with its arguments: `src` is `[batch, length, embed_dim]`.

    `mask` is True, or not 0, where a key is left out: `[length, length]` for a `mask_type` of 0, `[batch, length]` for
    1, all four sizes of the attention for 2.
    """

    def first(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def second(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    def attention(x: torch.Tensor) -> torch.Tensor:
        heads = F.linear(x, qkv_weight, qkv_bias).unflatten(-1, (3, num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()
        kept = None if mask is None else mask.to(torch.bool).logical_not()
        if kept is not None and mask_type == 1:
            kept = kept[:, None, None, :]
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=kept)
        return F.linear(mixed.transpose(1, 2).flatten(2), proj_weight, proj_bias)

    def feed_forward(x: torch.Tensor) -> torch.Tensor:
        inner = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(inner) if use_gelu else F.relu(inner), ffn_weight_2, ffn_bias_2)

    if norm_first:
        src = src + attention(first(src))
        return src + feed_forward(second(src))
    src = first(src + attention(src))
    return second(src + feed_forward(src))
