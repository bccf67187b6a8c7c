"""The boundary: structure, metadata and shared memory of the arguments, checked at each call."""

import copy

import pytest
import torch
from torch import nn

import scopetrace as st


def run(x, ys, *, flag=True, scale=1.0):
    return x + ys[0]["k"] * scale if flag else x


def traced():
    return st.trace(run, (torch.ones(2, 3), [{"k": torch.ones(3)}]), {"scale": 2.0})


def test_the_same_structure_runs_with_other_values():
    x, ys = torch.randn(2, 3), [{"k": torch.randn(3)}]
    torch.testing.assert_close(traced()(x, ys, scale=2.0), run(x, ys, scale=2.0))


def test_arguments_may_be_passed_by_name_and_defaults_given():
    x, ys = torch.randn(2, 3), [{"k": torch.randn(3)}]
    torch.testing.assert_close(traced()(ys=ys, x=x, scale=2.0, flag=True), run(x, ys, scale=2.0))


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (
            (torch.ones(2, 4), [{"k": torch.ones(3)}]),
            {"scale": 2.0},
            "x: dimension 1 was 3 when traced and is 4 now.*dynamic_shapes=",
        ),
        ((torch.ones(2), [{"k": torch.ones(3)}]), {"scale": 2.0}, r"x: traced with shape \[2, 3\]"),
        (
            (torch.ones(2, 3), [{"k": torch.ones(3).double()}]),
            {"scale": 2.0},
            r"ys\[0\]\['k'\]: dtype was torch.float32",
        ),
        ((torch.ones(2, 3), [{"k": torch.ones(3)}]), {"scale": 3.0}, "scale was 2.0 when traced and is 3.0 now"),
        ((torch.ones(2, 3), [{"k": torch.ones(3)}]), {}, "scale was 2.0 when traced and is 1.0 now"),
        ((torch.ones(2, 3), [{"k": torch.ones(3)}], 3), {}, "called with 3 positional:"),
        ((torch.ones(2, 3), [{"z": torch.ones(3)}]), {"scale": 2.0}, r"argument 1\[0\] had 1 items \(\['k'\]\)"),
        ((torch.ones(2, 3), ({"k": torch.ones(3)},)), {"scale": 2.0}, "argument 1 was a list when traced"),
        ((2.0, [{"k": torch.ones(3)}]), {"scale": 2.0}, "argument 0 was a tensor when traced and is 2.0 now"),
    ],
)
def test_other_arguments_are_refused_by_name(args, kwargs, message):
    with pytest.raises(st.InputMismatchError, match=message):
        traced()(*args, **kwargs)


def test_one_tensor_given_for_two_inputs():
    def f(a, b):
        return a - 2 * b

    x, y = torch.randn(2), torch.randn(2)
    tr = st.trace(f, (x, x))
    torch.testing.assert_close(tr(y, y), f(y, y))
    with pytest.raises(st.InputMismatchError, match=r"b and a shared memory when traced.*or with b\.clone\(\) for"):
        tr(x, y)
    torch.testing.assert_close(st.trace(f, (x, y))(x, x), f(x, x))


def test_inputs_that_share_memory_and_are_written():
    def f(a, b):
        a.add_(1)
        return b * 2

    base = torch.zeros(4)
    tr = st.trace(f, (base[:2], base[1:3]), functional=False)
    for run_ in (tr, f):
        base = torch.zeros(4)
        assert run_(base[:2], base[1:3]).tolist() == [2.0, 0.0]
    with pytest.raises(st.InputMismatchError, match="shared memory"):
        tr(torch.zeros(2), torch.zeros(2))
    apart = st.trace(f, (torch.zeros(2), torch.zeros(2)), functional=False)
    with pytest.raises(st.InputMismatchError, match="did not share memory"):
        apart(base[:2], base[1:3])


def test_results_that_are_inputs_or_share_their_memory():
    def f(x):
        return x, x[0], x.view(-1)

    x = torch.randn(2, 2)
    a, b, c = st.trace(f, (torch.randn(2, 2),))(x)
    assert a is x
    assert b.data_ptr() == x.data_ptr() and c.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_leaves():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
            self.b = nn.Linear(2, 2)

        def forward(self, x):
            return self.b(self.a(x))

    x = torch.randn(1, 2)
    for leaves in (nn.Sequential, "a", lambda m, fqn: fqn == "a", ["a", nn.Sequential]):
        tr = st.trace(Net(), (x,), leaf_modules=leaves)
        tr.lint()
        tr.check((x,))
        kinds = [(n.op, str(n.target)) for n in tr.graph_module.graph.nodes if n.op.startswith("call")]
        assert kinds == [("call_module", "a"), ("call_function", "aten.linear.default")]
        assert [c.fqn for c in tr.calls] == ["", "a", "b"] and tr.calls[1].is_leaf


