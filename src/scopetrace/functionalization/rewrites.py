"""Rewrite rules that remove the cost of alias sets. Each is a local identity of functional ops.

    op and operands -> `simplified` -> a value that is the result already, or the op on other operands
    finished tape   -> `schedule`   -> the same without ops that nobody reads, each as late as its first reader allows

With b the base, v and w new values of parts of it:

    view(scatter(b, v)) = v                        the part that was written is read
    view(scatter(b, v)) = view(b)                  the parts have no element in common
    scatter(scatter(b, v), w) = scatter(b, w)      the same part is written twice
    scatter(b, view(b)) = b                        a part is written with what it is
    reshape(reshape(b)) = reshape(b), permute(permute(b)) = permute(b), and b itself where nothing changes

`view` is `select`, `slice`, `diagonal` or the `index` of a row, and `scatter` the scatter op of the same arguments. All
ops are functional, so the rules hold wherever the operands come from. They hold for gradients too: what a rule drops is
a path with a gradient of zero, and a rule is left out where its result would not require grad as before.
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
_SCATTERS = {
    _aten.select_scatter.default: _aten.select.int,
    _aten.slice_scatter.default: _aten.slice.Tensor,
    _aten.diagonal_scatter.default: _aten.diagonal.default,
    _aten.index_put.default: _aten.index.Tensor,
}
"""Scatter ops, and their view ops."""
_LOOK_BACK = 32
"""How many scatters a view is moved past: a bound to the work for each op, so that long programs take linear time."""

Simplified = Value | tuple[Any, tuple[Any, ...]]


def simplified(func: Any, args: tuple[Any, ...], call: Call | None) -> Simplified:
    """A value equal to `func(*args)`, or an op and arguments for the same result.

    Only ops of `call` are looked through: across its boundary a rule would make it take or give a value that its module
    does not.
    """
    base = args[0] if args else None
    if not isinstance(base, Value) or base.op.call is not call:
        return func, args
    if func in _SCATTERS:
        return _scatter(func, base, args)
    if func is _aten.reshape.default:
        return _reshape(base, args[1])
    if func is _aten.permute.default:
        return _permute(base, args[1])
    part = part_of(func, base.fake, args[1:]) if base.op.target in _SCATTERS else None
    return (func, args) if part is None else _view(func, part, base, args)


class Part(NamedTuple):
    """Which elements of a tensor a view op takes. Equal parts have the same elements in the same order."""

    func: Any
    dim: int
    numbers: tuple[Any, ...]
    """Of a slice start, end and step, of a select the index: counted from the front where the sizes are known."""

    def is_disjoint(self, other: Part) -> bool:
        """Whether no element is in both. Known for parts of one dimension whose numbers are plain."""
        mine, theirs = self._range(), other._range()
        if self.dim != other.dim or mine is None or theirs is None:
            return False
        if not mine or not theirs or mine[-1] < theirs[0] or theirs[-1] < mine[0]:
            return True
        return mine.step == theirs.step and (mine.start - theirs.start) % mine.step != 0

    def _range(self) -> range | None:
        if not all(type(n) is int and n >= 0 for n in self.numbers):
            return None
        if self.func is _aten.select.int:
            return range(self.numbers[0], self.numbers[0] + 1)
        return range(*self.numbers) if self.func is _aten.slice.Tensor else None


def part_of(func: Any, base: torch.Tensor, args: tuple[Any, ...]) -> Part | None:
    """What the view op `func(base, *args)` takes. None for an op that does not take a part of its base."""
    if func is _aten.index.Tensor:
        (index, *more) = args[0]
        is_row = not more and base.dim() == 1 and isinstance(index, Value) and index.op.kind == "get_attr"
        return Part(func, 0, (index,)) if is_row else None
    if func is _aten.diagonal.default:
        offset, first, second = args + (0, 0, 1)[len(args) :]
        return Part(func, -1, (offset, first % base.dim(), second % base.dim()))
    match views.view_arguments(func, base.size(), args):
        case views.Select(dim, index):
            n = base.size(dim)
            return Part(func, dim, (index + n if _are_ints(index, n) and index < 0 else to_expr(index),))
        case views.Slice(dim, start, end, step):
            n = base.size(dim)
            bounds = to_expr(start), to_expr(n if _are_ints(end) and end == views.TO_THE_END else end), to_expr(step)
            if _are_ints(start, end, step, n):
                indices = range(*slice(start, end, step).indices(n))
                bounds = indices.start, (indices[-1] + 1 if indices else indices.start), step
            return Part(_aten.slice.Tensor, dim, bounds)
    return None


def _are_ints(*numbers: Any) -> bool:
    return all(type(n) is int for n in numbers)


class _Scattered(NamedTuple):
    """The operands of a scatter: `base` with `new` in `part`."""

    base: Value
    new: Value
    part: Part


def _scattered(value: Value) -> _Scattered | None:
    """The operands of the scatter that made a value; None of all other values."""
    op = value.op
    if op.kind != "call_function" or op.target not in _SCATTERS or op.kwargs:
        return None
    return _operands(op.target, op.args)


def _operands(func: Any, args: tuple[Any, ...]) -> _Scattered | None:
    base, *rest = args
    is_index = func is _aten.index_put.default
    new = rest.pop(1 if is_index else 0)
    if not isinstance(base, Value) or not isinstance(new, Value) or new.fake.dtype != base.fake.dtype:
        return None
    if is_index and (len(rest) > 1 or new.fake.dim() != 1):  # accumulates, or repeats one number
        return None
    part = part_of(_SCATTERS[func], base.fake, tuple(rest))
    return None if part is None else _Scattered(base, new, part)


def _carries_as(new: Value, *old: Value) -> bool:
    """Whether `new` requires grad as a result made of `old` does."""
    return new.requires_grad == any(v.requires_grad for v in old)


def _view(func: Any, part: Part, base: Value, args: tuple[Any, ...]) -> Simplified:
    call = base.op.call
    for _ in range(_LOOK_BACK):
        scatter = _scattered(base) if base.op.call is call else None
        if scatter is None:
            break
        if scatter.part == part and _carries_as(scatter.new, base):
            return scatter.new
        if not part.is_disjoint(scatter.part) or not _carries_as(scatter.base, base):
            break
        base = scatter.base
    return func, (base, *args[1:])


def _scatter(func: Any, base: Value, args: tuple[Any, ...]) -> Simplified:
    outer = _operands(func, args)
    if outer is None:
        return func, args
    inner = _scattered(base)
    if inner is not None and inner.part == outer.part:
        if inner.new is outer.new:
            return base
        if outer.new.requires_grad or _carries_as(inner.base, base):
            base = inner.base
    if _is_view(outer.new, base, outer.part) and _carries_as(base, base, outer.new):
        return base
    return func, (base, *args[1:])


def _is_view(value: Value, base: Value, part: Part) -> bool:
    op = value.op
    if op.kind != "call_function" or op.kwargs or not op.args or op.args[0] is not base:
        return False
    return part_of(op.target, base.fake, op.args[1:]) == part


def _reshape(base: Value, size: Any) -> Simplified:
    inner = base
    while inner.op.target is _aten.reshape.default and inner.op.call is base.op.call:
        if not _carries_as(inner.op.tensor(0), base):
            break
        inner = inner.op.tensor(0)
    wanted = [inner.fake.numel()] if list(size) == [-1] else list(size)
    if to_expr(tuple(inner.fake.size())) == to_expr(tuple(wanted)):
        return inner
    return _aten.reshape.default, (inner, size)


def _permute(base: Value, dims: Any) -> Simplified:
    if base.op.target is not _aten.permute.default or not _carries_as(base.op.tensor(0), base):
        return _aten.permute.default, (base, dims)
    first: Any = base.op.args[1]
    both = [first[d] % base.fake.dim() for d in dims]
    return base.op.tensor(0) if both == sorted(both) else (_aten.permute.default, (base.op.tensor(0), both))


# The finished tape ---------------------------------------------------------------------------------------------------


def boundaries(calls: list[Call]) -> dict[int, list[tuple[Call, bool]]]:
    """By position of an op, the calls that end or begin before it, in order; each with whether it begins."""
    places = collections.defaultdict[int, list[tuple[Call, bool]]](list)
    around: list[Call] = []
    for call in (*calls, None):
        while around and (call is None or around[-1] not in call.ancestors()):
            ended = around.pop()
            places[ended.stop].append((ended, False))
        if call is not None:
            places[call.start].append((call, True))
            around.append(call)
    return places


Item = Op | tuple[Call, bool]
"""An op, or the boundary of a call before the next one: whether it begins."""


def schedule(ops: list[Op], calls: list[Call], removable: set[Op], results: list[Value]) -> list[Op]:
    """The ops without those of `removable` that nobody reads, and the others of these right before their first reader.

    So a scatter into a tensor that a call writes a part of leaves the call, if nobody in it reads the whole; none moves
    into a call. The ranges of the calls are set anew. `results` are read at the end, in the outermost call.
    """
    if not removable:
        return ops
    places = boundaries(calls)
    items: list[Item] = [item for i, op in enumerate(ops) for item in (*places.get(i, ()), op)]
    items += places.get(len(ops), ())
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
            if around[place] != around[i]:
                boundary = items[around[place]] if around[place] >= 0 else None
                call = boundary[0] if isinstance(boundary, tuple) else calls[0].parent
                item = item.replace(call=call, scope=item.scope if call is None else call.scope).take_values()
            placed[place].append(item)
        for value in _read(item):
            first_reader[value] = min(place, first_reader.get(value, place))
    return _in_order(items, placed, removable)


def _around(items: list[Item]) -> Iterator[int]:
    """For each item the start of the call in which it reads, -1 for none. Arguments are read outside of their call."""
    starts = [-1]
    for i, item in enumerate(items):
        yield starts[-1]
        if isinstance(item, tuple):
            _, begins = item
            starts.append(i) if begins else starts.pop()


def _read(item: Item) -> list[Value]:
    if isinstance(item, Op):
        return item.inputs()
    call, begins = item
    return leaves((call.args, call.kwargs) if begins else (call.outputs, call.mutated), Value)


def _in_order(items: list[Item], placed: dict[int, list[Op]], removable: set[Op]) -> list[Op]:
    ops: list[Op] = []
    for i, item in enumerate(items):
        ops += reversed(placed.get(i, ()))
        if isinstance(item, tuple):
            call, begins = item
            setattr(call, "start" if begins else "stop", len(ops))
        elif item not in removable:
            ops.append(item)
    return ops
