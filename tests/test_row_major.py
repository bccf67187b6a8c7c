"""What `record.row_major` says of an op without running it is what eager does: checked on thousands of random calls,
of which many are wrong in a size, a dtype or a layout. Where eager raises, no rule may be sure.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from scopetrace._compat.tensors import FakeMaker, without_dispatch
from scopetrace.infer import row_major
from scopetrace.infer.results import Same
from scopetrace.infer.size_rules import ACTIVATIONS
from scopetrace.infer.view_rules import VIEWS
from scopetrace.ir.scopes import Scope
from scopetrace.ir.tape import Op, Value
from scopetrace.record.ops import OpFacts

aten = torch.ops.aten


class Draw:
    """Random arguments: mostly right, laid out in every way."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.dtype = torch.float32

    def maybe(self, chance: float = 0.5) -> bool:
        return self.random.random() < chance

    def some(self, *choices):
        return self.random.choice(choices)

    def size(self, rank: int) -> list[int]:
        return [self.some(1, 1, 2, 3, 4) for _ in range(rank)]

    def tensor(self, *size: int) -> torch.Tensor:
        size = tuple(n + 1 if self.maybe(0.03) else n for n in size)
        dtype = self.dtype if self.maybe(0.95) else self.some(torch.float64, torch.int64, torch.bfloat16)
        x = torch.ones(size, dtype=dtype)
        layout = self.random.random()
        if layout < 0.06 and x.dim() == 4:
            return x.to(memory_format=torch.channels_last)
        if layout < 0.12 and x.dim() > 1:
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        if layout < 0.15 and x.dim() > 1:
            return torch.ones((*size[:-1], 2 * size[-1]), dtype=dtype)[..., ::2]
        if layout < 0.18 and x.dim() > 1:
            return torch.ones((1, *size[1:]), dtype=dtype).expand(size)
        if layout < 0.3 and x.dim() > 2:
            return torch.ones((size[0], *(n + self.some(0, 0, 2) for n in size[1:])), dtype=dtype)[self.part(size)]
        if layout < 0.34 and x.dim() > 0:
            return torch.ones((size[0] + 1, *size[1:]), dtype=dtype)[1:]
        if layout < 0.38:  # odd strides where there is one element
            return torch.empty_strided(size, [7 if n == 1 else s for n, s in zip(size, x.stride(), strict=True)]).to(
                dtype
            )
        return x

    @staticmethod
    def part(size: tuple[int, ...]) -> tuple[slice, ...]:
        return tuple(slice(n) for n in size)

    def vector(self, n: int) -> torch.Tensor | None:
        return self.tensor(n) if self.maybe(0.8) else None

    def like(self, x: torch.Tensor) -> torch.Tensor:
        if self.maybe(0.3):
            return x.clone()
        size = list(x.shape)
        if self.maybe():
            size = [n if self.maybe(0.7) else 1 for n in size][self.some(0, 0, 0, 1) :]
        return self.tensor(*size)


def elementwise(draw, func):
    if func in row_major._LOGICAL:
        draw.dtype = torch.bool
    elif func in row_major._COMPARISONS:
        draw.dtype = draw.some(torch.float32, torch.int64)
    x = draw.tensor(*draw.size(draw.some(0, 1, 2, 3, 4)))
    return (
        x,
        *(_further(draw, x, a) for a in func._schema.arguments[1:] if a.default_value is None and not a.kwarg_only),
    )


def _further(draw, x, argument):
    kind = str(argument.type)
    if kind == "Tensor":
        return draw.like(x)
    return draw.some(2, 0.5, True) if "Optional" not in kind or draw.maybe() else None


def clamp(draw, func):
    return draw.tensor(*draw.size(draw.some(0, 1, 3))), draw.some(None, 0, 0.5), draw.some(None, 1, 2.5)


def linear(draw, func):
    n, m = draw.size(2)
    x = draw.tensor(*draw.size(draw.some(0, 1, 2, 3)), n)
    return x, draw.tensor(m, n), draw.vector(m)


def addmm(draw, func):
    n, m, k = draw.size(3)
    return draw.tensor(k), draw.tensor(n, m), draw.tensor(m, k)


