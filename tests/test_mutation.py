"""Graphs without mutation: what they print, and that they do what eager does."""

import copy
import queue

import pytest
import torch
from compare import assert_like_eager, assert_same_gradients, sharing
from torch import nn

import scopetrace as st
from scopetrace.program.traced import TracedProgram

F = nn.functional
aten = torch.ops.aten


def targets(tr):
    return [str(n.target) for n in tr.graph_module.graph.nodes if n.op == "call_function"]


def pure(fn, *args):
    tr = st.trace(fn, args)
    tr.lint()
    tr.check(args)
    for node in tr.graph_module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        assert schema is None or not schema.is_mutable, node
    return tr


def test_a_write_to_a_slice_of_a_cache_is_one_scatter():
    def step(cache, k, pos=2):
        cache[:, :, pos : pos + 1] = k
        return cache.sum()

    tr = pure(step, torch.zeros(1, 2, 8, 4), torch.randn(1, 2, 1, 4))
    assert targets(tr).count("aten.slice_scatter.default") == 1
    assert str(tr.write_back) == "cache.copy_(graph[0])\nresult[0] = graph[1]"


def test_writes_that_follow_each_other_on_one_view_cost_one_scatter():
    def run(x):
        z = x * 1
        row = z[0]
        row.add_(1)
        row.mul_(2)
        row.sub_(3)
        return z

    assert targets(pure(run, torch.randn(3, 4))).count("aten.select_scatter.default") == 1


@pytest.mark.parametrize("options", [{}, {"tol": 0.1}, {"atol": 0.1}, {"rtol": torch.tensor(0.1)}])
def test_out_of_matrix_rank_of_which_torchs_rule_makes_a_new_tensor(options):
    def run(x, ranks):
        rank = torch.linalg.matrix_rank(x, out=ranks[0], **options)
        rank.add_(1)
        return rank, ranks + 1

    pure(run, torch.randn(2, 3, 3), torch.zeros(2, 2, dtype=torch.int64))


def test_results_share_memory_as_in_eager():
    def run(x):
        z = x * 1
        a, b = z[:, :2], z[:, 1:3]
        a.add_(1)
        b.mul_(2)
        return z, a, b, x, x[0]

    tr = pure(run, torch.randn(3, 4))
    x = torch.randn(3, 4)
    z, a, b, same, row = tr(x)
    assert same is x and row.data_ptr() == x.data_ptr()
    assert a.data_ptr() == z.data_ptr() and b.data_ptr() == z[:, 1:].data_ptr()
    assert [str(alias) for alias in tr.aliases] == [
        "result[0]: fresh",
        "result[1]: view of result[0]",
        "result[2]: view of result[0]",
        "result[3]: same of x",
        "result[4]: view of x",
    ]


@pytest.mark.parametrize(
    "run",
    [
        lambda x, y: x.add_(y),
        lambda x, y: x.t_().mul_(2),
        lambda x, y: torch.mul(x, y, out=x),
        lambda x, y: (torch._foreach_add_([x, y], 1.0), x * y)[1],
        lambda x, y: F.dropout(x, 0.0, True).add_(1),
        lambda x, y: F.relu(x.view(-1), inplace=True) + y.sum(),
        lambda x, y: x.expand(2, 3, 4).fill_(1.0).sum() + x,
        lambda x, y: x.unfold(0, 2, 3).mul_(2).sum() + x,
        lambda x, y: x.diagonal().copy_(y[0, :3]),
        lambda x, y: torch.view_as_complex(x.view(3, 2, 2)).mul_(2j).sum().abs() + x,
        lambda x, y: x.masked_fill_(y > 0, 3.0).index_add_(0, torch.tensor([0, 2]), y[:2]),
        lambda x, y: (x.unsqueeze_(0), y.copy_(x[0]))[1],
        lambda x, y: F.dropout(x, 0.5, True, inplace=True),
        lambda x, y: x[:, 0].bernoulli_(0.5) + y[:, 0],
    ],
)
def test_values_effects_and_sharing_are_those_of_eager(run):
    tr = pure(run, torch.randn(3, 4), torch.randn(3, 4))
    assert_like_eager(run, tr, (torch.arange(12.0).view(3, 4), -torch.arange(12.0).view(3, 4)))


@pytest.mark.parametrize("drop", [F.dropout, F.alpha_dropout, F.feature_alpha_dropout])
def test_dropout_in_place_is_no_op_where_it_drops_nothing(drop):
    tr = st.trace(lambda x: drop(x, 0.5, False, inplace=True) * 2, (torch.ones(2, requires_grad=True),))
    assert [node.name for node in tr.graph_module.graph.nodes] == ["x", "mul", "output"]


