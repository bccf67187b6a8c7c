"""Rewrites scatter ops (writes into a part of a tensor) for compilers that support only some of them.

Data flow:
    a scatter node (`slice_`, `select_`, `diagonal_` or `as_strided_scatter`) -> base, replaced part, new value
    -> nodes of one form with the same result: `slice_scatter`, `index_put`, `where` or `cat`, all functional ATen ops
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.fx

from scopetrace._compat.tensors import run_fake
from scopetrace.ops.functional_variants import by_name

_aten = torch.ops.aten
Form = Literal["slice_scatter", "index_put", "where", "cat"]

_VIEWS: dict[Any, Any] = {
    _aten.slice_scatter.default: _aten.slice.Tensor,
    _aten.select_scatter.default: _aten.select.int,
    _aten.diagonal_scatter.default: _aten.diagonal.default,
    _aten.as_strided_scatter.default: _aten.as_strided.default,
}


def lower_scatters(gm: torch.fx.GraphModule, form: Form, fake_mode: Any) -> None:
    """Rewrite the scatter nodes of an ATen graph, and of the graphs of its higher-order ops, in place.

    Index and mask tensors become non-persistent buffers of `gm`. `slice_scatter` cannot express a diagonal or a strided
    part: there `index_put` is used.
    """
    for inner in gm.modules():  # the bodies of higher-order ops too
        if isinstance(inner, torch.fx.GraphModule):
            _lower_in(inner, form, fake_mode)


def _lower_in(gm: torch.fx.GraphModule, form: Form, fake_mode: Any) -> None:
    for node in list(gm.graph.nodes):
        if node.target not in _VIEWS or (form, node.target) == ("slice_scatter", _aten.slice_scatter.default):
            continue
        with gm.graph.inserting_before(node):
            scatter = _Scatter(gm, node, fake_mode)
            new = _FORMS[form](scatter)
            if scatter.is_flat:
                new = scatter.emit(_aten.reshape.default, new, list(node.meta["val"].shape))
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
    gm.graph.lint()
    gm.recompile()


class _Scatter:
    """A scatter node as: `base` with the elements at `indices` of dimension `dim` replaced by those of `src`, in order.

    For a diagonal or a strided part, base and src are flattened (`is_flat`), so that each form is written once.
    """

    def __init__(self, gm: torch.fx.GraphModule, node: torch.fx.Node, fake_mode: Any) -> None:
        self._gm, self._node, self._fake_mode = gm, node, fake_mode
        operands = by_name(node.target, node.args, node.kwargs)
        self.base, self.src = operands["self"], operands["src"]
        fake = self.base.meta["val"]
        self.is_flat = node.target not in (_aten.select_scatter.default, _aten.slice_scatter.default)
        self.dim = 0 if self.is_flat else operands["dim"] % fake.dim()
        self.length = fake.numel() if self.is_flat else fake.shape[self.dim]
        every = torch.arange(self.length, device="cpu")
        if self.is_flat:
            self.indices = _positions(node, fake)
            self.base, self.src = (self.emit(_aten.reshape.default, x, [-1]) for x in (self.base, self.src))
        elif node.target is _aten.select_scatter.default:
            self.indices = every[operands["index"]].reshape(1)
            self.src = self.emit(_aten.unsqueeze.default, self.src, self.dim)
        else:
            self.indices = every[operands["start"] : operands["end"] : operands["step"]]

    @property
    def block(self) -> tuple[int, int] | None:
        """Start and stop of the indices, where they are one after the other."""
        start, count = int(self.indices[0]) if len(self.indices) else 0, len(self.indices)
        is_block = self.indices.equal(torch.arange(start, start + count, device="cpu"))
        return (start, start + count) if is_block else None

    def emit(self, func: Any, *args: Any) -> torch.fx.Node:
        """A new node with the scope of the scatter, and its fake value."""
        new = self._gm.graph.create_node("call_function", func, args)
        new.meta = {k: v for k, v in self._node.meta.items() if k != "val"}
        fakes = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
        new.meta["val"] = run_fake(self._fake_mode, func, fakes, {})
        return new

    def constant(self, value: torch.Tensor) -> torch.fx.Node:
        """A `get_attr` node of a new buffer of the GraphModule."""
        count = sum(name.startswith("_scatter_constant") for name, _ in self._gm.named_buffers())
        name = f"_scatter_constant{count}"
        value = value.to(self.base.meta["val"].device)
        self._gm.register_buffer(name, value, persistent=False)
        node = self._gm.graph.create_node("get_attr", name)
        node.meta["val"] = self._fake_mode.from_tensor(value, static_shapes=True)
        return node


def _positions(node: torch.fx.Node, base: torch.Tensor) -> torch.Tensor:
    """Row-major indices in the base of the replaced elements, in the order of `src`: int64 [src.numel()]."""
    every = torch.arange(base.numel(), device="cpu").reshape(base.shape)
    if node.target is _aten.as_strided_scatter.default:
        every = torch.empty_strided(base.size(), base.stride(), dtype=torch.int64, device="cpu").copy_(every)
    view: torch.Tensor = _VIEWS[node.target](every, *node.args[2:], **node.kwargs)
    return view.reshape(-1)


def _slice_scatter(scatter: _Scatter) -> torch.fx.Node:
    if scatter.block is None:
        return _index_put(scatter)
    return scatter.emit(_aten.slice_scatter.default, scatter.base, scatter.src, scatter.dim, *scatter.block)


def _index_put(scatter: _Scatter) -> torch.fx.Node:
    places = [*[None] * scatter.dim, scatter.constant(scatter.indices)]
    return scatter.emit(_aten.index_put.default, scatter.base, places, scatter.src)


def _where(scatter: _Scatter) -> torch.fx.Node:
    if len(scatter.indices) == 0:
        return scatter.emit(_aten.clone.default, scatter.base)
    values = scatter.src
    if len(scatter.indices) > 1:
        source = torch.zeros(scatter.length, dtype=torch.int64)
        source[scatter.indices] = torch.arange(len(scatter.indices))
        values = scatter.emit(_aten.index_select.default, values, scatter.dim, scatter.constant(source))
    mask = torch.zeros(scatter.length, dtype=torch.bool).index_fill(0, scatter.indices, True)
    shape = [-1 if d == scatter.dim else 1 for d in range(scatter.base.meta["val"].dim())]
    return scatter.emit(_aten.where.self, scatter.constant(mask.reshape(shape)), values, scatter.base)


def _cat(scatter: _Scatter) -> torch.fx.Node:
    base, dim, block = scatter.base, scatter.dim, scatter.block
    if block is None:
        both = scatter.emit(_aten.cat.default, [base, scatter.src], dim)
        source = torch.arange(scatter.length)
        source[scatter.indices] = scatter.length + torch.arange(len(scatter.indices))
        return scatter.emit(_aten.index_select.default, both, dim, scatter.constant(source))
    start, stop = block
    before = [scatter.emit(_aten.slice.Tensor, base, dim, 0, start)] if start else []
    after = [scatter.emit(_aten.slice.Tensor, base, dim, stop, scatter.length)] if stop < scatter.length else []
    return scatter.emit(_aten.cat.default, [*before, scatter.src, *after], dim)


_FORMS: dict[str, Callable[[_Scatter], torch.fx.Node]] = {
    "slice_scatter": _slice_scatter,
    "index_put": _index_put,
    "where": _where,
    "cat": _cat,
}
