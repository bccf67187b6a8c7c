"""A trace, or its module, that is called in the forward of another trace: what the inner one depends on counts."""

import re

import pytest
import torch
from torch import nn

import scopetrace as st

X = torch.ones(2, 4)
SETTINGS = {"gain": 2.0}


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.scale = 2.0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        y = self.fc(x) * self.scale * SETTINGS["gain"]
        return y if self.training and x.is_contiguous() and not x.requires_grad else -y


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + 1


FORMS = {
    "a trace": lambda tr: lambda x: tr(x) + 1,
    "its run": lambda tr: lambda x: tr.run(tr.graph_module, x) + 1,
    "its module": lambda tr: Outer(tr.to_module()),
    "its layers as functions": lambda tr: lambda x: tr.outline("layers")(x) + 1,
}
CHANGES = {
    "an attribute": (lambda m: setattr(m, "scale", 3.0), "scale, which the model reads at *in forward: y = self.fc(x)"),
    "a global": (lambda m: SETTINGS.update(gain=3.0), "SETTINGS['gain'], which the model reads at *in forward: y = "),
    "the mode": (lambda m: m.eval(), "training, which the model reads at *: True when traced and False now"),
    "a hook": (lambda m: m.fc.register_forward_hook(lambda *_: None), "forward hooks of fc: 0 when traced and 1 now"),
    "a submodule": (lambda m: setattr(m, "fc", nn.Linear(4, 4)), "fc, which the model reads at *"),
}
INPUTS = {
    "other strides": (torch.ones(4, 2).t(), "x.is_contiguous(), which the model reads at *"),
    "gradients": (X.clone().requires_grad_(), "x.requires_grad, which the model reads at *"),
}


def refusal(words):
    return re.escape(words).replace(r"\*", ".*")


def traced(form):
    model = Scaled()
    return model, st.trace(FORMS[form](st.trace(model, (X,))), (X,))


@pytest.fixture(autouse=True)
def _settings(monkeypatch):
    monkeypatch.setitem(SETTINGS, "gain", 2.0)


@pytest.mark.parametrize("form", FORMS)
def test_it_does_what_the_model_does(form):
    model, tr = traced(form)
    for x in (X, X * 3):
        assert torch.allclose(tr(x), model.fc(x) * 4 + 1)
    assert model.calls == 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_what_the_inner_one_read_is_seen(what, form):
    change, words = CHANGES[what]
    model, tr = traced(form)
    change(model)
    with pytest.raises(st.errors.StateMismatchError, match=refusal(words)):
        tr(X)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("what", INPUTS)
def test_an_input_that_answers_otherwise_is_seen(what, form):
    x, words = INPUTS[what]
    with pytest.raises(st.InputMismatchError, match=refusal(words)):
        traced(form)[1](x)


def test_a_block_of_the_outer_one_that_switches_autograd():
    inner = st.trace(lambda x: x * 2 if torch.is_grad_enabled() else x * 3, (X,))
    with torch.no_grad():
        without = st.trace(lambda x: x * 2 if torch.is_grad_enabled() else x * 3, (X,))

    def forward(x):
        with torch.no_grad():
            return without(x) + 1

    assert torch.equal(st.trace(forward, (X,))(X), X * 3 + 1)
    tr = st.trace(lambda x: inner(x) + 1, (X,))
    with torch.no_grad(), pytest.raises(st.errors.StateMismatchError, match="is_grad_enabled"):
        tr(X)


def test_a_step_with_an_optimizer_is_refused_inside_of_another_trace():
    fc = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(fc.parameters(), lr=0.1)

    def step(x):
        fc(x).sum().backward()
        optimizer.step()
        return x

    tr = st.trace(step, (X,))
    with pytest.raises(st.UnsupportedOpError, match="a traced training step is called inside of another trace"):
        st.trace(lambda x: tr(x) + 1, (X,))
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_the_text_of_what_it_read_names_no_code_of_scopetrace():
    inner = st.trace(Scaled(), (X,))
    text = str(st.trace(lambda x: inner(x) + 1, (X,)).specializations)
    assert "scale" in text
    assert not re.search(r"\bk\d|functools|\.scopetrace|a call", text), text
