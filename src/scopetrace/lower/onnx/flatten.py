"""A flat model from one in which repeated layers are functions.

Data flow:
    the model is outlined by its layers, so that each distinct one is translated and optimized once (export)
    -> weights as initializers, functions inlined -> the optimizer again, which folds what depends on weights alone
    -> nodes named after the call that they came from
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch
from onnx_ir.passes import common

from scopetrace._compat.onnx import optimize
from scopetrace.errors import OutlineError
from scopetrace.lower.onnx.assemble import Assembler
from scopetrace.lower.onnx.translate import quiet
from scopetrace.lower.onnx.weights import attach
from scopetrace.program.outlined import OUTERMOST, OutlinedTrace, outline_calls
from scopetrace.program.traced import TracedProgram


def outlined_layers(program: TracedProgram) -> OutlinedTrace | None:
    """The program with its repeated layers as functions; None where it has none."""
    try:
        outlined = outline_calls(program, [OUTERMOST])
    except OutlineError:
        return None
    return outlined if outlined.functions else None


def flatten(
    model: ir.Model,
    assembler: Assembler,
    weights: dict[ir.Value, torch.Tensor],
    optimized: bool,
    outputs: Sequence[str],
) -> None:
    """Inline the functions of a model, make initializers of the weights, and optimize on request."""
    attach(model.graph, weights, stay_inputs=False)
    names = set(model.graph.initializers)
    with quiet():
        common.InlinePass()(model)
        common.RemoveUnusedOpsetsPass()(model)
        if optimized:
            optimize(model, names)
    assembler.labels.write(assembler.combined.main, model.graph)
    assembler.labels.name_values(model.graph, [str(v.name) for v in model.graph.inputs], outputs, names)
