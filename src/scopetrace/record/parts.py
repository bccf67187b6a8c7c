"""The parts of composite ops, run once for equal metadata.

Data flow:
    a composite op that autograd takes apart -> torch runs its parts, each of which is recorded
    the ops that came on the tape, the arguments and the result -> `_Parts`, by the metadata of the arguments
    the same op with arguments of equal metadata -> the parts again (`copying`), without dispatcher

What the parts are is decided by the metadata of the arguments, which of them are one tensor, and the settings of torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch

from scopetrace._compat.ops import autocast_may_change, schema_of
from scopetrace._compat.questions import setting_values
from scopetrace._compat.tensors import run_parts, without_dispatch
from scopetrace.infer.inference import Inference
from scopetrace.ir.scopes import Frames
from scopetrace.ir.tape import Op, Value, checks_enabled, flat, map_argument
from scopetrace.record.builder import TapeBuilder, ValueTable
from scopetrace.record.copying import OpCopier, Step
from scopetrace.record.reads import ReadRecorder


class Lifted(Protocol):
    """The arguments of an op, as on the tape and as Python gave them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Value]
    given: tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(eq=False)
class _Parts:
    """The parts of an op."""

    places: list[Value]
    """The values among its arguments, each once."""
    steps: list[Step]
    out: Any
    """What it gives, with values in place of tensors."""
    may_be_cast: bool
    """Whether autocast would cast the inputs of one of them."""


class PartsRecorder:
    """Records composite ops as their parts."""

    def __init__(
        self, builder: TapeBuilder, values: ValueTable, reads: ReadRecorder, inference: Inference, copier: OpCopier
    ) -> None:
        self._builder = builder
        self._values = values
        self._reads = reads
        self._inference = inference
        self._copier = copier
        self._known: dict[Any, _Parts | None] = {}
        self._settings: tuple[Any, ...] | None = None
        self._check = checks_enabled()

    def run(self, func: Any, lifted: Lifted, start: int, recorded: Callable[[Callable[[], Any]], Any]) -> Any:
        """What the op gives. The ops on the tape from `start` on are those of its arguments.

        Of these, attributes get their place before the part that is the first to read them. `recorded` runs a function,
        and records the ops that it calls.
        """
        ops = self._builder.tape.ops
        args, kwargs, inputs = lifted.args, lifted.kwargs, lifted.inputs
        now = setting_values()
        if now != self._settings:
            self._known.clear()
            self._settings = now
        key = self._inference.key_of_call(func, args, kwargs)
        places = list(dict.fromkeys(inputs))
        if key is not None and len(places) < len(inputs):
            key = key, *map(places.index, inputs)
        parts = None if key is None else self._known.get(key)
        first = start if all(op.kind == "get_attr" for op in ops[start:]) else len(ops)
        late = {op.result: op for op in ops[first:]}
        del ops[first:]
        if parts is not None and not self._check:
            return self._repeat(parts, places, late)
        frames = self._builder.op_frames
        out = recorded(lambda: run_parts(func, *lifted.given[0], **lifted.given[1]))
        new = ops[first:]
        if late:
            del ops[first:]
            for op in new:
                ops += [late.pop(v) for v in op.inputs() if v in late]
                ops.append(op)
            ops += late.values()
        if key is not None and (parts is not None or key not in self._known):
            found = self._parts_of(places, new, out, frames)
            if parts is not None:
                assert found is not None and _told(found) == _told(parts), func
            self._known[key] = found
        return out

    def _parts_of(self, places: list[Value], ops: list[Op], out: Any, frames: Frames | None) -> _Parts | None:
        """None where they cannot be repeated."""
        if frames is None or isinstance(frames, str) or not frames:
            return None
        known, steps = set(places), []
        for op in ops:
            later = _later_frames(frames, op.frames)
            step = None if later is None else self._copier.step(op, later)
            if step is None or not known.issuperset(step.inputs) or _is_noted(op.target):
                return None
            steps.append(step)
            known.update(step.values)
        tensors = [t for t in flat(out) if isinstance(t, torch.Tensor)]
        made = {v for step in steps for v in step.values}
        results = {id(t): self._values.by_id.get(id(t)) for t in tensors}
        if not tensors or not all(v in made and v.fake is t for t, v in zip(tensors, results.values(), strict=False)):
            return None
        named = map_argument(lambda t: results[id(t)] if isinstance(t, torch.Tensor) else t, out)
        return _Parts(places, steps, named, any(autocast_may_change(op.target) for op in ops))

    def _repeat(self, parts: _Parts, places: list[Value], late: dict[Value, Op]) -> Any:
        if parts.may_be_cast and self._reads.awaits_cast:
            self._reads.on_cast_op()
        now = dict(zip(parts.places, places, strict=True))
        ops, builder = self._builder.tape.ops, self._builder
        with without_dispatch() as quiet:
            for step in parts.steps:
                if late:
                    ops += [late.pop(now[v]) for v in step.inputs if now[v] in late]
                self._copier.copy(step, now, None, quiet)
                builder.originals[ops[-1]] = step.op
                if builder.phase is not None and ops[-1].phase is None:
                    phase = builder.phase(ops[-1].args, ops[-1].outputs)
                    if phase is not None:
                        ops[-1] = ops[-1].replace(phase=phase).take_values()
        ops += late.values()
        return map_argument(lambda v: now[v].fake if isinstance(v, Value) else v, parts.out)


def _is_noted(target: Any) -> bool:
    """Whether more is kept of an op than is on the tape: that it makes a tensor, or changes the shape of one."""
    return torch.Tag.inplace_view in target.tags or schema_of(target).name.startswith("aten::new_")


def _later_frames(frames: Any, own: Any) -> tuple[Any, ...] | None:
    """The frames `own` without `frames`, which they begin with; None where they do not."""
    if isinstance(own, str) or not own or own[0] is not frames[0] or own[1][: len(frames[1])] != frames[1]:
        return None
    found: tuple[Any, ...] = own[1][len(frames[1]) :]
    return found


def _told(parts: _Parts) -> Any:
    """For comparison: the ops and which values are which."""
    number = {v: i for i, v in enumerate([*parts.places, *(v for step in parts.steps for v in step.values)])}
    tell = lambda x: map_argument(lambda v: ("value", number[v]) if isinstance(v, Value) else v, x)  # noqa: E731
    return [(s.op.target, tell(s.op.args), tell(s.op.kwargs), len(s.later_frames)) for s in parts.steps], tell(
        parts.out
    )
