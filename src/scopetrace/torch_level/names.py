"""The last step of torch level: nodes call functions and methods of torch, also for ATen ops where there is one."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx

from scopetrace._compat.schema import schema_of
from scopetrace._compat.tensors import run_fake
from scopetrace.ir.tape import Tape
from scopetrace.torch_level.step import Step

_aten = torch.ops.aten
_END = 2**63 - 1
Call = tuple[str, Any, tuple[Any, ...], dict[str, Any]]


def name_torch_functions(gm: torch.fx.GraphModule, tape: Tape) -> None:
    """Replace the graph of `gm`, made from a torch-level tape, by one that calls functions and methods of torch.

    An ATen op stays where no function of torch, called with its arguments, gives the same sizes, strides and dtype.
    """
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, Any] = {}
    for node in gm.graph.nodes:
        calls = _calls_for(node, tape.fake_mode)
        if calls is None:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
        else:
            copies[node] = _add(graph, node, calls, copies)
    graph.lint()
    gm.graph = graph
    for inner in gm.children():  # the bodies of higher-order ops
        if isinstance(inner, torch.fx.GraphModule):
            name_torch_functions(inner, tape)


_BEFORE = object()
"""Stands for the result of the previous call, in a sequence of calls."""


def _calls_for(node: torch.fx.Node, fake_mode: Any) -> list[Call] | None:
    """The calls that replace a node; None leaves it."""
    if isinstance(node.target, Step):
        return [(node.target.kind, node.target.target, node.args, dict(node.kwargs))]
    if node.op != "call_function" or getattr(node.target, "namespace", None) != "aten":
        return None
    return next((calls for calls in _names(node) if _gives_the_same(node, calls, fake_mode)), None)


def _add(graph: torch.fx.Graph, node: torch.fx.Node, calls: list[Call], copies: dict[torch.fx.Node, Any]) -> Any:
    meta = dict(node.meta)
    if isinstance(node.target, Step) and node.target.stack_trace is not None:
        meta["stack_trace"] = node.target.stack_trace
    new: Any = None
    for i, (kind, target, args, kwargs) in enumerate(calls):
        given = tuple(new if a is _BEFORE else torch.fx.node.map_arg(a, lambda n: copies[n]) for a in args)
        named = torch.fx.node.map_arg(kwargs, lambda n: copies[n])
        last = i == len(calls) - 1
        new = graph.create_node(kind, target, given, named, name=node.name if last else None)
        new.meta = meta if last else {k: v for k, v in meta.items() if k != "val"}
    return new


def _names(node: torch.fx.Node) -> Iterator[list[Call]]:
    """Calls of torch that may compute the op, the preferred first."""
    special = _SPECIAL.get(node.target)
    if special is not None:
        yield from special(node)
    name = schema_of(node.target).op_name
    function, method = getattr(torch, name, None), getattr(torch.Tensor, name, None)
    if isinstance(function, types.BuiltinFunctionType):  # made from the schema, so it takes arguments in its order
        yield [("call_function", function, node.args, dict(node.kwargs))]
    if isinstance(method, types.MethodDescriptorType):
        yield [("call_method", name, node.args, dict(node.kwargs))]


def _gives_the_same(node: torch.fx.Node, calls: list[Call], fake_mode: Any) -> bool:
    def run() -> Any:
        out: Any = None
        for kind, target, args, kwargs in calls:
            given = tuple(out if a is _BEFORE else a for a in _fakes(args))
            named = _fakes(kwargs)
            out = getattr(given[0], target)(*given[1:], **named) if kind == "call_method" else target(*given, **named)
        return out

    try:
        out = run_fake(fake_mode, run, (), {})
    except Exception:  # not callable like this
        return False
    return _metadata(out) == _metadata(node.meta["val"])


def _fakes(x: Any) -> Any:
    return torch.fx.node.map_arg(x, lambda n: n.meta["val"]) if x else x


def _metadata(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return [_metadata(item) for item in x]
    return (tuple(x.shape), x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else x


# ---------------------------------------------------------------- ops that Python says in another way


def _clone(node: torch.fx.Node) -> Iterator[list[Call]]:
    if node.kwargs.get("memory_format") is torch.contiguous_format:
        yield [("call_function", torch.clone, node.args, {})]


def _slice(node: torch.fx.Node) -> Iterator[list[Call]]:
    given: tuple[Any, ...] = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])
    base, dim, start, end, step = given
    if isinstance(dim, int) and dim >= 0:
        piece = slice(start or None, None if end == _END else end, None if step == 1 else step)
        yield [("call_function", operator.getitem, (base, (*[slice(None)] * dim, piece)), {})]


def _index(node: torch.fx.Node) -> Iterator[list[Call]]:
    base, indices = node.args
    assert isinstance(indices, (list, tuple))
    yield [("call_function", operator.getitem, (base, tuple(slice(None) if i is None else i for i in indices)), {})]


def _to_copy(node: torch.fx.Node) -> Iterator[list[Call]]:
    base: Any = node.args[0]
    dtype = node.kwargs.get("dtype")
    if set(node.kwargs) == {"dtype"} and dtype != base.meta["val"].dtype:  # `to` is no copy where nothing changes
        yield [("call_method", "to", (base, dtype), {})]


def _zero(node: torch.fx.Node) -> Iterator[list[Call]]:
    yield [("call_function", torch.zeros_like, node.args, {})]


def _fill(node: torch.fx.Node) -> Iterator[list[Call]]:
    yield [("call_function", torch.full_like, node.args, {})]


def _fresh(node: torch.fx.Node) -> Iterator[list[Call]]:
    yield [("call_function", torch.clone, node.args, {})]


def _same_method(name: str) -> Callable[[torch.fx.Node], Iterator[list[Call]]]:
    def calls(node: torch.fx.Node) -> Iterator[list[Call]]:
        yield [("call_method", name, node.args, dict(node.kwargs))]

    return calls


_SPECIAL: dict[Any, Callable[[torch.fx.Node], Iterator[list[Call]]]] = {
    _aten.clone.default: _clone,
    _aten.slice.Tensor: _slice,
    _aten.index.Tensor: _index,
    _aten._to_copy.default: _to_copy,
    _aten.zero.default: _zero,
    _aten.fill.Scalar: _fill,
    _aten.lift_fresh_copy.default: _fresh,
    _aten.view.default: _same_method("view"),
    _aten.contiguous.default: _same_method("contiguous"),
}