def test_training_updates_buffers_and_trains():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True)).train()
    x = torch.randn(2, 1, 5, 5)
    tr = pure(net, x)
    net(x).square().sum().backward()
    expected = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    tr(x).square().sum().backward()
    for p, g in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g)
    assert [m.name for m in tr.mutations] == ["1.num_batches_tracked", "1.running_mean", "1.running_var"]


def test_writes_hidden_from_autograd_keep_its_history():
    def run(x):
        z = x * 3
        with torch.no_grad():
            z[0].zero_()
        z.detach()[1] = 5.0
        return (z * z).sum()

    tr = pure(run, torch.randn(3, requires_grad=True))
    assert_same_gradients(run, tr, (torch.tensor([1.0, 2.0, 3.0], requires_grad=True),))


def test_gradients_flow_through_copies_into_views():
    def run(x):
        z = torch.zeros(2, 3, dtype=torch.float64)
        z[0] = x
        z[:, 1:].copy_(x[:2])
        return (z * z).sum()

    tr = pure(run, torch.randn(3, requires_grad=True))
    assert_same_gradients(run, tr, (torch.tensor([1.0, 2.0, 3.0], requires_grad=True),))


@pytest.mark.parametrize("dynamic", [None, ({0: torch.export.Dim("batch")},)])
def test_writes_into_views_of_what_carries_gradients_are_seen_in_one_run(dynamic):
    runs = queue.SimpleQueue()  # a number would be put back, and judged by running again

    def ghost(x):  # as in GhostNet: two halves side by side, of which one gets a shortcut
        runs.put(None)
        both = torch.cat([x.sin(), x.cos()], 1)
        half = both[:, :3]
        half += x.exp()
        both[:, 2:5].mul_(2)
        return (both * half.sum()).sum(1)

    tr = st.trace(ghost, (torch.randn(2, 3, requires_grad=True),), dynamic_shapes=dynamic)
    assert runs.qsize() == 1
    assert_same_gradients(lambda x: ghost(x).sum(), lambda x: tr(x).sum(), (torch.randn(2, 3, requires_grad=True),))


def test_custom_ops_that_say_what_they_mutate():
    @torch.library.custom_op("scopetrace_tests::accumulate", mutates_args={"total"})
    def accumulate(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        return x * 2

    @accumulate.register_fake
    def _(total, x):
        return torch.empty_like(x)

    tr = pure(lambda t, x: accumulate(t[0], x) + t.sum(), torch.zeros(2, 3), torch.randn(3))
    assert "auto_functionalized" in targets(tr)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda x: x.expand(2, 3).add_(1), "elements that share memory"),
        (lambda x: x[1:].add_(x[:-1]), "an input lies in the memory that is written"),
        (lambda x: x.index_copy_(0, torch.arange(2, -1, -1), x.view_as(x)), "an input lies in the memory"),
    ],
)
def test_what_has_no_meaning_of_its_own_is_refused(run, message):
    with pytest.raises((st.FunctionalizationError, RuntimeError), match=f"{message}|unsupported operation") as info:
        st.trace(run, (torch.randn(3),))
    if isinstance(info.value, st.FunctionalizationError):
        assert info.value.source is not None and "test_mutation.py" in info.value.source


def test_inputs_that_share_memory_only_at_the_call_are_refused():
    def run(a, c):
        a.add_(1)
        return c * 1

    x = torch.randn(3)
    tr = pure(run, x, x.clone())
    with pytest.raises(st.InputMismatchError, match="did not share memory"):
        tr(x, x)


def test_a_program_that_writes_nothing_goes_through_untouched():
    tr = st.trace(nn.Linear(2, 2), (torch.randn(1, 2),))
    assert tr.write_back is None and tr.mutations == []


def test_a_long_chain_of_writes_stays_linear():
    def run(x):
        for i in range(300):
            x[i % 3] += 1
            x.mul_(0.5)
        return x

    count = len(list(st.trace(run, (torch.randn(3, 4),)).graph_module.graph.nodes))
    assert count < 300 * 8


def test_custom_ops_with_a_registered_backward_keep_it():
    @torch.library.custom_op("scopetrace_tests::rounded", mutates_args=())
    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.round()

    rounded.register_fake(torch.empty_like)
    rounded.register_autograd(lambda ctx, g: g * 3)

    def run(x):
        return rounded(x * 2)

    tr = pure(run, torch.randn(3, requires_grad=True))
    assert "scopetrace_tests.rounded.default" in targets(tr)
    assert_same_gradients(run, tr, (torch.randn(3, requires_grad=True),))


