"""Going along a recorded tape with the present value of everything: calls, inputs, and ops that write nothing."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import torch

from scopetrace._compat.symbols import to_expr
from scopetrace._compat.tensors import DATA_DEPENDENT
from scopetrace.containers.structure import leaves, map_structure
from scopetrace.functionalization import epilogue
from scopetrace.functionalization.bodies import Results, as_laid_out, lift_constants
from scopetrace.functionalization.emitter import Emitter
from scopetrace.functionalization.geometry import relate
from scopetrace.functionalization.layout import in_order_of, is_random
from scopetrace.functionalization.refusal import refusal
from scopetrace.functionalization.region import Link, Region, geometry_of, last_of
from scopetrace.functionalization.verify import verify_pure
from scopetrace.ir.tape import (
    AttributeWrite,
    BodyTape,
    Call,
    FunctionalTape,
    Op,
    RecordedTape,
    Tape,
    Value,
    flat,
    garbage_collection_paused,
    values_in,
)
from scopetrace.record.bodies import with_more_operands, written_inputs

_aten = torch.ops.aten
_SIZED_BY_OTHER = {
    _aten.expand_as.default: _aten.expand.default,
    _aten.view_as.default: _aten.view.default,
    _aten.reshape_as.default: _aten.reshape.default,
}


class Rewriter(abc.ABC):
    """Goes along the old tape, and puts what it says on the new one. Subclasses say what becomes of writes."""

    def __init__(self, old: RecordedTape | BodyTape) -> None:
        self.old = old
        self.new = _started(old)
        self.emitter = Emitter(self.new)
        self.grad = any(op.grad for op in old.ops)
        self.map: dict[Value, Value] = {}  # outside of the regions
        self.storages: dict[int, int] = {}  # of values whose op was put on again
        self.regions: dict[int, Region] = {
            v.storage: Region(self.emitter, self._bring) for op in old.ops for v in op.writes
        }
        self._brought: set[Value] = set()
        self._held: dict[int, list[Value]] = {}  # attributes read so far, by storage
        self._calls: dict[Call, Call] = {}
        self._origin: tuple[Op, Op] | None = None  # the last op that new ones were made for, and its place
        self._starts: dict[int, list[Call]] = {}
        self._stops: dict[int, list[Call]] = {}
        self._find_roots()

    def run(self) -> FunctionalTape:
        """The new tape."""
        with garbage_collection_paused():
            return self._rewritten()

    def run_body(self, calls: dict[Call, Call], changed: list[int]) -> BodyTape:
        """The new tape of a body, which gives the new values of these inputs too. `calls` are those around it."""
        self._calls = calls
        last = self._go_along()
        results = Results(self.emitter.bound(self._moved(last)), self.new.inputs)
        placeholders = [op.outputs for op in self.old.ops if op.kind == "placeholder"]
        assert isinstance(self.new, BodyTape)
        if self.new.is_condition:
            self.new.outputs = map_structure(lambda v: self.read(v, last), self.old.outputs, Value)
            return self.new
        given = [*self.old.outputs, *(placeholders[i] for i in changed)]
        self.new.outputs = tuple([results.own(v, self.read(v, last)) if isinstance(v, Value) else v for v in given])
        return self.new

    def _go_along(self) -> Op:
        for call in self.old.calls:
            self._starts.setdefault(call.start, []).append(call)
            self._stops.setdefault(call.stop, []).append(call)
        for i, op in enumerate(self.old.ops):
            self._boundaries(i, op)
            try:
                self._step(op)
            except DATA_DEPENDENT as error:
                raise refusal("what becomes of a write depends on data", op) from error
        last = self.old.ops[-1]
        self._boundaries(len(self.old.ops), last)
        self.new.calls = [self._calls[call] for call in self.old.calls]
        return last

    def _rewritten(self) -> FunctionalTape:
        assert isinstance(self.old, RecordedTape) and isinstance(self.new, FunctionalTape)
        last = self._go_along()
        last = self._at_edge(last, self._calls[self.old.calls[0]])
        self.new.attribute_writes = [
            AttributeWrite(w.module, w.fqn, w.name, self._own(w.value, last)) for w in self.old.attribute_writes
        ]
        verify_pure(self.new)
        epilogue.attach(self.old, self.new, self.regions, lambda v: self.read(v, last))
        return self.new

    def _own(self, old: Value, reader: Op) -> Value:
        """What an attribute is bound to: an input or tensor of the model itself, or the value in memory of its own."""
        first = self.regions[old.storage].same(old) if old.storage in self.regions else old
        if first.op.kind in ("placeholder", "get_attr"):
            return first
        new = self.read(old, reader)
        outside = {v.storage for v in self.new.inputs} | self._held.keys()
        if new.storage != old.storage and new.storage in outside:
            new = self.emitter.run(reader, _aten.clone.default, (new,), {})
        return new

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

    def _at_edge(self, op: Op, call: Call | None) -> Op:
        """The op that follows, as the origin of what is read for the arguments or the result of a call."""
        place = op.moved_to(call)
        place.scope = self.old.root if call is None else call.scope
        return place

    def _open(self, call: Call, op: Op) -> None:
        parent = None if call.parent is None else self._calls[call.parent]
        edge = self._at_edge(op, parent)

        def present(x: Any) -> Any:
            return map_structure(lambda v: self.read(v, edge), x, Value)

        args = tuple(present(a) for a in call.args)
        kwargs = {name: present(a) for name, a in call.kwargs.items()}
        new = dataclasses.replace(call, parent=parent, args=args, kwargs=kwargs, start=len(self.new.ops))
        self._calls[call] = new

    def _close(self, call: Call, op: Op) -> None:
        new = self._calls[call]
        edge = self._at_edge(op, new)
        new.outputs = map_structure(lambda v: self.read(v, edge), call.outputs, Value)
        new.mutated = self._mutated_in(call, edge)
        new.stop = len(self.new.ops)

    def _mutated_in(self, call: Call, op: Op) -> Any:
        """The arguments, and the module's tensors, whose memory the call wrote to: their new values."""
        inside = self.old.ops[call.start : call.stop]
        written = dict.fromkeys(v.storage for o in inside for v in o.writes)  # in order: equal calls name them alike
        if not written:
            return None

        def changed(v: Value) -> Value | None:
            return self.read(last_of(self.regions, v), op) if v.storage in written else None

        args, kwargs = map_structure(changed, (call.args, call.kwargs), Value)
        prefix = f"{call.fqn}." if call.fqn else ""
        held = [v for s in written for v in self._held.get(s, ()) if v.op.target.startswith(prefix)]
        return args, kwargs, {v.op.target.removeprefix(prefix): new for v in held if (new := changed(v)) is not None}

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
                    region.link(value, Link(first))
                elif op.kind in ("placeholder", "get_attr") or parent is None:
                    region.roots.append(value)

    def _step(self, op: Op) -> None:
        if op.kind in ("placeholder", "get_attr"):
            self._keep(op)
        elif op.kind == "call_module":
            if op.writes:
                raise refusal("a leaf module changes its arguments in place", op)
            self._copy_over(op)
        elif op.bodies():
            self._run_bodies(op)
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
        value = op.outputs
        if isinstance(value, Value) and value in self._brought:
            return
        self.new.ops.append(self._placed(op))
        if not isinstance(value, Value):  # a number, given as argument or taken by a body
            return
        if op.kind == "placeholder":
            self.new.inputs.append(value)
        else:
            self._held.setdefault(value.storage, []).append(value)
        region = self.regions.get(value.storage)
        if region is not None and region.same(value) is value:
            region.define(value, value)

    def _copy_over(self, op: Op) -> None:
        """An op that writes nothing: as it is where its inputs are, else with the present ones."""
        if op.target is _aten.as_strided.default and self._by_positions(op):
            return
        args, kwargs = self._present(op.args, op), self._present(op.kwargs, op)
        old_inputs, new_inputs = op.inputs(), values_in((args, kwargs))
        moved = self._placed(op)
        if old_inputs == new_inputs or op.kind == "call_module":
            moved.args, moved.kwargs = args, kwargs
            self.new.ops.append(moved)
            outputs = op.outputs
        elif all(map(_alike, old_inputs, new_inputs)):
            storages = {a.storage: b.storage for a, b in zip(old_inputs, new_inputs, strict=True)}
            outputs = self.emitter.again(moved, args, kwargs, storages)
        else:
            outputs = self._run(op, op.target, args, kwargs)
        self._define(op, op.outputs, outputs)

    def _run_bodies(self, op: Op) -> None:
        """A higher-order op: its bodies without mutation. What they write to comes out as more results."""
        changed = sorted({i for body in op.bodies() for i in written_inputs(body)})
        pure: dict[BodyTape, BodyTape] = {}
        for body in op.bodies():
            needed = bool(changed) or writes(body)
            pure[body] = type(self)(body).run_body(self._calls, changed) if needed else body
        origin = self._moved(op)
        lifted = [self.emitter.constant(origin, real) for real in lift_constants(list(pure.values()))]
        emit = self.emitter.bound(origin)

        def present(x: Any) -> Any:
            if isinstance(x, Value):
                return as_laid_out(emit, self.read(x, origin), x.fake)
            return pure[x] if isinstance(x, BodyTape) else x

        args = with_more_operands(op.target, map_structure(present, op.args, (Value, BodyTape)), lifted)
        storages = {old.storage: new.storage for old, new in zip(op.inputs(), values_in(args), strict=False)}
        outputs = self.emitter.again(origin, args, op.kwargs, storages)
        new = self.emitter.more_results(self.new.ops[-1], list(op.writes))
        self._define(dataclasses.replace(op, args=(), kwargs={}), op.outputs, outputs)
        for target, value in zip(op.writes, new, strict=True):
            self._assign(op, target, value)

    def _by_positions(self, op: Op) -> bool:
        """as_strided counts from the start of the memory: in a region that was written, take it by position."""
        value: Value = op.outputs
        region = self.regions.get(value.storage)
        if region is None or not region.version:
            return False
        region.link(value, self._link(op, op.tensor(0), value, None))
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
        if self._origin is None or self._origin[0] is not op:
            self._origin = op, self._placed(op)
        return self._origin[1]

    def _placed(self, op: Op) -> Op:
        """A copy of the op in the new tape's call."""
        return op.moved_to(self._calls.get(op.call) if op.call else None)

    def _present(self, x: Any, op: Op) -> Any:
        if op.kind == "call_module":
            return map_structure(lambda v: self.read(v, op), x, Value)
        if isinstance(x, Value):
            if x.storage not in self.regions and x not in self.map:
                return x
            new = self.read(x, self._moved(op))
            return in_order_of(self.emitter.bound(self._moved(op)), new, x.fake) if is_random(op.target) else new
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
            parent = _parent(op, a)
            if parent is not None and op.kind == "call_function":
                slot = a.slot if several else None
                region.link(a, self._link(op, parent, a, slot))
            region.define(a, b)

    def _link(self, op: Op, parent: Value, value: Value, slot: int | None) -> Link:
        """As `_link`; as_strided, which may reach beyond its argument, is one of the first tensor that it stays in."""
        if op.target is _aten.as_strided.default:
            region = self.regions[value.storage]
            around = next((v for v in region.above(parent) if _holds(v, value)), parent)
            return Link(around, op.target, (list(value.fake.size()), list(value.fake.stride()), value.offset))
        return _link(op, parent, value, slot)

    @abc.abstractmethod
    def _write(self, op: Op) -> None:
        """An op that writes."""

    @abc.abstractmethod
    def _assign(self, op: Op, target: Value, new: Value) -> None:
        """`target` gets the elements of `new`."""


