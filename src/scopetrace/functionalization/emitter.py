"""One tape from another, op by op.

op -> its place in the new tape -> copied on what stands for its operands, or what a subclass puts in its place
call -> a copy of it around what stands for its ops, with what stands for its arguments and results

A new op is made for one of the old tape, its origin, whose scope, frames, grad mode and call it gets.
"""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from scopetrace._compat.ops import autocast_may_change, is_op
from scopetrace._compat.tensors import FakeMaker, is_leaf_of, requires_grad_of, set_requires_grad, storage_id
from scopetrace.containers.structure import map_structure
from scopetrace.functionalization import rewrites
from scopetrace.infer.inference import Inference
from scopetrace.infer.rules import OutputMeta
from scopetrace.ir.segment import with_values
from scopetrace.ir.tape import BodyTape, Call, Op, ProgramTape, Tape, Value, flat, map_argument, values_in
from scopetrace.ops.functional_variants import FIRST_HAS_GRADIENT

_aten = torch.ops.aten


class Emitter:
    """Appends to `tape`."""

    def __init__(
        self,
        tape: ProgramTape | BodyTape,
        storages: Iterator[int],
        *,
        has_grad: bool = True,
        calls: Mapping[Call, Call] = types.MappingProxyType({}),
    ) -> None:
        """`storages` gives numbers of storages that the tape does not have.

        `has_grad`: whether autograd is on at one of the ops. `calls`: those of the tape by those of the recorded one; a
        call that is no key stands for itself.
        """
        self._has_grad = has_grad
        self.tape = tape
        self.calls = calls
        self.added: set[Op] = set()
        """The ops that alias sets added. Those that nobody reads are dropped in the end, see `rewrites.schedule`."""
        assert tape.fake_mode is not None
        self.with_history: set[int] = set()
        """Storages that had no history before an op wrote into them what has one; of tapes whose ops may write."""
        self._knows_keys = tape.inference is not None  # which are numbers of one inference
        self.inference = tape.inference or Inference(FakeMaker(tape.fake_mode))
        self._storages = storages
        self._constants: dict[int, Value] = {}

    def run(self, origin: Op, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Append `func(*args, **kwargs)`; returns its result with values in place of tensors."""
        args, kwargs = self._lift(origin, (args, kwargs))
        inputs = values_in((args, kwargs))
        inferred, out = self.inference.run(func, args, kwargs, inputs)
        if inferred is not None:
            out = inferred[0].contained(inferred[1])
        outputs = self._outputs(origin, func, inputs, out)
        if inferred is not None and self._knows_keys:
            for meta, new in zip(filter(None, inferred[0].tensors), values_in(outputs), strict=True):
                if isinstance(meta, OutputMeta):
                    new.key = self.inference.key_of(new.fake) if new.requires_grad else meta.key
        return self._append(origin, "call_function", func, args, kwargs, outputs)

    def _outputs(self, origin: Op, func: Any, inputs: list[Value], out: Any) -> Any:
        by_fake = {id(v.fake): v.storage for v in reversed(inputs)}
        by_memory = {storage_id(v.fake): v.storage for v in reversed(inputs)}
        # by which a result requires grad; under no_grad only one that is a view of them
        carries = self._has_grad and func is not _aten.detach.default
        carrying = {v.storage for v in inputs if v.requires_grad or v.storage in self.with_history} if carries else ()

        def value(t: Any, slot: int) -> Any:
            if not isinstance(t, torch.Tensor):
                return t
            storage = by_fake.get(id(t), by_memory.get(storage_id(t)))
            required = bool(carrying) if origin.grad else storage in carrying
            required = required and not (slot and func in FIRST_HAS_GRADIENT)
            required = required and (t.dtype.is_floating_point or t.dtype.is_complex)
            if required and id(t) not in by_fake and not requires_grad_of(t) and is_leaf_of(t):
                set_requires_grad(t, True)  # stands for the history that the real run has
            new = Value(t, slot, next(self._storages) if storage is None else storage, None)
            new.requires_grad = required
            return new

        return _with_slots(value, out, 0)

    def bound(self, origin: Op) -> Callable[..., Any]:
        """`run` for one origin, called as the op."""
        return lambda func, *args, **kwargs: self.run(origin, func, args, kwargs)

    def simplifying(self, origin: Op, *, grad: bool | None = None) -> Callable[..., Any]:
        """As `bound`, for the ops of alias sets: simplified by the rewrite rules, and dropped if nobody reads them.

        `grad`: in this grad mode, in place of the origin's.
        """
        if grad is not None and grad != origin.grad:
            origin = origin.replace(grad=grad)

        def emit(func: Any, *args: Any, **kwargs: Any) -> Any:
            if not kwargs:
                simplified = self.simplified(origin, func, self._lift(origin, args))
                if isinstance(simplified, Value):
                    return simplified
                func, args = simplified
            out = self.run(origin, func, args, kwargs)
            self.added.add(self.tape.ops[-1])
            return out

        return emit

    def simplified(self, origin: Op, func: Any, args: tuple[Any, ...]) -> Value | tuple[Any, tuple[Any, ...]]:
        """As `rewrites.simplified`, where the grad mode of the origin allows it."""
        simplified = rewrites.simplified(func, args, self._call_of(origin))
        is_leaf = self._has_grad and not origin.grad  # a view of what requires grad, of which `simplified` is none
        return (func, args) if is_leaf and isinstance(simplified, Value) and simplified.requires_grad else simplified

    def copy(
        self, op: Op, args: Any, kwargs: Any, storages: dict[int, int] | None = None, more: Sequence[Value] = ()
    ) -> Any:
        """Append an op of the recorded tape, on other operands of the same metadata; returns its new result.

        `storages` has the new storage of each old one among the operands; a result in another one is a new tensor.
        Without it, all storages are as in the recorded tape. For each of `more` there is a further result, a new tensor
        with the same metadata, and the results are a tuple.
        """
        new_storages = {} if storages is None else storages

        def value(v: Value) -> Value:
            if v.storage not in new_storages:
                new_storages[v.storage] = v.storage if storages is None else next(self._storages)
            return v.copy(new_storages[v.storage])

        outputs = map_structure(value, op.outputs, Value)
        for slot, like in enumerate(more, len(outputs) if more else 0):
            outputs = (*outputs, Value(self.inference.like(like.fake), slot, next(self._storages), None))
        return self._append(op, op.kind, op.target, args, kwargs, outputs)

    def attribute(self, origin: Op, name: str, real: torch.Tensor) -> Value:
        """Append the read of a tensor that the tape holds under this name."""
        assert self.tape.fake_mode is not None
        value = Value(self.tape.fake_mode.from_tensor(real, static_shapes=True), 0, next(self._storages), None)
        value.real = real
        self._append(origin, "get_attr", name, (), {}, value)
        return value

    def constant(self, origin: Op, real: torch.Tensor) -> Value:
        """A tensor as an attribute."""
        if id(real) not in self._constants:
            self._constants[id(real)] = self.attribute(origin, self.tape.add_constant(real), real)
        return self._constants[id(real)]

    def _append(
        self, origin: Op, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
    ) -> Any:
        is_same = target is origin.target
        # `addmm_` is not cast, `addmm` in its place would be
        is_cast = not (is_same or origin.autocast is None or (is_op(target) and not autocast_may_change(target)))
        op = Op(
            *(kind, target, args, kwargs, outputs, origin.scope, self._call_of(origin), origin.frames, origin.grad, ()),
            origin.unbacked if is_same else None,
            meta=origin.meta,
            autocast=None if is_cast else origin.autocast,
            phase=origin.phase,
        )
        self.tape.ops.append(op)
        return outputs

    def _call_of(self, origin: Op) -> Call | None:
        return None if origin.call is None else self.calls.get(origin.call, origin.call)

    def _lift(self, origin: Op, x: Any) -> Any:
        if not any(issubclass(kind, torch.Tensor) for kind in set(map(type, flat(x)))):
            return x
        return map_argument(lambda leaf: self.constant(origin, leaf) if isinstance(leaf, torch.Tensor) else leaf, x)


def _with_slots(value: Callable[[Any, int], Any], x: Any, slot: int) -> Any:
    """The results of an op with `value` of each, and its position in its list, in their place."""
    if isinstance(x, (list, tuple)):
        return type(x)([_with_slots(value, item, i) for i, item in enumerate(x)])
    return value(x, slot)


def new_storages(tape: Tape) -> Iterator[int]:
    """Numbers of storages that neither a tape has nor a body in it, which is asked when the first one is taken."""
    used = (v.storage for inner in tape.walk() for op in inner.ops for v in op.values())
    yield from itertools.count(max(used, default=0) + 1)


class TapeRewriter:
    """Goes along `old` and appends to `new`: a copy, but for what subclasses do in `step`.

    Attributes:
        replacements: by value of the old tape, and by body of one of its higher-order ops, what stands for it.
        calls: by call of the old tape, that of the new one.
        storages: gives numbers of storages that no tape of the program has.
        op: the op of the old tape that is next, at the end the last one.
    """

    def __init__(self, old: Any, around: TapeRewriter | None = None) -> None:
        """`around` rewrites the tape in which `old` is a body."""
        self.old = old
        self.op: Op | None = None
        self.new: Any = dataclasses.replace(old, ops=[], calls=[], attributes=dict(old.attributes))
        self.replacements: dict[Any, Any] = {} if around is None else around.replacements
        self.storages: Iterator[int] = new_storages(old) if around is None else around.storages
        self.calls: dict[Call, Call] = {} if around is None else around.calls
        tapes = old.walk() if around is None else ()
        for call in sorted({c for tape in tapes for c in tape.calls}, key=lambda c: c.position):  # outer ones first
            self.calls[call] = call.replace(parent=None if call.parent is None else self.calls[call.parent])

    def run(self) -> Any:
        """The new tape."""
        self.append(self.old, self.old.calls)
        self.new.calls.sort(key=lambda call: call.position)
        for call in self.new.calls:
            call.rename(self.replacements)
        return with_values(self.new, self.replacements)

    def append(self, tape: Tape, calls: list[Call]) -> None:
        """Append what stands for the ops of a tape, and these of its calls."""
        places = rewrites.boundaries(calls)
        for i, op in enumerate((*tape.ops, None)):
            self.op = op or self.op
            for call, begins in places.get(i, ()):
                self.begin(call) if begins else self.end(call)
            if op is not None:
                self.step(op)

    def begin(self, call: Call) -> None:
        """A call of the old tape begins before the next op."""
        self.calls[call].start = len(self.new.ops)
        self.new.calls.append(self.calls[call])

    def end(self, call: Call) -> None:
        """A call of the old tape ended with the last op."""
        self.calls[call].stop = len(self.new.ops)

    def step(self, op: Op) -> None:
        """Append what stands for an op."""
        self.copy(op)

    def inner(self, body: BodyTape) -> TapeRewriter:
        """What rewrites a body of a higher-order op."""
        return type(self)(body, self)

    def copy(self, op: Op) -> None:
        """Append a copy of an op. New tensors get new memory, but those that come from outside."""
        for body in op.bodies():
            if body not in self.replacements:
                self.replacements[body] = self.inner(body).run()
        storages = {v.storage: self.replacements[v].storage for v in op.inputs()}
        if op.kind not in ("placeholder", "get_attr"):
            for v in op.values():
                storages.setdefault(v.storage, next(self.storages))
        self.new.ops.append(op.copied(self.replacements, storages, self.calls))
