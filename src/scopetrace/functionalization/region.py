"""The memory that some values share, as a functional program sees it: one current value, and the ways to its views.

A write to a view is kept back until someone reads another alias, and is then carried up as far as this one asks for:
writes that follow each other on one view cost one scatter, and a layer that writes into its part of a cache and reads
it again does not touch the whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from scopetrace._compat.symbols import example, to_expr
from scopetrace.functionalization.emitter import Emitter
from scopetrace.functionalization.geometry import Geometry, Positions, Relation, index_in, relate
from scopetrace.functionalization.overwrite import OVERWRITE
from scopetrace.functionalization.refusal import refusal
from scopetrace.functionalization.view_ops import relate_by_op
from scopetrace.ir.tape import Op, Value

_aten = torch.ops.aten
_STRIDE_SENSITIVE = frozenset(
    {
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten._reshape_alias.default,
        _aten.as_strided.default,
        _aten.view_as_complex.default,
        _aten.view.dtype,
    }
)


@dataclasses.dataclass(frozen=True, eq=False)
class Link:
    """How an alias came from another: by a view op (`func` on `args`, result `slot`); without `func`, it is that."""

    parent: Value
    func: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    slot: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Pending:
    """A write that what the alias is a view of does not have yet."""

    alias: Value
    writer: Op
    hidden: bool
    """Whether autograd does not see it."""
    before: int
    """The version before it: that of the values which it is put into."""


class Region:
    """The aliases of one storage. `old` values are of the recorded tape, `new` ones of the tape without mutation."""

    def __init__(
        self,
        emitter: Emitter,
        bring: Callable[[Value], None],
    ) -> None:
        self._bring = bring  # puts a root on the tape that the program reads only later
        self.links: dict[Value, Link] = {}  # added to by `link`
        self.roots: list[Value] = []
        self.written: dict[Value, Op] = {}  # the values written to, and the last op that did
        self.reshaped: dict[Value, tuple[Value, Op]] = {}  # by transpose_ and its kind: what became of a value
        self._emitter = emitter
        self._first: dict[Value, Value] = {}  # what `same` found, for each value on its way
        self._with_grad: dict[Value, None] = {}  # aliases that require grad, in order
        self._version = 0
        self._now: dict[Value, tuple[Value, int]] = {}
        self._pending: Pending | None = None
        self._observed = False
        self._replaced: set[Value] = set()
        self._whole: Value | None = None  # of several roots: all their elements in one row
        self._relations: dict[Value, Relation] = {}

    @property
    def version(self) -> int:
        """How many writes there were."""
        return self._version

    def link(self, value: Value, link: Link) -> None:
        """Say how an alias came from another."""
        if value in self._first:
            self._first.clear()
        if value.requires_grad:
            self._with_grad[value] = None
        self.links[value] = link

    def same(self, old: Value) -> Value:
        """The first value that is this very tensor. Each in-place op adds one to the way there."""
        passed: list[Value] = []
        first = self._first.get(old)
        while first is None:
            passed.append(old)
            link = self.links.get(old)
            if link is None or link.func is not None:
                first = old
            else:
                old = link.parent
                first = self._first.get(old)
        self._first.update(dict.fromkeys(passed, first))
        return first

    def has_history(self, but: Value) -> bool:
        """Whether an alias other than `but` requires grad."""
        return any(v is not but for v in self._with_grad) or any(v is not but and v.requires_grad for v in self.roots)

    def gain_history(self, old: Value) -> None:
        """An alias, and what it is a view of, are written in a way that autograd sees."""
        if old not in self._with_grad:
            self._with_grad |= dict.fromkeys(self.above(old))

    def above(self, old: Value) -> Iterator[Value]:
        """A value, what it is a view of, and so on up to a root."""
        yield old
        while (link := self.links.get(old)) is not None:
            old = link.parent
            yield old

    def became(self, old: Value) -> tuple[Value, Op] | None:
        """What an in-place change of shape or memory made of a value, and the op; None when there was none."""
        while old not in self.reshaped:
            link = self.links.get(old)
            if link is None or link.func is not None or link.parent in self._replaced:
                return None
            old = link.parent
        return self.reshaped[old]

    def define(self, old: Value, new: Value) -> None:
        """An alias has just been made, and `new` is its value."""
        self._now[self.same(old)] = (new, self._version)
        self._observed = True

    def read(self, old: Value, reader: Op) -> Value:
        """The present value of an alias."""
        old = self.same(old)
        found = self._now.get(old)
        if found is not None and found[1] == self._version:
            return found[0]
        self._settle(list(self._all_above(old)))
        return self._derive(old, reader)

    def write(self, old: Value, new: Value, writer: Op, *, hidden: bool = False) -> None:
        """An alias gets a new value. `hidden`: autograd does not see it."""
        old = self.same(old)
        if len(self.roots) > 1 and self._whole is None:
            self._join(writer)
        if self._pending is not None and self._pending.hidden != hidden:
            self._settle([])
        before = self._version
        if self._pending is not None and self._pending.alias is old:
            before = self._pending.before
            self._version += self._observed  # others were made from the value that this one follows
        else:
            self._settle(self._way_up(old))
            self._version += 1
        self._observed = False
        self._now[old] = (new, self._version)
        self._pending = Pending(old, writer, hidden, before)
        self.written[old] = writer

    def replace(self, old: Value, new: Value, writer: Op) -> None:
        """The whole memory gets a new value of another size; `old` is its only alias that counts."""
        for root in self.roots:
            if root is not old:
                self.link(root, Link(old))
                self._replaced.add(old)
        self.roots, self._whole, self._pending = [old], None, None
        self.links.pop(old, None)
        self._first.clear()
        self._version += 1
        self._now = {old: (new, self._version)}
        self.written[old] = writer

    def overwritten(self, old: Value, new: Value, writer: Op) -> Value:
        """`new` with the gradient of `old`, or without any where that has none."""
        writer, found = dataclasses.replace(writer, grad=True), new
        if old.requires_grad:
            found = self._emitter.run(writer, OVERWRITE, (old, new), {})
        elif new.requires_grad:
            found = self._emitter.run(writer, _aten.detach.default, (new,), {})
        return found

    # ---------------------------------------------------------------- inside

    def _settle(self, wanted: list[Value]) -> None:
        """Carry the write that was kept back into the first alias above it that is one of `wanted`, else the root.

        Then it is this alias that is kept back. All that is not carried up is inside of it. A hidden write goes into
        the root at once: each alias on the way gets the gradient of what it was just before.
        """
        if self._pending is None:
            return
        pending, chain = self._pending, self._way_up(self._pending.alias)
        last = None if pending.hidden else next((i for i, v in enumerate(chain) if v in wanted), None)
        self._pending = None if last is None else dataclasses.replace(pending, alias=chain[last])
        self._observed = True
        chain = chain if last is None else chain[: last + 1]
        new, writer = self._now[pending.alias][0], pending.writer
        now, self._version = self._version, pending.before
        bases = [self._derive(v, writer) for v in chain[1:]]  # without the write
        self._version = now
        for view, parent, base in zip(chain, chain[1:], bases, strict=False):
            new = self._put(view, parent, base, new, writer)
            if pending.hidden:
                new = self.overwritten(base, new, writer)
            self._now[parent] = (new, now)
        if self._whole is not None and last is None:
            relation = self._relations[chain[-1]]
            self._whole = relation.put(self._emitter.bound(writer), self._whole, new)

    def _all_above(self, old: Value) -> Iterator[Value]:
        """As `above`, each tensor once."""
        yield old
        while (link := self.links.get(old)) is not None:
            old = self.same(link.parent)
            yield old

    def _way_up(self, old: Value) -> list[Value]:
        """The alias, those that it is a view of, and the root, without those whose own elements overlap.

        A write into one of these (`expand`, `unfold`) changes elements that the view does not have.
        """
        chain = [old]
        above: Value = old
        while (link := self.links.get(above)) is not None:
            above = self.same(link.parent)
            if above not in self.links or not geometry_of(above).overlaps_itself():
                chain.append(above)
        return chain

    def _derive(self, old: Value, reader: Op) -> Value:
        """The value of an alias from the root's, along its links."""
        found = self._now.get(old)
        if found is not None and found[1] == self._version:
            return found[0]
        link = self.links.get(old)
        if link is None:
            new = self._derive_root(old, reader)
        else:
            parent = self.same(link.parent)
            base = self._derive(parent, reader)
            new = self._take(old, link, parent, base, reader)
        self._now[old] = (new, self._version)
        return new

    def _derive_root(self, old: Value, reader: Op) -> Value:
        if self._whole is not None:
            new: Value = self._relations[old].take(self._emitter.bound(reader), self._whole)
            return new
        return self._now[old][0]  # a lone root changes only by being written, or from its views

    def _take(self, old: Value, link: Link, parent: Value, base: Value, reader: Op) -> Value:
        moved = _geometry(base.fake) != _geometry(parent.fake)
        if link.func in _STRIDE_SENSITIVE and (moved or link.func is _aten.as_strided.default):
            emit = self._emitter.bound(reader)
            if old.fake.dtype == parent.fake.dtype:
                new: Value = self._relation(old, parent, reader).take(emit, base)
                return new
            base = (
                emit(_aten.clone.default, base) if base.fake.is_contiguous() else emit(_aten.contiguous.default, base)
            )
        out = self._emitter.run(reader, link.func, (base, *link.args), link.kwargs)
        found: Value = out if link.slot is None else out[link.slot]
        return found

    def _put(self, view: Value, parent: Value, base: Value, new: Value, writer: Op) -> Value:
        emit = self._emitter.bound(writer)
        link = self.links[view]
        inverse = _INVERSES.get(link.func)
        bits = parent.fake.is_complex() or link.func not in _OF_REAL_IS_ITSELF
        if inverse is not None and bits and self.same(link.parent) is parent:  # real() of a real tensor is that tensor
            found: Value = inverse(emit, base, new, link)
            return found
        if view.fake.dtype != parent.fake.dtype:
            raise refusal(f"a write through {link.func}, which has no inverse", writer)
        put: Value = self._relation(view, parent, writer).put(emit, base, new)
        return put

    def _relation(self, view: Value, parent: Value, op: Op) -> Relation:
        base, part = geometry_of(parent), geometry_of(view)
        if base.exact and part.exact:
            found = relate(base, part)
        else:
            link = self.links[view]
            found = relate_by_op(link.func, link.args, link.slot, parent.fake, view.fake)
            if found is None:
                raise refusal("a view with symbolic sizes that has no inverse", op)
        if found is None:
            raise refusal("a view that reaches memory outside of the tensor that it was made from", op)
        return found

    def _join(self, writer: Op) -> None:
        """Several tensors from outside share this memory: put all their elements in one row, each once."""
        if len({r.fake.dtype for r in self.roots}) > 1:
            raise refusal("inputs of different dtypes share the memory that is written", writer)
        for root in self.roots:
            if root not in self._now:
                self._bring(root)
        if not all(geometry_of(r).exact for r in self.roots):
            raise refusal("tensors with symbolic sizes share the memory that is written", writer)
        emit = self._emitter.bound(writer)
        positions = [geometry_of(r).positions() for r in self.roots]
        rows = [emit(_aten.reshape.default, self._now[r][0], [-1]) for r in self.roots]
        every = torch.cat(positions)
        unique = torch.unique(every)
        first = index_in(every, unique)
        assert first is not None
        self._whole = emit(_aten.index.Tensor, emit(_aten.cat.default, rows), [first])
        for root, place in zip(self.roots, positions, strict=True):
            indices = index_in(unique, place)
            assert indices is not None
            self._relations[root] = Positions((unique.numel(),), geometry_of(root).size, indices)


