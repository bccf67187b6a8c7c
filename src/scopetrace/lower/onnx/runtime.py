"""ONNX Runtime with torch tensors."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime
import torch
import torch.utils.dlpack
from onnx_ir import tensor_adapters

from scopetrace.errors import OnnxVerificationError


class Session:
    """A file that runs on the CPU."""

    def __init__(self, path: Path, optimized: bool = True) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        if not optimized:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's own classes are not public
            raise _refused(error) from error

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs for the inputs in order."""
        names = [i.name for i in self._session.get_inputs()]
        feed = {name: _to_runtime(t) for name, t in zip(names, tensors, strict=True)}
        try:
            found = self._session.run_with_ort_values(None, feed)
        except Exception as error:
            raise _refused(error) from error
        return [_from_runtime(value) for value in found]


def _refused(error: Exception) -> OnnxVerificationError:
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    instead = "; it has no kernel for this on the CPU: verify a float32 copy of the model" if _NO_KERNEL in said else ""
    return OnnxVerificationError(f"ONNX Runtime: {said}{instead}")


_NO_KERNEL = "NOT_IMPLEMENTED"


def _to_runtime(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().cpu()
    tensor = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous()
    dtype = int(tensor_adapters.from_torch_dtype(tensor.dtype))
    if tensor.dtype is torch.bfloat16:  # numpy does not have it
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(tensor.view(torch.uint16).numpy(), dtype)
    return onnxruntime.OrtValue.ortvalue_from_numpy(tensor.numpy())


def _from_runtime(value: Any) -> torch.Tensor:
    if value.data_type() == "tensor(bfloat16)":
        return torch.utils.dlpack.from_dlpack(value._ortvalue.to_dlpack())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the array is not writable
        return torch.from_numpy(value.numpy()).clone()
