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


def llama_405b(layers: int = 126) -> Built:
    """The shape of Llama-405B on the meta device."""
    import_torchvision()
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_key_value_heads": 8}
    config = LlamaConfig(num_hidden_layers=layers, vocab_size=128256, use_cache=False, **sizes)
    with torch.device("meta"):
        return LlamaModel(config).eval(), (torch.zeros(1, 128, dtype=torch.long),)


def deepseek_v3(layers: int = 61) -> Built:
    """DeepSeek-V3 on the meta device: 256 experts in all but the first three layers."""
    import_torchvision()
    from transformers import DeepseekV3Config, DeepseekV3Model

    with torch.device("meta"):
        model = DeepseekV3Model(DeepseekV3Config(num_hidden_layers=layers, use_cache=False)).eval()
        return model, (torch.zeros(1, 128, dtype=torch.long),)


def vit_giant() -> Built:
    """ViT-g/14 of timm on the meta device."""
    with torch.device("meta"):
        return _timm("vit_giant_patch14_224")


def resnet200d() -> Built:
    """ResNet-200d of timm."""
    return _timm("resnet200d")


def small_llama(layers: int) -> Built:
    """A Llama of few weights."""
    import_torchvision()
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(num_hidden_layers=layers, vocab_size=100, use_cache=False, **sizes)
    return LlamaModel(config).eval(), (torch.ones(1, 8, dtype=torch.long),)


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


class Writes(torch.nn.Module):
    """`count` writes, one after the other, to one tensor: to its rows in turn, or to the whole of it."""

    def __init__(self, count: int, rows: bool) -> None:
        """Write `count` times."""
        super().__init__()
        self.count, self.rows = count, rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Write."""
        base = x.clone()
        for i in range(self.count):
            (base[i % 8] if self.rows else base).add_(1)
        return base


class CachedAttention(torch.nn.Module):
    """Layers of attention as in Llama (grouped heads), one token at a time, keys and values written to a cache."""

    def __init__(self, layers: int = 24, width: int = 256, heads: int = 8, kv_heads: int = 2) -> None:
        """Have caches of 128 positions."""
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        kv = kv_heads * self.size
        self.q = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(layers))
        self.kv = torch.nn.ModuleList(torch.nn.Linear(width, 2 * kv, bias=False) for _ in range(layers))
        self.mlp = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(layers))
        self.register_buffer("cache", torch.zeros(layers, 2, 1, kv_heads, 128, self.size))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """The next token's hidden state."""
        attention = torch.nn.functional.scaled_dot_product_attention
        for i, (q, kv, mlp) in enumerate(zip(self.q, self.kv, self.mlp, strict=True)):
            keys, values = kv(x).view(1, 1, 2, self.kv_heads, self.size).permute(2, 0, 3, 1, 4)
            self.cache[i, 0].index_copy_(2, position, keys)
            self.cache[i, 1].index_copy_(2, position, values)
            query = q(x).view(1, 1, self.heads, self.size).transpose(1, 2)
            out = attention(query, self.cache[i, 0], self.cache[i, 1], enable_gqa=True)
            x = x + mlp(torch.nn.functional.silu(out.transpose(1, 2).flatten(2)))
        return x


def llama_cache() -> Built:
    """24 layers of a Llama-like model that writes a KV cache."""
    return CachedAttention().eval(), (torch.randn(1, 1, 256), torch.tensor([3]))


MODELS = {"bert-base": bert_base, "vit-b16": vit_b16, "resnet152": resnet152}


MUTATION = MODELS | {"llama-cache": llama_cache}


def quiet() -> None:
    """Keep warnings of the models and of torch out of the report."""
    warnings.filterwarnings("ignore")
