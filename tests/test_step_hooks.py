"""Hooks that a training step makes, or that its modules have: they run as part of its program, as in eager."""

import pytest
import torch
from torch.autograd import graph
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

import scopetrace as st
from tests.steps import Net, run_beside_eager, step_of


def threefold(gradient):
    return gradient * 3


def of_module(module, before, after):
    return tuple(None if g is None else g * 3 for g in before)


def before_module(module, after):
    return tuple(g * 3 for g in after)


def double_gradient(t):
    t.grad.mul_(2)


def on_a_result(model, x):
    y = model.a(x)
    y.register_hook(threefold)
    model.b(y.relu()).sum().backward()


def around_a_write(model, x):
    y = model.a(x)
    y.register_hook(lambda gradient: gradient.mul_(2))
    y.mul_(2)
    y.register_hook(lambda gradient: gradient / gradient.norm())
    model.b(y.relu()).sum().backward()


def keeping_a_gradient(model, x):
    y = model.a(x)
    y.retain_grad()
    model.b(y.relu()).sum().backward()
    model.a.bias.grad += y.grad.norm()


def on_several(model, x):
    seen = []
    y = model.a(x)
    z = y * 2
    graph.register_multi_grad_hook((y, z), lambda found: seen.append(sum(g.sum() for g in found)))
    model.b(z.relu()).sum().backward()
    model.a.bias.grad += seen[0]


