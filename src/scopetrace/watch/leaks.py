"""Tensors of a trace in what a forward returns, where no container shows them: closures, bound methods, slots.

Data flow:
    leaves of the result -> what they refer to, and so on -> a tensor: an error
"""

from __future__ import annotations

import enum
import gc
import itertools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Set, ValuesView
from typing import Any

import torch

from scopetrace._compat.symbols import Symbolic
from scopetrace._compat.tensors import FakeTensor
from scopetrace.containers.structure import parts_of
from scopetrace.errors import OpaqueOutputError
from scopetrace.ir.guards import MODULE_TABLES

_MOST = 10_000
"""So many objects behind a result are looked at."""
_NO_LEAVES = (type, types.ModuleType, types.CodeType, types.FrameType, enum.Enum, torch.dtype, torch.device)
_STORAGES = (torch.UntypedStorage, torch.TypedStorage)


def refuse_leak(x: Any, path: str, *, is_result: bool) -> None:
    """Raise OpaqueOutputError where a leaf holds a tensor of the trace that no container shows.

    Of arguments, only attributes of objects count. A result may be no iterator either.
    """
    kind = type(x)
    what = f"{path} is a {kind.__name__}"
    if is_result and isinstance(x, Iterator):
        raise OpaqueOutputError(
            f"{what}, which can be gone through once and computes later", hint="return a list or tuple of what it gives"
        )
    leak = _leak(x, _referents) if is_result and not isinstance(x, torch.Tensor) else None
    attributes = {} if isinstance(x, (torch.nn.Module, type)) else getattr(x, "__dict__", {})
    name = next((name for name, value in attributes.items() if _leak(value, parts_of) is not None), None)
    if leak is not None and isinstance(x, (Set, ValuesView)):
        problem = f"{what} with tensors in it, which has no order or keys that a trace could keep"
        hint = "return a list, tuple or dict"
    elif name is not None and isinstance(x, torch.Tensor):
        problem = f"{what}, a tensor subclass, whose parts (.{name}) a trace does not follow"
        hint = "pass and return the tensors in it"
    elif name is not None:
        problem = f"{path} is a {kind.__module__}.{kind.__qualname__} with tensors in it (.{name}), "
        problem += "and scopetrace cannot see inside objects of this type"
        hint = "make it a dataclass, or register it with torch.utils._pytree.register_pytree_node"
    elif leak is not None:
        held = "a tensor" if isinstance(leak, torch.Tensor) else "the storage of a tensor"
        problem = f"{what} that holds {held}, which no call of a trace can make again"
        hint = "return the tensors that are in it"
    else:
        return
    raise OpaqueOutputError(problem, hint=hint)


def refuse_hidden(x: Any, path: str) -> None:
    """Raise OpaqueOutputError where a leaf of the arguments is a container, as a set, with tensors in it."""
    is_mapping = isinstance(x, (dict, types.MappingProxyType))
    items = x.values() if is_mapping else x if isinstance(x, (list, tuple, Set, ValuesView)) else ()
    if any(isinstance(item, torch.Tensor) for item in items):
        raise OpaqueOutputError(
            f"the argument {path} is a {type(x).__name__} with tensors in it, which a trace cannot open",
            hint="pass a list, tuple or dict, or register its class with torch.utils._pytree.register_pytree_node",
        )


def _leak(x: Any, parts: Callable[[Any], Iterable[Any]]) -> Any:
    """A tensor of the trace, or its storage, to which an object leads; `parts` are what one refers to."""
    pending, seen = [x], {id(x): x}
    for reached in itertools.islice(pending, _MOST):  # which grows meanwhile
        if isinstance(reached, (FakeTensor, *_STORAGES)):
            return reached
        new = {id(part): part for part in parts(reached) if id(part) not in seen}
        seen |= new
        pending += new.values()
    return None


def _referents(x: Any) -> Iterable[Any]:
    if isinstance(x, (*_NO_LEAVES, *Symbolic, torch.Tensor)):
        return ()
    if isinstance(x, types.FunctionType):  # without its globals
        return *(x.__closure__ or ()), *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values(), vars(x)
    if isinstance(x, torch.nn.Module):  # what attributes of the model's hold is real again after the trace
        return [member for table in MODULE_TABLES for member in vars(x).get(table, {}).values()]
    if isinstance(x, weakref.ref):
        return (x(),)
    return gc.get_referents(x)
