"""Formats "scopetrace" and "scopetrace-onnx" of `transformers.exporters`; importing this module registers them.

Data flow:
    model + inputs -> prepared and patched as transformers does for torch.export -> st.trace -> a Trace -> TraceRunner
    a Trace -> ONNX model with one function for each layer, inputs and outputs named by their paths -> TraceOnnxRunner
"""

from __future__ import annotations

import copy
import types
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.exporters import ExportConfigMixin, ExportMetadata, HfExporter, OnnxExporter, register_backend
from transformers.exporters.exporter_dynamo import (
    get_auto_dynamic_shapes,
    patch_model_config,
    register_cache_pytrees_for_model,
    reset_model_state,
)
from transformers.exporters.metadata import build_export_metadata, record_output_structure
from transformers.exporters.runners import ModelRunner
from transformers.exporters.runners.runner_onnx import OnnxModelRunner
from transformers.exporters.utils import apply_patches, disambiguate_io_names, get_leaf_tensors, prepare_for_export

import scopetrace as st

WEIGHTS = "weights.data"
"""The file that all components of one export have their weights in."""

NUMBER = "number_"
"""Names a result that is a number: as in transformers' other formats, it is that of the example, and no output."""


@dataclass
class ScopetraceConfig(ExportConfigMixin):
    """How to trace a model.

    Attributes:
        dynamic: whether each size that the model does not fix may differ from call to call.
        dynamic_shapes: which ones may, by input, in torch.export's forms, in place of `dynamic`.
    """

    export_format: str = "scopetrace"
    dynamic: bool = False
    dynamic_shapes: dict[str, Any] | None = None
    quantizer: None = None


@dataclass
class ScopetraceOnnxConfig(ScopetraceConfig):
    """How to trace a model and write it as ONNX; see `Trace.to_onnx`.

    Attributes:
        functions: the layers that are ONNX functions.
        opset_version: that of ONNX.
        optimize: whether torch.onnx optimizes.
    """

    export_format: str = "scopetrace-onnx"
    functions: Any = "layers"
    opset_version: int | None = None
    optimize: bool = True


class ScopetraceExporter(HfExporter):
    """Exports a model as a `Trace`, which knows its modules and shares the model's weights."""

    export_format = "scopetrace"
    config_class = ScopetraceConfig
    program_suffix = ".trace"
    required_packages: tuple[str, ...] = ("torch",)

    def export_program(
        self, model: torch.nn.Module, sample_inputs: MutableMapping[str, Any], config: ScopetraceConfig
    ) -> tuple[Any, ExportMetadata]:
        """The trace of one forward. Raises as `st.trace`, and ArgumentError for a quantizer."""
        traced, metadata, _ = self._trace(model, sample_inputs, config)
        return traced, metadata

    def _trace(
        self, model: torch.nn.Module, sample_inputs: MutableMapping[str, Any], config: ScopetraceConfig
    ) -> tuple[st.Trace, ExportMetadata, tuple[list[str], list[str]]]:
        """The trace, what transformers records of it, and the names of its inputs and outputs."""
        if config.quantizer is not None:
            raise st.ArgumentError(
                f"{self.export_format} takes no quantizer: quantize the model, or what it is exported to"
            )
        model, sample_inputs, flags = prepare_for_export(model, sample_inputs)
        inputs, shapes = _uncounted(copy.deepcopy(dict(sample_inputs))), config.dynamic_shapes
        if config.dynamic and shapes is None:
            shapes = get_auto_dynamic_shapes(inputs)
        register_cache_pytrees_for_model(model)
        patches = apply_patches("dynamo"), reset_model_state(model), patch_model_config(model, flags)
        with torch.no_grad(), patches[0], patches[1], patches[2]:
            traced = st.trace(model, (), inputs, dynamic_shapes=shapes).without_model()
        results = traced.calls[0].map_outputs(lambda node: node.meta["val"])
        outputs = pytree.tree_map_only(torch.SymInt, lambda n: n.node.hint, results)
        in_spec, out_spec = map(pytree.tree_structure, (((), inputs), outputs))
        exported = types.SimpleNamespace(call_spec=types.SimpleNamespace(in_spec=in_spec, out_spec=out_spec))
        metadata = build_export_metadata(model, inputs, exported, self.required_packages)
        record_output_structure(metadata, outputs)
        paths, leaves = iter(get_leaf_tensors(outputs)), pytree.tree_leaves(results)
        returned = [x for x in leaves if isinstance(x, torch.Tensor | torch.SymInt)]
        named = [next(paths) if isinstance(x, torch.Tensor) else f"{NUMBER}{i}" for i, x in enumerate(returned)]
        return traced, metadata, disambiguate_io_names([*get_leaf_tensors(inputs)], named)

    @classmethod
    def save_program(cls, program: Any, path: str | Path) -> None:
        """Write the trace; what components have in common is in their file of weights once."""
        program.save(path, external_data=WEIGHTS)

    @classmethod
    def program_files(cls, filename: str) -> list[str]:
        """The program, and the weights of all of them."""
        return [filename, WEIGHTS]

    @classmethod
    def load_program(cls, path: str | Path) -> Any:
        """Read a trace; see `st.load`."""
        return st.load(path)