class Reversed(torch.autograd.Function):
    """The result is a view of the argument."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def on_a_view_in_a_region(model, x):
    def region(x):
        y = Reversed.apply(model.a(x))
        y.register_hook(threefold)
        return model.b(y.relu())

    checkpoint(region, x, use_reentrant=False).sum().backward()


def after_accumulation(model, x):
    y = x.clone().requires_grad_()
    y.register_hook(threefold)
    y.register_post_accumulate_grad_hook(double_gradient)
    model(y).sum().backward()
    model.a.bias.grad += y.grad.sum()


def of_a_derivative(model, x):
    y = model.a(x)
    y.register_hook(lambda gradient: gradient * y)
    slopes = torch.autograd.grad(model.b(y.sin()).sum(), model.a.weight, create_graph=True)
    slopes[0].square().sum().backward()


def on_a_module(register, hook):
    def run(model, x):
        handle = getattr(model.b, register)(hook)
        model(x).sum().backward()
        handle.remove()

    return run


def keeping_what_it_sees(model, x):
    """The gradient of the parameter is that tensor in autograd, and is written afterwards."""
    seen = []
    bias = model.a.bias + 1
    bias.register_hook(lambda gradient: seen.append(gradient))
    made = torch.zeros(4, requires_grad=True)
    made.register_hook(lambda gradient: seen.append(gradient))
    (torch.nn.functional.linear(x + made, model.a.weight, bias)).sum().backward()
    model.a.bias.grad.mul_(3)
    made.grad.mul_(3)
    model.a.weight.grad += sum(t.sum() for t in seen)


def accumulating_where_computed(model, x):
    """`inputs=` makes a tensor retain its gradient, if it does not anyway, in later backwards too."""
    y, z = model.a(x), model.a(x)
    y.retain_grad()
    loss = (y * z).sum()
    loss.backward(inputs=[y, z], retain_graph=True)
    loss.backward()
    model.a.bias.grad += y.grad.norm() + z.grad.sum()


HOOKS = {
    "on a result": on_a_result,
    "inputs that were computed": accumulating_where_computed,
    "that keep a gradient": keeping_what_it_sees,
    "around a write": around_a_write,
    "retain_grad": keeping_a_gradient,
    "on several tensors": on_several,
    "on a view by a function in a region that runs again": on_a_view_in_a_region,
    "on a leaf that the step makes": after_accumulation,
    "of a derivative": of_a_derivative,
    "full backward hook": on_a_module("register_full_backward_hook", of_module),
    "full backward pre-hook": on_a_module("register_full_backward_pre_hook", before_module),
    "backward hook": on_a_module("register_backward_hook", of_module),
    "forward hook": on_a_module("register_forward_hook", lambda module, args, out: out * 2),
}


def stepping(run):
    def make(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x):
            optimizer.zero_grad()
            run(model, x)
            optimizer.step()

        return step

    return make


def inputs(count=3):
    torch.manual_seed(1)
    return [(torch.randn(5, 4),) for _ in range(count)]


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_a_step(name):
    torch.manual_seed(0)
    run_beside_eager(stepping(HOOKS[name]), Net(), inputs())


def test_hooks_that_modules_have_before_the_step():
    torch.manual_seed(0)
    model = Net()
    model.a.register_full_backward_hook(of_module)
    model.b.register_full_backward_pre_hook(before_module)
    model.norm.register_full_backward_hook(of_module)
    trace = run_beside_eager(stepping(lambda model, x: model(x * model.b.bias.sum()).sum().backward()), model, inputs())
    scaled = [n for n in trace.call("model.norm").backward_nodes if n.target is torch.ops.aten.mul.Tensor]
    assert any(n.args[1] == 3 for n in scaled)  # a hook's ops belong to the call of its module
    trace.lint()


def differentiated_again(model, x):
    y = model.a(x)
    y.register_hook(threefold)
    loss = y.sum()
    loss.backward(retain_graph=True)
    return loss


def with_a_gradient(model, x):
    y = model.a(x)
    y.retain_grad()
    y.sum().backward()
    return y


def on_a_parameter(model, x):
    model.a.weight.register_hook(threefold)
    model(x).sum().backward()


@pytest.mark.parametrize("run", [differentiated_again, with_a_gradient, on_a_parameter])
def test_hooks_that_act_after_the_step_are_refused(run):
    model = Net()
    with pytest.raises(st.errors.UnsupportedOpError, match="the forward makes or uses a hook") as error:
        st.trace(lambda x: run(model, x), inputs()[0])
    model.a.weight._backward_hooks = None
    assert "test_step_hooks.py" in error.value.source


def test_hooks_of_a_parameter_that_is_replaced():
    model, x = Net(), torch.randn(2, 4)
    model.a.weight.register_hook(lambda g: g * 2)
    step = step_of(model)
    trace = st.trace(step, (x,))
    trace(x)
    hooked = model.a.weight
    model.a.weight = torch.nn.Parameter(hooked.detach())
    with pytest.raises(st.errors.StateMismatchError, match="hooks on gradients"):
        trace(x)
    model.a.weight = hooked
    trace(x)
    plain = st.trace(step_of(twin := Net()), (x,))
    twin.a.weight = torch.nn.Parameter(twin.a.weight.detach())
    plain(x)
    twin.a.weight.register_hook(lambda g: g * 2)
    with pytest.raises(st.errors.StateMismatchError, match="hooks on gradients"):
        plain(x)


def test_a_hook_after_accumulation_that_returns_something_raises_as_in_eager():
    model, (x,) = Net(), inputs()[0]
    model.a.bias.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))
    with pytest.raises(RuntimeError, match="post accumulate grad hooks should return None"):
        step_of(model)(x)
    with pytest.raises(RuntimeError, match="post accumulate grad hooks should return None"):
        st.trace(step_of(model), (x,))


FACTOR = 1.0


class Factor:
    """What hooks read; `scaled` is one itself."""

    def __init__(self):
        self.value = 1.0

    def scaled(self, gradient):
        return gradient * self.value


def set_global(_):
    global FACTOR
    FACTOR = 2.0


def set_attribute(factor):
    factor.value = 2.0


READING = {
    "a global, by an op": (lambda _: lambda g: g * FACTOR, set_global),
    "a global, without an op": (lambda _: lambda g: g * 2 if FACTOR > 1 else None, set_global),
    "an object around": (lambda factor: lambda g: g * factor.value, set_attribute),
    "its object": (lambda factor: factor.scaled, set_attribute),
}
PLACES = {
    "the gradient of a parameter": lambda model, _, f: model.a.weight.register_hook(f),
    "after accumulation": lambda model, _, f: model.a.weight.register_post_accumulate_grad_hook(
        lambda p: setattr(p, "grad", p.grad if (new := f(p.grad)) is None else new)
    ),
    "the call of a module": lambda model, _, f: model.a.register_forward_hook(lambda m, given, out: f(out)),
    "the backward of a module": lambda model, _, f: model.b.register_full_backward_pre_hook(
        lambda m, given: None if (new := f(given[0])) is None else (new,)
    ),
    "the step of an optimizer": lambda _, optimizer, f: optimizer.register_step_pre_hook(
        lambda o, args, kwargs: setattr(
            p := o.param_groups[0]["params"][0], "grad", p.grad if (n := f(p.grad)) is None else n
        )
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("reading", READING)
def test_what_a_hook_reads_is_compared_at_a_call(reading, place, monkeypatch):
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    hook, change = READING[reading]
    model, factor = Net(), Factor()
    optimizer = torch.optim.SGD(model.parameters())
    PLACES[place](model, optimizer, hook(factor))

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    (x,) = inputs()[0]
    trace = st.trace(step, (x,))
    trace(x)
    change(factor)
    with pytest.raises(st.StateMismatchError, match=r"(FACTOR|value).*: 1\.0 when traced and 2\.0 now"):
        trace(x)


@pytest.mark.parametrize("place", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_count_of_a_hook_on_which_its_result_depends(place):
    model, counts = Net(), [0]

    def counted(t):
        counts[0] += 1
        (t if t.grad is None else t.grad).mul_(counts[0])

    getattr(model.a.weight, place)(counted)
    (x,) = inputs()[0]
    trace = st.trace(step_of(model), (x,))
    trace(x)
    with pytest.raises(st.SideEffectError, match=r"counts was \[0\] and became \[1\]"):
        trace(x)


def test_hooks_of_all_optimizers_are_compared_at_a_call():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters())

    def step(x):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    (x,) = inputs()[0]
    trace = st.trace(step, (x,))
    trace(x)
    hook = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: None)
    try:
        with pytest.raises(st.StateMismatchError, match=r"the hooks of all optimizers.* optimizer.step\(\)"):
            trace(x)
    finally:
        hook.remove()
    trace(x)


class Trainer:
    """A step of an object that has `__slots__`."""

    __slots__ = ("model", "optimizer")

    def __init__(self, model):
        self.model, self.optimizer = model, torch.optim.SGD(model.parameters(), 0.1)

    def step(self, x):
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss


def test_the_step_of_an_object_with_slots():
    trace = run_beside_eager(lambda model: Trainer(model).step, given=inputs())
    assert any(mutation.name == "model.a.weight" for mutation in trace.mutations)


@pytest.mark.parametrize("kind", ["register_hook", "register_prehook"])
def test_a_hook_on_the_node_that_adds_to_a_gradient_is_refused(kind):
    model, (x,) = Net(), inputs()[0]
    node = model.a.weight.expand_as(model.a.weight).grad_fn.next_functions[0][0]
    hook = getattr(node, kind)(lambda *_: None)
    with pytest.raises(st.UnsupportedOpError, match=r"(?s)hook hangs on the node .*register_post_accumulate_grad_hook"):
        st.trace(step_of(model), (x,))
    hook.remove()
    st.trace(step_of(model), (x,))


def of_a_closure(p):
    return lambda x: (p * x).sum().backward(), ()


def of_a_list_of_an_object(p):
    holder = Factor()
    holder.value = [p]
    return lambda x: (holder.value[0] * x).sum().backward(), ()


def of_an_argument(p):
    return lambda p, x: (p * x).sum().backward(), (p,)


def of_a_module_among_the_arguments(p):
    return lambda module, x: (module[0] * x).sum().backward(), (torch.nn.ParameterList([p]),)


@pytest.mark.parametrize(
    "place", [of_a_closure, of_a_list_of_an_object, of_an_argument, of_a_module_among_the_arguments]
)
def test_hooks_of_parameters_that_are_in_no_module_of_the_model(place, monkeypatch):
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    p = torch.nn.Parameter(torch.ones(4))
    p.register_hook(lambda g: g * 2 if FACTOR > 1 else None)
    step, args = place(p)
    (x,) = inputs()[0]
    trace = st.trace(step, (*args, x))
    trace(*args, x)
    set_global(None)
    with pytest.raises(st.StateMismatchError, match=r"FACTOR.*: 1\.0 when traced and 2\.0 now"):
        trace(*args, x)
