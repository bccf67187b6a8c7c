"""Errors that a forward gets in a trace and not in eager, where it catches them and goes on.

    try:
        n = x.sum().item()
    except Exception:
        n = 0

Data flow:
    errors of scopetrace, of torch for want of data, and of ops -> `TapeBuilder.raised`, each with the op
    after the forward, the traceback of each -> its outermost frame is where it was caught -> an error of the trace
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from scopetrace._compat.patches import replacing
from scopetrace._compat.questions import NoData
from scopetrace._compat.sources import NOT_THE_MODEL
from scopetrace._compat.tensors import DATA_DEPENDENT
from scopetrace.errors import TraceError

Raised = tuple[BaseException, Any]


@contextlib.contextmanager
def noting_errors(raised: list[Raised]) -> Iterator[None]:
    """Inside, what this thread makes of the classes of such errors is appended to `raised`."""
    thread = threading.get_ident()

    def noted(make: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(make)
        def __init__(self: BaseException, *args: Any, **kwargs: Any) -> None:
            make(self, *args, **kwargs)
            if threading.get_ident() == thread:
                raised.append((self, None))

        return __init__

    with replacing() as replace:
        for cls in (TraceError, NoData, *DATA_DEPENDENT):
            replace(cls, "__init__", noted(cls.__init__))
        yield


def caught(raised: Iterable[Raised]) -> Iterator[Raised]:
    """Those that code of the model has caught, rather than torch's or scopetrace's, each once."""
    seen = set()
    for error, op in raised:
        tb = error.__traceback__
        if tb is not None and not tb.tb_frame.f_code.co_filename.startswith(NOT_THE_MODEL) and id(error) not in seen:
            seen.add(id(error))
            yield error, op
