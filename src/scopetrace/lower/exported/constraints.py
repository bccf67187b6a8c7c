"""torch.export's words for dynamic shapes that a model does not hold for: its classes of errors, its "Suggested fixes".

Data flow:
    our DynamicShapeError + what was traced -> torch.export of the same -> its error
    both -> ours, which is an instance of torch's class too and ends with torch's text
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.export import export

from scopetrace.errors import DynamicShapeError
from scopetrace.ir.tape import ProgramTape


def refuse_narrowed(tape: ProgramTape, model: Callable[..., Any] | None) -> None:
    """Raise DynamicShapeError where the model holds for a part of the range of a named Dim only.

    A trace says so in `range_constraints` and checks its calls; torch.export refuses, and says which Dim to write.
    """
    narrowed = tape.sizes.narrowed() if tape.sizes is not None else []
    if narrowed and tape.example_inputs is not None and tape.sizes is not None:
        error = DynamicShapeError(narrowed[0], hint="give the Dim this range, or write Dim.AUTO")
        explain(error, model, *tape.example_inputs, tape.sizes.dynamic_shapes)
        raise error


def explain(error: DynamicShapeError, model: Any, args: Any, kwargs: Any, dynamic_shapes: Any) -> None:
    """Add what torch.export says of the same model and arguments to an error of ours, and its class.

    Code that was written for torch.export goes on catching it, and `refine_dynamic_shapes_from_suggested_fixes` reads
    it. That runs the model again, under torch.export.
    """
    if not isinstance(model, torch.nn.Module):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            export(model, args, kwargs, dynamic_shapes=dynamic_shapes)
        except Exception as theirs:
            if "torch" in type(theirs).__module__ or isinstance(theirs, (ValueError, RuntimeError)):
                error.stands_for(theirs, str(theirs).partition("\n\nThe error above occurred")[0])
