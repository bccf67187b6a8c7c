"""The write-back of a functional program as nodes of its graph, for formats that hold nothing beside a graph.

Data flow:
    sources of the write-back -> nodes: values of the graph, inputs and state, new values of these
    views -> ops before the output node, of a base with its strides in eager where `as_strided` reads memory
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from scopetrace._compat.symbols import example, to_expr
from scopetrace._compat.tensors import run_fake
from scopetrace.errors import ExportError
from scopetrace.ir.tape import ProgramTape
from scopetrace.ir.write_back import (
    FromGraph,
    GraphInput,
    Resolver,
    StateRef,
    StridedStep,
    ViewOf,
    ViewStep,
    WriteBack,
    resolved,
)
from scopetrace.program.graph import FxLowering, node_value, set_origin, set_place

_aten = torch.ops.aten


class ResultNodes(Resolver[Any]):
    """The node, or plain number, of each source. New nodes stand before the output node, in the scope of the root.

    `state` gives the node of a parameter, buffer or constant; `values` are what the graph returns; `lower` gives the
    nodes of symbolic numbers.
    """

    def __init__(
        self,
        lowering: FxLowering,
        inputs: Sequence[torch.fx.Node],
        state: Callable[[str], Any],
        values: Sequence[Any],
        lower: Callable[[Any], Any],
    ) -> None:
        super().__init__(inputs, state, values)
        self._lowering, self.lower = lowering, lower

    @classmethod
    def of(cls, lowering: FxLowering) -> ResultNodes:
        """For the graph of a functional tape as it is. A tensor that is only written has no node there, and is None."""
        inputs = lowering.graph.find_nodes(op="placeholder")
        state = {str(node.target): node for node in lowering.graph.find_nodes(op="get_attr")}
        values = list(lowering.output.args[0])[: len(lowering.tape.graph_outputs())]
        return cls(lowering, inputs, state.get, values, lowering.lower)

    def all_results(self, write_back: WriteBack) -> list[Any]:
        """The nodes of the results, in order."""
        for source in write_back.results:
            self.results.append(self.get(source))
        return self.results

    def base(self, source: ViewOf) -> Any:
        """The base of a view, with its strides in eager where `as_strided` reads its memory."""
        node = self.get(source.base)
        if not any(isinstance(step, StridedStep) for step in source.steps):
            return node
        if isinstance(source.base, (GraphInput, StateRef)):
            stride = node_value(self.before(source.base)).stride()
        else:
            stride = source.base.stride if isinstance(source.base, FromGraph) else None
        same = stride is None or to_expr(node_value(node).stride()) == to_expr(stride)
        return node if same else self._laid_out(node, stride)

    def view(self, base: Any, step: ViewStep | StridedStep) -> torch.fx.Node:
        """One step of a view."""
        if isinstance(step, StridedStep):
            offset = node_value(base).storage_offset() + step.shift
            return self.node(_aten.as_strided.default, (base, *self._resolved((step.size, step.stride, offset))))
        out = self.node(step.op, (base, *self._resolved(step.args)), self._resolved(step.kwargs))
        return out if step.slot is None else self.node(operator.getitem, (out, step.slot))

    def node(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> torch.fx.Node:
        """A new node."""
        with self._lowering.graph.inserting_before(self._lowering.output):
            node = self._lowering.graph.call_function(op, args, kwargs)
        fakes, options = torch.fx.map_arg((args, kwargs or {}), node_value)
        value = op(*fakes) if op is operator.getitem else run_fake(fakes[0].fake_mode, op, fakes, options)
        node.meta["val"] = value
        set_place(node, str(self._lowering.tape.root), 0)
        set_origin(node, {}, None)
        return node

    def copied(self, value: torch.fx.Node) -> torch.fx.Node:
        """A clone of a tensor."""
        return self.node(_aten.clone.default, (value,))

    def _resolved(self, x: Any) -> Any:
        """`x` with nodes in place of symbolic numbers and of numbers that the graph returns."""
        with self._lowering.graph.inserting_before(self._lowering.output):
            return resolved(x, lambda n: self.values[n.index] if isinstance(n, FromGraph) else self.lower(n))

    def _laid_out(self, node: torch.fx.Node, stride: Sequence[Any]) -> torch.fx.Node:
        """A copy with these strides. Raises ExportError for strides with gaps or overlaps."""
        order = in_memory_order(stride)
        inner = self.node(_aten.permute.default, (node, order))
        copy = self.node(_aten.clone.default, (inner,), {"memory_format": torch.contiguous_format})
        result = self.node(_aten.permute.default, (copy, [order.index(d) for d in range(len(order))]))
        if to_expr(node_value(result).stride()) != to_expr(tuple(stride)):
            raise ExportError(
                "a result is made with as_strided from a tensor that does not fill its memory",
                module=self._lowering.tape.root.path,
                hint="clone() that tensor first",
            )
        return result


def write_back_of(tape: ProgramTape) -> WriteBack:
    """The write-back of a tape; for one that needs none, its outputs are the results."""
    return tape.write_back or WriteBack([], [FromGraph(i) for i in range(len(tape.graph_outputs()))])


def in_memory_order(stride: Sequence[Any]) -> list[int]:
    """The dimensions from the outermost to the innermost, for the example sizes."""
    return sorted(range(len(stride)), key=lambda d: -example(stride[d]))
