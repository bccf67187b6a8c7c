"""The last step of torch level: nodes call functions and methods of torch, also for ATen ops where there is one."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F

from scopetrace._compat.ops import schema_of
from scopetrace._compat.tensors import run_fake
from scopetrace.ir.tape import Tape, bind
from scopetrace.ops.views import TO_THE_END
from scopetrace.torch_level.tapes import ORIGIN, TorchTarget

_aten = torch.ops.aten
Call = tuple[str, Any, tuple[Any, ...], dict[str, Any]]
"""What a node does: `op`, `target`, `args`, `kwargs`."""


def name_torch_functions(gm: torch.fx.GraphModule, tape: Tape) -> None:
    """Let the nodes of `gm`, made from a torch-level tape, call functions and methods of torch.

    An ATen op stays where no function of torch, called with its arguments, gives the same sizes, strides and dtype.
    """
    for node in gm.graph.nodes:
        if isinstance(node.target, TorchTarget):
            node.op, node.target = node.target.kind, node.target.target
        elif node.op == "call_function" and getattr(node.target, "namespace", None) == "aten":
            calls = (call for call in _candidates(node) if _gives_the_same(node, call, tape.fake_mode))
            node.op, node.target, node.args, node.kwargs = next(calls, (node.op, node.target, node.args, node.kwargs))
        node.meta.pop(ORIGIN, None)
    gm.graph.lint()
    gm.recompile()
    for inner in gm.children():  # the bodies of higher-order ops
        if isinstance(inner, torch.fx.GraphModule):
            name_torch_functions(inner, tape)


def _candidates(node: torch.fx.Node) -> Iterator[Call]:
    """Calls of torch that may compute the op, the preferred first."""
    if node.target in _SPECIAL:
        yield from _SPECIAL[node.target](node)
    if node.target in _RENAMED:
        yield "call_function", _RENAMED[node.target], node.args, {}
    name = schema_of(node.target).op_name
    yield from _calls_as(node.meta.get(ORIGIN, {}).get("node"), name, node)
    if isinstance(function := getattr(torch, name, None), types.BuiltinFunctionType):
        yield "call_function", function, node.args, node.kwargs  # made from the schema, so it takes them in this order
    if isinstance(getattr(torch.Tensor, name, None), types.MethodDescriptorType):
        yield "call_method", name, node.args, node.kwargs


def _calls_as(origin: torch.fx.Node | None, name: str, node: torch.fx.Node) -> Iterator[Call]:
    """The op as what the graph called for it, without `_`, `out=` or `inplace=True`."""
    if origin is None:
        return
    if origin.target == f"{name}_":
        yield "call_method", name, node.args, node.kwargs
    elif getattr(origin.target, "__module__", None) == "_operator" and hasattr(operator, name):
        yield "call_function", getattr(operator, name), node.args, node.kwargs
    elif origin.target is not getattr(torch, f"{name}_", None) and hasattr(F, name):
        function = getattr(F, name)
        has_inplace = "inplace" in getattr(function, "__annotations__", ())
        if has_inplace and not bind(function, node.args, node.kwargs).get("inplace"):
            yield "call_function", function, node.args, node.kwargs


def _gives_the_same(node: torch.fx.Node, call: Call, fake_mode: Any) -> bool:
    kind, target, args, kwargs = call
    try:
        out = run_fake(fake_mode, functools.partial(TorchTarget(kind, target), *_fakes(args), **_fakes(kwargs)), (), {})
    except Exception:  # not callable like this
        return False
    return _metadata(out) == _metadata(node.meta["val"])


def _fakes(x: Any) -> Any:
    return torch.fx.node.map_arg(x, lambda n: n.meta["val"]) if x else x


def _metadata(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return [_metadata(item) for item in x]
    return (tuple(x.shape), x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else x


# Ops that Python says in another way ---------------------------------------------------------------------------------


def _slice(node: torch.fx.Node) -> Iterator[Call]:
    arguments: tuple[Any, ...] = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])
    base, dim, start, end, step = arguments
    if isinstance(dim, int) and dim >= 0:
        piece = slice(start or None, None if end == TO_THE_END else end, None if step == 1 else step)
        yield "call_function", operator.getitem, (base, (*[slice(None)] * dim, piece)), {}


def _index(node: torch.fx.Node) -> Iterator[Call]:
    base, indices = node.args
    assert isinstance(indices, (list, tuple))
    yield "call_function", operator.getitem, (base, tuple(slice(None) if i is None else i for i in indices)), {}


def _to_copy(node: torch.fx.Node) -> Iterator[Call]:
    base: Any = node.args[0]
    dtype = node.kwargs.get("dtype")
    if set(node.kwargs) == {"dtype"} and dtype != base.meta["val"].dtype:  # `to` is no copy where nothing changes
        yield "call_method", "to", (base, dtype), {}


_SPECIAL: dict[Any, Callable[[torch.fx.Node], Iterator[Call]]] = {
    _aten.slice.Tensor: _slice,
    _aten.index.Tensor: _index,
    _aten._to_copy.default: _to_copy,
}
_RENAMED: dict[Any, Callable[..., Any]] = {
    _aten.zero.default: torch.zeros_like,
    _aten.fill.Scalar: torch.full_like,
    _aten.lift_fresh_copy.default: torch.clone,
}
