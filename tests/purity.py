"""The check that a graph mutates nothing: by schema for ops, by name and signature for other calls."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from scopetrace._compat.ops import is_op, schema_of
from scopetrace.errors import FunctionalizationError
from scopetrace.ir.tape import bind
from scopetrace.ops.functional_variants import undeclared_writes

_ITEM_WRITES = (operator.setitem, operator.delitem)


def assert_pure(gm: torch.nn.Module) -> None:
    """Check that no node of `gm`, or of a GraphModule inside it, mutates a tensor.

    Raises FunctionalizationError, naming the node, for an op whose schema writes an argument, `out=`, `inplace=True`,
    an assignment to an item, `x += y`, and functions, methods and modules that mutate.
    """
    for name, module in gm.named_modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                problem = why_impure(node, module)
                if problem is not None:
                    raise FunctionalizationError(
                        f"node {node.name} mutates: {problem}",
                        op=str(node.target),
                        module=name or None,
                        source=node.stack_trace,
                    )


def why_impure(node: torch.fx.Node, gm: torch.nn.Module) -> str | None:
    """What makes a node mutate one of its arguments or a module's state; None when nothing does."""
    if node.op == "call_function":
        return _function(node)
    if node.op == "call_method":
        return "a mutating method" if mutates_by_name(str(node.target)) else _keywords(node)
    if node.op == "call_module":
        return _module(gm.get_submodule(str(node.target)))
    return None


def mutates_by_name(name: str) -> bool:
    """Whether torch's naming says that a function or method mutates: `add_`, `__iadd__`, `__setitem__`."""
    if name.startswith("__") and name.endswith("__"):
        plain = name[2:-2]
        return plain in ("setitem", "delitem") or is_in_place_operator(plain)
    return name.endswith("_") and not name.endswith("__")


def is_in_place_operator(name: str) -> bool:
    """Whether it is an in-place function of the operator module for tensors, such as `iadd`, and not `imatmul`."""
    plain = name[1:]
    has_plain = any(hasattr(operator, n) for n in (f"__{plain}__", f"__{plain}_"))
    return name.startswith("i") and has_plain and hasattr(torch.Tensor, f"__{name}__")


def _function(node: torch.fx.Node) -> str | None:
    target: Any = node.target
    if is_op(target):
        if schema_of(target).is_mutable:
            return "the schema writes an argument"
        if any(isinstance(a, torch.fx.Node) for a in node.args) and undeclared_writes(target, node.args, node.kwargs):
            return "it writes the running statistics"
        return None
    name = getattr(target, "__name__", "")
    if target in _ITEM_WRITES:
        return "it assigns to an item"
    if getattr(target, "__module__", None) == "_operator":
        return "an in-place operator" if is_in_place_operator(name) else None
    if mutates_by_name(name):
        return "a mutating function"
    return _keywords(node)


def _keywords(node: torch.fx.Node) -> str | None:
    arguments = bind(node.target, node.args, node.kwargs)
    if arguments.get("out") is not None and not is_op(node.target):
        return "out="
    if arguments.get("inplace") is True:
        return "inplace=True"
    updates = arguments.get("training") is True or arguments.get("use_input_stats") is True
    return "it writes the running statistics" if updates and arguments.get("running_mean") is not None else None


def _module(module: torch.nn.Module) -> str | None:
    if isinstance(module, torch.fx.GraphModule):
        return None  # its nodes are looked at one by one
    for inner in module.modules():
        if getattr(inner, "inplace", False) is True:
            return "a module built with inplace=True"
        tracked = getattr(inner, "running_mean", None) is not None and getattr(inner, "track_running_stats", True)
        if inner.training and tracked:
            return "a module that writes its running statistics"
    return None
