"""Hooks of autograd: those made outside of the forward act in a trace; those that a forward makes are refused."""

import pytest
import torch
from torch import nn
from torch.autograd import graph
from torch.utils.checkpoint import checkpoint

import scopetrace as st

X = torch.randn(2, 4)
NET = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))


def needs_grad():
    return X.clone().requires_grad_()


def tenfold(grad):
    return grad * 10


def on_a_result(x):
    y = x * 2
    y.register_hook(tenfold)
    return y.sum()


def on_an_input(x):
    x.register_hook(tenfold)
    return (x * 2).sum()


def after_accumulation(x):
    x.register_post_accumulate_grad_hook(print)
    return (x * 2).sum()


def retained(x):
    y = x * 2
    y.retain_grad()
    return y.sum(), y


def on_a_node(x):
    y = x * 2
    y.grad_fn.register_hook(lambda inputs, outputs: (inputs[0] * 10,))
    return y.sum()


def before_a_node(x):
    y = x * 2
    y.grad_fn.register_prehook(lambda outputs: (outputs[0] * 10,))
    return y.sum()


def by_an_edge(x):
    edge = graph.get_gradient_edge(x * 2)
    edge.node.register_prehook(lambda outputs: (outputs[0] * 10,))
    return (x * 2).sum()


def on_several(x):
    y, z = x * 2, x * 3
    graph.register_multi_grad_hook((y, z), print)
    return y.sum() + z.sum()


def on_what_is_saved(x):
    with graph.saved_tensors_hooks(lambda t: t, lambda t: t * 2):
        return (x * x).sum()


class Doubling(graph.saved_tensors_hooks):
    def __init__(self):
        super().__init__(lambda t: t, lambda t: t * 2)


def by_a_class_of_the_model(x):
    with Doubling():
        return (x * x).sum()


class HookedInForward(nn.Module):
    def __init__(self, register):
        super().__init__()
        self.net = nn.Linear(4, 4)
        getattr(self.net, register)(lambda *_: None)

    def forward(self, x):
        return self.net(x).sum()


def backward_hook(x):
    return HookedInForward("register_full_backward_hook")(x)


def backward_pre_hook(x):
    return HookedInForward("register_full_backward_pre_hook")(x)


def old_backward_hook(x):
    return HookedInForward("register_backward_hook")(x)


class HookingInAHook(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)
        self.net.register_forward_hook(self.after)

    def after(self, module, args, out):
        out.register_hook(tenfold)

    def forward(self, x):
        return self.net(x).sum()


REFUSED = [
    (on_a_result, "Tensor.register_hook"),
    (on_an_input, "Tensor.register_hook"),
    (after_accumulation, "Tensor.register_post_accumulate_grad_hook"),
    (retained, "Tensor.retain_grad"),
    (on_a_node, "Tensor.grad_fn"),
    (before_a_node, "Tensor.grad_fn"),
    (by_an_edge, "Tensor.grad_fn"),
    (on_several, "Tensor."),
    (on_what_is_saved, "saved_tensors_hooks"),
    (by_a_class_of_the_model, "saved_tensors_hooks"),
    (backward_hook, "register_full_backward_hook"),
    (backward_pre_hook, "register_full_backward_hook"),
    (old_backward_hook, "Tensor.grad_fn"),
    (HookingInAHook(), "Tensor.register_hook"),
]


@pytest.mark.parametrize(
    ("run", "op"), REFUSED, ids=[getattr(run, "__name__", "in_a_module_hook") for run, _ in REFUSED]
)
def test_a_hook_of_the_forward_is_refused_with_op_line_and_way_out(run, op):
    with pytest.raises(st.errors.UnsupportedOpError) as error:
        st.trace(run, (needs_grad(),))
    assert op in error.value.op
    assert "test_hooks.py" in error.value.source
    assert "outside of the forward" in error.value.hint


WITHOUT_GRADIENTS = [on_what_is_saved, by_a_class_of_the_model, backward_hook, backward_pre_hook, old_backward_hook]


@pytest.mark.parametrize("run", WITHOUT_GRADIENTS)
def test_where_no_gradient_is_recorded_a_hook_does_nothing(run):
    with torch.no_grad():
        tr = st.trace(run, (X,))
        torch.testing.assert_close(tr(X).shape, run(X).shape)


def asks_whether_there_is_a_node(x):
    return x * 2 if (x * 3).grad_fn is None else x


def asks_whether_it_is_a_leaf(x):
    return x * 2 if (x * 3).is_leaf else x * 5


def test_questions_about_history_are_answered_as_in_eager():
    x = needs_grad()
    torch.testing.assert_close(st.trace(asks_whether_it_is_a_leaf, (x,))(x), asks_whether_it_is_a_leaf(x))
    torch.testing.assert_close(st.trace(asks_whether_it_is_a_leaf, (X,))(X), asks_whether_it_is_a_leaf(X))
    torch.testing.assert_close(st.trace(asks_whether_there_is_a_node, (X,))(X), asks_whether_there_is_a_node(X))
    with pytest.raises(st.errors.UnsupportedOpError, match="a node of autograd"):
        st.trace(asks_whether_there_is_a_node, (x,))


def gradients(program, *args):
    NET.zero_grad()
    program(*args).sum().backward()
    return [p.grad for p in NET.parameters()] + [a.grad for a in args if a.requires_grad]


def test_hooks_made_outside_act_in_calls_of_a_trace():
    seen, x, y = [], needs_grad(), needs_grad()
    weight = NET[0].weight
    handles = [
        weight.register_hook(tenfold),
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p)),
        x.register_hook(tenfold),
        y.register_hook(tenfold),
    ]
    tr = st.trace(NET, (X,))
    torch.testing.assert_close(gradients(tr, x), gradients(NET, y))
    assert len(seen) == 2
    for handle in handles:
        handle.remove()


def test_hooks_outside_where_the_forward_itself_differentiates():
    def f(x, by=NET[0].weight):
        return torch.autograd.grad(NET(x).sum(), by)[0]

    handle, hooked = NET[0].weight.register_hook(tenfold), needs_grad()
    hooked.register_hook(tenfold)
    with pytest.raises(st.errors.UnsupportedOpError, match="has a hook"):
        st.trace(lambda x: f(x, x), (hooked,))
    tr = st.trace(f, (X,))
    torch.testing.assert_close(tr(X), f(X))
    handle.remove()
    torch.testing.assert_close(st.trace(f, (X,))(X), f(X))
    with pytest.raises(st.errors.StateMismatchError, match="hooks on gradients"):
        tr(X)


def checkpointed(x):
    return checkpoint(NET, x, use_reentrant=False)


def offloaded(x):
    with graph.save_on_cpu():
        return NET(x)


@pytest.mark.parametrize("run", [checkpointed, offloaded])
def test_hooks_of_torch_that_keep_values_and_gradients_go_on_working(run):
    x, y = needs_grad(), needs_grad()
    tr = st.trace(run, (needs_grad(),))
    torch.testing.assert_close(tr(x), run(y))
    tr(x).sum().backward()
    run(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_what_is_saved_may_be_written_afterwards():
    def f(x):
        with graph.allow_mutation_on_saved_tensors():
            y = x * 2
            z = y * y
            y.add_(1)
            return z + y

    x = needs_grad()
    st.trace(f, (X,))(x).sum().backward()
    torch.testing.assert_close(x.grad, 8 * X + 2)
