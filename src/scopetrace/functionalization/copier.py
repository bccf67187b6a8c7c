"""Copies a tape, replacing each operand by its current value.

    op of the recorded tape
        nothing that it reads was written   -> the same op on the copies of its operands
        an operand was written              -> the op on its present value, in a form that its layout allows
        the op writes                       -> what the subclass says (`Functionalizer`)
    start and end of a call                 -> the call with the present values of its arguments, results and state

A storage that some op writes has an `AliasSet`; the values of all others are mapped one to one. Every value of the new
tape belongs to an op of the new tape.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import torch

from scopetrace._compat.ops import is_op, is_random, schema_of
from scopetrace._compat.shape_env import Origin
from scopetrace._compat.symbols import example, to_expr
from scopetrace._compat.tensors import DATA_DEPENDENT
from scopetrace.containers.structure import leaves, map_structure
from scopetrace.functionalization.alias_set import AliasSet, ViewMeta, alike, last_of
from scopetrace.functionalization.emitter import Emitter, TapeRewriter
from scopetrace.functionalization.refusals import refusal
from scopetrace.functionalization.rewrites import schedule
from scopetrace.ir.scopes import source_of
from scopetrace.ir.tape import (
    BodyTape,
    Call,
    FunctionalTape,
    Op,
    RecordedTape,
    Target,
    Value,
    flat,
    map_argument,
    values_in,
)
from scopetrace.ops.higher_order import FORMS, written_inputs
from scopetrace.ops.history import OVERWRITE
from scopetrace.ops.view_inverses import Emit, by_geometry, geometry_of
from scopetrace.ops.views import is_contiguous

_aten = torch.ops.aten
_SIZED_BY_OTHER: dict[Target, Any] = {
    _aten.expand_as.default: _aten.expand.default,
    _aten.view_as.default: _aten.view.default,
    _aten.reshape_as.default: _aten.reshape.default,
}
_OF_ANY_LAYOUT: dict[Target, Any] = {
    _aten.view.default: _aten.reshape.default,
    _aten._unsafe_view.default: _aten.reshape.default,
    _aten.view_as.default: _aten.reshape_as.default,
}
"""What does the same as ops that not every layout of their argument allows."""


class TapeCopier(TapeRewriter, abc.ABC):
    """Appends to a functional tape. Subclasses say what becomes of writes.

    `replacements` has the new values of those outside of the alias sets.
    """

    def __init__(self, old: RecordedTape | BodyTape, around: TapeCopier | None = None) -> None:
        super().__init__(old, around)
        empty: dict[str, Any] = {"ops": [], "calls": [], "inputs": [], "attributes": dict(old.attributes)}
        if isinstance(old, BodyTape):
            self.new = dataclasses.replace(old, **empty)
        else:
            of_program = {"written": old.written_storages(), "uses_absolute_offset": set(old.uses_absolute_offset)}
            self.new = FunctionalTape.of(old, **empty, **of_program, modules=dict(old.modules), attribute_writes=[])
        self.grad = any(op.grad for op in old.ops if op.kind != "get_attr")
        self.emitter = Emitter(self.new, self.storages, has_grad=self.grad, calls=self.calls)
        self.sets = {storage: AliasSet(self.emitter, self._bring) for storage in _written(old.ops)}
        self.originals: dict[Value, Value] = {}
        """The values of inputs and attributes as the program got them, by those of the old tape."""
        self.original_storages: set[int] = set()
        """The storages of the values of `originals`."""
        self._held: dict[int, list[tuple[str, Value]]] = {}  # attributes read so far and their names, by storage
        self.differentiated = old.differentiated() if isinstance(old, RecordedTape) else set()
        self._find_roots()

    def where(self) -> Origin:
        """Of the op that is being copied, for errors: the module and source line."""
        op = self.op
        return {} if op is None else {"module": str(op.scope), "source": source_of(op.frames)}

    def run_body(self, changed: list[int], own_memory: bool = True) -> BodyTape:
        """Copy the body of a higher-order op; it gives the new values of the inputs `changed` too.

        With `own_memory`, no result shares memory with an input or another result.
        """
        self.append(self.old, self.old.calls)
        last = self.old.ops[-1]
        if self.new.is_condition:
            self.new.outputs = map_structure(lambda v: self.read(v, last), self.old.outputs, Value)
        else:
            placeholders = [op.outputs for op in self.old.ops if op.kind == "placeholder"]
            outputs = [*self.old.outputs, *(placeholders[i] for i in changed)]
            taken = {v.storage for v in self.new.inputs}
            emit = self.emitter.bound(last)

            def result(v: Value) -> Value:
                new = as_laid_out(emit, self.read(v, last), v.fake)
                if own_memory and new.storage in taken:
                    new = emit(_aten.clone.default, new)
                taken.add(new.storage)
                return new

            self.new.outputs = tuple(map_structure(result, outputs, Value))
        self._schedule(leaves(self.new.outputs, Value))
        return self.new

    def read(self, old: Value, reader: Op) -> Value:
        """The present value of one of the old tape."""
        aliases = self.sets.get(old.storage)
        return self.replacements[old] if aliases is None else aliases.read(old, reader)

    def operand(self, old: Value, reader: Op) -> Value:
        """As `read`, for an operand: a copy where autograd may keep memory from outside, which the write-back changes.

        In eager the write came before the op: what it left alone, as a part of `old` or the source of a copy, stays.
        Memory that was not written so far is written after the op in eager too, where a backward pass raises as well.
        """
        new, aliases = self.read(old, reader), self.sets.get(old.storage)
        if aliases is None or new.storage not in self.original_storages or new.storage not in self.sets:
            return new
        is_same = new.storage == old.storage and not (aliases.version or aliases.reshaped)
        if is_same or not reader.grad or reader in self.differentiated:
            return new
        if any(v.ever_requires_grad for v in reader.inputs()):
            new = self.emitter.run(reader, _aten.clone.default, (new,), {})
        return new

    def _schedule(self, results: list[Value]) -> None:
        """Drop and move the ops that alias sets added, and set the ranges of calls."""
        self.new.ops[:] = schedule(self.new.ops, self.new.calls, self.emitter.added, results)
        self.sets.clear()  # each knows this copier

    # ---------------------------------------------------------------- calls

    def _read_at_edge(self, old: Value, call: Call | None) -> Value:
        """As `read`, at the boundary of a call. What is derived for it belongs to `call`."""
        aliases = self.sets.get(old.storage)
        if aliases is None:
            return self.replacements[old]
        return aliases.current(old) or aliases.read(old, self.at_edge(call))

    def at_edge(self, call: Call | None) -> Op:
        """An op at the boundary of a call of the new tape, where it begins or ends."""
        assert self.op is not None
        return self.op.replace(call=call, scope=self.old.root if call is None else call.scope)

    def begin(self, call: Call) -> None:
        """A call gets the present values of its arguments."""
        new, taken = self.calls[call], (call.args, call.kwargs)
        new.args, new.kwargs = map_structure(lambda v: self._read_at_edge(v, new.parent), taken, Value)
        super().begin(call)

    def end(self, call: Call) -> None:
        """A call gets the present values of its results and of what it changed."""
        new = self.calls[call]
        new.outputs = map_structure(lambda v: self._read_at_edge(v, new), call.outputs, Value)
        new.mutated = self._mutated_in(call)
        super().end(call)

    def _mutated_in(self, call: Call) -> Any:
        """The arguments, and the module's tensors, whose storage the call wrote to: their new values."""
        written = _written(self.old.ops[call.start : call.stop])
        if not written:
            return None
        prefix = call.prefix

        def changed(v: Value) -> Value | None:
            if v.storage not in written:
                return None
            new = self._read_at_edge(last_of(self.sets, v), self.calls[call])
            if (call.parent is None or not call.is_module) and new.op.target is OVERWRITE:
                return new.op.tensor(1)  # what comes after the program, or a step of an optimizer, copies data alone
            return new

        args, kwargs = map_structure(changed, (call.args, call.kwargs), Value)
        named = [held for s in written if s in self._held for held in self._held[s]]
        held = {name.removeprefix(prefix): changed(v) for name, v in named if name.startswith(prefix)}
        return args, kwargs, held

    # ---------------------------------------------------------------- ops

    def _find_roots(self) -> None:
        inputs: dict[int, Value] = {}
        for op in self.old.ops:
            for value in op.values():
                aliases = self.sets.get(value.storage)
                if aliases is None:
                    continue
                parent = next((v for v in op.inputs() if v.storage == value.storage), None)
                first = inputs.setdefault(id(value.fake), value) if op.kind == "placeholder" else value
                if first is not value:  # one tensor given twice
                    aliases.link(value, ViewMeta(first))
                elif op.kind in ("placeholder", "get_attr") or parent is None:
                    aliases.roots.append(value)
                elif op.target is _aten.as_strided.default and self._around(value) is None:
                    aliases.roots.append(value)  # it reads memory that no other tensor of the program has

    def _around(self, value: Value) -> Value | None:
        """The tensor that a result of as_strided is a part of: its argument, what that is a view of, or a root."""
        above = [value]
        while (parent := _parent(above[-1].op, above[-1])) is not None:
            above.append(parent)
        # with symbolic sizes the largest one, since it may have to hold more than in the example
        candidates = above[1:] if all(geometry_of(v).exact for v in above) else above[:0:-1]
        return next((v for v in (*candidates, *self.sets[value.storage].roots) if _holds(v, value)), None)

    def step(self, op: Op) -> None:
        """Append what stands for an op, on present values."""
        if op.kind == "call_module" and op.writes:
            raise refusal("a leaf module changes its arguments in place", op)
        try:
            if op.kind in ("placeholder", "get_attr"):
                self._copy_source(op)
            elif op.bodies():
                self._copy_with_bodies(op)
            elif op.writes:
                self._write(op)
            else:
                self._copy_op(op)
        except DATA_DEPENDENT as error:
            raise refusal("what becomes of a write depends on data", op) from error

    def _bring(self, root: Value, reader: Op) -> None:
        """Put a root on the tape before the program reads it: an attribute, or memory around an input."""
        if root.op.kind == "get_attr":
            self._copy_source(root.op)
            return
        if root.op.target is not _aten.as_strided.default:
            raise refusal("results of one op share the memory that is written", root.op)
        aliases = self.sets[root.storage]
        base = next((v for v in aliases.roots if v in self.originals), None)
        other_dtype = base is not None and base.fake.dtype != root.fake.dtype
        if base is None or other_dtype or root.requires_grad or isinstance(self.new, BodyTape):
            raise refusal("a view that reaches memory outside of the tensor that it was made from", root.op)
        self.new.uses_absolute_offset.add(root.storage)
        args = self.originals[base], list(root.fake.size()), list(root.fake.stride()), root.offset
        aliases.define(root, self.emitter.run(reader, _aten.as_strided.default, args, {}))

    def _copy_source(self, op: Op) -> None:
        old = op.outputs
        if isinstance(old, Value) and old in self.originals:
            return
        new = self.emitter.copy(op, (), {})
        if not isinstance(old, Value):  # a number, given as argument or taken by a body
            return
        self.originals[old] = new
        self.original_storages.add(new.storage)
        if op.kind == "placeholder":
            self.new.inputs.append(new)
        else:
            self._held.setdefault(old.storage, []).append((op.name, old))
        aliases = self.sets.get(old.storage)
        if aliases is None:
            self.replacements[old] = new
            return
        if aliases.same(old) is old:
            aliases.define(old, new)

    def _copy_op(self, op: Op) -> None:
        """An op that writes nothing, and whose operands or results are not as they were."""
        if op.target is _aten.as_strided.default and self._read_by_position(op):
            return
        args, kwargs = self.present((op.args, op.kwargs), op)
        if op.args and isinstance(op.outputs, Value) and op.outputs.storage in self.sets and not kwargs:
            simplified = self.emitter.simplified(op, op.target, args)
            if isinstance(simplified, Value):
                self.define(op, op.outputs, simplified)
                return
            args = simplified[1] if simplified[0] is op.target else args
        old_inputs, new_inputs = op.inputs(), _values(op, (args, kwargs))
        moved = {(a.storage, b.storage) for a, b in zip(old_inputs, new_inputs, strict=op.kind != "call_module")}
        if op.kind == "call_module":
            outputs = self.emitter.copy(op, args, kwargs)
        elif all(map(alike, old_inputs, new_inputs)) and len(moved) == len({before for before, _ in moved}):
            # new tensors lie where they did, and none that lay in one memory lie in several now
            storages = {v.storage: v.storage for v in op.values()} | dict(moved)
            outputs = self.emitter.copy(op, args, kwargs, storages)
        else:
            outputs = self._run(op, op.target, args, kwargs)
        self.define(op, op.outputs, outputs)

    def _copy_with_bodies(self, op: Op) -> None:
        """A higher-order op: its bodies without mutation. What they write to comes out as more results."""
        takes_all = FORMS[op.target].takes_all
        changed = sorted({i for body in op.bodies() for i in written_inputs(body)}) if takes_all else []
        pure = {body: type(self)(body, self).run_body(changed, takes_all) for body in op.bodies()}
        if any(body.attributes for body in pure.values()):
            raise refusal("a body writes to elements of a tensor that no view op of torch takes", op)
        shared = {v.storage for v in op.inputs()}.intersection(v.storage for v in op.values())
        if not takes_all and not shared.isdisjoint(self.sets):
            later = _written(self.old.ops[self.old.ops.index(op) + 1 :])
            if not shared.isdisjoint(later):  # what was written before it, as by a ReLU in place, the view has
                raise refusal(f"{op.target} gives a view of memory that is written after it", op)
        emit = self.emitter.bound(op)

        def present(x: Any) -> Any:
            if isinstance(x, Value):
                return as_laid_out(emit, self.operand(x, op), x.fake)
            return pure[x] if isinstance(x, BodyTape) else x

        args = map_structure(present, op.args, (Value, BodyTape))
        storages = {old.storage: new.storage for old, new in zip(op.inputs(), values_in(args), strict=False)}
        outputs = self.emitter.copy(op, args, op.kwargs, storages, more=op.writes)
        count = len(op.writes)
        results, written = (outputs[:-count], outputs[-count:]) if count else (outputs, ())
        self.define_new(op.outputs, results)
        for target, value in zip(op.writes, written, strict=True):
            self.assign(op, target, value)

    def _read_by_position(self, op: Op) -> bool:
        """as_strided counts from the start of the storage; where that was written, read it through its alias set."""
        value = op.result
        aliases = self.sets.get(value.storage)
        is_root = aliases is not None and value in aliases.roots
        if aliases is None or not (aliases.version or is_root):
            return False
        if not is_root:
            aliases.link(value, self._view_meta(op, op.tensor(0), value, None))
        elif not aliases.is_known(value):
            self._bring(value, op)
        aliases.read(value, op)
        return True

    def _run(self, op: Op, func: Any, args: Any, kwargs: Any) -> Any:
        """Append `func` on operands of another layout than it was recorded with."""
        func = _OF_ANY_LAYOUT.get(func, func)
        if func in (_aten.view.dtype, _aten.view_as_complex.default):
            args = (self.emitter.run(op, _aten.contiguous.default, args[:1], {}), *args[1:])
        if func is _aten.as_strided.default:
            raise refusal("as_strided of a tensor whose strides are not those of eager", op)
        new = self.emitter.run(op, func, args, kwargs)
        is_copy = isinstance(new, Value) and op.result.storage not in {v.storage for v in op.inputs()}
        if is_copy and new.storage in {v.storage for v in new.op.inputs()}:
            new = self.emitter.run(op, _aten.clone.default, (new,), {})  # this layout needs no copy
        return new

    def present(self, x: Any, op: Op) -> Any:
        """The arguments of an op with present values."""
        emit, takes_any = self.emitter.bound(op), _takes_any_layout(op)
        if op.kind == "call_module":
            return map_structure(lambda v: laid_out(emit, self.operand(v, op), v.fake), x, Value)
        out = op.outputs  # one of the operands, where dropout drops nothing
        draws = is_random(op.target) and (
            op.writes or all(v.fake is not getattr(out, "fake", None) for v in op.inputs())
        )

        def current(leaf: Any) -> Any:
            if not isinstance(leaf, Value):
                return leaf
            new = self.operand(leaf, op)
            if takes_any:
                return in_order_of(emit, new, leaf.fake) if draws else new
            return laid_out(emit, new, leaf.fake)

        return map_argument(current, x)

    def define_new(self, old: Any, new: Any) -> None:
        """Bind what an op made in memory of its own."""
        for a, b in zip(values_in(old), values_in(new), strict=True):
            if a.storage in self.sets:
                self.sets[a.storage].define(a, b)
            else:
                self.replacements[a] = b

    def define(self, op: Op, old: Any, new: Any) -> None:
        """Bind what an op made: views in alias sets get their `ViewMeta`, new tensors are roots."""
        several = isinstance(old, (list, tuple))
        for a, b in zip(_values(op, old), _values(op, new), strict=True):
            parent = _parent(op, a) if a.storage in self.sets else None
            if parent is not None and op.kind == "call_function":
                self.sets[a.storage].link(a, self._view_meta(op, parent, a, a.slot if several else None))
                if a.fake is parent.fake:  # it has the value that it had
                    continue
            self.define_new(a, b)

    def _view_meta(self, op: Op, parent: Value, value: Value, slot: int | None) -> ViewMeta:
        """How a result of a view op comes from `parent`, by an op whose other arguments are no tensors."""
        layout = list(value.fake.size()), list(value.fake.stride())
        if op.target is _aten.as_strided.default:  # which may leave its argument: of the first tensor that it stays in
            return ViewMeta(self._around(value) or parent, op.target, (*layout, value.offset))
        if value.fake is parent.fake:  # as `x.to(x.dtype)` gives x itself, shape changes included
            return ViewMeta(parent)
        sized = _SIZED_BY_OTHER.get(op.target)
        if sized is not None:
            return ViewMeta(parent, sized, layout[:1])
        rest = flat((op.args[1:], op.kwargs))
        if op.args and op.args[0] is parent and not any(isinstance(a, Value) for a in rest):
            return ViewMeta(parent, op.target, op.args[1:], op.kwargs, slot)
        if geometry_of(value) == geometry_of(parent):
            return ViewMeta(parent, _aten.alias.default)
        if value.fake.dtype == parent.fake.dtype and value.offset == parent.offset:
            return ViewMeta(parent, _aten.as_strided.default, layout)
        raise refusal("a view that reads the data of other tensors, or is one of another argument than the first", op)

    @abc.abstractmethod
    def _write(self, op: Op) -> None: ...

    @abc.abstractmethod
    def assign(self, op: Op, target: Value, new: Value) -> None:
        """`target` gets the elements of `new`."""


