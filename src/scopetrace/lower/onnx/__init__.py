"""ONNX models of traces, in which chosen module calls are calls of ONNX functions.

Data flow:
    outlined program -> CombinedGraph: main program and function bodies in one graph, cut at every call (combine)
    that graph -> one `torch.onnx.export`, its optimizer included (translate)
    the ONNX graph -> cut apart again: bodies as functions, the main program with call nodes and weights (assemble)
    the model -> checked, and run in ONNX Runtime beside the traced model (verify)
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from scopetrace._compat.ops import OpOverload
from scopetrace.errors import OnnxDependencyError
from scopetrace.program.outlined import OutlineTarget
from scopetrace.program.traced import ModuleCall

_Named = OutlineTarget | OpOverload

Targets = _Named | Sequence[_Named] | Set[_Named] | Mapping[Any, str]
"""Targets of `Trace.outline` or ops (one, or several in a list, tuple or set), a dict from classes, modules, patterns,
predicates or ops to `"domain::Name"`, or False for none."""

Names = Sequence[str] | Mapping[str, str] | Callable[[str], str]
"""Names for the first inputs or outputs in order, by the names that they have else, or made of these."""

Table = Mapping[Any, Callable[..., Any]]
"""By op, its ONNX form, as for torch.onnx.export."""

CallAttributes = bool | Sequence[str] | Callable[[ModuleCall], Mapping[str, Any]]
"""Names of plain attributes of modules, True for all, or a function from a module call to attributes of its node."""

WeightNames = bool | str | Sequence[str] | Callable[[str], bool]
"""Parameters and buffers by patterns of names (`"**lora**"`), a predicate on names, or True for all."""

ExternalData = bool | int | str | None
"""Whether the weights are in a file beside the model; the largest size of such files; or the name of one to share."""

_PACKAGES = ("onnx", "onnx_ir", "onnxscript", "onnxruntime")


def require_packages() -> None:
    """Raise OnnxDependencyError, naming the extra, where a package is missing."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise OnnxDependencyError(f"ONNX export needs {', '.join(missing)}: pip install 'scopetrace[onnx]'")
