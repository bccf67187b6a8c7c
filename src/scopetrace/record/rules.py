"""Result sizes of the commonest ops where sizes are symbolic.

torch has shape rules in C++ for plain numbers. For symbolic ones it takes most ops apart in Python, which costs 10 to
50 times as much. The rules here say for some ops what sizes the result has, as expressions. All else (dtype, device,
order of the dimensions in memory, errors) comes from torch's own rule for the sizes of the example: the op is run on
stand-ins of these. Where a rule is not sure, torch's way for symbolic sizes is taken.

Data flow: op + tape values -> sizes by rule, result on stand-ins -> `results.Recipe`, or None for "ask torch"
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from scopetrace._compat.fake import FakeMaker, FakeTensor, run_static, storage_id, without_dispatch
from scopetrace._compat.symbols import exact_quotient, example, is_static, surely_equal
from scopetrace.record.results import Fresh, Keys, Recipe, Same, View, is_dense
from scopetrace.record.tape import Value, flat
from scopetrace.record.view_rules import VIEWS

Sizes = Sequence[Any]
"""Numbers, symbolic ones too; None where the run on stand-ins says it, which then is a plain number."""
Rule = Callable[..., "Sizes | None"]


def predict(factory: FakeMaker, keys: Keys, func: Any, args: Any, kwargs: Any, inputs: list[Value]) -> Recipe | None:
    """How to make the result of an op whose inputs have symbolic sizes, or None where torch has to say."""
    if not any(v.fake._has_symbolic_sizes_strides for v in inputs):
        return None
    if func in VIEWS:
        return _predict_view(factory, keys, VIEWS[func], args, kwargs, inputs)
    rule = _rule_of(func)
    if rule is None or not all(type(v.fake) is FakeTensor and _keeps_order(v.fake) for v in inputs):
        return None
    said = rule(*args, **kwargs)
    if said is None:
        return None
    stand_ins = {id(v): _stand_in(factory, v.fake) for v in inputs}
    try:
        out = run_static(factory.mode, func, _with_examples(args, stand_ins), _with_examples(kwargs, stand_ins))
    except Exception:  # torch's own way raises it, with symbols in its words
        return None
    if type(out) is not FakeTensor or out.dim() != len(said):
        return None
    sizes = [there if n is None else n for n, there in zip(said, out.size(), strict=True)]
    if list(out.size()) != [example(n) for n in sizes]:
        return None
    strides = _dense_strides(sizes, out)
    if strides is None or out.storage_offset() != 0:
        return None
    grad = torch.is_grad_enabled() and any(v.fake.requires_grad for v in inputs)
    grad = grad and (out.dtype.is_floating_point or out.dtype.is_complex)
    recipe = _recipe(out, sizes, strides, grad, [stand_ins[id(v)] for v in inputs], inputs)
    if recipe is None:
        return None
    return _with_key(factory, keys, recipe, inputs)


def _predict_view(
    factory: FakeMaker, keys: Keys, rule: Callable[..., Any], args: Any, kwargs: Any, inputs: list[Value]
) -> Recipe | None:
    if kwargs or len(inputs) != 1 or type(inputs[0].fake) is not FakeTensor:
        return None
    base = inputs[0].fake
    found = rule(base, *args[1:])
    if found is None:
        return None
    size, stride, offset = found
    grad = torch.is_grad_enabled() and base.requires_grad
    return _with_key(factory, keys, View(0, tuple(size), tuple(stride), offset, base.device, grad, 0), inputs)


def _with_key(factory: FakeMaker, keys: Keys, recipe: Fresh | View | Same, inputs: list[Value]) -> Recipe | None:
    if isinstance(recipe, Same):
        return None, (recipe,)
    with without_dispatch(), torch.no_grad():
        made = recipe.make(factory, [v.fake for v in inputs])
    key = keys.of(made)
    return None if key is None else (None, (recipe._replace(key=key),))


def _recipe(
    out: torch.Tensor, sizes: Sizes, strides: Sizes, grad: bool, stand_ins: list[torch.Tensor], inputs: list[Value]
) -> Fresh | View | Same | None:
    size, stride = tuple(sizes), tuple(strides)
    for i, t in enumerate(stand_ins):
        if t is out:
            return Same(i)
        if storage_id(t) == storage_id(out):
            if not _contiguous(inputs[i].fake) or t.dtype != out.dtype:
                return None
            return View(i, size, stride, 0, out.device, grad, 0)
    numel = math.prod(size)
    return Fresh(size, stride, out.dtype, out.device, grad, 0, numel)


def _stand_in(factory: FakeMaker, t: torch.Tensor) -> torch.Tensor:
    """The same tensor with the sizes of the example."""
    if not t._has_symbolic_sizes_strides:
        return t
    size, stride = ([example(n) for n in numbers] for numbers in (t.size(), t.stride()))
    with without_dispatch(), torch.no_grad():
        return factory.fresh(size, stride, t.dtype, t.device, t.requires_grad)


def _with_examples(x: Any, stand_ins: dict[int, torch.Tensor]) -> Any:
    if isinstance(x, Value):
        return stand_ins[id(x)]
    if isinstance(x, torch.SymInt):
        return example(x)
    if isinstance(x, (list, tuple)):
        return type(x)([_with_examples(item, stand_ins) for item in x])
    if isinstance(x, dict):
        return {name: _with_examples(item, stand_ins) for name, item in x.items()}
    return x


def _dense_strides(sizes: Sizes, out: torch.Tensor) -> list[Any] | None:
    """Strides without gaps in the order that `out` has; None where that is not the layout of `out`."""
    strides: list[Any] = [1] * len(sizes)
    reach: Any = 1
    for d in sorted(range(len(sizes)), key=lambda d: (out.stride(d), out.shape[d] != 1, -d)):
        if example(reach) != out.stride(d):
            return None
        strides[d] = reach
        reach = reach * sizes[d]
    return strides


def _keeps_order(t: torch.Tensor) -> bool:
    """Whether the order of the dimensions in memory is the same for all sizes."""
    return is_static(t.stride()) or is_dense(t)


def _contiguous(t: torch.Tensor) -> bool:
    reach: Any = 1
    for n, stride in zip(reversed(t.size()), reversed(t.stride()), strict=True):
        if not surely_equal(stride, reach):
            return False
        reach = reach * n
    return surely_equal(t.storage_offset(), 0)


# ---------------------------------------------------------------- rules


def _rule_of(func: Any) -> Rule | None:
    if torch.Tag.pointwise in func.tags:
        return _pointwise
    return _RULES.get(func)


def _pointwise(*args: Any, **kwargs: Any) -> Sizes | None:
    """The broadcast size of all tensors."""
    if any(isinstance(a, (list, tuple)) for a in (*args, *kwargs.values())):
        return None
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Value)]
    return _broadcast([t.fake.size() for t in tensors])


def _broadcast(shapes: Sequence[Sizes]) -> Sizes | None:
    found: list[Any] = []
    for d in range(1, 1 + max(map(len, shapes))):
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
    if len(left) < 2 or len(left) != len(right) or not surely_equal(left[-1], right[-2]):
        return None
    if any(not surely_equal(m, n) for m, n in zip(left[:-2], right[:-2], strict=True)):
        return None
    return (*left[:-1], right[-1])


def _batched(x: Value, *args: Any, **kwargs: Any) -> Sizes | None:
    """An op on each image of a batch, whose sizes are plain numbers."""
    size = x.fake.size()
    return (size[0], *[None] * (len(size) - 1)) if len(size) > 2 and is_static(size[1:]) else None


def _convolution(x: Value, weight: Value, *args: Any, **kwargs: Any) -> Sizes | None:
    return _batched(x) if x.fake.dim() == weight.fake.dim() and is_static(weight.fake.size()) else None


def _resized(x: Value, *args: Any, **kwargs: Any) -> Sizes | None:
    return _batched(x) if not any(isinstance(n, torch.SymInt) for n in flat((args, kwargs))) else None


def _padded(x: Value, pad: Sequence[Any], *args: Any, **kwargs: Any) -> Sizes | None:
    return _batched(x) if len(pad) < 2 * x.fake.dim() and is_static(pad) else None


def _flattened(x: Value, start: int = 0, stop: int = -1) -> Sizes | None:
    size = list(x.fake.size())
    if not size or not (-len(size) <= start < len(size) and -len(size) <= stop < len(size)):
        return None
    first, last = start % len(size), stop % len(size)
    return [*size[:first], math.prod(size[first : last + 1]), *size[last + 1 :]]


def _pool2d(x: Value, *args: Any, **kwargs: Any) -> Sizes | None:
    return _batched(x) if x.fake.dim() == 4 else None


def _reduced(x: Value, dims: Any = None, keepdim: bool = False, **kwargs: Any) -> Sizes | None:
    size = x.fake.size()
    gone = {d % len(size) for d in dims} if dims else set(range(len(size)))
    return [1 if d in gone else n for d, n in enumerate(size) if keepdim or d not in gone]


def _cat(tensors: Sequence[Value], dim: int = 0) -> Sizes | None:
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
    if mask is not None and _broadcast([mask.fake.size(), (*rows[:-1], keys[-2])]) is None:
        return None
    return (*rows[:-1], values[-1])


def _reshape(x: Value, shape: Sizes) -> Sizes | None:
    numel = math.prod(x.fake.size())
    given = math.prod(n for n in shape if not (type(n) is int and n == -1))
    if not any(type(n) is int and n == -1 for n in shape):
        return shape if surely_equal(given, numel) else None
    rest = exact_quotient(numel, given)
    return None if rest is None else [rest if type(n) is int and n == -1 else n for n in shape]


_aten = torch.ops.aten
ACTIVATIONS = frozenset(
    {
        *(_aten.relu_.default, _aten.relu6_.default, _aten.hardswish_.default, _aten.hardsigmoid_.default),
        *(_aten.silu_.default, _aten.mish_.default, _aten.gelu_.default, _aten.leaky_relu_.default),
    }
)
"""In-place ops that give a floating tensor other values and change nothing else of it."""
_RULES: dict[Any, Rule] = {
    **dict.fromkeys((_aten.__and__.Tensor, _aten.__or__.Tensor, _aten.where.ScalarOther), _pointwise),
    **dict.fromkeys((_aten.where.ScalarSelf, _aten.where.Scalar), _pointwise),
    _aten.linear.default: _linear,
    _aten.matmul.default: _matmul,
    _aten.bmm.default: _matmul,
    _aten.scaled_dot_product_attention.default: _attention,
    _aten.layer_norm.default: _normalized,
    _aten.rms_norm.default: _normalized,
    _aten.batch_norm.default: _channels,
    _aten.group_norm.default: _channels,
    **dict.fromkeys((_aten.conv1d.default, _aten.conv2d.default, _aten.conv3d.default), _convolution),
    **dict.fromkeys((_aten.conv1d.padding, _aten.conv2d.padding, _aten.conv3d.padding), _convolution),
    **dict.fromkeys((_aten.max_pool2d.default, _aten.avg_pool2d.default, _aten.adaptive_avg_pool2d.default), _pool2d),
    **dict.fromkeys((_aten.mean.dim, _aten.sum.dim_IntList, _aten.amax.default, _aten.amin.default), _reduced),
    **dict.fromkeys((_aten.upsample_nearest2d.vec, _aten.upsample_bilinear2d.vec), _resized),
    _aten.upsample_bicubic2d.vec: _resized,
    **dict.fromkeys((_aten.pad.default, _aten.constant_pad_nd.default), _padded),
    _aten.flatten.using_ints: _flattened,
    _aten.cat.default: _cat,
    _aten.embedding.default: _embedding,
    _aten.reshape.default: _reshape,
    _aten.view.default: _reshape,
    _aten._unsafe_view.default: _reshape,
    **dict.fromkeys(
        (
            _aten.softmax.int,
            _aten.log_softmax.int,
            _aten._softmax.default,
            _aten.dropout.default,
            _aten.clone.default,
            _aten.contiguous.default,
            _aten.to.dtype,
            _aten.to.device,
            _aten.to.dtype_layout,
            _aten.cumsum.default,
            _aten.hardswish.default,
            _aten.hardsigmoid.default,
            _aten.mish.default,
        ),
        _as_first,
    ),
}
