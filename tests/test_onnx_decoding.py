"""examples/onnx_decoding.py: decoding in ONNX Runtime gives the words of `generate`."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import scopetrace as st
from scopetrace.cli.targets import declare_missing_ops

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
KEPT = declare_missing_ops()
transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import onnx_decoding as decoding  # noqa: E402

pytestmark = pytest.mark.slow

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
COUNT = 64
GREEDY = {"max_new_tokens": COUNT, "do_sample": False, "pad_token_id": 0}
PROMPT = torch.tensor([[5, 9, 3, 7, 11]])


def scattered(model):
    """The model with larger weights, so that it does not say one word again and again."""
    torch.manual_seed(3)
    for p in model.parameters():
        if p.dim() > 1:
            p.data.normal_(std=0.3)
    model.generation_config.eos_token_id = None
    return model.eval()


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def mistral():
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, sliding_window=8))


def gemma():
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=8, layer_types=layers)
    return transformers.Gemma3ForCausalLM(config)


def gemma2():
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SMALL, head_dim=8, sliding_window=8))


def gpt2():
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


@pytest.mark.parametrize(
    "make",
    [llama, *(pytest.param(m, marks=pytest.mark.slow) for m in (mistral, gemma, gemma2, gpt2))],
    ids=lambda m: m.__name__,
)
@pytest.mark.parametrize("functions", ["layers", pytest.param((), marks=pytest.mark.slow)])
def test_a_growing_cache(make, functions, tmp_path):
    model = scattered(make())
    decoding.export_decoder(model, tmp_path / "decoder.onnx", functions)
    words = decoding.run(tmp_path / "decoder.onnx", PROMPT.numpy(), COUNT)
    assert words.tolist() == model.generate(PROMPT, **GREEDY).tolist()
    assert len(set(words[0])) > 4


def test_a_cache_of_a_fixed_length(tmp_path):
    model = scattered(llama())
    decoding.export_static_decoder(model, tmp_path / "decoder.onnx", 80)
    words = decoding.run(tmp_path / "decoder.onnx", PROMPT.numpy(), COUNT)
    assert words.tolist() == model.generate(PROMPT, **GREEDY).tolist()


@pytest.mark.parametrize("make", [mistral, gemma], ids=lambda m: m.__name__)
def test_caches_that_count_in_python_are_refused(make):
    """Their numbers change from step to step, and the model branches on them."""
    model = scattered(make())
    growing = transformers.DynamicCache(config=model.config)
    fixed = transformers.StaticCache(config=model.config, max_cache_len=80)
    fixed.early_initialization(1, 2, 8, torch.float32, torch.device("cpu"))
    for layer, past in enumerate(decoding.filled(model, 4).layers):
        growing.update(past.keys, past.values, layer)
    for cache in (growing, fixed):
        inputs = {"input_ids": PROMPT, "past_key_values": cache}
        with torch.no_grad(), pytest.raises(st.OnnxExportError, match=r"layers\[0\]\.cumulative_length"):
            st.trace(model, (), inputs).to_onnx()


def t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4, "vocab_size": 64}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))


def bart():
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 2), ("ffn_dim", 64))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    words = {"vocab_size": 64, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    config = transformers.BartConfig(d_model=32, max_position_embeddings=128, **sizes, **heads, **words)
    config.forced_eos_token_id = None
    return transformers.BartForConditionalGeneration(config)


@pytest.mark.parametrize("make", [t5, bart], ids=lambda m: m.__name__)
def test_an_encoder_and_a_decoder(make, tmp_path):
    model = scattered(make())
    paths = [tmp_path / "encoder.onnx", tmp_path / "decoder.onnx"]
    decoding.export_encoder_decoder(model, *paths)
    encoder, _ = decoding.load(paths[0])
    (encoded,) = encoder.run(None, {encoder.get_inputs()[0].name: PROMPT.numpy()})
    decoder, _ = decoding.load(paths[1])
    given = next(i.name for i in decoder.get_inputs() if i.name.startswith("encoder_outputs"))
    start = torch.full((1, 1), model.config.decoder_start_token_id)
    words = decoding.run(paths[1], start.numpy(), COUNT, "decoder_input_ids", **{given: encoded})
    assert words.tolist() == model.generate(PROMPT, **GREEDY).tolist()


@pytest.mark.parametrize("make", [llama, gemma], ids=lambda m: m.__name__)
def test_caches_that_pytree_knows(make, tmp_path):
    """In a process of its own, since a registration stays."""
    code = f"""
import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]
import onnxruntime, test_onnx_decoding as t, numpy as np, torch, scopetrace as st
from transformers.integrations.executorch import register_dynamic_cache_export_support
register_dynamic_cache_export_support()
model, past = t.scattered(t.{make.__name__}()), {{2: torch.export.Dim("past")}}
inputs = {{"input_ids": t.PROMPT, "past_key_values": t.decoding.filled(model, 4)}}
caches = {{name: [past] * 3 for name in ("key_cache", "value_cache")}}
shapes = {{"input_ids": {{1: torch.export.Dim("new")}}, "past_key_values": caches}}
with torch.no_grad():
    tr = st.trace(model, (), inputs, dynamic_shapes=shapes)
tr.to_onnx("decoder.onnx", functions="layers", pair_caches=True)
words = t.decoding.run("decoder.onnx", t.PROMPT.numpy(), t.COUNT)
assert words.tolist() == model.generate(t.PROMPT, **t.GREEDY).tolist()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
