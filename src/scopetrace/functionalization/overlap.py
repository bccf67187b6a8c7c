"""Which writes have another result than their pure twin because of shared memory.

A pure op reads all of its arguments before it gives anything. An op that writes does the same only where what it reads
lies apart from what it writes, or where it reads each element just before it writes that element.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from scopetrace.functionalization.refusal import refusal
from scopetrace.functionalization.region import geometry_of
from scopetrace.ir.tape import Op, Value
from scopetrace.ops.functional_variants import functional_variant, undeclared_writes, written_arguments

_aten = torch.ops.aten
_VISITS_IN_ORDER = ("index_", "scatter", "masked_scatter", "put", "_index_put")
_MAY_OVERLAP = (_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default)
_PRODUCTS = frozenset({"mm", "bmm", "mv", "matmul", "linalg_matmul", "matrix_power", "linalg_matrix_power"})
_SUMS_OF_PRODUCTS = frozenset({"addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation"})


class _Slot(NamedTuple):
    """A tensor among the arguments of an op: the argument's name, and its place where that is a list."""

    name: str
    place: int | None
    value: Value


def refuse_overlap(op: Op) -> None:
    """Raise FunctionalizationError for a write whose result depends on the order in which elements are visited."""
    written, read = _slots(op)
    for slot in written:
        if geometry_of(slot.value).overlaps_itself() and op.target not in _MAY_OVERLAP:
            raise refusal("the tensor that is written to has elements that share memory (clone() it first)", op)
    near: dict[int, list[_Slot]] = {}
    for slot in written:
        beside = near.setdefault(slot.value.storage, [])
        if any(_meet(slot.value, b.value) for b in beside):
            raise refusal("two tensors that one op writes share memory (write them one by one)", op)
        beside.append(slot)
    for other in read:
        for target in near.get(other.value.storage, ()):
            if _meet(target.value, other.value) and not _reads_first(op, target, other, len(written)):
                raise refusal("an input lies in the memory that is written (clone() it first)", op)


def _slots(op: Op) -> tuple[list[_Slot], list[_Slot]]:
    """The tensors that an op writes, and those that it only reads."""
    names = {*written_arguments(op.target), *undeclared_writes(op.target, op.args, op.kwargs)}
    slots = []
    given = zip([a.name for a in op.target._schema.arguments], op.args, strict=False)
    for name, a in (*given, *op.kwargs.items()):
        parts: Any = enumerate(a) if isinstance(a, (list, tuple)) else [(None, a)]
        slots += [_Slot(name, i, v) for i, v in parts if isinstance(v, Value)]
    known = {s.value for s in slots if s.name in names}
    written = [s for s in slots if s.name in names or (s.value in op.writes and s.value not in known)]
    return written, [s for s in slots if s not in written]


def _reads_first(op: Op, target: _Slot, other: _Slot, writes: int) -> bool:
    """Whether the op reads each element of `other` before, or when, it writes the same element of `target`."""
    name = op.target._schema.name.split("::")[1]
    if name.startswith(_VISITS_IN_ORDER) or functional_variant(op.target) is None or _is_factor(name, other.name):
        return False
    if writes > 1 and target.place != other.place:  # one after the other, as _foreach does, or no one knows how
        return target.place is not None and other.place is not None and other.place < target.place
    return _same_elements(target.value, other.value)


def _is_factor(name: str, argument: str) -> bool:
    """Whether an argument of a matrix product is read again after the first results are written."""
    plain = name.rstrip("_")
    return plain in _PRODUCTS or (plain in _SUMS_OF_PRODUCTS and argument != "self")


def _same_elements(a: Value, b: Value) -> bool:
    """Whether both have the same elements in the same order, and eager does not raise for them."""
    x, y = geometry_of(a), geometry_of(b)
    if x == y:
        return a.fake.dtype.itemsize == b.fake.dtype.itemsize
    if x.offset != y.offset or x.dims != y.dims or a.fake.dtype.itemsize != b.fake.dtype.itemsize:
        return False
    return not x.is_dense()  # of dense tensors, eager compares the strides, those of size 1 too


def _meet(a: Value, b: Value) -> bool:
    """Whether two values of one storage share an element."""
    x, y = geometry_of(a), geometry_of(b)
    if not x.numel or not y.numel:
        return False
    (a0, a1), (b0, b1) = x.span(), y.span()
    m, n = a.fake.dtype.itemsize, b.fake.dtype.itemsize
    if (a1 + 1) * m <= b0 * n or (b1 + 1) * n <= a0 * m:
        return False
    return m != n or _same_elements(a, b) or bool(torch.isin(x.positions(), y.positions()).any())
