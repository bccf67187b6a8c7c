"""`a.set_(b)` that autograd does not see: `a` keeps its history and gets the data, or the trace is refused."""

import itertools

import pytest
import torch

import scopetrace as st

KINDS = {"leaf": lambda t: t, "computed": lambda t: t * 1, "plain": lambda t: t.detach().clone()}
SETS = {
    "tensor": lambda a, b: torch.no_grad()(a.set_)(b),
    "view": lambda a, b: torch.no_grad()(a.set_)(b.view(2, 2).view(4)),
    "data": lambda a, b: setattr(a, "data", b.data),
}
WRITES = {
    "none": lambda a, b: None,
    "hidden, first": lambda a, b: torch.no_grad()(a.mul_)(2),
    "hidden, second": lambda a, b: torch.no_grad()(b.mul_)(2),
    "seen, first": lambda a, b: a.mul_(2),
    "seen, second": lambda a, b: b.mul_(2),
}
RESULTS = {
    "sum": lambda a, b: (a + b,),
    "product": lambda a, b: (a * b,),
    "first": lambda a, b: (a * 1,),
    "themselves": lambda a, b: (a, b),
    "view": lambda a, b: (a[1:], b * 2),
}


def outcome(run, first, second):
    """Values, and the gradients of each result with respect to both leaves."""
    leaves = [torch.linspace(-1, 1, 4).requires_grad_(), torch.linspace(2, 5, 4).requires_grad_()]
    args = [KINDS[kind](leaf) for kind, leaf in zip((first, second), leaves, strict=True)]
    results = run(*args)
    gradients = [
        torch.autograd.grad((t * torch.arange(1.0, t.numel() + 1)).sum(), leaf, retain_graph=True, allow_unused=True)
        if t.requires_grad
        else None
        for t, leaf in itertools.product(results, leaves)
    ]
    return [t.detach().clone() for t in (*results, *args)], gradients


@pytest.mark.sample(4)
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(("first", "second"), [*itertools.product(KINDS, KINDS)])
def test_a_tensor_gets_the_memory_of_another(first, second, part):
    served = 0
    for gets, write, result in [*itertools.product(SETS, WRITES, RESULTS)][part::4]:

        def forward(a, b, gets=gets, write=write, result=result):
            SETS[gets](a, b)
            WRITES[write](a, b)
            return RESULTS[result](a, b)

        try:
            expected = outcome(forward, first, second)
        except RuntimeError:
            continue
        args = [KINDS[kind](torch.ones(4, requires_grad=True)) for kind in (first, second)]
        try:
            found = outcome(st.trace(forward, tuple(args)), first, second)
        except st.errors.ScopetraceError:
            continue
        torch.testing.assert_close(found, expected, msg=f"{gets}, {write}, {result}: {expected[1]}, {found[1]}")
        served += 1
    assert served >= 3


def test_of_a_graph():
    def forward(a, b):
        with torch.no_grad():
            a.set_(b)
            b.mul_(2)
        return a + b

    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    graph.call_function(torch._C._set_grad_enabled, (False,))
    graph.call_method("set_", (a, b))
    graph.call_method("mul_", (b, 2))
    graph.call_function(torch._C._set_grad_enabled, (True,))
    graph.output(graph.call_method("add", (a, b)))
    args = [torch.ones(4, requires_grad=True) for _ in range(2)]
    with pytest.raises(st.errors.FunctionalizationError, match="gets memory that is written"):
        st.trace(forward, tuple(args))
    with pytest.raises(st.errors.FunctionalizationError, match="gets memory that is written"):
        st.functionalize(torch.fx.GraphModule({}, graph), args)
