"""A program as plain data: `document` makes a dict, `json_text` writes it as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx

from scopetrace.containers.structure import container_type, open_container
from scopetrace.ir.scopes import Scope
from scopetrace.ir.selection import Selection
from scopetrace.program.graph import FxLowering, call_position, named, node_value, scope_path
from scopetrace.program.traced import ModuleCall, TracedProgram
from scopetrace.view.text import levels, select_calls
from scopetrace.view.tree import target_text, value_text


def document(program: TracedProgram, *, depth: int | None = None, scope: Selection | None = None) -> dict[str, Any]:
    """The inputs, attributes, ops, module calls, outputs and specializations of a program.

    Ops in bodies of higher-order ops follow those of the main graph, and have the name of their graph module as
    `graph`, since node names are unique within one graph only.

    Args:
        depth: levels of calls below the root, or below the outermost match of `scope`; None for all.
        scope: patterns of scopes; None for all. See `is_scope_named`.
    """
    graph, calls = program.lowering.graph, program.calls
    root = calls[0].scope
    chosen = {s.path for s in levels(root, scope)}
    graphs = [("", graph), *_bodies(program.lowering)]
    ops = [
        _op(n, root) | ({"graph": name} if name else {})
        for name, inner in graphs
        for n in inner.nodes
        if n.op.startswith("call_") and (scope_path(n) or root.path) in chosen
    ]
    return {
        "version": 1,
        "model": root.path,
        "inputs": [{"name": n.name, **_type(n)} for n in graph.nodes if n.op == "placeholder"],
        "attributes": [{"name": n.name, "target": n.target, **_type(n)} for n in graph.nodes if n.op == "get_attr"],
        "ops": ops,
        "calls": [_call(call) for call in select_calls(calls, depth, scope)],
        "outputs": plain_data(calls[0].output_template),
        "specializations": [dataclasses.asdict(s) for s in program.tape.specializations],
    }


def json_text(data: dict[str, Any]) -> str:
    """A document as JSON, with one line for each op and each call."""
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {_lines(value)}" for key, value in data.items()) + "\n}"


def _lines(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(value, allow_nan=False)
    return "[\n  " + ",\n  ".join(json.dumps(item, allow_nan=False) for item in value) + "\n]"


def _bodies(program: FxLowering, outer: str = "") -> Iterator[tuple[str, torch.fx.Graph]]:
    """The graphs of bodies with the paths of their GraphModules: `true_graph_0.body_graph_0`."""
    for name, body in program.bodies.items():
        yield outer + name, body.graph
        yield from _bodies(body, f"{outer}{name}.")


def _op(node: torch.fx.Node, root: Scope) -> dict[str, Any]:
    return {
        "name": node.name,
        "target": target_text(node),
        "scope": scope_path(node) or root.path,
        "call": call_position(node) or 0,
        **_type(node),
        "inputs": [n.name for n in node.all_input_nodes],
        "args": [plain_data(a) for a in node.args],
        "kwargs": {name: plain_data(a) for name, a in node.kwargs.items()},
    }


def _call(call: ModuleCall) -> dict[str, Any]:
    cls = call.module_type
    return {
        "fqn": call.fqn,
        "class": f"{cls.__module__}.{cls.__qualname__}" if cls is not None else None,
        "index": call.index,
        "scope": call.scope.path,
        "leaf": call.is_leaf,
        "raised": None if call.raised is None else f"{type(call.raised).__name__}: {call.raised}",
        "arguments": {name: plain_data(x) for name, x in call.argument_templates.items()},
        "outputs": plain_data(call.output_template),
    }


def _type(node: torch.fx.Node) -> dict[str, Any]:
    """Shape and dtype of a node's tensor; None for ops with several results, whose `getitem` nodes have their own."""
    value = node_value(node)
    if not isinstance(value, torch.Tensor):
        return {"shape": None, "dtype": None}
    shape = [size if isinstance(size, int) else str(size) for size in value.shape]
    return {"shape": shape, "dtype": str(value.dtype).removeprefix("torch.")}


def plain_data(x: Any) -> Any:
    """A structure as JSON can hold it: nodes as `{"node": name}`, other objects by class and text."""
    if isinstance(x, torch.fx.Node):
        return {"node": x.name}
    if x is None or isinstance(x, (bool, str)) or type(x) is int:
        return x
    if isinstance(x, float):
        return x if math.isfinite(x) else repr(x)
    children = open_container(x)
    if children is None:
        text = value_text(x, named)
        return text if isinstance(x, (torch.dtype, complex)) else {"class": type(x).__name__, "text": text}
    if isinstance(x, (list, tuple)):
        return [plain_data(item) for _, item in children]
    if type(x) is dict:
        return {str(key): plain_data(item) for key, item in x.items()}
    return {
        "class": container_type(x).__name__,
        "fields": {key.strip("[].'\""): plain_data(item) for key, item in children},
    }