def matmul(draw, func):
    batch = draw.size(draw.some(0, 1, 1, 1, 2))
    n, m, k = draw.size(3)
    return draw.tensor(*batch, n, m), draw.tensor(*batch, m, k)


def convolution(draw, func):
    rank = int(func._schema.name[-2])
    groups, a, b = draw.some(1, 1, 1, 2), draw.some(1, 2), draw.some(1, 3)
    x = draw.tensor(draw.some(1, 2), a * groups, *(draw.some(1, 3, 5, 6) for _ in range(rank)))
    weight = draw.tensor(b * groups, a, *(draw.some(1, 1, 3) for _ in range(rank)))

    def number(*choices):
        return [draw.some(*choices)] if draw.maybe() else [draw.some(*choices) for _ in range(rank)]

    return x, weight, draw.vector(b * groups), number(1, 2), number(0, 1, 1), number(1, 1, 2), groups


def pool(draw, func):
    x = draw.tensor(draw.some(1, 2), draw.some(1, 3), draw.some(1, 3, 6), draw.some(2, 5))
    kernel = [draw.some(1, 2, 3)] if draw.maybe() else [draw.some(1, 2, 3), draw.some(1, 2, 3)]
    stride = draw.some([], [1], [2], [2, 1])
    given = (x, kernel, stride, [draw.some(0, 0, 1)])
    return (
        (*given, [draw.some(1, 1, 2)], draw.maybe(0.2))
        if func is aten.max_pool2d.default
        else (*given, draw.maybe(0.2))
    )


def norm(draw, func):
    x = draw.tensor(draw.some(1, 2), draw.some(1, 2, 4), *draw.size(draw.some(0, 1, 2, 3)))
    n = x.shape[1]
    if func is aten.group_norm.default:
        return x, draw.some(1, 1, 2, 3), draw.vector(n), draw.vector(n), 1e-5, True
    return x, draw.vector(n), draw.vector(n), draw.tensor(n), draw.tensor(n), draw.maybe(0.1), 0.1, 1e-5, True


def layer_norm(draw, func):
    x = draw.tensor(*draw.size(draw.some(1, 2, 3, 4)))
    shape = list(x.shape[draw.some(0, 1, -1) :]) if draw.maybe(0.9) else draw.size(1)
    return x, shape, *(draw.tensor(*shape) if draw.maybe(0.8) else None for _ in range(2)), 1e-5, True


def softmax(draw, func):
    x = draw.tensor(*draw.size(draw.some(1, 2, 3, 4)))
    return x, draw.some(-1, 0, 1, -2, 5)


def mean(draw, func):
    x = draw.tensor(*draw.size(draw.some(1, 2, 3, 4)))
    return x, draw.some([-1], [0], [0, 1], [2, 3], [1, -1], [], None), draw.maybe()


def global_pool(draw, func):
    return draw.tensor(*draw.size(draw.some(3, 4, 4, 4))), draw.some([1, 1], [1, 1], [2, 1])


def cat(draw, func):
    size = draw.size(draw.some(1, 2, 3, 4))
    dim = draw.some(0, -1, 1)
    parts = []
    for _ in range(draw.some(1, 2, 3)):
        part = list(size)
        if dim < len(size):
            part[dim] = draw.some(1, 2, 3)
        parts.append(draw.tensor(*part))
    return parts, dim


def embedding(draw, func):
    weight = draw.tensor(*draw.size(2))
    return (
        weight,
        torch.zeros(draw.size(draw.some(0, 1, 2)), dtype=draw.some(torch.int64, torch.int32)),
        -1,
        False,
        False,
    )


def padded_convolution(draw, func):
    x, weight, bias, stride, _, dilation, groups = convolution(draw, func)
    return x, weight, bias, draw.some(stride, [1]), draw.some("same", "valid"), dilation, groups


def select_scatter(draw, func):
    size = draw.size(draw.some(1, 2, 3))
    dim = draw.some(0, -1, 1)
    part = [n for d, n in enumerate(size) if d != dim % len(size)]
    return draw.tensor(*size), draw.tensor(*part), dim, draw.some(0, 0, 1, -1)


