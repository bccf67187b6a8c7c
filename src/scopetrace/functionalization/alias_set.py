"""Alias sets: what a write to one tensor means for all others that share its storage, without mutation.

    write(alias, new)   new -> inverse of each view on the way from the alias to the base -> present value of the base
    read(alias)         present value of the nearest ancestor that is current -> forward of each view on the way back

An alias set has one version, the number of writes so far. Each alias has the value that it had at some version, and is
stale if that is not the present one. A write makes the written alias and its ancestors current, and all others stale; a
read makes a stale alias current. Nothing is deferred: what the writes cost is removed afterwards (`rewrites`).

The base is the one tensor that owns the storage. If inputs share a storage, or the owner has elements that share memory
(an input that was expanded), the base is a row with each element of the storage once, and the inputs are its views.

The idea, and the name ViewMeta, are those of torch's functionalization pass (FunctionalStorageImpl.h).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from scopetrace._compat.symbols import to_expr
from scopetrace._compat.tensors import is_symbolic, stride_of
from scopetrace.functionalization.emitter import Emitter
from scopetrace.functionalization.refusals import refusal
from scopetrace.ir.tape import Op, Value
from scopetrace.ops.functional_variants import is_factory
from scopetrace.ops.history import DETACHED, NO_VIEWS, OVERWRITE, can_require_grad
from scopetrace.ops.view_inverses import (
    ViewFunction,
    by_geometry,
    by_op,
    by_own_inverse,
    geometry_of,
    index_in,
    indexed,
    overlaps_itself,
    strided,
)
from scopetrace.ops.views import is_contiguous

_aten = torch.ops.aten
_NEEDS_STRIDES = frozenset(
    {
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten._reshape_alias.default,
        _aten.as_strided.default,
        _aten.view_as_complex.default,
        _aten.view.dtype,
    }
)
"""View ops that not every layout of the base allows."""
_NO_POSITIONS = torch.empty(0, dtype=torch.int64, device="cpu")


class ViewMeta(NamedTuple):
    """How an alias comes from another: result `slot` of view op `func`. If `func` is None, both are the same tensor."""

    parent: Value
    func: Any = None
    args: tuple[Any, ...] = ()
    """The arguments after the parent."""
    kwargs: Mapping[str, Any] = types.MappingProxyType({})
    slot: int | None = None


class AliasSet:
    """The aliases of one written storage. `old` values are of the recorded tape, `new` ones of the functional tape."""

    def __init__(self, emitter: Emitter, bring: Callable[[Value, Op], None]) -> None:
        self.roots: list[Value] = []
        """The tensors that no view op made: the owner of the storage, or inputs that share it."""
        self.views: dict[Value, ViewMeta] = {}
        self.version = 0
        """How many writes there were."""
        self.is_seen = False
        """Whether autograd is on at one of the writes, which is not hidden from it."""
        self.reshaped: dict[Value, tuple[Value, Op]] = {}
        """By `transpose_` and its kind: what became of an alias, and the op."""
        self._emitter = emitter
        self._bring = bring  # puts a root on the tape that the program reads only later
        self._present: dict[Value, tuple[Value, int]] = {}
        self._row: Value | None = None
        self._row_positions = _NO_POSITIONS
        self._functions: dict[tuple[Value, Value], ViewFunction] = {}
        self.with_grad: dict[Value, None] = {}
        """The aliases that require grad, or do from a write on that autograd saw."""
        self._first: dict[Value, Value] = {}  # by name of a tensor the first one
        self._replaced: set[Value] = set()
        self._covered = False

    # ---------------------------------------------------------------- read and write

    def define(self, old: Value, new: Value) -> None:
        """Say that `new` is the value of an alias that was made just now."""
        self._present[self.same(old)] = (new, self.version)

    def read(self, old: Value, reader: Op) -> Value:
        """The present value of an alias."""
        stale: list[Value] = []
        old = self.same(old)
        while (new := self.current(old)) is None and (parent := self._parent(old)) is not None:
            stale.append(old)
            old = parent
        if new is None:
            new = self._read_root(old, reader)
        for view in reversed(stale):
            new = self._forward(view, new, reader, self._emitter.simplifying(reader, grad=view.op.grad))
            self._present[view] = (new, self.version)
        return new

    def is_known(self, root: Value) -> bool:
        """Whether a root has a value, stale or not, or can be read from the row."""
        return root in self._present or self._row is not None

    def current(self, old: Value) -> Value | None:
        """The present value of an alias, if it is not stale."""
        old = self.same(old)
        new, version = self._present.get(old, (None, -1))
        return new if version == self.version or self._is_base(old) else None

    def write(self, old: Value, new: Value, writer: Op, *, hidden: bool = False) -> None:
        """Give an alias a new value. `hidden`: autograd does not see it, so that all keep the gradient they had.

        In eager a tensor that requires grad goes on requiring it when it is written, and so it does here.
        """
        old = self.same(old)
        if self.version == 0 and (len(self.roots) > 1 or any(map(overlaps_itself, self.roots))):
            self._make_row(writer)
        known = self._present.get(old)
        self._covered = self._covered or known is None or not _is_made_of(new, known[0])
        chain = self._written_ancestors(old)
        bases = [self.read(v, writer) for v in chain[1:]]
        may_lose = writer.grad and not hidden and not new.requires_grad
        if may_lose and not bases:
            new = self._with_history(self.read(old, writer), new, writer)
        self.version += 1
        self._present[old] = (new, self.version)
        for view, parent, base in zip(chain, chain[1:], bases, strict=False):
            new = self._function(view, parent, writer).inverse(self._emitter.simplifying(writer), base, new)
            if hidden:
                new = self.overwritten(base, new, writer)
            elif may_lose:
                new = self._with_history(base, new, writer)
            self._present[parent] = (new, self.version)
        if may_lose and bases and new.requires_grad:
            del self._present[old]  # stale: it gets its history from the base
        for view in [v for v in chain[:-1] if hidden and new.requires_grad and not v.op.grad]:
            self._present.pop(view, None)  # stale: a view without history of its own, as in eager
        if self._row is not None:
            row = self._of_row(chain[-1], writer).inverse(self._emitter.simplifying(writer), self._row, new)
            self._row = self.overwritten(self._row, row, writer) if hidden else row

    def replace(self, old: Value, new: Value) -> None:
        """Give the whole storage a new value of another size. `old` becomes its only root."""
        for root in self.roots:
            if root is not old:
                self.link(root, ViewMeta(old))
                self._replaced.add(old)
        self.roots, self._row, self._covered = [old], None, True
        self.views.pop(old, None)
        self._first.pop(old, None)
        self._first = {value: self.same(first) for value, first in self._first.items()}
        self.version += 1
        self._present = {old: (new, self.version)}

    def _is_base(self, old: Value) -> bool:
        """Whether it is the base: each write reaches it, so that it is never stale."""
        return self._row is None and old not in self.views

    def _read_root(self, old: Value, reader: Op) -> Value:
        assert self._row is not None, "a root has a value once its op ran"
        has_grad = reader.grad or old.requires_grad or self._row.requires_grad
        emit = self._emitter.simplifying(reader, grad=has_grad)
        new: Value = self._of_row(old, reader).forward(emit, self._row)
        if self._are_leaves():
            new = self.overwritten(self._present[old][0], new, reader)
        self._present[old] = (new, self.version)
        return new

    def _forward(self, old: Value, base: Value, reader: Op, emit: Callable[..., Any]) -> Value:
        """The value of a view. It is made with autograd on if the view was: autograd has it so for views."""
        meta, parent = self.views[old], self.same(self.views[old].parent)
        if meta.slot is None and not (meta.func in _NEEDS_STRIDES and not alike(base, parent)):
            if meta.func is not _aten.as_strided.default:
                return emit(meta.func, base, *meta.args, **meta.kwargs)
        elif meta.slot is not None and self._find_function(old, parent) is None:
            return emit(meta.func, base, *meta.args, **meta.kwargs)[meta.slot]
        taken: Value = self._function(old, parent, reader).forward(emit, base)
        if taken is base and base.requires_grad and not old.op.grad:
            taken = emit(_aten.alias.default, base)  # without autograd, a view of the whole is a leaf
        return taken

    def _written_ancestors(self, old: Value) -> list[Value]:
        """The alias and its ancestors up to the root, but those to which a write of the alias cannot be carried on.

        Their elements share memory (`expand`, `unfold`), or no function leads from them to the alias. They are stale.
        """
        chain, above = [old], old
        while (parent := self._parent(above)) is not None:
            above = parent
            if self._is_base(above) or not (overlaps_itself(above) or self._find_function(chain[-1], above) is None):
                chain.append(above)
        return chain

    def _parent(self, old: Value) -> Value | None:
        meta = self.views.get(old)
        return None if meta is None else self.same(meta.parent)

    # ---------------------------------------------------------------- views as functions

    def _function(self, view: Value, parent: Value, op: Op) -> ViewFunction:
        function = self._find_function(view, parent)
        if function is not None:
            return function
        if view.fake.dtype != parent.fake.dtype:
            raise refusal(f"a write through {self.views[view].func}, which has no inverse", op)
        if geometry_of(view).exact and geometry_of(parent).exact:
            raise refusal("a view that reaches memory outside of the tensor that it was made from", op)
        raise refusal("a view with symbolic sizes that has no inverse", op)

    def _find_function(self, view: Value, parent: Value) -> ViewFunction | None:
        """The function from an ancestor, the nearest one or another, to a view. None if it is not known."""
        function = self._functions.get((view, parent)) or self._new_function(view, parent)
        if function is not None:
            self._functions[view, parent] = function
        return function

    def _new_function(self, view: Value, parent: Value) -> ViewFunction | None:
        meta = self.views[view]
        is_nearest = self.same(meta.parent) is parent
        function = by_own_inverse(meta.func, meta.args, parent.fake) if is_nearest else None
        if function is not None or view.fake.dtype != parent.fake.dtype:
            return function
        function = by_op(meta.func, meta.args, meta.slot, parent.fake, view.fake) if is_nearest else None
        base, part = geometry_of(parent), geometry_of(view)
        if function is None and base.exact and part.exact:
            return by_geometry(base, part)
        if function is None and is_contiguous(parent.fake):
            shift = view.offset - parent.offset
            return strided(parent.fake.size(), view.fake.size(), view.fake.stride(), shift)
        return function

    # ---------------------------------------------------------------- the row

    def _are_leaves(self) -> bool:
        """Whether autograd takes each root for a tensor of its own, as two parameters: they share data alone."""
        return all(r.requires_grad and r.fake.is_leaf for r in self.roots)

    def _make_row(self, writer: Op) -> None:
        """Put all elements of the roots in one row, each once."""
        for root in self.roots:
            if root not in self._present:
                self._bring(root, writer)
        names = ", ".join(r.op.name for r in self.roots if r.op.kind != "call_function")
        if len({r.fake.dtype for r in self.roots}) > 1:
            raise refusal(f"inputs of different dtypes share the memory that is written ({names})", writer)
        if len({r.requires_grad for r in self.roots}) > 1:
            raise refusal(
                f"inputs share the memory that is written, and autograd tracks only some of them ({names})", writer
            )
        if not all(geometry_of(r).exact for r in self.roots):
            raise refusal("tensors with symbolic sizes share the memory that is written", writer)
        emit = self._emitter.simplifying(writer, grad=writer.grad or self.roots[0].requires_grad)
        present = [self._present[r][0] for r in self.roots]
        if self._are_leaves():
            present = [emit(_aten.detach.default, v) for v in present]
        rows = [emit(_aten.reshape.default, v, [-1]) for v in present]
        positions = torch.cat([geometry_of(r).positions() for r in self.roots])
        self._row_positions = torch.unique(positions)
        first = index_in(positions, self._row_positions)
        joined = emit(_aten.cat.default, rows) if len(rows) > 1 else rows[0]
        self._row = emit(_aten.index.Tensor, joined, [first])

    def _of_row(self, old: Value, op: Op) -> ViewFunction:
        function = self._functions.get((old, old))
        if function is None:
            geometry = geometry_of(old)
            indices = index_in(self._row_positions, geometry.positions())
            if indices is None or old.fake.dtype != self.roots[0].fake.dtype:
                raise refusal("a view of an expanded input, of another dtype, is written", op)
            function = self._functions[old, old] = indexed((self._row_positions.numel(),), geometry.size, indices)
        return function

    # ---------------------------------------------------------------- names of one tensor

    def link(self, value: Value, meta: ViewMeta) -> None:
        """Add an alias."""
        if value.requires_grad:
            self.with_grad[value] = None
        self._first.pop(value, None)
        if meta.func is None:
            self._first[value] = self.same(meta.parent)
        self.views[value] = meta

    def same(self, old: Value) -> Value:
        """The first value that is this very tensor. Each in-place op adds one to the way there."""
        return self._first.get(old, old)

    def above(self, old: Value) -> Iterator[Value]:
        """A value, what it is a view of, and so on up to a root."""
        yield old
        while (meta := self.views.get(old)) is not None:
            old = meta.parent
            yield old

    def became(self, old: Value) -> tuple[Value, Op] | None:
        """What an in-place change of shape or memory made of a value, and the op; None when there was none."""
        while old not in self.reshaped:
            meta = self.views.get(old)
            if meta is None or meta.func is not None or meta.parent in self._replaced:
                return None
            old = meta.parent
        return self.reshaped[old]

    # ---------------------------------------------------------------- gradients

    def is_detached(self, old: Value) -> bool:
        """Whether autograd takes an alias for a tensor of its own, not for a view."""
        meta = self.views.get(old)
        return meta is not None and meta.func in NO_VIEWS

    def may_lose_history(self) -> bool:
        """Whether an alias may have nothing left of what it had: a write did not read it, or went to a view."""
        return self.version > 0 and (self._covered or any(meta.func is not None for meta in self.views.values()))

    def bases(self) -> list[Value]:
        """The tensors that autograd takes for no views: the roots, and what is detached from them."""
        return [*self.roots, *filter(self.is_detached, self.views)]

    def has_history(self, but: Value) -> bool:
        """Whether an alias other than `but` requires grad."""
        return any(v is not but for v in self.with_grad) or any(v is not but and v.requires_grad for v in self.roots)

    def _with_history(self, old: Value, new: Value, writer: Op) -> Value:
        """`new`, which requires grad if `old` does."""
        lacks = old.requires_grad and not new.requires_grad
        return with_history(self._emitter.simplifying(writer), old, new) if lacks else new

    def overwritten(self, old: Value, new: Value, writer: Op) -> Value:
        """`new` with the gradient of `old`, or without any where that has none."""
        emit = self._emitter.simplifying(writer, grad=True)
        if old.requires_grad:
            new = emit(OVERWRITE, old, new)
        elif new.requires_grad:
            new = emit(_aten.detach.default, new)
        return new


def with_history(emit: Callable[..., Any], old: Value, new: Value) -> Value:
    """`new`, with a gradient of zero for `old`, which has its size or one element."""
    never = emit(_aten.full.default, [], False, dtype=torch.bool, device=new.fake.device)
    return emit(_aten.where.self, never, old, new)


def became(sets: dict[int, AliasSet], value: Value) -> Iterator[tuple[Value, Op]]:
    """What in-place changes of its shape or memory made of a value, one after the other, and the ops."""
    while (aliases := sets.get(value.storage)) is not None and (step := aliases.became(value)) is not None:
        yield step
        value = step[0]


def last_of(sets: dict[int, AliasSet], value: Value) -> Value:
    """What a value is after all in-place changes of its shape or memory."""
    aliases = sets.get(value.storage)
    if aliases is None or not aliases.reshaped:
        return value
    for after, _ in became(sets, value):
        value = after
    return value


def _is_made_of(new: Value, old: Value) -> bool:
    """Whether autograd leads from a value to another one, which its op reads, or reads a copy of."""
    if is_factory(new.op) or new.op.target in DETACHED:
        return False
    if old in new.op.inputs():
        return True
    copies = (v for v in new.op.inputs() if can_require_grad(v) and v.op.target not in DETACHED)
    return any(old in v.op.inputs() and not is_factory(v.op) for v in copies)


def alike(a: Value, b: Value) -> bool:
    """Whether two values have the same dtype, sizes and strides."""
    x, y = a.fake, b.fake
    if x is y:
        return True
    if is_symbolic(x) or is_symbolic(y):
        return bool(x.dtype == y.dtype and to_expr((x.size(), x.stride())) == to_expr((y.size(), y.stride())))
    return bool(x.dtype == y.dtype and x.size() == y.size() and stride_of(x) == stride_of(y))
