"""Real models traced with `SCOPETRACE_CHECK=1`: each inferred result is compared with torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim

import scopetrace as st
from benchmarks.models import import_torchvision

VISION = (
    "test_vit",
    "test_resnet",
    "test_convnext",
    "test_efficientnet",
    "test_byobnet",
    "test_nfnet",
    "test_mambaout",
)
SMALL = {
    **{"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99},
    **{"max_position_embeddings": 64, "num_key_value_heads": 2, "pad_token_id": 0, "use_cache": False},
}
TEXT = ("bert", "roberta", "llama", "gpt2", "t5", "bart", "modernbert", "mpt")


@pytest.fixture(autouse=True)
def checking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCOPETRACE_CHECK", "1")


@pytest.mark.slow
@pytest.mark.parametrize("batch", ["static", "dynamic"])
@pytest.mark.parametrize("name", VISION)
def test_a_vision_model(name: str, batch: str) -> None:
    import_torchvision()
    timm = pytest.importorskip("timm")
    model = timm.create_model(name, pretrained=False).eval()
    x = torch.randn(3, *model.default_cfg["input_size"])
    st.trace(model, (x,), dynamic_shapes=({0: Dim("batch", min=2)},) if batch == "dynamic" else None)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["static", "dynamic"])
@pytest.mark.parametrize("name", TEXT)
def test_a_text_model(name: str, sizes: str) -> None:
    import_torchvision()
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(name)
    for key, value in SMALL.items():
        if hasattr(config, key):
            setattr(config, key, value)
    model = transformers.AutoModel.from_config(config).eval()
    ids = torch.randint(1, 99, (3, 16))
    kwargs = {"input_ids": ids} | ({"decoder_input_ids": ids.clone()} if config.is_encoder_decoder else {})
    dims = {0: Dim("batch", min=2), 1: Dim("length", min=2, max=64)}
    st.trace(model, kwargs=kwargs, dynamic_shapes=dict.fromkeys(kwargs, dims) if sizes == "dynamic" else None)
