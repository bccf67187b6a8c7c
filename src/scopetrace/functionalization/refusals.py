"""What functionalization refuses, and the error that says so.

A functional op reads all of its operands before it gives a result. An op that writes does the same only where what it
reads lies apart from what it writes, or where it reads each element just before it writes that element; and a random op
only where both fill their elements in the same order. All else is refused here, before the tape is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from scopetrace._compat.ops import is_op, schema_of
from scopetrace._compat.symbols import example
from scopetrace.errors import FunctionalizationError
from scopetrace.ir.scopes import source_of
from scopetrace.ir.tape import Op, Tape, Value
from scopetrace.ops.functional_variants import (
    by_name,
    functional_variant,
    is_out_argument,
    tensor_of,
    undeclared_writes,
)
from scopetrace.ops.view_inverses import geometry_of, overlaps_itself, spans_meet
from scopetrace.ops.views import dense_strides

_aten = torch.ops.aten
_VISITS_IN_ORDER = ("index_", "scatter", "masked_scatter", "put", "_index_put")
_MAY_OVERLAP = (_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default)
_PRODUCTS = frozenset({"mm", "bmm", "mv", "matmul", "linalg_matmul", "matrix_power", "linalg_matrix_power"})
_SUMS_OF_PRODUCTS = frozenset({"addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation"})


def refusal(problem: str, op: Op) -> FunctionalizationError:
    """The error for an op that cannot be made pure."""
    return FunctionalizationError(
        f"no pure form: {problem}",
        op=str(op.target),
        module=str(op.scope),
        source=source_of(op.frames),
        hint="write it out of place, or trace with functional=False to keep the mutation",
    )


def verify_pure(tape: Tape) -> None:
    """Raise FunctionalizationError for an op that writes, or whose schema can."""
    for inner in tape.walk():
        for op in inner.ops:
            if op.writes or (is_op(op.target) and schema_of(op.target).is_mutable):
                raise refusal("an op that writes is left in the program", op)


class _Slot(NamedTuple):
    """A tensor among the arguments of an op: the argument's name, and its place where that is a list."""

    name: str
    place: int | None
    value: Value


def refuse_overlap(op: Op) -> None:
    """Raise FunctionalizationError for a write whose result depends on the order in which elements are visited."""
    inputs = op.inputs()
    if len({v.storage for v in inputs}) == len(inputs) and not any(map(overlaps_itself, inputs)):
        return
    written, read = _slots(op)
    for slot in written:
        if overlaps_itself(slot.value) and op.target not in _MAY_OVERLAP:
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
    names = {*schema_of(op.target).written, *undeclared_writes(op.target, op.args, op.kwargs)}
    slots = []
    positional = zip(schema_of(op.target).names, op.args, strict=False)
    for name, a in (*positional, *op.kwargs.items()):
        parts: Any = enumerate(a) if isinstance(a, (list, tuple)) else [(None, a)]
        slots += [_Slot(name, i, v) for i, v in parts if isinstance(v, Value)]
    known = {s.value for s in slots if s.name in names}
    written = [s for s in slots if s.name in names or (s.value in op.writes and s.value not in known)]
    return written, [s for s in slots if s not in written]


def _reads_first(op: Op, target: _Slot, other: _Slot, writes: int) -> bool:
    """Whether the op reads each element of `other` before, or when, it writes the same element of `target`."""
    name = schema_of(op.target).op_name
    if name.startswith(_VISITS_IN_ORDER) or functional_variant(op.target) is None:
        return False
    plain = name.rstrip("_")
    if plain in _PRODUCTS or (plain in _SUMS_OF_PRODUCTS and other.name != "self"):
        return False  # a factor is read again after the first results are written
    if writes > 1 and target.place != other.place:  # one after the other, as _foreach does, or no one knows how
        return target.place is not None and other.place is not None and other.place < target.place
    return _same_elements(target.value, other.value)


def _same_elements(a: Value, b: Value) -> bool:
    """Whether both have the same elements in the same order, and eager does not raise for them."""
    x, y = geometry_of(a), geometry_of(b)
    if x == y:
        return a.fake.dtype.itemsize == b.fake.dtype.itemsize
    if x.offset != y.offset or x.dims != y.dims or a.fake.dtype.itemsize != b.fake.dtype.itemsize:
        return False
    return dense_strides(a.fake) is None  # of dense tensors, eager compares the strides, those of size 1 too


def _meet(a: Value, b: Value) -> bool:
    if not spans_meet(a, b):
        return False
    if a.fake.dtype.itemsize != b.fake.dtype.itemsize or _same_elements(a, b):
        return True
    return bool(torch.isin(geometry_of(a).positions(), geometry_of(b).positions()).any())


_VECTORIZED = 16  # with fewer elements normal_ draws one number after the other, whatever the layout


def draws_differ(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a random op and its functional variant may draw other numbers for an element from one seed.

    A variant fills a fresh tensor in its memory order; `func` fills what is there, in its order and dtype.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    arguments = by_name(func, args, kwargs)
    outs = [tensor_of(arguments.get(name)) for name in schema_of(func).written]
    out = next((t for t in outs if isinstance(t, torch.Tensor) and example(t.numel()) > 0), None)
    if (
        out is None
        or (example(out.numel()) < _VECTORIZED and out.dim() < 2)
        or (out.is_contiguous() and schema_of(func).name != "aten::normal")
    ):
        return False
    if any(is_out_argument(a) for a in schema_of(func).arguments):
        tensors = [tensor_of(arguments.get(name)) for name in ("mean", "std")]
        return not out.is_contiguous() or any(isinstance(t, torch.Tensor) and t.dtype != out.dtype for t in tensors)
    # `bernoulli` does not keep the strides of its input. The others do where they can; the vectorized way to draw
    # normal numbers, for contiguous tensors only, is another stream.
    name = schema_of(func).name
    return name == "aten::bernoulli_" or (name == "aten::normal_" and dense_strides(out) is None)
