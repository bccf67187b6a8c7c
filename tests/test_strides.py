"""How tensors lie in memory, as `ops.views` says it, against torch: all small tensors, in all layouts."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import scopetrace as st
from scopetrace._compat import symbols
from scopetrace._compat.tensors import FakeFactory, storage_id
from scopetrace.infer.inference import Inference
from scopetrace.ir.tape import Value
from scopetrace.ops import views
from scopetrace.ops.views import TO_THE_END, Reshape, view_arguments

aten = torch.ops.aten


def tensors() -> Iterator[torch.Tensor]:
    """Sizes 1 to 3 in up to three dimensions: in each order in memory, with gaps, expanded, after other elements."""
    yield torch.empty(())
    for rank in (1, 2, 3):
        for size in itertools.product((1, 2, 3), repeat=rank):
            for order in itertools.permutations(range(rank)):
                back = [order.index(d) for d in range(rank)]
                yield torch.empty([size[d] for d in order]).permute(back)
            yield torch.empty([2 * n for n in size])[tuple(slice(0, 2 * n, 2) for n in size)]
            yield torch.empty((size[0] + 1, *size[1:]))[1:]
            yield torch.empty((*size[:-1], size[-1] + 1))[..., :-1]
            yield torch.empty((1, *size[1:])).expand(size)


TENSORS = list(tensors())


def positions(t: torch.Tensor) -> list[int]:
    found = [0]
    for n, stride in zip(t.shape, t.stride(), strict=True):
        found = [p + i * stride for p in found for i in range(n)]
    return found


def test_row_major():
    for t in TENSORS:
        assert symbols.row_major_strides(t.shape) == torch.empty(t.shape).stride()


def test_dense_strides():
    """Dense: the elements fill their memory, each place once. Dimensions of one element may have any stride."""
    for t in TENSORS:
        found = views.dense_strides(t)
        assert (found is not None) == (sorted(positions(t)) == list(range(t.numel())))
        if found is not None:
            assert all(n == 1 or a == b for n, a, b in zip(t.shape, found, t.stride(), strict=True))


def test_strides_in_order_of():
    """`empty_like` keeps the order of dense tensors."""
    for t in TENSORS:
        found = views.strides_in_order_of(t.stride(), t.shape, int)
        assert found is None or found == t.stride()
        if found is not None:
            assert torch.empty_like(t).stride() == t.stride()
        assert found is not None or t.stride() != torch.empty(t.shape).stride()


def sizes_of(numel: int) -> Iterator[tuple[int, ...]]:
    """All sizes with this many elements and up to three dimensions."""
    divisors = [n for n in range(1, numel + 1) if numel % n == 0]
    for rank in (0, 1, 2, 3):
        yield from (size for size in itertools.product(divisors, repeat=rank) if math.prod(size) == numel)


def viewed(t: torch.Tensor, size: tuple[int, ...]) -> tuple[int, ...] | None:
    try:
        return t.view(size).stride()
    except RuntimeError:
        return None


def test_reshape_strides():
    for t in TENSORS:
        for size in sizes_of(t.numel()):
            assert views.reshape_strides(t, size) == viewed(t, size), (t.shape, t.stride(), size)


def dims(t: torch.Tensor) -> range:
    return range(-t.dim() - 1, t.dim() + 1)


ARGUMENTS = {
    aten.permute.default: lambda t: ((list(dims),) for dims in itertools.permutations(range(-1, t.dim() - 1))),
    aten.transpose.int: lambda t: itertools.product(dims(t), repeat=2),
    aten.swapaxes.default: lambda t: itertools.product(dims(t), repeat=2),
    aten.t.default: lambda t: [()],
    aten.mT.default: lambda t: [()],
    aten.unsqueeze.default: lambda t: ((d,) for d in range(-t.dim() - 2, t.dim() + 2)),
    aten.select.int: lambda t: itertools.product(dims(t), range(-3, 4)),
    aten.slice.Tensor: lambda t: itertools.product(
        dims(t), (None, 0, 1, -1, 9), (None, 1, 2, -1, 0, TO_THE_END), (1, 2)
    ),
    aten.narrow.default: lambda t: itertools.product(dims(t), (0, 1), (1, 2)),
    aten.expand.default: lambda t: (
        (size,) for size in ([2, *t.shape], [-1, *t.shape], [-1] * t.dim(), [n if n > 1 else 3 for n in t.shape])
    ),
    aten.unbind.int: lambda t: ((d,) for d in dims(t)),
    aten.reshape.default: lambda t: (
        (list(size),) for size in [*sizes_of(t.numel()), (-1,), (2, -1), (t.numel() + 1,)]
    ),
    aten.view.default: lambda t: ((list(size),) for size in [*sizes_of(t.numel()), (-1,), (2, -1), (t.numel() + 1,)]),
    aten.flatten.using_ints: lambda t: itertools.product(dims(t), repeat=2),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("func", ARGUMENTS, ids=str)
def test_a_view_is_that_of_eager(func, monkeypatch):
    monkeypatch.delenv("SCOPETRACE_CHECK")  # the comparison with fake tensors would take minutes
    factory = FakeFactory()
    inference = Inference(factory)
    known = 0
    for t in TENSORS[::3]:
        value = Value(factory.from_real(t), 0, 0, None)
        for args in ARGUMENTS[func](t):
            given = (value, *args)
            found = inference.infer((func, t, repr(args)), func, given, {}, [value])
            if found is not None:
                known += 1
                out = func(t, *args)  # does not raise
                assert found[0].container is (type(out) if isinstance(out, list) else None)
                results = out if isinstance(out, list) else [out]
                assert [facts(r, value.fake) for r in found[1]] == [facts(r, t) for r in results], (t.shape, args)
    assert known > 10


def facts(view: torch.Tensor, base: torch.Tensor) -> tuple[Any, ...]:
    shared = storage_id(view) == storage_id(base)
    return tuple(view.shape), view.stride(), view.storage_offset(), shared, view is base


@pytest.mark.parametrize("func", ARGUMENTS, ids=str)
def test_a_view_lies_where_that_of_eager_does(func):
    known = 0
    for t in TENSORS[::3]:
        for args in ARGUMENTS[func](t):
            view = view_arguments(func, t.shape, args)
            found = None if view is None else views.place_view(t, view)
            if found is None:
                continue
            known += 1
            out = func(t, *args)  # does not raise
            several = isinstance(found, list)
            assert several == isinstance(out, list)
            places = [(place.size, place.stride, place.offset) for place in (found if several else [found])]
            results = [
                (tuple(r.shape), r.stride(), r.storage_offset() - t.storage_offset())
                for r in (out if several else [out])
            ]
            if 0 not in results[0][0]:  # strides of empty tensors are left to torch
                assert places == results, (t.shape, t.stride(), args)
            assert out is not t
    assert known > 10


def test_a_size_with_minus_one():
    assert view_arguments(aten.view.default, (2, 3, 4), ((-1, 6),)) == Reshape((4, 6))
    assert view_arguments(aten.view.default, (2, 3, 4), ((-1, 5),)) is None
    assert view_arguments(aten.view.default, (2, 3), ((-1, -1),)) is None
    assert view_arguments(aten.view.default, (2, 3), ((7,),)) is None


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(x.shape[0], x.shape[1], 3, 2, 4).unbind(dim=-3),
        lambda x: x.view(x.shape[0], -1, 3, 2, 4).select(2, 1).unsqueeze(0).permute(1, 0, 3, 2, 4),
    ],
)
def test_a_view_fixes_no_symbolic_size(view):
    """Also where the example's size is that of a fixed dimension."""
    sizes = {0: torch.export.Dim("batch", min=2), 1: torch.export.Dim("length", min=2)}
    st.trace(view, (torch.randn(3, 16, 24),), dynamic_shapes=(sizes,))


