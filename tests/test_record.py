"""Recording: which ops, on what, and what Python may ask of tensors."""

import pickle
import queue
import sys

import pytest
import torch
from torch import nn

import scopetrace as st
from scopetrace.record import ops as recorder

aten = torch.ops.aten
F = nn.functional


def targets(tr):
    return [str(n.target) for n in tr.graph_module.graph.nodes if n.op == "call_function"]


def traced(fn, *args, **kwargs):
    tr = st.trace(fn, args, kwargs)
    tr.lint()
    tr.check(args, kwargs)
    return tr


class Composite(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.LayerNorm(8)
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        y = self.conv(x).flatten(2).transpose(1, 2)
        y = self.fc(self.norm(y))
        return F.scaled_dot_product_attention(y, y, y)


def test_the_ops_are_those_of_torch_export():
    net, x = Composite(), torch.randn(1, 3, 8, 8)
    exported = torch.export.export(net, (x,))
    expected = [str(n.target) for n in exported.graph.nodes if n.op == "call_function"]
    assert (
        targets(traced(net, x))
        == expected
        == [
            "aten.conv2d.default",
            "aten.flatten.using_ints",
            "aten.transpose.int",
            "aten.layer_norm.default",
            "aten.linear.default",
            "aten.scaled_dot_product_attention.default",
        ]
    )


def test_module_stack_and_stack_trace_are_those_of_torch_export():
    net, x = nn.Sequential(Composite()), torch.randn(1, 3, 8, 8)
    ours = [n for n in traced(net, x).graph_module.graph.nodes if n.op == "call_function"]
    theirs = [n for n in torch.export.export(net, (x,)).graph.nodes if n.op == "call_function"]
    for a, b in zip(ours, theirs, strict=True):
        assert a.meta["nn_module_stack"] == b.meta["nn_module_stack"]
        assert a.stack_trace == b.stack_trace


def test_meta_device_models_need_no_memory():
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(100_000, 100_000), nn.ReLU())
        x = torch.empty(1, 100_000)
    tr = st.trace(net, (x,))
    assert targets(tr) == ["aten.linear.default", "aten.relu.default"]
    assert tr(x).device.type == "meta"


def test_weights_are_the_models_own():
    net, x = nn.Linear(2, 2), torch.randn(1, 2)
    tr = traced(net, x)
    assert tr.graph_module.weight is net.weight
    with torch.no_grad():
        net.weight.mul_(3)
    torch.testing.assert_close(tr(x), net(x))
    tr(x).sum().backward()
    assert net.weight.grad is not None


def test_multiple_results():
    tr = traced(lambda x: (x.split(1), torch.max(x, 0)), torch.randn(2, 3))
    assert targets(tr)[:3] == ["aten.split.Tensor", "<built-in function getitem>", "<built-in function getitem>"]


@pytest.mark.parametrize("grad", [True, False])
def test_autograd_mode_inside_the_model(grad):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x):
            with torch.no_grad():
                a = self.fc(x)
            with torch.enable_grad():
                b = self.fc(x)
            return a, b, self.fc(x)

    x = torch.randn(1, 2)
    net = Net()
    with torch.set_grad_enabled(grad):
        tr = traced(net, x)
        assert [t.requires_grad for t in tr(x)] == [t.requires_grad for t in net(x)] == [False, True, grad]


def test_gradients_are_those_of_the_model():
    net, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 1)), torch.randn(4, 3)
    tr = traced(net, x)
    net(x).sum().backward()
    expected = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    tr(x).sum().backward()
    for p, g in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g)


def test_autocast_is_recorded_as_casts():
    net, x = nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1)), torch.randn(1, 2)

    def run(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return net(x) @ net(x).T, torch.einsum("ij,kj->ik", x, x)

    tr = traced(run, x)
    assert "aten.linear.default" in targets(tr) and "aten.to.dtype" in targets(tr)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ambient = st.trace(net, (x,))
        expected, actual = net(x), ambient(x)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected)
    with pytest.raises(st.errors.StateMismatchError, match=r"torch.autocast.*bfloat16"):
        ambient(x)  # the model gives float32 here


def test_training_mode_batch_norm_updates_the_models_buffers():
    net, x = nn.BatchNorm1d(3).train(), torch.randn(4, 3)
    tr = st.trace(net, (x,), functional=False)
    assert net.num_batches_tracked == 0
    tr.check((x,))
    tr(x)
    assert net.num_batches_tracked == 1 and net.running_mean.abs().sum() > 0