def test_an_input_copied_into_another_is_copied_as_it_was():
    def f(x, y, z):
        y[...] = x
        z.copy_(x.mean(0, keepdim=True) * 0 + x)
        x.zero_()
        return y + 1

    args = (torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 3))
    assert_like_eager(f, st.trace(f, args), args)


def test_a_row_copied_into_another_input_before_the_first_changes():
    def f(x, y):
        y.copy_(x[0])
        x.mul_(2)
        return x

    args = (torch.randn(2, 3), torch.randn(4, 3))
    tr = st.trace(f, args)
    assert "copied" in str(tr.write_back)
    assert_like_eager(f, tr, args)


@pytest.mark.parametrize(
    "run",
    [
        lambda x, y: (y.copy_(x), x.add_(1))[1],
        lambda x, y: (y.copy_(x.t()), x.add_(1), y.view(-1))[2],
        lambda x, y: (y.copy_(x[0]), x.zero_())[0],
        lambda x, y: (y[:].copy_(x), x.copy_(y * 2))[1],
    ],
)
def test_an_old_value_is_taken_before_its_tensor_changes(run):
    args = torch.randn(3, 3), torch.randn(3, 3)
    assert_like_eager(run, pure(run, *args), args)


@pytest.mark.parametrize("view", [lambda y: y.view(9), lambda y: y.view_as(y.t().reshape(9)), torch.ravel])
def test_a_view_of_memory_whose_value_has_other_strides_now(view):
    def run(x, y):
        y.copy_(x.t())
        return view(y)

    args = torch.randn(3, 3), torch.randn(3, 3)
    assert_like_eager(run, pure(run, *args), args)


def bind_and_change(self, x):
    self.prev = self.cur
    self.cur.add_(x)


def bind_input(self, x):
    self.prev = x
    x.add_(1)


def bind_copy(self, x):
    self.prev = torch.empty_like(x).copy_(x)
    x.add_(1)


def copy_across(self, x):
    self.prev.copy_(self.cur)
    self.cur.add_(x)


@pytest.mark.parametrize("step", [bind_and_change, bind_input, bind_copy, copy_across], ids=lambda f: f.__name__)
def test_attributes_are_bound_to_the_tensors_of_eager(step):
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("prev", torch.zeros(3))
            self.register_buffer("cur", torch.ones(3))

        def forward(self, x):
            step(self, x)
            return x * 2

    eager, traced = Keeps(), Keeps()
    tr = st.trace(traced, (torch.zeros(3),))
    for value in (1.0, 2.0):
        x, y = torch.full((3,), value), torch.full((3,), value)
        torch.testing.assert_close(tr(x), eager(y))
        torch.testing.assert_close((x, *traced.buffers()), (y, *eager.buffers()))
        assert sharing(x, traced.prev, traced.cur) == sharing(y, eager.prev, eager.cur)


def test_an_attribute_keeps_the_strides_of_the_tensor_that_was_written():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.zeros(2, 3))

        def forward(self, x, y):
            self.kept = (x * 1).t()
            self.kept.copy_(y)
            return y * 2

    eager, traced, args = Keeps(), Keeps(), (torch.zeros(3, 2), torch.randn(2, 3))
    st.trace(traced, args)(*args)
    eager(*args)
    assert torch.equal(traced.kept, eager.kept)
    assert traced.kept.stride() == eager.kept.stride() == (1, 2)


def test_a_result_that_repeats_elements_keeps_its_strides():
    def run(x):
        x.add_(1)
        y = x.double()
        x.t_()
        return y.expand(2, *y.shape), (x * 2).expand(3, 2, 1)

    args = (torch.empty_strided((1, 2), (1, 1)).fill_(2.0),)
    assert_like_eager(run, pure(run, *args), args)


@pytest.mark.parametrize(
    "draw",
    [
        lambda z: F.dropout(z, 0.5, True),
        lambda z: F.dropout(z, 0.5, True, inplace=True),
        lambda z: z.normal_(),
        lambda z: torch.rand_like(z),
        lambda z: torch.normal(z, 1.0),
        lambda z: z.bernoulli_(0.75),
        lambda z: z.random_(3, 100),
        lambda z: z.random_(100),
    ],
)
def test_random_numbers_come_in_the_memory_order_of_eager(draw):
    def turned(x, y):
        z = x.t()
        z.copy_(y)
        return draw(z)

    def straight(x, y):
        x.copy_(y.t())
        return draw(x)

    args = torch.rand(8, 8), torch.rand(8, 8)
    for run in (turned, straight):
        assert_like_eager(run, st.trace(run, args), args)


