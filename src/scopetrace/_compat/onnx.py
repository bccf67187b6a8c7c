"""Internals of torch.onnx's exporter: which ops it can translate, which node an error is about, its rewrite rules."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import onnx_ir as ir
import torch.fx
from onnx_ir.passes import common
from onnxscript import optimizer, rewriter
from onnxscript.rewriter import onnx_fusions, pattern
from onnxscript.rewriter._matcher import SimplePatternMatcher
from onnxscript.rewriter.rules.common import _no_op
from onnxscript.rewriter.rules.common._redundant_scatter_nd import no_op_static_scatter_nd_rule
from torch._decomp import decomposition_table, get_decompositions
from torch._export.utils import _collect_all_valid_cia_ops
from torch.export import decomp_utils, exported_program
from torch.onnx._internal.exporter import _constants, _core, _dispatching, _registration
from torch.onnx._internal.exporter._torchlib.ops.hop import call_op as call_op

from scopetrace._compat.decompositions import FUSED, core_aten
from scopetrace._compat.ops import one_at_a_time
from scopetrace.errors import OnnxExportError

_registry = functools.cache(_registration.ONNXRegistry.from_torchlib)


def _copy_of_registry(opset_version: int = _constants.TORCHLIB_OPSET) -> Any:
    registry = copy.copy(_registry(opset_version))
    registry.functions = {op: list(forms) for op, forms in registry.functions.items()}
    return registry


@functools.lru_cache(maxsize=1)
def _composite_ops(registered: tuple[str, ...]) -> Any:
    return _collect_all_valid_cia_ops()


@contextlib.contextmanager
def op_library_read_once() -> Iterator[None]:
    """Exports inside take onnxscript's op library and torch's list of composite ops from a cache; one thread at a time.

    torch makes both for each export, and onnxscript parses the source of its 500 functions, which takes up to a second.
    The library ships with onnxscript and does not change; the list does where ops are registered.
    """
    with one_at_a_time:
        registered = tuple(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))
        known = _composite_ops(registered)
        with (
            mock.patch.object(_registration.ONNXRegistry, "from_torchlib", staticmethod(_copy_of_registry)),
            mock.patch.object(decomp_utils, "_collect_all_valid_cia_ops", lambda: known),
            mock.patch.object(exported_program, "_collect_all_valid_cia_ops", lambda: known),
            _any_length(),
        ):
            yield


@contextlib.contextmanager
def _any_length() -> Iterator[None]:
    """Inside, torch takes the op of nn.LSTM or nn.GRU for any length; else it makes ops of each step of the example."""
    core_aten()  # which keeps torch's own
    with contextlib.ExitStack() as stack:
        for op in (torch.ops.aten.lstm.input, torch.ops.aten.gru.input):
            stack.callback(op._dispatch_cache.clear)
            for table, keys in (decomposition_table, [op]), (op.py_kernels, [*op.py_kernels]):
                stack.enter_context(mock.patch.dict(table, dict.fromkeys(keys, _steps)))
            op._dispatch_cache.clear()
        yield


def _steps(x: torch.Tensor, hx: Any, weights: Any, *options: Any) -> tuple[torch.Tensor, ...]:
    """Results of a recurrent layer without values."""
    states = hx if isinstance(hx, list) else [hx]
    steps = x.new_empty((*x.shape[:2], states[0].shape[-1] * (1 + options[-2])))
    return steps, *(state.new_empty(state.shape) for state in states)


def onnx_type(tensor: torch.Tensor) -> tuple[int, list[Any]]:
    """The ONNX dtype of a tensor, as a number, and its sizes there, where complex numbers are pairs."""
    dtype, sizes = tensor.dtype.to_real(), [*tensor.shape, 2] if tensor.is_complex() else [*tensor.shape]
    if dtype is torch.float4_e2m1fn_x2:
        sizes[-1] *= 2
    return int(_core.torch_dtype_to_onnx_dtype(dtype)), sizes


packed_tensor: Callable[[torch.Tensor], ir.TensorProtocol] = _core.TorchTensor
"""An ONNX tensor of a dtype that packs two numbers into a byte, which onnx_ir's own adapter does not take."""


def misread_ops(graph: torch.fx.Graph) -> list[Any]:
    """The ops of a graph that torch.onnx would translate without one of their arguments, or not at all."""
    return [n.target for n in graph.nodes if n.target in _MISREAD and _MISREAD[n.target](n)]


def without_misread(program: torch.export.ExportedProgram, ops: list[Any]) -> torch.export.ExportedProgram:
    """The program with these ops decomposed."""
    rules = {op: rule for op, rule in core_aten().items() if op in ops}
    return program.run_decompositions({**rules, **get_decompositions(ops)}) if ops else program


def _is_smoothed(node: torch.fx.Node) -> bool:
    """Whether a cross entropy smooths its labels, or has probabilities in their place."""
    smoothing = node.kwargs.get("label_smoothing", node.args[5] if len(node.args) > 5 else 0)
    target: Any = node.args[1]
    return bool(smoothing != 0 or target.meta["val"].is_floating_point())


_MISREAD: dict[Any, Callable[[torch.fx.Node], Any]] = {
    torch.ops.aten._native_batch_norm_legit_functional.default: lambda node: node.args[5],  # as if in eval mode
    torch.ops.aten.cross_entropy_loss.default: _is_smoothed,
    # with no dimension for heads or batches: torch.onnx takes tensors with both
    torch.ops.aten.scaled_dot_product_attention.default: lambda node: any(
        n.meta["val"].dim() != 4 for n in node.args[:3] if isinstance(n, torch.fx.Node)
    ),
    FUSED: lambda node: True,
}


