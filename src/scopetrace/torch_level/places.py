"""Where the nodes of a graph come from: the module scope and the source line that they carry."""

from __future__ import annotations

import re
from typing import Any

import torch.fx

from scopetrace.ir.scopes import Scope


def root_scope(gm: torch.fx.GraphModule) -> Scope:
    """The scope of the whole graph, named after the module that it came from where its nodes say so."""
    for node in gm.graph.nodes:
        for fqn, kind in _module_stack(node):
            if not fqn:
                return Scope("", kind)
    return Scope("", type(gm).__name__)


def scope_of_node(node: torch.fx.Node, root: Scope) -> Scope:
    """The module scope of a node, from its `nn_module_stack`."""
    scope, outer = root, ""
    for fqn, kind in _module_stack(node):
        if fqn:
            inside = fqn.startswith(f"{outer}.")
            scope = scope.child(fqn[len(outer) + 1 :] if inside and outer else fqn, kind)
            outer = fqn
    return scope


def _module_stack(node: torch.fx.Node) -> list[tuple[str, str]]:
    """(fqn, class name), outermost first. Dynamo writes `L['self'].layers[0]`, torch.export `layers.0`."""
    found: dict[str, Any] = node.meta.get("nn_module_stack") or {}
    return [(_fqn(path), _class_name(kind)) for path, kind in found.values()]


def _fqn(path: str) -> str:
    to_expr = re.sub(r"^L\[['\"]\w+['\"]\]", "", path)
    return re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", to_expr).lstrip(".")


def _class_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
