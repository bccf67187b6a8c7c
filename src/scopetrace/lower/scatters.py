"""Scatter ops (writes into a part of a tensor) in terms of others, for compilers that support only some of them.

Data flow:
    a scatter op (`slice_`, `select_`, `diagonal_` or `as_strided_scatter`) -> base, new elements and where they go
    -> ops of one form with the same result: `slice_scatter`, `index_put`, `where` or `cat`, as a decomposition of it
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch

from scopetrace._compat.ops import eager
from scopetrace.ops.functional_variants import by_name
from scopetrace.program.traced import TracedProgram

_aten = torch.ops.aten
_slice, _select = _aten.slice_scatter.default, _aten.select_scatter.default
_strided = _aten.as_strided_scatter.default
_VIEWS: dict[Any, Any] = {_aten.diagonal_scatter.default: _aten.diagonal.default, _strided: _aten.as_strided.default}
Form = Literal["slice_scatter", "index_put", "where", "cat"]


def lower_scatters(program: TracedProgram, form: Form) -> TracedProgram:
    """The program, pure and with static sizes, with its scatter ops in one form.

    Index and mask tensors are constants. `slice_scatter` cannot express a diagonal or a strided part: there `index_put`
    is used.
    """
    ops = {_slice, _select, *_VIEWS} - ({_slice} if form == "slice_scatter" else set())
    return program.with_rules({op: functools.partial(_lowered, op, _FORMS[form]) for op in ops}.get)


def _lowered(op: Any, form: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """What a scatter op gives: its base with the elements at `indices` of dimension `dim` replaced by others, in order.

    For a diagonal or a strided part, base and source are flattened, so that each form is written once.
    """
    operands = by_name(op, args, kwargs)
    base, src, is_flat = operands["self"], operands["src"], op in _VIEWS
    dim = 0 if is_flat else operands["dim"] % base.dim()
    with eager():  # where the new elements go, as row-major positions in what they go into
        every = torch.arange(base.numel() if is_flat else base.shape[dim], device="cpu")
        if is_flat:
            every = every.reshape(base.shape)
            if op is _strided:
                every = torch.empty_strided(base.shape, base.stride(), dtype=every.dtype, device="cpu").copy_(every)
            every = _VIEWS[op](every, *args[2:], **kwargs)
        else:
            every = every[operands["index"] if op is _select else slice(*map(operands.get, ("start", "end", "step")))]
        indices = every.reshape(-1)
    if not is_flat:
        return form(base, _aten.unsqueeze.default(src, dim) if op is _select else src, dim, indices)
    flat = [_aten.reshape.default(x, [-1]) for x in (base, src)]
    return _aten.reshape.default(form(*flat, 0, indices), list(base.shape))


def _block(indices: torch.Tensor) -> tuple[int, int] | None:
    """Start and stop of indices, where they are one after the other."""
    with eager():
        start, count = int(indices[0]) if len(indices) else 0, len(indices)
        return (start, start + count) if indices.equal(torch.arange(start, start + count, device="cpu")) else None


def _slice_scatter(base: Any, src: Any, dim: int, indices: torch.Tensor) -> Any:
    block = _block(indices)
    return _index_put(base, src, dim, indices) if block is None else _slice(base, src, dim, *block)


def _index_put(base: Any, src: Any, dim: int, indices: torch.Tensor) -> Any:
    with eager():
        indices = indices.to(base.device)
    return _aten.index_put.default(base, [*[None] * dim, indices], src)


def _where(base: Any, src: Any, dim: int, indices: torch.Tensor) -> Any:
    count, shape = len(indices), [-1 if d == dim else 1 for d in range(base.dim())]
    if count == 0:
        return _aten.clone.default(base)
    with eager():
        source = torch.zeros(base.shape[dim], dtype=torch.int64, device="cpu")
        mask = source.bool().index_fill(0, indices, True).reshape(shape).to(base.device)
        source = source.index_copy(0, indices, torch.arange(count, device="cpu")).to(base.device)
    values = _aten.index_select.default(src, dim, source) if count > 1 else src
    return _aten.where.self(mask, values, base)


def _cat(base: Any, src: Any, dim: int, indices: torch.Tensor) -> Any:
    length, block = base.shape[dim], _block(indices)
    if block is None:
        with eager():
            source = torch.arange(length, device="cpu")
            source = source.index_copy(0, indices, length + source[: len(indices)]).to(base.device)
        return _aten.index_select.default(_aten.cat.default([base, src], dim), dim, source)
    start, stop = block
    before = [_aten.slice.Tensor(base, dim, 0, start)] if start else []
    after = [_aten.slice.Tensor(base, dim, stop, length)] if stop < length else []
    return _aten.cat.default([*before, src, *after], dim)


_FORMS: dict[str, Callable[..., Any]] = {
    "slice_scatter": _slice_scatter,
    "index_put": _index_put,
    "where": _where,
    "cat": _cat,
}
