"""Ops that were recorded once, again on other values of equal metadata.

Data flow:
    an op on the tape -> `Step`: what its results are by the metadata of its inputs, where that is known
    a Step, and what stands for its values -> the op again at the end of the tape, without dispatcher
    a Step of which that is not known, such as a write -> recorded as if Python had called it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from scopetrace._compat.ops import is_op
from scopetrace._compat.tensors import FakeMaker, without_dispatch
from scopetrace.infer.inference import Inference
from scopetrace.infer.rules import OutputMeta, Outputs
from scopetrace.ir.scopes import Frames
from scopetrace.ir.tape import Op, Phase, Value, flat, substituted
from scopetrace.record.builder import TapeBuilder, ValueTable

_aten = torch.ops.aten
Record = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class Step(NamedTuple):
    """How an op is repeated."""

    op: Op
    outputs: Outputs | None
    """What its results are; None for one that is recorded anew."""
    values: list[Value]
    inputs: list[Value]
    plain: bool
    """Whether no list among its arguments holds values."""
    later_frames: tuple[Any, ...] = ()
    """The Python frames that it has beyond those of what is repeated."""


class OpCopier:
    """Puts repetitions on the tape of one recording."""

    def __init__(
        self, builder: TapeBuilder, values: ValueTable, maker: FakeMaker, inference: Inference, record: Record
    ) -> None:
        """`record` records an op, and returns what it gives."""
        self._builder = builder
        self._values = values
        self._maker = maker
        self._inference = inference
        self._record = record

    def step(self, op: Op, later_frames: tuple[Any, ...] = ()) -> Step | None:
        """How an op is repeated; None where it is not known."""
        if op.kind != "call_function" or not is_op(op.target) or op.unbacked or op.meta or op.autocast:
            return None
        outputs = None
        if not op.writes and op.target is not _aten.as_strided.default:
            outputs = self._inference.known(op.target, op.args, op.kwargs)
        if outputs is not None and not all(m is None or isinstance(m, OutputMeta) for m in outputs.tensors):
            outputs = None
        nested = [a for a in (*op.args, *op.kwargs.values()) if not isinstance(a, Value) and has_values(a)]
        return Step(op, outputs, op.values(), op.inputs(), not nested, later_frames)

    def copy(self, step: Step, now: dict[Value, Value], phase: Phase | None) -> None:
        """Put an op on the tape, where `now` has what stands for its inputs, and then for its results too.

        Its frames are `TapeBuilder.op_frames`. Call outside of the recorder's mode, in the grad mode of the op.
        """
        op, outputs, values, inputs, plain, later = step
        builder = self._builder
        frames = builder.frames() if builder.op_frames is None else builder.op_frames
        if later:
            assert frames and not isinstance(frames, str)
            frames = (frames[0], frames[1] + later)
        if outputs is None:
            self._record_again(step, now, frames, phase)
            return
        given = [now[v] for v in inputs]
        if plain:
            args = tuple([now[a] if isinstance(a, Value) else a for a in op.args])
            kwargs = op.kwargs
            if kwargs:
                kwargs = {name: now[a] if isinstance(a, Value) else a for name, a in kwargs.items()}
        else:
            args = tuple([substituted(a, now) for a in op.args])
            kwargs = {name: substituted(a, now) for name, a in op.kwargs.items()}
        with without_dispatch():
            fakes = outputs.make(self._maker, given)
        made = self._values.new_inferred(outputs, fakes, given)
        out = outputs.contained(made)
        if outputs.container is None:
            now[values[0]] = out
        else:
            now.update(zip(values, [m for m in made if m is not None], strict=True))
        place = builder.state.current_scope, builder.call, frames, op.grad
        builder.tape.ops.append(Op("call_function", op.target, args, kwargs, out, *place, phase=phase))

    def _record_again(self, step: Step, now: dict[Value, Value], frames: Frames, phase: Phase | None) -> None:
        op, builder = step.op, self._builder
        ops, inputs = builder.tape.ops, [now[v] for v in step.inputs]
        start, before = len(ops), (builder.op_frames, builder.phase)
        builder.op_frames = frames
        if phase is not None:
            builder.phase = lambda *_: phase
        try:
            args = tuple([_fakes(substituted(a, now)) for a in op.args])
            self._record(op.target, args, {name: _fakes(substituted(a, now)) for name, a in op.kwargs.items()})
        finally:
            builder.op_frames, builder.phase = before
        new = ops[-1]
        same = len(ops) == start + 1 and new.target is op.target and len(new.writes) == len(op.writes)
        if not same or any(a is not b for a, b in zip(new.inputs(), inputs, strict=True)):
            raise NotRepeated
        now.update(zip(step.values, new.values(), strict=True))


class NotRepeated(Exception):
    """An op did something else when it was recorded again."""


def has_values(x: Any) -> bool:
    """Whether an argument holds values."""
    return isinstance(x, (list, tuple, dict)) and any(isinstance(leaf, Value) for leaf in flat(x))


def _fakes(x: Any) -> Any:
    if isinstance(x, Value):
        return x.fake
    return type(x)(map(_fakes, x)) if isinstance(x, (list, tuple)) else x
