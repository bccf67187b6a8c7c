"""What is not as it was in the trace, in words: the errors of a call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from scopetrace._compat.questions import fact_of
from scopetrace.containers.contents import difference, same, short
from scopetrace.errors import InputMismatchError, StateMismatchError
from scopetrace.ir.guards import Asked, Flag, Guard, OfFunctions
from scopetrace.ir.tape import ProgramTape
from scopetrace.ir.write_back import Number, resolved


def layout_for(tensor: torch.Tensor, layout: Sequence[Any], number: Number) -> tuple[int, ...]:
    """The strides of an input in the trace, in numbers, for the sizes that it has in a call."""
    sizes = zip(tensor.shape, resolved(layout, number), strict=True)
    return tuple([0 if n == 1 else stride for n, stride in sizes])


def mismatch(guard: Guard, value: Any, current: Any) -> InputMismatchError:
    """The error for a read that gave `value` in the trace."""
    source, name = guard.source, guard.name
    words = getattr(source, "words", None)
    asked = source if isinstance(source, Asked) else None
    text = str if words is not None else (asked and asked.text) or _text
    if words is not None:
        name, value, current = words(value, current)
    elif source.kind != "input" and not (asked and asked.text):
        name, value, current = difference(value, current, name)
    at = f", which the model reads at {guard.line.removesuffix(':')}" if guard.line else ""
    traced, present = text(value), text(current)
    problem = f"{name}{at}: {traced} when traced and {'another one' if traced == present else present} now"
    if source.kind == "input":
        return InputMismatchError(f"{problem}; trace again with inputs like these, or pass them as they were")
    if isinstance(source, OfFunctions):
        functions = zip(source.functions, guard.value, guard.current(), strict=True)
        changed = [function.__qualname__ for function, old, new in functions if not same(old, new)]
        which = changed[-1] if changed else "a function"
        problem = f"the code or the default arguments of {which} are not those of the trace"
    if isinstance(source, Flag):
        return StateMismatchError(f"{problem}; trace again in this state, or call in that of the trace")
    hint = (asked and asked.hint) or (_hint(name, value) if guard.line else "")
    return StateMismatchError(f"{problem}; trace again, or put it back" + (f"; {hint}" if hint else ""))


def _hint(name: str, value: Any) -> str:
    """What to do about something that the model reads and that differs, beside putting it back."""
    if name.endswith(".training") or name == "training":
        return f"the trace is of {'training' if value else 'eval'} mode: call {'train' if value else 'eval'}()"
    if name.endswith(".grad is not None"):
        return "optimizer.zero_grad() at the beginning or end of a step makes it the same in each call"
    return "" if isinstance(value, torch.nn.Module) else "or pass it as an argument, if calls differ in it"


def _text(value: Any) -> str:
    if isinstance(value, torch.nn.Module):
        return type(value).__name__
    text = short(value) if isinstance(value, torch.Tensor) else re.sub(r" at 0x\w+", "", " ".join(repr(value).split()))
    return text if len(text) < 80 else f"{text[:76]} ..."


def not_as_traced(tape: ProgramTape, name: str, traced: Any, current: Any) -> StateMismatchError:
    """The error for another tensor of the model. Both are dtype, shape, and device where that was asked."""
    count = 3 if current is not None and current[:2] == traced[:2] else 2
    text = "no tensor" if current is None else _metadata_text(*current[:count])
    hint = "trace again, or put it back"
    if any(write.path == name for write in tape.attribute_writes):
        hint += "; the forward puts another tensor there: run the model once before st.trace if that one stays"
    return StateMismatchError(f"{name} was {_metadata_text(*traced[:count])} when traced and is {text} now; {hint}")


def _metadata_text(dtype: torch.dtype, shape: torch.Size, device: torch.device | None = None) -> str:
    on = "" if device is None else f" on {device}"
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}{on}"


def explained(error: Exception, tape: ProgramTape, inputs: Sequence[Any], number: Number) -> InputMismatchError | None:
    """The error for a graph that failed since a specialization or the strides of an input differ; else None."""
    differs = next((s for s in tape.specializations if s.message in str(error)), None)  # an Interpreter says more
    if differs is not None:
        return InputMismatchError(differs.message)
    for path, value, tensor in zip(tape.input_paths, tape.inputs, inputs, strict=False):
        if value.fake.layout is torch.strided:
            old, new = layout_for(tensor, fact_of(value.fake, "layout", ()), number), fact_of(tensor, "layout", ())
            if old != new:
                return InputMismatchError(
                    f"{path} had strides {old} when traced and has {new} now, and an op of the program takes no "
                    f"others; give a copy in the strides of the trace, or trace again with such an input: {error}"
                )
    return None
