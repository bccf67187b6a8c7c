"""Arguments of ops on a tape: whether they are like others, and which of them an op writes."""

from __future__ import annotations

from typing import Any

import torch

from scopetrace._compat.ops import schema_of
from scopetrace._compat.symbols import Symbolic, to_expr
from scopetrace.containers.structure import leaves, map_structure
from scopetrace.ir.tape import BodyTape, Value, values_in
from scopetrace.ops.functional_variants import UNDECLARED_WRITTEN, undeclared_writes


def fakes_of(x: Any) -> Any:
    """A structure with the fake tensors of values in their place."""
    return map_structure(lambda v: v.fake, x, Value)


def written_by(func: Any, args: Any, kwargs: Any) -> list[Value]:
    """The values that an op writes."""
    schema = schema_of(func)
    names = {a.name for a in schema.arguments if a.is_written}
    if any(name in UNDECLARED_WRITTEN for name in schema.names):
        names |= set(undeclared_writes(func, args, kwargs))
    given = {**dict(zip(schema.names, args, strict=False)), **kwargs}
    return values_in([given[name] for name in schema.names if name in names and name in given])


def are_alike(old: Any, new: Any, storages: dict[int, int]) -> bool:
    """Whether arguments have the same metadata as others, and share memory among them in the same way.

    `storages` gets the new storage of each old one.
    """
    if isinstance(old, Value):
        if not isinstance(new, Value) or storages.setdefault(old.storage, new.storage) != new.storage:
            return False
        return len(set(storages.values())) == len(storages) and _metadata(old) == _metadata(new)
    if isinstance(old, BodyTape):
        return isinstance(new, BodyTape) and are_alike(
            list(leaves(old.outputs, (Value, *Symbolic))), list(leaves(new.outputs, (Value, *Symbolic))), {}
        )
    if isinstance(old, Symbolic):
        return isinstance(new, type(old)) and bool(to_expr(old) == to_expr(new))
    if isinstance(old, (list, tuple)):
        return (
            isinstance(new, (list, tuple))
            and len(old) == len(new)
            and all(are_alike(a, b, storages) for a, b in zip(old, new, strict=True))
        )
    if isinstance(old, dict):
        return (
            isinstance(new, dict)
            and old.keys() == new.keys()
            and all(are_alike(a, new[k], storages) for k, a in old.items())
        )
    return type(old) is type(new) and (old is new or bool(old == new))


def _metadata(v: Value) -> tuple[Any, ...]:
    t = v.fake
    return *layout_of(t), t.device, t.layout, t.requires_grad, v.requires_grad


def layout_of(t: torch.Tensor) -> tuple[Any, ...]:
    """Sizes, strides and offset, as expressions, and dtype."""
    place = (to_expr(t.stride()), to_expr(t.storage_offset())) if t.layout is torch.strided else ()
    return to_expr(tuple(t.size())), place, t.dtype
