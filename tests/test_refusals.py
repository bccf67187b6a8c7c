"""What has no pure form is refused, with the reason: the list of docs/mutation.md."""

import re

import pytest
import torch
from compare import assert_like_eager
from torch import nn

import scopetrace as st

BITS = torch.randn(4)
FREE = torch.ops.inductor.resize_storage_bytes_.default


def set_to_storage(x):
    x.set_(x.untyped_storage(), 0, (2,), (1,))


def view_of_replaced(x, y):
    row = x[0]
    x.set_(y)
    return row


def out_resizes_a_viewed_tensor(x):
    out = torch.empty(2)
    view = out[:1]
    return torch.add(x, 1, out=out), view


def out_resizes(x, out):
    torch.add(x, 1, out=out)


def same_statistics(x, m):
    return nn.functional.batch_norm(x, m, m, training=True)


def reads_other_dtype(x, bits):
    x.add_(1)
    return bits + 0


def returns_its_argument(x):
    with torch.library._scoped_library("scopetrace_refusals", "FRAGMENT") as library:
        library.define("poke_(Tensor(a!) x) -> Tensor(a!)")
        library.impl("poke_", lambda x: x.add_(1), "CompositeExplicitAutograd")
        return torch.ops.scopetrace_refusals.poke_.default(x)


GAPS = torch.randn(2, 3, requires_grad=True)[:, :2]

LONGS = torch.zeros(3, dtype=torch.int64)


def every_second_pair_in_a_branch(x):
    def write(x):
        return (y := x * 2, y.unfold(0, 2, 3)[1].zero_())[0]

    return torch.cond(x.sum() > 0, write, lambda x: x * 3, (x,))


REFUSALS = [
    ("a body writes to elements of a tensor that no view op", every_second_pair_in_a_branch, (torch.randn(5),)),
    ("elements that share memory", lambda x: x[0].unfold(0, 2, 1).mul_(2), (torch.randn(3, 4),)),
    ("an input lies in the memory", lambda x: x[1:].add_(x[:-1]), (torch.randn(3),)),
    ("other random numbers", lambda x: x[:, ::2].normal_(), (torch.randn(5, 8),)),
    ("out= resizes a tensor", out_resizes, (torch.randn(3), torch.empty(0))),
    ("out= resizes a tensor", out_resizes_a_viewed_tensor, (torch.randn(3),)),
    ("out= resizes its tensor", lambda x: torch.linalg.matrix_rank(x, out=LONGS[:2] * 1), (torch.randn(3, 3),)),
    ("poke_.default has no pure form", returns_its_argument, (torch.randn(3),)),
    ("set_ gives a tensor other memory", set_to_storage, (torch.randn(3),)),
    ("resize_ of a tensor", lambda x: x[:, ::2].resize_(2), (torch.randn(3, 4),)),
    ("another one shares", lambda x: (y := x + 1, y.view(-1).resize_(12), y + 1)[2], (torch.randn(3),)),
    ("another one shares", lambda x: x.detach().resize_(12)[:2], (torch.randn(3),)),
    ("outside of the tensor", lambda x: x.as_strided((4,), (1,), 0).zero_(), (GAPS,)),
    ("outside of the tensor", lambda x: x.view(torch.int32).as_strided((4,), (1,), 0).zero_(), (GAPS.detach(),)),
    ("changes its shape in place", lambda x: x.as_strided((4, 1), (1, 1), 0).t_(), (GAPS.detach(),)),
    ("two tensors that one op writes", lambda x: torch._foreach_add_([x, x], 1.0), (torch.randn(3),)),
    ("two tensors that one op writes", lambda x: torch._foreach_mul_([x, x[0]], 2.0), (torch.randn(2, 3),)),
    ("two tensors that one op writes", same_statistics, (torch.randn(3, 4), torch.rand(4))),
    ("two tensors that one op writes", lambda x: torch.aminmax(x, dim=0, out=(x[0], x[0])), (torch.randn(3, 4),)),
    ("an input lies in the memory", lambda x, y: torch._foreach_add_([x, y], [y, x]), (BITS, torch.randn(4))),
    # Right on some machines and wrong on others: it depends on whether torch's kernel reads all before it writes.
    ("an input lies in the memory", lambda x, y: torch.mm(x, y, out=x), (torch.randn(4, 4), torch.randn(4, 4))),
    ("an input lies in the memory", lambda x: torch.mm(x.t(), x, out=x), (torch.randn(4, 4),)),
    ("an input lies in the memory", lambda x, y: x.addmm_(y, x), (torch.randn(4, 4), torch.randn(4, 4))),
    ("an input lies in the memory", lambda x: x[None].copy_(x), (torch.randn(3),)),  # eager raises
    ("an input lies in the memory", lambda x: torch.sum(x, 0, keepdim=True, out=x[:1]), (torch.randn(4, 4),)),
    ("inputs of different dtypes", reads_other_dtype, (BITS, BITS.view(torch.int32))),
    ("a view of an input that got other memory", view_of_replaced, (torch.randn(3, 4), torch.randn(3, 4))),
]