STATISTICS = {
    "twice": lambda x, m, v: F.batch_norm(F.batch_norm(x, m, v, training=True), m, v, training=True),
    "read between": lambda x, m, v: (
        F.batch_norm(x, m, v, training=True) * m,
        F.batch_norm(x + m, m, v, training=True),
    ),
    "training and not": lambda x, m, v: F.batch_norm(F.batch_norm(x, m, v, training=True), m, v),
    "with weights": lambda x, m, v: [F.batch_norm(x * i, m, v, v * 2, m - 1, True, 0.3) for i in (1, 2)],
    "rows of one tensor": lambda x, m, v: [
        (F.batch_norm(x * i, *(s := torch.stack((m, v))), training=True), s) for i in (1, 2)
    ],
    "copies": lambda x, m, v: [(F.batch_norm(x * i, a := m.clone(), v, training=True), a) for i in (1, 2)],
    "of channels last": lambda x, m, v: [
        F.batch_norm(x.reshape(2, 2, 3, 1).permute(0, 2, 1, 3) * i, m, v, training=True) for i in (1, 2)
    ],
    "one is the input": lambda x, m, v: [F.batch_norm(x[i : i + 2], x[3], v, training=True) for i in (0, 1)],
}


OVERLAPPING = ("rows of one tensor", "one is the input")
"""An op that may read what it writes is run by torch each time."""


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", STATISTICS)
def test_the_second_batch_norm_of_equal_metadata_writes_its_statistics_as_the_first(name, grad, monkeypatch):
    runs, run_op = [], recorder.run_op
    monkeypatch.setattr(recorder, "run_op", lambda mode, func, *rest: runs.append(func) or run_op(mode, func, *rest))
    x = torch.randn(4, 3, requires_grad=grad and name != "one is the input")
    traced(STATISTICS[name], x, torch.randn(3), torch.rand(3) + 1)
    assert (runs.count(aten.batch_norm.default) > 1) is (name in OVERLAPPING)


def test_random_ops_draw_as_eager_does():
    def run(x):
        return F.dropout(x, 0.5) + torch.rand(3) + torch.randn_like(x) * torch.bernoulli(x.sigmoid())

    traced(run, torch.randn(3))


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x[x > 0],
        lambda x: x[(x > 0).nonzero().squeeze(1)] * 2,
        lambda x: torch.zeros((x > 0).nonzero().shape[0], 2) + 1,
        lambda x: x.new_ones(x.nonzero().size(0) * 2 + 1).cumsum(0),
        lambda x: torch.unique(x).shape[0],
    ],
)
def test_sizes_that_depend_on_data(run):
    tr = st.trace(run, (torch.tensor([1.0, -1.0, 2.0]),))
    tr.lint()
    for x in (torch.tensor([1.0, -1.0, 2.0]), torch.tensor([1.0, 1.0, 2.0]), torch.tensor([3.0, 4.0, -2.0])):
        torch.testing.assert_close(tr(x), run(x))


def test_a_branch_on_an_input_is_an_error_that_names_op_module_and_line():
    class Branch(nn.Module):
        def forward(self, x):
            if x.sum() > 0:
                return x
            return -x

    with pytest.raises(st.DataDependentError) as info:
        st.trace(nn.Sequential(Branch()), (torch.randn(2),))
    error = info.value
    assert error.op == "aten.is_nonzero.default"
    assert error.module == "Sequential/Branch[0]"
    assert error.source.endswith("in forward: if x.sum() > 0:") and "test_record.py" in error.source
    assert "torch.where" in error.hint


@pytest.mark.parametrize("read", [lambda t: int(t), lambda t: t.numpy(), lambda t: t.tolist(), lambda t: float(t)])
def test_other_reads_of_an_input_are_the_same_error(read):
    with pytest.raises(st.DataDependentError):
        st.trace(lambda x: x * int(read(x.sum())), (torch.randn(2),))


def test_reads_of_parameters_are_refused_too():
    net = nn.Linear(1, 1)
    with pytest.raises(st.DataDependentError):
        st.trace(lambda x: x * 2 if net.weight > 0 else x, (torch.randn(2),))