def decomposed(
    program: torch.export.ExportedProgram, opset_version: int | None, table: Mapping[Any, Any]
) -> tuple[list[torch.fx.Node], list[torch.fx.Node]]:
    """The call nodes of a program after torch.onnx's decompositions, and those of them that it cannot translate.

    Raises what a decomposition raises.
    """
    version = max(opset_version or _constants.TORCHLIB_OPSET, _constants.TORCHLIB_OPSET)
    registry = _copy_of_registry(version)
    for op, form in table.items():
        registry.register_op(op, form, is_complex=False)
    prepared = _core._prepare_exported_program_for_export(program, registry=registry)
    calls = [n for n in prepared.graph.nodes if n.op == "call_function"]
    others = [n for n in calls if n.target is not operator.getitem and not _core._is_onnx_op(n.target)]
    return calls, [n for n in others if _dispatching.dispatch(n, registry)[0] is None]


def node_in_error(causes: Sequence[BaseException]) -> str | None:
    """The name of the node that torch.onnx could not translate."""
    matches = [re.search(r"Error when translating node %(\w+)", str(error)) for error in causes]
    return next((match[1] for match in matches if match), None)


class RulesByOp(pattern.RewriteRule):
    """Rules as one, which tries those whose pattern ends in the op of the node; onnxscript tries all at every node."""

    def __init__(self, rules: Sequence[pattern.RewriteRule]) -> None:
        self.__dict__.update(rules[0].__dict__)
        self._rules: dict[str, list[pattern.RewriteRule]] = {}
        for rule in rules:
            if not rule._target_pattern.has_single_output_node:  # SlicesSplit
                rule._matcher = SiblingMatcher(rule._target_pattern)
            self._rules.setdefault(rule._target_pattern.output_nodes[0].op_type, []).append(rule)

    def try_rewrite(self, model: ir.Model, graph_or_function: Any, node: ir.Node, **options: Any) -> Any:
        """Try the rules of the op of `node`."""
        for rule in self._rules.get(node.op_type, ()):
            replacement = rule.try_rewrite(model, graph_or_function, node, **options)
            if replacement is not None:
                self.name, self.remove_nodes = rule.name, rule.remove_nodes  # the caller reads them
                return replacement
        return None


class SiblingMatcher(SimplePatternMatcher):
    """Matches patterns of several nodes that read one tensor, looking only at what reads the inputs of the first one.

    onnxscript's own matcher lists all nodes of the graph for each of them, and then tries all pairs.
    """

    def match(self, model: ir.Model, graph_or_function: Any, node: ir.Node, **options: Any) -> Any:
        """Match among the nodes that read an input of `node`."""
        readers = [user for value in node.inputs if value is not None for user in value.consumers()]
        siblings: Any = _Nodes(dict.fromkeys(user for user in readers if user.graph is node.graph))
        siblings.graph = node.graph
        return super().match(model, siblings, node, **options)


class _Nodes(list[ir.Node]):
    """Some of the nodes of `graph`."""

    graph: ir.Graph


def optimize(model: ir.Model, kept: Container[str]) -> None:
    """Run torch.onnx's optimizer, on a model that has no functions.

    Constants are exact: torch.onnx's own rules take 1e-8, say an `eps`, for 0. Initializers with the names in `kept`
    are not merged with equal ones; where there are some, the model was optimized before, has its shapes, and one round
    is enough. Raises OnnxExportError where the optimizer fails.
    """
    inexact = (*_no_op.rules.rules, no_op_static_scatter_nd_rule)  # the last takes `index_add` for an assignment
    others = [rule for rule in rewriter._DEFAULT_REWRITE_RULES if rule not in inexact]
    rules = RulesByOp([*_exact_rules(), *others])

    class Deduplicate(common.DeduplicateInitializersPass):
        def call(self, model: ir.Model) -> ir.passes.PassResult:
            initializers = model.graph.initializers
            held = [initializers.pop(name) for name in list(initializers) if name in kept]
            result = super().call(model)
            for value in held:
                initializers.add(value)
            return result

    with (
        mock.patch.object(rewriter, "_DEFAULT_REWRITE_RULES", (rules,)),
        mock.patch.object(common, "DeduplicateInitializersPass", Deduplicate),
    ):
        try:
            optimizer.optimize_ir(model, 1 if kept else 2, onnx_shape_inference=not kept)
            onnx_fusions.fuse(model)
        except ir.passes.PassError as error:
            causes: list[BaseException] = [error]
            while causes[-1].__cause__ is not None:
                causes.append(causes[-1].__cause__)
            said = ": ".join(dict.fromkeys(map(str, causes[-2:])))
            raise OnnxExportError(f"onnxscript's optimizer failed: {said}", hint="write optimize=False") from error


def _exact_rules() -> list[Any]:
    """The rules that remove `x + 0`, `x - 0`, `x * 1`, `x / 1` and dropout."""
    zero, one = (pattern.Constant(number, rel_tol=0, abs_tol=0) for number in (0, 1))
    add, mul = (lambda op, x: x + zero), (lambda op, x: x * one)
    sub, div = (lambda op, x: x - zero), (lambda op, x: x / one)
    both = [rule for fn in (add, mul) for rule in pattern.RewriteRule(fn, _no_op.identity).commute()]
    one_way = [pattern.RewriteRule(fn, _no_op.identity) for fn in (sub, div)]
    return [*both, *one_way, _no_op.dropout_zero_rule, _no_op.dropout_inference_rule]
