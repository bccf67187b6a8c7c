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
        if node.op == "call_function" and node.target in _VIEWS:
            with gm.graph.inserting_before(node):
                new = _FORMS[form](_Part(gm, node, fake_mode))
            if new is not node:
                node.replace_all_uses_with(new)
                gm.graph.erase_node(node)
    gm.graph.lint()
    gm.recompile()


class _Part:
    """One scatter node: the result is `base` with some elements replaced by those of `src`."""

    def __init__(self, gm: torch.fx.GraphModule, node: torch.fx.Node, fake_mode: Any) -> None:
        self.gm, self.node, self.fake_mode = gm, node, fake_mode
        self.given = by_name(node.target, node.args, node.kwargs)
        self.base, self.src = self.given["self"], self.given["src"]
        self.size: list[int] = list(self.base.meta["val"].shape)
        self.device = self.base.meta["val"].device

    def emit(self, func: Any, *args: Any) -> torch.fx.Node:
        """A new node with the scope of the scatter, and its fake value."""
        new = self.gm.graph.create_node("call_function", func, args)
        new.meta = {k: v for k, v in self.node.meta.items() if k != "val"}
        fakes = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
        new.meta["val"] = run_fake(self.fake_mode, func, fakes, {})
        return new

    def constant(self, value: torch.Tensor) -> torch.fx.Node:
        """A `get_attr` node of a new buffer of the GraphModule."""
        count = sum(name.startswith("_scatter_constant") for name, _ in self.gm.named_buffers())
        name = f"_scatter_constant{count}"
        self.gm.register_buffer(name, value.to(self.device), persistent=False)
        node = self.gm.graph.create_node("get_attr", name)
        node.meta["val"] = self.fake_mode.from_tensor(value.to(self.device), static_shapes=True)
        return node

    def along(self) -> tuple[int, range] | None:
        """The dimension and the replaced indices for a slice or select; None for other scatters."""
        if self.node.target is _aten.select_scatter.default:
            dim = self.given["dim"] % len(self.size)
            index = self.given["index"] % self.size[dim]
            return dim, range(index, index + 1)
        if self.node.target is _aten.slice_scatter.default:
            dim = self.given["dim"] % len(self.size)
            start, stop, step = slice(self.given["start"], self.given["end"], self.given["step"]).indices(
                self.size[dim]
            )
            return dim, range(start, max(start, stop), step)
        return None

    def slab(self) -> torch.fx.Node:
        """The new value with as many dimensions as the base."""
        if self.node.target is _aten.select_scatter.default:
            return self.emit(_aten.unsqueeze.default, self.src, self.given["dim"] % len(self.size))
        found: torch.fx.Node = self.src
        return found

    def positions(self) -> torch.Tensor:
        """Row-major indices in the base of the replaced elements, in the order of `src`: int64 [src.numel()]."""
        every = torch.arange(torch.Size(self.size).numel(), device="cpu").reshape(self.size)
        rest = self.node.args[2:]
        if self.node.target is _aten.as_strided_scatter.default:
            fake = self.base.meta["val"]
            place = torch.empty_strided(fake.size(), fake.stride(), dtype=torch.int64, device="cpu").copy_(every)
            return place.as_strided(*rest).reshape(-1)  # type: ignore[arg-type]
        view: torch.Tensor = _VIEWS[self.node.target](every, *rest, **self.node.kwargs)
        return view.reshape(-1)

    def row(self, x: Any) -> torch.fx.Node:
        """A tensor reshaped to one dimension."""
        return self.emit(_aten.reshape.default, x, [-1])


def _slice_scatter(part: _Part) -> torch.fx.Node:
    if part.node.target is _aten.slice_scatter.default:
        return part.node
    along = part.along()
    if along is None:
        return _index_put(part)
    dim, indices = along
    return part.emit(_aten.slice_scatter.default, part.base, part.slab(), dim, indices.start, indices.stop)


def _index_put(part: _Part) -> torch.fx.Node:
    along = part.along()
    if along is None:
        places = part.constant(part.positions())
        filled = part.emit(_aten.index_put.default, part.row(part.base), [places], part.row(part.src))
        return part.emit(_aten.reshape.default, filled, part.size)
    dim, indices = along
    places = part.constant(torch.tensor(list(indices), dtype=torch.int64))
    return part.emit(_aten.index_put.default, part.base, [*[None] * dim, places], part.slab())


def _where(part: _Part) -> torch.fx.Node:
    along = part.along()
    if along is None:
        positions = part.positions()
        count = torch.Size(part.size).numel()
        mask, source = torch.zeros(count, dtype=torch.bool), torch.zeros(count, dtype=torch.int64)
        mask[positions] = True
        source[positions] = torch.arange(positions.numel())
        if positions.numel() == 0:
            return part.emit(_aten.clone.default, part.base)
        values = part.emit(_aten.index_select.default, part.row(part.src), 0, part.constant(source))
        shaped = part.emit(_aten.reshape.default, values, part.size)
        return part.emit(_aten.where.self, part.constant(mask.reshape(part.size)), shaped, part.base)
    dim, indices = along
    if not indices:
        return part.emit(_aten.clone.default, part.base)
    mask, source = torch.zeros(part.size[dim], dtype=torch.bool), torch.zeros(part.size[dim], dtype=torch.int64)
    mask[list(indices)] = True
    source[list(indices)] = torch.arange(len(indices))
    values = part.slab()
    if len(indices) > 1:
        values = part.emit(_aten.index_select.default, values, dim, part.constant(source))
    shape = [-1 if d == dim else 1 for d in range(len(part.size))]
    return part.emit(_aten.where.self, part.constant(mask.reshape(shape)), values, part.base)


def _cat(part: _Part) -> torch.fx.Node:
    along = part.along()
    if along is None or along[1].step != 1:
        count = torch.Size(part.size).numel()
        positions = part.positions()
        source = torch.arange(count)
        source[positions] = count + torch.arange(positions.numel())
        both = part.emit(_aten.cat.default, [part.row(part.base), part.row(part.src)])
        picked = part.emit(_aten.index_select.default, both, 0, part.constant(source))
        return part.emit(_aten.reshape.default, picked, part.size)
    dim, indices = along
    pieces = [part.slab()]
    if indices.start > 0:
        pieces.insert(0, part.emit(_aten.slice.Tensor, part.base, dim, 0, indices.start))
    if indices.stop < part.size[dim]:
        pieces.append(part.emit(_aten.slice.Tensor, part.base, dim, indices.stop, part.size[dim]))
    return part.emit(_aten.cat.default, pieces, dim)


_FORMS: dict[str, Callable[[_Part], torch.fx.Node]] = {
    "slice_scatter": _slice_scatter,
    "index_put": _index_put,
    "where": _where,
    "cat": _cat,
}