@pytest.mark.parametrize(("message", "run", "args"), REFUSALS, ids=[message for message, _, _ in REFUSALS])
def test_it_is_refused_with_op_and_line(message, run, args):
    with pytest.raises(st.FunctionalizationError, match=f"no pure form: .*{message}") as error:
        st.trace(run, args)
    assert error.value.op and error.value.source is not None
    st.trace(run, args, functional=False)


@pytest.mark.parametrize("new", [lambda: torch.tensor(0.0), lambda: torch.tensor([]), lambda: torch.empty(0)])
def test_out_resizes_a_tensor_of_its_own_also_twice(new):
    def forward(x):
        out = new()
        torch.exp(x, out=out)
        return torch.cat([x, x], out=out) + 1, out

    x = torch.randn(3)
    assert_like_eager(forward, st.trace(forward, (x,)), (x,))


def test_memory_that_grows_while_nobody_else_reads_it():
    fn = lambda x: (x + 1)[None].resize_(12)[:3] * 2  # noqa: E731
    torch.testing.assert_close(st.trace(fn, (torch.ones(3),))(torch.ones(3)), torch.full((3,), 4.0))


def test_a_leaf_module_that_writes_is_refused():
    class Adds(nn.Module):
        def forward(self, x):
            return x.add_(1)

    with pytest.raises(st.FunctionalizationError, match="a leaf module changes its arguments"):
        st.trace(nn.Sequential(Adds()), (torch.randn(3),), leaf_modules=[Adds])


RIGHT = [
    lambda x, y: torch._foreach_add_([x, y], [x, y]),
    lambda x, y: torch._foreach_add_([x[0], x[1]], [x[1], y[0]]),  # x[1] is read before it is written
    lambda x, y: x[:, ::2][None].copy_(x[:, ::2]),
    lambda x, y: x[0].index_copy_(0, torch.tensor([2, 0, 1]), x[1]),  # in one storage, but apart
    lambda x, y: torch.addmm(x, y, x.new_ones(3, 3), out=x),
    lambda x, y: x.data.t_(),
    lambda x, y: (x.data, x, x.data),
    lambda x, y: [x.data.resize_(2)][1:],
    lambda x, y: [x.unsqueeze_(0).to(torch.float32).squeeze_().add_(1)][1:],
    lambda x, y: x[1].as_strided((2, 2), (3, 1), 0).mul_(2),
]


@pytest.mark.parametrize("run", RIGHT)
def test_what_is_near_a_refusal_and_has_a_meaning_works(run):
    args = torch.ones(2, 3), torch.full((2, 3), 2.0)
    assert_like_eager(run, st.trace(run, args), args)


def test_ops_that_write_two_of_their_arguments_run_on_copies():
    with torch.library._scoped_library("scopetrace_refusals", "FRAGMENT") as library:
        library.define("both(Tensor(a!) x, Tensor(b!) y, Tensor z) -> ()")
        library.impl("both", lambda x, y, z: (x.add_(z), y.mul_(z), None)[2], "CompositeExplicitAutograd")
        both = torch.ops.scopetrace_refusals.both.default
        args = (torch.randn(3, 4),)

        def apart(x):
            both(x[0], x[1], x[2])

        assert_like_eager(apart, st.trace(apart, args), args)
        for run in (lambda x: both(x, x[0], x[1] * 1), lambda x: both(x[0], x[1], x[0])):
            with pytest.raises(st.FunctionalizationError, match=r"share memory|an input lies"):
                st.trace(run, args)


def test_as_strided_of_an_input_that_begins_elsewhere_is_refused_at_the_call():
    def counts(x):
        return x.as_strided((2,), (1,), 0).mul_(2)

    tr = st.trace(counts, (torch.ones(4),))
    with pytest.raises(st.InputMismatchError, match="begins at 4 now"):
        tr(torch.ones(8)[4:])
    follows = st.trace(lambda x: x.as_strided((2,), (1,)).mul_(2), (torch.ones(4),))
    x = torch.ones(8)
    follows(x[4:])
    assert x.tolist() == [1, 1, 1, 1, 2, 2, 1, 1]


