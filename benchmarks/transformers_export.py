"""Time to export with transformers: our formats beside its own ONNX exporter, in one process.

    python -m benchmarks.transformers_export [--layers 4 16] [--models bert llama]

Processor seconds, the least of `--runs` after one that warms up. Of a decoder, its prefill and its decode program.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from typing import Any

import torch

from scopetrace.cli.targets import declare_missing_ops

FORMATS = ("scopetrace", "scopetrace-onnx", "onnx")


def build(name: str, layers: int) -> tuple[Any, torch.Tensor]:
    """A model with random weights, and token ids of shape (2, 16)."""
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 128}
    config, model = {
        "bert": (transformers.BertConfig, transformers.BertModel),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "gpt-neox": (transformers.GPTNeoXConfig, transformers.GPTNeoXForCausalLM),
    }[name]
    return model(config(**sizes, num_hidden_layers=layers)).eval(), torch.randint(3, 128, (2, 16))


def seconds(export_format: str, model: Any, ids: torch.Tensor) -> float:
    """Of one export with dynamic sizes."""
    from transformers.exporters import AutoHfExporter
    from transformers.exporters.utils import decompose_for_generation

    exporter = AutoHfExporter.from_config({"export_format": export_format})
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    parts = decompose_for_generation(model, inputs) if model.can_generate() else {"model": (model, inputs)}
    start = time.process_time()
    for part, example in parts.values():
        exporter.export(part, copy.deepcopy(example), exporter.config_class(dynamic=True))
    return time.process_time() - start


def main() -> None:
    """Print the seconds of each format, and how many times longer transformers' own takes than ours."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["bert", "llama", "gpt-neox"])
    parser.add_argument("--layers", nargs="+", type=int, default=[4, 16])
    parser.add_argument("--runs", type=int, default=2)
    options = parser.parse_args()
    declare_missing_ops()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    import transformers

    import scopetrace.integrations.transformers  # noqa: F401  # registers the formats

    transformers.logging.set_verbosity_error()

    for name in options.models:
        for layers in options.layers:
            model, ids = build(name, layers)
            best = {
                export_format: min([seconds(export_format, model, ids) for _ in range(1 + options.runs)][1:])
                for export_format in FORMATS
            }
            times = "  ".join(f"{export_format} {best[export_format]:6.2f} s" for export_format in FORMATS)
            print(
                f"{name:10} {layers:3} layers  {times}  ratio {best['onnx'] / best['scopetrace-onnx']:5.1f}", flush=True
            )


if __name__ == "__main__":
    main()
