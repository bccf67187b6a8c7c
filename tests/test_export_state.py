"""Tied parameters, buffers that several calls change, and graph texts as torch.export's users expect them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._higher_order_ops.hints_wrap import hints_wrapper
from torch.export import Dim

import scopetrace as st


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.ones(3))

    def forward(self, x, add=True):
        if add:
            self.n.add_(1)
        else:
            self.n.mul_(2)
        return x + self.n


class Twice(nn.Module):
    """A buffer that calls change one after the other, and that the caller reads between them."""

    def __init__(self):
        super().__init__()
        self.c = Counter()

    def forward(self, x):
        for add in (True, False, True):
            x = self.c(x, add) * self.c.n
        return x


class ReadsLate(nn.Module):
    """The result of the first call has the buffer as it was before the second one."""

    def __init__(self):
        super().__init__()
        self.c = Counter()

    def forward(self, x):
        y = self.c(x)
        kept = self.c.n * 1
        return self.c(y, False) + kept


class Turns(nn.Module):
    """No op whose first argument is the buffer makes the new value."""

    def __init__(self):
        super().__init__()
        self.c = nn.Module()
        self.c.register_buffer("n", torch.ones(3))
        self.c.forward = self.change

    def change(self, x):
        self.c.n.copy_(torch.where(x > 0, self.c.n, x))
        return x + self.c.n

    def forward(self, x):
        return self.c(x + self.c(x)) + self.c.n


@pytest.mark.parametrize("decompose", [False, True])
@pytest.mark.parametrize("model", [Twice, ReadsLate, Turns])
def test_unflattened_calls_that_change_a_buffer(model, decompose):
    model, x = model(), torch.linspace(-1, 1, 3)
    ep = st.trace(copy.deepcopy(model), (x,)).to_exported_program(preserve_module_call_signature=("*",))
    ep = ep.run_decompositions() if decompose else ep
    has_signature = isinstance(model.c, Counter)
    assert any(e.fqn == "c@1" and e.signature for e in ep.module_call_graph) == has_signature
    programs = [torch.export.unflatten(ep)]
    if has_signature:
        swapped = torch.export.unflatten(ep)
        swapped.set_submodule("c", Counter())
        programs.append(swapped)
    expected = [model(x) for _ in range(2)]
    for program in programs:
        torch.testing.assert_close([program(x) for _ in range(2)], expected)
        torch.testing.assert_close(program.c.n, model.c.n)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.out.weight = self.emb.weight
        self.a, self.b = Counter(), Counter()

    def forward(self, i):
        return self.out(self.b(self.a(self.emb(i))))


def test_tied_parameters_have_all_their_names():
    model, i = Tied(), torch.tensor([1, 2])
    ep = st.trace(copy.deepcopy(model), (i,)).to_exported_program()
    assert ep.graph_signature.parameters == ("emb.weight", "out.weight")
    program = ep.module()
    program.load_state_dict(model.state_dict())
    assert program.emb.weight is program.out.weight
    torch.testing.assert_close(torch.export.unflatten(ep)(i), copy.deepcopy(model)(i))
    torch.testing.assert_close(program(i), model(i))


def test_tied_buffers_that_the_forward_writes():
    model, x = nn.Sequential(Counter(), Counter()), torch.zeros(3)
    model[1].n = model[0].n
    for route in (lambda ep: ep.module(), lambda ep: ep.run_decompositions().module(), torch.export.unflatten):
        program = route(st.trace(copy.deepcopy(model), (x,)).to_exported_program())
        torch.testing.assert_close(program(x), copy.deepcopy(model)(x))


class FirstHalf(nn.Module):
    def forward(self, x, y):
        return y[: x.size(0) // 2]


class Halves(nn.Module):
    """A size that a call computes as its caller does: the graph computes it once, outside of the call."""

    def __init__(self):
        super().__init__()
        self.first = FirstHalf()

    def forward(self, x, y):
        n = x.size(0) // 2
        return y[n:] + self.first(x, y)


def test_a_size_that_a_call_shares_with_its_caller():
    dim = 2 * Dim("d", max=2048)
    tr = st.trace(Halves(), (torch.ones(10), torch.ones(10)), dynamic_shapes=((dim,), (dim,)))
    program = torch.export.unflatten(tr.to_exported_program(preserve_module_call_signature=("first",)))
    assert {"sym_size_int", "floordiv"} <= {n.name for n in program.first.graph.nodes}
    program.set_submodule("first", FirstHalf())
    x, y = torch.randn(20), torch.randn(20)
    torch.testing.assert_close(program(x, y), Halves()(x, y))


def test_assertions_and_sizes_are_annotated_as_their_op():
    class Net(nn.Module):
        def forward(self, x, n):
            with torch.fx.traceback.annotate({"part": 1}):
                n = n.item()
                torch._check(n >= x.shape[0])
            return x * n

    ep = st.trace(Net(), (torch.ones(3), torch.tensor(6)), dynamic_shapes={"x": {0: Dim("b")}, "n": None})
    found = {n.name: n.meta.get("custom") for n in ep.to_exported_program().graph.nodes if n.op == "call_function"}
    assert found == {
        **{name: {"part": 1} for name in ("item", "sym_size_int", "le", "_assert_scalar_default")},
        "mul": None,
    }


def test_sizes_that_are_differences_and_slices_of_all():
    class Net(nn.Module):
        def forward(self, x, y):
            n = y.shape[0] ** 2 - 3 * y.shape[0]
            return x[:, :n]

    x, dims = torch.randn(4, 12), {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    ep = st.trace(Net(), (x, x), dynamic_shapes=(dims, dims)).to_exported_program()
    assert [n.name for n in ep.graph.nodes if n.op == "call_function"] == [
        "sym_size_int",
        "pow_1",
        "mul",
        "sub",
        "slice_2",
    ]
    for n in (4, 5):
        x = torch.randn(n, 12)
        torch.testing.assert_close(ep.module()(x, x), Net()(x, x))


def test_operands_of_a_branch_are_in_the_order_of_their_names():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x, a):
            return torch.cond(x.sum() > 0, lambda x: self.fc(x) - a, lambda x: x.sin(), (x,))

    model, a = Net(), torch.randn(3)
    ep = st.trace(model, (torch.ones(3), a)).to_exported_program()
    (cond,) = (n for n in ep.graph.nodes if n.target is torch.ops.higher_order.cond)
    assert [x.name for x in cond.args[3]] == ["a", "p_fc_bias", "p_fc_weight", "x"]
    for x in (torch.rand(3), -torch.rand(3)):
        for program in (ep, ep.run_decompositions()):
            torch.testing.assert_close(program.module()(x, a), model(x, a))


class Hinted(nn.Module):
    def forward(self, x, y):
        def body(x, y):
            return torch.relu(x) + y

        return hints_wrapper(lambda x, y: body(x, y).abs(), (x, y), {}, hints={"outer": True})


def test_another_higher_order_op_runs_as_in_eager():
    args = torch.randn(2, 4), torch.ones(4)
    tr = st.trace(Hinted(), args)
    torch.testing.assert_close(tr(*args), Hinted()(*args))
    assert [op.name for op in tr.graph_module.graph.nodes if op.op == "call_function"] == ["relu", "add", "abs_1"]
    with pytest.raises(st.errors.UnsupportedOpError, match=r"hints_wrapper(.|\n)*under torch.no_grad"):
        st.trace(Hinted(), (args[0].requires_grad_(), args[1]))


def test_a_program_that_is_traced_again_gets_no_second_check_of_a_cast():
    class Net(nn.Module):
        def forward(self, x):
            return x.to(torch.float64) * 2

    x = torch.ones(3)
    ep = st.trace(Net(), (x,)).to_exported_program()
    again = st.trace(ep.module(), (x,)).to_exported_program()
    assert [n.target for n in again.graph.nodes] == [n.target for n in ep.graph.nodes]


def test_a_program_that_is_traced_again_asserts_nothing_twice():
    class Net(nn.Module):
        def forward(self, x, y):
            n = x.item()
            torch._check(n >= 3)
            torch._check(n <= 10)
            return torch.ones(n) + y.sum()

    args = torch.tensor(4), torch.ones(2)
    ep = st.trace(Net(), args).to_exported_program()
    again = st.trace(ep.module(), args).to_exported_program()
    assert [n.name for n in again.graph.nodes] == [n.name for n in ep.graph.nodes]
    for x, message in ((2, "u0 >= 3"), (11, "u0 <= 10")):
        with pytest.raises(RuntimeError, match=message):
            again.module()(torch.tensor(x), args[1])


def test_an_assertion_that_always_holds_is_traced_again():
    class Net(nn.Module):
        def forward(self, a, c):
            ones = a.new_ones([torch.nonzero(a).size(0), 4])
            torch._check(ones.size(0) >= 1)
            return ones + c

    args, dims = (torch.ones(6), torch.randn(6, 4)), (None, {0: Dim.DYNAMIC})
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        ep = st.trace(Net(), args, dynamic_shapes=dims).to_exported_program()
        again = st.trace(ep.module(), args, dynamic_shapes=dims).to_exported_program()
    torch.testing.assert_close(again.module()(*args), Net()(*args))
