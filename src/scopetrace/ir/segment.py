"""A segment of a tape as a tape of its own: the body of a higher-order op, or an outlined function.

What the ops of the segment read from outside (values of the tape, symbolic sizes) becomes placeholders.

Regions are stretches of the forward that torch treats as one, and become ops with the stretch as body:
    a region begins and ends while the forward runs -> `Region`: a range of ops, and the module calls in it
    the whole tape, innermost region first -> what the region reads from outside, and what others read of it
    -> its ops as a BodyTape, and in their place one op: `tag_activation_checkpoint` for `torch.utils.checkpoint`,
       `invoke_subgraph` for `torch.compiler.nested_compile_region`
A region that its op cannot express stays part of the program, as all are in a graph of torch.export.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from scopetrace._compat.symbols import Symbolic, dummy_symbols, symbols_of, to_expr
from scopetrace._compat.tensors import is_symbolic
from scopetrace.containers.structure import identifier, leaves
from scopetrace.ir.scopes import Frames, Scope
from scopetrace.ir.tape import BodyTape, Call, FunctionalTape, Op, ProgramTape, RecordedTape, Tape, Value, flat, renamed

_T = TypeVar("_T", bound=Tape)


@dataclasses.dataclass
class TapeSegment:
    """Ops that follow each other, with the module calls among them. It may have placeholders of its own."""

    name: str
    """The name of the tape that it becomes."""
    scope: Scope
    call: Call | None
    """The call around it."""
    start: int
    """Where on the tape it began."""
    ops: list[Op]
    calls: list[Call]
    outputs: list[Any]
    """What the tape is to return: values and numbers."""

    @property
    def is_condition(self) -> bool:
        """Whether it gives one value, not a tuple, as what says if a loop goes on, or computes a score."""
        return self.name in ("while_loop_cond_graph", "sdpa_score", "sdpa_mask")

    def hoisted(self) -> list[Op]:
        """The reads of parameters, buffers and constants, which stay outside."""
        return [op for op in self.ops if op.kind == "get_attr"]

    def kept(self) -> list[Op]:
        """All other ops."""
        return [op for op in self.ops if op.kind != "get_attr"]


def captured(segments: list[TapeSegment]) -> list[Any]:
    """What the segments read and do not make: values and symbolic sizes, each once."""
    outside: dict[Any, Any] = {}
    for segment in segments:
        inside = {v for op in segment.kept() for v in op.values()}
        read = (*used_by(segment.kept(), segment.calls), *leaves(segment.outputs, Value))
        outside |= {v: v for v in read if v not in inside}
    for segment in segments:
        for number in free_symbols(segment, list(outside)):
            outside.setdefault(to_expr(number), number)
    return list(outside.values())


def used_by(ops: Iterable[Op], calls: Iterable[Call]) -> Iterator[Value]:
    """What ops read, and calls take and give."""
    for op in ops:
        yield from op.inputs()
    yield from leaves([(call.args, call.kwargs, call.outputs, call.mutated) for call in calls], Value)


def free_symbols(segment: TapeSegment, captured: list[Any]) -> Iterator[Any]:
    """The symbols that the ops use and that no size or number known before them inside determines."""
    known = _Known()
    known.add(*captured)
    for op in segment.kept():
        yield from known.lacks(flat((op.args, op.kwargs)))
        known.add(*flat(op.outputs), *(op.unbacked or ()))
    yield from known.lacks(leaves([(call.args, call.kwargs, call.outputs) for call in segment.calls], Symbolic))
    yield from known.lacks(flat(segment.outputs))


def has_symbols(tape: Tape) -> bool:
    """Whether a size or number of the program is symbolic: of what comes from outside, or made from data."""
    ops = tape.ops
    outside = [op.outputs for op in ops if op.kind in ("placeholder", "get_attr")]
    numbers = any(is_symbolic(x.fake) if isinstance(x, Value) else isinstance(x, Symbolic) for x in outside)
    return numbers or any(op.unbacked for op in ops)


class _Known:
    """The sizes and numbers that are known at a place of a program."""

    def __init__(self) -> None:
        self._expressions: set[Any] = set()
        self._parts: dict[Any, Any] = {}

    def add(self, *items: Any) -> None:
        """Values, of which the sizes are known, numbers and expressions."""
        sizes = [n for x in items if isinstance(x, Value) for n in x.fake.size() if isinstance(n, torch.SymInt)]
        new = {to_expr(x) for x in (*sizes, *items) if not isinstance(x, Value)} - self._expressions
        self._expressions |= new
        self._parts |= dummy_symbols(new)

    def lacks(self, used: Iterable[Any]) -> Iterator[Any]:
        """The symbols that are needed beside what is known."""
        for number in used:
            if isinstance(number, Symbolic) and to_expr(number) not in self._expressions:
                rest = to_expr(number).xreplace(self._parts).free_symbols
                yield from (s for s in symbols_of(number) if to_expr(s) in rest - self._expressions)


def body_tape(tape: Tape, segment: TapeSegment, captured: list[Any], grad: bool | None = None) -> BodyTape:
    """The segment as a tape, whose placeholders are its own and then those of `captured`.

    Its ops and values are new ones. The calls move to it. `grad`: whether autograd is on around it; by default where it
    is for one of its ops, since it may begin with a block under `torch.no_grad()`.
    """
    first = [op for op in segment.ops if op.kind == "placeholder"]
    used: set[str] = set()
    inside: dict[Value, Value] = {}
    placeholders = [op.replace(target=identifier(op.name, used)).copied(inside) for op in first]
    if grad is None:
        grad = is_grad_on(segment.ops) if segment.ops else torch.is_grad_enabled()
    for i, x in enumerate(captured, len(first)):
        name = identifier(name_of(x, i), used)
        placeholders.append(placeholder(name, x, segment.scope, segment.call, inside, grad=grad))

    ops = [op.copied(inside) for op in segment.kept() if op.kind != "placeholder"]
    for call in segment.calls:
        call.rename(inside)
        call.start, call.stop = (_position(segment, i, len(placeholders)) for i in (call.start, call.stop))
    outputs = renamed(segment.outputs, inside)
    return BodyTape(
        segment.scope,
        ops=[*placeholders, *ops],
        calls=segment.calls,
        inputs=[op.outputs for op in placeholders if isinstance(op.outputs, Value)],
        outputs=outputs[0] if segment.is_condition else tuple(outputs),
        shape_env=tape.shape_env,
        fake_mode=tape.fake_mode,
        inference=tape.inference,
        name=segment.name,
        is_condition=segment.is_condition,
    )


def is_grad_on(ops: list[Op]) -> bool:
    """Whether autograd is on for one of the ops that compute, or there are none at all."""
    grads = {op.grad for op in ops if op.kind in ("call_function", "call_module")} or {op.grad for op in ops}
    return True in grads or not grads


def placeholder(name: str, x: Any, scope: Scope, call: Call | None, inside: dict[Value, Value], *, grad: bool) -> Op:
    """The placeholder of a body for `x`, a value, which stands in `inside` from here on, or a number."""
    if isinstance(x, Value):
        new = Value(x.fake, 0, x.storage, x.key)
        new.offset = x.offset
        inside.setdefault(x, new)
        x = new
    return Op("placeholder", name, (), {}, x, scope, call, (), grad)


def name_of(x: Any, number: int) -> str:
    """The name of a placeholder for `x`: that of a parameter or input as it is outside."""
    if not isinstance(x, Value) or x.op.kind not in ("get_attr", "placeholder"):
        return f"arg{number}"
    return str(x.op.target)


def _position(segment: TapeSegment, i: int, placeholders: int) -> int:
    """Where position `i` of the recording is in the body, whose placeholders come first."""
    before = segment.ops[: max(0, i - segment.start)]
    return placeholders + sum(op.kind not in ("get_attr", "placeholder") for op in before)


def with_values(tape: _T, values: Mapping[Value, Value]) -> _T:
    """Put other values into inputs and outputs of a tape whose ops and calls have them already. Returns the tape."""
    tape.inputs, tape.outputs = renamed((tape.inputs, tape.outputs), values)
    if isinstance(tape, ProgramTape):
        tape.args = renamed(tape.args, values)
        tape.attribute_writes = [dataclasses.replace(w, value=values[w.value]) for w in tape.attribute_writes]
    if isinstance(tape, FunctionalTape):
        tape.returned = renamed(tape.returned, values)
    return tape


# Regions -------------------------------------------------------------------------------------------------------------

_hops = torch.ops.higher_order
CHECKPOINT, NESTED = _hops.tag_activation_checkpoint, _hops.invoke_subgraph


@dataclasses.dataclass
class Region:
    """The ops of the forward from `start` to `stop`, with the module calls in them, which become one op, of `hop`.

    `call`, `scope` and `frames` are those around its end.
    """

    hop: Any
    start: int
    stop: int
    calls: list[Call]
    call: Call | None
    scope: Scope
    frames: Frames
    context_fn: Any = None
    """As `BodyTape.context_fn`."""
    keeps_rng: bool = True
    """Whether backward runs it again from the same state of the random number generators."""
    attributes: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    """The values that attributes of the modules are at its end, by the attributes' names in the model."""

    def requires_grad(self, tape: RecordedTape) -> bool:
        """Whether autograd sees it."""
        return any(op.grad and v.requires_grad for op in tape.ops[self.start : self.stop] for v in op.values())


