"""A GraphModule run node by node: its ops are in the modules, at the lines and with the annotations of its nodes.

Data flow:
    GraphModule whose nodes know where they come from -> `NodeRunner`, in place of its generated code
    node.meta of a node -> scope, stack trace and `Op.meta` of the ops that it runs
"""

from __future__ import annotations

import inspect
import re
from typing import Any, TypeGuard

import torch
import torch.fx

from scopetrace._compat.export import is_guard
from scopetrace.ir.scopes import Scope
from scopetrace.record.builder import TapeBuilder

_KEPT = ("custom", "nn_module_stack")


class NodeRunner(torch.fx.Interpreter):
    """Runs a graph; the ops of each node have its place."""

    def __init__(self, gm: torch.fx.GraphModule, builder: TapeBuilder) -> None:
        super().__init__(gm)
        self.extra_traceback = False
        self.builder = builder

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the GraphModule returns for these arguments."""
        bound = inspect.signature(self.module.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        return self.run(*bound.args, *bound.kwargs.values())

    def run_node(self, n: torch.fx.Node) -> Any:
        """As the base's."""
        root = self.builder.state.current_scope
        kept = {key: n.meta[key] for key in _KEPT if n.meta.get(key)}
        with self.builder.from_node(root, scope_of_node(n, root), n.stack_trace, kept):
            return super().run_node(n)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """As the base's; the checks of an exported program are no module call."""
        module = self.fetch_attr(target)
        return module.forward(*args, **kwargs) if is_guard(module) else super().call_module(target, args, kwargs)


def knows_modules(module: Any) -> TypeGuard[torch.fx.GraphModule]:
    """Whether it is a GraphModule with nodes of which is known where they come from."""
    return isinstance(module, torch.fx.GraphModule) and any("nn_module_stack" in n.meta for n in module.graph.nodes)


def root_scope(gm: torch.fx.GraphModule) -> Scope:
    """The root scope, named after the class of the module that the graph came from, where its nodes have it."""
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
    plain = re.sub(r"^L\[['\"]\w+['\"]\]", "", path)
    return re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", plain).lstrip(".")


def _class_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
