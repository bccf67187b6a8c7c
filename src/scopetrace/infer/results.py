"""Results of ops that were seen before: equal arguments give results of equal metadata.

torch's own fake-tensor cache works below decomposition, so a linear layer costs four look-ups and dispatches there.
This one stands above it, where the recorder sees the linear layer as one op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from scopetrace._compat.schema import schema_of
from scopetrace._compat.symbols import expanded, has_unbacked, surely_equal, to_expr
from scopetrace._compat.tensors import FakeMaker, FakeTensor, is_symbolic, storage_id
from scopetrace.infer.layouts import gapless_strides
from scopetrace.ir.tape import Value


class Fresh(NamedTuple):
    """A result with memory of its own."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    key: int
    nbytes: int | torch.SymInt
    offset: int | torch.SymInt = 0

    def make(self, factory: FakeMaker, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result. Call inside `without_dispatch`."""
        place = self.nbytes, self.size, self.stride, self.offset
        return factory.placed(place, self.dtype, self.device, self.requires_grad)


class View(NamedTuple):
    """A result that shares the memory of input number `base`."""

    base: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt  # from the start of the base, in elements
    device: torch.device
    requires_grad: bool
    key: int

    def make(self, factory: FakeMaker, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result. Call inside `without_dispatch`."""
        base = inputs[self.base]
        offset = base.storage_offset() + self.offset
        return factory.view(base, self.size, self.stride, offset, self.device, self.requires_grad)


class Same(NamedTuple):
    """A result that is input number `base` itself."""

    base: int

    def make(self, factory: FakeMaker, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result."""
        return inputs[self.base]


Recipe = tuple[type | None, tuple[Fresh | View | Same, ...]]
"""How to make the results again: the container (None for a single tensor), and each tensor."""


class Keys:
    """Small integers for all metadata that decides the metadata of results."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._expansions: dict[Any, Any] = {}

    def of(self, fake: torch.Tensor) -> int | None:
        """The key of a tensor; None for sizes that depend on data, and for layouts beyond plain strided memory."""
        if fake.layout is not torch.strided or fake.is_conj() or fake.is_neg() or type(fake) is not FakeTensor:
            return None
        size, stride, offset = fake.size(), fake.stride(), fake.storage_offset()
        if is_symbolic(fake):
            size, stride, offset = to_expr(size), to_expr(stride), to_expr(offset)
        nbytes = fake.untyped_storage().nbytes()  # symbolic, too, where a static view lies in such memory
        return self._number(size, stride, offset, (fake.dtype, fake.device, fake.requires_grad), nbytes)

    def of_recipe(self, recipe: Fresh | View, inputs: Sequence[torch.Tensor]) -> int | None:
        """The key of what a recipe makes, which `of` would give."""
        if isinstance(recipe, Fresh):
            offset, dtype, nbytes = to_expr(recipe.offset), recipe.dtype, recipe.nbytes
        else:
            base = inputs[recipe.base]
            if base.is_conj() or base.is_neg():
                return None
            offset, dtype = to_expr(base.storage_offset() + recipe.offset), base.dtype
            nbytes = base.untyped_storage().nbytes()
        rest = dtype, recipe.device, recipe.requires_grad
        return self._number(to_expr(recipe.size), to_expr(recipe.stride), offset, rest, nbytes)

    def _number(self, size: Any, stride: Any, offset: Any, rest: Any, nbytes: Any) -> int | None:
        if any(has_unbacked(n) for n in (*size, *stride, offset)):
            return None
        facts = (size, stride, offset, *rest, self._expanded(to_expr(nbytes)))
        return self._numbers.setdefault(facts, len(self._numbers))

    def _expanded(self, number: Any) -> Any:
        """One form for equal polynomials: torch counts bytes in several ways."""
        if isinstance(number, int):
            return number
        found = self._expansions.get(number)
        if found is None:
            found = self._expansions[number] = expanded(number)
        return found


def learn(keys: Keys, inputs: list[Value], out: Any) -> Recipe | None:
    """How to make `out` from `inputs` again; None when its metadata does not follow from theirs alone."""
    kind = type(out)
    if kind is FakeTensor:
        recipe = _learn_one(keys, inputs, out)
        return None if recipe is None else (None, (recipe,))
    if kind not in (tuple, list) or not out or any(type(t) is not FakeTensor for t in out):
        return None
    recipes = [_learn_one(keys, inputs, t) for t in out]
    if any(r is None for r in recipes) or _share_memory(out, inputs):
        return None
    return kind, tuple(r for r in recipes if r is not None)


def _learn_one(keys: Keys, inputs: list[Value], out: torch.Tensor) -> Fresh | View | Same | None:
    key = keys.of(out)
    if key is None:
        return None
    storage = storage_id(out)
    for i, value in enumerate(inputs):
        if out is value.fake:
            return Same(i)
    size, stride = tuple(out.size()), tuple(out.stride())
    for i, value in enumerate(inputs):
        base = value.fake
        if storage_id(base) == storage:
            if base.dtype != out.dtype:
                return None
            offset = out.storage_offset() - base.storage_offset()
            return View(i, size, stride, offset, out.device, out.requires_grad, key)
    if is_symbolic(out):
        dense = gapless_strides(out) if surely_equal(out.storage_offset(), 0) else None
        if dense is None:
            return None
        stride = dense
    elif out.storage_offset() != 0 or out.untyped_storage().nbytes() != _bytes_spanned(out):
        return None
    return Fresh(size, stride, out.dtype, out.device, out.requires_grad, key, out.numel() * out.dtype.itemsize)


def _bytes_spanned(t: torch.Tensor) -> int:
    if t.numel() == 0:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(t.size(), t.stride(), strict=True))) * t.element_size()


def _share_memory(out: Any, inputs: list[Value]) -> bool:
    """Whether two results share memory that is no input's."""
    known = {storage_id(v.fake) for v in inputs}
    fresh = [storage_id(t) for t in out]
    fresh = [s for s in fresh if s not in known]
    return len(set(fresh)) < len(fresh)


def can_repeat(func: Any, tags: list[torch.Tag]) -> bool:
    """Whether results of `func` may be made from a recipe at all. Where data decides a size, that has no key."""
    return not schema_of(func).is_mutable and torch.Tag.data_dependent_output not in tags
