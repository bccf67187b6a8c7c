"""Tensors of a trace in what a forward returns, where no container shows them: closures, bound methods, slots.

Data flow:
    results that are neither tensors, numbers nor containers -> what they refer to, and so on -> a tensor: an error
"""

from __future__ import annotations

import enum
import gc
import itertools
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from scopetrace._compat.tensors import FakeTensor
from scopetrace.errors import OpaqueOutputError
from scopetrace.guards.attributes import MODULE_TABLES

_MOST = 10_000
"""So many objects behind a result are looked at."""
_NO_LEAVES = (type, types.ModuleType, types.CodeType, types.FrameType, enum.Enum, torch.dtype, torch.device)
_STORAGES = (torch.UntypedStorage, torch.TypedStorage)


def refuse_leaks(results: Iterable[tuple[str, Any]]) -> None:
    """Raise OpaqueOutputError where a result refers to a tensor of the trace. `results` are with their paths."""
    for path, x in results:
        leak = next(filter(_is_of_the_trace, itertools.islice(_reached(x), _MOST)), None)
        if leak is not None:
            what = "a tensor" if isinstance(leak, torch.Tensor) else "the storage of a tensor"
            raise OpaqueOutputError(
                f"the result{path} is a {type(x).__name__} that holds {what}, which no call of a trace can make again",
                hint="return the tensors that are in it",
            )


def _is_of_the_trace(x: Any) -> bool:
    return isinstance(x, (FakeTensor, *_STORAGES))


def _reached(x: Any) -> Iterator[Any]:
    """What an object refers to, each once, nearest first."""
    pending, seen = [x], {id(x): x}
    for reached in pending:
        yield reached
        for inner in _referents(reached):
            if id(inner) not in seen:
                seen[id(inner)] = inner
                pending.append(inner)


def _referents(x: Any) -> Iterable[Any]:
    if isinstance(x, (_NO_LEAVES, torch.Tensor)):
        return ()
    if isinstance(x, types.FunctionType):  # without its globals
        return *(x.__closure__ or ()), *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values(), vars(x)
    if isinstance(x, torch.nn.Module):  # what attributes of the model's hold is real again after the trace
        return [member for table in MODULE_TABLES for member in vars(x).get(table, {}).values()]
    if isinstance(x, weakref.ref):
        return (x(),)
    return gc.get_referents(x)
