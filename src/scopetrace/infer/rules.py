"""The metadata of an op's results without running the op on symbolic sizes: one table of rules.

    view op -> where the view lies                                      (`views.place_view`)
    other   -> size of the result, as expressions of the sizes of the inputs, by the op's rule
               dtype and strides, as of what the op gives for the sizes of the example
    either  -> `Outputs`, or None: torch has to say

An elementwise op needs no rule of its own; one in place returns its target, if that keeps its size.
A rule answers only where the op surely takes its arguments; errors are torch's. torch's own way costs 0.3 to 20 ms per
op on fake tensors of symbolic sizes, a rule 0.1 ms where torch was asked for the example's sizes before. A rule exists
while it saves 2 % of the trace of some model of the zoo (`benchmarks/rules.py`). With `SCOPETRACE_CHECK=1` every
answer is compared with torch's own (`check`).

The strides are those of CPU, CUDA and meta tensors (`DEVICE_TYPES`); what is on other devices goes through torch.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from scopetrace._compat.ops import schema_of
from scopetrace._compat.questions import grad_enabled
from scopetrace._compat.shape_env import WatchedShapeEnv, evaluated
from scopetrace._compat.symbols import example, is_static, row_major_strides, surely_equal, to_expr
from scopetrace._compat.tensors import FakeMaker, FakeTensor, is_symbolic, offset_of, requires_grad_of, storage_id
from scopetrace.ir.tape import Value, flat, map_argument
from scopetrace.ops import views
from scopetrace.ops.views import Int, Sizes, ViewArguments

_aten = torch.ops.aten
T = TypeVar("T")
Number = Callable[[Any], int]
"""Gives the plain number of a symbolic one."""
DEVICE_TYPES = frozenset({"cpu", "cuda", "meta"})
"""The devices whose strides the rules were compared with."""


class OutputMeta(NamedTuple):
    """The metadata of a result that is no input itself."""

    size: tuple[Int, ...]
    stride: tuple[Int, ...]
    offset: Int
    """In elements: from the start of the memory, or from the first element of `base`."""
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    nbytes: Int
    """Of the memory of its own; unused with `base`."""
    base: int | None = None
    """The input whose memory it shares, with its dtype."""
    key: int | None = None
    """The number of this metadata; see `Inference.key_of`."""

    def make(self, maker: FakeMaker, inputs: Sequence[Value]) -> torch.Tensor:
        """The result as a fake tensor. Call inside `without_dispatch`."""
        if self.base is None:
            place = self.nbytes, self.size, self.stride, self.offset
            return maker.placed(place, self.dtype, self.device, self.requires_grad)
        base = inputs[self.base].fake
        offset = offset_of(base) + self.offset
        return maker.view(base, self.size, self.stride, offset, self.device, self.requires_grad)


class Identity(NamedTuple):
    """A result that is an input itself, the same Python object."""

    input: int


class Outputs(NamedTuple):
    """What an op returns."""

    container: type | None
    """The type of the container; None where the op returns a single tensor."""
    tensors: tuple[OutputMeta | Identity | None, ...]
    """Of each result; None for one that is None."""

    def make(self, maker: FakeMaker, inputs: Sequence[Value]) -> list[torch.Tensor | None]:
        """The results as fake tensors. Call inside `without_dispatch`."""
        return [
            meta.make(maker, inputs) if isinstance(meta, OutputMeta) else meta and inputs[meta.input].fake
            for meta in self.tensors
        ]

    def contained(self, results: list[T]) -> Any:
        """The results as the op gives them."""
        return results[0] if self.container is None else self.container(results)


def outputs_by_rule(
    maker: FakeMaker, of_plain: Callable[..., Outputs | None], func: Any, args: Any, kwargs: Any, inputs: list[Value]
) -> Outputs | None:
    """What the op returns for symbolic sizes, without keys; None where no rule knows.

    `inputs` are the values among the arguments. `of_plain` gives what the op returns for plain sizes.
    """
    fakes = [v.fake for v in inputs]
    if func in _STEPPED:
        return _steps(fakes, *args)
    rule = RULES.get(func, _elementwise if is_elementwise(func) else None)
    size = None if rule is None else rule(*args, **kwargs)
    if size is None:
        return None
    # the stride of a dimension of size 1 says nothing of where the dimension lies in memory at other sizes
    symbolic = [n for n in itertools.chain(size, *(t.size() for t in fakes)) if isinstance(n, torch.SymInt)]
    numbers = assignments(maker, fakes, (args, kwargs))
    number = next((number for number in numbers if all(number(n) != 1 for n in symbolic)), None)
    if number is None:
        return None
    values = {key: Value(t, 0, storage_id(t), None) for key, t in instances(maker, inputs, number).items()}
    outputs = of_plain(func, *replaced((args, kwargs), values, number), [values[id(v)] for v in inputs])
    if outputs is None or outputs.container is not None:
        return None
    (meta,) = outputs.tensors
    if isinstance(meta, Identity):
        itself = fakes[meta.input].size()
        return outputs if len(size) == len(itself) and all(map(surely_equal, size, itself)) else None
    if meta is None or meta.base is not None or list(meta.size) != [number(n) for n in size]:
        return None
    if func in _ROW_MAJOR:
        stride: tuple[Int, ...] | None = row_major_strides(size)
    elif not all(is_static(t.stride()) or views.dense_strides(t) is not None for t in fakes):
        return None  # in which order dimensions lie in memory is not known for all sizes
    else:
        stride = views.strides_in_order_of(meta.stride, size, number)
    if stride is None or meta.offset != 0 or meta.device != fakes[0].device:
        return None
    return Outputs(None, (_new_tensor(tuple(size), stride, meta.dtype, fakes),))


def is_plain(t: torch.Tensor) -> bool:
    """Whether rules hold for tensors such as this: of a known device, and with elements."""
    return type(t) is FakeTensor and t.device.type in DEVICE_TYPES and 0 not in to_expr(t.size())


def _new_tensor(
    size: tuple[Int, ...], stride: tuple[Int, ...], dtype: torch.dtype, fakes: Sequence[torch.Tensor]
) -> OutputMeta:
    """A result of these inputs that starts at the beginning of its memory and fills it."""
    grad = grad_enabled() and (dtype.is_floating_point or dtype.is_complex) and any(map(requires_grad_of, fakes))
    return OutputMeta(size, stride, 0, dtype, fakes[0].device, grad, math.prod(size) * dtype.itemsize)


def view_of(base: torch.Tensor, view: ViewArguments) -> Outputs | None:
    """The result of a view op, without key; None where it is not known."""
    place = views.place_view(base, view)
    if place is None:
        return None
    container, places = (list, place) if isinstance(place, list) else (None, [place])
    # requires_grad holds also under no_grad
    metas = [OutputMeta(*place, base.dtype, base.device, base.requires_grad, 0, 0) for place in places]
    return Outputs(container, tuple(metas))


# ---------------------------------------------------------------- new tensors


def instances(maker: FakeMaker, inputs: list[Value], number: Number) -> dict[int, torch.Tensor]:
    """By the id of the value: a tensor of plain sizes. Values that share memory have instances that do."""
    tensors: dict[int, torch.Tensor] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    for v in inputs:
        t = v.fake
        storage = storages.get(storage_id(t))
        if storage is None:
            storage = torch.UntypedStorage(number(t.untyped_storage().nbytes()), device="meta")
            storages[storage_id(t)] = storage
        size, stride = ([number(n) for n in numbers] for numbers in (t.size(), t.stride()))
        tensors[id(v)] = maker.in_storage(storage, size, stride, number(t.storage_offset()), t)
    return tensors


def replaced(x: Any, fakes: Mapping[int, Any], number: Callable[[Any], int]) -> Any:
    """Op arguments with `fakes` (by the id of the value) for values, and plain numbers for symbolic ones."""

    def plain(leaf: Any) -> Any:
        return fakes[id(leaf)] if isinstance(leaf, Value) else number(leaf) if isinstance(leaf, torch.SymInt) else leaf

    return map_argument(plain, x)


def assignments(maker: FakeMaker, tensors: list[torch.Tensor], args: Any) -> Iterator[Number]:
    """The example's sizes, and up to three others that the guards of the trace allow."""
    yield example
    symbols: set[Any] = set()
    facts = [(*t.size(), *t.stride(), t.storage_offset(), t.untyped_storage().nbytes()) for t in tensors]
    for n in itertools.chain(flat(args), *facts):
        if isinstance(n, torch.SymInt):
            symbols |= to_expr(n).free_symbols
    env = maker.mode.shape_env
    if not symbols or not isinstance(env, WatchedShapeEnv):
        return
    hints = {s: int(n) for s, n in env.backed_var_to_val.items()}
    if not symbols <= hints.keys():
        return  # a size depends on data
    order = sorted(symbols, key=str)
    for values in (
        {s: 2 * hints[s] for s in order},
        {s: 3 * hints[s] for s in order},
        {s: hints[s] + 1 + i for i, s in enumerate(order)},
    ):
        values = hints | values
        in_range = all(env.var_to_range[s].lower <= n <= env.var_to_range[s].upper for s, n in values.items())
        guards = [guard.expr for guard in env.guards if guard.expr.free_symbols <= values.keys()]
        if in_range and all(evaluated(expr, values) for expr in guards):
            yield _at(values)