def became(regions: dict[int, Region], value: Value) -> Iterator[tuple[Value, Op]]:
    """What in-place changes of its shape or memory made of a value, one after the other, and the ops."""
    while (region := regions.get(value.storage)) is not None and (step := region.became(value)) is not None:
        yield step
        value = step[0]


def last_of(regions: dict[int, Region], value: Value) -> Value:
    """What a value is after all in-place changes of its shape or memory."""
    for after, _ in became(regions, value):
        value = after
    return value


def geometry_of(value: Value) -> Geometry:
    """Where a value of the recorded tape lies in its storage."""
    fake = value.fake
    if fake._has_symbolic_sizes_strides:
        sizes, strides = tuple(map(example, fake.size())), tuple(map(example, fake.stride()))
        return Geometry(sizes, strides, example(value.offset), exact=False)
    return Geometry(tuple(fake.size()), tuple(fake.stride()), int(value.offset))


def _geometry(fake: torch.Tensor) -> tuple[Any, ...]:
    return to_expr(fake.size()), to_expr(fake.stride()), fake.dtype


Inverse = Callable[[Any, Any, Any, Link], Any]


def _put_real(emit: Any, base: Any, new: Any, link: Link) -> Any:
    return emit(_aten.complex.default, new, emit(_aten.imag.default, base))


