"""Real models as ONNX files: one function for each distinct block, also with a cache of keys and at another size.

`verify` compares ONNX Runtime with the model, on other sizes too where sizes are dynamic.
"""

import pytest
import torch
from torch import nn
from torch.export import Dim

import scopetrace as st

pytest.importorskip("onnxruntime")

F = nn.functional


def exported(model, args, kwargs=None, functions="repeated", **options):
    """The ONNX model, verified in ONNX Runtime."""
    with torch.no_grad():
        return st.trace(model.eval(), args, kwargs, **options).to_onnx(functions=functions, verify=True)


def calls(model):
    """By function, how many nodes call it."""
    nodes = [n for graph in (model.graph, *model.functions.values()) for n in graph]
    return {f.name: sum((n.domain, n.op_type) == (f.domain, f.name) for n in nodes) for f in model.functions.values()}


class TimestepEmbedding(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t):
        half = self.width // 2
        frequencies = torch.exp(-torch.arange(half, dtype=torch.float32) * (9.21 / half))
        angles = t[:, None] * frequencies
        return self.mlp(torch.cat([angles.cos(), angles.sin()], -1))


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x, context=None):
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(x if context is None else context).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class DiTBlock(nn.Module):
    """Modulated by the timestep (adaLN-Zero of Peebles and Xie, 2023), with attention to a text."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(3))
        self.attention, self.cross = Attention(width, heads), Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x, condition, context):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition)[:, None].chunk(6, -1)
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        x = x + self.cross(self.norm2(x), context)
        return x + gate2 * self.mlp(self.norm3(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """A diffusion transformer: latents, timesteps and a text in, noise out."""

    def __init__(self, width=32, heads=4, depth=3, channels=4, patch=2):
        super().__init__()
        self.patch = patch
        self.embed, self.time = nn.Conv2d(channels, width, patch, patch), TimestepEmbedding(width)
        self.blocks = nn.ModuleList([DiTBlock(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, channels * patch * patch)

    def forward(self, latents, timestep, context):
        rows, columns = latents.shape[2] // self.patch, latents.shape[3] // self.patch
        x, condition = self.embed(latents).flatten(2).transpose(1, 2), self.time(timestep)
        for block in self.blocks:
            x = block(x, condition, context)
        x = self.head(self.norm(x)).unflatten(1, (rows, columns)).unflatten(-1, (self.patch, self.patch, -1))
        return x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


@pytest.mark.slow
def test_diffusion_transformer():
    torch.manual_seed(0)
    batch, height, words = Dim("batch"), Dim("height"), Dim("words")
    args = (torch.randn(2, 4, 8, 8), torch.tensor([10.0, 500.0]), torch.randn(2, 5, 32))
    shapes = {"latents": {0: batch, 2: 2 * height}, "timestep": {0: batch}, "context": {0: batch, 1: words}}
    model = exported(DiT(), args, functions=[DiTBlock, Attention], dynamic_shapes=shapes)
    assert calls(model) == {"Attention": 1, "Attention_2": 1, "DiTBlock": 3}
    block = model.functions[__name__, "DiTBlock", ""]
    assert [v.name for v in block.inputs][:3] == ["x", "condition", "context"]


@pytest.fixture(scope="module")
def transformers():
    """The package, where its models can be made; its caches are unknown to pytree, as people have them."""
    from scopetrace.cli.targets import declare_missing_ops

    kept = declare_missing_ops()
    yield pytest.importorskip("transformers")
    del kept


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def layers(model, cls):
    """How often each function of a class is called."""
    return {name: count for name, count in calls(model).items() if name.split("_")[0] == cls}


def filled(transformers, config, batch, length):
    """A cache with keys and values of a prompt."""
    cache = transformers.DynamicCache(config=config)
    width = config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        cache.update(*torch.randn(2, batch, config.num_key_value_heads, length, width), layer)
    return cache


def cache_shapes(cache, shape):
    """`dynamic_shapes` of a cache whose keys and values all have this one."""
    return {"layers": [{"keys": shape, "values": shape} for _ in cache.layers]}


def test_a_decoder_with_a_cache_at_other_lengths(transformers):
    config = transformers.LlamaConfig(**SMALL)
    batch, past, new = Dim("batch"), Dim("past"), Dim("new")
    cache = filled(transformers, config, 2, 5)
    kwargs = {"input_ids": torch.randint(0, 64, (2, 3)), "past_key_values": cache}
    shapes = {"input_ids": {0: batch, 1: new}, "past_key_values": cache_shapes(cache, {0: batch, 2: past})}
    made = exported(transformers.LlamaForCausalLM(config), (), kwargs, dynamic_shapes=shapes)
    assert layers(made, "LlamaDecoderLayer") == {"LlamaDecoderLayer": 3}
    assert caches_taken(made) == ["past_key_values.layers[0].keys", "past_key_values.layers[0].values"]
    assert [d.value for d in made.graph.outputs[1].shape if not isinstance(d, int)] == ["batch", "new + past"]


def caches_taken(made):
    """The tensors of a cache among what the function of the decoder layers takes."""
    (layer,) = [f for f in made.functions.values() if f.name == "LlamaDecoderLayer"]
    return [v.name for v in layer.inputs if v.name.startswith("past_key_values")]


@pytest.mark.slow
def test_a_prompt_with_an_empty_cache(transformers):
    config = transformers.LlamaConfig(**SMALL)
    kwargs = {"input_ids": torch.randint(0, 64, (2, 3)), "past_key_values": transformers.DynamicCache(config=config)}
    made = exported(transformers.LlamaModel(config), (), kwargs)
    assert layers(made, "LlamaDecoderLayer") == {"LlamaDecoderLayer": 3} and caches_taken(made) == []


@pytest.fixture
def static(transformers):
    """A model, and inputs of it with a cache of a fixed length."""
    config = transformers.LlamaConfig(**SMALL)
    cache = transformers.StaticCache(config=config, max_cache_len=8)
    cache.early_initialization(batch_size=2, num_heads=2, head_dim=8, dtype=torch.float32, device="cpu")
    return transformers.LlamaModel(config), {"input_ids": torch.randint(0, 64, (2, 3)), "past_key_values": cache}


def test_a_static_cache_is_written_in_place(static):
    model, kwargs = static
    made = exported(model, (), kwargs)
    assert layers(made, "LlamaDecoderLayer") == {"LlamaDecoderLayer": 3}
    (layer,) = [f for f in made.functions.values() if f.name == "LlamaDecoderLayer"]
    names = ("keys", "values", "cumulative_length")
    assert caches_taken(made) == [f"past_key_values.layers[0].{name}" for name in names]
    assert [v.name for v in layer.outputs] == ["output", *(f"past_key_values_layers_0_{n}_updated" for n in names)]
    changed = [f"past_key_values_layers_{i}_{name}_updated" for i in range(3) for name in names]
    assert [v.name for v in made.graph.outputs][-9:] == changed


@pytest.mark.slow
def test_a_cache_that_is_registered_with_pytree(static):
    from transformers.exporters.exporter_dynamo import register_pytree_node

    model, kwargs = static
    cls = type(kwargs["past_key_values"])
    register_pytree_node(cls)
    try:
        made = exported(model, (), kwargs)
    finally:
        del torch.utils._pytree.SUPPORTED_NODES[cls]
    assert layers(made, "LlamaDecoderLayer") == {"LlamaDecoderLayer": 3}
    assert caches_taken(made) == [f"past_key_values[{i}]" for i in range(3)]
    assert [v.name for v in made.graph.outputs][-9:] == [f"past_key_values_{i}_updated" for i in range(9)]


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_one_function_for_each_kind_of_layer(transformers, implementation):
    """The first layer has no experts."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = transformers.Qwen3MoeConfig(**SMALL, **experts, head_dim=8, mlp_only_layers=[0])
    model = transformers.Qwen3MoeModel(config)
    model.set_experts_implementation(implementation)
    kwargs = {"input_ids": torch.randint(0, 64, (2, 9)), "use_cache": False}
    made = exported(model, (), kwargs, dynamic_shapes={"input_ids": {1: Dim("length")}, "use_cache": None})
    assert layers(made, "Qwen3MoeDecoderLayer") == {"Qwen3MoeDecoderLayer": 1, "Qwen3MoeDecoderLayer_2": 2}