def test_batch_norm_with_cumulative_averages():
    def make():
        torch.manual_seed(0)
        return nn.BatchNorm1d(4, momentum=None)

    eager, traced = make(), make()
    tr = st.trace(traced, (torch.randn(3, 4),))
    assert torch.nn.BatchNorm1d.forward is type(eager).forward and traced.num_batches_tracked == 0
    for _ in range(3):  # the share of a batch is another one each time
        x = torch.randn(3, 4)
        torch.testing.assert_close(tr(x), eager(x))
        torch.testing.assert_close(list(traced.buffers()), list(eager.buffers()))
    assert {m.name for m in tr.mutations} == {"num_batches_tracked", "running_mean", "running_var"}


def test_what_a_call_is_given_belongs_to_its_parent():
    class Relu(nn.Module):
        def forward(self, y):
            return y.relu()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = Relu()

        def forward(self, x):
            y = x * 1
            row = y[0]
            y.add_(1)
            return self.act(row)

    tr = st.trace(Net(), (torch.randn(3, 3),))
    tr.lint()
    assert (
        str(tr)
        == """\
Net: 4 ops, 2 module calls, 0 parameters
Net(x=%x: f32[3, 3]) -> %relu: f32[3]
  %mul: f32[3, 3] = aten.mul.Tensor(%x, 1)
  %add: f32[3, 3] = aten.add.Tensor(%mul, 1)
  %select: f32[3] = aten.select.int(%add, 0, 0)
  Relu[act](y=%select: f32[3]) -> %relu: f32[3]
    %relu: f32[3] = aten.relu(%select)"""
    )


@pytest.mark.parametrize("run", [lambda x: x.as_strided((2, 2), (1, 2)), lambda x: x[2:].as_strided((2, 2), (1, 2))])
def test_as_strided_without_offset_begins_where_its_tensor_does(run):
    def double(x):
        view = run(x)
        view.mul_(2)
        return view

    memory = torch.arange(20.0)
    tr = st.trace(double, (memory[5:15],))
    for x in (memory[5:15], memory[:10], memory[7:17]):
        assert_like_eager(double, tr, (x,))
        y = x.clone()
        assert tr(y).storage_offset() == run(y).storage_offset()


def row_of_zeros(x, w):
    y = torch.zeros(2, 3)
    y[0] = w
    y[1].copy_(x)
    y.relu_()
    return y * x


def same_by_to(x, w):
    y, z = x * 1, w * 1
    z.to(z.dtype).mul_(y)
    return z


def detached_and_scaled(x, w):
    y = x * w
    y.detach().mul_(2)
    return y * 1


@pytest.mark.parametrize("run", [row_of_zeros, same_by_to, detached_and_scaled])
def test_gradients_through_memory_that_gains_a_history(run):
    args = torch.tensor([1.0, -2.0, 3.0], requires_grad=True), torch.tensor([0.5, 2.0, -1.0], requires_grad=True)
    assert_same_gradients(run, pure(run, *args), args)


def test_results_that_share_memory_share_it_in_another_layout_too():
    def run(x):
        y = x + x
        y.triu_()  # its pure twin gives contiguous memory
        z = y.clone()
        return z[:, 1:], z.detach(), z

    assert_like_eager(run, pure(run, torch.rand(4, 3).t()), (torch.rand(4, 3).t(),))


def test_a_view_written_with_and_then_without_autograd_has_the_gradient_of_the_first_write():
    def forward(x, y):
        x = x * 1
        part = x[0]
        part.mul_(y)
        with torch.no_grad():
            part.mul_(3)
        return x * 1

    args = (torch.rand(2, 3, requires_grad=True), torch.rand(3, requires_grad=True))
    grads = [torch.autograd.grad(run(*args).sum(), args) for run in (forward, st.trace(forward, args))]
    torch.testing.assert_close(*grads)


def first_row_unseen(x, w):
    y = x * 1
    y.add_(w)
    with torch.no_grad():
        return y, y[0]


def strided_unseen(x, w):
    y = x * 1
    y.add_(w)
    with torch.no_grad():
        return y, y.as_strided((2,), (1,), 1)


