"""What a forward leaves of which no graph has anything: attributes of results, settings of the process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scopetrace._compat.tensors import tags_of
from scopetrace.errors import UnsupportedOpError
from scopetrace.ir.scopes import source_of
from scopetrace.ir.side_effects import SideEffect
from scopetrace.ir.tape import Op, RecordedTape, Value


def refuse_tags(tape: RecordedTape, results: Iterable[Value]) -> None:
    """Raise UnsupportedOpError where a result that the forward made has an attribute of users."""
    for v in results:
        if tags_of(v.fake) and v.op.kind == "call_function":
            raise UnsupportedOpError(
                f"the forward sets the attribute {next(iter(tags_of(v.fake)))!r} of its result, which results of a "
                "graph do not have",
                **place_of(v.op),
                hint="return the value beside the tensor, or set it outside of the forward",
            )


def settings_left(before: dict[str, Any], after: dict[str, Any], root: str) -> list[SideEffect]:
    """The settings of the process, by name, that the forward leaves changed; a call of the trace does not."""
    changed = [name for name in before if after[name] != before[name]]
    return [SideEffect(n, repr(before[n]), repr(after[n]), root, None, baked_in=True) for n in changed]


def place_of(op: Op) -> dict[str, str | None]:
    """`op`, `module` and `source` for an error about an op."""
    return {"op": str(op.target), "module": str(op.scope), "source": source_of(op.frames)}
