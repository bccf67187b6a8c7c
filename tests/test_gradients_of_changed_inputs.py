"""Gradients with respect to an input that was itself computed, and that the forward changes.

change of the input  x  results  x  what the loss is of
    ->  gradients as in eager: with respect to what the input is after the call, and to the leaf
"""

import itertools

import pytest
import torch

import scopetrace as st

CHANGES = {
    "t_": lambda a: a.t_(),
    "transpose_": lambda a: a.transpose_(0, 1),
    "swapaxes_": lambda a: a.swapaxes_(0, 1),
    "unsqueeze_": lambda a: a.unsqueeze_(0),
    "squeeze_": lambda a: a.squeeze_(0),
    "mul_": lambda a: a.mul_(2),
    "relu_": lambda a: a.relu_(),
    "add_": lambda a: a.add_(1),
    "zero_": lambda a: a.zero_(),
    "copy_": lambda a: a.copy_(a * a),
    "masked_fill_": lambda a: a.masked_fill_(a > 0.5, 2),
    "part": lambda a: a[0].mul_(3),
    "view": lambda a: a.view(-1).mul_(2),
    "t_ and mul_": lambda a: a.t_().mul_(2),
    "mul_ and t_": lambda a: a.mul_(2).t_(),
    "under no_grad": lambda a: torch.no_grad()(a.mul_)(2),
    "detached": lambda a: a.detach().mul_(2),
    "data": lambda a: setattr(a, "data", a.data * 2),
    "set_": lambda a: torch.no_grad()(a.set_)(a.detach() * 3),
    "resize_": lambda a: a.resize_(3, 2),
    "none": lambda a: None,
}
RESULTS = {
    "after": lambda a, b: (a.mul(2),),
    "itself": lambda a, b: (a,),
    "view": lambda a, b: (a.unsqueeze(0),),
    "two views": lambda a, b: (a[0], a.unsqueeze(0)),
    "after and view": lambda a, b: (a.mul(2), a.unsqueeze(0)),
    "after and itself": lambda a, b: (a * 3, a),
    "before": lambda a, b: (b,),
    "before and view": lambda a, b: (b, a[0]),
    "before and itself": lambda a, b: (b, a),
    "another and itself": lambda a, b: (torch.ones(2), a),
}


def outcome(run, with_input=False):
    """Values, then the gradients with respect to the input after the call, None where torch raises, and the leaf."""
    leaf = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
    x = leaf.clone()
    results = run(x)
    total = sum(
        (t * torch.arange(1.0, t.numel() + 1).view(t.shape)).sum() for t in ((*results, x) if with_input else results)
    )
    gradients = []
    for of in (x, leaf):
        try:
            gradients.append(torch.autograd.grad(total, of, retain_graph=True)[0])
        except RuntimeError:
            gradients.append(None)
    return [t.detach().clone() for t in (*results, x)], *gradients


def forward_of(change, results):
    def forward(a):
        before = a * 5
        CHANGES[change](a)
        return RESULTS[results](a, before)

    return forward


@pytest.mark.sample(6)
@pytest.mark.parametrize("change", CHANGES)
def test_a_computed_input_is_changed(change):
    example, refused = (torch.ones(2, 3, requires_grad=True).clone(),), 0
    for results, with_input in itertools.product(RESULTS, (False, True)):
        forward = forward_of(change, results)
        try:
            expected = outcome(forward, with_input)
        except RuntimeError:
            continue
        try:
            found = outcome(st.trace(forward, example), with_input)
        except st.errors.FunctionalizationError:
            refused += 1
            continue
        torch.testing.assert_close(found, expected, msg=f"{results}, {with_input}")
    assert not refused or change in ("data", "set_")


@pytest.mark.parametrize("change", ["mul_", "t_", "view"])
def test_another_form_of_the_graph_does_not_write(change, tmp_path):
    """What a compiler makes of the graph returns new values: a gradient that would lack a part is refused."""
    trace = st.trace(forward_of(change, "after and view"), (torch.ones(2, 3, requires_grad=True).clone(),))
    compiled = torch.fx.Interpreter(trace.graph_module).run
    message = "a was computed by other ops, and the model changes it.*functional=False"
    with pytest.raises(st.errors.InputMismatchError, match=message):
        outcome(lambda x: trace.run(compiled, x))
    with pytest.raises(st.errors.InputMismatchError, match=message):
        outcome(trace.decompose())
    trace.save(tmp_path / "a.st")
    expected = outcome(forward_of(change, "after and view"))
    torch.testing.assert_close(outcome(st.load(tmp_path / "a.st")), expected)
    torch.testing.assert_close(outcome(trace.to_module()), expected)


class Counted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, a):
        self.count += 1
        a.mul_(2)
        return a * self.count, a[0]


def test_both_forms_write_to_the_buffers_of_one_model(tmp_path):
    net, leaf = Counted(), torch.ones(2, 3, requires_grad=True)
    st.trace(net, (leaf.clone(),)).save(tmp_path / "net.st")
    loaded = st.load(tmp_path / "net.st")
    net.count.zero_()
    for run in (st.trace(net, (leaf.clone(),)), loaded, loaded.to_module()):
        start = run(torch.ones(2, 3))[0][0, 0].item()
        assert run(leaf.clone())[0][0, 0].item() == start + 2
        with torch.no_grad():
            assert run(leaf.clone())[0][0, 0].item() == start + 4
