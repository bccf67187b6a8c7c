"""Functionalization: a recorded tape becomes one in which no op writes, with a write-back program beside it.

RecordedTape -> ops copied with present values, writes as functional variants and new values of alias sets
             -> write-back: what the graph has to give, and what is done with it -> ops nobody reads dropped
             -> FunctionalTape
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch

from scopetrace._compat.ops import building, in_large_stack, is_op, schema_of
from scopetrace._compat.symbols import to_expr
from scopetrace._compat.tensors import dense_order
from scopetrace.containers.structure import leaves, map_structure
from scopetrace.functionalization import write_back
from scopetrace.functionalization.alias_set import AliasSet, ViewMeta, with_history
from scopetrace.functionalization.copier import TapeCopier, as_laid_out
from scopetrace.functionalization.refusals import draws_differ, refusal, refuse_overlap, verify_pure
from scopetrace.ir.tape import (
    AttributeWrite,
    BodyTape,
    Call,
    FunctionalTape,
    Op,
    RecordedTape,
    Value,
    map_argument,
    values_in,
)
from scopetrace.ops.functional_variants import (
    FunctionalVariant,
    by_name,
    call_variant,
    functional_variant,
    is_factory,
    is_metadata_only,
    undeclared_variant,
)
from scopetrace.ops.history import NO_VIEWS, History, is_cut, note_leaf, plain_leaves
from scopetrace.ops.view_inverses import Geometry, by_geometry, geometry_of, slice_
from scopetrace.ops.views import TO_THE_END

_aten = torch.ops.aten


class Functionalizer(TapeCopier):
    """Turns each write into the functional variant of its op, and a new value of what was written."""

    def __init__(self, old: RecordedTape | BodyTape, around: TapeCopier | None = None) -> None:
        super().__init__(old, around)
        self._severed: set[Value] = set()  # detached tensors whose own gradient nobody asks for

    def run(self) -> FunctionalTape:
        """The functional tape. Raises FunctionalizationError."""
        with building(), torch.no_grad():
            return in_large_stack(self._run_program)

    def _run_program(self) -> FunctionalTape:
        root = self.old.calls[0]
        if self.old.sizes is not None:
            self.old.sizes.env.watch(self)
        self.append(self.old, self.old.calls)
        edge = self.at_edge(self.calls[root])
        read: Callable[[Value], Value] = functools.partial(self.read, reader=edge)
        if any(aliases.may_lose_history() for aliases in self.sets.values()):
            read = self._read_with_history(edge)
            self._note_lost_gradients(read)
        self.new.attribute_writes = self._attribute_writes(read, edge)
        write_back.attach(self.old, self.new, self.sets, read)
        super().end(root)
        self.new.args = map_structure(lambda v: self.originals[v], self.old.args, Value)
        self.new.outputs = map_structure(lambda v: self.read(v, edge), self.old.outputs, Value)
        results = [*(self.new.returned or ()), *(w.value for w in self.new.attribute_writes)]
        self._schedule([v for v in results if isinstance(v, Value)])
        if self.old.backwards:
            write_back.leave_out_freed_history(self.old, self.new)
        verify_pure(self.new)
        return self.new

    def end(self, call: Call) -> None:
        """The root ends after the write-back is made."""
        if call.parent is not None:
            super().end(call)

    def _read_with_history(self, reader: Op) -> Callable[[Value], Value]:
        """As `read`, with gradients of zero, as eager has, for leaves of which writes left a result nothing."""
        if not any(op.grad and any(v.fake.requires_grad for v in op.writes) for op in self.old.ops):
            return lambda v: self.read(v, reader)
        bits = {v: 1 << i for i, v in enumerate(v for v in self.originals if v.requires_grad)}
        bases = (v for aliases in self.sets.values() for v in aliases.bases())
        roots = [v for v in bases if v.fake.requires_grad]
        results = {v: self.read(v, reader) for v in (*roots, *self._results())}
        new_bits = {self.originals[v]: bit for v, bit in bits.items()}
        of_bases = History(self.old.ops, bits), History(self.new.ops, new_bits)
        of_others = (
            History(self.old.ops, bits | _cut(self.old.ops)),
            History(self.new.ops, new_bits | _cut(self.new.ops)),
        )
        emit = self.emitter.simplifying(reader, grad=True)
        for v, new in results.items():
            before, after = of_bases if is_cut(v) else of_others
            lost = before.of(v) & ~after.of(new) & ~bits.get(v, 0) if new.requires_grad else 0
            if lost and is_cut(v):
                raise refusal("a result is a view made under no_grad of a tensor that was written over", v.op)
            if lost and v.storage not in self.sets and sum(v.storage == other.storage for other in results) > 1:
                raise refusal(
                    "results share memory, and have a gradient of zero for a tensor that was written over", v.op
                )
            for leaf in [leaf for leaf, bit in bits.items() if bit & lost]:
                total = emit(_aten.sum.default, self.originals[leaf])
                if total.fake.dtype != new.fake.dtype:
                    total = emit(_aten._to_copy.default, total, dtype=new.fake.dtype)
                results[v] = with_history(emit, total, results[v])
        objects = {self._object(v): new for v, new in results.items()}
        return lambda v: results.get(v) or objects.get(self._object(v)) or self.read(v, reader)

    def _object(self, v: Value) -> Value:
        return self.sets[v.storage].same(v) if v.storage in self.sets else v

    def _note_lost_gradients(self, read: Callable[[Value], Value]) -> None:
        """Note the leaves that a result would have gradients of zero for, if they required grad, and has none for."""
        assert isinstance(self.old, RecordedTape)
        bits = plain_leaves(self.old)
        if not bits:
            return
        written = [r for aliases in self.sets.values() if aliases.version for r in aliases.roots if r in self.originals]
        results = {v: read(v) for v in (*written, *self._results())}
        new_bits = {self.originals[v]: bit for v, bit in bits.items() if v in self.originals}
        before, after = History(self.old.ops, bits, assumed=True), History(self.new.ops, new_bits, assumed=True)
        lost = functools.reduce(
            operator.or_, (before.of(v) & ~after.of(new) & ~bits.get(v, 0) for v, new in results.items()), 0
        )
        for leaf, bit in bits.items() if lost else ():
            if lost & bit:
                written_over = (op for op in reversed(self.old.ops) if any(before.of(v) & bit for v in op.writes))
                note_leaf(self.old, leaf, next(written_over, leaf.op))

    def _attribute_writes(self, read: Callable[[Value], Value], edge: Op) -> list[AttributeWrite]:
        """Attributes are bound to an input or tensor of the model itself, or to the value in memory of its own."""

        @functools.cache
        def old_storages() -> dict[int, set[int | None]]:
            """By storage, those that results in it had; None for an input or a tensor of the model."""
            storages: dict[int, set[int | None]] = {v.storage: {None} for v in self.originals.values()}
            for v in self._results():
                storages.setdefault(read(v).storage, set()).add(v.storage)
            return storages

        def bound(old: Value) -> Value:
            first = self._object(old)
            if first in self.originals:
                return self.originals[first]
            new = read(old)
            if new.storage != old.storage and old_storages().get(new.storage, set()) - {old.storage}:
                new = self.emitter.run(edge.replace(grad=old.fake.requires_grad), _aten.clone.default, (new,), {})
            return new

        return [dataclasses.replace(w, value=bound(w.value)) for w in self.old.attribute_writes]

    def _write(self, op: Op) -> None:
        func = op.target
        name = _name_of(func)
        if name in _OTHER_MEMORY:
            return _OTHER_MEMORY[name](self, op)
        if is_metadata_only(func):
            return self._change_shape(op)
        refuse_overlap(op)
        if func is _aten.bernoulli_.float and self._draw_as_dropout(op):
            return None
        if draws_differ(func, op.args, op.kwargs):
            raise refusal("one seed would give other random numbers (fill a contiguous tensor, then copy_)", op)
        variant = undeclared_variant(func, op.args, op.kwargs) or functional_variant(func)
        if func is _aten.fill_diagonal_.default:
            return self._fill_diagonal(op)
        if func is _aten.copy_.default:
            return self._copy(op)
        if variant is None:
            return self._write_opaque(op)
        args, kwargs = call_variant(variant, func, *self._operands(op, name))
        other, more = self._other_variant(op)
        if other is not None:
            variant, args = dataclasses.replace(variant, op=other), (*args, *more)
        run = self._run_each if name.startswith("_foreach_") and self._may_differ_in_history(op) else self.emitter.run
        if variant.op is _RRELU and op.grad and list(args[4:5]) == [True]:
            run = self._run_rrelu
        return self._store(op, variant, run(op, variant.op, tuple(args), kwargs))

    def _other_variant(self, op: Op) -> tuple[Any, tuple[Any, ...]]:
        """The op in the place of the functional variant of an op, None for most, and what more it takes."""
        if op.target is _aten.zero_.default and op.tensor(0).fake.is_complex():  # `zero` has no derivative there
            return _aten.fill.Scalar, (0,)
        if op.target is _RANDOM_FROM:
            if op.args[2] is None:
                raise refusal("random_ from a number, and to none (write both)", op)
            return _aten.randint_like.low_dtype, ()
        return None, ()

    def _run_rrelu(self, op: Op, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Value]:
        """Torch differentiates the functional variant by the noise that it is given, not by that which it draws."""
        detached = self.emitter.run(op, _aten.detach.default, args[:1], {})
        _, noise = self.emitter.run(op, func, (detached, *args[1:]), kwargs)
        return [self.emitter.run(op, _aten.mul.Tensor, (args[0], noise), {}), noise]

    def _may_differ_in_history(self, op: Op) -> bool:
        """Whether autograd may give what a foreach op writes different histories, in a call with gradients."""
        if op.grad or not isinstance(self.old, RecordedTape) or self.old.grad:
            return op.grad
        so_far = self.old.ops[: self.old.ops.index(op) + 1]
        history = History(so_far, plain_leaves(self.old), assumed=True)
        return len({history.of(v) for v in op.writes}) > 1

    def _run_each(self, op: Op, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Value]:
        """A foreach op for each tensor alone: one for all gives all results a gradient where one operand has one."""

        def of(i: int, a: Any) -> Any:
            return [a[i]] if isinstance(a, (list, tuple)) else a

        return [
            self.emitter.run(op, func, tuple([of(i, a) for a in args]), {k: of(i, a) for k, a in kwargs.items()})[0]
            for i in range(len(args[0]))
        ]

    def _operands(self, op: Op, name: str) -> tuple[Any, Any]:
        """The arguments of the functional variant of an op, with copies of what its backward keeps."""
        if name == "silu_" and op.grad and op.tensor(0).fake.is_complex():
            raise refusal("silu_ of complex numbers, whose functional variant torch does not differentiate", op)
        args, kwargs = self.present((op.args, op.kwargs), op)
        kept = self._kept_for_backward(op, name)
        if kept:
            args, kwargs = self._replaced_by(op, _aten.clone.default, (args, kwargs), kept)
        if name in _WITHOUT_DERIVATIVE:
            computed = {v for v in values_in(args) if v.op.inputs() and not is_factory(v.op)}
            histories = computed | {v for v in values_in(args) if v.requires_grad}
            args, kwargs = self._replaced_by(op, _aten.detach.default, (args, kwargs), histories)
        return args, kwargs

    def _kept_for_backward(self, op: Op, name: str) -> set[Value]:
        """The present values of what an op writes that its backward keeps, while the write-back changes them."""
        if not op.grad or name in _KEEPS_NOTHING or op in self.differentiated:
            return set()
        if not any(v.ever_requires_grad for v in op.inputs()):
            return set()
        written = {self.read(v, op) for v in op.writes}
        if not schema_of(op.target).is_mutable:
            return written
        if name in ("mul_", "div_") and not any(v.requires_grad for v in op.inputs() if v not in op.writes):
            return set()
        return {v for v in written if v.storage in self.original_storages}

    def _replaced_by(self, op: Op, by: Any, x: Any, values: set[Value]) -> Any:
        """The arguments with copies, or what else the op `by` makes, of some values."""
        emit = self.emitter.bound(op)
        return map_argument(lambda v: emit(by, v) if isinstance(v, Value) and v in values else v, x)

    def _store(self, op: Op, variant: FunctionalVariant, out: Any) -> None:
        """Write the variant's results where they belong, and bind what the op returned."""
        written = by_name(op.target, op.args, op.kwargs)
        returned = op.outputs if isinstance(op.outputs, (list, tuple)) and len(variant.results) > 1 else [op.outputs]
        for old, source in zip(returned, variant.results, strict=False):
            target = written.get(source) if isinstance(source, str) else None
            is_moved = isinstance(target, Value) and isinstance(old, Value) and old.storage != target.storage
            # torch's rule of an op may leave `out` as it is, and return a new tensor of another size (matrix_rank)
            if target is not None and is_moved and to_expr(old.fake.size()) != to_expr(target.fake.size()):
                raise refusal("out= resizes its tensor, which torch does not tell the trace (give one of its size)", op)
        for name, index in variant.new_values:
            self._assign_all(op, written.get(name), out if index is None else out[index])
        for old, source in zip(returned, variant.results, strict=False):
            if isinstance(source, str):
                self._rename(written.get(source), old)
            elif isinstance(old, Value):
                single = isinstance(out, Value)
                self.define_new(old, out if single else out[source])

    def _assign_all(self, op: Op, targets: Any, new: Any) -> None:
        for target, value in zip(values_in(targets), values_in(new), strict=True):
            self.assign(op, target, value)

    def _rename(self, targets: Any, returned: Any) -> None:
        """What an in-place op returned is the tensor that it wrote to."""
        for target, value in zip(values_in(targets), values_in(returned), strict=False):
            aliases = self.sets[target.storage]
            if (value is not target and aliases.views.get(target) is None) or value not in aliases.views:
                aliases.link(value, ViewMeta(target))

    def assign(self, op: Op, target: Value, new: Value) -> None:
        """`target` gets the elements of `new`: of its own size, or, with `out=`, of another."""
        aliases = self.sets[target.storage]
        if new.fake.dtype != target.fake.dtype:
            new = self.emitter.run(op, _aten._to_copy.default, (new,), {"dtype": target.fake.dtype})
        returned = [v for v in op.values() if v.storage == target.storage and v.fake is not target.fake]
        if any(to_expr(v.fake.size()) != to_expr(target.fake.size()) for v in returned):
            others = {aliases.same(v) for v in (*aliases.roots, *aliases.views) if v.fake is not target.fake}
            if others - {aliases.same(target)} or self._is_outside(aliases):
                raise refusal("out= resizes a tensor that others share memory with", op)
            for value in returned:
                aliases.link(value, ViewMeta(aliases.same(target)))
            aliases.replace(aliases.same(target), new)
            aliases.is_seen = aliases.is_seen or op.grad
            return
        hidden = self._is_hidden(op, target)
        if hidden:
            new = aliases.overwritten(aliases.read(target, op), new, op)
        aliases.write(target, new, op, hidden=hidden)
        aliases.is_seen = aliases.is_seen or (op.grad and not hidden)

    def _is_hidden(self, op: Op, target: Value) -> bool:
        """Whether autograd does not see a write, though values in this memory may carry gradients."""
        if not self.grad:
            return False
        aliases = self.sets[target.storage]
        recorded = op.grad and not _name_of(op.target).startswith("logical_")  # which leave the history as it was
        # autograd takes what lies in memory of several inputs for views of one tensor
        of_inputs = len(aliases.roots) > 1 and self._detached(aliases, target) is None
        seen = recorded and (target in op.tracked or not aliases.has_history(target) or of_inputs)
        brings = recorded and any(v is not target for v in op.tracked)
        detached = self._detached(aliases, target) if brings or self._severed else None
        if detached in self._severed:
            return True
        if brings and detached is not None:
            inside, outside = self._read_later(op, aliases, detached)
            if not inside:
                self._severed.add(detached)  # nobody reads the one tensor that has this part of the gradient
                return True
            seen = seen and not outside
        if seen and brings:
            if target not in aliases.with_grad:
                aliases.with_grad |= dict.fromkeys(aliases.above(target))
        elif brings:
            raise refusal(
                "a tensor that requires grad is written into a detached alias of another, and both are used", op
            )
        return not seen

    def _detached(self, aliases: AliasSet, value: Value) -> Value | None:
        return next(filter(aliases.is_detached, aliases.above(value)), None)

    def _read_later(self, op: Op, aliases: AliasSet, detached: Value) -> tuple[bool, bool]:
        """Whether the detached tensor is read after the op, and whether others in its memory are."""
        family = {detached, *op.values()}
        storage, inside, outside = detached.storage, False, self._is_outside(aliases)
        for later in self.old.ops[self.old.ops.index(op) + 1 :]:
            for v in later.inputs():
                if v.storage != storage:
                    continue
                if v in family or detached in aliases.above(v):
                    family |= {v, *(later.values() if later.target not in NO_VIEWS else ())}
                    inside = inside or v not in later.writes
                else:
                    outside = True
        mine = [v in family or detached in aliases.above(v) for v in self._results() if v.storage == storage]
        return inside or any(mine), outside or not all(mine)

    def _results(self) -> list[Value]:
        bound = self.old.attribute_writes if isinstance(self.old, RecordedTape) else []
        return [*leaves(self.old.outputs, Value), *(w.value for w in bound)]

    def _copy(self, op: Op) -> None:
        """`copy_` where gradients flow: its variant `aten.copy` has no derivative, its parts have."""
        target, source = op.tensor(0), op.tensor(1)
        size = list(target.fake.size())
        new = self.read(source, op)
        enables = op.grad and isinstance(self.old, RecordedTape) and not self.old.grad
        if (op.grad and is_cut(new)) or enables:
            new = self.emitter.run(op, _aten.clone.default, (new,), {})  # what was copied is no leaf
        if new.fake.dtype != target.fake.dtype or new.fake.device != target.fake.device:
            to = {"dtype": target.fake.dtype, "device": target.fake.device}
            new = self.emitter.run(op, _aten._to_copy.default, (new,), to)
        if not (op.grad or new.requires_grad) and any(
            v.requires_grad for v in new.op.inputs() if v.storage == new.storage
        ):
            new = self.emitter.run(op, _aten.detach.default, (new,), {})  # a view of inference mode
        if to_expr(new.fake.size()) != to_expr(size):
            new = self.emitter.run(op, _aten.expand.default, (new, size), {})
        self.assign(op, target, new)
        self._rename(target, op.outputs)

    def _draw_as_dropout(self, op: Op) -> bool:
        """`bernoulli_` into memory without gaps that is laid out otherwise, as dropout does. False for any other.

        `aten.bernoulli` would fill a contiguous tensor. `aten.alpha_dropout` calls the op on each device, and makes of
        zeros a positive number where it drew a one; `aten.dropout` has a kernel of its own on a GPU.
        """
        target, p = op.tensor(0), op.args[1] if len(op.args) > 1 else 0.5
        if not isinstance(p, float) or not (0 < p < 1 and 1 - (1 - p) == p) or op.kwargs:
            return False
        if target.fake.is_contiguous() or not dense_order(target.fake):
            return False
        present = as_laid_out(self.emitter.bound(op), self.read(target, op), target.fake)
        zeros = self.emitter.run(op, _aten.zeros_like.default, (present,), {})
        kept = self.emitter.run(op, _aten.alpha_dropout.default, (zeros, 1 - p, True), {})
        drawn = self.emitter.run(op, _aten.gt.Scalar, (kept, 0), {})
        self.assign(op, target, drawn)
        self._rename(target, op.outputs)
        return True

    def _fill_diagonal(self, op: Op) -> None:
        """In row-major order the diagonal is a slice; without `wrap` it ends where a tall matrix ends to be square."""
        target, value, *wrap = op.args
        size, emit = target.fake.size(), self.emitter.bound(op)
        end = size[1] * size[1] if len(size) == 2 and not any(wrap) else TO_THE_END
        step = sum(math.prod(size[i:]) for i in range(1, len(size))) + 1
        row = emit(_aten.reshape.default, self.read(target, op), [-1])
        diagonal = slice_(0, 0, end, step)
        filled = diagonal.inverse(emit, row, emit(_aten.fill.Scalar, diagonal.forward(emit, row), value))
        self.assign(op, target, emit(_aten.reshape.default, filled, list(size)))
        self._rename(target, op.outputs)

    def _write_opaque(self, op: Op) -> None:
        """A mutating op without a pure variant, as custom ops are: run on copies by `auto_functionalized`."""
        schema = schema_of(op.target)
        if any(r.aliases for r in schema.returns):
            raise refusal(f"{op.target} has no pure form", op)
        present = by_name(op.target, *self.present((op.args, op.kwargs), op))
        kwargs = {name: present.get(name) for name in schema.names}
        out = self.emitter.run(op, torch.ops.higher_order.auto_functionalized, (op.target,), kwargs)
        count = max(1, len(schema.returns))
        written = by_name(op.target, op.args, op.kwargs)
        for name, new in zip(schema.written, out[count:], strict=True):
            self._assign_all(op, written.get(name), new)
        self.define_new(op.outputs, out[0] if count == 1 else out[:count])

    def _change_shape(self, op: Op) -> None:
        """`transpose_` and its kind: the tensor becomes a view of what it was."""
        variant = functional_variant(op.target)
        (before,) = op.writes[:1]
        if variant is None:
            raise refusal(f"{op.target} has no pure form", op)
        aliases = self.sets[before.storage]
        if before.fake.requires_grad and aliases.same(before).op.grad and not op.grad:
            raise refusal("a tensor that requires grad changes its shape in place under no_grad", op)
        present = aliases.read(before, op)
        rest = self.present(op.args[1:], op)
        new = self.emitter.run(op, variant.op, (present, *rest), dict(op.kwargs))
        after = op.result
        aliases.link(after, ViewMeta(before, variant.op, tuple(rest), dict(op.kwargs)))
        aliases.define(after, new)
        aliases.reshaped[aliases.same(before)] = (after, op)

    def _set(self, op: Op) -> None:
        """`x.set_(y)`: from here on the tensor is another name of `y`."""
        if op.target is not _aten.set_.source_Tensor:
            raise refusal("set_ gives a tensor other memory", op)
        before, source = op.tensor(0), op.tensor(1)
        after = op.result
        left, aliases = self.sets[before.storage], self.sets.get(after.storage)
        is_itself = aliases is left and left.same(source) is left.same(before)
        differ = not is_itself and (after.fake.requires_grad or source.fake.requires_grad)  # in what autograd knows
        keeps_gradient = differ and after.fake.requires_grad and (self.grad or not source.fake.requires_grad)
        if keeps_gradient and isinstance(self.old, RecordedTape) and (freed := self.old.differentiated()):
            keeps_gradient = any(v.currently_requires_grad and v.op not in freed for v in self._results())
        objects = {id(after.fake), *(id(v.fake) for v in self.originals)}
        shared = any(v.storage == after.storage and id(v.fake) not in objects for v in self._results())
        other_size = to_expr(before.fake.size()) != to_expr(after.fake.size())
        if keeps_gradient and (shared or (self.grad and (aliases is not None or other_size))):
            raise refusal(
                "a tensor that requires grad gets memory that is written, that a result shares, or of another size", op
            )
        real = left.same(before).real
        is_leaf = real is not None and real.is_leaf
        written = (v.storage for o in self.old.ops if o.target is not op.target for v in o.writes)
        if keeps_gradient and self.grad and not is_leaf and before.storage in written:
            raise refusal("a tensor that requires grad gets other memory, and the first one is written", op)
        present = self.read(before, op)
        left.reshaped[left.same(before)] = (after, op)
        if aliases is not None:
            aliases.link(after, ViewMeta(source, _aten.detach.default) if differ and self.grad else ViewMeta(source))
        elif differ and self.grad:
            self.replacements[after] = left.overwritten(present, self.read(source, op), op)
        else:
            self.replacements[after] = self.read(source, op)

    def _resize(self, op: Op) -> None:
        """`resize_`: a contiguous tensor at the front of the memory, which may have to grow."""
        before, after = op.tensor(0), op.result
        aliases = self.sets[before.storage]
        old, new = geometry_of(before), geometry_of(after)
        front = Geometry((old.numel,), (1,), old.offset)
        if by_geometry(old, front) is None or len(aliases.roots) > 1:
            raise refusal("resize_ of a tensor that is not contiguous, or shares its memory", op)
        aliases.reshaped[aliases.same(before)] = (after, op)
        if new.numel <= old.numel:
            args = (list(new.size), list(new.stride), new.offset)
            aliases.link(after, ViewMeta(before, _aten.as_strided.default, args))
            aliases.read(after, op)
            return
        others = {v for v in (*aliases.roots, *aliases.views) if aliases.same(v) is not aliases.same(before)}
        if not others.isdisjoint((*self._read_after(op), *self._results(), *filter(_is_outside, others))):
            raise refusal("resize_ of a tensor whose memory another one shares (clone() it first)", op)
        row = self.emitter.run(op, _aten.reshape.default, (aliases.read(before, op), [-1]), {})
        more = self.emitter.run(op, _aten.new_zeros.default, (row, [new.numel - old.numel]), {})
        joined = self.emitter.run(op, _aten.cat.default, ([row, more],), {})
        grown = self.emitter.run(op, _aten.reshape.default, (joined, list(new.size)), {})
        aliases.replace(after, grown)

    def _resize_storage(self, op: Op) -> None:
        """Memory that no one reads afterwards needs not be freed in a graph."""
        storage = op.tensor(0).storage
        used = (*self._read_after(op), *leaves(self.old.outputs, Value))
        if self._is_outside(self.sets[storage]) or any(v.storage == storage for v in used):
            raise refusal("memory is resized that is read later, or that others hold", op)

    def _read_after(self, op: Op) -> Iterator[Value]:
        after = self.old.ops[self.old.ops.index(op) + 1 :]
        return (v for o in after for v in (*o.inputs(), *o.values()))

    def _is_outside(self, aliases: AliasSet) -> bool:
        return any(map(_is_outside, aliases.roots))


