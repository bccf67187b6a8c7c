"""What `infer` says of an op's results without running it is what the op gives.

Rules are checked on thousands of random calls, many of them wrong in a size, a dtype or a layout, against torch's fake
tensors at several sizes. Where torch raises, no rule may answer.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import scopetrace as st
from scopetrace._compat.shape_env import DimSpec, new_symbol
from scopetrace._compat.tensors import FakeFactory, run_fake, storage_id, without_dispatch
from scopetrace.errors import InferenceError
from scopetrace.infer import rules
from scopetrace.infer.inference import Inference, _Cache, compare
from scopetrace.ir.tape import Value, values_in
from scopetrace.record.dynamic_shapes import symbolic_strides
from scopetrace.record.op_call import OpFacts

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


def where(draw, func):
    """Of `where` and its overloads with numbers."""
    x = draw.tensor(*draw.size(draw.some(0, 1, 2, 3)))
    other = {"ScalarOther": (x, 0.5), "ScalarSelf": (0.5, x)}[func._schema.overload_name]
    draw.dtype = torch.bool
    return draw.like(x.bool()), *other


def elementwise(draw, func):
    if func in ON_BOOLS:
        draw.dtype = torch.bool
    elif func in COMPARISONS:
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


def whole(draw, func):
    return (draw.tensor(*draw.size(draw.some(0, 1, 2, 3, 4))),)


def dropout(draw, func):
    return *whole(draw, func), 0.5, draw.maybe()


def attention(draw, func):
    batch, length = draw.size(draw.some(1, 2)), draw.some(1, 2, 3, 4)
    n, m, k = draw.size(3)
    mask = draw.some(None, None, draw.tensor(n, length))
    return draw.tensor(*batch, n, m), draw.tensor(*batch, length, m), draw.tensor(*batch, length, k), mask


def pool1d(draw, func):
    x = draw.tensor(*draw.some((), (2,)), draw.some(1, 3), draw.some(3, 5, 6))
    return x, [draw.some(1, 2, 3)], draw.some([], [1], [2]), [draw.some(0, 0, 1)], [draw.some(1, 1, 2)]


def resized(draw, func):
    return draw.tensor(*draw.size(draw.some(3, 4, 4))), draw.some([4, 6], [1, 3]), None


def stack(draw, func):
    size = draw.size(draw.some(0, 1, 2, 3))
    return [draw.tensor(*size) for _ in range(draw.some(1, 2, 3))], draw.some(0, -1, 1)


def index(draw, func):
    x = draw.tensor(*draw.size(draw.some(2, 3, 4)))
    shape = draw.size(draw.some(0, 1, 2))
    indices = [torch.zeros([n if draw.maybe(0.8) else 1 for n in shape], dtype=torch.int64) for _ in range(2)]
    return x, draw.some([indices[0]], [None, indices[0]], indices, [indices[0], None, indices[1]][: x.dim()])


def along(draw, func):
    x = draw.tensor(*draw.size(draw.some(1, 2, 3)))
    return x, draw.some(0, -1, 1)


SAME = {aten.cumsum.default: along, aten.dropout.default: dropout, aten.clone.default: whole}
CASES = {
    rules._linear: linear,
    rules._addmm: addmm,
    rules._matmul: matmul,
    rules._attention: attention,
    rules._convolution: convolution,
    rules._max_pool1d: pool1d,
    rules._max_pool2d: pool,
    rules._adaptive_pool2d: global_pool,
    rules._resize_2d: resized,
    rules._batch_norm: norm,
    rules._group_norm: norm,
    rules._layer_norm: layer_norm,
    rules._mean: mean,
    rules._cat: cat,
    rules._stack: stack,
    rules._index: index,
    rules._same: lambda draw, func: SAME[func](draw, func),
}


UNARY = (
    *("relu", "relu6", "silu", "mish", "sigmoid", "tanh", "hardswish", "hardsigmoid", "hardtanh", "leaky_relu"),
    *("elu", "softplus", "exp", "log", "sqrt", "rsqrt", "erf", "sin", "cos", "neg", "abs", "reciprocal", "gelu"),
    *("clamp", "clamp_min", "clamp_max", "maximum", "minimum", "square"),
)
COMPARISONS = [
    getattr(getattr(aten, name), overload)
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
    for overload in ("Tensor", "Scalar")
]
ON_BOOLS = [
    *(aten.logical_and.default, aten.logical_or.default, aten.logical_not.default, aten.bitwise_not.default),
    *(getattr(aten, name).Tensor for name in ("__and__", "__or__", "bitwise_and", "bitwise_or")),
]
ELEMENTWISE = [
    *(getattr(aten, name).default for name in UNARY),
    *(getattr(aten, name).Tensor for name in ("add", "sub", "mul", "div")),
    *(aten.pow.Tensor_Scalar, aten.rsub.Scalar, aten.floor_divide.default),
    *(*COMPARISONS, *ON_BOOLS),
]
WHERE = (aten.where.ScalarOther, aten.where.ScalarSelf)


class Values:
    """Tape values for real tensors: fake tensors with some sizes symbolic."""

    def __init__(self) -> None:
        self.factory = FakeFactory()
        self._known: dict[int, Any] = {}
        self._symbols: dict[int, Any] = {}

    def make_symbolic(self, *sizes: int) -> None:
        """From here on, have dimensions of these sizes symbolic, and no others: one symbol for each number."""
        env = self.factory.shape_env
        for n in sizes:
            if n not in self._known:
                symbol = new_symbol(env, n, f"x{n}", 0, DimSpec(f"s{n}", 2, None))
                self._known[n] = env.create_symintnode(symbol, hint=n)
        self._symbols = {n: self._known[n] for n in sizes}

    def value(self, real: torch.Tensor) -> Value:
        fake = self.factory.from_real(real)
        size = [self._symbols.get(n, n) for n in real.shape]
        if real.is_leaf and any(n in self._symbols for n in real.shape):
            fake = self.factory.symbolic(real, size, symbolic_strides(real, size))
        return Value(fake, 0, storage_id(fake), None)

    def lifted(self, args: Any) -> tuple[Any, list[Value]]:
        """The arguments with values for tensors, and these values."""
        inputs: list[Value] = []

        def value(t: torch.Tensor) -> Value:
            inputs.append(self.value(t))
            return inputs[-1]

        return pytree.tree_map_only(torch.Tensor, value, args), inputs

    def outputs(self, func: Any, args: Any, inputs: list[Value]) -> Any:
        """(container, results) by rule, or None."""
        found = Inference(self.factory)._by_rule(func, args, {}, inputs)
        if found is None:
            return None
        with without_dispatch():
            return found, found.make(self.factory, inputs)


def facts(t: torch.Tensor, inputs: list[torch.Tensor]) -> Any:
    """All that a later op could see of a result."""
    shared = [storage_id(t) == storage_id(x) for x in inputs]
    place = t.storage_offset(), t.untyped_storage().nbytes()
    return tuple(t.shape), t.stride(), *place, t.dtype, t.device, t.requires_grad, shared, [t is x for x in inputs]


def case(draw, func):
    """Arguments for an op."""
    if func in WHERE:
        return where(draw, func)
    return (elementwise if rules.is_elementwise(func) else CASES[rules.RULES[func]])(draw, func)


ANSWERED = [*ELEMENTWISE, *rules.RULES]


def test_an_elementwise_op_returns_a_new_tensor():
    """As `conj_physical` of real numbers does not, which no schema says."""
    found = Counter()
    for packet in [getattr(aten, name) for name in aten]:
        func = getattr(packet, "default", None)
        if func is None or not rules.is_elementwise(func) or func._schema.is_mutable:
            continue
        for dtype in (torch.float32, torch.complex64, torch.int64, torch.bool):
            x = torch.ones(2, dtype=dtype)
            with contextlib.suppress(RuntimeError, NotImplementedError, TypeError):
                out = func(*[x if "Tensor" in str(a.type) else 1 for a in func._schema.arguments if not a.kwarg_only])
                assert not isinstance(out, torch.Tensor) or storage_id(out) != storage_id(x), func
                found[dtype] += 1
    assert len(found) == 4
    assert min(found.values()) > 20


@pytest.mark.sample(8)
@pytest.mark.parametrize("func", [*rules.RULES, *ELEMENTWISE, *WHERE], ids=str)
def test_a_rule_holds_at_all_sizes(func):
    answers: Counter[bool] = Counter()
    values = Values()
    for seed in range(60):
        draw = Draw(seed)
        args = case(draw, func)
        values.make_symbolic(*draw.some((2,), (3,), (4,), (5,), (6,), (2, 3), (3, 4)))
        lifted, inputs = values.lifted(args)
        found = values.outputs(func, lifted, inputs)
        symbolic = any(isinstance(n, torch.SymInt) for v in inputs for n in v.fake.size())
        answers[symbolic and found is not None] += 1
        if found is not None:
            compare(values.factory, func, lifted, {}, inputs, found[0].container, found[1])
    assert answers[True] > 0


@pytest.mark.parametrize("device", ["cuda:0", "meta"])
def test_a_rule_holds_on_a_device(device):
    """Against torch's fake tensors of that device."""
    answers: Counter[Any] = Counter()
    values = Values()
    values.make_symbolic(2, 3)
    for func in ANSWERED:
        for seed in range(8):
            args = case(Draw(seed), func)
            lifted, inputs = values.lifted(args)
            for v in inputs:
                v.fake = moved(values.factory, v.fake, torch.device(device))
            found = values.outputs(func, lifted, inputs)
            if found is not None:
                answers[func] += 1
                compare(values.factory, func, lifted, {}, inputs, found[0].container, found[1])
    assert len(answers) > 0.7 * len(ANSWERED)