def _at(values: dict[Any, int]) -> Number:
    return lambda n: int(evaluated(n.node.expr, values)) if isinstance(n, torch.SymInt) else int(n)


_FLOATS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
_INDICES = frozenset({torch.int64, torch.int32})


# ---------------------------------------------------------------- sizes of results


def broadcast(shapes: Sequence[Sizes]) -> tuple[Int, ...] | None:
    """The common size of these. None where two sizes are not surely equal, and neither is the number 1."""
    size: list[Any] = []
    for d in range(1, 1 + max(map(len, shapes), default=0)):
        sizes = [shape[-d] for shape in shapes if len(shape) >= d]
        others = [n for n in sizes if not (type(n) is int and n == 1)] or [1]
        if any(not surely_equal(n, others[0]) for n in others[1:]):
            return None
        size.append(others[0])
    return tuple(reversed(size))


def _elementwise(*args: Any, **kwargs: Any) -> Sizes | None:
    every = (*args, *kwargs.values())
    if any(isinstance(a, (list, tuple)) for a in every):
        return None
    return broadcast([a.fake.size() for a in every if isinstance(a, Value)])


def _same(x: Value, *args: Any, **options: Any) -> Sizes:
    return x.fake.size()


def _are_vectors(n: Any, *values: Value | None) -> bool:
    """Whether the tensors among these are vectors of `n` elements."""
    return type(n) is int and all(to_expr(v.fake.size()) == (n,) for v in values if v is not None)


