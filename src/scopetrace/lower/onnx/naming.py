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
from scopetrace.lower.onnx.combine import CallSite, Subgraph, result_name
from scopetrace.outline.signature import FunctionOutput
from scopetrace.program.graph import scope_path
from scopetrace.program.outlined import Function

_KEY = "pkg.torch.onnx."
SCOPE = "scopetrace.scope"
SITE = "scopetrace.site"
"""While a model is made flat, the number of the call site whose function a node was in."""


class Unique:
    """Makes names unique: a second `x` becomes `x_1`, with the number `first`, a third `x_2`."""

    def __init__(self, first: int = 1) -> None:
        self._first = first
        self._taken: set[str] = set()
        self._next: dict[str, int] = {}

    def __call__(self, wanted: str) -> str:
        """The wanted name, with a number where it is taken."""
        name = wanted
        while name in self._taken:
            count = self._next.get(wanted, self._first)
            self._next[wanted] = count + 1
            name = f"{wanted}_{count}"
        self._taken.add(name)
        return name


TAKEN_FOR_OPS = frozenset({"Add", "Div", "Gather", "Mul", "Sub"})
"""ONNX Runtime (1.31) takes a function with one of these names for the op, whatever its domain, and aborts."""


class FunctionNames:
    """Domains and names of functions, `domain::Name`. Distinct functions of one class are `Name`, `Name_2`, …

    Args:
        chosen: the names given to classes, which also hold for classes derived from them.
    """

    def __init__(self, chosen: Mapping[type, str]) -> None:
        self._chosen = chosen
        self._unique = Unique(first=2)

    def base(self, function: Function) -> str:
        """The name without a number."""
        bases = () if function.module_type is None else function.module_type.__mro__
        own = f"{function.domain}::{_class_name(function)}"
        if own.partition("::")[2] in TAKEN_FOR_OPS:
            own += "Module"
        return next((self._chosen[base] for base in bases if base in self._chosen), own)

    def take(self, function: Function) -> tuple[str, str]:
        """Domain and name of a new function, with a number where they are taken."""
        domain, _, name = self._unique(self.base(function)).partition("::")
        return domain, name


class Labels:
    """Names the nodes and values of ONNX graphs after the torch.fx graph that they were translated from."""

    def __init__(self, translated_from: torch.fx.Graph) -> None:
        self._nodes = {node.name: node for node in translated_from.nodes}

    def write(self, subgraph: Subgraph, graph: ir.Graph) -> None:
        """Set names and metadata of the nodes of a subgraph."""
        unique = Unique()
        home = Home.of(subgraph.function)
        moved = [Home.of(site.function, site.scope, site.fqn) for site in subgraph.sites]
        for node in ir.traversal.RecursiveGraphIterator(graph):
            is_call = SCOPE in node.metadata_props
            if not is_call:
                source, site = self._source(node), node.metadata_props.get(SITE)
                here = home if site is None else moved[int(site)]
                label(node, here, source, node.op_type if source is None else str(source.target))
            scope = node.metadata_props[SCOPE]
            node.name = unique(scope if is_call else f"{scope}/{node.op_type}")

    def _source(self, node: ir.Node) -> torch.fx.Node | None:
        scopes = node.metadata_props.get(_KEY + "name_scopes")
        return None if scopes is None else self._nodes.get(scopes.rsplit("'", 2)[-2])  # a list, as Python writes it

    def label_call(self, subgraph: Subgraph, site: CallSite, node: ir.Node) -> None:
        """Set the metadata of a call node."""
        label(node, Home.of(subgraph.function), site.node, f"{node.domain}::{node.op_type}")

    def name_values(
        self, graph: ir.Graph, inputs: Sequence[str], outputs: Sequence[str], kept: Container[str] = ()
    ) -> None:
        """Set the names of inputs and outputs, and different ones for all other values; names in `kept` stay."""
        wanted = dict(zip([*graph.inputs, *graph.outputs], [*inputs, *outputs], strict=True))
        made = [v for node in ir.traversal.RecursiveGraphIterator(graph) for v in node.outputs]
        for value in (*made, *graph.initializers.values()):
            wanted.setdefault(value, str(value.name) if value.name in kept else _stem(value))
        ir.convenience.rename_values(list(wanted), list(map(Unique(), wanted.values())))


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
    def of(cls, function: Function | None, scope: str | None = None, fqn: str | None = None) -> Home:
        """For the body of a function, relative or as that of the call with this scope and name; or the main program."""
        if function is None:
            return cls("", "", "", "")
        first = function.calls[0]
        return cls(str(first.scope), scope or _class_name(function), first.fqn or "", fqn or "")

    def scope_of(self, path: str | None) -> str:
        """A scope path in the function's module, by its new name."""
        if path is None:
            return self.name
        return self.name + path.removeprefix(self.scope) if path.startswith(self.scope) else path

    def stack_of(self, stack: Mapping[str, tuple[str, Any]]) -> list[tuple[str, str]]:
        """(fqn, class) of the modules around a node; in a function, from its module inwards."""
        entries = [
            (fqn, cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}")
            for fqn, cls in stack.values()
        ]
        if not self.fqn:
            return entries
        inner = [(fqn, cls) for fqn, cls in entries if fqn == self.fqn or fqn.startswith(self.fqn + ".")]
        if not self.new_fqn:
            return [(fqn[len(self.fqn) + 1 :], cls) for fqn, cls in inner]
        return [
            *(e for e in entries if e not in inner),
            *((self.new_fqn + fqn[len(self.fqn) :], c) for fqn, c in inner),
        ]


def label(node: ir.Node, home: Home, source: torch.fx.Node | None, target: str) -> None:
    """Set `metadata_props`: scope, module classes and source lines of the torch.fx node."""
    path = None if source is None else scope_path(source)
    stack = [] if source is None else home.stack_of(source.meta.get("nn_module_stack") or {})
    name = node.op_type if source is None else source.name
    node.metadata_props.clear()
    node.metadata_props[SCOPE] = home.scope_of(path)
    node.metadata_props["namespace"] = "/".join([*(f"{fqn}: {cls}" for fqn, cls in stack), f"{name}: {target}"])
    node.metadata_props[_KEY + "class_hierarchy"] = repr([*(cls for _, cls in stack), target])
    node.metadata_props[_KEY + "name_scopes"] = repr([*(fqn for fqn, _ in stack), name])
    if source is not None and source.meta.get("stack_trace"):
        node.metadata_props[_KEY + "stack_trace"] = source.meta["stack_trace"]


def output_names(outputs: Sequence[FunctionOutput]) -> list[str]:
    """Names of a function's outputs, from their paths in forward's result: `logits`, `output_0`, `n_updated`."""
    return [result_name(o.name) + ("_updated" if o.kind == "mutated" else "") for o in outputs]


_NAME = re.compile(r"[^\W\d]\w*")


def forget_sizes_made_inside(body: ir.Graph) -> None:
    """Remove symbolic sizes from a body that its inputs do not have: data-dependent ones differ from call to call.

    A runtime that inlines the calls would take what has one name for one size.
    """
    known = {name for value in body.inputs for dim in value.shape or () for name in _names_in(dim)}
    for node in ir.traversal.RecursiveGraphIterator(body):
        for value in node.outputs:
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
        shape = ir.Shape([size if isinstance(size, int) else self._text(size) for size in sizes])
        return ir.Value(type=ir.TensorType(ir.DataType(dtype)), shape=shape)

    def _text(self, size: Any) -> str:
        expr = to_expr(size)
        return expression_text(expr, {s: self.name(s) for s in expr.free_symbols})