def moved(factory: FakeFactory, t: torch.Tensor, device: torch.device) -> torch.Tensor:
    with without_dispatch(), torch.no_grad():
        place = t.untyped_storage().nbytes(), t.size(), t.stride(), t.storage_offset()
        return factory.placed(place, t.dtype, device, t.requires_grad)


def test_other_devices_go_through_torch():
    values = Values()
    values.make_symbolic(3)
    lifted, inputs = values.lifted((torch.randn(3),))
    assert values.outputs(aten.relu.default, lifted, inputs) is not None
    inputs[0].fake = moved(values.factory, inputs[0].fake, torch.device("xla:0"))
    assert values.outputs(aten.relu.default, lifted, inputs) is None


MASKED = (aten.masked_fill_.Scalar, aten.masked_fill_.Tensor)
WRITES = sorted(
    {getattr(aten, f"{name}_").default for name in UNARY if hasattr(aten, f"{name}_")}
    | {getattr(aten, f"{name}_").Tensor for name in ("add", "sub", "mul", "div")}
    | {func for func in rules._UNTAGGED if func._schema.is_mutable and func not in MASKED},
    key=str,
)


@pytest.mark.sample(4)
@pytest.mark.parametrize("func", WRITES, ids=str)
def test_a_write_in_place_changes_values_alone(func):
    answers = 0
    values = Values()
    values.make_symbolic(2, 3, 4)
    for seed in range(300):
        if answers == 20:
            break
        args = elementwise(Draw(seed), func)
        lifted, inputs = values.lifted(args)
        inference = Inference(values.factory)
        key = inference.key_of_call(func, lifted, {})
        if overlaps_itself(args[0]) or inference.infer(key, func, lifted, {}, inputs) is None:
            continue  # the recorder refuses to write to what overlaps itself before it asks
        answers += 1
        before = facts(args[0], [])
        assert func(*args) is args[0]
        assert facts(args[0], []) == before, (seed, args)
    assert answers > 4