def _linear(x: Value, weight: Value, bias: Value | None = None) -> Sizes | None:
    size, into = x.fake.size(), weight.fake.size()
    if len(size) < 2 or len(into) != 2 or not is_static((size[-1], *into)) or size[-1] != into[1]:
        return None
    return (*size[:-1], into[0]) if _are_vectors(into[0], bias) else None


def _matmul(a: Value, b: Value) -> Sizes | None:
    """Of two batches of the same sizes, or of a batch and a matrix: where torch broadcasts, it lays out otherwise."""
    left, right = a.fake.size(), b.fake.size()
    if len(left) < 2 or len(right) not in (2, len(left)) or not surely_equal(left[-1], right[-2]):
        return None
    if len(right) > 2 and not all(map(surely_equal, left[:-2], right[:-2])):
        return None
    return (*left[:-1], right[-1])


def _addmm(bias: Value, a: Value, b: Value, **options: Any) -> Sizes | None:
    size = _matmul(a, b) if a.fake.dim() == 2 else None
    return size if size is not None and _are_vectors(size[-1], bias) else None


def _attention(
    query: Value, key: Value, value: Value, mask: Value | None = None, *args: Any, **options: Any
) -> Sizes | None:
    q, k, v = (t.fake.size() for t in (query, key, value))
    if not len(q) == len(k) == len(v) >= 3 or not is_static((q[-1], k[-1], v[-1])) or not surely_equal(k[-2], v[-2]):
        return None
    for n, *others in zip(q[:-2], k[:-2], v[:-2], strict=True):  # numbers of heads may differ (enable_gqa)
        if not is_static((n, *others)) and any(not surely_equal(n, m) for m in others):
            return None
    if mask is not None and broadcast([mask.fake.size(), (*q[:-1], k[-2])]) is None:
        return None
    return (*q[:-1], v[-1])