@pytest.mark.parametrize(
    "run",
    [
        lambda x: (x.untyped_storage().resize_(0), x)[1],
        lambda x: ((y := x * 2), y.untyped_storage().resize_(0))[0],
        lambda x: ((y := x * 2), z := y[0], y.untyped_storage().resize_(0), z + 1)[3],
    ],
    ids=["of an input", "of a result", "before a view is read"],
)
def test_memory_that_is_freed_while_someone_has_it(run):
    inherited = torch.UntypedStorage.resize_
    with pytest.raises(st.FunctionalizationError, match="memory is resized"):
        st.trace(run, (torch.randn(3, 3),))
    assert torch.UntypedStorage.resize_ is inherited and "resize_" not in vars(torch.UntypedStorage)


def test_memory_that_is_freed_after_its_last_use():
    def run(x):
        y = x * 2
        z = y + 1
        y.untyped_storage().resize_(0)
        return z

    kept = st.trace(run, (torch.randn(3),), functional=False)
    assert len(kept.graph_module.graph.find_nodes(op="call_function", target=FREE)) == 1
    assert_like_eager(run, kept, (torch.randn(3),))
    assert_like_eager(run, st.trace(run, (torch.randn(3),)), (torch.randn(3),))


@pytest.mark.parametrize("write", [torch.Tensor.copy_, torch.Tensor.mul_])
def test_gradients_that_would_flow_into_a_detached_alias(write):
    def run(x, w):
        y = x * 1
        detached = y.detach()
        write(detached, w)
        return y.sum() + detached.sum()

    args = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    with pytest.raises(st.FunctionalizationError, match="written into a detached alias"):
        st.trace(run, args)


def test_as_strided_where_the_graph_lays_memory_out_otherwise():
    def run(x):
        y = x.t() * 1
        y.copy_(x)
        return (y * 2).as_strided((4,), (1,))

    with pytest.raises(st.FunctionalizationError, match="strides are not those of eager"):
        st.trace(run, (torch.randn(3, 3),))


@pytest.mark.parametrize("name", ["code", "graph", "meta", "print_readable"])
@pytest.mark.parametrize("kind", ["tensor", "module"])
def test_attributes_that_a_graph_module_has_too(name, kind, tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            if kind == "tensor":
                self.register_buffer(name, torch.ones(3))
            else:
                self.add_module(name, nn.Linear(3, 3))

        def forward(self, x):
            return x * self._buffers[name] if kind == "tensor" else self._modules[name](x)

    model, x = Net(), torch.randn(2, 3)
    trace = st.trace(model, (x,))
    for make in (lambda: trace(x), trace.to_exported_program, trace.to_module, lambda: trace.save(tmp_path / "t.st")):
        with pytest.raises(st.errors.UnsupportedOpError, match=f"attribute '{name}', and so has each") as error:
            make()
        assert "nn.Sequential(model)" in error.value.hint
    trace = st.trace(nn.Sequential(model), (x,))
    for run in (trace, trace.to_module(), trace.to_exported_program().module()):
        torch.testing.assert_close(run(x), model(x))


def test_a_custom_op_without_a_fake_implementation():
    with torch.library._scoped_library("scopetrace_no_fake", "FRAGMENT"):
        op = torch.library.custom_op(
            "scopetrace_no_fake::twice", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
        )
        with pytest.raises(st.errors.UnsupportedOpError, match="no fake impl registered") as error:
            st.trace(op, (torch.ones(3),))
        assert "register_fake" in error.value.hint


LAYER = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()


@pytest.mark.parametrize(
    ("run", "hint"),
    [
        (LAYER, r"torch\.backends\.mha\.set_fastpath_enabled\(False\)"),
        (lambda x: torch.nn.functional.bilinear(x, x, torch.ones(3, 8, 8)), "autocast.'cpu', enabled=False."),
        (lambda x: torch.linalg.pinv(x), "autocast.'cpu', enabled=False."),
    ],
    ids=["encoder layer", "bilinear", "pinv"],
)
def test_ops_whose_kernels_cast_under_autocast(run, hint):
    """In eager their results are those of bfloat16; without autocast they are traced."""
    x = torch.randn(2, 4, 8)
    with torch.no_grad():
        with (
            torch.autocast("cpu", dtype=torch.bfloat16),
            pytest.raises(st.errors.UnsupportedOpError, match="autocast is on and casts inside of its kernel") as error,
        ):
            st.trace(run, (x,))
        assert error.value.op and error.value.module and error.value.source
        assert re.search(hint, error.value.hint)
        torch.testing.assert_close(st.trace(run, (x,))(x), run(x))
