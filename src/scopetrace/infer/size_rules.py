"""What sizes the results of common ops have, as expressions of the sizes of their inputs.

A rule gets the arguments of the op as the tape has them. It gives the sizes of the result, or of each result in a list;
None where it is not sure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from scopetrace._compat.symbols import Symbolic, is_static, surely_equal, whole_quotient
from scopetrace.infer.layouts import Sizes
from scopetrace.ir.tape import Value, flat

Rule = Callable[..., "Sizes | None"]
"""In the sizes, None stands for a plain number that the run on stand-ins says."""


def rule_of(func: Any) -> Rule | None:
    """The rule of an op."""
    if torch.Tag.pointwise in func.tags:
        return _pointwise
    return _RULES.get(func)


def _pointwise(*args: Any, **kwargs: Any) -> Sizes | None:
    """The broadcast size of all tensors."""
    if any(isinstance(a, (list, tuple)) for a in (*args, *kwargs.values())):
        return None
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Value)]
    return broadcast([t.fake.size() for t in tensors])


def broadcast(shapes: Sequence[Sizes]) -> Sizes | None:
    """The common size of these; None where they are not surely the same, or the number 1."""
    found: list[Any] = []
    for d in range(1, 1 + max(map(len, shapes), default=0)):
        there = [shape[-d] for shape in shapes if len(shape) >= d]
        others = [n for n in there if not (type(n) is int and n == 1)] or [1]
        if any(not surely_equal(n, others[0]) for n in others[1:]):
            return None
        found.append(others[0])
    return found[::-1]


def _as_first(x: Value, *args: Any, **kwargs: Any) -> Sizes:
    """An op that takes whole rows, or each element alone."""
    return x.fake.size()


def _normalized(x: Value, shape: Sizes, *args: Any, **kwargs: Any) -> Sizes | None:
    size = x.fake.size()
    return size if is_static(size[len(size) - len(shape) :]) and is_static(shape) else None


def _channels(x: Value, *args: Any, **kwargs: Any) -> Sizes | None:
    size = x.fake.size()
    return size if len(size) > 1 and is_static(size[1:2]) else None


def _linear(x: Value, weight: Value, bias: Value | None = None) -> Sizes | None:
    size, into = x.fake.size(), weight.fake.size()
    if len(size) < 2 or len(into) != 2 or not is_static((size[-1], *into)):
        return None
    return (*size[:-1], into[0])


def _matmul(a: Value, b: Value) -> Sizes | None:
    left, right = a.fake.size(), b.fake.size()
    if len(left) < 2 or len(right) < 2 or len(left) < len(right) or not surely_equal(left[-1], right[-2]):
        return None
    batch = broadcast([left[:-2], right[:-2]])
    return None if batch is None else (*batch, left[-2], right[-1])


def _addmm(bias: Value, a: Value, b: Value, **kwargs: Any) -> Sizes | None:
    found = _matmul(a, b)
    added = None if found is None else broadcast([bias.fake.size(), found])
    return found if added is not None and len(added) == 2 and all(map(surely_equal, added, found or ())) else None


def _batched(x: Value, *args: Any, **kwargs: Any) -> Sizes | None:
    """An op on each image of a batch, whose sizes are plain numbers."""
    size = x.fake.size()
    return (size[0], *[None] * (len(size) - 1)) if len(size) > 2 and is_static(size[1:]) else None


def _convolution(
    x: Value, weight: Value, bias: Value | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, *args: Any
) -> Sizes | None:
    size, kernel = x.fake.size(), weight.fake.size()
    if len(size) != len(kernel) or not is_static((*size[1:2], *kernel)):
        return None
    if is_static(size[1:]):
        return _batched(x)
    if isinstance(padding, str):
        return None
    found = windows(size[2:], kernel[2:], stride, padding, dilation)
    return None if found is None else (size[0], None, *found)


def windows(sizes: Sizes, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Sizes | None:
    """How often a window fits into each of these dimensions."""
    if not is_static(flat((kernel, stride, padding, dilation))):
        return None
    each = zip(sizes, *(_one_each(n, len(sizes)) for n in (kernel, stride, padding, dilation)), strict=True)
    return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in each]


def _one_each(n: Any, count: int) -> Sequence[int]:
    """A number for each dimension. One stands for all."""
    numbers = flat(n)
    return numbers * count if len(numbers) == 1 else numbers


def _resized(x: Value, sizes: Any, *args: Any, **kwargs: Any) -> Sizes | None:
    size = x.fake.size()
    if sizes is not None:
        return (*size[:2], *sizes)
    return None if any(isinstance(n, Symbolic) for n in flat((args, kwargs))) else _batched(x)


def _padded(x: Value, pad: Sequence[Any], *args: Any, **kwargs: Any) -> Sizes | None:
    size = list(x.fake.size())
    if len(pad) % 2 or len(pad) > 2 * len(size):
        return None
    for d, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        size[-1 - d] = size[-1 - d] + before + after
    return size


def _flattened(x: Value, start: int = 0, stop: int = -1) -> Sizes | None:
    size = list(x.fake.size())
    if not size or not (-len(size) <= start < len(size) and -len(size) <= stop < len(size)):
        return None
    first, last = start % len(size), stop % len(size)
    return [*size[:first], math.prod(size[first : last + 1]), *size[last + 1 :]]


def _pool2d(x: Value, *args: Any, **kwargs: Any) -> Sizes | None:
    return _batched(x) if x.fake.dim() == 4 else None


def _max_pool1d(
    x: Value, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False
) -> Sizes | None:
    size = x.fake.size()
    found = None if ceil or len(size) < 2 else windows(size[-1:], kernel, stride or kernel, padding, dilation)
    return None if found is None else (*size[:-1], *found)


def reduced(x: Value, dims: Any = None, keepdim: bool = False, **kwargs: Any) -> Sizes:
    """Without some dimensions, or with 1 in their place; without all where none are given."""
    size = x.fake.size()
    gone = {d % len(size) for d in dims} if dims else set(range(len(size)))
    return [1 if d in gone else n for d, n in enumerate(size) if keepdim or d not in gone]


def joined(tensors: Sequence[Value], dim: int = 0) -> Sizes | None:
    """Tensors one after the other in one dimension."""
    shapes = [t.fake.size() for t in tensors]
    if any(len(shape) != len(shapes[0]) for shape in shapes):
        return None
    found: list[Any] = list(shapes[0])
    dim %= len(found)
    for shape in shapes[1:]:
        if any(not surely_equal(n, m) for d, (n, m) in enumerate(zip(found, shape, strict=True)) if d != dim):
            return None
        found[dim] = found[dim] + shape[dim]
    return found


def _stack(tensors: Sequence[Value], dim: int = 0) -> Sizes | None:
    first, *others = [t.fake.size() for t in tensors]
    if any(len(size) != len(first) or not all(map(surely_equal, size, first)) for size in others):
        return None
    dim %= len(first) + 1
    return (*first[:dim], len(tensors), *first[dim:])


def _indexed(x: Value, indices: Sequence[Value | None]) -> Sizes | None:
    size = list(x.fake.size())
    there = [i for i, index in enumerate(indices) if index is not None]
    numbers = [index.fake for index in indices if index is not None]
    if not there or any(index.dtype not in (torch.int64, torch.int32) for index in numbers):
        return None
    shape = broadcast([index.size() for index in numbers])
    if shape is None:
        return None
    first, last = there[0], there[-1]
    if last - first + 1 == len(there):
        return [*size[:first], *shape, *size[last + 1 :]]
    return [*shape, *[n for d, n in enumerate(size) if d not in there]]


def _gathered(x: Value, dim: int, index: Value, **kwargs: Any) -> Sizes:
    return index.fake.size()


def _arange(*args: Any, **kwargs: Any) -> Sizes | None:
    start, stop, step = {1: (0, *args, 1), 2: (*args, 1)}.get(len(args), args)
    if step != 1 or not all(isinstance(n, (int, torch.SymInt)) for n in (start, stop)):
        return None
    return (stop - start,)


_REST = "ÀÁÂÃÄÅ"
"""Letters for the dimensions that `...` stands for."""


def _einsum(equation: str, tensors: Sequence[Value], **kwargs: Any) -> Sizes | None:
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    if equation.count("...") == len(tensors) + 1:
        more = len(tensors[0].fake.size()) - len(inputs.split(",")[0]) + 3
        inputs, result = (text.replace("...", _REST[:more]) for text in (inputs, result))
    parts = inputs.split(",")
    if not arrow or not (inputs.replace(",", "") + result).isalpha() or len(parts) != len(tensors):
        return None
    known: dict[str, Any] = {}
    for letters, t in zip(parts, tensors, strict=True):
        size = t.fake.size()
        if len(letters) != len(size) or len(set(letters)) < len(letters):
            return None
        if not all(surely_equal(known.setdefault(letter, n), n) for letter, n in zip(letters, size, strict=True)):
            return None
    return [known[letter] for letter in result] if set(result) <= known.keys() else None


def _repeated(x: Value, repeats: Any, dim: Any = None, **kwargs: Any) -> Sizes | None:
    size = list(x.fake.size())
    if type(dim) is not int or not size:
        return None
    size[dim] = size[dim] * repeats
    return size


def _filled(size: Sequence[Any], *args: Any, **kwargs: Any) -> Sizes:
    return size


def _filled_like(x: Value, size: Sequence[Any], *args: Any, **kwargs: Any) -> Sizes:
    return size


def _extreme(x: Value, dim: int, keepdim: bool = False) -> Sequence[Sizes | None] | None:
    size = reduced(x, (dim,), keepdim) if x.fake.dim() else None
    return None if size is None else (size, size)


def _largest(x: Value, k: int, dim: int = -1, *args: Any) -> Sequence[Sizes] | None:
    size = list(x.fake.size())
    if not size:
        return None
    size[dim] = k
    return (size, size)


def _sorted(x: Value, *args: Any, **kwargs: Any) -> Sequence[Sizes]:
    return (x.fake.size(), x.fake.size())


def _embedding(weight: Value, indices: Value, *args: Any, **kwargs: Any) -> Sizes | None:
    return (*indices.fake.size(), weight.fake.size(1)) if is_static(weight.fake.size()) else None


def _attention(q: Value, k: Value, v: Value, mask: Value | None = None, *args: Any, **kwargs: Any) -> Sizes | None:
    rows, keys, values = (t.fake.size() for t in (q, k, v))
    if not len(rows) == len(keys) == len(values) >= 3 or not is_static((rows[-1], keys[-1], values[-1])):
        return None
    if not surely_equal(keys[-2], values[-2]):
        return None
    for n, *others in zip(rows[:-2], keys[:-2], values[:-2], strict=True):  # numbers may differ: heads in groups
        if not is_static((n, *others)) and any(not surely_equal(n, m) for m in others):
            return None
    if mask is not None and broadcast([mask.fake.size(), (*rows[:-1], keys[-2])]) is None:
        return None
    return (*rows[:-1], values[-1])


def _reshape(x: Value, shape: Sizes) -> Sizes | None:
    numel = math.prod(x.fake.size())
    given = math.prod(n for n in shape if not (type(n) is int and n == -1))
    if not any(type(n) is int and n == -1 for n in shape):
        return shape if surely_equal(given, numel) or given == numel else None  # a guard, where it is not sure
    rest = whole_quotient(numel, given)
    return None if rest is None else [rest if type(n) is int and n == -1 else n for n in shape]


_aten = torch.ops.aten
ACTIVATIONS = frozenset(
    {
        *(_aten.relu_.default, _aten.relu6_.default, _aten.hardswish_.default, _aten.hardsigmoid_.default),
        *(_aten.silu_.default, _aten.mish_.default, _aten.gelu_.default, _aten.leaky_relu_.default),
    }
)
"""In-place ops that give a floating tensor other values and change nothing else of it."""
PLAIN_WRITES = frozenset(
    {
        *(*ACTIVATIONS, _aten.abs_.default),
        *(_aten.copy_.default, _aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor),
        *(_aten.masked_fill_.Scalar, _aten.masked_fill_.Tensor),
    }
)
"""Ops that write each element of their first argument in place, though torch does not call all of them pointwise."""
COPY_OR_VIEW = frozenset(
    {
        *(_aten.reshape.default, _aten.view.default, _aten._unsafe_view.default, _aten.flatten.using_ints),
        _aten.contiguous.default,
    }
)
"""Ops whose result is a view of their first argument, or is it, where that can be, and else a copy."""


def _for(rule: Rule, *ops: Any) -> dict[Any, Rule]:
    return dict.fromkeys(ops, rule)


_RULES: dict[Any, Rule] = {
    **_for(_pointwise, _aten.__and__.Tensor, _aten.__or__.Tensor, _aten.where.ScalarOther, _aten.where.ScalarSelf),
    **_for(_pointwise, _aten.where.Scalar, _aten.masked_fill.Scalar, _aten.masked_fill.Tensor, _aten.multiply.Tensor),
    **_for(_pointwise, _aten.floor_divide.default, _aten.floor_divide.Scalar, _aten.logical_and.default),
    **_for(_pointwise, _aten.logical_or.default, _aten.logical_not.default),
    **_for(_linear, _aten.linear.default),
    **_for(_matmul, _aten.matmul.default, _aten.bmm.default),
    **_for(_addmm, _aten.addmm.default),
    **_for(_attention, _aten.scaled_dot_product_attention.default),
    **_for(_normalized, _aten.layer_norm.default, _aten.rms_norm.default),
    **_for(_channels, _aten.batch_norm.default, _aten.group_norm.default),
    **_for(_convolution, _aten.conv1d.default, _aten.conv2d.default, _aten.conv3d.default),
    **_for(_convolution, _aten.conv1d.padding, _aten.conv2d.padding, _aten.conv3d.padding),
    **_for(_pool2d, _aten.max_pool2d.default, _aten.avg_pool2d.default, _aten.adaptive_avg_pool2d.default),
    **_for(_max_pool1d, _aten.max_pool1d.default),
    **_for(reduced, _aten.mean.dim, _aten.sum.dim_IntList, _aten.amax.default, _aten.amin.default),
    **_for(_resized, _aten.upsample_nearest2d.vec, _aten.upsample_bilinear2d.vec, _aten.upsample_bicubic2d.vec),
    **_for(_padded, _aten.pad.default, _aten.constant_pad_nd.default),
    **_for(_flattened, _aten.flatten.using_ints),
    **_for(joined, _aten.cat.default),
    **_for(_stack, _aten.stack.default),
    **_for(_indexed, _aten.index.Tensor),
    **_for(_gathered, _aten.gather.default),
    **_for(_extreme, _aten.max.dim, _aten.min.dim),
    **_for(_largest, _aten.topk.default),
    **_for(_einsum, _aten.einsum.default),
    **_for(_repeated, _aten.repeat_interleave.self_int),
    **_for(_sorted, _aten.sort.default),
    **_for(_embedding, _aten.embedding.default),
    **_for(_reshape, _aten.reshape.default, _aten.view.default, _aten._unsafe_view.default),
    **_for(_arange, _aten.arange.default, _aten.arange.start, _aten.arange.start_step),
    **_for(_filled, _aten.zeros.default, _aten.ones.default, _aten.full.default, _aten.empty.memory_format),
    **_for(_filled_like, _aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default),
    **_for(_filled_like, _aten.new_empty.default),
    **_for(_as_first, _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default),
    **_for(_as_first, _aten.empty_like.default, _aten.tril.default, _aten.triu.default, _aten.cumsum.default),
    **_for(_as_first, _aten.softmax.int, _aten.log_softmax.int, _aten._softmax.default, _aten.dropout.default),
    **_for(_as_first, _aten.clone.default, _aten.contiguous.default, _aten.to.dtype, _aten.to.device),
    **_for(_as_first, _aten.to.dtype_layout, _aten.type_as.default, _aten.hardswish.default, _aten.mish.default),
    **_for(_as_first, _aten.hardsigmoid.default, _aten.slice_scatter.default, _aten.select_scatter.default),
}