def slice_scatter(draw, func):
    x = draw.tensor(*draw.size(draw.some(1, 2, 3)))
    where = draw.some(0, 0, -1, 2), draw.some(None, 0, 1), draw.some(None, 2, 3, -1), draw.some(1, 1, 1, 2)
    part = aten.slice(x, *where) if where[0] < x.dim() else x
    return x, draw.tensor(*part.shape), *where


def whole(draw, func):
    return (draw.tensor(*draw.size(draw.some(0, 1, 2, 3, 4))),)


def dropout(draw, func):
    return *whole(draw, func), 0.5, draw.maybe()


def to_dtype(draw, func):
    return *whole(draw, func), draw.some(torch.float32, torch.float32, torch.float64), False, draw.maybe(0.2)


CASES = {
    row_major._embedding: embedding,
    row_major._padded_convolution: padded_convolution,
    row_major._select_scatter: select_scatter,
    row_major._slice_scatter: slice_scatter,
    row_major._cloned: whole,
    row_major._is_contiguous: whole,
    row_major._is_dropped: dropout,
    row_major._has_dtype: to_dtype,
    row_major._elementwise: elementwise,
    row_major._clamped: clamp,
    row_major._gelu: lambda draw, func: (draw.tensor(*draw.size(3)),),
    row_major._linear: linear,
    row_major._addmm: addmm,
    row_major._multiplied: matmul,
    row_major._bmm: matmul,
    row_major._convolution: convolution,
    row_major._max_pool2d: pool,
    row_major._avg_pool2d: pool,
    row_major._batch_norm: norm,
    row_major._group_norm: norm,
    row_major._layer_norm: layer_norm,
    row_major._softmax: softmax,
    row_major._mean: mean,
    row_major._global_pool: global_pool,
    row_major._cat: cat,
}


def values(mode: FakeTensorMode, args):
    op = Op("placeholder", "x", (), {}, None, Scope("", ""), None, ())
    inputs: list[Value] = []

    def value(t: torch.Tensor) -> Value:
        inputs.append(Value(mode.from_tensor(t), op, 0, id(t), 0))
        return inputs[-1]

    return pytree.tree_map_only(torch.Tensor, value, args), inputs


