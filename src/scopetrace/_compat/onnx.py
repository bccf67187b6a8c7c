"""What of torch.onnx's exporter has no public name: which ops it knows, and which node an error is about."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch.fx
from torch.onnx._internal.exporter import _constants, _core, _dispatching, _registration


def untranslatable(program: torch.export.ExportedProgram, opset_version: int | None, table: Mapping[Any, Any]) -> Any:
    """The nodes of a program, decomposed as torch.onnx does, whose ops it has no form for.

    Raises what decomposing raises.
    """
    version = max(opset_version or _constants.TORCHLIB_OPSET, _constants.TORCHLIB_OPSET)
    registry = _registration.ONNXRegistry.from_torchlib(opset_version=version)
    for op, form in table.items():
        registry.register_op(op, form, is_complex=False)
    decomposed = _core._prepare_exported_program_for_export(program, registry=registry)
    calls = [n for n in decomposed.graph.nodes if n.op in ("call_function", "call_module")]
    return [n for n in calls if _has_no_form(n, registry)]


def _has_no_form(node: torch.fx.Node, registry: Any) -> bool:
    if node.op == "call_module":
        return True
    if getattr(node.target, "__name__", "") == "getitem" or _core._is_onnx_op(node.target):
        return False
    return _dispatching.dispatch(node, registry)[0] is None


def node_in_error(causes: Sequence[BaseException]) -> str | None:
    """The name of the node that torch.onnx could not translate."""
    for error in causes:
        found = re.search(r"Error when translating node %(\w+)", str(error))
        if found:
            return found[1]
    return None
