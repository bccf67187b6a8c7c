"""From a recorded tape to one without mutation.

Data flow:
    op of the old tape -> its arguments as they are now -> the op itself, or its pure twin and a write to a region -> new tape
    what was written outside of the graph, and what results share memory with -> the write-back program

Memory that nobody writes to is left alone: its ops go over as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from scopetrace._compat.dispatch import auto_functionalized
from scopetrace.passes import epilogue
from scopetrace.passes.emitter import Emitter
from scopetrace.passes.geometry import Geometry, relate
from scopetrace.passes.refusal import refusal
from scopetrace.passes.region import Link, Region, geometry_of
from scopetrace.record.twins import Twin, call_twin, draws_differ, functional_twin, hidden_writes, is_metadata_only
from scopetrace.passes.verify import verify_pure
from scopetrace.record.structure import leaves, map_structure
from scopetrace.record.tape import AttributeWrite, Call, Op, Tape, Value, flat

_aten = torch.ops.aten
_SIZED_BY_OTHER = {
    _aten.expand_as.default: _aten.expand.default,
    _aten.view_as.default: _aten.view.default,
    _aten.reshape_as.default: _aten.reshape.default,
}
_VISITS_IN_ORDER = ("index_", "scatter", "masked_scatter", "put", "_index_put")
_MAY_OVERLAP = (_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default)


def functionalize(tape: Tape) -> Tape:
    """The same program without an op that writes. A tape without writes is returned as it is.

    Raises FunctionalizationError for what cannot be said in pure ops.
    """
    if not any(op.writes for op in tape.ops):
        return tape
    return _Functionalizer(tape).run()


class _Functionalizer:
    def __init__(self, old: Tape) -> None:
        self.old = old
        self.new = dataclasses.replace(
            old,
            ops=[],
            calls=[],
            inputs=[],
            attributes=dict(old.attributes),
            modules=dict(old.modules),
            attribute_writes=[],
        )
        self.emitter = Emitter(self.new)
        self.grad = any(op.grad for op in old.ops)
        self.map: dict[Value, Value] = {}  # outside of the regions
        self.storages: dict[int, int] = {}  # of values whose op was put on again
        self.regions: dict[int, Region] = {
            v.storage: Region(self.emitter, self._bring) for op in old.ops for v in op.writes
        }
        self._brought: set[Value] = set()
        self._calls: dict[Call, Call] = {}
        self._starts: dict[int, list[Call]] = {}
        self._stops: dict[int, list[Call]] = {}
        self._find_roots()

    def run(self) -> Tape:
        for call in self.old.calls:
            self._starts.setdefault(call.start, []).append(call)
            self._stops.setdefault(call.stop, []).append(call)
        self.new.calls = [None] * len(self.old.calls)  # type: ignore[list-item]
        for i, op in enumerate(self.old.ops):
            self._boundaries(i, op)
            self._step(op)
        last = self.old.ops[-1]
        self._boundaries(len(self.old.ops), last)
        self.new.attribute_writes = [
            AttributeWrite(w.module, w.fqn, w.name, self.read(w.value, last)) for w in self.old.attribute_writes
        ]
        verify_pure(self.new)
        epilogue.attach(self.old, self.new, self.regions, lambda v: self.read(v, last))
        return self.new

    def read(self, old: Value, reader: Op) -> Value:
        """The new tape's value for one of the old tape, as of now."""
        region = self.regions.get(old.storage)
        if region is not None:
            return region.read(old, reader)
        return self.map.get(old, old)

    # ---------------------------------------------------------------- calls

    def _boundaries(self, i: int, op: Op) -> None:
        """Calls that end before op `i`, and those that start there."""
        empty = []
        for call in sorted(self._stops.get(i, ()), key=lambda c: -c.position):
            if call.start == i and call in self._starts.get(i, ()):
                empty.append(call)
            else:
                self._close(call, op)
        for call in self._starts.get(i, ()):
            self._open(call, op)
            if call in empty:
                self._close(call, op)

    def _open(self, call: Call, op: Op) -> None:
        def present(x: Any) -> Any:
            return map_structure(lambda v: self.read(v, op), x, Value)

        parent = None if call.parent is None else self._calls[call.parent]
        args = tuple(present(a) for a in call.args)
        kwargs = {name: present(a) for name, a in call.kwargs.items()}
        new = dataclasses.replace(call, parent=parent, args=args, kwargs=kwargs, start=len(self.new.ops))
        self._calls[call] = self.new.calls[call.position] = new

    def _close(self, call: Call, op: Op) -> None:
        new = self._calls[call]
        new.outputs = map_structure(lambda v: self.read(v, op), call.outputs, Value)
        new.mutated = self._mutated_in(call, op)
        new.stop = len(self.new.ops)

    def _mutated_in(self, call: Call, op: Op) -> Any:
        """The arguments, and the model's tensors, whose memory the call wrote to: their new values."""
        inside = self.old.ops[call.start : call.stop]
        written = {v.storage for o in inside for v in o.writes}
        if not written:
            return None

        def changed(v: Value) -> Value | None:
            return self.read(v, op) if v.storage in written else None

        args, kwargs = map_structure(changed, (call.args, call.kwargs), Value)
        held = {o.target: o.outputs for o in self.old.ops[: call.stop] if o.kind == "get_attr"}
        return args, kwargs, {name: changed(v) for name, v in held.items() if v.storage in written}

    # ---------------------------------------------------------------- ops

    def _find_roots(self) -> None:
        given: dict[int, Value] = {}
        for op in self.old.ops:
            for value in leaves(op.outputs, Value) if op.kind == "call_module" else op.values():
                region = self.regions.get(value.storage)
                if region is None:
                    continue
                parent = next((v for v in op.inputs() if v.storage == value.storage), None)
                first = given.setdefault(id(value.fake), value) if op.kind == "placeholder" else value
                if first is not value:  # one tensor given twice
                    region.links[value] = Link(first)
                elif op.kind in ("placeholder", "get_attr") or parent is None:
                    region.roots.append(value)

    def _step(self, op: Op) -> None:
        if op.kind in ("placeholder", "get_attr"):
            self._keep(op)
        elif op.kind == "call_module":
            if op.writes:
                raise refusal("a leaf module changes its arguments in place", op)
            self._copy_over(op)
        elif op.writes:
            self._write(op)
        else:
            self._copy_over(op)

    def _bring(self, root: Value) -> None:
        """An attribute is needed before the program reads it."""
        if root.op.kind != "get_attr":
            raise refusal("results of one op share the memory that is written", root.op)
        self._keep(root.op)
        self._brought.add(root)

    def _keep(self, op: Op) -> None:
        """Inputs and attributes go over as they are."""
        if op.outputs in self._brought:
            return
        new = dataclasses.replace(op, call=self._calls.get(op.call) if op.call else None)
        self.new.ops.append(new)
        value: Value = op.outputs
        if op.kind == "placeholder":
            self.new.inputs.append(value)
        region = self.regions.get(value.storage)
        if region is not None and region.same(value) is value:
            region.define(value, value)

    def _copy_over(self, op: Op) -> None:
        """An op that writes nothing: as it is where its inputs are, else with the present ones."""
        if op.target is _aten.as_strided.default and self._by_positions(op):
            return
        args, kwargs = self._present(op.args, op), self._present(op.kwargs, op)
        old_inputs, new_inputs = op.inputs(), [v for v in flat((args, kwargs)) if isinstance(v, Value)]
        call = self._calls.get(op.call) if op.call else None
        if old_inputs == new_inputs or op.kind == "call_module":
            moved = dataclasses.replace(op, call=call, args=args, kwargs=kwargs)
            self.new.ops.append(moved)
            outputs = op.outputs
        elif all(map(_alike, old_inputs, new_inputs)):
            storages = {a.storage: b.storage for a, b in zip(old_inputs, new_inputs, strict=True)}
            outputs = self.emitter.again(dataclasses.replace(op, call=call), args, kwargs, storages)
        else:
            outputs = self._run(op, op.target, args, kwargs)
        self._define(op, op.outputs, outputs)

    def _by_positions(self, op: Op) -> bool:
        """as_strided counts from the start of the memory: in a region that was written, take it by position."""
        value: Value = op.outputs
        region = self.regions.get(value.storage)
        if region is None or not region.version:
            return False
        region.links[value] = _link(op, op.args[0], value, None)
        region.read(value, self._moved(op))
        return True

    def _run(self, op: Op, func: Any, args: Any, kwargs: Any) -> Any:
        """Put `func` on the new tape; `view` becomes `reshape` where the present strides ask for it."""
        origin = self._moved(op)
        if func in (_aten.view.default, _aten._unsafe_view.default):
            func = _aten.reshape.default
        if func is _aten.as_strided.default:
            raise refusal("as_strided of a tensor whose strides are not those of eager", op)
        return self.emitter.run(origin, func, args, kwargs)

    def _moved(self, op: Op) -> Op:
        """The op as the origin of new ones: its call is the new tape's."""
        return dataclasses.replace(op, call=self._calls.get(op.call) if op.call else None)

    def _present(self, x: Any, op: Op) -> Any:
        if op.kind == "call_module":
            return map_structure(lambda v: self.read(v, op), x, Value)
        if isinstance(x, Value):
            return self.read(x, self._moved(op))
        if isinstance(x, (list, tuple)):
            return type(x)([self._present(item, op) for item in x])
        if isinstance(x, dict):
            return {name: self._present(item, op) for name, item in x.items()}
        return x

    def _define(self, op: Op, old: Any, new: Any) -> None:
        """Bind the values that an op made: views in regions get their link, fresh ones are roots."""
        pairs = zip(_values(op, old), _values(op, new), strict=True)
        several = isinstance(old, (list, tuple))
        for a, b in pairs:
            region = self.regions.get(a.storage)
            if region is None:
                if a is not b:
                    self.map[a] = b
                continue
            parent = next((v for v in op.inputs() if v.storage == a.storage), None)
            if parent is not None and op.kind == "call_function":
                slot = a.slot if several else None
                region.links[a] = _link(op, parent, a, slot)
            region.define(a, b)

    # ---------------------------------------------------------------- writes

    def _write(self, op: Op) -> None:
        func = op.target
        name = func._schema.name.split("::")[1]
        if name in _OTHER_MEMORY:
            _OTHER_MEMORY[name](self, op)
            return
        if is_metadata_only(func):
            self._change_shape(op)
            return
        self._refuse_overlap(op)
        if draws_differ(func, op.args, op.kwargs):
            raise refusal("one seed would give other random numbers (fill a contiguous tensor, then copy_)", op)
        twin = hidden_writes(func, op.args, op.kwargs) or functional_twin(func)
        if func is _aten.fill_diagonal_.default:
            self._fill_diagonal(op)
            return
        if twin is None:
            self._write_opaque(op)
            return
        args, kwargs = self._present(op.args, op), self._present(op.kwargs, op)
        args, kwargs = call_twin(twin, func, args, kwargs)
        out = self.emitter.run(self._moved(op), twin.op, tuple(args), kwargs)
        self._store(op, twin, out)

    def _store(self, op: Op, twin: Twin, out: Any) -> None:
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
                if value is not target and region.links.get(target) is None or value not in region.links:
                    region.links[value] = Link(target)

    def _assign(self, op: Op, target: Value, new: Value) -> None:
        origin = self._moved(op)
        region = self.regions[target.storage]
        if new.fake.dtype != target.fake.dtype:
            new = self.emitter.run(origin, _aten._to_copy.default, (new,), {"dtype": target.fake.dtype})
        if tuple(new.fake.size()) != tuple(target.fake.size()):
            returned = [v for v in op.values() if v.storage == target.storage]
            if len(region.roots) > 1 or region.same(target) not in region.roots or self._is_outside(region):
                raise refusal("out= resizes a tensor that others share memory with", op)
            for value in returned:
                region.links[value] = Link(region.same(target))
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
        seen = op.grad and (target.fake.requires_grad or not _has_history(self.regions[target.storage], target))
        if not seen and op.grad and any(v.fake.requires_grad for v in op.inputs()):
            raise refusal("a tensor that requires grad is written into a detached alias of another", op)
        return not seen

    def _fill_diagonal(self, op: Op) -> None:
        """Where the diagonal is, with `wrap` or without, is known from the shape."""
        target, value, *wrap = op.args
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
        twin = functional_twin(op.target)
        (before,) = op.writes[:1]
        if twin is None:
            raise refusal(f"{op.target} has no pure form", op)
        region = self.regions[before.storage]
        now = region.read(before, self._moved(op))
        rest = self._present(op.args[1:], op)
        new = self.emitter.run(self._moved(op), twin.op, (now, *rest), dict(op.kwargs))
        after: Value = op.outputs
        region.links[after] = Link(before, twin.op, tuple(rest), dict(op.kwargs))
        region.define(after, new)
        region.reshaped[region.same(before)] = (after, op)

    def _set(self, op: Op) -> None:
        """`x.set_(y)`: from here on the tensor is another name of `y`."""
        if op.target is not _aten.set_.source_Tensor:
            raise refusal("set_ gives a tensor other memory", op)
        before, source = op.args
        after: Value = op.outputs
        self.regions[before.storage].reshaped[self.regions[before.storage].same(before)] = (after, op)
        region = self.regions.get(after.storage)
        if region is None:
            self.map[after] = self.read(source, op)
        else:
            region.links[after] = Link(source)

    def _resize(self, op: Op) -> None:
        """`resize_`: a contiguous tensor at the front of the memory, which may have to grow."""
        before, after = op.args[0], op.outputs
        region, origin = self.regions[before.storage], self._moved(op)
        old, new = geometry_of(before), geometry_of(after)
        front = Geometry((old.numel,), (1,), old.offset)
        if relate(old, front) is None or len(region.roots) > 1:
            raise refusal("resize_ of a tensor that is not contiguous, or shares its memory", op)
        region.reshaped[region.same(before)] = (after, op)
        if new.numel <= old.numel:
            args = (list(new.size), list(new.stride), new.offset)
            region.links[after] = Link(before, _aten.as_strided.default, args)
            region.read(after, origin)
            return
        row = self.emitter.run(origin, _aten.reshape.default, (region.read(before, origin), [-1]), {})
        more = self.emitter.run(origin, _aten.new_zeros.default, (row, [new.numel - old.numel]), {})
        joined = self.emitter.run(origin, _aten.cat.default, ([row, more],), {})
        grown = self.emitter.run(origin, _aten.reshape.default, (joined, list(new.size)), {})
        region.replace(after, grown, origin)

    # ---------------------------------------------------------------- refusals

    def _is_outside(self, region: Region) -> bool:
        return any(r.op.kind in ("placeholder", "get_attr") for r in region.roots)

    def _refuse_overlap(self, op: Op) -> None:
        """Writes whose result depends on the order in which elements are visited: eager raises for most."""
        for target in op.writes:
            place = geometry_of(target)
            if place.overlaps_itself() and op.target not in _MAY_OVERLAP:
                raise refusal("the tensor that is written to has elements that share memory (clone() it first)", op)
            name = op.target._schema.name.split("::")[1]
            for other in op.inputs():
                if other.storage == target.storage and other not in op.writes:
                    if name.startswith(_VISITS_IN_ORDER) or _overlap_in_part(place, geometry_of(other)):
                        raise refusal("an input lies in the memory that is written (clone() it first)", op)