@pytest.mark.parametrize("func", row_major._RULES, ids=str)
def test_a_sure_result_is_the_one_of_eager(func):
    sure = 0
    for seed in range(400):
        args = CASES[row_major._RULES[func]](Draw(seed), func)
        lifted, inputs = values(FakeTensorMode(), args)
        found = row_major.known(func, lifted, {}, inputs)
        if found is None:
            continue
        sure += 1
        tensors = [t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
        if tensors[0].is_floating_point():
            tensors[0].requires_grad_(seed % 2 == 0)
        out = func(*args)
        if isinstance(found, Same):
            assert out is args[0], (seed, args)
            continue
        said = found.size, found.stride, found.dtype, found.device, found.nbytes
        assert said == (tuple(out.shape), out.stride(), out.dtype, out.device, out.untyped_storage().nbytes())
        assert out.storage_offset() == found.offset, (seed, args)
        with without_dispatch():
            made = found.make(FakeMaker(FakeTensorMode()), [])
        assert (made.shape, made.stride(), made.storage_offset()) == (out.shape, out.stride(), out.storage_offset())
        assert made.untyped_storage().nbytes() == found.nbytes
        assert out.untyped_storage()._cdata not in {t.untyped_storage()._cdata for t in tensors}
    assert sure > 40  # the rule applies


@pytest.mark.parametrize("func", sorted(row_major._IN_PLACE, key=str), ids=str)
def test_a_plain_write_changes_values_alone(func):
    sure = 0
    for seed in range(400):
        args = elementwise(Draw(seed), func)
        lifted, inputs = values(FakeTensorMode(), args)
        if overlaps_itself(args[0]) or not row_major.writes_plainly(func, lifted, {}, inputs):
            continue  # the recorder refuses to write to what overlaps itself before it asks
        sure += 1
        assert len(inputs) == len([a for a in args if isinstance(a, torch.Tensor)])
        before = args[0].shape, args[0].stride(), args[0].dtype
        assert func(*args) is args[0]
        assert (args[0].shape, args[0].stride(), args[0].dtype) == before, (seed, args)
    assert sure > 40


def test_the_recorder_asks_before_it_lets_torch_run_a_plain_write():
    assert [func for func in row_major._IN_PLACE | ACTIVATIONS if not OpFacts(func).in_place] == []


def overlaps_itself(t: torch.Tensor) -> bool:
    return any(s == 0 and n > 1 for n, s in zip(t.shape, t.stride(), strict=True))


def dims(draw, rank):
    return draw.some(*range(-rank, rank), rank + 1) if rank else draw.some(0, 1)


def regrouped(draw, size):
    """Another shape with as many elements, mostly."""
    flat = math.prod(size)
    shape = draw.some([-1], [flat], [1, flat], [flat, -1], size, [*size, 1], [-1, size[-1] if size else 1], [2, -1])
    return shape if draw.maybe(0.9) else [*shape, 2]


VIEW_ARGUMENTS = {
    aten.permute.default: lambda draw, x: (draw.random.sample(range(x.dim()), x.dim()),),
    aten.transpose.int: lambda draw, x: (dims(draw, x.dim()), dims(draw, x.dim())),
    aten.t.default: lambda draw, x: (),
    aten.unsqueeze.default: lambda draw, x: (dims(draw, x.dim()),),
    aten.select.int: lambda draw, x: (dims(draw, x.dim()), draw.some(0, 0, 1, -1, 3)),
    aten.slice.Tensor: lambda draw, x: (
        *(dims(draw, x.dim()), draw.some(None, 0, 1, -1, 9)),
        *(draw.some(None, 1, 2, -1, 2**63 - 1), draw.some(1, 1, 2)),
    ),
    aten.expand.default: lambda draw, x: (
        [*draw.some([], [1], [2]), *(n if n > 1 else draw.some(1, 3, -1) for n in x.shape)],
    ),
    aten.unbind.int: lambda draw, x: (dims(draw, x.dim()),),
    aten.split.Tensor: lambda draw, x: (draw.some(1, 2, 3), dims(draw, x.dim())),
    aten.split.sizes: lambda draw, x: (draw.some([1, 1], [2, 1], [1, 2], [4], [0, 3]), dims(draw, x.dim())),
    aten.split_with_sizes.default: lambda draw, x: (draw.some([1, 1], [2, 1], [3]), dims(draw, x.dim())),
    aten.chunk.default: lambda draw, x: (draw.some(1, 2, 3, 5), dims(draw, x.dim())),
    aten.reshape.default: lambda draw, x: (regrouped(draw, list(x.shape)),),
    aten.view.default: lambda draw, x: (regrouped(draw, list(x.shape)),),
    aten._unsafe_view.default: lambda draw, x: (regrouped(draw, list(x.shape)),),
    aten.flatten.using_ints: lambda draw, x: (draw.some(0, 1, -2), draw.some(-1, 1, 2)),
}


@pytest.mark.parametrize("func", VIEWS, ids=str)
def test_a_view_lies_where_that_of_eager_does(func):
    sure = 0
    for seed in range(400):
        draw = Draw(seed)
        x = draw.tensor(*draw.size(draw.some(0, 1, 2, 2, 3, 4)))
        args = VIEW_ARGUMENTS[func](draw, x)
        found = VIEWS[func](FakeTensorMode().from_tensor(x), *args)
        if found is None:
            continue
        sure += 1
        out = func(x, *args)
        out, found = (out, found) if isinstance(out, list) else ([out], [found])
        said = [(tuple(size), tuple(stride), offset) for size, stride, offset in found]
        assert said == [(tuple(t.shape), t.stride(), t.storage_offset() - x.storage_offset()) for t in out], (
            seed,
            x.shape,
            x.stride(),
            args,
        )
        assert all(t is not x and t.untyped_storage()._cdata == x.untyped_storage()._cdata for t in out)
    assert sure > 40