def _is_outside(root: Value) -> bool:
    return root.op.kind in ("placeholder", "get_attr")


_KEEPS_NOTHING = frozenset(
    {
        *("add_", "sub_", "neg_", "fill_", "zero_", "masked_fill_", "index_put_", "index_copy_", "index_add_"),
        *("index_fill_", "scatter_", "scatter_add_", "relu_", "exp_", "tanh_", "sigmoid_"),
    }
)
"""Ops in place whose backward does not need what they overwrite."""

_RANDOM_FROM = getattr(_aten.random_, "from")
"""Of `aten.random.from`, its functional variant, Python's parser takes the name for a keyword: no graph can call it."""
_RRELU = _aten.rrelu_with_noise_functional.default
_WITHOUT_DERIVATIVE = frozenset({"normal_", "bernoulli_", "uniform_"})
"""Ops in place whose functional variants have no derivative, or none of complex numbers. That of what they overwrite is
zero."""


def _cut(ops: list[Op]) -> dict[Value, int]:
    """The views made without autograd: no gradient goes from them to any leaf."""
    return {v: 0 for op in ops if not op.grad for v in op.values() if is_cut(v)}


_OTHER_MEMORY: dict[str, Callable[[Functionalizer, Op], None]] = {
    "set_": Functionalizer._set,
    "resize_": Functionalizer._resize,
    "resize_as_": Functionalizer._resize,
    "resize_storage_bytes_": Functionalizer._resize_storage,
}


def _name_of(func: Any) -> str:
    """The name of an op without the namespace; empty for a higher-order op."""
    return schema_of(func).op_name if is_op(func) else ""