@pytest.mark.slow
def test_an_encoder(transformers):
    ids = torch.randint(0, 64, (2, 9))
    shape = {0: Dim("batch"), 1: Dim("length", max=512)}
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    model = transformers.BertModel(transformers.BertConfig(**SMALL))
    made = exported(model, (), kwargs, dynamic_shapes=dict.fromkeys(kwargs, shape))
    assert layers(made, "BertLayer") == {"BertLayer": 3}


def two_caches(transformers, count, past, source):
    """Keys and values of a decoder, and those of the encoder's result."""
    caches = [transformers.DynamicCache(), transformers.DynamicCache()]
    for cache, length in zip(caches, (past, source), strict=True):
        for layer in range(count):
            cache.update(*torch.randn(2, 2, 4, length, 8), layer)
    return transformers.EncoderDecoderCache(*caches)


def both_shapes(past, source):
    """`dynamic_shapes` of such caches."""
    sides = {"self_attention_cache": past, "cross_attention_cache": source}
    return {side: {"layers": [{"keys": shape, "values": shape}] * 3} for side, shape in sides.items()}


def decoder_inputs(transformers, source):
    """One word, what the encoder gave, and the keys and values of 5 words before, in 3 layers."""
    encoded, cache = (torch.randn(2, source, 32),), two_caches(transformers, 3, 5, source)
    return {
        "decoder_input_ids": torch.randint(0, 64, (2, 1)),
        "encoder_outputs": encoded,
        "past_key_values": cache,
    }


