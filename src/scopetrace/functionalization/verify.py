"""Is a tape free of mutation? Asked of every result of `functionalize`."""

from __future__ import annotations

from scopetrace.functionalization.refusal import refusal
from scopetrace.ir.tape import Tape


def verify_pure(tape: Tape) -> None:
    """Raise FunctionalizationError for the first op whose schema can write."""
    for inner in tape.walk():
        for op in inner.ops:
            schema = getattr(op.target, "_schema", None)
            if op.writes or (schema is not None and schema.is_mutable):
                raise refusal("an op that writes is left in the program", op)
