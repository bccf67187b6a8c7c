"""Names: of functions, of values, and of nodes, which carry the scope and the source line in `metadata_props` too.

The keys `namespace` and `pkg.torch.onnx.*` are those of torch.onnx, which viewers read. Inside a function, scopes and
module names count from the function's module, since the body serves every call.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import torch.fx

from scopetrace.ir import meta
from scopetrace.lower.onnx.options import chosen_name
from scopetrace.lower.onnx.pieces import CallSite, Subgraph

_KEY = "pkg.torch.onnx."
SCOPE = "scopetrace.scope"


class FunctionNames:
    """Domain and name of each function. Variants of one class are `Name`, `Name_2`, …"""

    def __init__(self, chosen: Mapping[type, str]) -> None:
        self._chosen = chosen
        self._taken: set[tuple[str, str]] = set()

    def base(self, function: Any) -> tuple[str, str]:
        """Domain and name, without the number of the variant."""
        chosen = chosen_name(self._chosen, function.module_type)
        if chosen is None:
            return function.domain, _class_name(function)
        domain, _, name = chosen.partition("::")
        return domain, name

    def take(self, function: Any) -> tuple[str, str]:
        """Domain and name of a new function."""
        domain, base = self.base(function)
        name, count = base, 1
        while (domain, name) in self._taken:
            count += 1
            name = f"{base}_{count}"
        self._taken.add((domain, name))
        return domain, name


class Unique:
    """Names that differ: a second `x` becomes `x_1`."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._next: dict[str, int] = {}

    def __call__(self, wanted: str) -> str:
        """The wanted name, or one like it that is free."""
        name = wanted
        while name in self._taken:
            self._next[wanted] = count = self._next.get(wanted, 0) + 1
            name = f"{wanted}_{count}"
        self._taken.add(name)
        return name


class Labels:
    """Names the nodes and values of pieces after the graph that they were translated from."""

    def __init__(self, translated_from: torch.fx.Graph) -> None:
        self._nodes = {node.name: node for node in translated_from.nodes}

    def write(self, piece: Subgraph, graph: ir.Graph) -> None:
        """Names and metadata of the nodes of a piece."""
        unique = Unique()
        home = _Home(piece)
        for node in ir.traversal.RecursiveGraphIterator(graph):
            if SCOPE not in node.metadata_props:  # calls have theirs
                source = self._source(node)
                label(node, home, source, node.op_type if source is None else str(source.target))
            scope = node.metadata_props[SCOPE]
            node.name = unique(scope if node.domain else f"{scope}/{node.op_type}")

    def _source(self, node: ir.Node) -> torch.fx.Node | None:
        scopes = node.metadata_props.get(_KEY + "name_scopes")
        return None if scopes is None else self._nodes.get(ast.literal_eval(scopes)[-1])

    def label_call(self, piece: Subgraph, site: CallSite, node: ir.Node) -> None:
        """Metadata of the call of a function."""
        label(node, _Home(piece), site.node, f"{node.domain}::{node.op_type}")

    def name_values(self, graph: ir.Graph, inputs: Mapping[ir.Value, str], outputs: Mapping[ir.Value, str]) -> None:
        """Give inputs and outputs their names, and all others names that differ from these."""
        unique = Unique()
        renamed = [(value, unique(name)) for value, name in {**inputs, **outputs}.items()]
        for value in (v for n in ir.traversal.RecursiveGraphIterator(graph) for v in n.outputs):
            if value not in outputs:
                renamed.append((value, unique(_stem(value))))
        for value in list(graph.initializers.values()):
            if value not in inputs:
                renamed.append((value, unique(_stem(value))))
        ir.convenience.rename_values([v for v, _ in renamed], [name for _, name in renamed])


def _stem(value: ir.Value) -> str:
    """The name without numbers that other pieces brought about; results of calls have the name of the function."""
    node = value.producer()
    if node is not None and node.domain:
        return node.op_type
    return re.sub(r"(_\d+)+$", "", value.name or "") or "value"


def _class_name(function: Any) -> str:
    name: str = function.name if function.module_type is None else function.module_type.__name__
    return name


class _Home:
    """The call that a piece is the body of, from which names inside it count."""

    def __init__(self, piece: Subgraph) -> None:
        first = None if piece.function is None else piece.function.calls[0]
        self.scope = "" if first is None else str(first.scope)
        self.fqn = "" if first is None else first.fqn or ""
        self.name = "" if first is None else _class_name(piece.function)

    def relative_scope(self, path: str | None) -> str:
        """A scope path as it is called inside the piece."""
        if path is None:
            return self.name
        return self.name + path.removeprefix(self.scope) if path.startswith(self.scope) else path

    def relative_stack(self, stack: Mapping[str, tuple[str, Any]]) -> list[tuple[str, str]]:
        """(name, class) of the modules around a node, from the piece's own module on."""
        entries = [
            (fqn, cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}")
            for fqn, cls in stack.values()
        ]
        if self.fqn:
            inner = [(fqn, cls) for fqn, cls in entries if fqn == self.fqn or fqn.startswith(self.fqn + ".")]
            return [(fqn[len(self.fqn) + 1 :], cls) for fqn, cls in inner]
        return entries


def label(node: ir.Node, home: _Home, source: torch.fx.Node | None, target: str) -> None:
    """Write scope, module classes and source lines of a node's origin."""
    path = None if source is None else meta.scope_path(source)
    stack = [] if source is None else home.relative_stack(source.meta.get("nn_module_stack") or {})
    name = node.op_type if source is None else source.name
    node.metadata_props.clear()
    node.metadata_props[SCOPE] = home.relative_scope(path)
    node.metadata_props["namespace"] = "/".join([*(f"{fqn}: {cls}" for fqn, cls in stack), f"{name}: {target}"])
    node.metadata_props[_KEY + "class_hierarchy"] = repr([*(cls for _, cls in stack), target])
    node.metadata_props[_KEY + "name_scopes"] = repr([*(fqn for fqn, _ in stack), name])
    if source is not None and source.meta.get("stack_trace"):
        node.metadata_props[_KEY + "stack_trace"] = source.meta["stack_trace"]


def output_names(outputs: Any) -> list[str]:
    """Names of a function's outputs, made of the keys of what forward returns: `logits`, `output_0`, `n_updated`."""
    named = []
    for output in outputs:
        name = result_name(output.name)
        named.append(f"{name}_updated" if output.kind == "mutated" else name)
    return named


def result_name(path: str) -> str:
    """A name for what stands at `path` in a result, `['logits']` or `[0]`."""
    name = re.sub(r"\W+", "_", path).strip("_")
    return name if name and not name[0].isdigit() else f"output_{name}".rstrip("_")