def _convolution(
    x: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Sizes | None:
    size, kernel = x.fake.size(), weight.fake.size()
    if len(size) != len(kernel) or len(size) < 3 or not is_static((size[1], *kernel)) or type(groups) is not int:
        return None
    if groups < 1 or size[1] != kernel[1] * groups or kernel[0] % groups or not _are_vectors(kernel[0], bias):
        return None
    counts = _windows(size[2:], kernel[2:], stride, padding, dilation)
    return None if counts is None else (size[0], kernel[0], *counts)


def _windows(sizes: Sizes, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Sizes | None:
    """How often a window fits into each of these dimensions, if it does in each."""
    arguments = [flat(numbers) for numbers in (kernel, stride, padding, dilation)]
    if not all(is_static(numbers) and len(numbers) in (1, len(sizes)) for numbers in arguments):
        return None
    if any(n < 1 for i in (0, 1, 3) for n in arguments[i]) or any(n < 0 for n in arguments[2]):
        return None
    each = zip(sizes, *(n * len(sizes) if len(n) == 1 else n for n in arguments), strict=True)
    counts = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in each]
    return counts if all(example(n) >= 1 for n in counts) else None


def _max_pool2d(
    x: Value, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False, *, dims: int = 2
) -> Sizes | None:
    """Over the last `dims` dimensions of a batch, or of one example."""
    size = x.fake.size()
    if len(size) - dims not in (1, 2) or ceil or any(2 * p > k for p in flat(padding) for k in flat(kernel)):
        return None
    counts = _windows(size[-dims:], kernel, stride or kernel, padding, dilation)
    return None if counts is None else (*size[:-dims], *counts)


_max_pool1d = functools.partial(_max_pool2d, dims=1)
"""Needed at any speed: torch's own way fixes a symbolic length."""


def _adaptive_pool2d(x: Value, output: Any) -> Sizes | None:
    size = x.fake.size()
    return (*size[:2], 1, 1) if len(size) == 4 and list(output) == [1, 1] else None


def _resize_2d(x: Value, output: Any, *scales: Any) -> Sizes | None:
    size = x.fake.size()
    return (*size[:2], *output) if output is not None and len(size) == 4 else None


def _batch_norm(
    x: Value, weight: Value | None, bias: Value | None, mean: Value | None, var: Value | None, train: bool, *rest: Any
) -> Sizes | None:
    size = x.fake.size()
    if (mean is None) is not (var is None) or train is not (mean is None) or len(size) < 2:
        return None  # training with statistics changes these
    return size if _are_vectors(size[1], weight, bias, mean, var) else None


def _group_norm(
    x: Value, groups: int, weight: Value | None = None, bias: Value | None = None, *rest: Any
) -> Sizes | None:
    size = x.fake.size()
    if len(size) < 2 or type(groups) is not int or groups < 1 or type(size[1]) is not int or size[1] % groups:
        return None
    return size if _are_vectors(size[1], weight, bias) else None


def _layer_norm(
    x: Value, shape: Sequence[Any], weight: Value | None = None, bias: Value | None = None, *rest: Any
) -> Sizes | None:
    size, last = x.fake.size(), tuple(shape)
    sizes = [size[len(size) - len(last) :], *(v.fake.size() for v in (weight, bias) if v is not None)]
    return size if last and is_static(last) and all(to_expr(n) == last for n in sizes) else None


def _mean(x: Value, dims: Any = None, keepdim: bool = False, **options: Any) -> Sizes | None:
    """Over all dimensions by default."""
    size = x.fake.size()
    reduced = [d + len(size) if d < 0 else d for d in dims or range(len(size))]
    if len(set(reduced)) < len(reduced) or not all(0 <= d < len(size) for d in reduced):
        return None
    return [1 if d in reduced else n for d, n in enumerate(size) if keepdim or d not in reduced]


def _cat(tensors: Sequence[Value], dim: int = 0) -> Sizes | None:
    first, *others = [t.fake.size() for t in tensors]
    if type(dim) is not int or not -len(first) <= dim < len(first) or any(len(s) != len(first) for s in others):
        return None
    size: list[Any] = list(first)
    dim %= len(size)
    for shape in others:
        if any(not surely_equal(n, m) for d, (n, m) in enumerate(zip(size, shape, strict=True)) if d != dim):
            return None
        size[dim] = size[dim] + shape[dim]
    return size


def _stack(tensors: Sequence[Value], dim: int = 0) -> Sizes | None:
    first, *others = [t.fake.size() for t in tensors]
    if any(len(size) != len(first) or not all(map(surely_equal, size, first)) for size in others):
        return None
    dim %= len(first) + 1
    return (*first[:dim], len(tensors), *first[dim:])


def _index(x: Value, indices: Sequence[Value | None]) -> Sizes | None:
    size = list(x.fake.size())
    dims = [i for i, index in enumerate(indices) if index is not None]
    tensors = [index.fake for index in indices if index is not None]
    shape = broadcast([t.size() for t in tensors])
    if not dims or shape is None or any(t.dtype not in _INDICES for t in tensors):
        return None
    first, last = dims[0], dims[-1]
    if last - first + 1 == len(dims):
        return [*size[:first], *shape, *size[last + 1 :]]
    return [*shape, *[n for d, n in enumerate(size) if d not in dims]]


_STEPPED = frozenset({_aten.lstm.input, _aten.gru.input, _aten.rnn_tanh.input, _aten.rnn_relu.input})


def _steps(
    fakes: list[torch.Tensor], x: Value, hx: Value | list[Value], weights: Sequence[Value], *options: Any
) -> Outputs | None:
    """What recurrent layers give for a dynamic length or batch: torch's own makes ops of each step, for one length."""
    *_, is_double, batch_first = options
    (length, batch, width), dtype = _to_steps(x.fake.size(), batch_first), x.fake.dtype
    states = [tuple(v.fake.size()) for v in (hx if isinstance(hx, list) else [hx])]
    fits = surely_equal(batch, states[0][1]) and surely_equal(width, weights[0].fake.size(1))
    is_float = dtype in _FLOATS and all(t.dtype == dtype for t in fakes)
    if not (fits and is_float and is_symbolic(x.fake)):
        return None
    size = (length, batch, states[0][2] * (1 + is_double))
    steps, *last = (_new_tensor(n, row_major_strides(n), dtype, fakes) for n in (size, *states))
    steps = steps._replace(size=_to_steps(size, batch_first), stride=_to_steps(steps.stride, batch_first))
    return Outputs(tuple, (steps, *last))


def _to_steps(numbers: Sequence[Int], batch_first: bool) -> tuple[Int, ...]:
    """The first two of three swapped, if the batch comes first."""
    a, b, c = numbers
    return (b, a, c) if batch_first else (a, b, c)


_UNTAGGED = frozenset(
    {
        *(_aten.hardswish.default, _aten.__and__.Tensor, _aten.__or__.Tensor, _aten.floor_divide.default),
        *(_aten.where.ScalarOther, _aten.where.ScalarSelf),
        *(_aten.relu6_.default, _aten.hardswish_.default, _aten.mish_.default, _aten.gelu_.default),
        *(_aten.abs_.default, _aten.copy_.default, _aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor),
        *(_aten.masked_fill_.Scalar, _aten.masked_fill_.Tensor),
    }
)
"""Elementwise ops that torch does not tag pointwise."""


@functools.cache
def is_elementwise(func: Any) -> bool:
    """Whether each element of the one result, or of the target, follows from the elements at its place alone."""
    tagged = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
    schema = schema_of(func)
    special = schema.name.startswith("aten::special_")  # some have no gradient, which no tag says
    special = special or func is _aten.conj_physical.default  # real numbers are their own: it returns its argument
    return (tagged or func in _UNTAGGED) and not special and not func.is_view and len(schema.returns) == 1


RULES: dict[Any, Callable[..., Sizes | None]] = {
    _aten.linear.default: _linear,
    _aten.addmm.default: _addmm,
    _aten.matmul.default: _matmul,
    _aten.scaled_dot_product_attention.default: _attention,
    **dict.fromkeys((_aten.conv1d.default, _aten.conv2d.default, _aten.conv3d.default), _convolution),
    _aten.max_pool1d.default: _max_pool1d,
    _aten.max_pool2d.default: _max_pool2d,
    _aten.adaptive_avg_pool2d.default: _adaptive_pool2d,
    _aten.upsample_nearest2d.vec: _resize_2d,
    _aten.batch_norm.default: _batch_norm,
    _aten.group_norm.default: _group_norm,
    _aten.layer_norm.default: _layer_norm,
    **dict.fromkeys((_aten.mean.dim, _aten.sum.dim_IntList), _mean),
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten.index.Tensor: _index,
    **dict.fromkeys((_aten.cumsum.default, _aten.dropout.default, _aten.clone.default), _same),
}
"""By op, called with its arguments as the tape has them: the size of its one result, or None where the rule does not
apply; elementwise ops need none."""
_ROW_MAJOR = frozenset({_aten.linear.default, _aten.addmm.default, _aten.matmul.default})
"""The ops whose result is row-major for all inputs, not only for those that are."""
