"""Calls with inputs of other strides, or that bring gradients to writes: right, or refused."""

import pytest
import torch

import scopetrace as st
from scopetrace.errors import InputMismatchError

ROWS = torch.randn(3, 3)
COLUMNS = torch.randn(3, 3).t()


def write_reshaped(x):
    y = x.reshape(-1)
    y.add_(1)
    return y * 2


def write_contiguous(x):
    y = x * 2
    y.contiguous().add_(1)
    return y


def write_a_copy(x):
    x = x.relu()
    x.flatten().zero_()
    return x


def write_between(x):
    y = x * 1
    y.add_(1)
    return y.reshape(-1) + 1


RIGHT = {
    "reshape": lambda x: x.reshape(-1) * 2,
    "flatten": lambda x: x.flatten() + 1,
    "contiguous": lambda x: x.contiguous() + 1,
    "a view that is returned": lambda x: x.reshape(-1),
    "written before": write_between,
    "a product": lambda x: x @ x.t(),
}
REFUSED = {
    "contiguous, returned": lambda x: x.contiguous(),
    "reshape, written": write_reshaped,
    "contiguous, written": write_contiguous,
    "flatten, written": write_a_copy,
}


def like(x):
    return torch.empty_strided(x.size(), x.stride()).copy_(x)


def shares(a, b):
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@pytest.mark.parametrize(("example", "given"), [(ROWS, COLUMNS), (COLUMNS, ROWS)])
@pytest.mark.parametrize("name", RIGHT)
def test_right(name, example, given):
    tr = st.trace(RIGHT[name], (example,))
    mine, eager = like(given), like(given)
    actual, expected = tr(mine), RIGHT[name](eager)
    torch.testing.assert_close((actual, mine), (expected, eager), check_stride=False)
    assert shares(actual, mine) == shares(expected, eager)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    tr = st.trace(REFUSED[name], (ROWS,))
    tr(like(ROWS))
    with pytest.raises(InputMismatchError, match=r"x's strides, which .* \(3, 1\) when traced and \(1, 3\) now"):
        tr(like(COLUMNS))


@pytest.mark.parametrize("name", ["reshape, written", "contiguous, written", "flatten, written"])
def test_refused_where_the_example_was_copied(name):
    tr = st.trace(REFUSED[name], (COLUMNS,))
    with pytest.raises(InputMismatchError, match=r"x's strides, which .* \(1, 3\) when traced and \(3, 1\) now"):
        tr(like(ROWS))


def test_an_op_that_fails_for_strides_says_which():
    tr = st.trace(lambda x: x.view(-1), (ROWS,))
    with pytest.raises(InputMismatchError, match=r"x had strides \(3, 1\) when traced and has \(1, 3\) now"):
        tr(COLUMNS)


@pytest.mark.parametrize("form", ["step", "decomposed", "split"])
def test_a_view_inside_of_a_linear_layer_for_dynamic_sizes_says_which(form):
    linear = torch.nn.Linear(4, 4)

    def step(x):
        loss = linear(x).sum()
        loss.backward()
        return loss

    model = step if form == "step" else linear
    tr = st.trace(model, (torch.randn(2, 3, 4),), dynamic_shapes=({0: torch.export.Dim("batch", max=9)},))
    run = {"step": tr, "decomposed": tr.decompose(), "split": tr.split_backward()}[form]
    run(torch.randn(5, 3, 4))
    other = torch.randn(3, 5, 4).transpose(0, 1)
    said = r"strides \(12, 4, 1\) when traced and has \(4, 20, 1\) now.* give a copy in the strides of the trace"
    with pytest.raises(InputMismatchError, match=said):
        run(other)
    run(other.contiguous())


def test_conjugation_that_was_asked_for():
    x = torch.randn(3, dtype=torch.complex64)
    tr = st.trace(lambda x: x * 2 if x.is_conj() else x, (x,))
    with pytest.raises(InputMismatchError, match=r"x\.is_conj\(\)"):
        tr(x.conj())


# Gradients -----------------------------------------------------------------------------------------------------------


def add_into(x, total):
    total.add_(x)
    return total.view(-1)


@pytest.mark.parametrize("traced_with_grad", [True, False])
@pytest.mark.parametrize("which", [0, 1])
def test_a_gradient_that_a_write_would_lose_is_refused(which, traced_with_grad):
    with torch.set_grad_enabled(traced_with_grad):
        tr = st.trace(add_into, (torch.ones(2), torch.ones(2)))
    given = [torch.ones(2), torch.ones(2)]
    given[which].requires_grad_()
    with pytest.raises(InputMismatchError, match=f"{('x', 'total')[which]} requires grad now"):
        tr(*given)
    with torch.no_grad():
        tr(*given)


def test_a_gradient_that_was_in_the_trace_is_kept():
    x = torch.ones(2, requires_grad=True)
    tr = st.trace(add_into, (x, torch.ones(2)))
    total = torch.ones(2)
    tr(x, total).sum().backward()
    assert total.requires_grad
    torch.testing.assert_close(x.grad, torch.ones(2))


def test_an_expanded_tensor_for_an_input_that_is_written_is_refused():
    def add(x):
        x.add_(1)
        return x * 2

    trace = st.trace(add, (torch.ones(3, 4),))
    with pytest.raises(InputMismatchError, match=r"x, which the model writes, has elements that share memory"):
        trace(torch.ones(3, 1).expand(3, 4))
    with pytest.raises(InputMismatchError, match=r"x, which the model writes, has elements that share memory"):
        trace(torch.ones(12).as_strided((3, 4), (2, 1)))
    for other in (torch.ones(4, 3).t(), torch.ones(6, 8)[::2, ::2], torch.ones(3, 1, 4)[:, 0]):
        assert torch.equal(trace(other), torch.full((3, 4), 4.0))
    assert torch.equal(trace(torch.ones(3, 4)), torch.full((3, 4), 4.0))