def test_a_leaf_with_nested_arguments_and_results():
    class Inner(nn.Module):
        def forward(self, items, *, how, opaque):
            return {"sum": items[0] + items[1]["k"], "pair": (items[0] * how, None)}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            out = self.inner([x, {"k": x + 1}], how=3, opaque=marker)
            return out["sum"] * out["pair"][0]

    marker = object()
    x = torch.randn(2)
    tr = st.trace(Net(), (x,), leaf_modules="inner")
    tr.lint()
    tr.check((x,))
    call = tr.calls[1]
    assert call.arguments["opaque"] is marker and call.arguments["how"] == 3
    assert set(call.outputs) == {"sum", "pair"} and call.outputs["pair"][1] is None


class Writer(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.write, self.plain, self.weight = write, torch.zeros(3), nn.Parameter(torch.ones(3))
        self.register_buffer("total", torch.zeros(3))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        self.write(self, x)
        return self.norm(x) + self.total + self.plain + self.weight


WRITES = {
    "a buffer": lambda m, x: m.total.add_(1),
    "a buffer by data": lambda m, x: m.total.copy_(x.detach().sum(0)),
    "an attribute": lambda m, x: m.plain.add_(1),
    "a parameter": lambda m, x: m.weight.data.mul_(2),
    "by a list": lambda m, x: torch._foreach_add_([m.total], 1.0),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("write", WRITES)
def test_what_a_leaf_writes_is_written_by_calls_alone(write, mode):
    """torch runs an op on real tensors alone for real, also on fake tensors."""
    net = nn.Sequential(nn.Linear(3, 3), Writer(WRITES[write]))
    twin, x = copy.deepcopy(net), torch.randn(4, 3)
    with mode():
        tr = st.trace(net, (x,), leaf_modules=[Writer])
        for _ in range(2):
            assert all(map(torch.equal, net.state_dict().values(), twin.state_dict().values()))
            assert torch.equal(net[1].plain, twin[1].plain)
            assert torch.equal(tr(x), twin(x))


@pytest.mark.parametrize("leaves", [(), [Writer]])
def test_a_function_of_the_elements_of_a_buffer_is_refused(leaves):
    net = nn.Sequential(Writer(lambda m, x: m.total.apply_(lambda n: n + 1)))
    with pytest.raises(st.DataDependentError):
        st.trace(net, (torch.randn(4, 3),), leaf_modules=leaves)
    assert torch.equal(net[0].total, torch.zeros(3))


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ("layer9", "no module is named 'layer9'"),
        (3, "is not iterable|give a module class"),
        ([3], "give a module class"),
        (int, "not a torch.nn.Module"),
        (nn.GELU, "the model has no GELU"),
    ],
)
def test_wrong_leaves(leaves, message):
    with pytest.raises((st.LeafPatternError, TypeError), match=message):
        st.trace(nn.Linear(2, 2), (torch.randn(1, 2),), leaf_modules=leaves)


def test_lint_and_check_find_what_is_wrong():
    x = torch.randn(1, 2)
    tr = st.trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), (x,))
    relu = next(n for n in tr.graph_module.graph.nodes if n.name == "relu")
    relu.meta["custom"]["scopetrace"] = {"scope": "Sequential/GELU[7]", "call": 2}
    with pytest.raises(st.LintError, match="relu: its scope 'Sequential/GELU"):
        tr.lint()
    relu.target = torch.ops.aten.neg.default
    tr.graph_module.recompile()
    with pytest.raises(st.CheckError, match="result: Tensor-likes are not close"):
        tr.check((x,))


def test_functions_among_the_arguments_are_named():
    tr = st.trace(lambda x, act: act(x), (torch.ones(2), torch.relu))
    with pytest.raises(st.InputMismatchError, match="was relu when traced and is tanh now"):
        tr(torch.ones(2), torch.tanh)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (slice(0, 2), slice(1, 3), r"was slice\(0, 2, None\) when traced and is slice\(1, 3, None\) now"),
        (range(2), range(3), r"was range\(0, 2\) when traced and is range\(0, 3\) now"),
        (frozenset("a"), frozenset("b"), r"was frozenset\(\{'a'\}\) when traced and is frozenset"),
        (nn.Linear(2, 2), nn.Linear(2, 2), "was Linear.* when traced and is another one now"),
        (nn.Linear(2, 2), nn.ReLU(), "was a Linear when traced and is a ReLU now"),
    ],
)
def test_arguments_that_are_other_objects_are_told_apart(old, new, text):
    tr = st.trace(lambda x, other: x * 2, (torch.ones(2), old))
    tr(torch.ones(2), old)
    with pytest.raises(st.InputMismatchError, match=text):
        tr(torch.ones(2), new)
