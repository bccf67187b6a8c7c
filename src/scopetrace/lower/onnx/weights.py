"""Weights of an ONNX model: initializers, inputs, in files beside it, or references to files that are written later.

Data flow:
    tensors of the trace -> initializers (attach); chosen ones stay inputs, and become outputs on request (identity)
    initializers -> the file, files beside it, or references alone (save)
    references of a file and tensors by name -> the files that they name (write_weights)
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor

from scopetrace._compat.onnx import packed_tensor
from scopetrace.errors import OnnxOptionError
from scopetrace.ir.selection import matches, near_text
from scopetrace.lower.onnx import ExternalData, WeightNames

PROTO_LIMIT = 2**31 - 2**27
"""Bytes of weights that fit into the file: protobuf's limit is 2 GiB, of which the graph needs a part."""


_SMALL = 256
"""Tensors of at most this many bytes are in the model, as `onnx_ir.save` has it."""


def onnx_tensor(tensor: torch.Tensor) -> ir.TensorProtocol:
    """A tensor for ONNX, without a copy; complex numbers as pairs of real ones, as in torch.onnx."""
    tensor = tensor.detach()
    if tensor.dtype is torch.float4_e2m1fn_x2:
        return packed_tensor(tensor)
    return TorchTensor(torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg())


def chosen(names: Collection[str], wanted: WeightNames) -> set[str]:
    """Those of the names of tensors that `weight_inputs=` names. Raises OnnxOptionError for a pattern of none."""
    if wanted is True:
        return set(names)
    if callable(wanted):
        return set(filter(wanted, names))
    weights: set[str] = set()
    for pattern in [wanted] if isinstance(wanted, str) else wanted or ():
        if not (matching := [name for name in names if matches(name, pattern)]):
            near = near_text(pattern, names)
            raise OnnxOptionError(f"weight_inputs: {pattern!r} matches no parameter or buffer; {near}")
        weights.update(matching)
    return weights


def attach(graph: ir.Graph, tensors: Mapping[ir.Value, torch.Tensor], stay_inputs: bool) -> None:
    """Make initializers of inputs of a graph.

    What the model changes stays an input as well (`stay_inputs`), so that its new value can be given back; its data are
    the default.
    """
    for value, tensor in tensors.items():
        value.const_value = onnx_tensor(tensor)
        value.const_value.name = value.name
        if not stay_inputs:
            graph.inputs.remove(value)
        graph.register_initializer(value)


def identity(graph: ir.Graph, value: ir.Value, name: str | None = None) -> ir.Value:
    """A new value of a graph that is equal to another one."""
    node = ir.node("Identity", [value], name=name)
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = name, value.type, value.shape
    graph.append(node)
    return node.outputs[0]


def save(
    model: ir.Model, path: str | os.PathLike[str], external_data: ExternalData, left_out: Collection[str] = ()
) -> None:
    """Write a model. `external_data` puts the weights into a file beside it; None does so above PROTO_LIMIT.

    A number is the largest size of such a file, a text the name of a file that models of the folder share. Of
    initializers with the names in `left_out`, only references are written. An earlier model of this path is deleted
    with its files.
    """
    if external_data is None:
        kept = [v.const_value for v in model.graph.initializers.values() if v.name not in left_out]
        external_data = sum(t.nbytes for t in kept if t is not None) > PROTO_LIMIT
    target, limit = Path(path), external_data if type(external_data) is int else None
    ours = re.compile(re.escape(target.stem) + r"(-\d{5}-of-\d{5})?" + re.escape(target.suffix) + r"(\.data)?")
    for old in [p for p in target.parent.iterdir() if ours.fullmatch(p.name) and p.name != external_data]:
        old.unlink()
    if isinstance(external_data, str):
        _save_sharing(model, target, external_data)
    elif left_out:
        _set_references([v for n, v in model.graph.initializers.items() if n in left_out], target, limit)
        ir.save(model, target)
    else:
        name = f"{target.name}.data" if external_data else None
        ir.save(model, target, external_data=name, max_shard_size_bytes=limit)


