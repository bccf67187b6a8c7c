"""`specialize=True`: the example inputs decide, the trace says what, and refuses inputs that decide otherwise."""

import numpy as np
import pytest
import torch
from torch import nn

import scopetrace as st


class Gate(nn.Module):
    def forward(self, x, n):
        if x.sum() > 0:
            x = x * 2
        for i in range(n.item()):
            x = x + i
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = Gate()

    def forward(self, x, n):
        found = self.gate(x, n).nonzero()
        return found * 2 if found.shape[0] > 2 else found


X, N = torch.tensor([1.0, 2.0, 3.0]), torch.tensor(2)


def specialized(model, *args, **options):
    """A trace that agrees with the model on its example inputs."""
    tr = st.trace(model, args, specialize=True, **options)
    tr.lint()
    tr.check(args)
    return tr


def facts(tr):
    return [(s.expression, s.value, s.op, s.fqn) for s in tr.specializations]


def test_each_decision_has_value_op_module_and_line():
    tr = specialized(Net(), X, N)
    assert facts(tr) == [
        ("Eq(u0, 1)", True, "aten.is_nonzero.default", "gate"),
        ("u1", 2, "aten.item.default", "gate"),
        ("u2 > 2", True, "aten.nonzero.default", ""),
    ]
    first = tr.specializations[0]
    assert first.module == "Net/Gate[gate]"
    assert "test_specialize.py" in first.source and first.source.endswith("in forward: if x.sum() > 0:")


def test_they_are_printed_with_the_trace():
    tr = specialized(Net(), X, N)
    tail = str(tr).split("specialized on 3 values of the example inputs:\n")[1].splitlines()
    assert tail == [f"  {s}" for s in tr.specializations]
    assert tail[1].startswith("  u1 was 2 (aten.item.default) in Net/Gate[gate], at ")
    assert tr.print_readable(depth=0, print_output=False).endswith(tail[-1])


def test_a_call_that_decides_otherwise_is_refused():
    tr = specialized(Net(), X, N)
    torch.testing.assert_close(tr(X * 5, N), Net()(X * 5, N))
    with pytest.raises(st.InputMismatchError, match=r"u1 was 2 .* in Net/Gate\[gate\], at .*range\(n.item\(\)\)"):
        tr(X, N + 1)
    with pytest.raises(RuntimeError, match="these inputs differ: Eq"):
        tr.graph_module(-X, N)


@pytest.mark.parametrize(
    "product",
    [
        lambda tr: tr.outline(Gate),
        lambda tr: tr.compile(backend="eager"),
        lambda tr: tr.compile(backend="eager", functions=Gate),
        lambda tr: tr.decompose(),
        lambda tr: lambda *args: tr.run(torch.fx.Interpreter(tr.graph_module).run, *args),
    ],
)
def test_what_is_made_of_a_trace_refuses_it_in_the_same_words(product):
    made = product(specialized(Net(), X, N))
    torch.testing.assert_close(made(X * 5, N), Net()(X * 5, N))
    with pytest.raises(st.InputMismatchError, match=r"^the trace is specialized, .* u1 was 2 .* inputs like these$"):
        made(X, N + 1)


def test_check_says_which_decision_goes_another_way():
    tr = specialized(Net(), X, N)
    tr.check((X + 1, N))
    with pytest.raises(st.CheckError) as info:
        tr.check((torch.tensor([5.0, -4.0, -4.0]), N + 1))
    lines = str(info.value).splitlines()
    assert lines[0] == "on these inputs the model goes another way:"
    assert [line.split(" was ")[0] for line in lines[1:]] == ["  Eq(u0, 1)"]


def test_what_python_does_not_look_at_stays_a_symbol():
    def run(x, n):
        scale = n.item()
        if scale > 1:
            x = x * scale
        return x[x > 0]

    tr = specialized(run, X, N)
    assert facts(tr) == [("u0 > 1", True, "aten.item.default", "")]
    tr.check((X - 1, N + 3))