def test_values_of_constants_are_computed():
    table = torch.tensor([3, 1, 2])

    def run(x):
        for n in torch.arange(3).tolist():
            x = x + n
        steps = torch.zeros(4)
        steps[1] = 7
        if steps.sum() > 6 and torch.tensor([1, 2]).max().item() == 2 and table.sum() == 6:
            x = x * steps.max().item()
        return x

    assert targets(traced(run, torch.randn(2)))[-1] == "aten.mul.Tensor"


def test_constants_made_in_forward_are_new_at_each_run():
    def run(x):
        t = torch.tensor([1.0, 2.0])
        t += x
        return t

    tr = traced(run, torch.ones(2))
    torch.testing.assert_close(tr(torch.ones(2)), torch.tensor([2.0, 3.0]))
    torch.testing.assert_close(tr(torch.ones(2)), torch.tensor([2.0, 3.0]))


def test_vmap_and_grad_inside_the_model():
    w = torch.randn(3)

    def run(x):
        a = torch.vmap(lambda r: F.softmax(r * w, 0).sum() + r)(x)
        b = torch.func.grad(lambda t: (t * t * w).sum())(x)
        return a + b

    traced(run, torch.randn(2, 3))


def test_autograd_inside_the_forward():
    net = nn.Linear(2, 1)

    def forces(x):
        x = x.detach().requires_grad_()
        energy = net(x).square().sum()
        (grad,) = torch.autograd.grad(energy, x)
        return energy, grad

    x = torch.randn(3, 2)
    tr = st.trace(forces, (x,))
    for a, b in zip(tr(x), forces(x), strict=True):
        torch.testing.assert_close(a, b)


def without_grad(run, x):
    with torch.no_grad():
        return run(x)


@pytest.mark.parametrize(
    "run",
    [
        lambda x, w: x.mul(1).unbind(0)[0].add_(1) + w,
        lambda x, w: x.mul(w).view(-1).add_(1),
        lambda x, w: w.add_(1),
        lambda x, w: (x * w).chunk(2)[0][:1].add_(1),
        lambda x, w: without_grad(lambda y: y[:1], x * w).add_(1),
        lambda x, w: (x * w)[0].add_(w[0]),
    ],
)
def test_where_autograd_makes_eager_raise_so_does_the_trace(run):
    x, w = torch.randn(2, 2), torch.randn(2, 2, requires_grad=True)
    try:
        expected = run(x, w)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=str(error)[:30]):
            st.trace(run, (x, w))
    else:
        torch.testing.assert_close(st.trace(run, (x, w))(x, w), expected)


def test_errors_of_the_model_are_its_own_with_the_place_as_a_note():
    class Wrong(nn.Module):
        def forward(self, x):
            raise KeyError(x.size(0))

    with pytest.raises(KeyError) as info:
        st.trace(nn.Sequential(Wrong()), (torch.randn(2, 2),))
    assert type(info.value) is KeyError
    assert "Sequential/Wrong[0]" in info.value.__notes__[0]
    assert "raise KeyError(x.size(0))" in info.value.__notes__[0]


def test_a_tensor_of_another_trace_is_refused():
    kept = queue.SimpleQueue()  # in a list it would not be kept: see test_side_effects.py

    def keep(x):
        kept.put(x * 2)
        return x

    st.trace(keep, (torch.randn(2),))
    with pytest.raises(st.ForeignTensorError):
        st.trace(lambda x: x + kept.get(), (torch.randn(2),))


def test_seeding_inside_the_forward_is_refused():
    def run(x):
        torch.manual_seed(3)
        return x + torch.rand(2)

    x, before = torch.randn(2), torch.get_rng_state()
    with pytest.raises(st.RandomStateError, match=r"test_record\.py"):
        st.trace(run, (x,))
    assert torch.equal(before, torch.get_rng_state())