def _save_sharing(model: ir.Model, path: Path, name: str) -> None:
    """Write a model whose weights are in the file `name`, which has what other models beside it have there once.

    That file grows, and those models stay as they are; it begins anew where none of them reads it.
    """
    values = [v for graph in model.graphs() for v in graph.initializers.values()]
    data: list[tuple[ir.Value, Any]] = [(v, v.const_value) for v in values if v.const_value is not None]
    data = [(v, t) for v, t in data if t.nbytes > _SMALL]
    places = {_digest(t): t.offset for t in _references(path, name)}
    file = path.parent / name
    if not places:
        file.unlink(missing_ok=True)  # whoever has the old file open keeps it
    try:
        with file.open("r+b" if places else "wb") as end:
            end.seek(0, os.SEEK_END)
            for value, t in data:
                if (key := _digest(t)) not in places:
                    places[key] = end.tell()
                    t.tofile(end)
                value.const_value = ir.ExternalTensor(
                    name, places[key], t.nbytes, t.dtype, shape=t.shape, name=str(value.name), base_dir=path.parent
                )
        ir.save(model, path)
    finally:
        for value, t in data:
            value.const_value = t


def _references(path: Path, name: str) -> Iterator[ir.ExternalTensor]:
    """What the ONNX files beside one have in the file of weights with this name."""
    others = [
        p for p in path.parent.iterdir() if p.suffix in (path.suffix, ".onnx") and p.name not in (path.name, name)
    ]
    for other in others:
        if name.encode() in other.read_bytes():
            tensors = [v.const_value for graph in ir.load(other).graphs() for v in graph.initializers.values()]
            yield from (t for t in tensors if isinstance(t, ir.ExternalTensor) and t.location == name)


def _digest(tensor: Any) -> bytes:
    return hashlib.sha256(tensor.tobytes()).digest()


def _set_references(values: Sequence[ir.Value], path: Path, limit: int | None) -> None:
    """Replace the data of initializers by the places in files that they will have."""
    places: list[tuple[ir.Value, int, int]] = []
    number, offset = 1, 0
    for value in values:
        assert value.const_value is not None
        length = value.const_value.nbytes
        if limit is not None and offset and offset + length > limit:
            number, offset = number + 1, 0
        places.append((value, number, offset))
        offset += length
    for value, at, offset in places:
        tensor: Any = value.const_value
        file = f"{path.name}.data" if number == 1 else f"{path.stem}-{at:05d}-of-{number:05d}{path.suffix}.data"
        value.const_value = ir.ExternalTensor(
            file, offset, tensor.nbytes, tensor.dtype, shape=tensor.shape, name=str(value.name), base_dir=path.parent
        )


def write_weights(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor]) -> None:
    """See `write_onnx_weights` of scopetrace. Raises OnnxOptionError also for files that other models share."""
    values = ir.load(path).graph.initializers.values()
    references = [v.const_value for v in values if isinstance(v.const_value, ir.ExternalTensor)]
    missing = [str(r.name) for r in references if r.name not in tensors]
    if missing:
        raise OnnxOptionError(f"{os.fspath(path)} needs {missing[0]!r} and {len(missing) - 1} more tensors: give all")
    folder = Path(path).parent
    with contextlib.ExitStack() as stack:
        new = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        files: dict[str, BinaryIO] = {}
        for reference in references:
            place = Path(reference.location).name
            if place not in files:
                if next(_references(Path(path), place), None) is not None:
                    raise OnnxOptionError(f"{place} has weights of other models, too: write this one with to_onnx anew")
                files[place] = stack.enter_context((new / place).open("wb"))
            tensor: Any = onnx_tensor(tensors[str(reference.name)])
            now, was = (f"{t.dtype}{list(t.shape)}" for t in (tensor, reference))
            if now != was:
                raise OnnxOptionError(f"{reference.name} is {now}, and the file has {was}")
            files[place].seek(reference.offset or 0)
            tensor.tofile(files[place])
        for name, file in files.items():
            file.close()
            (new / name).replace(folder / name)
