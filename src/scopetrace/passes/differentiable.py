"""What a pure graph needs so that autograd can go through it as it stands.

`aten.copy`, the twin of `copy_`, has no derivative. And a value that autograd keeps for the backward must not be the
memory of a buffer that the write-back changes afterwards, as batch norm's running statistics are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from scopetrace._compat.fake import run_fake

_aten = torch.ops.aten

# Ops that read an argument for its values alone: its layout and its memory do not count.
_PUTS: dict[Any, int] = {
    _aten.slice_scatter.default: 1,
    _aten.select_scatter.default: 1,
    _aten.diagonal_scatter.default: 1,
    _aten.index_put.default: 2,
}


def spell_out_copies(gm: torch.fx.GraphModule, fake_mode: Any) -> None:
    """Write each `aten.copy` with ops that have a derivative; those between a value and its scatter go."""
    for node in list(gm.graph.nodes):
        if node.target is _aten.copy.default:
            target = node.args[0]
            with gm.graph.inserting_before(node):
                new = _copied(gm.graph, node, fake_mode)
            if new is not None:
                node.replace_all_uses_with(new)
                gm.graph.erase_node(node)
                _drop_views(gm.graph, target)
    gm.recompile()


def keep_old_values(gm: torch.fx.GraphModule, written: set[str]) -> None:
    """Give ops with a gradient a copy of the inputs and attributes named in `written`, which change after the graph."""
    for node in list(gm.graph.nodes):
        if node.op in ("placeholder", "get_attr") and str(node.target) in written:
            users = [u for u in node.users if u.op != "output" and any(map(_carries, u.all_input_nodes))]
            if users and not _carries(node):
                with gm.graph.inserting_after(node):
                    kept = gm.graph.create_node("call_function", _aten.clone.default, (node,))
                kept.meta = dict(node.meta)
                for user in users:
                    user.replace_input_with(node, kept)
    _inputs_first(gm.graph)
    gm.recompile()


def _inputs_first(graph: torch.fx.Graph) -> None:
    """Placeholders stand before all other nodes."""
    first = next((n for n in graph.nodes if n.op != "placeholder"), None)
    for node in list(graph.nodes):
        if node.op == "placeholder" and first is not None:
            first.prepend(node)


def _carries(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.requires_grad


def _copied(graph: torch.fx.Graph, node: torch.fx.Node, fake_mode: Any) -> torch.fx.Node | None:
    source: Any = node.args[1]
    want = node.meta["val"]

    def emit(func: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        new = graph.create_node("call_function", func, args, kwargs)
        new.meta = {k: v for k, v in node.meta.items() if k != "val"}
        fakes, named = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        new.meta["val"] = run_fake(fake_mode, func, tuple(fakes), dict(named))
        new.meta["val"].requires_grad_(want.requires_grad and want.is_floating_point())
        return new

    value = source
    if value.meta["val"].dtype != want.dtype:
        if value.meta["val"].is_complex() and not want.is_complex():
            return None
        value = emit(_aten._to_copy.default, value, dtype=want.dtype)
    if value.meta["val"].device != want.device:
        return None
    if value.meta["val"].shape != want.shape:
        value = emit(_aten.expand.default, value, list(want.shape))
    if all(_puts(user, node) for user in node.users):
        return value
    return _laid_out(emit, value, want)


def _laid_out(emit: Callable[..., torch.fx.Node], value: torch.fx.Node, want: torch.Tensor) -> torch.fx.Node:
    """A new tensor with the strides of `want`, where these are some order of dense dimensions; else contiguous."""
    order = sorted(range(want.dim()), key=lambda d: -want.stride()[d])
    fits = want.permute(order).is_contiguous()
    if not fits or order == list(range(want.dim())):
        return emit(_aten.clone.default, value, memory_format=torch.contiguous_format)
    turned = emit(_aten.permute.default, value, order)
    dense = emit(_aten.clone.default, turned, memory_format=torch.contiguous_format)
    return emit(_aten.permute.default, dense, [order.index(d) for d in range(want.dim())])


def _puts(user: torch.fx.Node, value: torch.fx.Node) -> bool:
    """Whether a node only puts `value` into another tensor."""
    if user.target is _aten.unsqueeze.default:
        return all(_puts(u, user) for u in user.users)
    place = _PUTS.get(user.target)
    return place is not None and [i for i, a in enumerate(user.args) if a is value] == [place]


def _drop_views(graph: torch.fx.Graph, node: Any) -> None:
    """Erase a view that nothing reads any more, and what it was made from."""
    while isinstance(node, torch.fx.Node) and not node.users and getattr(node.target, "is_view", False):
        before = node.args[0]
        graph.erase_node(node)
        node = before
