"""Rewrite rules for what alias sets put on a functional tape. Each is a local identity.

    op and arguments -> `simplified` -> a Value that has the result already, or the op on simpler arguments
    finished tape    -> `schedule`   -> the same without ops that nobody reads, each as late as its first reader allows

With b the base, v and w new values of parts of it:

    view(scatter(b, v)) = v                        the part that was written is read
    view(scatter(b, v)) = view(b)                  the parts have no element in common
    scatter(scatter(b, v), w) = scatter(b, w)      the same part is written twice
    scatter(b, view(b)) = b                        a part is written with what it is
    reshape(reshape(b)) = reshape(b)               and permute(permute(b)) = permute(b); b itself where nothing changes

`view` and `scatter` are `select`, `slice`, `diagonal` and `index` of a row, and their scatters. All ops are pure, so the
rules hold wherever the operands come from. They hold for gradients where the result requires grad as before: what a rule
drops is a path along which the gradient is zero.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from scopetrace._compat.symbols import to_expr
from scopetrace.containers.structure import leaves
from scopetrace.ir.tape import Call, Op, Value
from scopetrace.ops import views

_aten = torch.ops.aten
_VIEW_OF = {
    _aten.select_scatter.default: _aten.select.int,
    _aten.slice_scatter.default: _aten.slice.Tensor,
    _aten.diagonal_scatter.default: _aten.diagonal.default,
    _aten.index_put.default: _aten.index.Tensor,
}
_LOOK_BACK = 32
"""How many scatters a view is carried past. It bounds the work for each op, so that long programs cost linear time."""


class Part(NamedTuple):
    """Which elements of a tensor a view op takes. Equal parts have the same elements in the same order."""

    func: Any
    dim: int
    numbers: tuple[Any, ...]
    """Of a slice: start, end and step; of a select: the index. Numbers count from the front where sizes are known."""

    def is_apart(self, other: Part) -> bool:
        """Whether no element is in both, as far as that is known: for parts of one dimension, in plain numbers."""
        if self.dim != other.dim or not all(type(n) is int for n in (*self.numbers, *other.numbers)):
            return False
        mine, theirs = self._range(), other._range()
        if mine is None or theirs is None:
            return False
        if not mine or not theirs or mine[-1] < theirs[0] or theirs[-1] < mine[0]:
            return True
        return mine.step == theirs.step and (mine.start - theirs.start) % mine.step != 0

    def _range(self) -> range | None:
        if self.func is _aten.select.int:
            return range(self.numbers[0], self.numbers[0] + 1) if self.numbers[0] >= 0 else None
        return range(*self.numbers) if self.func is _aten.slice.Tensor and min(self.numbers) >= 0 else None


def simplified(func: Any, args: tuple[Any, ...], call: Call | None) -> Value | tuple[Any, tuple[Any, ...]]:
    """A value equal to `func(*args)`, or an op and arguments for the same result.

    Only the ops of `call` are looked through: across its boundary a rule would make a call take or give a value that
    its module does not.
    """
    base = args[0] if args else None
    if not isinstance(base, Value) or base.op.call is not call:
        return func, args
    if func in _VIEW_OF:
        return _simplified_scatter(func, base, args)
    if func is _aten.reshape.default:
        return _simplified_reshape(base, args[1])
    if func is _aten.permute.default:
        return _simplified_permute(base, args[1])
    part = part_of(func, base.fake, args[1:]) if _VIEW_OF.get(base.op.target) is not None else None
    return (func, args) if part is None else _simplified_view(func, part, base, args)


def part_of(func: Any, base: torch.Tensor, args: tuple[Any, ...]) -> Part | None:
    """What the view op `func(base, *args)` takes; None for one that is no part of its base."""
    if func is _aten.index.Tensor:
        one = len(args[0]) == 1 and base.dim() == 1 and _is_constant(args[0][0])
        return Part(func, 0, (id(args[0][0]),)) if one else None
    if func is _aten.diagonal.default:
        offset, *dims = (*args, *(0, 0, 1)[len(args) :])
        return Part(func, -1, (offset, *[d % base.dim() for d in dims]))
    match views.view_arguments(func, base.size(), args):
        case views.Select(dim, index):
            n = base.size(dim)
            return Part(func, dim, (index + n if _known(index, n) and index < 0 else to_expr(index),))
        case views.Slice(dim, start, end, step):
            return Part(_aten.slice.Tensor, dim, _bounds(start, end, step, base.size(dim)))
    return None


def _bounds(start: Any, end: Any, step: Any, n: Any) -> tuple[Any, Any, Any]:
    if _known(start, end, step, n):
        found = range(*slice(start, end, step).indices(n))
        return found.start, (found[-1] + 1 if found else found.start), step
    return to_expr(start), to_expr(n if type(end) is int and end == views.TO_THE_END else end), to_expr(step)


def _known(*numbers: Any) -> bool:
    return all(type(n) is int for n in numbers)


def _is_constant(x: Any) -> bool:
    return isinstance(x, Value) and x.op.kind == "get_attr"


class _Written(NamedTuple):
    """A value made by a scatter: `base` with `new` in `part`."""

    base: Value
    new: Value
    part: Part


def _written(value: Value) -> _Written | None:
    op = value.op
    func = _VIEW_OF.get(op.target) if op.kind == "call_function" else None
    if func is None or op.kwargs or not isinstance(op.args[0], Value):
        return None
    if func is _aten.index.Tensor:
        indices, new, *accumulate = op.args[1:]
        if accumulate or new.fake.dim() != 1:
            return None
        view_args: tuple[Any, ...] = (indices,)
    else:
        new, *rest = op.args[1:]
        view_args = tuple(rest)
    part = part_of(func, op.args[0].fake, view_args)
    return None if part is None else _Written(op.args[0], new, part)


def _carries_as(new: Value, *old: Value) -> bool:
    """Whether `new` requires grad as a result made of `old` does."""
    return bool(new.requires_grad == any(v.requires_grad for v in old))


def _simplified_view(func: Any, part: Part, base: Value, args: tuple[Any, ...]) -> Any:
    call = base.op.call
    for _ in range(_LOOK_BACK):
        written = _written(base)
        if written is None or base.op.call is not call:
            break
        if written.part == part:
            if _carries_as(written.new, base) and written.new.fake.dtype == base.fake.dtype:
                return written.new
            break
        if not part.is_apart(written.part) or not _carries_as(written.base, base):
            break
        base = written.base
    return func, (base, *args[1:])


def _simplified_scatter(func: Any, base: Value, args: tuple[Any, ...]) -> Any:
    new = args[2] if func is _aten.index_put.default else args[1]
    view_args = (args[1], *args[3:]) if func is _aten.index_put.default else args[2:]
    part = part_of(_VIEW_OF[func], base.fake, view_args)
    if part is None:
        return func, args
    written = _written(base)
    if written is not None and written.part == part:
        if written.new is new:
            return base
        if _carries_as(written.base, written.base, written.new) or new.requires_grad:
            base = written.base
    is_view = new.op.kind == "call_function" and new.op.args and new.op.args[0] is base and not new.op.kwargs
    if is_view and part_of(new.op.target, base.fake, new.op.args[1:]) == part and _carries_as(base, base, new):
        return base
    return func, (base, *args[1:])


def _simplified_reshape(base: Value, size: Any) -> Any:
    inner = base
    while inner.op.target is _aten.reshape.default and inner.op.call is base.op.call:
        if not _carries_as(inner.op.tensor(0), base):
            break
        inner = inner.op.tensor(0)
    wanted = [inner.fake.numel()] if list(size) == [-1] else list(size)
    return inner if to_expr(tuple(inner.fake.size())) == to_expr(tuple(wanted)) else (_aten.reshape.default, (inner, size))


def _simplified_permute(base: Value, dims: Any) -> Any:
    if base.op.target is not _aten.permute.default or not _carries_as(base.op.tensor(0), base):
        return _aten.permute.default, (base, dims)
    first: Any = base.op.args[1]
    both = [first[d] % base.fake.dim() for d in dims]
    return base.op.tensor(0) if both == sorted(both) else (_aten.permute.default, (base.op.tensor(0), both))


# The finished tape ---------------------------------------------------------------------------------------------------


class Boundary(NamedTuple):
    """The start or the end of a call, before op number `index` of the tape."""

    index: int
    call: Call
    is_start: bool


def schedule(ops: list[Op], boundaries: list[Boundary], removable: set[Op], results: list[Value]) -> list[Op]:
    """The ops without those of `removable` that nobody reads; the others of these stand right before their first reader.

    So a scatter into a tensor that a call writes a part of leaves the call, if nobody in it reads the whole; none moves
    into a call. The ranges of the calls are set anew. `boundaries` are in order. `results` are read at the end, in the
    outermost call.
    """
    items = list(_merged(ops, boundaries))
    around = list(_around(items))
    first_reader = dict.fromkeys(results, len(items) - 1)
    placed: dict[int, list[Op]] = collections.defaultdict(list)
    for i in reversed(range(len(items))):
        item, place = items[i], i
        if isinstance(item, Op) and item in removable:
            readers = [first_reader[v] for v in item.values() if v in first_reader]
            if not readers:
                continue
            place = min(readers)
            while around[place] > i:  # in a call that begins after the op: stay in front of it
                place = around[place]
            placed[place].append(item if around[place] == around[i] else _moved_out(item, items, around[place]))
        for value in _read(item):
            first_reader[value] = min(place, first_reader.get(value, place))
    return _in_order(items, placed, removable)


def _merged(ops: list[Op], boundaries: list[Boundary]) -> Iterator[Op | Boundary]:
    start = 0
    for boundary in boundaries:
        yield from ops[start : boundary.index]
        yield boundary
        start = boundary.index
    yield from ops[start:]


def _around(items: list[Op | Boundary]) -> Iterator[int]:
    """For each item the start of the call in which it reads, -1 for none. Arguments are read outside of their call."""
    starts = [-1]
    for i, item in enumerate(items):
        yield starts[-1]
        if isinstance(item, Boundary):
            if item.is_start:
                starts.append(i)
            else:
                starts.pop()


def _read(item: Op | Boundary) -> list[Value]:
    if isinstance(item, Op):
        return leaves((item.args, item.kwargs), Value) if item.kind == "call_module" else item.inputs()
    call = item.call
    return leaves((call.args, call.kwargs) if item.is_start else (call.outputs, call.mutated), Value)


def _moved_out(op: Op, items: list[Op | Boundary], start: int) -> Op:
    """The op as one of the call that starts there, or of none."""
    boundary = items[start] if start >= 0 else None
    call = boundary.call if isinstance(boundary, Boundary) else next(c.parent for c in _calls(items))
    moved = op.moved_to(call)
    moved.scope = op.scope if call is None else call.scope
    for value in moved.values():
        value.op = moved
    return moved


def _calls(items: list[Op | Boundary]) -> Iterator[Call]:
    return (item.call for item in items if isinstance(item, Boundary))


def _in_order(items: list[Op | Boundary], placed: dict[int, list[Op]], removable: set[Op]) -> list[Op]:
    ops: list[Op] = []
    for i, item in enumerate(items):
        ops += reversed(placed.get(i, ()))
        if isinstance(item, Op):
            if item not in removable:
                ops.append(item)
        elif item.is_start:
            item.call.start = len(ops)
        else:
            item.call.stop = len(ops)
    return ops
