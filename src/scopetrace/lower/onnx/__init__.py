"""ONNX models of traces, in which chosen module calls are calls of ONNX functions.

Data flow:
    outlined trace -> pieces: the main program and each body, cut open at calls, side by side in one graph
    the graph -> one `torch.onnx.export`, optimizer included
    the ONNX graph -> pieces again: bodies as functions, the main program with call nodes and weights
"""

from __future__ import annotations

import importlib.util

from scopetrace.errors import OnnxDependencyError

_PACKAGES = ("onnx", "onnx_ir", "onnxscript", "onnxruntime")


def require_packages() -> None:
    """Raise OnnxDependencyError, naming the extra, where a package is missing."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise OnnxDependencyError(f"ONNX export needs {', '.join(missing)}: pip install 'scopetrace[onnx]'")
