"""What autograd has saved, read in a backward that is differentiated again, while aliases of it were made in between.

    y = x.exp(); z = y.detach()
    g, = torch.autograd.grad((y.sin() + z * y).sum(), x, create_graph=True)    # exp's backward reads y, not z

Autograd gives a saved result as another tensor of the same memory, and `z` lies there too.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import scopetrace as st

MAKERS = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1, keepdim=True) * x,
    "exp": lambda x: x.exp(),
    "exp_": lambda x: x.clone().exp_(),
    "expm1": lambda x: x.expm1(),
    "tan": lambda x: x.tan(),
    "tanh": lambda x: x.tanh(),
    "tanh_": lambda x: x.clone().tanh_(),
    "sigmoid": lambda x: x.sigmoid(),
    "sigmoid_": lambda x: x.clone().sigmoid_(),
    "logsigmoid": F.logsigmoid,
    "relu": lambda x: x.relu(),
    "elu": F.elu,
    "selu": F.selu,
    "mish": F.mish,
    "softplus": F.softplus,
    "sqrt": lambda x: (x * x + 1).sqrt(),
    "rsqrt": lambda x: (x * x + 1).rsqrt(),
    "reciprocal": lambda x: (x * x + 1).reciprocal(),
    "pow": lambda x: 2.0**x,
    "mul": lambda x: x * x,
    "prod": lambda x: x.prod(-1, keepdim=True).expand(4, 6),
    "cumprod": lambda x: x.cumprod(-1),
    "norm": lambda x: x.norm(dim=-1, keepdim=True) * x,
    "std": lambda x: x.std(-1, keepdim=True) * x,
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    "amax": lambda x: x.amax(-1, keepdim=True) * x,
    "inverse": lambda x: (x @ x.mT + torch.eye(4)).inverse() @ x,
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(4)) @ x,
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True),
}


def _without_grad(alias):
    with torch.no_grad():
        return alias()


ALIASES = {
    "detach": lambda y: y.detach(),
    "two detaches": lambda y: y.detach() + y.detach().detach(),
    "detach of an alias": lambda y: y.view_as(y).detach(),
    "view of detach": lambda y: y.detach().view(y.shape),
    "detached leaf": lambda y: y.detach().requires_grad_(),
    "written copy": lambda y: y.detach().clone().mul_(2),
    "data": lambda y: y.data,
    "view": lambda y: y.view(y.shape),
    "view under no_grad": lambda y: _without_grad(lambda: y.view(y.shape)),
    "expand": lambda y: y.expand(y.shape),
    "contiguous": lambda y: y.contiguous(),
    "none": lambda y: y * 0,
}


def _grad(loss, x):
    return torch.autograd.grad(loss, x, create_graph=True)[0]


WAYS = {
    "once": lambda loss, x: _grad(loss(x), x),
    "twice": lambda loss, x: _grad(_grad(loss(x), x).square().sum(), x),
    "two of one": lambda loss, x: (lambda y: _grad(y, x) * _grad(y * 2, x))(loss(x)),
    "checkpointed": lambda loss, x: _grad(checkpoint(loss, x, use_reentrant=False), x),
    "func": lambda loss, x: torch.func.grad(loss)(x),
    "func twice": lambda loss, x: torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum())(x),
    "vjp": lambda loss, x: torch.func.vjp(loss, x)[1](torch.ones(()))[0],
}
"""How the backward runs whose results are differentiated again."""


def function_of(make, alias, way):
    def loss(x):
        y = make(x)
        return (y.sin() + alias(y) * y).sum()

    return lambda x: way(loss, x)


def outcome(function, x):
    """The gradients of first and second order."""
    torch.manual_seed(0)
    g = function(x)
    return g.detach(), torch.autograd.grad((g * torch.linspace(1, 2, 24).view(4, 6)).sum(), x)[0]


REFUSED_BY_TORCH = [("detached leaf", way) for way in ("func", "func twice", "vjp")]
CASES = [case for case in itertools.product(MAKERS, ALIASES, WAYS) if case[1:] not in REFUSED_BY_TORCH]
EVERY = 17


def check(name, alias, way):
    function = function_of(MAKERS[name], ALIASES[alias], WAYS[way])
    x = torch.linspace(-1, 1.1, 24).view(4, 6).cos() * torch.linspace(0.5, 1.5, 24).view(4, 6)
    x.requires_grad_()
    torch.testing.assert_close(outcome(st.trace(function, (x,)), x), outcome(function, x), rtol=1e-4, atol=1e-5)


@pytest.mark.sample(5)
@pytest.mark.parametrize(("name", "alias", "way"), CASES[::EVERY])
def test_backward_reads_the_result_that_was_saved(name, alias, way):
    check(name, alias, way)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1, EVERY))
def test_backward_reads_the_result_that_was_saved_in_all_cases(start):
    for case in CASES[start::EVERY]:
        check(*case)
