"""A forward that catches what it gets in a trace only: right, or refused; never the way for errors in silence."""

import warnings

import pytest
import torch
from forwards import loaded

import scopetrace as st

ASKED = """
x.sum().item()  float(x.sum())  len(x.tolist())  x.sum().numpy().item()  (2. if x.sum() > 100 else 3.)  len(repr(x))
len(str(x.sum().item()))  hash(x.sum().item())  x[0].__int__()  len(pickle.dumps(x))  len(copy.deepcopy(x))
x.data_ptr() * 0 + 2.  x.untyped_storage().data_ptr() * 0 + 2  x.__array__().sum().item()  list(x.cpu())[0].item()
x.nonzero().shape[0]  x[x > 1].shape[0]  int(torch.arange(int(x.sum()))[0])  x.apply_(lambda v: v * 2).sum().item()
torch.get_rng_state().sum().item() * 0 + 2  x.share_memory_() is x  x._base is None  x.unique().shape[0]
torch.randn(1, generator=torch.Generator().manual_seed(1)).item() * 0 + 2.  x.to_mkldnn() is x
memoryview(x.numpy()) is x  x.min(0).values.item()
torch.isnan(x).any().item() + 1  bool((x > 0).all()) + 1  x.argmax().item()  f"{x.sum():.2f}"[0] == "6"
x.map_(x, max)[0] > 1
"""
HANDLERS = [
    "except Exception: k = 7.",
    "except: k = 7.",
    "except RuntimeError: k = 7.",
    "except (ValueError, RuntimeError, TypeError): k = 7.",
]


def outcome(run, x):
    """The result; None where it is refused."""
    try:
        return run(x)
    except st.errors.ScopetraceError:
        return None


@pytest.mark.parametrize("question", [q for line in ASKED.splitlines() for q in line.split("  ") if q])
@pytest.mark.filterwarnings("ignore")
def test_a_question_whose_error_the_forward_catches_is_right_or_refused(question):
    for handler in HANDLERS:
        text = f"import copy, pickle, torch\ndef make(x):\n    try: k = {question}\n    {handler}\n    return x * k\n"
        forward = loaded(text)["make"]
        try:
            trace = outcome(lambda x, forward=forward: st.trace(forward, (x,)), torch.tensor([1.0, 2.0, 3.0]))
        except Exception as error:
            with pytest.raises(type(error)):
                forward(torch.tensor([1.0, 2.0, 3.0]))
            continue
        found = trace and outcome(trace, torch.tensor([2.0, 4.0, 6.0]))
        if found is not None:
            torch.testing.assert_close(found, forward(torch.tensor([2.0, 4.0, 6.0])), msg=handler)


def test_the_error_says_that_the_forward_caught_it():
    def forward(x):
        try:
            n = float(x.sum())
        except Exception:
            n = 0
        return x * n

    with pytest.raises(st.errors.DataDependentError, match="needs the value of a tensor") as found:
        st.trace(forward, (torch.ones(2),))
    assert "n = float(x.sum())" in str(found.value)
    assert "the forward has caught this error" in found.value.__notes__[-1]
    trace = st.trace(forward, (torch.ones(2),), specialize=True)
    assert trace(torch.ones(2)).tolist() == [2, 2]


def test_errors_that_eager_has_too_may_be_caught():
    def forward(x):
        try:
            return x @ x
        except RuntimeError:
            return x @ x.T

    x = torch.randn(2, 3)
    assert torch.equal(st.trace(forward, (x,))(x), x @ x.T)


def test_a_caught_write_to_a_leaf_ties_the_trace_to_the_grad_mode():
    weight = torch.ones(2, requires_grad=True)

    def forward(x):
        try:
            weight.add_(1)
        except RuntimeError:
            return x * 2
        return x

    trace = st.trace(forward, (torch.ones(2),))
    assert trace(torch.ones(2)).tolist() == [2, 2]
    with torch.no_grad(), pytest.raises(st.errors.StateMismatchError, match="is_grad_enabled"):
        trace(torch.ones(2))


def test_what_torch_catches_itself_is_no_matter_of_the_forward():
    def forward(x):
        with warnings.catch_warnings():
            return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)

    x = torch.randn(2, requires_grad=True)
    assert torch.equal(st.trace(forward, (x,))(x), x.sin())
