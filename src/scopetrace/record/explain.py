"""Errors inside a trace, said in the user's terms."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from scopetrace._compat.tensors import DATA_DEPENDENT, NO_SHAPE_RULE
from scopetrace.errors import DataDependentError, ScopetraceError, TraceError, UnsupportedOpError
from scopetrace.ir.frames import frames_of_traceback, user_line
from scopetrace.record.recorder import Recorder
from scopetrace.record.retrace import Retrace
from scopetrace.record.values import NoRealValue

_NO_DATA = (
    "doesn't have storage",
    "Cannot access data pointer",
    ".numpy() is not supported",
    "doesn't have data",
    "data is not allocated yet",
)

_BRANCH = (
    "compute both sides and pick with torch.where; or make the value an argument that is a Python number; "
    "or trace with specialize=True, which lets the example inputs decide and says so in Trace.specializations; "
    "torch.compiler.is_exporting() is True here, so a check that is only for users can be skipped"
)


@contextlib.contextmanager
def explained(recorder: Recorder) -> Iterator[None]:
    """Turn what torch raises for a value that is not there into a TraceError; add the place to all other errors."""
    try:
        yield
    except (ScopetraceError, Retrace):
        raise
    except Exception as error:
        found = _explain(recorder, error)
        if found is not None:
            raise found from error
        place = _place(recorder, error)
        error.add_note(f"scopetrace: while tracing {place['module']}, at {place['source']}")
        raise


def _explain(recorder: Recorder, error: Exception) -> TraceError | None:
    place = _place(recorder, error)
    op = str(recorder.running) if recorder.running is not None else None
    if isinstance(error, DATA_DEPENDENT) or any(text in str(error) for text in _NO_DATA):
        return DataDependentError(
            "Python needs the value of a tensor that depends on the inputs or the model's state",
            op=recorder.reader(getattr(error, "cond", None)),
            hint=_BRANCH,
            **place,
        )
    if isinstance(error, NoRealValue):
        return DataDependentError(
            f"Python needs a value, and there is none: {error}", op=recorder.reader(None), **place
        )
    if isinstance(error, NO_SHAPE_RULE):
        first = (str(error).splitlines() or [""])[0]
        return UnsupportedOpError(
            f"torch cannot tell the shape of what an op returns: {type(error).__name__}: {first}",
            op=op,
            hint="register a fake implementation with torch.library.register_fake, or name the module in leaf_modules=",
            **place,
        )
    return None


def _place(recorder: Recorder, error: Exception) -> dict[str, str | None]:
    failed = next((c for c in reversed(recorder.tape.calls) if c.raised is error), None)
    scope = failed.scope if failed is not None else recorder.state.current_scope
    return {"module": str(scope), "source": user_line(frames_of_traceback(error.__traceback__))}