def test_the_recorder_asks_before_it_lets_torch_run_an_elementwise_write():
    assert [func for func in WRITES if not OpFacts(func).in_place] == []


def overlaps_itself(t: torch.Tensor) -> bool:
    return any(s == 0 and n > 1 for n, s in zip(t.shape, t.stride(), strict=True))


# ---------------------------------------------------------------- the cache


def run(inference: Inference, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an op gives, as passes over tapes ask for it."""
    inferred, out = inference.run(func, args, kwargs, values_in((args, kwargs)))
    return out if inferred is None else inferred[0].contained(inferred[1])


class Counting(Values):
    """Values, an `Inference`, and how many ops it let torch run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.inference = Inference(self.factory)
        self.count = 0
        monkeypatch.setattr("scopetrace.infer.inference.run_fake", self._run_fake)
        monkeypatch.setattr("scopetrace.infer.inference._of_torch", _Cache())

    def _run_fake(self, *args: Any, **checked: Any) -> Any:
        self.count += not checked  # `grad=` is of the comparison with torch
        return run_fake(*args, **checked)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run(self.inference, func, args, kwargs)

    def torchs(self, func: Any, args: tuple[Any, ...]) -> Any:
        """What torch itself gives."""
        return run_fake(self.factory.mode, func, pytree.tree_map_only(Value, lambda v: v.fake, args), {})


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    return Counting(monkeypatch)


def all_facts(out: Any, inputs: list[torch.Tensor]) -> Any:
    several = isinstance(out, (list, tuple))
    return type(out), [facts(t, inputs) for t in (out if several else [out])]


CALLS = {
    "relu": (aten.relu.default, lambda x: (x,)),
    "promotion": (aten.add.Tensor, lambda x: (x.to(torch.int32), 1)),
    "two layouts": (aten.add.Tensor, lambda x: (x, torch.randn(6, 4).t())),
    "slice": (aten.slice.Tensor, lambda x: (x, 1, 1, 5, 2)),
    "select of a view": (aten.select.int, lambda x: (x[1:], 0, 1)),
    "split": (aten.split.Tensor, lambda x: (x, 2)),
    "unbind": (aten.unbind.int, lambda x: (x,)),
    "reshape that copies": (aten.reshape.default, lambda x: (x.t(), [-1])),
    "reshape that is a view": (aten.reshape.default, lambda x: (x, [-1])),
    "another dtype": (aten.view.dtype, lambda x: (x, torch.int32)),
    "itself": (aten.contiguous.default, lambda x: (x,)),
    "scatter": (aten.slice_scatter.default, lambda x: (x, torch.randn(4, 2), 1, 0, 2)),
    "no tensor": (aten.scalar_tensor.default, lambda x: (1.5,)),
    "several": (aten.max.dim, lambda x: (x, 1)),
    "gradient": (aten.mul.Tensor, lambda x: (x.requires_grad_(), 2.0)),
    "view with gradient": (aten.select.int, lambda x: (x.requires_grad_(), 0, 1)),
}


@pytest.mark.parametrize("name", CALLS)
def test_made_again_as_run(counting: Counting, name: str) -> None:
    func, make = CALLS[name]
    for _ in range(3):
        args, inputs = counting.lifted(make(torch.randn(4, 6)))
        fakes = [v.fake for v in inputs]
        expected = counting.torchs(func, args)
        assert all_facts(counting.run(func, args, {}), fakes) == all_facts(expected, fakes)


def test_calls_of_equal_metadata_run_once(counting: Counting) -> None:
    for _ in range(5):
        counting.run(aten.cumsum.default, (counting.value(torch.randn(4, 6)), 1), {})
    assert counting.count == 1


def test_what_torch_gives_for_fixed_sizes_is_known_to_later_traces(counting: Counting) -> None:
    x = counting.value(torch.randn(4, 6))
    for _ in range(3):
        run(Inference(counting.factory), aten.cumsum.default, (x, 1), {})
    assert counting.count == 1


def test_what_others_ops_give_is_known_in_one_trace_alone(counting: Counting) -> None:
    with torch.library._scoped_library("infer_test", "DEF") as library:
        library.define("grow(Tensor x) -> Tensor")
        library.impl("grow", lambda x: torch.cat([x, x]), "Meta")
        grow, x = torch.ops.infer_test.grow.default, counting.value(torch.randn(4, 6))
        for inference in (Inference(counting.factory), Inference(counting.factory)):
            for _ in range(3):
                run(inference, grow, (x,), {})
    assert counting.count == 2


def test_numbers_of_symbolic_sizes_mean_nothing_in_another_trace() -> None:
    class Two(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.cumsum(x, 0).sum() + y.cumsum(0).sum()

    dims = {"x": {0: torch.export.Dim.DYNAMIC}, "y": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}}
    for first, second in (((4, 3), (5, 6)), ((7, 2), (8, 9)), ((4, 3), (8, 9))):
        args = torch.randn(first), torch.randn(second)
        trace = st.trace(Two(), args, dynamic_shapes=dims)
        other = torch.randn(11, first[1]), torch.randn(12, 13)
        torch.testing.assert_close(trace(*other), Two()(*other))


def test_strides_follow_the_backend_that_is_enabled() -> None:
    class Attend(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> tuple[torch.Tensor, bool, bool]:
            flash = torch.nn.functional.scaled_dot_product_attention(q, q, q)
            with sdpa_kernel(SDPBackend.MATH):
                plain = torch.nn.functional.scaled_dot_product_attention(q, q, q)
            return flash + plain, flash.is_contiguous(), plain.is_contiguous()

    q = torch.randn(2, 4, 8, 16).transpose(1, 2)
    with torch.no_grad():
        assert Attend()(q)[1:] == (False, True)
        for _ in range(2):
            assert st.trace(Attend(), (q,))(q)[1:] == (False, True)


def test_calls_that_differ_run_each(counting: Counting) -> None:
    x, i = counting.value(torch.randn(4, 3)), counting.value(torch.arange(3))
    for args in [(i, 1), (i, 1.0), (i, True), (x, i), (i, x)]:
        out = counting.run(aten.add.Tensor, args, {})
        assert out.dtype == counting.torchs(aten.add.Tensor, args).dtype
    assert counting.count == 5


def test_what_a_rule_knows_is_not_run(counting: Counting) -> None:
    x = counting.value(torch.randn(4, 6))
    for func, args in [(aten.permute.default, (x, [1, 0])), (aten.transpose.int, (x, 0, 1))]:
        out = counting.run(func, args, {})
        assert facts(out, [x.fake]) == facts(counting.torchs(func, args), [x.fake])
    assert counting.count == 0


def test_what_torch_says_of_plain_sizes_serves_symbolic_ones(counting: Counting) -> None:
    x = counting.value(torch.randn(4, 6))
    counting.make_symbolic(4)
    y = counting.value(torch.randn(4, 6))
    for func in (aten.relu.default, aten.exp.default):
        counting.run(func, (x,), {})
        out = counting.run(func, (y,), {})
        assert facts(out, [y.fake]) == facts(counting.torchs(func, (y,)), [y.fake])
    assert counting.count == 2


def test_results_with_gradients_are_not_those_without(counting: Counting) -> None:
    """Recording infers with autograd on, passes without it."""
    counting.make_symbolic(4)
    x = counting.value(torch.randn(4, requires_grad=True))
    key = counting.inference.key_of_call(aten.relu.default, (x,), {})
    found = counting.inference.infer(key, aten.relu.default, (x,), {}, [x])
    assert found is not None and found[1][0].requires_grad
    assert not counting.run(aten.relu.default, (x,), {}).requires_grad


def test_the_second_of_two_arguments_that_share_memory(counting: Counting) -> None:
    """Which argument a result is a view of must not be cached where both are the same memory."""
    x, y = counting.value(torch.randn(4)), counting.value(torch.randn(4))
    counting.run(aten.view_as.default, (x, x), {})
    out = counting.run(aten.view_as.default, (x, y), {})
    assert storage_id(out) == storage_id(x.fake)
    out = counting.run(aten.view_as.default, (y, x), {})
    assert storage_id(out) == storage_id(y.fake)


def test_sizes_that_depend_on_data_are_symbols_of_their_own(counting: Counting) -> None:
    found = [counting.run(aten.nonzero.default, (counting.value(torch.ones(4)),), {}).shape[0] for _ in "ab"]
    assert str(found[0]) != str(found[1])


def test_layers_that_repeat_give_equal_results() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            y.relu_()
            y[:, 1:3] += x[:, :2]
            y.t().mul_(0.5)
            return y.add_(x)

    net = torch.nn.Sequential(*(Layer() for _ in range(4)))
    for grad in (True, False):
        x = torch.randn(4, 6, requires_grad=grad)
        tr = st.trace(net, (x,))
        tr.lint()
        tr.check((x,))


# ---------------------------------------------------------------- SCOPETRACE_CHECK=1


@pytest.fixture
def checking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCOPETRACE_CHECK", "1")


@pytest.mark.usefixtures("checking")
def test_a_rule_for_the_size_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rules.RULES, aten.relu.default, lambda x: (x.fake.size(0) // 5 * 5, 4))
    with pytest.raises(InferenceError, match=r"(?s)aten.relu.default.*size=\(s\d+, 4\).*inferred:.*torch:"):
        st.trace(lambda x: x.relu(), (torch.randn(5, 4),), dynamic_shapes={"x": {0: torch.export.Dim("n", min=2)}})


@pytest.mark.usefixtures("checking")
def test_wrong_strides_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_ROW_MAJOR", {aten.relu.default})
    with pytest.raises(InferenceError, match=r"aten\.relu\.default"):
        st.trace(lambda x: x.t().relu(), (torch.randn(5, 4),), dynamic_shapes={"x": {0: torch.export.Dim("n", min=2)}})


@pytest.mark.usefixtures("checking")
def test_a_wrong_answer_of_the_cache_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scopetrace.infer.inference._of_torch", _Cache())
    values = Values()
    inference = Inference(values.factory)
    x, y = values.value(torch.randn(4)), values.value(torch.randn(5))
    key = inference.key_of_call(aten.cumsum.default, (x, 0), {})
    inference.cache_result(key, [x], y.fake)
    with pytest.raises(InferenceError):
        inference.infer(key, aten.cumsum.default, (x, 0), {}, [x])


@pytest.mark.usefixtures("checking")
def test_a_write_that_changes_more_than_values_is_found() -> None:
    values = Values()
    x = values.value(torch.randn(4, 6))
    compare(values.factory, aten.relu_.default, (x,), {}, [x], None, [x.fake])
    with pytest.raises(InferenceError):
        compare(values.factory, aten.t_.default, (x,), {}, [x], None, [x.fake])


def test_an_op_that_returns_its_input_after_it_was_made_to_require_grad(monkeypatch):
    monkeypatch.setenv("SCOPETRACE_CHECK", "0")
    asked = []
    note = asked.append  # a list that the forward names would be put back

    def forward(x):
        quiet = x.detach().to(x.dtype).view(-1)
        leaf = x.detach().requires_grad_()
        note(quiet.requires_grad)
        note(leaf.to(leaf.dtype).view(-1).requires_grad)
        return x * 2

    x = torch.ones(3, 5, requires_grad=True)
    st.trace(forward, (x,))
    st.trace(forward, (x,))
    assert asked == [False, True] * 2


@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 2)])
def test_an_op_in_place_of_two_tensors_and_then_of_one_twice(shape):
    def step(apart, x):
        def region(u):
            t = u * 3
            return t.add_(u + 0 if apart else t).sin()  # in a region autograd sees the write

        return checkpoint(region, x, use_reentrant=False).sum()

    for apart in (True, False):

        def gradient(x, apart=apart):
            return torch.autograd.grad(step(apart, x), x)[0]

        x = torch.rand(shape, requires_grad=True)
        torch.testing.assert_close(st.trace(gradient, (x,))(x), gradient(x))