def _takes_any_layout(op: Op) -> bool:
    """Whether its kernel takes operands of other strides.

    Those of ops that Python code calls do; the parts of such ops may count on what was made contiguous for them, as
    `mkldnn_rnn_layer` and `native_group_norm_backward` do, which give wrong values else; so may ops of others.
    """
    if not is_op(op.target) or not {v.storage for v in op.inputs()}.isdisjoint(v.storage for v in op.values()):
        return True
    name = schema_of(op.target).op_name
    is_part = name.startswith(("_", "native_", "mkldnn_", "cudnn_", "miopen_")) or name.endswith("_backward")
    return op.target.namespace in ("aten", "prims") and not is_part


def _written(ops: list[Op]) -> dict[int, None]:
    """The storages that ops write, in order: equal calls name them alike."""
    return dict.fromkeys(v.storage for op in ops for v in op.writes)


def _values(op: Op, x: Any) -> list[Value]:
    return leaves(x, Value) if op.kind == "call_module" else values_in(x)


def _parent(op: Op, value: Value) -> Value | None:
    """The input whose storage a result is in: the very tensor if it is one, else the first."""
    inside = [v for v in op.inputs() if v.storage == value.storage]
    return next((v for v in inside if v.fake is value.fake), inside[0] if inside else None)