def test_without_specialize_there_are_none():
    assert st.trace(nn.Linear(3, 3), (X,)).specializations == []


@pytest.mark.parametrize(
    ("read", "value"),
    [
        (lambda t: int(t), 2),
        (lambda t: float(t.double()), 2.0),
        (lambda t: int(t.item()), 2),
        (lambda t: [1, 2, 3][t], 2),
        (lambda t: int(t.reshape(1).tolist()[0]), 2),
        (lambda t: len("x" * t.item()), 2),
        (lambda t: {2: 5}[t.item()], 2),
        (lambda t: int(f"{t}0"), 2),
        (lambda t: int(f"{t.item()}0"), 2),
        (lambda t: int(str(t.item())), 2),
        (lambda t: 3 if bool(t) else 4, True),
        (lambda t: 3 if not t else 4, True),
        (lambda t: 3 if torch.equal(t, N) else 4, True),
        (lambda t: 3 if torch.allclose(t, N) else 4, True),
        (lambda t: int(t.numpy()), True),
        (lambda t: int(np.asarray(t).sum()), True),
        (lambda t: 3 if t.item() in (1, 2) else 4, None),
    ],
)
def test_ways_to_look(read, value):
    tr = specialized(lambda x, n: x * read(n), X, N)
    assert value is None or [s.value for s in tr.specializations] == [value]
    with pytest.raises(st.InputMismatchError):
        tr(X, N * 0)


def test_memory_is_as_the_program_has_left_it():
    """The last decision needs `doubled`, which was made before a write that an earlier decision needed."""

    def run(x):
        x.add_(1)
        half = x[1:]
        doubled = half * 2
        half.mul_(0)
        if x.sum() == 2:
            half.sub_(3)
        if x.sum() < 0 and doubled.sum() > 13:
            return doubled
        return half

    x = X.clone()
    tr = specialized(run, x)
    assert [s.value for s in tr.specializations] == [True, True, True]
    assert torch.equal(x, X)


def test_a_second_tensor_over_written_memory():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("a", torch.zeros(3))
            self.register_buffer("b", self.a[1:])

        def forward(self, x):
            self.a.add_(x)
            if self.a.sum() > 5:
                x = x + 1
            return x * 2 if self.b.sum() > 4 else x

    tr = specialized(Two(), X)
    assert [s.value for s in tr.specializations] == [True, True]


def test_model_inputs_and_generators_are_as_before():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            x += 1
            if self.norm(x).abs().max() < 100 and torch.rand(()) < 2 and self.norm.num_batches_tracked == 1:
                return x * torch.rand(())
            return x

    model, x = Noisy(), torch.randn(4, 3)
    state, before, random = {k: v.clone() for k, v in model.state_dict().items()}, x.clone(), torch.get_rng_state()
    tr = st.trace(model, (x,), specialize=True)
    assert torch.equal(x, before) and torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert "numpy" not in torch.Tensor.__dict__ and "__getitem__" not in torch.Tensor.__dict__
    tr.check((x,))


def test_random_numbers_that_decide_are_those_that_eager_draws():
    def run(x):
        return x if torch.rand(()) + torch.rand(()) > 1 else -x

    for seed in range(4):
        torch.manual_seed(seed)
        tr = st.trace(run, (X,), specialize=True)
        torch.testing.assert_close(tr(X), (torch.manual_seed(seed), run(X))[1])


def test_only_the_ops_that_a_value_comes_from_run():
    """A layer without data on the meta device is no obstacle to a decision on another input."""
    body = nn.Linear(3, 3, device="meta")

    def run(x, n):
        return body(x).relu() if n > 1 else x

    tr = st.trace(run, (X.to("meta"), N), specialize=True)
    assert [s.value for s in tr.specializations] == [True]