@pytest.mark.slow
def test_t5_with_a_cache_at_other_lengths(transformers):
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, vocab_size=64)
    past, source = {2: Dim("past")}, Dim("source")
    shapes = {
        "decoder_input_ids": None,
        "encoder_outputs": ({1: source},),
        "past_key_values": both_shapes(past, {2: source}),
    }
    model = transformers.T5ForConditionalGeneration(config)
    made = exported(model, (), decoder_inputs(transformers, 7), dynamic_shapes=shapes)
    assert layers(made, "T5Block") == {"T5Block": 1, "T5Block_2": 2}  # the first one has the position bias


@pytest.fixture
def whisper(transformers):
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in _SIDES.items()}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    lengths = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 40}
    config = transformers.WhisperConfig(d_model=32, vocab_size=64, **sizes, **tokens, **lengths)
    return transformers.WhisperForConditionalGeneration(config)


_SIDES = {"layers": 3, "attention_heads": 4, "ffn_dim": 64}


@pytest.mark.slow
def test_whisper_with_a_cache_at_other_lengths(transformers, whisper):
    past = {2: Dim("past", max=30)}
    shapes = {"decoder_input_ids": None, "encoder_outputs": (None,), "past_key_values": both_shapes(past, None)}
    made = exported(whisper, (), decoder_inputs(transformers, 20), dynamic_shapes=shapes)
    assert layers(made, "WhisperDecoderLayer") == {"WhisperDecoderLayer": 3}


@pytest.mark.slow
def test_whole_whisper(whisper):
    kwargs = {"decoder_input_ids": torch.randint(0, 64, (2, 4)), "use_cache": False}
    batch, length = Dim("batch"), Dim("length", max=30)
    shapes = {"input_features": {0: batch}, "decoder_input_ids": {0: batch, 1: length}, "use_cache": None}
    made = exported(whisper, (torch.randn(2, 8, 40),), kwargs, dynamic_shapes=shapes)
    assert layers(made, "WhisperEncoderLayer") == {"WhisperEncoderLayer": 3}
    assert layers(made, "WhisperDecoderLayer") == {"WhisperDecoderLayer": 3}
