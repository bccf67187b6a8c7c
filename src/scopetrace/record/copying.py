"""Ops that were recorded once, again on other values of equal metadata.

Data flow:
    an op on the tape -> `Step`: what its results are by the metadata of its inputs, where that is known
    a Step, and what stands for its values -> the op again at the end of the tape, without dispatcher
    a Step of which that is not known, such as a write -> recorded as if Python had called it
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch

from scopetrace._compat.ops import is_op
from scopetrace._compat.tensors import FakeMaker, storage_id, without_dispatch
from scopetrace.infer.inference import Inference
from scopetrace.infer.rules import OutputMeta, Outputs
from scopetrace.ir.scopes import Frames
from scopetrace.ir.tape import Op, Phase, Value, flat, substituted
from scopetrace.record.builder import TapeBuilder, ValueTable

_aten = torch.ops.aten
Record = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
RepeatWrite = Callable[[Op, Mapping[Value, Value]], bool]


@dataclasses.dataclass(slots=True, eq=False)
class Step:
    """How an op is repeated."""

    op: Op
    outputs: Outputs | None
    """What its results are; None for one that is recorded anew."""
    values: list[Value]
    inputs: list[Value]
    given: list[tuple[int, Value]]
    """Its positional arguments that are values, each with its position."""
    nested: list[int]
    """The positions of those that hold values."""
    later_frames: tuple[Any, ...] = ()
    """The Python frames that it has beyond those of what is repeated."""

    @classmethod
    def of(cls, op: Op, outputs: Outputs | None, later_frames: tuple[Any, ...] = ()) -> Self:
        """The step that repeats an op, of which `outputs` says what its results are."""
        given = [(i, x) for i, x in enumerate(op.args) if isinstance(x, Value)]
        nested = [i for i, x in enumerate(op.args) if has_values(x)]
        return cls(op, outputs, op.values(), op.inputs(), given, nested, later_frames)

    def operands(self, now: Mapping[Value, Value]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the op that repeats it, where `now` has what stands for each input."""
        op = self.op
        args: tuple[Any, ...]
        if len(self.given) == len(op.args):
            args = tuple([now[v] for _, v in self.given])
        else:
            changed = [*op.args]
            for i, v in self.given:
                changed[i] = now[v]
            for i in self.nested:
                changed[i] = substituted(changed[i], now)
            args = tuple(changed)
        return args, {name: substituted(x, now) for name, x in op.kwargs.items()} if op.kwargs else op.kwargs


class OpCopier:
    """Puts ops that repeat others on the tape of one recording."""

    def __init__(
        self,
        builder: TapeBuilder,
        values: ValueTable,
        maker: FakeMaker,
        inference: Inference,
        repeat_write: RepeatWrite,
        record: Record,
    ) -> None:
        """The last two are `OpRecorder.repeat_write` and `record`."""
        self._builder = builder
        self._values = values
        self._maker = maker
        self._inference = inference
        self._repeat_write = repeat_write
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
        return Step.of(op, outputs, later_frames)

    def copy(self, step: Step, now: dict[Value, Value], phase: Phase | None, quiet: without_dispatch) -> None:
        """Put an op on the tape, where `now` has what stands for its inputs, and then for its results too.

        Its frames are `TapeBuilder.op_frames`. Call outside of the recorder's mode, in the grad mode of the op, inside
        of `quiet`.
        """
        op, builder, outputs = step.op, self._builder, step.outputs
        frames = builder.frames() if builder.op_frames is None else builder.op_frames
        if step.later_frames:
            assert frames and not isinstance(frames, str)
            frames = (frames[0], frames[1] + step.later_frames)
        if outputs is None:
            quiet.__exit__()
            try:
                self._record_again(step, now, frames, phase)
            finally:
                quiet.__enter__()
            return
        inputs = [now[v] for v in step.inputs]
        out: Any
        if outputs.container is None:
            (meta,) = outputs.tensors
            assert isinstance(meta, OutputMeta)
            base = None if meta.base is None else inputs[meta.base]
            fake = meta.make(self._maker, None if base is None else base.fake)
            out = now[step.values[0]] = self._values.new(fake, 0, storage_id(fake), meta.key)
            out.autograd_placeholder = meta.requires_grad
        else:
            made = self._values.new_inferred(outputs, outputs.make(self._maker, inputs), inputs)
            out = outputs.contained(made)
            now.update(zip(step.values, [m for m in made if m is not None], strict=True))
        args, kwargs = step.operands(now)
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
            if not self._repeat_write(op, now):
                args = tuple([_fakes(substituted(a, now)) for a in op.args])
                self._record(op.target, args, {name: _fakes(substituted(a, now)) for name, a in op.kwargs.items()})
        finally:
            builder.op_frames, builder.phase = before
        new = ops[-1]
        same = len(ops) == start + 1 and new.target is op.target and len(new.writes) == len(op.writes)
        # a tensor that was written has one value for each write, and may be here by another than the last
        if not same or any(a.fake is not b.fake for a, b in zip(new.inputs(), inputs, strict=True)):
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
