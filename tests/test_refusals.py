"""What has no pure form is refused, with the reason: the list of docs/mutation.md."""

import pytest
import torch
from compare import assert_like_eager
from torch import nn

import scopetrace as st

BITS = torch.randn(4)


def set_to_storage(x):
    x.set_(x.untyped_storage(), 0, (2,), (1,))


def view_of_replaced(x, y):
    row = x[0]
    x.set_(y)
    return row


def out_resizes(x, out):
    torch.add(x, 1, out=out)


def reads_other_dtype(x, bits):
    x.add_(1)
    return bits + 0


def returns_its_argument(x):
    with torch.library._scoped_library("scopetrace_refusals", "FRAGMENT") as library:
        library.define("poke_(Tensor(a!) x) -> Tensor(a!)")
        library.impl("poke_", lambda x: x.add_(1), "CompositeExplicitAutograd")
        return torch.ops.scopetrace_refusals.poke_.default(x)


REFUSALS = [
    ("elements that share memory", lambda x: x[0].unfold(0, 2, 1).mul_(2), (torch.randn(3, 4),)),
    ("an input lies in the memory", lambda x: x[1:].add_(x[:-1]), (torch.randn(3),)),
    ("other random numbers", lambda x: x[:, ::2].normal_(), (torch.randn(5, 8),)),
    ("out= resizes a tensor", out_resizes, (torch.randn(3), torch.empty(0))),
    ("poke_.default has no pure form", returns_its_argument, (torch.randn(3),)),
    ("set_ gives a tensor other memory", set_to_storage, (torch.randn(3),)),
    ("resize_ of a tensor", lambda x: x[:, ::2].resize_(2), (torch.randn(3, 4),)),
    ("outside of the tensor", lambda x: x[0].as_strided((3,), (1,), 1).zero_(), (torch.randn(2, 2),)),
    ("inputs of different dtypes", reads_other_dtype, (BITS, BITS.view(torch.int32))),
    ("a view of an input that got other memory", view_of_replaced, (torch.randn(3, 4), torch.randn(3, 4))),
]


@pytest.mark.parametrize(("message", "run", "args"), REFUSALS, ids=[message for message, _, _ in REFUSALS])
def test_it_is_refused_with_op_and_line(message, run, args):
    with pytest.raises(st.FunctionalizationError, match=f"no pure form: .*{message}") as error:
        st.trace(run, args)
    assert error.value.op and error.value.source is not None
    st.trace(run, args, functional=False)


def test_a_leaf_module_that_writes_is_refused():
    class Adds(nn.Module):
        def forward(self, x):
            return x.add_(1)

    with pytest.raises(st.FunctionalizationError, match="a leaf module changes its arguments"):
        st.trace(nn.Sequential(Adds()), (torch.randn(3),), leaves=[Adds])


def test_an_undefined_result_is_not_that_of_torch_either():
    torch.manual_seed(0)
    a, y = torch.randn(4, 4), torch.randn(4, 4)
    expected = a @ y
    torch.mm(a, y, out=a)
    assert not torch.allclose(a, expected)


WRONG = [
    lambda x, y: torch._foreach_add_([x, x], 1.0),
    lambda x, y: torch._foreach_add_([x, y], [y, x]),
    lambda x, y: torch._foreach_mul_([x, x[0]], 2.0),
    lambda x, y: nn.functional.batch_norm(x, y[0], y[0], training=True),
    lambda x, y: [x.data.t_()][1:],
    lambda x, y: [x.data.resize_(2)][1:],
]


@pytest.mark.xfail(raises=AssertionError, strict=True, reason="the trace is wrong without a word")
@pytest.mark.parametrize("run", WRONG)
def test_it_is_right_or_refused(run):
    args = torch.ones(2, 3), torch.full((2, 3), 2.0)
    try:
        tr = st.trace(run, args)
    except st.FunctionalizationError:
        return
    assert_like_eager(run, tr, args)
