"""Internals of torch.onnx's exporter: which ops it can translate, which node an error is about, its rewrite rules."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch.fx
from onnxscript import rewriter
from onnxscript.rewriter import pattern
from onnxscript.rewriter.rules.common import _no_op
from torch._decomp import get_decompositions
from torch.onnx._internal.exporter import _constants, _core, _dispatching, _registration

from scopetrace._compat import manifest

manifest.require(list(manifest.missing(manifest.ONNX)))

_one_at_a_time = threading.RLock()
_read_op_library = functools.cache(lambda: _registration.onnxscript_apis.get_torchlib_ops())  # type: ignore[attr-defined]


@contextlib.contextmanager
def op_library_read_once() -> Iterator[None]:
    """Exports inside use a cached copy of onnxscript's op library; one thread at a time.

    torch reads the library for each export, and onnxscript then parses the source of its 500 functions, which takes up
    to a second. They ship with onnxscript and do not change.
    """
    with _one_at_a_time:
        library = _read_op_library()
        apis = _registration.onnxscript_apis  # type: ignore[attr-defined]
        with mock.patch.object(apis, "get_torchlib_ops", lambda: library):
            yield


def with_batch_statistics(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Decompose batch norm in training mode, which torch.onnx would translate as if in eval mode."""
    norm = torch.ops.aten._native_batch_norm_legit_functional.default
    if not any(node.target is norm and node.args[5] for node in program.graph.nodes):
        return program
    return program.run_decompositions(get_decompositions([norm]))


def decomposed(
    program: torch.export.ExportedProgram, opset_version: int | None, table: Mapping[Any, Any]
) -> tuple[list[torch.fx.Node], list[torch.fx.Node]]:
    """The call nodes of a program after torch.onnx's decompositions, and those of them that it cannot translate.

    Raises what a decomposition raises.
    """
    version = max(opset_version or _constants.TORCHLIB_OPSET, _constants.TORCHLIB_OPSET)
    registry = _registration.ONNXRegistry.from_torchlib(opset_version=version)
    for op, form in table.items():
        registry.register_op(op, form, is_complex=False)
    found = _core._prepare_exported_program_for_export(program, registry=registry)
    calls = [n for n in found.graph.nodes if n.op == "call_function"]
    return calls, [n for n in calls if _is_untranslatable(n, registry)]


def _is_untranslatable(node: torch.fx.Node, registry: Any) -> bool:
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


def optimize(program: torch.onnx.ONNXProgram) -> None:
    """Run torch.onnx's optimizer with exact constants: its own rules take 1e-8, say an `eps`, for 0."""
    others = [rule for rule in rewriter._DEFAULT_REWRITE_RULES if rule not in _no_op.rules.rules]
    with mock.patch.object(rewriter, "_DEFAULT_REWRITE_RULES", (*_exact_rules(), *others)):
        program.optimize()


def _exact_rules() -> list[Any]:
    """The rules that remove `x + 0`, `x - 0`, `x * 1`, `x / 1` and dropout."""
    zero, one = (pattern.Constant(number, rel_tol=0, abs_tol=0) for number in (0, 1))
    add, mul = (lambda op, x: x + zero), (lambda op, x: x * one)
    sub, div = (lambda op, x: x - zero), (lambda op, x: x / one)
    both = [rule for fn in (add, mul) for rule in pattern.RewriteRule(fn, _no_op.identity).commute()]
    one_way = [pattern.RewriteRule(fn, _no_op.identity) for fn in (sub, div)]
    return [*both, *one_way, _no_op.dropout_zero_rule, _no_op.dropout_inference_rule]
