"""Traces in files."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

from scopetrace.api.trace import Trace, from_bytes
from scopetrace.errors import ScopetraceError


def load(path: str | os.PathLike[str]) -> Trace:
    """Read a trace that `Trace.save` wrote. As all pickles, to be read only from sources that you trust.

    `ModuleCall.module` is None in it, and `Trace.check` is not possible: the model is not in the file.
    """
    try:
        return from_bytes(Path(path).read_bytes())
    except (pickle.UnpicklingError, EOFError, TypeError, ValueError) as error:
        raise ScopetraceError(f"{path} was not written by Trace.save") from error
