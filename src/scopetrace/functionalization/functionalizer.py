"""From a recorded tape to one without mutation.

Data flow:
    op of the old tape -> its arguments as they are now -> the op itself, or its pure twin and a write to a region
    what was written outside of the graph, and what results share memory with -> the write-back program

Memory that nobody writes to is left alone: its ops go over as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from scopetrace._compat.dispatch import auto_functionalized
from scopetrace._compat.symbols import surely_equal, to_expr
from scopetrace.containers.structure import leaves
from scopetrace.functionalization.geometry import Geometry, relate
from scopetrace.functionalization.layout import draws_differ
from scopetrace.functionalization.overlap import refuse_overlap
from scopetrace.functionalization.refusal import refusal
from scopetrace.functionalization.region import Link, Region, geometry_of
from scopetrace.functionalization.rewriter import Rewriter, writes
from scopetrace.ir.tape import FunctionalTape, Op, RecordedTape, Value
from scopetrace.ops.functional_variants import (
    FunctionalVariant,
    call_variant,
    functional_variant,
    is_metadata_only,
    undeclared_variant,
)

_aten = torch.ops.aten


def functionalize(tape: RecordedTape) -> FunctionalTape:
    """The same program without an op that writes. The result shares the ops of a tape that has none.

    Raises FunctionalizationError for what cannot be said in pure ops.
    """
    if not writes(tape):
        return FunctionalTape.of(tape)
    return Functionalizer(tape).run()


class Functionalizer(Rewriter):
    """Turns writes into pure ops and new values of regions."""

    def _write(self, op: Op) -> None:
        func = op.target
        name = func._schema.name.split("::")[1]
        if name in _OTHER_MEMORY:
            _OTHER_MEMORY[name](self, op)
            return
        if is_metadata_only(func):
            self._change_shape(op)
            return
        refuse_overlap(op)
        if draws_differ(func, op.args, op.kwargs):
            raise refusal("one seed would give other random numbers (fill a contiguous tensor, then copy_)", op)
        twin = undeclared_variant(func, op.args, op.kwargs) or functional_variant(func)
        if func is _aten.fill_diagonal_.default:
            self._fill_diagonal(op)
            return
        if func is _aten.copy_.default:
            self._copy(op)
            return
        if twin is None:
            self._write_opaque(op)
            return
        args, kwargs = self._present(op.args, op), self._present(op.kwargs, op)
        if any(v.fake.requires_grad for v in op.inputs()) and not op.target._schema.is_mutable:
            args, kwargs = self._apart(op, args), self._apart(op, kwargs)
        args, kwargs = call_variant(twin, func, args, kwargs)
        out = self.emitter.run(self._moved(op), twin.op, tuple(args), kwargs)
        self._store(op, twin, out)

    def _apart(self, op: Op, x: Any) -> Any:
        """Copies of the statistics that batch_norm writes: its backward keeps them, and the write-back changes them."""
        kept = {id(self.read(v, op)) for v in op.writes}
        if isinstance(x, Value):
            return self.emitter.run(self._moved(op), _aten.clone.default, (x,), {}) if id(x) in kept else x
        if isinstance(x, (list, tuple)):
            return type(x)([self._apart(op, item) for item in x])
        return x

    def _store(self, op: Op, twin: FunctionalVariant, out: Any) -> None:
        """Write the twin's results where they belong, and bind what the op returned."""
        written = written_values(op)
        for name, index in twin.new_values:
            target = written.get(name)
            new = out if index is None else out[index]
            for t, n in zip(*(([target], [new]) if isinstance(target, Value) else (target or [], new)), strict=True):
                self._assign(op, t, n)
        returned = op.outputs if isinstance(op.outputs, (list, tuple)) and len(twin.results) > 1 else [op.outputs]
        for old, source in zip(returned, twin.results, strict=False):
            if isinstance(source, str):
                self._rename(op, written.get(source), old)
            elif isinstance(old, Value):
                single = isinstance(out, Value)
                self._define(dataclasses.replace(op, args=(), kwargs={}), old, out if single else out[source])

    def _rename(self, op: Op, targets: Any, returned: Any) -> None:
        """What an in-place op returned is the tensor that it wrote to."""
        pairs = zip(targets, returned, strict=True) if isinstance(returned, (list, tuple)) else [(targets, returned)]
        for target, value in pairs:
            if isinstance(value, Value) and isinstance(target, Value):
                region = self.regions[target.storage]
                if (value is not target and region.links.get(target) is None) or value not in region.links:
                    region.link(value, Link(target))

    def _assign(self, op: Op, target: Value, new: Value) -> None:
        origin = self._moved(op)
        region = self.regions[target.storage]
        if new.fake.dtype != target.fake.dtype:
            new = self.emitter.run(origin, _aten._to_copy.default, (new,), {"dtype": target.fake.dtype})
        if not all(map(surely_equal, new.fake.size(), target.fake.size())) or new.fake.dim() != target.fake.dim():
            returned = [v for v in op.values() if v.storage == target.storage]
            if len(region.roots) > 1 or region.same(target) not in region.roots or self._is_outside(region):
                raise refusal("out= resizes a tensor that others share memory with", op)
            for value in returned:
                region.link(value, Link(region.same(target)))
            region.replace(region.same(target), new, origin)
            return
        hidden = self._is_hidden(op, target)
        if hidden:
            new = region.overwritten(region.read(target, origin), new, origin)
        region.write(target, new, origin, hidden=hidden)

    def _is_hidden(self, op: Op, target: Value) -> bool:
        """Whether autograd does not see a write, though values in this memory may carry gradients."""
        if not self.grad:
            return False
        region = self.regions[target.storage]
        seen = op.grad and (target in op.tracked or not region.has_history(target))
        brings = op.grad and any(v is not target for v in op.tracked)
        detached = self._detached(region, target) if brings else None
        if detached is not None:
            inside, outside = self._read_later(op, region, detached)
            if not inside:
                return True  # only the detached alias, which is gone, has this part of the gradient
            seen = seen and not outside
        if seen and brings:
            region.gain_history(target)
        elif brings:
            raise refusal(
                "a tensor that requires grad is written into a detached alias of another, and both are used", op
            )
        return not seen

    def _detached(self, region: Region, value: Value) -> Value | None:
        """The detached tensor that a value is, or is a view of."""
        for v in region.above(value):
            link = region.links.get(v)
            if link is not None and link.func is _aten.detach.default:
                return v
        return None

    def _read_later(self, op: Op, region: Region, detached: Value) -> tuple[bool, bool]:
        """Whether the detached tensor is read after the op, and whether others in its memory are."""
        family = {detached, *op.values()}
        storage, inside, outside = detached.storage, False, self._is_outside(region)
        for later in self.old.ops[self.old.ops.index(op) + 1 :]:
            for v in later.inputs():
                if v.storage != storage:
                    continue
                if v in family or detached in region.above(v):
                    family |= set(later.values()) if v in later.writes else {v}
                    inside = inside or v not in later.writes
                else:
                    outside = True
        bound = self.old.attribute_writes if isinstance(self.old, RecordedTape) else []
        kept = [*leaves(self.old.outputs, Value), *(w.value for w in bound)]
        mine = [v in family or detached in region.above(v) for v in kept if v.storage == storage]
        return inside or any(mine), outside or not all(mine)

    def _copy(self, op: Op) -> None:
        """`copy_` where gradients flow: its twin `aten.copy` has no derivative, its parts have."""
        target, source = op.tensor(0), op.tensor(1)
        origin, size = self._moved(op), list(target.fake.size())
        new = self.read(source, origin)
        if new.fake.dtype != target.fake.dtype or new.fake.device != target.fake.device:
            to = {"dtype": target.fake.dtype, "device": target.fake.device}
            new = self.emitter.run(origin, _aten._to_copy.default, (new,), to)
        if to_expr(new.fake.size()) != to_expr(size):
            new = self.emitter.run(origin, _aten.expand.default, (new, size), {})
        self._assign(op, target, new)
        self._rename(op, target, op.outputs)

    def _fill_diagonal(self, op: Op) -> None:
        """Where the diagonal is, with `wrap` or without, is known from the shape."""
        target, value = op.tensor(0), op.args[1]
        wrap = [bool(a) for a in op.args[2:]]
        mask = torch.zeros(tuple(target.fake.size()), dtype=torch.bool, device="cpu").fill_diagonal_(True, *wrap)
        origin = self._moved(op)
        now = self.read(target, origin)
        new = self.emitter.run(origin, _aten.masked_fill.Scalar, (now, mask.to(target.fake.device), value), {})
        self._assign(op, target, new)
        self._rename(op, target, op.outputs)

    def _write_opaque(self, op: Op) -> None:
        """A mutating op without a pure twin, as custom ops are: run on copies by `auto_functionalized`."""
        schema = op.target._schema
        if any(r.alias_info is not None for r in schema.returns):
            raise refusal(f"{op.target} has no pure form", op)
        given = dict(zip([a.name for a in schema.arguments], self._present(op.args, op), strict=False))
        kwargs = {**given, **self._present(op.kwargs, op)}
        kwargs = {a.name: kwargs.get(a.name, a.default_value) for a in schema.arguments}
        names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        out = self.emitter.run(self._moved(op), auto_functionalized(), (op.target,), kwargs)
        count = max(1, len(schema.returns))
        written = written_values(op)
        for name, new in zip(names, out[count:], strict=True):
            target = written.get(name)
            if isinstance(target, Value):
                self._assign(op, target, new)
            else:
                for t, n in zip(target or [], new, strict=True):
                    self._assign(op, t, n)
        self._define(dataclasses.replace(op, args=(), kwargs={}), op.outputs, out[0] if count == 1 else out[:count])

    def _change_shape(self, op: Op) -> None:
        """`transpose_` and its kind: the tensor becomes a view of what it was."""
        twin = functional_variant(op.target)
        (before,) = op.writes[:1]
        if twin is None:
            raise refusal(f"{op.target} has no pure form", op)
        region = self.regions[before.storage]
        now = region.read(before, self._moved(op))
        rest = self._present(op.args[1:], op)
        new = self.emitter.run(self._moved(op), twin.op, (now, *rest), dict(op.kwargs))
        after: Value = op.outputs
        region.link(after, Link(before, twin.op, tuple(rest), dict(op.kwargs)))
        region.define(after, new)
        region.reshaped[region.same(before)] = (after, op)

    def _set(self, op: Op) -> None:
        """`x.set_(y)`: from here on the tensor is another name of `y`."""
        if op.target is not _aten.set_.source_Tensor:
            raise refusal("set_ gives a tensor other memory", op)
        before, source = op.tensor(0), op.tensor(1)
        after: Value = op.outputs
        left, region = self.regions[before.storage], self.regions.get(after.storage)
        loses_gradient = self.grad and after.fake.requires_grad and not source.fake.requires_grad
        if loses_gradient and (region is not None or to_expr(before.fake.size()) != to_expr(after.fake.size())):
            raise refusal("a tensor that requires grad gets memory that is written, or of another size", op)
        now = self.read(before, op)
        left.reshaped[left.same(before)] = (after, op)
        if region is not None:
            region.link(after, Link(source))
        elif loses_gradient:
            self.map[after] = left.overwritten(now, self.read(source, op), self._moved(op))
        else:
            self.map[after] = self.read(source, op)

    def _resize(self, op: Op) -> None:
        """`resize_`: a contiguous tensor at the front of the memory, which may have to grow."""
        before, after = op.tensor(0), op.outputs
        region, origin = self.regions[before.storage], self._moved(op)
        old, new = geometry_of(before), geometry_of(after)
        front = Geometry((old.numel,), (1,), old.offset)
        if relate(old, front) is None or len(region.roots) > 1:
            raise refusal("resize_ of a tensor that is not contiguous, or shares its memory", op)
        region.reshaped[region.same(before)] = (after, op)
        if new.numel <= old.numel:
            args = (list(new.size), list(new.stride), new.offset)
            region.link(after, Link(before, _aten.as_strided.default, args))
            region.read(after, origin)
            return
        row = self.emitter.run(origin, _aten.reshape.default, (region.read(before, origin), [-1]), {})
        more = self.emitter.run(origin, _aten.new_zeros.default, (row, [new.numel - old.numel]), {})
        joined = self.emitter.run(origin, _aten.cat.default, ([row, more],), {})
        grown = self.emitter.run(origin, _aten.reshape.default, (joined, list(new.size)), {})
        region.replace(after, grown, origin)

    def _resize_storage(self, op: Op) -> None:
        """Memory that no one reads afterwards needs not be freed in a graph."""
        storage = op.tensor(0).storage
        after = self.old.ops[self.old.ops.index(op) + 1 :]
        used = any(v.storage == storage for o in after for v in (*o.inputs(), *o.values()))
        if (
            used
            or self._is_outside(self.regions[storage])
            or storage in {v.storage for v in leaves(self.old.outputs, Value)}
        ):
            raise refusal("memory is resized that is read later, or that others hold", op)

    # ---------------------------------------------------------------- refusals

    def _is_outside(self, region: Region) -> bool:
        return any(r.op.kind in ("placeholder", "get_attr") for r in region.roots)


_OTHER_MEMORY: dict[str, Callable[[Functionalizer, Op], None]] = {
    "set_": Functionalizer._set,
    "resize_": Functionalizer._resize,
    "resize_as_": Functionalizer._resize,
    "resize_storage_bytes_": Functionalizer._resize_storage,
}


def written_values(op: Op) -> dict[str, Any]:
    """The written arguments of an op by name: a value, or a list of values."""
    arguments = op.target._schema.arguments
    named = dict(zip([a.name for a in arguments], op.args, strict=False)) | op.kwargs
    return {name: a for name, a in named.items() if isinstance(a, (Value, list, tuple))}
