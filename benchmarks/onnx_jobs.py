"""Jobs of `benchmarks.bench_jobs` about ONNX models."""

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import models

Result = dict[str, Any]


def onnx_export(runner: str, layers: int, rounds: int) -> Result:
    """CPU seconds from the model to the ONNX model, best of `rounds` after a warm-up, and its nodes."""
    run, (net, args) = _runners(models.import_scopetrace())[runner], models.small_llama(layers)
    found = []
    with torch.no_grad():
        run(*models.small_llama(2))
        for _ in range(rounds):
            start = time.process_time()
            made = run(net, args)
            found.append(time.process_time() - start)
    return {"seconds": min(found), "nodes": len(made.graph)}


def _runners(st: Any) -> dict[str, Callable[[Any, Any], Any]]:
    from onnx_ir.passes.common import InlinePass

    def to_onnx(functions: Any) -> Callable[[Any, Any], Any]:
        return lambda net, args: st.trace(net, args).to_onnx(functions=functions)

    def inlined(net: Any, args: Any) -> Any:
        return InlinePass()(st.trace(net, args).to_onnx(functions="layers")).model

    def theirs(net: Any, args: Any) -> Any:
        return torch.onnx.export(net, args, dynamo=True, verbose=False).model  # type: ignore[union-attr]

    return {
        "to_onnx, functions": to_onnx("layers"),
        "to_onnx, functions, inlined": inlined,
        "to_onnx, flat": to_onnx(()),
        "torch.onnx.export": theirs,
    }
