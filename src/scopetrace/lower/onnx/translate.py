"""The combined graph through one `torch.onnx.export`, with torch's op library and optimizer.

Data flow:
    graph of fake tensors -> ExportedProgram whose placeholders and outputs are all user inputs and outputs
    -> torch.onnx.export -> ONNX model, or one error that lists every op without an ONNX form
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import onnx_ir as ir
import torch
import torch.fx
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, OutputKind, OutputSpec
from torch.utils import _pytree as pytree

from scopetrace._compat.onnx import (
    decomposed,
    misread_ops,
    node_in_error,
    onnx_type,
    op_library_read_once,
    without_misread,
)
from scopetrace._compat.onnx import optimize as run_optimizer
from scopetrace._compat.symbols import to_expr
from scopetrace.errors import OnnxExportError, OnnxOpError, OnnxOptionError
from scopetrace.ir.scopes import source_of
from scopetrace.lower.exported.calls import argument_of
from scopetrace.lower.onnx import Table
from scopetrace.lower.onnx.forms import OpFunctions, forms
from scopetrace.program.graph import node_value, scope_path

_aten = torch.ops.aten
_ANTIALIASED = (_aten._upsample_bilinear2d_aa.vec, _aten._upsample_bicubic2d_aa.vec)
_SUMS = (_aten.sum.default, _aten.sum.dim_IntList, _aten.prod.default, _aten.prod.dim_int)


def translate(
    root: torch.nn.Module, graph: torch.fx.Graph, opset_version: int | None, optimize: bool, ops: OpFunctions
) -> torch.onnx.ONNXProgram:
    """The ONNX model of a graph with fake values in `meta["val"]`, and the decomposed program that it was made from.

    Raises OnnxOpError with all ops that have no ONNX form, OnnxExportError where torch.onnx fails otherwise.
    """
    misread = misread_ops(graph)
    _prepare(graph)
    results: Any = graph.output_node().args[0]
    dtypes = [ir.DataType(onnx_type(v)[0]) if isinstance(v := node_value(n), torch.Tensor) else None for n in results]
    program, table = _exported_program(root, graph), {**forms(), **ops.table}
    inputs = [v for n in graph.find_nodes(op="placeholder") if isinstance(v := node_value(n), torch.Tensor)]
    sizes = [to_expr(v.size()) for v in inputs]
    try:
        with op_library_read_once(), quiet():
            result = torch.onnx.export(
                without_misread(program, misread),
                verbose=False,
                optimize=False,
                opset_version=opset_version,
                custom_translation_table=table,
            )
            assert result is not None
            ops.finish(result.model)
            if optimize:
                run_optimizer(result.model, ())
    except torch.onnx.errors.OnnxExporterError as error:
        raise _explained(error, program, opset_version, table) from error
    if (fixed := [to_expr(v.size()) for v in inputs]) != sizes:
        was, becomes = next(pair for pair in zip(sizes, fixed, strict=True) if pair[0] != pair[1])
        raise OnnxExportError(
            f"torch.onnx makes ops for the sizes of the example: its input of {was} became one of {becomes}",
            hint="trace without dynamic_shapes for it; of recurrent layers, nn.LSTM and nn.GRU take any length",
        )
    for node, dtype, value in zip(results, dtypes, result.model.graph.outputs, strict=True):
        if dtype is not None and value.dtype is not None and value.dtype != dtype:
            raise refusal(
                f"torch.onnx gives {value.dtype} for {dtype} of the model",
                node,
                "cast what this op takes to float32 in the model, and its result back; or give its form in "
                "custom_translation_table=",
            )
    version = result.model.opset_imports.get("")
    if opset_version is not None and version not in (None, opset_version):
        raise OnnxOptionError(f"torch.onnx has no opset {opset_version} for this model: write opset_version={version}")
    return result


def _prepare(graph: torch.fx.Graph) -> None:
    """Rewrite what torch.onnx translates to another dtype, or has no form for."""
    for node in list(graph.nodes):
        if node.target in _SUMS and node_value(node).dtype in (torch.float16, torch.bfloat16):
            # It computes them in float32, as torch does, and leaves the result there.
            node.kwargs = {**node.kwargs, "dtype": torch.float32}
            with graph.inserting_after(node):
                cast = graph.call_function(_aten._to_copy.default, (node,), {"dtype": node_value(node).dtype})
            cast.meta = dict(node.meta)
            node.replace_all_uses_with(cast, delete_user_cb=lambda user, cast=cast: user is not cast)
        elif node.target in _ANTIALIASED:
            x, _, align_corners, factors = node.args
            lengths = [n * factor for n, factor in zip(node_value(x).shape[2:], factors or (), strict=False)]
            if align_corners or any(n % 1 for n in lengths):
                problem = "torch.onnx scales with antialias=True by the ratio of the sizes"
                raise refusal(problem, node, "give size= in place of scale_factor=, and no align_corners=True")
        elif node.target is _aten.detach.default and node_value(node).is_complex():
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _exported_program(root: torch.nn.Module, graph: torch.fx.Graph) -> ExportedProgram:
    """With all placeholders and outputs as user inputs and outputs, and without values: torch computes them again."""
    outputs: Any = graph.output_node().args[0]
    ins, outs = [argument_of(n) for n in graph.find_nodes(op="placeholder")], [argument_of(n) for n in outputs]
    for node in graph.nodes:
        if node.op != "placeholder":
            node.meta |= {"val": None, "unbacked_bindings": {}}  # torch has its own symbols
            node.meta = {"nn_module_stack": {}, "stack_trace": "", **node.meta}
    signature = ExportGraphSignature(
        [InputSpec(InputKind.USER_INPUT, a, None) for a in ins],
        [OutputSpec(OutputKind.USER_OUTPUT, a, None) for a in outs],
    )
    in_spec = pytree.tree_structure(((0,) * len(ins), {}))
    call = ModuleCallSignature([], [], in_spec, pytree.tree_structure((0,) * len(outs)))
    return ExportedProgram(root, graph, signature, {}, {}, [ModuleCallEntry("", call)])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress log messages and warnings of the ONNX packages: they speak of graphs that users do not see."""
    loggers = [logging.getLogger(name) for name in ("onnx_ir", "onnxscript", "torch.onnx", "torch.utils._sympy")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _explained(error: Exception, program: ExportedProgram, opset_version: int | None, table: Table) -> Exception:
    causes: list[BaseException] = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    name = node_in_error(causes)
    ops: list[torch.fx.Node] = list(program.graph.nodes)
    missing: list[torch.fx.Node] = []
    if name is not None:
        with contextlib.suppress(Exception):  # what torch raises where sizes depend on data
            ops, missing = decomposed(program, opset_version, table)
    if missing:
        return without_form(missing)
    said = (str(causes[-1]).strip().splitlines() or [type(causes[-1]).__name__])[0]
    text = str(causes[-1])  # which may quote a source line; several ops may have the same
    quoted = (n for n in ops if name is None and (source := (n.stack_trace or "").strip()) and source in text)
    node = next((n for n in ops if n.name == name), None) or next(quoted, None)
    problem = f"torch.onnx failed{f' at {name}' if name else ''}: {type(causes[-1]).__name__}: {said}"
    if node is None:
        return OnnxExportError(problem)
    hint = None
    if any(isinstance(a, torch.fx.Node) for key, a in node.kwargs.items() if key in ("value", "alpha")):
        hint = "its number is a tensor here, as in the step of an optimizer: export `tr.decompose()`"
    return refusal(problem, node, hint)


def without_form(nodes: Iterable[torch.fx.Node]) -> OnnxOpError:
    """The error for nodes whose ops have no ONNX form."""
    return OnnxOpError(list(dict.fromkeys((_op(n), scope_path(n), source_of(n.stack_trace or ())) for n in nodes)))


def refusal(problem: str, node: torch.fx.Node, hint: str | None) -> OnnxExportError:
    """The error for what a node of a program says."""
    source = source_of(node.stack_trace or ())
    return OnnxExportError(problem, op=_op(node), module=scope_path(node), source=source, hint=hint)


def _op(node: torch.fx.Node) -> str:
    """The op that the model called, before torch.onnx decomposed it."""
    return str(node.meta.get("original_aten", node.target))