def view_of_an_input_unseen(x, w):
    x.detach().mul_(2)
    with torch.no_grad():
        return x * w, x.view(-1)


@pytest.mark.parametrize("run", [first_row_unseen, strided_unseen, view_of_an_input_unseen])
def test_a_view_made_without_autograd_passes_no_gradient_on(run):
    args = torch.rand(2, 3, requires_grad=True), torch.rand(2, 3, requires_grad=True)

    def gradients(f):
        *_, view = f(*args)
        assert view.requires_grad and view.grad_fn is None  # as torch has it for views
        return torch.autograd.grad(view.sum(), args, allow_unused=True)

    assert gradients(run) == gradients(pure(run, *args)) == (None, None)


@pytest.mark.parametrize("alias", [torch.Tensor.detach, lambda t: t.data])
@pytest.mark.parametrize("write", [torch.Tensor.copy_, torch.Tensor.mul_, torch.Tensor.add_])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_what_is_written_into_a_detached_alias_has_no_gradient_for_the_tensor(alias, write, requires_grad):
    def run(x, w):
        y = x * 1
        write(alias(y), w)
        return y * x

    args = torch.rand(3, requires_grad=requires_grad), torch.rand(3, requires_grad=True)
    expected, found = run(*args), pure(run, *args)(*args)
    torch.testing.assert_close(found, expected)
    assert found.requires_grad == expected.requires_grad == requires_grad
    if requires_grad:
        gradients = [torch.autograd.grad(out.sum(), args, allow_unused=True) for out in (found, expected)]
        torch.testing.assert_close(*gradients)


class MovingAverage(torch.nn.Module):
    """As vector quantizers keep their codebook, in training and without no_grad."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        y = self.linear(x)
        self.mean.data.mul_(0.9).add_(y.sum(0), alpha=0.1)
        return y - self.mean


def test_a_buffer_that_is_written_through_data_requires_no_grad_afterwards():
    net, x = MovingAverage(), torch.rand(2, 3)
    other = copy.deepcopy(net)
    tr = st.trace(net, (x,))
    for _ in range(3):  # with a history, the second backward would go through the first graph again
        for run in (tr, other):
            run(x).square().sum().backward()
    assert net.mean.requires_grad is other.mean.requires_grad is False
    torch.testing.assert_close(net.mean, other.mean)
    torch.testing.assert_close(net.linear.weight.grad, other.linear.weight.grad)


def test_data_that_is_given_as_out_is_another_tensor_than_its_owner():
    def f(x):
        return torch.neg(x, out=x.data)

    def g(x):
        b = x.data
        torch._foreach_add_([b], 1)
        return b

    for fn in (f, g):
        x, y = torch.ones(3), torch.ones(3)
        result = st.trace(fn, (torch.ones(3),))(x)
        expected = fn(y)
        assert torch.equal(result, expected) and torch.equal(x, y)
        assert result is not x and expected is not y
        assert result.data_ptr() == x.data_ptr()


def test_a_tensor_that_is_two_inputs_and_changes_its_shape_in_place():
    def run(x, y):
        y.relu_()
        before = x.as_strided((2, 1), (1, 1), 1)  # in front of x, as `after` is behind it
        after = x.as_strided((1,), (1,), 9)
        y.unsqueeze_(0)
        return before, after

    whole = torch.randn(12)
    x, twin, other = whole[4:8], whole.clone()[4:8], whole.clone()[4:8]
    st.trace(run, (other, other))
    tr = st.trace(run, (x, x))  # which knows from the first one what the ops give
    torch.testing.assert_close(tr(twin, twin), run(x, x))
    assert twin.shape == x.shape == (1, 4)
    torch.testing.assert_close(twin, x)


class Assigns(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = self.mean * 0.9 + x.mean(0)
        return x - self.mean


@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(4), Assigns], ids=["BatchNorm1d", "an assignment"])
def test_a_call_that_writes_to_buffers_is_one_generated_function(make, monkeypatch):
    """`run` does all other calls: the first one, and those with arguments or state that differ."""
    model, x = make(), torch.randn(3, 4)
    tr, eager = st.trace(model, (x,)), copy.deepcopy(model)
    torch.testing.assert_close(tr(x), eager(x))
    monkeypatch.setattr(TracedProgram, "run", lambda *_: pytest.fail("the call is not generated"))
    for _ in range(3):
        torch.testing.assert_close(tr(x), eager(x))
        torch.testing.assert_close(model.state_dict(), eager.state_dict())
