"""The state of Python and of inputs at a call, compared with that of the trace: the reads of the tape, asked again.

An answer other than that of the trace is an error that names the read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from scopetrace._compat.questions import fact_of
from scopetrace.containers.contents import difference, same, short
from scopetrace.errors import InputMismatchError, StateMismatchError
from scopetrace.ir.reads import (
    MISSING,
    Asked,
    CallInputs,
    Flag,
    InTable,
    OfFunctions,
    OfInput,
    OfTensor,
    Read,
    check,
    is_same,
    unchanged,
)
from scopetrace.ir.tape import ProgramTape
from scopetrace.ir.write_back import Number, resolved
from scopetrace.program.state import not_as_traced

_NUMBERS = (bool, int, float, str, type(None))


class StateCheck:
    """Compares the state at a call with that of the trace."""

    def __init__(self, tape: ProgramTape) -> None:
        self._tape = tape
        self._reads = [read for read in tape.reads if read.place.kind != "input"]
        self.facts = [read for read in tape.reads if read.place.kind == "input"]
        """What was read of inputs."""
        known = set[int]()
        conditions = [condition for read in self._reads for condition in unchanged(read, known)]
        self.run_state = check(conditions, self._compare_all)
        """Raise StateMismatchError for what is not as it was, beside the inputs."""

    def run_facts(self, call: CallInputs, number: Number) -> None:
        """Raise InputMismatchError for a fact of an input that differs."""
        for read in self.facts:
            place = read.place
            value, current = resolved(read.value, number), place.current(call)
            if isinstance(place, OfInput) and place.fact == "layout":
                value = _layout_for(call.tensors[place.index], value, number)
            if not same(value, current):
                raise _mismatch(read, value, current)

    def run_numbers(self) -> None:
        """The part of `run_state` that torch.compile can trace: numbers and text in attributes and globals."""
        for read in self._reads:
            place, value = read.place, read.value
            if not isinstance(place, InTable) or type(value) not in _NUMBERS or read.others:
                continue
            current = place.table.get(place.key, MISSING)
            if current != value:
                raise StateMismatchError(
                    f"{read.name}: {value} when traced and {current} now; trace again, or put it back"
                )

    def _compare_all(self) -> None:
        """Compare each thing by itself, where the quick check fails: an equal one may be there."""
        for read in self._reads:
            if not is_same(read):
                current = read.current()
                if isinstance(read.place, OfTensor) and read.place.fact == "metadata":
                    raise not_as_traced(self._tape, read.name, read.value, None if current is MISSING else current)
                raise _mismatch(read, read.value, current)


def other_strides(tape: ProgramTape, inputs: Sequence[Any], number: Number) -> str | None:
    """The first input whose strides are not those of the trace, in words; None where all are."""
    for path, value, tensor in zip(tape.input_paths, tape.inputs, inputs, strict=False):
        if value.fake.layout is torch.strided:
            old = _layout_for(tensor, fact_of(value.fake, "layout", ()), number)
            new = fact_of(tensor, "layout", ())
            if old != new:
                return f"{path} had strides {old} when traced and has {new} now"
    return None


def _layout_for(tensor: torch.Tensor, layout: Sequence[Any], number: Number) -> tuple[int, ...]:
    """The strides of an input in the trace, in numbers, for the sizes that it has in a call."""
    sizes = zip(tensor.shape, resolved(layout, number), strict=True)
    return tuple([0 if n == 1 else stride for n, stride in sizes])


def _mismatch(read: Read, value: Any, current: Any) -> InputMismatchError:
    place, name = read.place, read.name
    words = getattr(place, "words", None)
    asked = place if isinstance(place, Asked) else None
    text = str if words is not None else (asked and asked.text) or _text
    if words is not None:
        name, value, current = words(value, current)
    elif place.kind != "input" and not (asked and asked.text):
        name, value, current = difference(value, current, name)
    at = f", which the model reads at {read.source.removesuffix(':')}" if read.source else ""
    traced, present = text(value), text(current)
    problem = f"{name}{at}: {traced} when traced and {'another one' if traced == present else present} now"
    if place.kind == "input":
        return InputMismatchError(f"{problem}; trace again with inputs like these, or pass them as they were")
    if isinstance(place, OfFunctions):
        functions = zip(place.functions, read.value, read.current(), strict=True)
        changed = [function.__qualname__ for function, old, new in functions if not same(old, new)]
        which = changed[-1] if changed else "a function"
        problem = f"the code or the default arguments of {which} are not those of the trace"
    if isinstance(place, Flag):
        return StateMismatchError(f"{problem}; trace again in this state, or call in that of the trace")
    hint = (asked and asked.hint) or "or pass it as an argument, if calls differ in it"
    return StateMismatchError(f"{problem}; trace again, or put it back; {hint}")


def _text(value: Any) -> str:
    if isinstance(value, torch.nn.Module):
        return type(value).__name__
    text = short(value) if isinstance(value, torch.Tensor) else " ".join(repr(value).split())
    return text if len(text) < 80 else f"{text[:76]} ..."