def test_lstm_and_complex_and_integer_arithmetic():
    lstm = nn.LSTM(3, 4, batch_first=True)
    traced(lstm, torch.randn(2, 5, 3))
    traced(
        lambda x: torch.fft.rfft(x).abs() + torch.view_as_real(torch.complex(x, x).conj().resolve_conj()).sum(),
        torch.randn(4),
    )
    traced(lambda i: i // 2 + (i << 1), torch.arange(5))


def test_marks_for_the_profiler_are_no_part_of_the_program():
    def forward(x):
        with torch.profiler.record_function("forward"):
            return x + 1

    assert targets(traced(forward, torch.randn(2))) == ["aten.add.Tensor"]
    traced(nn.DataParallel(nn.Linear(2, 2)), torch.randn(2, 2))  # which marks its forward


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_objects_that_ops_take_are_attributes_of_the_graph():
    """The packed weights of a quantized layer."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("torch was built without kernels for quantized layers")
    net, x = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear}), torch.randn(3, 4)
    tr = traced(net, x)
    assert "aten.to.dtype" in targets(tr)
    torch.testing.assert_close(pickle.loads(pickle.dumps(tr))(x), net(x))
    torch.testing.assert_close(tr.outline("0")(x), net(x))
    for other_form in (tr.to_exported_program, tr.to_onnx):
        with pytest.raises(st.ExportError, match=r"no tensor.*\n  op: quantized.linear_dynamic"):
            other_form()


def test_cost_per_op_is_flat():
    """Structure, not time: the tape has one op per op and nothing grows with the square."""

    def run(x):
        for _ in range(2000):
            x = x + 1
        return x

    tr = st.trace(run, (torch.randn(2),))
    assert len(tr.graph_module.graph.nodes) == 2002


DIFFERENTIATED = {
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([1, 2, 0])),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "linear": lambda x: F.linear(x, torch.ones(3, 4)),
    "conv1d": lambda x: F.conv1d(x, torch.ones(2, 3, 2)),
    "max_pool1d": lambda x: F.max_pool1d(x, 2),
    "lstm": nn.LSTM(4, 2),
    "encoder layer": nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
}


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_a_forward_that_differentiates_through_composite_ops(name):
    fn = DIFFERENTIATED[name]

    def gradient(x):
        out = fn(x)
        return torch.autograd.grad((out[0] if isinstance(out, tuple) else out).sum(), x)[0]

    x = torch.randn(3, 4, requires_grad=True)
    torch.testing.assert_close(st.trace(gradient, (x,))(x), gradient(x))


@pytest.mark.parametrize("shape", [(3, 5, 4), (5, 4), (3, 5, 1)])
@pytest.mark.parametrize("args", [(3, 1, 1), (1,), (1, 2)])
def test_pooled_memory_is_that_of_torch_s_kernel(shape, args):
    """Without gradients it is contiguous whatever the input is, so that `view` takes it; with them it is not."""
    x = torch.randn(shape)
    pooled = lambda x: F.max_pool1d(x.transpose(-1, -2), *args)  # noqa: E731
    for requires_grad in (False, True):
        x = x.detach().requires_grad_(requires_grad)
        y, expected = st.trace(pooled, (x,))(x), pooled(x)
        assert torch.equal(y, expected) and y.stride() == expected.stride()
    flat = st.trace(lambda x: pooled(x).view(-1), (x.detach(),))
    assert torch.equal(flat(x.detach()), pooled(x.detach()).view(-1))


@pytest.mark.parametrize("dims", [None, {0: torch.export.Dim("n", min=2)}])
def test_a_view_that_is_tried_first(dims):
    def flat(x):
        try:
            return x.t().view(-1)
        except RuntimeError:
            return x.t().reshape(-1) * 2

    tr = st.trace(flat, (torch.randn(2, 3),), dynamic_shapes=dims and (dims,))
    for x in (torch.randn(2, 3), torch.randn(5 if dims else 2, 3)):
        assert torch.equal(tr(x), flat(x))


def test_composite_ops_of_a_forward_that_does_not_differentiate_stay_whole():
    tr = st.trace(nn.LayerNorm(4), (torch.randn(3, 4, requires_grad=True),))
    assert [str(n.target) for n in tr.graph_module.graph.nodes if n.op == "call_function"] == [
        "aten.layer_norm.default"
    ]


def test_many_nested_modules():
    model = nn.Linear(2, 2)
    for _ in range(100):
        model = nn.Sequential(model)
    x, limit = torch.randn(1, 2), sys.getrecursionlimit()
    tr = st.trace(model, (x,))
    assert len(tr.calls) == 101
    torch.testing.assert_close(tr(x), model(x))
    assert sys.getrecursionlimit() == limit


def test_a_graph_module_that_has_not_run_yet():
    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.randn(1, 2)
    again = st.trace(st.trace(model, (x,)).graph_module, (x,))
    torch.testing.assert_close(again(x)[0], model(x))


def test_a_graph_of_dynamo():
    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.randn(1, 2)
    compiled = torch.compile(model, backend=lambda gm, inputs: st.trace(gm, tuple(inputs)))
    torch.testing.assert_close(compiled(x), model(x))