def _holds(base: Value, view: Value) -> bool:
    """Whether all elements of `view` are elements of `base`, another tensor."""
    if base is view or base.fake.dtype != view.fake.dtype:
        return False
    a, b = geometry_of(base), geometry_of(view)
    if a.exact and b.exact:
        return by_geometry(a, b) is not None
    (first, last), (start, end) = a.span(), b.span()
    return is_contiguous(base.fake) and first <= start and end <= last


# Layouts --------------------------------------------------------------------------------------------------------------


def as_laid_out(emit: Emit, new: Value, old: torch.Tensor) -> Value:
    """`new` with the strides of `old`. Raises FunctionalizationError where its memory has gaps or repeats."""
    turned = laid_out(emit, new, old)
    if turned is new:
        return new
    sizes = zip(turned.fake.size(), turned.fake.stride(), old.stride(), strict=True)
    if any(to_expr(n) != 1 and to_expr(a) != to_expr(b) for n, a, b in sizes):
        raise refusal("a tensor that goes into or out of a body has gaps in its memory", turned.op)
    return turned


def laid_out(emit: Emit, new: Value, old: torch.Tensor) -> Value:
    """`new` with the strides of `old`; dense where the memory of `old` has gaps or repeats."""
    if old.layout is not torch.strided or to_expr(new.fake.stride()) == to_expr(old.stride()):
        return new
    turned = in_order_of(emit, new, old)
    is_like_old = to_expr(turned.fake.stride()) == to_expr(old.stride())
    return turned if is_like_old else emit(_aten.clone.default, turned)


def in_order_of(emit: Emit, new: Value, old: torch.Tensor) -> Value:
    """`new`, with its dimensions in memory in the order of `old`."""
    if old.layout is not torch.strided or old.dim() < 2 or _order(new.fake) == _order(old):
        return new
    order = _order(old, all_dims=True)
    turned = emit(_aten.permute.default, new, order)
    dense = emit(_aten.clone.default, turned, memory_format=torch.contiguous_format)
    return emit(_aten.permute.default, dense, [order.index(d) for d in range(len(order))])


def _order(t: torch.Tensor, *, all_dims: bool = False) -> list[int]:
    """The dimensions of more than one element, or all, slowest in memory first; of an expanded tensor as in a copy."""
    strides = [example(s) for s in t.stride()]
    if 0 in strides:
        sizes = [example(n) for n in t.size()]
        strides = list(torch.empty_like(torch.empty_strided(sizes, strides, device="meta")).stride())
    dims = [d for d in range(t.dim()) if all_dims or example(t.size(d)) != 1]
    return sorted(dims, key=lambda d: -strides[d])
