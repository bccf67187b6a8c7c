"""The schema of an op: what it takes, returns, writes and aliases.

`OpOverload._schema` makes new Python objects each time its arguments are asked for. `schema_of` reads it once per op
and caches the result, so that it costs a dictionary lookup.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeGuard

import torch
from torch._ops import HigherOrderOperator, OpOverload


class Argument(NamedTuple):
    """An argument or a return of an op."""

    name: str
    """Empty for a return that the schema does not name."""
    type: str
    """The TorchScript type: `Tensor`, `Optional[Tensor]`, `List[Tensor]`, `int`, ..."""
    kwarg_only: bool
    is_out: bool
    """Whether it is keyword-only and written, as `out=` is."""
    is_written: bool
    """Whether it is annotated as written: `Tensor(a!)`. A return is, when it is the argument that was written."""
    aliases: frozenset[str]
    """The alias sets that it is annotated with: `{"alias::a"}` for `Tensor(a)`; empty without annotation."""
    has_default: bool
    default: Any

    @property
    def is_tensor(self) -> bool:
        """Whether it takes tensors: one, a list of them, or None in their place."""
        return "Tensor" in self.type


class Schema(NamedTuple):
    """What an op takes and gives. Obtained by `schema_of`."""

    name: str
    """Namespace and name without the overload: `aten::add_`."""
    overload: str
    """`Tensor`, `out`, ...; empty for the default overload."""
    arguments: tuple[Argument, ...]
    returns: tuple[Argument, ...]
    is_mutable: bool
    """Whether an argument is written."""
    names: tuple[str, ...]
    """The names of the arguments."""
    written: tuple[str, ...]
    """The names of the written arguments."""

    @property
    def op_name(self) -> str:
        """The name without the namespace: `add_`."""
        return self.name.partition("::")[2]


@functools.cache
def schema_of(op: Any) -> Schema:
    """The schema of an `OpOverload`. Raises AttributeError for anything else, higher-order ops included."""
    schema = op._schema
    arguments = tuple(map(_argument, schema.arguments))
    return Schema(
        name=schema.name,
        overload=schema.overload_name,
        arguments=arguments,
        returns=tuple(map(_argument, schema.returns)),
        is_mutable=schema.is_mutable,
        names=tuple(a.name for a in arguments),
        written=tuple(a.name for a in arguments if a.is_written),
    )


def _argument(a: Any) -> Argument:
    alias = a.alias_info
    return Argument(
        name=a.name,
        type=str(a.type),
        kwarg_only=a.kwarg_only,
        is_out=a.is_out,
        is_written=alias is not None and alias.is_write,
        aliases=frozenset() if alias is None else frozenset(map(str, alias.before_set)),
        has_default=a.has_default_value(),
        default=a.default_value,
    )


def is_op(target: Any) -> TypeGuard[OpOverload]:
    """Whether `target` is an op with a schema (`OpOverload`), not a higher-order op, a function or a method name."""
    return isinstance(target, OpOverload)


def can_decompose(op: OpOverload) -> bool:
    """Whether `op.decompose` can run the op as a composition of others. Those of `prim` are not in the dispatcher."""
    return op.namespace != "prim" and op._can_decompose()


def op_overloads(namespace: str, name: str) -> list[OpOverload]:
    """All overloads of an op; empty when there is no such op."""
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]


OPS = (OpOverload, HigherOrderOperator)
"""The classes of ops."""


def is_higher_order(target: Any) -> TypeGuard[HigherOrderOperator]:
    """Whether `target` is an op that takes callables, such as `torch.cond`."""
    return isinstance(target, HigherOrderOperator)


def name_of(op: HigherOrderOperator) -> str:
    """The name by which `find_higher_order` finds it."""
    return str(op._name)


def find_op(name: str, overload: str) -> OpOverload | None:
    """The op of a schema's name and overload; None where this torch, with the libraries that are imported, has none."""
    namespace, _, op = name.partition("::")
    found: Any = torch.ops
    for part in (namespace, op, overload or "default"):
        if not part.isidentifier():
            return None
        found = getattr(found, part, None)
    return found if isinstance(found, OpOverload) else None


def find_higher_order(name: str) -> HigherOrderOperator | None:
    """The higher-order op of this name; None where this torch has none."""
    found = getattr(torch.ops.higher_order, name, None) if name.isidentifier() else None
    return found if isinstance(found, HigherOrderOperator) else None