_OTHER_MEMORY: dict[str, Callable[[_Functionalizer, Op], None]] = {
    "set_": _Functionalizer._set,
    "resize_": _Functionalizer._resize,
    "resize_as_": _Functionalizer._resize,
}


def _has_history(region: Region, target: Value) -> bool:
    """Whether another alias of the memory requires grad."""
    return any(v.fake.requires_grad for v in (*region.links, *region.roots) if v is not target)


def written_values(op: Op) -> dict[str, Any]:
    """The written arguments of an op by name: a value, or a list of values."""
    arguments = op.target._schema.arguments
    named = dict(zip([a.name for a in arguments], op.args, strict=False)) | op.kwargs
    return {name: a for name, a in named.items() if isinstance(a, (Value, list, tuple))}


def _values(op: Op, x: Any) -> list[Value]:
    if op.kind == "call_module":
        return leaves(x, Value)
    return [v for v in flat(x) if isinstance(v, Value)]


def _link(op: Op, parent: Value, value: Value, slot: int | None) -> Link:
    """The way from `parent` to a result of a view op, with arguments that are no tensors."""
    sized = _SIZED_BY_OTHER.get(op.target)
    if sized is not None:
        return Link(parent, sized, (list(value.fake.size()),))
    rest = flat((op.args[1:], op.kwargs))
    if op.args and op.args[0] is parent and not any(isinstance(a, Value) for a in rest):
        return Link(parent, op.target, op.args[1:], op.kwargs, slot)
    if geometry_of(value) == geometry_of(parent):
        return Link(parent, _aten.alias.default)
    if value.fake.dtype == parent.fake.dtype and value.offset == parent.offset:
        return Link(parent, _aten.as_strided.default, (list(value.fake.size()), list(value.fake.stride())))
    raise refusal("a view that reads the data of other tensors, or is one of another argument than the first", op)


def _alike(old: Value, new: Value) -> bool:
    a, b = old.fake, new.fake
    return old is new or (a.dtype == b.dtype and a.size() == b.size() and a.stride() == b.stride())


def _overlap_in_part(a: Any, b: Any) -> bool:
    if (a.size, a.stride, a.offset) == (b.size, b.stride, b.offset):
        return False
    (a0, a1), (b0, b1) = a.span(), b.span()
    if a1 < b0 or b1 < a0:
        return False
    return bool(torch.isin(a.positions(), b.positions()).any())