LAYOUTS = {
    "transposed": lambda: torch.rand(3, 6, 5).transpose(1, 2),
    "matrix": lambda: torch.rand(5, 4).t(),
    "turned": lambda: torch.rand(6, 5, 3).permute(2, 1, 0),
    "outer": lambda: torch.rand(5, 2, 3, 4).transpose(0, 1),
    "channels_last": lambda: torch.rand(2, 5, 3, 4).contiguous(memory_format=torch.channels_last),
    "channels_last_3d": lambda: torch.rand(2, 5, 3, 4, 2).contiguous(memory_format=torch.channels_last_3d),
    "gaps": lambda: torch.rand(2, 10, 3, 8)[:, ::2, :, ::2],
    "channels_last with gaps": lambda: torch.rand(2, 3, 8, 10)[..., ::2].permute(0, 3, 1, 2),
    "expanded": lambda: torch.rand(1, 5).expand(4, 5),
    "plain": lambda: torch.rand(4, 5, 6),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch_norm_gives_the_memory_format_that_its_input_suggests(layout, grad, dynamic):
    """Torch's fake tensors keep the order of the dimensions of a transposed input, as kernels of other devices do."""

    class Normalize(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(5))
            self.register_buffer("mean", torch.rand(5))
            self.register_buffer("var", torch.rand(5))

        def forward(self, x):
            stats = self.mean, self.var, self.weight, None
            y = torch.nn.functional.batch_norm(x, *stats, training=self.training)
            return y * 2 if y.is_contiguous() else y * 3

    for training in (True, False):
        model, x = Normalize().train(training), LAYOUTS[layout]()
        with torch.set_grad_enabled(grad):
            wanted = copy.deepcopy(model)(x)
            shapes = {"x": {0: torch.export.Dim.DYNAMIC}} if dynamic else None
            found = st.trace(model, (x,), dynamic_shapes=shapes)(x)
        torch.testing.assert_close(found, wanted)
        assert found.stride() == wanted.stride()


def test_a_step_through_a_view_of_a_normalized_transposed_tensor():
    norm = torch.nn.BatchNorm1d(5)

    def step(x):
        norm(x.transpose(1, 2)).view(3, 30).square().sum().backward()

    x = torch.rand(3, 6, 5, requires_grad=True)
    trace = st.trace(step, (x,))
    trace(x)
    found, x.grad = x.grad, None
    step(x)
    torch.testing.assert_close(found, x.grad)
    assert found.stride() == x.grad.stride()


TWO = torch.tensor(2.0)
OF_KERNELS = {
    "copysign": lambda x: torch.copysign(x, TWO),
    "floor_divide": lambda x: x // TWO,
    "div": lambda x: torch.div(x, TWO, rounding_mode="floor"),
    "one_hot": lambda x: torch.nn.functional.one_hot((x > 0).long(), 2),
    "floor_divide of a row": lambda x: x // x[..., :1, :],
    "2 ** x": lambda x: 2**x,
    "normal": lambda x: torch.normal(x, x.detach() + 1),
    "rrelu": lambda x: torch.nn.functional.rrelu(x - 0.5, training=True),
    "isin": lambda x: torch.isin(x, TWO),
    "roll": lambda x: x.roll(1, 1),
    "channel_shuffle": lambda x: torch.nn.functional.channel_shuffle(x, 5),
    "max_unpool2d": lambda x: torch.nn.functional.max_unpool2d(x[:, :, :1, :1], torch.zeros(2, 5, 1, 1).long(), 2),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("layout", ["matrix", "turned", "channels_last", "outer", "gaps"])
@pytest.mark.parametrize("name", OF_KERNELS)
def test_results_lie_as_kernels_of_the_cpu_leave_them(name, layout, grad):
    """Torch's fake tensors leave them in another order, and `contiguous()` gives a tensor itself or a copy."""

    def forward(x):
        y = OF_KERNELS[name](x)
        return y, y.contiguous().sub_(1) if y.dtype != torch.bool else y.stride()

    x = LAYOUTS[layout]()
    if name in ("channel_shuffle", "max_unpool2d") and (x.dim() != 4 or layout == "outer"):
        return
    x.requires_grad_(grad)
    torch.manual_seed(0)
    wanted = forward(x)
    tr = st.trace(forward, (x,))
    torch.manual_seed(0)
    found = tr(x)
    torch.testing.assert_close(found, wanted)
    assert found[0].stride() == wanted[0].stride()


PARTS = {
    "log_sigmoid_forward": lambda x, y: aten.log_sigmoid_forward(x),
    "log_sigmoid_backward": lambda x, y: aten.log_sigmoid_backward(x, y, y.abs()),
    "_log_softmax_backward_data": lambda x, y: aten._log_softmax_backward_data(x, y, -1, torch.float32),
    "hardtanh_backward": lambda x, y: aten.hardtanh_backward(x, y, -1.0, 1.0),
    "hardswish_backward": aten.hardswish_backward,
    "logit_backward": lambda x, y: aten.logit_backward(x, y, 0.1),
    "softplus_backward": lambda x, y: aten.softplus_backward(x, y, 1.0, 20.0),
    "native_dropout_backward": lambda x, y: aten.native_dropout_backward(x, y > 0, 2.0),
    "huber_loss_backward": lambda x, y: aten.huber_loss_backward(x, y, y, 0, 1.0),
    "native_layer_norm_backward": lambda x, y: aten.native_layer_norm_backward(
        x, y, [4, 6], torch.rand(3, 1, 1), torch.rand(3, 1, 1), torch.rand(4, 6), torch.rand(4, 6), [True] * 3
    ),
    "native_batch_norm_backward": lambda x, y: aten.native_batch_norm_backward(
        x, y, torch.rand(4), torch.rand(4), torch.rand(4), torch.rand(4), torch.rand(4), True, 1e-5, [True] * 3
    ),
}


@pytest.mark.parametrize("turned", ["neither", "first", "second", "both"])
@pytest.mark.parametrize("name", PARTS)
def test_results_of_parts_of_ops_lie_as_kernels_of_the_cpu_leave_them(name, turned):
    """A step has these ops, of which torch.nn.functional.logsigmoid and the engine of autograd are made."""
    x, y = torch.rand(3, 4, 6), torch.rand(3, 4, 6)
    x = x.mT.contiguous().mT if turned in ("first", "both") else x
    y = y.mT.contiguous().mT if turned in ("second", "both") else y
    wanted = PARTS[name](x, y)
    graph = st.trace(PARTS[name], (x, y)).graph_module.graph
    values = [node.meta["val"] for node in graph.output_node().all_input_nodes]
    assert [t.stride() for t in values] == [t.stride() for t in pytree.tree_leaves(wanted)]


class Views(torch.nn.Module):
    def forward(self, x):
        return x.view(3, -1) * 2


@torch.library.custom_op("test_strides::in_memory", mutates_args=())
def in_memory(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((x.numel(),), (1,)).clone()


in_memory.register_fake(lambda x: x.new_empty(x.numel()))
LSTM, GROUP_NORM = torch.nn.LSTM(4, 4), torch.nn.GroupNorm(5, 5)
COUNT_ON_A_LAYOUT = {
    "lstm": lambda y: LSTM(y)[0],  # mkldnn_rnn_layer
    "group_norm": lambda y: GROUP_NORM(y),  # native_group_norm, and its backward
    "leaf": Views(),
    "custom op": in_memory,
}
WRITES = {
    "index_add_": lambda y: y.index_add_(1, torch.tensor([0, 0]), torch.ones(5, 2, 4)),
    "index_copy_": lambda y: y.index_copy_(1, torch.tensor([0, 1]), torch.ones(5, 2, 4)),
    "renorm_": lambda y: y.renorm_(2, 0, 1.0),
}


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", COUNT_ON_A_LAYOUT)
def test_kernels_that_count_on_a_layout_get_it_after_a_write(name, write, trains):
    """`index_add_` leaves its argument where it lies, and the result of `index_add` lies in another order."""

    def forward(x):
        y = WRITES[write](x.transpose(0, 1).clone()).transpose(0, 1)  # contiguous
        y = COUNT_ON_A_LAYOUT[name](y)
        if trains:
            x.grad = None
            y.square().sum().backward()
        return y, x.grad

    x = torch.rand(3, 5, 4, requires_grad=trains)
    if trains and name in ("leaf", "custom op"):
        return
    tr = st.trace(forward, (x,), leaf_modules=[Views])
    torch.testing.assert_close(tr(x), forward(x))
