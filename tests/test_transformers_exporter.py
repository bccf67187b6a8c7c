"""scopetrace.integrations.transformers: its formats beside those of transformers, and the words of `generate`."""

import copy
import dataclasses

import pytest
import torch

import scopetrace as st
from scopetrace.cli.targets import declare_missing_ops

KEPT = declare_missing_ops()  # parts of transformers import torchvision
transformers = pytest.importorskip("transformers")
exporters = pytest.importorskip("transformers.exporters")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
from transformers.exporters.utils import decompose_for_generation  # noqa: E402

from scopetrace.integrations.transformers import ScopetraceConfig, ScopetraceOnnxConfig  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*torch fixes sizes 0 and 1")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
GROUPED = {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2}
WINDOW = {**GROUPED, "sliding_window": 8}
SIZES = {
    "Llama": GROUPED,
    "Qwen2": GROUPED,
    "Qwen3": {**GROUPED, "head_dim": 8},
    "Mistral": WINDOW,
    "Gemma2": {**WINDOW, "head_dim": 8},
    "Gemma3": {**WINDOW, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64},
    "GPTNeoX": {**SMALL, "intermediate_size": 64},
    "Phi": GROUPED,
    "Phi3": {**GROUPED, "pad_token_id": 0},
    "OPT": {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "Falcon": SMALL,
    "Bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64},
    "StableLm": GROUPED,
    "Olmo2": GROUPED,
}
FORMATS = ["scopetrace", pytest.param("scopetrace-onnx", marks=pytest.mark.slow)]
GREEDY = {"max_new_tokens": 12, "do_sample": False}
PROMPT = torch.tensor([[5, 9, 3, 7, 11], [8, 2, 30, 1, 7]])


def decoder(name):
    """A model with large weights, so that it does not say one word again and again."""
    kind = name.removesuffix("LMHeadModel")
    config = getattr(transformers, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config")(**SIZES[name])
    model = getattr(transformers, name if name != kind else f"{name}ForCausalLM")(config)
    torch.manual_seed(3)
    for p in model.parameters():
        if p.dim() > 1:
            p.data.normal_(std=0.3)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.eval()


def exporter_of(export_format):
    return exporters.AutoHfExporter.from_config({"export_format": export_format})


def exported(model, export_format, **options):
    exporter = exporter_of(export_format)
    inputs = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
    return exporter.export_for_generation(model, inputs, exporter.config_class(**options))


def said(program, model, prompt):
    """What both programs say after a prompt."""
    past, ids, words = transformers.DynamicCache(config=model.config), prompt, prompt
    for part in ("prefill", *["decode"] * (GREEDY["max_new_tokens"] - 1)):
        count, length = ids.shape[1], words.shape[1]
        possible = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(words),
            "position_ids": torch.arange(length - count, length).expand(len(ids), count),
            "past_key_values": past,
        }
        runner = program.runners[part]
        out = runner(**{name: x for name, x in possible.items() if name in runner.metadata.kwargs})
        past, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
        words = torch.cat([words, ids], 1)
    return words


def decoders():
    """The first one always, some as ONNX in the slow tests, all in the exhaustive ones."""
    for name in SIZES:
        yield pytest.param(name, "scopetrace", marks=() if name == "Llama" else pytest.mark.slow)
        is_sample = name in ("Llama", "Gemma3", "Falcon")
        yield pytest.param(name, "scopetrace-onnx", marks=pytest.mark.slow if is_sample else pytest.mark.exhaustive)


@pytest.mark.parametrize(("name", "export_format"), [*decoders()])
def test_words_of_generate(name, export_format, tmp_path):
    """Of the prompt of the export, and of more and longer ones, past the window, by programs from files."""
    model = decoder(name)
    exported(model, export_format, dynamic=True).save_pretrained(tmp_path)
    weights = sum(p.nbytes for p in model.parameters())
    assert 0.9 < (tmp_path / "weights.data").stat().st_size / weights < 1.2  # those of prefill and decode, once
    program = exporters.ExportedModel.from_pretrained(tmp_path)
    for prompt in (PROMPT, torch.arange(3, 24).view(3, 7)):
        wanted = model.generate(prompt, attention_mask=torch.ones_like(prompt), **GREEDY)
        assert said(program, model, prompt).tolist() == wanted.tolist()
        assert len(set(wanted[0].tolist())) > 4


@pytest.mark.slow
def test_one_function_for_each_layer_and_one_file_of_weights(tmp_path):
    model = decoder("Llama")
    program = exported(model, "scopetrace-onnx", dynamic=True)
    program.save_pretrained(tmp_path)
    for component in program.components.values():
        assert [f.name for f in component.program.functions.values()] == ["LlamaDecoderLayer"]
    graph = program.components["decode"].program.graph
    assert [v.name for v in graph.inputs] == [
        "input_ids",
        "position_ids",
        *(f"input.past_key_values.layers.{i}.{part}" for i in range(2) for part in ("keys", "values")),
    ]
    assert [v.name for v in graph.outputs] == [
        "logits",
        *(f"output.past_key_values.layers.{i}.{part}" for i in range(2) for part in ("keys", "values")),
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *("config.json", "decode.onnx", "export.json", "prefill.onnx", "weights.data")
    ]
    exporters.ExportedModel.from_pretrained(tmp_path).save_pretrained(tmp_path)
    in_file = [p.nbytes for p in model.parameters() if p.nbytes > 256]
    assert (tmp_path / "weights.data").stat().st_size == sum(in_file)


@pytest.mark.parametrize("export_format", FORMATS)
@pytest.mark.parametrize(("cache", "dynamic"), [(None, False), ("static", False), ("static", True)])
def test_components_give_what_the_model_gives(cache, dynamic, export_format):
    """On the inputs of the export: transformers' own test of its formats."""
    model = decoder("Mistral" if cache is None else "Llama")
    config = transformers.GenerationConfig(cache_implementation=cache, max_cache_len=16, do_sample=False)
    inputs = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
    parts = decompose_for_generation(model, inputs, generation_config=config if cache else None)
    for part, example in parts.values():
        with torch.no_grad():
            wanted = exporters.utils.get_leaf_tensors(part(**copy.deepcopy(example)))
        exporter = exporter_of(export_format)
        program = exporter.export(part, copy.deepcopy(example), exporter.config_class(dynamic=dynamic))
        out = program(**copy.deepcopy(example))
        torch.testing.assert_close(exporters.utils.get_leaf_tensors(out), wanted, atol=1e-4, rtol=1e-4)


def test_the_model_is_left_as_it_was_and_the_trace_needs_none_of_its_python():
    model = decoder("Gemma2")
    update = transformers.cache_utils.DynamicSlidingWindowLayer.update
    part, example = decompose_for_generation(model, {"input_ids": PROMPT})["decode"]
    config, attributes, layer = copy.deepcopy(model.config), dict(vars(model)), example["past_key_values"].layers[0]
    program = exporter_of("scopetrace").export(part, example, ScopetraceConfig())
    assert (layer.cumulative_length, layer.keys.shape[2]) == (5, 5)
    assert transformers.cache_utils.DynamicSlidingWindowLayer.update is update
    assert model.config.to_dict() == config.to_dict() and vars(model) == attributes
    del model, part
    assert isinstance(program.program, st.Trace)
    assert [f.name for f in program.program.outline("layers").functions] == ["Gemma2DecoderLayer"]
    assert program(**example).logits.shape == (2, 1, 64)


@pytest.mark.parametrize("config", [ScopetraceConfig, ScopetraceOnnxConfig])
def test_configs_are_data(config):
    options = dataclasses.asdict(config(dynamic=True))
    assert exporters.AutoExportConfig.from_dict(options) == config(dynamic=True)


def test_refusals():
    model, exporter = decoder("Llama"), exporter_of("scopetrace")
    inputs = {"input_ids": PROMPT}
    with pytest.raises(st.ArgumentError, match="takes no quantizer"):
        exporter.export(model, dict(inputs), ScopetraceConfig(quantizer=object()))
    with pytest.raises(st.ArgumentError, match="traced on cpu, not meta: export the model on that device"):
        exporter.export(model, dict(inputs), ScopetraceConfig()).to("meta")
