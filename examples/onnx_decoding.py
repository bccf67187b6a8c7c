"""Greedy decoding in ONNX Runtime: a decoder of transformers as one file, for the prompt and for each word after it.

    python examples/onnx_decoding.py

The past is an input and the present an output; `run` gives the one back as the other. A cache without a config keeps
all keys also where attention looks back over a window only, so that one file serves every length.
"""

import numpy as np
import onnxruntime
import torch
from torch.export import Dim
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig, LlamaForCausalLM, StaticCache

import scopetrace as st


def filled(model, length):
    """A cache with random keys and values, as an example of a past."""
    config, cache = model.config.get_text_config(decoder=True), DynamicCache()
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    width = getattr(config, "head_dim", None) or getattr(
        config, "d_kv", config.hidden_size // config.num_attention_heads
    )
    for layer in range(getattr(config, "num_decoder_layers", config.num_hidden_layers)):
        cache.update(*torch.randn(2, 1, heads, length, width), layer)
    return cache


def shapes_of(cache):
    """`dynamic_shapes` of a growing cache."""
    return {"layers": [{"keys": {2: Dim("past")}, "values": {2: Dim("past")}} for _ in cache.layers]}


@torch.no_grad()
def export_decoder(model, path, functions="layers"):
    """A decoder with a growing cache."""
    cache = filled(model, 4)
    inputs = {"input_ids": torch.ones(1, 3, dtype=torch.long), "past_key_values": cache}
    shapes = {"input_ids": {1: Dim("new")}, "past_key_values": shapes_of(cache)}
    tr = st.trace(model.eval(), (), inputs, dynamic_shapes=shapes)
    tr.to_onnx(path, functions=functions, pair_caches=True)


@torch.no_grad()
def export_static_decoder(model, path, length, functions="layers"):
    """A decoder that writes into a cache of a fixed length."""
    config, past = model.config, filled(model, 1).layers[0].keys
    cache = StaticCache(config=config, max_cache_len=length)
    cache.early_initialization(1, past.shape[1], past.shape[3], torch.float32, torch.device("cpu"))
    inputs = {"input_ids": torch.ones(1, 3, dtype=torch.long), "past_key_values": cache}
    tr = st.trace(model.eval(), (), inputs, dynamic_shapes={"input_ids": {1: Dim("new")}})
    tr.to_onnx(path, functions=functions, pair_caches=True)


@torch.no_grad()
def export_encoder_decoder(model, encoder_path, decoder_path, functions="layers"):
    """An encoder, and a decoder that reads what the encoder gave."""
    source = {0: None, 1: Dim("source")}
    st.trace(model.eval().get_encoder(), (torch.ones(1, 5, dtype=torch.long),), dynamic_shapes=(source,)).to_onnx(
        encoder_path, functions=functions
    )
    cache = filled(model, 4)
    inputs = {
        "decoder_input_ids": torch.ones(1, 3, dtype=torch.long),
        "encoder_outputs": (torch.randn(1, 5, model.config.hidden_size),),
        "past_key_values": EncoderDecoderCache(cache, DynamicCache()),
    }
    shapes = {
        "decoder_input_ids": {1: Dim("new")},
        "encoder_outputs": (source,),
        "past_key_values": {"self_attention_cache": shapes_of(cache), "cross_attention_cache": None},
    }
    tr = st.trace(model, (), inputs, dynamic_shapes=shapes)
    tr.to_onnx(decoder_path, functions=functions, pair_caches=True)


def load(path):
    """The file in ONNX Runtime, and a past for it: without length where the length grows, else zeros."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    types = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
    given = [i for i in session.get_inputs() if i.name.startswith("past_key_values.")]
    return session, {i.name: np.zeros([n if isinstance(n, int) else 0 for n in i.shape], types[i.type]) for i in given}


def run(path, ids, count, name="input_ids", **others):
    """`ids` with `count` words after them."""
    session, past = load(path)
    outputs, words = [o.name for o in session.get_outputs()], ids
    for _ in range(count):
        found = dict(zip(outputs, session.run(None, {name: ids, **others, **past}), strict=True))
        past = {key: found[key.replace("past_key_values", "present")] for key in past}
        ids = found["logits"][:, -1:].argmax(-1)
        words = np.concatenate([words, ids], 1)
    return words


if __name__ == "__main__":
    llama = LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4, vocab_size=256))
    export_decoder(llama, "llama.onnx")
    prompt = torch.tensor([[5, 9, 3, 7]])
    words = run("llama.onnx", prompt.numpy(), 64)
    llama.generation_config.eos_token_id = None
    wanted = llama.generate(prompt, max_new_tokens=64, do_sample=False, pad_token_id=0)
    print("equal to generate:", words.tolist() == wanted.tolist())