@pytest.mark.parametrize(
    "trace",
    [
        lambda: st.trace(Net(), (X.to("meta"), N), specialize=True),
        lambda: st.trace(lambda x, n: x * int(x.numpy().sum()), (X.to("meta"), N), specialize=True),
        lambda: st.trace(nn.Sequential(nn.Identity(), Gate0()), (X,), leaf_modules=nn.Identity, specialize=True),
    ],
)
def test_a_value_that_is_nowhere_is_an_error(trace):
    with pytest.raises(st.DataDependentError, match="there is none") as info:
        trace()
    assert info.value.source is not None


class Gate0(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_nan_is_equal_to_nothing():
    with pytest.raises(st.DataDependentError, match="NaN"):
        st.trace(lambda x: x * int(x.numpy().size), (X * torch.nan,), specialize=True)


def test_gradients_and_mutation_around_a_decision():
    def run(x, w):
        (g,) = torch.autograd.grad((x * w).sum(), w)
        x[0] = 7
        return g * 2 if g.sum() > 5 else g, x

    for functional in (True, False):
        specialized(run, X.clone(), torch.ones(3, requires_grad=True), functional=functional)


def test_dynamic_sizes_stay_dynamic():
    tr = specialized(lambda x: x * 2 if x.sum() > 0 else x, X, dynamic_shapes=({0: torch.export.Dim("n")},))
    for length in (2, 5, 8):
        tr.check((torch.ones(length),))


def test_decisions_around_a_branch_of_torch_cond():
    def run(x, n):
        x = torch.cond(x.sum() > 0, lambda x: x[: x.shape[0] - 1] * n, lambda x: x[1:] - n, (x,))
        return x + 1 if n > 1 else x

    tr = specialized(run, X, N)
    assert [s.value for s in tr.specializations] == [True]
    tr.check((-X, N + 1))


def test_a_branch_of_python_inside_a_body_has_no_value():
    def body(x):
        return x * 2 if x.max() > 1 else x.clone()

    with pytest.raises(st.DataDependentError, match="gives to a body"):
        st.trace(lambda x: torch.cond(x.sum() > 0, body, lambda x: -x, (x,)), (X,), specialize=True)


def test_a_value_that_comes_out_of_a_body_is_refused():
    def run(x):
        y = torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: -x, (x,))
        return y if y.sum() > 0 else x

    with pytest.raises(st.DataDependentError, match="there is none"):
        st.trace(run, (X,), specialize=True)


def test_a_saved_trace_keeps_them_and_refuses_as_well(tmp_path):
    tr = specialized(Net(), X, N)
    tr.save(tmp_path / "net.st")
    loaded = st.load(tmp_path / "net.st")
    assert (loaded.specializations, loaded.graph_module.code) == (tr.specializations, tr.graph_module.code)
    torch.testing.assert_close(loaded(X * 5, N), Net()(X * 5, N))
    with pytest.raises(st.InputMismatchError, match="u1 was 2"):
        loaded(X, N + 1)


def test_the_mask_of_an_encoder_may_be_causal():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1).eval()
    x, mask = torch.randn(2, 3, 4), nn.Transformer.generate_square_subsequent_mask(3)
    with pytest.raises(st.errors.DataDependentError, match="Python needs the value") as error:
        st.trace(model, (x, mask))
    assert "is_causal=True" in error.value.hint
    tr = st.trace(model, (x, mask), specialize=True)
    torch.testing.assert_close(tr(x, mask), model(x, mask))
    with pytest.raises(st.errors.InputMismatchError, match="the trace is specialized"):
        tr(x, torch.zeros(3, 3))
    tr = st.trace(model, (x, mask), {"is_causal": False})
    torch.testing.assert_close(tr(x, torch.zeros(3, 3), is_causal=False), model(x, torch.zeros(3, 3), is_causal=False))