def _put_imag(emit: Any, base: Any, new: Any, link: Link) -> Any:
    return emit(_aten.complex.default, emit(_aten.real.default, base), new)


def _put_complex_pairs(emit: Any, base: Any, new: Any, link: Link) -> Any:
    return emit(_aten.view_as_complex.default, emit(_aten.contiguous.default, new))


def _put_real_pairs(emit: Any, base: Any, new: Any, link: Link) -> Any:
    return emit(_aten.view_as_real.default, emit(_aten.resolve_conj.default, new))


def _put_bits(emit: Any, base: Any, new: Any, link: Link) -> Any:
    return emit(_aten.view.dtype, emit(_aten.contiguous.default, new), base.fake.dtype)


def _put_conjugate(emit: Any, base: Any, new: Any, link: Link) -> Any:
    return emit(_aten.conj_physical.default, new)


def _put_negative(emit: Any, base: Any, new: Any, link: Link) -> Any:
    return emit(_aten.neg.default, new)


def _put_diagonal(emit: Any, base: Any, new: Any, link: Link) -> Any:
    return emit(_aten.diagonal_scatter.default, base, new, *link.args)


_OF_REAL_IS_ITSELF = (_aten.real.default, _aten.conj.default, _aten._conj.default)

# Views that change what the bits mean, and those with a scatter of their own; all others go by their geometry.
_INVERSES: dict[Any, Inverse] = {
    _aten.view_as_real.default: _put_complex_pairs,
    _aten.view_as_complex.default: _put_real_pairs,
    _aten.real.default: _put_real,
    _aten.imag.default: _put_imag,
    _aten.view.dtype: _put_bits,
    _aten.conj.default: _put_conjugate,
    _aten._conj.default: _put_conjugate,
    _aten._neg_view.default: _put_negative,
    _aten.diagonal.default: _put_diagonal,
}
