"""Dynamic sizes under the names of their `Dim`s."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import from_torch_dtype

from scopetrace._compat.symbols import expression_text, to_expr

_NAME = re.compile(r"[^\W\d]\w*")


def forget_sizes_made_inside(body: ir.Graph) -> None:
    """Of the sizes in a body keep those that its inputs have: a size that depends on data is another in each call.

    A runtime that inlines the calls would take what has one name for one size.
    """
    known = {name for value in body.inputs for name in _names(value)}
    for node in ir.traversal.RecursiveGraphIterator(body):
        for value in node.outputs:
            if value.shape is not None and not known.issuperset(_names(value)):
                value.shape = ir.Shape([dim if known.issuperset(_names_in(dim)) else None for dim in value.shape])


def _names(value: ir.Value) -> list[str]:
    return [] if value.shape is None else [name for dim in value.shape for name in _names_in(dim)]


def _names_in(dim: Any) -> list[str]:
    return [] if isinstance(dim, int) or dim.value is None else _NAME.findall(dim.value)


class SizeNames:
    """The names of symbols. `rules` are those of the trace, None where nothing is dynamic."""

    def __init__(self, rules: Any) -> None:
        self._names = {} if rules is None else {s: spec.name for s, spec in rules.specs.items() if spec.name}

    def _name(self, symbol: Any) -> str:
        return self._names.get(symbol) or str(symbol)

    def new_value(self, fake: Any) -> ir.Value:
        """A value of the type and sizes of a fake tensor or number, as torch.onnx makes them."""
        if not isinstance(fake, torch.Tensor):
            return ir.Value(type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
        dtype, sizes = (fake.dtype.to_real(), [*fake.shape, 2]) if fake.is_complex() else (fake.dtype, [*fake.shape])
        shape = ir.Shape([size if isinstance(size, int) else self._text(size) for size in sizes])
        return ir.Value(type=ir.TensorType(from_torch_dtype(dtype)), shape=shape)

    def _text(self, size: Any) -> str:
        expr = to_expr(size)
        return expression_text(expr, {s: self._name(s) for s in expr.free_symbols})

    def rename(self, graph: ir.Graph, origins: Mapping[str, Any]) -> None:
        """Give sizes such as `s7 + 1` their names; `origins` says which symbols torch's names stand for."""
        if not origins:
            return
        pattern = re.compile(r"\b(" + "|".join(map(re.escape, origins)) + r")\b")

        def named(dim: Any) -> Any:
            text = None if isinstance(dim, int) else dim.value
            return dim if text is None else pattern.sub(lambda found: self._name(origins[found[1]]), text)

        values = [v for node in ir.traversal.RecursiveGraphIterator(graph) for v in node.outputs]
        for value in (*graph.inputs, *values):
            if value.shape is not None:
                value.shape = ir.Shape([named(dim) for dim in value.shape])