def test_distributions_that_look_at_their_parameters():
    def density(x, checks):
        return torch.distributions.Normal(x, x.abs() + 1, validate_args=checks).log_prob(x)

    if torch.__version__ < "2.15":  # later ones assert it by an op
        with pytest.raises(st.errors.DataDependentError) as error:
            st.trace(density, (X, True))
        assert "validate_args=False" in error.value.hint
    tr = st.trace(density, (X, False))
    torch.testing.assert_close(tr(X * 2, False), density(X * 2, True))


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("sizes", torch.tensor([2, 3]))

    def forward(self, x):
        return x * self.sizes.tolist()[0] + self.sizes[1].cpu().tolist()


@pytest.mark.parametrize("specialize", [False, True])
def test_lists_of_buffers_are_data(specialize):
    model, x = nn.Sequential(Listed(), Listed()), torch.ones(3)
    tr = st.trace(model, x, specialize=specialize)
    model[1].sizes.fill_(5)
    assert torch.equal(tr(x), model(x))


def test_a_list_of_a_buffer_that_decides():
    class Picks(Listed):
        def forward(self, x):
            return x * 2 if 2 in self.sizes.tolist() else x

    model = nn.Sequential(Picks())
    with pytest.raises(st.errors.DataDependentError, match=r"2 in self.sizes.tolist\(\)"):
        st.trace(model, torch.ones(3))
    tr = specialized(model, torch.ones(3))
    model[0].sizes.fill_(5)
    with pytest.raises(st.InputMismatchError, match="specialized"):
        tr(torch.ones(3))


@pytest.mark.parametrize(
    ("forward", "first", "second"),
    [
        (lambda x: torch.tensor([x.sum(), x.mean()]), [3.0, 1.0], [6.0, 2.0]),
        (lambda x: torch.tensor([[x.sum(), 1], [x[0], 2.5]]), [[3.0, 1.0], [1.0, 2.5]], [[6.0, 1.0], [2.0, 2.5]]),
        (lambda x: torch.tensor((x.sum().long(), len(x)), dtype=torch.int32), [3, 3], [6, 3]),
        (lambda x: torch.as_tensor([x[:1].double(), True]), [1.0, 1.0], [2.0, 1.0]),
        (lambda x: torch.tensor([(x > 1).any(), x.sum().long()]), [0, 3], [1, 6]),
        (lambda x: torch.tensor([x.sum().item(), x.sum()]), [3.0, 3.0], [6.0, 6.0]),
        (lambda x: torch.tensor([x.sum()], requires_grad=False, pin_memory=False), [3.0], [6.0]),
    ],
)
def test_a_tensor_made_of_tensors_is_a_stack(forward, first, second):
    tr = st.trace(forward, (torch.ones(3),))
    for x, values in (torch.ones(3), first), (torch.full((3,), 2.0), second):
        assert tr(x).tolist() == values == forward(x).tolist()
        assert tr(x).dtype == forward(x).dtype


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: torch.tensor([x.sum()], requires_grad=True),
        lambda x: torch.tensor([x.sum(), np.float64(1)]),
        lambda x: x.new_tensor([x.sum()]),
    ],
)
def test_a_tensor_made_of_tensors_otherwise_needs_their_values(forward):
    with pytest.raises(st.errors.DataDependentError, match=r"write torch.stack\(\[x, y\]\) in place of torch.tensor"):
        st.trace(forward, (torch.ones(3),))


def test_a_tensor_made_of_tensors_of_another_kind_of_dtype_is_an_error_as_in_eager():
    def forward(x):
        return torch.tensor([x.sum()], dtype=torch.int64)

    with pytest.raises(TypeError, match="only integer tensors"):
        forward(torch.ones(3))
    with pytest.raises(TypeError, match="only integer tensors"):
        st.trace(forward, (torch.ones(3),))


def test_numbers_of_numpy_keep_their_dtype_beside_a_number_of_a_tensor():
    with pytest.raises(st.errors.DataDependentError):
        st.trace(lambda x: torch.tensor([x.sum().item(), np.float64(1)]), (torch.ones(3),))
