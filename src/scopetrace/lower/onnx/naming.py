"""Names of ONNX functions, nodes, values and dynamic sizes.

Nodes carry their scope and source line in `metadata_props`; the keys `namespace` and `pkg.torch.onnx.*` are those of
torch.onnx, which viewers read. Inside a function, scope paths and module names are relative to the function's module,
since the body serves every call. Dynamic sizes have the names of their `Dim`s.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
import torch.fx

from scopetrace._compat.onnx import onnx_type
from scopetrace._compat.symbols import expression_text, to_expr
from scopetrace.ir.conditions import SizeRules
from scopetrace.lower.onnx.combine import Subgraph, result_name
from scopetrace.outline.signature import FunctionOutput, unique_names
from scopetrace.program.graph import scope_path
from scopetrace.program.outlined import Function

_KEY = "pkg.torch.onnx."
SCOPE = "scopetrace.scope"
SITE = "scopetrace.site"
"""While a model is made flat, the number of the call site whose function a node was in."""

TAKEN_FOR_OPS = frozenset({"Add", "Div", "Gather", "Mul", "Sub"})
"""ONNX Runtime (1.31) takes a function with one of these names for the op, whatever its domain, and aborts."""


def function_name(function: Function) -> str:
    """`domain::Name` of a function: the name that users chose for its calls, or that of its class."""
    name = _class_name(function)
    return function.label.name or f"{function.domain}::{name}" + ("Module" if name in TAKEN_FOR_OPS else "")


def label_nodes(graph: ir.Graph, subgraph: Subgraph, sources: Mapping[str, torch.fx.Node]) -> None:
    """Set names and metadata of the nodes of a subgraph after the torch.fx nodes that they were translated from."""
    unique = unique_names()
    home = Home.of(subgraph.function)
    moved = {str(i): Home.of(site.function, site.node) for i, site in enumerate(subgraph.sites)}
    for node in graph.all_nodes():
        if SCOPE in node.metadata_props:  # a call
            node.name = unique(node.metadata_props[SCOPE])
            continue
        scopes = node.metadata_props.get(_KEY + "name_scopes")
        source = None if scopes is None else sources.get(scopes.rsplit("'", 2)[-2])  # a list, as Python writes it
        home_of_node = moved.get(node.metadata_props.get(SITE, ""), home)
        home_of_node.label(node, source, node.op_type if source is None else str(source.target))
        node.name = unique(f"{node.metadata_props[SCOPE]}/{node.op_type}")


def name_values(graph: ir.Graph, inputs: Sequence[str], outputs: Sequence[str], kept: Container[str] = ()) -> None:
    """Set the names of inputs and outputs, and different ones for all other values; names in `kept` stay."""
    wanted = dict(zip([*graph.inputs, *graph.outputs], [*inputs, *outputs], strict=True))
    computed = [v for node in graph.all_nodes() for v in node.outputs]
    of_bodies = [v for body in graph.subgraphs() for v in body.inputs]
    for value in (*computed, *graph.initializers.values(), *of_bodies):
        wanted.setdefault(value, str(value.name) if value.name in kept else _stem(value))
    ir.convenience.rename_values(list(wanted), list(map(unique_names(), wanted.values())))


def _stem(value: ir.Value) -> str:
    """The name of a value without numbers at its end; for the result of a call, the name of the function."""
    node = value.producer()
    if node is not None and node.domain and SITE not in node.metadata_props:
        return node.op_type
    return re.sub(r"(_\d+)+$", "", value.name or "") or "value"


def _class_name(function: Function) -> str:
    return function.name if function.module_type is None else function.module_type.__name__


@dataclasses.dataclass
class Home:
    """Names for the nodes of a module: relative to it in a function; in a flat model those of the call that it is."""

    scope: str
    """The scope path of the traced call, and what stands in its place."""
    name: str
    fqn: str
    """The name of the traced module, and what stands in its place."""
    new_fqn: str

    @classmethod
    def of(cls, function: Function | None, call: torch.fx.Node | None = None) -> Home:
        """For the body of a function, relative or as that of a call of it; or the main program."""
        if function is None:
            return cls("", "", "", "")
        first, name, new_fqn = function.calls[0], _class_name(function), ""
        if call is not None:
            name = scope_path(call) or name
            new_fqn = next((fqn for fqn, _ in reversed(call.meta.get("nn_module_stack", {}).values())), "")
        return cls(str(first.scope), name, first.fqn or "", new_fqn)

    def label(self, node: ir.Node, source: torch.fx.Node | None, target: str) -> None:
        """Set `metadata_props`: scope, module classes and source lines of the torch.fx node."""
        stack = [] if source is None else self._stack(source.meta.get("nn_module_stack") or {})
        name = node.op_type if source is None else source.name
        node.metadata_props.clear()
        node.metadata_props[SCOPE] = self._scope(None if source is None else scope_path(source))
        node.metadata_props["namespace"] = "/".join([*(f"{fqn}: {cls}" for fqn, cls in stack), f"{name}: {target}"])
        node.metadata_props[_KEY + "class_hierarchy"] = repr([*(cls for _, cls in stack), target])
        node.metadata_props[_KEY + "name_scopes"] = repr([*(fqn for fqn, _ in stack), name])
        if source is not None and source.meta.get("stack_trace"):
            node.metadata_props[_KEY + "stack_trace"] = source.meta["stack_trace"]

    def _scope(self, path: str | None) -> str:
        if path is None:
            return self.name
        return self.name + path.removeprefix(self.scope) if path.startswith(self.scope) else path

    def _stack(self, stack: Mapping[str, tuple[str, Any]]) -> list[tuple[str, str]]:
        """(fqn, class) of the modules around a node; in a function, from its module inwards."""
        entries = [
            (fqn, cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}")
            for fqn, cls in stack.values()
        ]
        if not self.fqn:
            return entries
        inner = [(fqn, cls) for fqn, cls in entries if fqn == self.fqn or fqn.startswith(self.fqn + ".")]
        outer = [entry for entry in entries if self.new_fqn and entry not in inner]
        return [*outer, *(((self.new_fqn + fqn[len(self.fqn) :]).lstrip("."), cls) for fqn, cls in inner)]


def output_names(outputs: Sequence[FunctionOutput]) -> list[str]:
    """Names of a function's outputs, from their paths in forward's result: `logits`, `output_0`, `n_updated`."""
    return [result_name(o.name) + ("_updated" if o.kind == "mutated" else "") for o in outputs]


_NAME = re.compile(r"[^\W\d]\w*")


def forget_inner_sizes(body: ir.Graph) -> None:
    """Remove symbolic sizes from a body that its inputs do not have: data-dependent ones differ from call to call.

    A runtime that inlines the calls would take what has one name for one size.
    """
    known = {name for value in body.inputs for dim in value.shape or () for name in _names_in(dim)}
    for value in (output for node in body.all_nodes() for output in node.outputs):
        if value.shape is not None:
            value.shape = ir.Shape([dim if known.issuperset(_names_in(dim)) else None for dim in value.shape])


def _names_in(dim: Any) -> list[str]:
    return [] if isinstance(dim, int) or dim.value is None else _NAME.findall(dim.value)


class SizeNames:
    """Names of symbolic sizes: those of their `Dim`s. `rules` are the tape's size rules; None without dynamic sizes."""

    def __init__(self, rules: SizeRules | None) -> None:
        self._names = {} if rules is None else {s: spec.name for s, spec in rules.specs.items() if spec.name}

    def name(self, symbol: Any) -> str:
        """The name of a symbol of the trace."""
        return self._names.get(symbol) or str(symbol)

    def new_value(self, fake: Any) -> ir.Value:
        """An ONNX value with the type and shape of a fake tensor or number, as torch.onnx makes it."""
        if not isinstance(fake, torch.Tensor):
            return ir.Value(type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
        dtype, sizes = onnx_type(fake)
        names = {s: self.name(s) for n in sizes if not isinstance(n, int) for s in to_expr(n).free_symbols}
        shape = ir.Shape([n if isinstance(n, int) else expression_text(to_expr(n), names) for n in sizes])
        return ir.Value(type=ir.TensorType(ir.DataType(dtype)), shape=shape)
