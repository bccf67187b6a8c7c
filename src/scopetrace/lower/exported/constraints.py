"""Dynamic shapes in torch.export's words: guards of derived Dims, and errors for models that do not hold for them.

Data flow:
    our DynamicShapeError + what was traced -> torch.export of the same -> its error
    both -> ours, which is an instance of torch's class too and ends with torch's text
    sizes with derived Dims -> guards (`size_guards`)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.export import Dim, export
from torch.utils._pytree import tree_map

from scopetrace._compat.shape_env import source_of_size
from scopetrace._compat.symbols import python_text
from scopetrace.errors import DynamicShapeError
from scopetrace.ir.conditions import DynamicInput, SizeRules
from scopetrace.ir.tape import ProgramTape


def size_guards(sizes: SizeRules) -> list[str]:
    """Guards for what ranges do not say of derived Dims: the size that is the root itself, and which sizes are whole.

    Where no size is the root, torch writes the guard between two sizes that are derived from it.
    """
    plain = {d.expr: _symbol_of(d) for d in reversed(sizes.dynamic) if d.expr.is_Symbol}
    guards = []
    for d, root in sizes.derived():
        factor, offset = d.expr.diff(root), d.expr.subs(root, 0)
        size = _symbol_of(d)
        if root not in plain:
            guards.append(sympy.Eq(sympy.Mod(size - offset, factor), 0))
        elif factor == 1:
            guards.append(sympy.Eq(plain[root], size - offset))
        else:
            guards.append(sympy.Eq(factor * plain[root] + offset, size))
    return [python_text(condition) for condition in guards if condition is not sympy.true]


def _symbol_of(size: DynamicInput) -> sympy.Symbol:
    return sympy.Symbol(source_of_size(size.path, size.dim), integer=True)


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
            named = tree_map(lambda d: Dim(d) if isinstance(d, str) else d, dynamic_shapes)  # those of torch.onnx
            export(model, args, kwargs, dynamic_shapes=named)
        except Exception as theirs:
            if "torch" in type(theirs).__module__ or isinstance(theirs, (ValueError, RuntimeError)):
                error.stands_for(theirs, str(theirs).partition("\n\nThe error above occurred")[0])
