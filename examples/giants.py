"""Two models that no machine here could hold, on the meta device: shapes without memory.

scopetrace plan examples.giants:llama_405b --input input_ids=1x4096:int64 --classes LlamaDecoderLayer --ranks 1024
scopetrace plan examples.giants:moe_1t --input input_ids=1x4096:int64 --classes Qwen3MoeDecoderLayer --ranks 1024
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM


def llama_405b(layers: int = 126) -> torch.nn.Module:
    """Llama 3.1 405B: 126 layers, hidden size 16,384, in bfloat16."""
    config = LlamaConfig(
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=layers,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def moe_1t(layers: int = 61) -> torch.nn.Module:
    """A mixture of experts of 10^12 parameters: 61 layers of 256 experts, of which a token goes to 8, in bfloat16."""
    config = Qwen3MoeConfig(
        hidden_size=8192,
        moe_intermediate_size=2560,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        num_experts=256,
        num_experts_per_tok=8,
        vocab_size=151936,
        use_cache=False,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        return Qwen3MoeForCausalLM(config).to(torch.bfloat16)
