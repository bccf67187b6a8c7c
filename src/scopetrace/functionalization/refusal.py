"""The error for what cannot be said in pure ops."""

from __future__ import annotations

from scopetrace.errors import FunctionalizationError
from scopetrace.ir.frames import source_of
from scopetrace.ir.tape import Op


def refusal(problem: str, op: Op) -> FunctionalizationError:
    """The error for an op that cannot be made pure."""
    return FunctionalizationError(
        f"no pure form: {problem}",
        op=str(op.target),
        module=str(op.scope),
        source=source_of(op.frames),
        hint="write it out of place, or trace with functional=False to keep the mutation",
    )
