"""The tensors of the model as initializers of the file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor

PROTO_LIMIT = 2**31 - 2**27
"""Bytes of weights up to which a file holds them itself: protobuf ends at 2 GiB, and the graph needs room too."""


def onnx_tensor(tensor: torch.Tensor) -> ir.TensorProtocol:
    """A tensor as ONNX holds it, without a copy; complex ones as pairs of real numbers, as torch.onnx has them."""
    tensor = tensor.detach()
    return TorchTensor(torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg())


def attach(graph: ir.Graph, held: Mapping[str, torch.Tensor], state: Iterable[str]) -> None:
    """Give the last inputs of a graph, one for each tensor, their data.

    What the model changes (`state`) stays an input as well, so that its new value can be given back; its data are the
    default. Tensors on the meta device have no data: they stay inputs.
    """
    kept = set(state)
    values = dict(zip(held, graph.inputs[len(graph.inputs) - len(held) :], strict=True))
    for name, value in values.items():
        if held[name].device.type == "meta":
            continue
        value.const_value = onnx_tensor(held[name])
        value.const_value.name = value.name
        if name not in kept:
            graph.inputs.remove(value)
        graph.register_initializer(value)


def save(model: ir.Model, path: str | os.PathLike[str], external_data: bool | None) -> None:
    """Write a model; with `external_data` its weights go to a file beside it. None: where they have to."""
    if external_data is None:
        tensors = [v.const_value for v in model.graph.initializers.values() if v.const_value is not None]
        external_data = sum(t.nbytes for t in tensors) > PROTO_LIMIT
    Path(path).unlink(missing_ok=True)
    ir.save(model, path, external_data=f"{Path(path).name}.data" if external_data else None)
