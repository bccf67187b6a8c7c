"""Regions: stretches of the forward that torch treats as one. They become ops with the stretch as body.

Data flow:
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
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from scopetrace._compat.symbols import Symbolic
from scopetrace.containers.structure import leaves
from scopetrace.ir.scopes import Frames, Scope
from scopetrace.ir.segment import TapeSegment, body_tape, captured, used_by
from scopetrace.ir.tape import Call, Op, RecordedTape, Value, flat, is_grad_on

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