def keep_regions(tape: RecordedTape, regions: list[Region]) -> None:
    """Put an op in the place of each region that has one; an inner region stands before those around it."""
    wanted = [r for r in regions if r.requires_grad(tape) == (r.hop is CHECKPOINT)]
    if not wanted:
        return
    uses = collections.Counter(used_by(tape.ops, tape.calls))
    uses.update(leaves(tape.outputs, Value))
    uses.update(w.value for w in tape.attribute_writes)
    names = itertools.count()
    for i, region in enumerate(wanted):
        removed = _cut(tape, region, uses, names)
        for other in wanted[i + 1 :]:
            other.start -= removed if other.start >= region.stop else 0
            other.stop -= removed if other.stop >= region.stop else 0


def _cut(tape: RecordedTape, region: Region, uses: collections.Counter[Value], names: Iterator[int]) -> int:
    """Put the op of a region in its place, if it has one. Returns by how many ops the tape is shorter.

    `uses` says how often each value is read or passed in the whole program.
    """
    ops = tape.ops[region.start : region.stop]
    inner = set(region.calls).intersection(tape.calls)  # others are in the bodies of inner regions
    calls = [call for call in tape.calls if call in inner]
    inside = collections.Counter(used_by(ops, calls))
    body_name = "wrap_body" if region.hop is CHECKPOINT else "repeated_subgraph"
    segment = TapeSegment(body_name, region.scope, region.call, region.start, ops, calls, [])
    results = [v for op in segment.kept() for v in op.values()]
    outputs = [v for v in results if uses[v] > inside[v]]
    operands = captured([segment])
    if not _can_be_cut(segment, outputs, operands):
        return 0
    segment.outputs = list(outputs)
    body = body_tape(tape, segment, operands)
    body.context_fn = region.context_fn
    args = (body, *operands) if region.hop is CHECKPOINT else (body, f"invoke_subgraph_{next(names)}", *operands)
    grad = is_grad_on(segment.kept())
    place = region.scope, region.call, region.frames, grad
    op = Op("call_function", region.hop, args, {}, tuple(outputs), *place).take_values()
    hoisted = [o.replace(call=region.call, scope=region.scope).take_values() for o in segment.hoisted()]
    tape.ops[region.start : region.stop] = [*hoisted, op]
    removed = len(ops) - len(hoisted) - 1
    tape.calls[:] = [call for call in tape.calls if call not in inner]
    for call in tape.calls:
        call.start -= removed if call.start >= region.stop else 0
        call.stop -= removed if call.stop >= region.stop else 0
    uses.subtract(inside)
    uses.update(x for x in operands if isinstance(x, Value))
    return removed


def _can_be_cut(segment: TapeSegment, outputs: list[Value], operands: list[Any]) -> bool:
    """Whether the op of a region can express it: results in memory of their own, no effect but them."""
    ops = segment.kept()
    if not outputs or any(op.kind != "call_function" or op.unbacked for op in ops):
        return False
    if any(isinstance(x, Symbolic) for op in ops for x in flat(op.outputs)):
        return False
    outside = {v.storage for v in operands if isinstance(v, Value)}
    storages = [v.storage for v in outputs]
    if not outside.isdisjoint(storages) or len(set(storages)) < len(storages):
        return False
    return outside.isdisjoint(v.storage for op in ops for v in op.writes)
