"""The models that are measured, and how the packages that they need are imported."""

import functools
import importlib
import importlib.util
import os
import pathlib
import sys
import warnings
from types import ModuleType
from typing import Any

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def import_scopetrace() -> ModuleType | None:
    """The installed scopetrace, else the one in src/, else None."""
    if importlib.util.find_spec("scopetrace") is None:
        sys.path.insert(0, str(ROOT / "src"))
    try:
        st = importlib.import_module("scopetrace")
        return st if hasattr(st, "trace") else None
    except ImportError as error:
        print(f"scopetrace cannot be imported: {error}", file=sys.stderr)
        return None


@functools.cache
def load_zoo(folder: pathlib.Path) -> Any:
    """The zoo's own module (`names()`, `build(name)`), under a name that does not clash with ours."""
    spec = importlib.util.spec_from_file_location("_shared_zoo", folder / "zoo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_libraries: list[torch.library.Library] = []


@functools.cache
def import_torchvision() -> ModuleType:
    """Import torchvision, also where its compiled operators do not load.

    Its import then fails on the first operator that it registers a fake kernel for; once the two that it asks
    for are declared, the rest of it works. timm and transformers import it.
    """
    try:
        return importlib.import_module("torchvision")
    except (RuntimeError, OSError):
        for name in [m for m in sys.modules if m == "torchvision" or m.startswith("torchvision.")]:
            del sys.modules[name]
    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)
    return importlib.import_module("torchvision")


Built = tuple[torch.nn.Module, tuple[Any, ...]]


def bert_base() -> Built:
    """BERT-base, 1x128 token ids."""
    import_torchvision()
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig()).eval(), (torch.randint(3, 1000, (1, 128)),)


def vit_b16() -> Built:
    """ViT-B/16 of timm."""
    return _timm("vit_base_patch16_224")


def resnet152() -> Built:
    """ResNet-152 of timm."""
    return _timm("resnet152")


def _timm(name: str) -> Built:
    import_torchvision()
    import timm

    return timm.create_model(name, pretrained=False).eval(), (torch.randn(1, 3, 224, 224),)


def llama_70b(layers: int = 80) -> Built:
    """The shape of Llama-70B on the meta device: no memory for its weights."""
    import_torchvision()
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaModel(config).eval(), (torch.zeros(1, 128, dtype=torch.long),)


class Chain(torch.nn.Module):
    """A chain of `ops` small ops: linear, relu, add and mul in turn."""

    def __init__(self, ops: int) -> None:
        """Have `ops` ops."""
        super().__init__()
        self.ops = ops
        self.weight = torch.nn.Parameter(torch.eye(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the chain."""
        for _ in range(self.ops // 4):
            x = torch.nn.functional.linear(x, self.weight)
            x = torch.relu(x)
            x = x + 1
            x = x * 0.5
        return x


MODELS = {"bert-base": bert_base, "vit-b16": vit_b16, "resnet152": resnet152}


def quiet() -> None:
    """Keep warnings of the models and of torch out of the report."""
    warnings.filterwarnings("ignore")