def _uncounted(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs, with no count in layers of caches that keep a window: patched, these keep all keys and count none."""
    caches = [part for x in inputs.values() for part in (x, getattr(x, "self_attention_cache", None))]
    for layer in (layer for cache in caches for layer in getattr(cache, "layers", ())):
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = 0
    return inputs


class ScopetraceOnnxExporter(ScopetraceExporter):
    """Exports a model as ONNX with one function for each layer; all components have one file of weights."""

    export_format = "scopetrace-onnx"
    config_class = ScopetraceOnnxConfig
    program_suffix = ".onnx"
    required_packages = ("torch", "onnx", "onnx_ir", "onnxscript", "onnxruntime")

    def export_program(
        self, model: torch.nn.Module, sample_inputs: MutableMapping[str, Any], config: ScopetraceConfig
    ) -> tuple[Any, ExportMetadata]:
        """The ONNX model of one forward. Raises as the trace of it, and as `Trace.to_onnx`."""
        assert isinstance(config, ScopetraceOnnxConfig)
        traced, metadata, (inputs, outputs) = self._trace(model, sample_inputs, config)
        program = traced.to_onnx(
            functions=config.functions,
            opset_version=config.opset_version,
            optimize=config.optimize,
            input_names=inputs,
            output_names=outputs,
        )
        for value in [v for v in program.graph.outputs if str(v.name).startswith(NUMBER)]:
            program.graph.outputs.remove(value)
        return program, metadata

    @classmethod
    def save_program(cls, program: Any, path: str | Path) -> None:
        """Write the model; what components have in common is in their file of weights once."""
        st.save_onnx(program, path, external_data=WEIGHTS)

    @classmethod
    def load_program(cls, path: str | Path) -> Any:
        """Read a model, its weights left in their file."""
        return OnnxExporter.load_program(path)


class TraceRunner(ModelRunner):
    """Calls a trace."""

    def __init__(self, program: st.Trace, metadata: ExportMetadata) -> None:
        super().__init__(metadata)
        self.program = program

    @property
    def device(self) -> torch.device:
        """That of the trace."""
        return torch.device(self.metadata.export_device)

    @classmethod
    def from_program(cls, program: st.Trace, metadata: ExportMetadata, device: Any = None) -> TraceRunner:
        """A runner on the device of the trace. Raises ArgumentError for another one."""
        if device is not None and torch.device(device) != torch.device(metadata.export_device):
            raise st.ArgumentError(f"traced on {metadata.export_device}, not {device}: export the model on that device")
        return cls(program, metadata)

    @torch.no_grad()
    def __call__(self, share_inputs: bool = True, share_outputs: bool = False, **kwargs: Any) -> Any:
        """What the model returns. Raises as a call of a Trace."""
        return self.program(**_uncounted({**self.metadata.in_constants, **kwargs}))


class TraceOnnxRunner(OnnxModelRunner):
    """Runs the model in ONNX Runtime."""

    def unflatten(self, outputs: list[torch.Tensor]) -> Any:
        """The model's results, which come first; new values of changed inputs that it does not return come after."""
        return super().unflatten(outputs[: self.out_spec.num_leaves - len(self.out_constants)])


register_backend(ScopetraceExporter, TraceRunner)
register_backend(ScopetraceOnnxExporter, TraceOnnxRunner)