def _started(old: RecordedTape | BodyTape) -> FunctionalTape | BodyTape:
    """The tape of the functional program before its first op."""
    empty: dict[str, Any] = {"ops": [], "calls": [], "inputs": [], "attributes": dict(old.attributes)}
    if isinstance(old, BodyTape):
        return dataclasses.replace(old, **empty)
    return FunctionalTape.of(
        old, **empty, modules=dict(old.modules), attribute_writes=[], written=old.written_storages()
    )


def writes(tape: Tape) -> bool:
    """Whether an op writes, in the program or in the bodies inside it."""
    return any(op.writes for inner in tape.walk() for op in inner.ops)


def _values(op: Op, x: Any) -> list[Value]:
    if op.kind == "call_module":
        return leaves(x, Value)
    return values_in(x)


def _parent(op: Op, value: Value) -> Value | None:
    """The input whose memory a result is in: the very tensor if it is one, else the first."""
    inside = [v for v in op.inputs() if v.storage == value.storage]
    return next((v for v in inside if v.fake is value.fake), inside[0] if inside else None)


def _link(op: Op, parent: Value, value: Value, slot: int | None) -> Link:
    """The way from `parent` to a result of a view op, with arguments that are no tensors."""
    if value.fake is parent.fake:  # as `x.to(x.dtype)` gives x itself, shape changes included
        return Link(parent)
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


def _holds(base: Value, view: Value) -> bool:
    """Whether all elements of `view` are elements of `base`."""
    same = base.fake.dtype == view.fake.dtype
    return same and relate(geometry_of(base), geometry_of(view)) is not None


def _alike(old: Value, new: Value) -> bool:
    a, b = old.fake, new.fake
    return old is new or (
        a.dtype == b.dtype and to_expr(a.size()) == to_expr(b.size()) and to_expr(a.stride()) == to_expr(b.stride())
    )
