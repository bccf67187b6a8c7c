"""Training steps: `backward()`, gradients that accumulate, optimizers. A trace does what eager does, several times."""

import collections
import contextlib
import copy
import functools
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import scopetrace as st
from tests.steps import Net, batches, equal, run_beside_eager, step_of, step_with


def test_gradients_accumulate_whatever_was_there():
    def make(model):
        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return step

    trace = run_beside_eager(make)
    assert "gradient model.b.bias.grad: sum by aten.view.default in step" in str(trace.mutations[-1])
    trace.lint()


def test_several_backwards_and_what_is_read_in_between():
    def make(model):
        def step(x, y):
            model.zero_grad()
            for part in (x[:2], x[2:]):
                (model(part).square().mean() / 2).backward()
            with torch.no_grad():
                model.a.weight.grad *= 2
            return torch.stack([p.grad.norm() for p in model.parameters()])

        return step

    run_beside_eager(make)


def test_a_gradient_that_was_there_is_read():
    def make(model):
        model.a.weight.grad = torch.ones_like(model.a.weight)

        def step(x, y):
            model(x).sum().backward(inputs=[model.a.weight])
            return model.a.weight.grad.sum()

        return step

    trace = run_beside_eager(make)
    trace.model.__closure__[0].cell_contents.zero_grad()
    with pytest.raises(
        st.errors.StateMismatchError, match=r"model.a.weight.grad is not None.*: True when traced.*zero_grad"
    ):
        trace(*batches()[0])


def test_new_gradients_are_detached_in_place():
    """As old loops do. In eager they are no views, whatever op of backward gave them."""

    def make(model):
        def step(x, y):
            model.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).sum()
            for p in model.parameters():
                p.grad.detach_()
                p.grad.mul_(0.5)
            return norm

        return step

    run_beside_eager(make)


def test_the_gradient_of_an_input():
    model = Net().requires_grad_(False)

    def attack(x, y):
        x.grad = None
        F.cross_entropy(model(x), y).backward()
        return x + x.grad.sign()

    (x, y), *_ = batches()
    x.requires_grad_()
    trace, other = st.trace(attack, (x, y)), x.detach().clone().requires_grad_()
    assert torch.equal(trace(x, y), attack(other, y))
    assert equal(x.grad, other.grad)


def test_gradients_in_memory_of_their_own():
    """Both gradients are one tensor; that of `c` is the input itself."""

    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))

        def forward(self, x):
            (self.a + self.b).sum().backward()
            self.c.backward(x)
            self.a.grad.mul_(2)
            return self.c.grad

    model, twin = Sum(), Sum()
    trace, x = st.trace(model, (torch.ones(3),)), torch.randn(3)
    for net, run in ((model, trace), (twin, twin)):
        net.zero_grad()
        assert torch.equal(run(x), x)
    assert all(equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert len({p.grad.untyped_storage().data_ptr() for p in (*model.parameters(),)} | {x.data_ptr()}) == 4


def whole(p):
    p.grad = torch.ones_like(p)
    return p.grad


def parts_of_one(p):
    flat = torch.ones(10)
    p.grad = flat[2:].view_as(p)
    return flat


def detached(p):
    p.grad = torch.ones_like(p)
    return p.grad.detach()


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("made_by", [whole, parts_of_one, detached])
def test_gradients_in_memory_that_the_step_has_by_another_name(made_by, is_read):
    """As a buffer that all gradients are views of: it is written before, and read after they are added."""

    def make():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        buffer = made_by(model.weight)

        def step(x):
            buffer.mul_(0.5)
            model(x).square().sum().backward()
            norm = buffer.norm()
            return norm, model.weight.grad.sum() if is_read else norm

        return model, buffer, step

    (model, buffer, step), (twin, other, eager) = make(), make()
    trace = st.trace(step, (torch.ones(5, 4),))
    for _ in range(3):
        x = torch.randn(5, 4)
        assert all(map(equal, trace(x), eager(x)))
        assert equal(buffer, other)
        assert equal(model.weight.grad, twin.weight.grad)


def clamp(p):
    p.grad.clamp_(-0.01, 0.01)


class GivesSaved(torch.autograd.Function):
    """Its gradient is a tensor of the forward."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(b)
        return a * b

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0], None


def leaf(*size):
    return torch.zeros(*size, requires_grad=True)


def two_leaves(p, x):
    a, b = leaf(3), leaf(3)
    ((a + b) * x).sum().backward()
    with torch.no_grad():
        a.grad *= 2
        a -= a.grad
        b -= b.grad
    return a.detach(), b.detach()


def a_given_gradient(p, x):
    a = leaf(3)
    (a + p).backward(x)
    a.grad.add_(1)
    return a.grad


def the_same_tensor_after_more(p, x):
    a = leaf(3)
    (a * x).sum().backward()
    gradient = a.grad
    (a * x).sum().backward()
    return gradient


def of_a_sum(p, x):
    a = leaf(3)
    a.sum().backward()
    a.grad[0] = 5
    return a.grad


def laid_out_as_the_leaf(p, x):
    a = torch.zeros(2, 3).t().requires_grad_()
    (a * x[:, None]).sum().backward()
    return a.grad


def one_that_was_saved(p, x):
    a, y = leaf(3), x * 2
    (GivesSaved.apply(a, y) + GivesSaved.apply(p, y)).sum().backward()
    a.grad.mul_(2)
    p.grad.mul_(3)
    return y, a.grad


OF_LEAVES = [
    two_leaves,
    a_given_gradient,
    the_same_tensor_after_more,
    of_a_sum,
    laid_out_as_the_leaf,
    one_that_was_saved,
]


@pytest.mark.parametrize("run", OF_LEAVES)
def test_the_gradient_of_a_leaf_that_the_step_makes(run):
    """Nobody else has its memory, as in eager."""

    def step_and_input():
        p = torch.nn.Parameter(torch.ones(3))
        return p, torch.tensor([1.0, 2.0, 3.0]), lambda x: (setattr(p, "grad", None), run(p, x))[1]

    p, x, step = step_and_input()
    q, y, eager = step_and_input()
    trace = st.trace(step, (x,))
    found, expected = trace(x), eager(y)
    found, expected = ([*t] if isinstance(t, tuple) else [t] for t in (found, expected))
    assert all(map(equal, [*found, x, p.grad], [*expected, y, q.grad]))


def on_from_here(model, x):
    x.requires_grad_(True)
    model(x).square().sum().backward()


def on_by_attribute_and_read(model, x):
    x.requires_grad = True
    model(x).square().sum().backward()
    return x.grad.sign()


def on_and_off(model, x):
    x.requires_grad_(True)
    model(x).square().sum().backward()
    gradient, x.grad = x.grad, None
    x.requires_grad_(False)
    (model(x + 0.1 * gradient.sign()) * x).sum().backward()
    return gradient, x.requires_grad


def off_before_backward(model, x):
    x.requires_grad_(True)
    loss = model(x).square().sum()
    x.requires_grad_(False)
    loss.backward()
    return x.grad is None


def penalty(model, x):
    x.requires_grad_(True)
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.square().sum() + gradient.square().sum()).backward()
    x.requires_grad_(False)
    return gradient.detach()


@pytest.mark.parametrize("run", [on_from_here, on_by_attribute_and_read, on_and_off, off_before_backward, penalty])
def test_an_input_that_the_step_makes_require_grad(run):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    twin = copy.deepcopy(model)
    x = torch.randn(2, 4)
    trace = st.trace(lambda x: run(model, x), (x,))
    for _ in range(3):
        x = torch.randn(2, 4)
        y = x.clone()
        found, expected = (torch.utils._pytree.tree_leaves(out) for out in (trace(x), run(twin, y)))
        same = [equal(a, b) if isinstance(a, torch.Tensor) else a is b for a, b in zip(found, expected, strict=True)]
        assert all(same) and equal(x.grad, y.grad)
        assert all(equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_hooks_run_as_part_of_the_program():
    def make(model):
        model.a.weight.register_hook(lambda g: g * 3)
        model.b.weight.register_post_accumulate_grad_hook(clamp)

        def step(x, y):
            model.zero_grad()
            model(x).square().sum().backward()

        return step

    run_beside_eager(make)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD with momentum and all else": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "SGD, foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "AdamW, a tensor as learning rate": lambda p: torch.optim.AdamW(p, torch.tensor(0.01)),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, first):
    def make(model):
        optimizer = OPTIMIZERS[name](model.parameters())

        def step(x, y):
            if first:
                optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if not first:
                optimizer.zero_grad()
            return loss

        return step

    trace = run_beside_eager(make)
    assert any(f"{type(OPTIMIZERS[name](Net().parameters())).__name__}.step" in m.module for m in trace.mutations)


class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def test_the_step_of_an_object():
    trace = run_beside_eager(lambda model: Trainer(model).step)
    assert "model.a.weight_exp_avg" in [m.name for m in trace.mutations]
    assert trace.call("model.a").module_type is torch.nn.Linear


def test_a_step_that_gets_model_optimizer_and_scaler_as_arguments():
    def made():
        torch.manual_seed(0)
        model = Net()
        return model, torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(model, optimizer, scaler, x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    ours, theirs = made(), made()
    trace = st.trace(step, (*ours, *batches()[0]))
    for batch in batches():
        assert torch.equal(trace(*ours, *batch), step(*theirs, *batch))
        assert all(map(equal, ours[0].parameters(), theirs[0].parameters()))
        torch.testing.assert_close(ours[1].state_dict(), theirs[1].state_dict(), rtol=0, atol=0)
    with pytest.raises(st.InputMismatchError, match=r"argument 1 was AdamW .* and is another one now"):
        trace(ours[0], theirs[1], ours[2], *batches()[0])


def test_settings_and_state_of_an_optimizer_are_compared_at_a_call():
    trainer, args = Trainer(Net()), batches(1)[0]
    trace = st.trace(trainer.step, args)
    trace(*args)
    trainer.optimizer.param_groups[0]["eps"] = 1.0
    with pytest.raises(st.errors.StateMismatchError, match=r"AdamW\.param_groups"):
        trace(*args)
    trainer.optimizer.param_groups[0]["eps"] = 1e-8
    trainer.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    with pytest.raises(st.errors.StateMismatchError, match=r"AdamW.* tensors when traced and another one now"):
        trace(*args)


def tie_weights(model):
    model[1].weight = model[0].weight


def give_one_gradient(model):
    model[0].weight.grad = model[1].weight.grad


@pytest.mark.parametrize("change", [tie_weights, give_one_gradient])
def test_parameters_or_gradients_that_share_memory_otherwise_than_in_the_trace(change):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model[0].zero_grad(set_to_none=False)
        model[1].zero_grad(set_to_none=False)
        model(x).square().mean().backward()
        optimizer.step()

    model(x).sum().backward()
    trace = st.trace(step, (x,))
    trace(x)
    change(model)
    with pytest.raises(st.StateMismatchError, match=r"did not share memory when traced|SGD has the parameters"):
        trace(x)


def test_the_gradient_of_a_parameter_in_no_module_is_another_in_a_later_call():
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)

    def step(x):
        before = p.grad.sum()
        p.grad = None
        (p * x).sum().backward()
        return before

    trace = st.trace(step, (torch.ones(3),))
    assert trace(torch.ones(3)) == 3
    with pytest.raises(st.StateMismatchError, match=r"grad as the same tensor"):
        trace(torch.ones(3))


def test_the_gradient_of_an_input_is_that_of_the_trace(tmp_path):
    """It is no argument: the program has the tensor itself, which a call may write, as in eager."""

    def step(x):
        before = x.grad.sum()
        (x * 2).sum().backward()
        return before

    x = torch.ones(3, requires_grad=True)
    x.grad = torch.ones(3)
    trace = st.trace(step, (x,))
    assert [trace(x).item() for _ in range(3)] == [3, 9, 15]
    other = torch.ones(3, requires_grad=True)
    other.grad = torch.ones(3)
    trace.save(tmp_path / "step")
    for run, given in ((trace, other), (st.load(tmp_path / "step"), x)):
        with pytest.raises(st.errors.InputMismatchError, match=r"x\.grad as the same tensor"):
            run(given)


def test_parameters_that_are_tied_after_the_trace():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(5, 4)

    def step(x):
        return torch.autograd.grad(model(x).square().mean(), model[0].weight)

    trace = st.trace(step, (x,))
    tie_weights(model)
    with pytest.raises(st.StateMismatchError, match="did not share memory when traced"):
        trace(x)


def test_parameters_that_are_parts_of_one_vector_after_the_trace():
    """They share a storage, and no element: a write to one leaves the others as they are."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(5, 4)
    mine = copy.deepcopy(model)

    def steps(model):
        def step(x):
            loss = model(x).square().mean()
            grads = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, g in zip(model.parameters(), grads, strict=True):
                    p -= 0.1 * g
            return loss

        return step

    trace = st.trace(steps(mine), (x,))
    for each in (model, mine):
        nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(each.parameters()).detach().clone(), each.parameters()
        )
    for _ in range(2):
        torch.testing.assert_close(trace(x), steps(model)(x))
    torch.testing.assert_close(mine.state_dict(), model.state_dict())


def test_a_parameter_that_the_optimizer_does_not_have_any_more():
    model, x = nn.Linear(4, 4), torch.randn(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model.weight.grad = None
        model.bias.grad = None
        model(x).square().mean().backward()
        optimizer.step()

    trace = st.trace(step, (x,))
    trace(x)
    model.weight = nn.Parameter(model.weight.detach().clone())
    with pytest.raises(st.StateMismatchError, match="SGD has the parameters of the model"):
        trace(x)


def test_a_trace_leaves_gradients_parameters_and_optimizer_as_they_are():
    trainer, args = Trainer(Net()), batches(1)[0]
    before = copy.deepcopy(trainer.model.state_dict())
    st.trace(trainer.step, args)
    assert all(p.grad is None for p in trainer.model.parameters())
    assert all(torch.equal(t, before[name]) for name, t in trainer.model.state_dict().items())
    for state in trainer.optimizer.state.values():
        assert not any(x.any() for x in state.values())


@pytest.mark.parametrize(("differentiates", "fails", "runs"), [(True, False, 1), (False, False, 2), (False, True, 2)])
def test_code_that_names_backward_runs_once_where_it_differentiates(differentiates, fails, runs, capsys):
    model = Net()

    def step(x):
        print("a run")
        loss = F.layer_norm(model(x), (3,)).sum()
        if fails:
            raise KeyError("no such loss")
        if differentiates:
            loss.backward()
        return loss

    x = torch.randn(4, 4)
    with pytest.raises(KeyError) if fails else contextlib.nullcontext():
        ops = {str(node.target) for node in st.trace(step, (x,)).graph_module.graph.nodes}
        assert ("aten.layer_norm.default" in ops) is not differentiates
    assert capsys.readouterr().out.count("a run") == runs


def test_training_mode_changes_buffers_and_draws():
    def make(model):
        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        def seeded(*args):
            return step(*args)

        return seeded

    model = torch.nn.Sequential(torch.nn.Conv1d(4, 8, 1), torch.nn.BatchNorm1d(8), torch.nn.Flatten())
    run_beside_eager(make, model, [(torch.randn(5, 4, 2), torch.randint(0, 16, (5,))) for _ in range(3)])


def test_a_file_of_a_step(tmp_path):
    model, args = Net(), batches(1)[0]

    def step(x, y):
        F.cross_entropy(model(x), y).backward()

    trace = st.trace(step, args)
    trace.save(tmp_path / "step.st")
    loaded = st.load(tmp_path / "step.st")
    loaded(*args)
    trace(*args)
    held = dict(loaded.graph_module.named_parameters())
    assert all(torch.equal(held[f"model.{name}"].grad, p.grad) for name, p in model.named_parameters())


def test_a_loaded_step_reads_the_gradients_that_its_calls_leave(tmp_path):
    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    model.weight.grad = torch.ones(4, 4)
    twin = copy.deepcopy(model)

    def step_of(model):
        def step(x):
            norm = model.weight.grad.norm()
            model.weight.grad = None
            model(x).square().sum().backward(inputs=[model.weight])
            with torch.no_grad():
                model.weight.sub_(model.weight.grad, alpha=0.1)
            return norm

        return step

    st.trace(step_of(model), (x,)).save(tmp_path / "step.st")
    twin.weight.grad = torch.ones(4, 4)
    loaded, eager = st.load(tmp_path / "step.st"), step_of(twin)
    assert [loaded(x).item() for _ in range(3)] == [eager(x).item() for _ in range(3)]


@pytest.mark.parametrize("is_in_a_module", [False, True])
def test_a_loaded_step_that_began_without_gradients_is_refused_where_there_are_some(tmp_path, is_in_a_module):
    model, scale = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.ones(4))
    if is_in_a_module:
        model.scale = scale
    optimizer = torch.optim.SGD([*model.parameters(), *([] if is_in_a_module else [scale])], 0.1)

    def step(x):
        loss = (model(x) * scale).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.ones(2, 4)
    st.trace(step, (x,)).save(tmp_path / "step.st")
    loaded = st.load(tmp_path / "step.st")
    loaded(x)
    with pytest.raises(st.errors.StateMismatchError, match=r"grad is not None.*False when traced and True now"):
        loaded(x)
    for p in loaded.graph_module.parameters():
        p.grad = None
    loaded(x)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_file_keeps_the_order_of_backward(tmp_path, checkpoints):
    model, args = Net(), batches(1)[0]

    def step(x, y):
        out = checkpoint(model, x, use_reentrant=False) if checkpoints else model(x)
        F.cross_entropy(out, y).backward()

    trace = st.trace(step, args)
    trace.save(tmp_path / "step.st")
    loaded = st.load(tmp_path / "step.st")
    kinds = {found.kind for found in trace.order.backwards[0]}
    assert kinds == ({"result", "arguments", "again"} if checkpoints else {"result", "arguments"})
    assert loaded.order.backwards == trace.order.backwards


REFUSED = {
    "an export": (lambda trace, args: trace.to_exported_program(), st.errors.ExportError, "to gradients"),
    "torch.compile": (
        lambda trace, args: torch.compile(trace, fullgraph=True, backend="eager")(*args),
        Exception,
        "it changes gradients",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_hold_gradients_refuses_them(case):
    use, error, text = REFUSED[case]
    model, args = Net(), batches(1)[0]
    trace = st.trace(lambda x, y: F.cross_entropy(model(x), y).backward(), args)
    with pytest.raises(error, match=text):
        use(trace, args)


def test_backward_of_what_requires_no_grad_raises_as_in_eager():
    model = nn.Linear(4, 3)

    def plain(x):
        x.sum().backward()

    def frozen(x):
        model.requires_grad_(False)
        model(x).sum().backward()
        model.requires_grad_(True)

    def detached(x):
        model(x).sum().detach().backward()

    for step in (plain, frozen, detached):
        with pytest.raises(RuntimeError, match="does not require grad and does not have a grad_fn"):
            st.trace(step, (torch.ones(2, 4),))


def test_backward_beyond_an_input_is_refused():
    x = torch.randn(5, 4, requires_grad=True) * 2
    with pytest.raises(st.errors.UnsupportedOpError, match="beyond an input"):
        st.trace(lambda x: x.sum().backward(), (x,))


@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused(kind, padding):
    model = kind(10, 4, padding_idx=padding, sparse=True)
    with pytest.raises(st.errors.UnsupportedOpError, match=r"parameter is sparse(.|\n)*sparse=False"):
        st.trace(lambda x: model(x).sum().backward(), (torch.ones(2, 3, dtype=torch.int64),))


def test_the_checks_of_distributions_are_named_in_the_error():
    model, x = nn.Linear(4, 3), torch.randn(5, 4)

    def step(x, validate):
        chosen = torch.distributions.Categorical(logits=model(x), validate_args=validate)
        loss = chosen.log_prob(torch.zeros(5)).sum()
        loss.backward()
        return loss

    if torch.__version__ < "2.15":  # later ones assert it by an op
        with pytest.raises(st.errors.DataDependentError, match="validate_args=False"):
            st.trace(step, (x, True))
    else:
        assert torch.equal(st.trace(step, (x, True))(x, True), step(x, True))
    assert torch.equal(st.trace(step, (x, False))(x, False), step(x, False))
    assert torch.equal(st.trace(step, (x, True), specialize=True)(x, True), step(x, True))


def test_an_optimizer_whose_first_step_is_another_is_refused():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, dampening=0.5)

    def step(x, y):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    with pytest.raises(st.errors.UnsupportedOpError, match="SGD makes its state in its first step"):
        st.trace(step, batches(1)[0])


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * 2 * x * weight, (grad * x * x).sum(0)


class Applied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.weight = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.randn(4))

    def forward(self, x):
        return Square.apply(self.fc(x), self.weight)


class Checkpointed(torch.nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.block, self.reentrant = torch.nn.Linear(4, 4), Net(), reentrant

    def forward(self, x):
        return checkpoint(self.block, self.first(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("model", [Applied(), Checkpointed(False), Checkpointed(True)], ids=["function", "new", "old"])
def test_functions_and_checkpoints(model):
    trace = run_beside_eager(step_of, model, [(torch.randn(5, 4),) for _ in range(3)])
    assert all(call.backward_nodes for call in trace.calls if call.fqn in ("model", "model.block", "model.block.b"))


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kept, scale):
        ctx.kept, ctx.scale = kept, scale
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        gradient = grad if ctx.scale == 1 else grad * ctx.scale
        ctx.kept.append(gradient)
        return gradient, None, None


@pytest.mark.parametrize("scale", [1, 2])
def test_a_gradient_that_a_function_keeps_is_not_that_of_the_parameter(scale):
    def make(model):
        def step(x):
            kept = []
            model.zero_grad()
            F.linear(x, Keeps.apply(model.weight, kept, scale), Keeps.apply(model.bias, kept, scale)).sum().backward()
            model.weight.grad.mul_(3)
            for gradient in kept:
                gradient.add_(1)
            model.bias.grad += sum(gradient.sum() for gradient in kept)
            return kept[0]

        return step

    run_beside_eager(make, torch.nn.Linear(4, 3), [(torch.randn(5, 4),) for _ in range(2)])


def test_a_derivative_of_a_derivative():
    def make(model):
        def step(x):
            x = x * 1
            loss = model(x).square().sum()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + slope.square().sum()).backward()
            return loss

        return step

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    run_beside_eager(make, model, [(torch.randn(5, 4, requires_grad=True),) for _ in range(3)])


def test_what_is_added_to_a_gradient_leaves_it_laid_out_as_it_is():
    """The first gradient is a sum of two transposed matrices of one row, which has the strides (1, 1)."""

    def make(model):
        def step(x):
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            (out.mean() + slope.square().sum()).backward()
            first = model.weight.grad.stride()
            model(x * 2).mean().backward()
            assert model.weight.grad.stride() == first == (1, 1)

        return step

    run_beside_eager(make, nn.Linear(8, 1, bias=False), [(torch.randn(5, 8, requires_grad=True),)])


def test_an_inner_step_through_a_convolution():
    """As MAML does: a derivative of the convolution's backward, by the weight alone."""

    def make(model):
        def step(x):
            model.zero_grad()
            loss = model(x).square().mean()
            slopes = torch.autograd.grad(loss, [model.weight, model.bias], create_graph=True)
            F.conv2d(x, model.weight - 0.1 * slopes[0], model.bias - 0.1 * slopes[1]).square().mean().backward()
            return loss.detach()

        return step

    run_beside_eager(make, torch.nn.Conv2d(1, 2, 3), [(torch.randn(2, 1, 4, 4),) for _ in range(2)])


def test_a_batch_norm_runs_again_after_its_weights_were_written():
    """As sharpness-aware minimization does: the second forward is at other weights."""

    def make(model):
        def step(x):
            model.zero_grad()
            model(x).square().sum().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(p.grad, alpha=0.01)
            model.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss

        return step

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh())
    run_beside_eager(make, model, [(torch.randn(5, 4),) for _ in range(3)])


# Which forward each op of backward belongs to ------------------------------------------------------------------------


class Twice(torch.nn.Module):
    """A module that is called twice, sums of gradients, a scope of the user."""

    def __init__(self):
        super().__init__()
        self.fc, self.block = torch.nn.Linear(4, 4), Net()

    def forward(self, x):
        first = self.fc(x).tanh()
        with st.scope("mix"):
            second = self.fc(first) * first
        return self.block(second + first)


class EagerOwners(TorchDispatchMode):
    """The module call of the forward to which each op of backward in eager belongs; not of ops that sum gradients."""

    def __init__(self, model):
        super().__init__()
        self.model, self.found, self.handles = model, [], []
        self.counts, self.stack, self.starts = collections.Counter(), [("", 0)], []

    def note(self):
        self.starts.append((torch._C._autograd._get_sequence_nr(), self.stack[-1]))

    def __enter__(self):
        def before(module, args, name):
            self.stack.append((name, self.counts[name]))
            self.counts[name] += 1
            self.note()

        def after(module, args, out):
            self.stack.pop()
            self.note()

        self.note()
        for name, module in self.model.named_modules():
            self.handles.append(module.register_forward_pre_hook(functools.partial(before, name=name)))
            self.handles.append(module.register_forward_hook(after))
        return super().__enter__()

    def __exit__(self, *error):
        for handle in self.handles:
            handle.remove()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        node = torch._C._current_autograd_node()
        if node is not None and "AccumulateGrad" not in node.name() and func is not torch.ops.aten.detach.default:
            number = node._sequence_nr()
            owner = next(place for start, place in reversed(self.starts) if start <= number)
            self.found.append((str(func), owner))
        return func(*args, **(kwargs or {}))


NOT_IN_ENGINE = (operator.getitem, torch.ops.aten.ones_like.default)


def owners_in(trace):
    """As EagerOwners.found, of a trace of a function that calls `model`."""
    found = []
    for call in trace.calls:
        inner = {n for c in call.children for n in c.backward_nodes}
        name = call.fqn.removeprefix("model").lstrip(".")
        own = [n for n in call.backward_nodes if n not in inner and n.target not in NOT_IN_ENGINE]
        found += [(str(n.target), (name, 0 if name == "" else call.index)) for n in own]
    return collections.Counter(found)


def test_every_op_of_backward_has_the_call_of_its_forward():
    torch.manual_seed(0)
    model, x = Twice(), torch.randn(5, 4)
    trace = st.trace(step_of(model), (x,))
    with EagerOwners(model) as eager:
        step_of(model)(x)
    ours, theirs = owners_in(trace), collections.Counter(eager.found)
    assert ours.total() == theirs.total()
    ours.subtract(theirs)
    assert {key: n for key, n in ours.items() if n} == {
        # a sum of two gradients belongs to where the tensor was made, and eager names the node that gave the second
        ("aten.add.Tensor", ("", 0)): 1,
        ("aten.add.Tensor", ("fc", 1)): -1,
    }


def phases(trace):
    nodes = (n for n in trace.graph_module.graph.nodes if n.op == "call_function" and "val" in n.meta)
    return collections.Counter(map(trace.phase_of, nodes))


def test_scopes_and_phases_of_backward(tmp_path):
    torch.manual_seed(0)
    trainer = Trainer(Twice())
    args = torch.randn(5, 4), torch.randint(0, 3, (5,))
    trace = st.trace(trainer.step, args)
    mix = [n for n in trace.graph_module.graph.nodes if str(trace.scope_of(n)) == "step/Twice[model]/mix"]
    assert [trace.phase_of(n) for n in mix] == ["forward", "backward", "backward"]
    assert {"forward", "backward", "other"} == set(phases(trace))
    assert len(trace.call("model").backward_nodes) == len(trace.calls[0].backward_nodes) - 3  # those of the loss
    trace.lint()
    trace.save(tmp_path / "step.st")
    others = [st.load(tmp_path / "step.st"), trace.with_graph(copy.deepcopy(trace.graph_module)), copy.deepcopy(trace)]
    for other in others:
        assert phases(other) == phases(trace)
        assert owners_in(other) == owners_in(trace)
    decomposed = trace.decompose()
    assert {c.fqn for c in decomposed.calls if c.backward_nodes} == {c.fqn for c in trace.calls if c.backward_nodes}


def test_what_a_call_saves():
    torch.manual_seed(0)
    model, x = Net(), torch.randn(5, 4)
    trace = st.trace(step_of(model), (x,))
    assert [(s.shape, s.bytes) for s in trace.call("model.a").saved] == [((5, 4), 80)]
    assert [s.shape for s in trace.call("model.b").saved] == [(8, 3), (5, 8)]


def train(model, x):
    loss = model(x).square().mean()
    loss.backward()
    return loss


def in_a_function_around(model):
    def forward(x):
        return model(x)

    return lambda x: train(forward, x)


def as_a_default(model):
    def step(x, model=model):
        return train(model, x)

    return step


@pytest.mark.parametrize("make", [in_a_function_around, as_a_default, lambda model: functools.partial(train, model)])
def test_the_names_of_modules_are_those_of_variables(make):
    trace = st.trace(make(Net()), (torch.randn(5, 4),))
    assert [call.fqn for call in trace.calls] == ["", "model", "model.a", "model.norm", "model.b"]
    assert {m.name for m in trace.mutations} >= {"model.a.weight.grad"}


def test_modules_of_one_name_in_two_functions():
    def make(model):
        return lambda x: model(x)

    first, second = make(nn.Linear(4, 4)), make(nn.Linear(4, 4))
    x = torch.randn(5, 4)
    trace = st.trace(lambda x: second(first(x)).sum(), (x,))
    assert [call.fqn for call in trace.calls[1:]] == ["model", "model_1"]
    assert torch.equal(trace(x), second(first(x)).sum())


def test_the_backward_of_a_second_call_says_so():
    model = Twice()
    text = str(st.trace(step_of(model), (torch.randn(5, 4),)))
    found = [line.strip() for line in text[text.index("  backward") :].splitlines() if "[fc]" in line]
    assert list(dict.fromkeys(found)) == ["Linear[fc]#1", "Linear[fc]"]


def test_the_text_folds_backward_by_call(graph_snapshot):
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(3)))
    trace = graph_snapshot(step_of(model), (torch.randn(5, 4),))
    short = trace.print_readable(depth=1, print_output=False)
    assert "      Sequential[2]  # 9 ops\n      Sequential[1] as Sequential[2]" in short


# What goes to a result too -------------------------------------------------------------------------------------------


class FirstRow(torch.autograd.Function):
    """Its result is a view."""

    @staticmethod
    def forward(ctx, t):
        ctx.size = t.shape
        return t[0]

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(ctx.size)


def test_a_function_of_autograd_that_leads_to_a_result_too_is_refused():
    def forward(x):
        row = FirstRow.apply(x)
        (slope,) = torch.autograd.grad((x * x).sum() * row.sum().detach(), x)
        return row * slope[0].sum()

    with pytest.raises(st.errors.UnsupportedOpError, match="through which gradients may go to a result too"):
        st.trace(forward, (torch.ones(2, 3, requires_grad=True),))


def test_a_function_of_autograd_beside_the_path_that_is_differentiated_is_refused():
    """The engine does not run its backward, so that a later one may."""
    weight = torch.nn.Parameter(torch.ones(3))

    def forward(x):
        row = FirstRow.apply(x)
        (slope,) = torch.autograd.grad((weight.sin() * row).sum(), weight)
        return row * slope

    with pytest.raises(st.errors.UnsupportedOpError, match="through which gradients may go to a result too"):
        st.trace(forward, (torch.ones(2, 3, requires_grad=True),))


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.LSTM(4, 4), nn.LSTM(4, 4)

    def forward(self, x):
        return self.b(self.a(x)[0])[0]


def test_the_backward_of_equal_recurrent_layers_is_the_same_in_each_trace():
    """Two of its results are one tensor, also where torch has run it before."""
    first, second = (str(st.trace(step_of(TwoLayers()), (torch.ones(5, 2, 4),))) for _ in range(2))
    assert first == second


GAIN = nn.Parameter(torch.ones(3))


def test_a_parameter_in_no_module_is_called_as_in_source():
    scales = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]

    def accumulates(x):
        (x * scales[0] * scales[1]).sum().backward()
        return scales[1].grad.clone()

    class Net(nn.Module):
        def forward(self, x):
            (x * GAIN).sum().backward()
            return GAIN.grad.clone()

    for step, name in ((accumulates, r"scales\[1\]"), (Net(), "GAIN")):
        tr = st.trace(step, (torch.ones(3),))
        tr(torch.ones(3))
        with pytest.raises(st.errors.StateMismatchError, match=f"^{name}.grad is not None, which the model reads"):
            tr(torch.ones(3))
    GAIN.grad = None


class ScaledAndShifted(torch.autograd.Function):
    """The second result is that of `shift` alone: where it is unused, `shift` has no gradient."""

    @staticmethod
    def forward(ctx, x, scale, shift):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, scale)
        return x * scale, x + shift

    @staticmethod
    def backward(ctx, scaled, shifted):
        x, scale = ctx.saved_tensors
        return (
            None if scaled is None else scaled * scale,
            None if scaled is None else (scaled * x).sum(0),
            None if shifted is None else shifted.sum(0) * 3,
        )


class TwoResults(nn.Module):
    def __init__(self, uses):
        super().__init__()
        self.scale, self.shift, self.uses = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4)), uses

    def forward(self, x):
        return self.uses(*ScaledAndShifted.apply(x, self.scale, self.shift))


@pytest.mark.parametrize("uses", [lambda a, b: a.sin(), lambda a, b: b.cos(), torch.mul, lambda a, b: a + b.detach()])
@pytest.mark.parametrize("backward", [torch.Tensor.backward, operator.methodcaller("backward")])
def test_a_function_that_asks_for_none_in_place_of_gradients_that_are_zero(uses, backward):
    def make(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.5)  # which does without a `grad` nothing

        def step(x, y):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            backward(loss)
            optimizer.step()
            return loss

        return step

    run_beside_eager(make, TwoResults(uses))


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        ctx.save_for_backward(t)
        return t * t

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3 * ctx.saved_tensors[0]


class WithFunction(Net):
    def forward(self, x):
        return Squared.apply(super().forward(x))


def net_with_hook():
    model = Net()
    model.a.register_full_backward_hook(lambda module, inputs, outputs: None)
    return model


@pytest.mark.parametrize("make", [WithFunction, net_with_hook])
def test_a_run_before_the_closure_that_nothing_differentiates(make):
    def step_of(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x, y):
            before = model(x).square().mean()

            def closure():
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            return optimizer.step(closure), before.detach()

        return step

    def all_equal(found, expected):
        return all(map(equal, found, expected)) if isinstance(found, tuple) else equal(found, expected)

    run_beside_eager(step_of, make(), equal=all_equal)


def test_the_grad_of_an_input_that_was_written():
    def forward(x):
        x -= 3
        return x * (2 if x.grad is None else 3)

    tr = st.trace(forward, (torch.ones(2),))
    assert tr(torch.ones(2)).tolist() == [-4, -4]


def test_hooks_on_what_an_op_saves_that_returns_nothing():
    def forward(x):
        y = x.clone()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 2):
            torch._foreach_mul_([y], [torch.arange(2.0)])
        return y

    with pytest.raises(st.errors.UnsupportedOpError, match="hooks on what autograd saves"):
        st.trace(forward, (torch.ones(2, requires_grad=True),))


# Scaling, schedules, state in what is exported ------------------------------------------------------------------------


def two_optimizers(seed):
    """A generator and a discriminator, each with its optimizer, under one scaler."""
    torch.manual_seed(seed)
    makes, judges = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    first, second = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (judges, makes))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(x):
        loss = nn.functional.softplus(judges(makes(torch.randn(6, 2)).detach()) - judges(x)).mean()
        first.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(first)
        second.zero_grad()
        scaler.scale(nn.functional.softplus(-judges(makes(torch.randn(6, 2)))).mean()).backward()
        scaler.step(second)
        scaler.update()
        return loss

    return step, nn.ModuleList([makes, judges]), scaler


def test_two_optimizers_under_one_scaler():
    (step, model, scaler), (eager, twin, _) = two_optimizers(0), two_optimizers(0)
    x = torch.randn(6, 2)
    tr = st.trace(step, (x,))
    assert not scaler._per_optimizer_states
    for i in range(3):
        torch.manual_seed(i)
        found = tr(x)
        torch.manual_seed(i)
        torch.testing.assert_close(found, eager(x))
        torch.testing.assert_close(model.state_dict(), twin.state_dict())


def test_a_scaler_that_is_used_in_part():
    net, x = nn.Linear(2, 1), torch.randn(3, 2)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu")

    def part(x):
        scaler.scale(net(x).sum()).backward()
        scaler.step(optimizer)

    with pytest.raises(st.errors.UnsupportedOpError, match="is not called after"):
        st.trace(part, (x,))
    assert not scaler._per_optimizer_states
    part(x)
    with pytest.raises(st.errors.UnsupportedOpError, match="called before what is traced"):
        st.trace(lambda x: scaler.step(optimizer), (x,))
    assert scaler._per_optimizer_states
    scaler.update()


def scaled(model, optimizer, **options):
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        scaler.scale(loss).backward()
        if options.get("clips"):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step, scaler


SCALED = {
    "SGD": {},
    "SGD fused": {"fused": True},
    "SGD with momentum": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "AdamW": {},
    "AdamW fused": {"fused": True},
    "AdamW one by one": {"foreach": False, "amsgrad": True},
    "AdamW with a tensor": {"lr": torch.tensor(0.1)},
    "RMSprop": {},
    "Adagrad": {},
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("case", SCALED)
def test_gradients_are_scaled_as_in_eager(case, clips):
    """A step does nothing where gradients are not finite, the first one included."""
    model = nn.Linear(4, 2)
    twin = copy.deepcopy(model)
    kind, options = getattr(torch.optim, case.split()[0]), {"lr": 0.1, **SCALED[case]}
    optimizers = [kind(m.parameters(), **copy.deepcopy(options)) for m in (model, twin)]
    step, scaler = scaled(model, optimizers[0], clips=clips)
    eager, other = scaled(twin, optimizers[1], clips=clips)
    tr = st.trace(step, (torch.ones(3, 4),))
    assert {"GradScaler_scale", "GradScaler_growth_tracker"} < {m.name for m in tr.mutations}
    infinite = torch.full((3, 4), float("inf"))
    for x in (infinite, torch.randn(3, 4), infinite, torch.randn(3, 4), torch.randn(3, 4)):
        torch.testing.assert_close(tr(x), eager(x), rtol=0, atol=0, equal_nan=True)
        assert all(map(torch.equal, model.parameters(), twin.parameters()))
        assert scaler.state_dict() == other.state_dict()
    states, expected = (o.state_dict()["state"] for o in optimizers)
    for i, state in expected.items():
        for name, x in state.items():
            assert x is None or torch.equal(torch.as_tensor(states[i][name]), torch.as_tensor(x))


def test_a_scaled_step_of_an_optimizer_that_is_made_in_it():
    """It begins anew in each call, also after one in which it did nothing."""
    model = nn.Linear(4, 2)
    twin = copy.deepcopy(model)

    def made(model):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

        def step(x):
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            optimizer.zero_grad()
            scaler.scale(model(x).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()

        return step

    tr, eager = st.trace(made(model), (torch.ones(3, 4),)), made(twin)
    for x in (torch.randn(3, 4), torch.full((3, 4), float("inf")), torch.randn(3, 4), torch.randn(3, 4)):
        tr(x)
        eager(x)
        assert all(map(torch.equal, model.parameters(), twin.parameters()))


SCHEDULERS = {
    "StepLR": lambda o: schedules.StepLR(o, 1),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 2),
    "ReduceLROnPlateau": schedules.ReduceLROnPlateau,
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.ConstantLR(o), schedules.ExponentialLR(o, 0.9)], [1]
    ),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler([schedules.ConstantLR(o)]),
}


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_steps_in_a_step_is_refused(name, lr):
    """Its counts, and the learning rate that follows from them, are numbers of Python, which stay as they are."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = SCHEDULERS[name](optimizer)
    before = copy.deepcopy(scheduler.state_dict())

    def scheduled(x):
        model(x).sum().backward()
        optimizer.step()
        scheduler.step(*[0.1][: name == "ReduceLROnPlateau"])

    refused = (st.UnsupportedOpError, st.errors.SideEffectError)
    with pytest.raises(refused, match=r"(?s)changes a setting of AdamW, 'lr'|right for one call only.* became"):
        try:
            tr = st.trace(scheduled, (torch.ones(3, 4),))
        finally:
            assert scheduler.state_dict() == before
        for _ in range(2):
            tr(torch.ones(3, 4))


def test_a_learning_rate_that_the_step_changes_by_hand_is_refused():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def decays(x):
        model(x).sum().backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9

    with pytest.raises(st.UnsupportedOpError, match=r"(?s)changes a setting of SGD, .lr.*after each call of the trace"):
        st.trace(decays, (torch.ones(3, 4),))
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((torch.optim.AdamW, options) for options in ({}, {"fused": True}, {"foreach": False})),
        *((torch.optim.SGD, options) for options in ({}, {"fused": True}, {"foreach": False}, {"foreach": True})),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
        *((torch.optim.RMSprop, {"foreach": each, "momentum": 0.9}) for each in (False, True)),
        *((torch.optim.Adadelta, {"foreach": each}) for each in (False, True)),
        *((torch.optim.NAdam, {"foreach": each}) for each in (False, True)),
        *((torch.optim.Adamax, {"foreach": each}) for each in (False, True)),
        (torch.optim.Adagrad, {}),
    ],
)
def test_a_scheduler_steps_between_calls(kind, options):
    """A learning rate that is a tensor is read in each call, also by optimizers that take its number."""
    models = [nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))]
    models.append(copy.deepcopy(models[0]))
    groups = [
        [{"params": m[i].parameters(), "lr": torch.tensor(lr)} for i, lr in enumerate((0.1, 0.05))] for m in models
    ]
    optimizers = [kind(each, **options) for each in groups]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers]

    def step_of(model, optimizer):
        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss

        return step

    eager, x = step_of(models[1], optimizers[1]), torch.randn(3, 4)
    tr = st.trace(step_of(models[0], optimizers[0]), (x,))
    for _ in range(3):
        assert torch.equal(tr(x), eager(x))
        assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
        for scheduler in schedulers:
            scheduler.step()


def test_a_learning_rate_that_another_tensor_takes_the_place_of():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))

    def step(x):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    tr = st.trace(step, (torch.ones(3, 4),))
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    with pytest.raises(st.StateMismatchError, match=r'as in `group\["lr"\].copy_\(new\)`'):
        tr(torch.ones(3, 4))


class StopsAtZero(torch.optim.SGD):
    """Does nothing where the learning rate is zero."""

    def step(self, closure=None):
        """Step."""
        if self.param_groups[0]["lr"] > 0:
            return super().step(closure)
        return None


def test_an_optimizer_that_asks_for_its_learning_rate():
    model = nn.Linear(4, 2)
    optimizer = StopsAtZero(model.parameters(), lr=torch.tensor(0.5))

    def step(x):
        model(x).sum().backward()
        optimizer.step()

    trace = st.trace(step, (torch.ones(3, 4),))
    trace(torch.ones(3, 4))
    model.zero_grad()
    optimizer.param_groups[0]["lr"].zero_()
    with pytest.raises(st.errors.InputMismatchError, match=r"the trace is specialized(.*)> 0"):
        trace(torch.ones(3, 4))


def test_what_an_export_says_of_the_state_of_an_optimizer(tmp_path):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    tr = st.trace(step_with(model, optimizer), (torch.ones(3, 4),))
    with pytest.raises(st.ExportError, match=r"model.weight_step is changed .*\n(.*\n)*.*return the gradients"):
        tr.to_exported_program()
    with pytest.raises(st.ExportError, match=r"torch.onnx failed at addcdiv(.*\n)*.*export `tr.decompose\(\)`"):
        tr.to_onnx(tmp_path / "step.onnx")


def saved_while(run):
    """How many tensors autograd saves while `run` runs."""
    found = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        run()
    return len(found)


def test_a_call_keeps_nothing_of_what_backward_has_freed():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))

    def step(x):
        logits = model(x)
        loss = logits.logsumexp(1).mean()
        loss.backward()
        return loss, logits, loss.detach()

    x = torch.randn(5, 4)
    trace = st.trace(step, (x,))
    assert str(trace).count("_set_grad_enabled") == 2  # off before the first op, and on again at the end
    assert saved_while(lambda: trace(x)) == 0
    loss, logits, detached = trace(x)
    assert [t.requires_grad for t in (loss, logits, detached)] == [True, True, False]
    for result in (loss, logits):
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            result.sum().backward()
    assert str(trace.write_back).splitlines()[-3:] == [
        "result[0] = graph[3], its history freed by backward",
        "result[1] = graph[4], its history freed by backward",
        "result[2] = graph[5]",
    ]


@pytest.mark.parametrize("of", ["linear", "lstm"])
def test_a_view_of_what_backward_has_freed(of):
    """As the prediction of a head, `head(h).squeeze(-1)`. The LSTM of MKL-DNN runs with autograd in a call too."""
    model = {"linear": torch.nn.Linear(4, 4), "lstm": torch.nn.LSTM(4, 4)}[of]

    def step(x):
        model.zero_grad()
        out = model(x)
        last = (out if of == "linear" else out[0])[:, -1]
        last.square().sum().backward()
        return last

    x = torch.randn(3, 4)
    trace = st.trace(step, (x,))
    found, expected = trace(x), step(x)
    assert equal(found, expected)
    assert (found.requires_grad, found.is_leaf) == (expected.requires_grad, expected.is_leaf) == (True, False)
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        found.sum().backward()
    assert equal(trace(x).mul_(2), expected.mul_(2))


def test_what_backward_has_not_freed_has_its_history():
    model = torch.nn.Linear(4, 4)

    def step(x):
        hidden = model(x)
        other = hidden.detach().requires_grad_()
        other.tanh().sum().backward()
        return hidden, (model.weight * 2).sum()

    x = torch.randn(5, 4)
    trace = st.trace(step, (x,))
    for run in (step, trace):
        model.zero_grad()
        hidden, penalty = run(x)
        (hidden.sum() + penalty).backward()
        torch.testing.assert_close(model.weight.grad, x.sum(0).expand(4, 4) + 2)


@pytest.mark.parametrize("way", ["retain_graph", "create_graph"])
def test_a_graph_that_is_kept_can_be_differentiated_again(way):
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))

    def step(x):
        loss = (weight * weight * x).sum()
        (gradient,) = torch.autograd.grad(loss, weight, **{way: True})
        return loss, gradient

    x = torch.tensor([3.0, 5.0])
    loss, _ = st.trace(step, (x,))(x)
    loss.backward()
    assert weight.grad.tolist() == [6.0, 20.0]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_under_functional_call(kind):
    """They list their parameters in attributes, and do so anew where these are others: nothing that a step changes."""
    layer, x = kind(3, 4), torch.randn(5, 2, 3)

    def step(x):
        weights = {name: p * 1.01 for name, p in layer.named_parameters()}
        loss = torch.func.functional_call(layer, weights, (x,))[0].sum()
        loss.backward()
        return loss.detach()

    trace = st.trace(step, (x,))
    assert not trace.side_effects
    for _ in range(3):
        found = trace(x), [p.grad.clone() for p in layer.parameters()]
        layer.zero_grad()
        expected = step(x), [p.grad.clone() for p in layer.parameters()]
        layer.zero_grad()
        torch.testing.assert_close(found, expected)


def test_a_check_of_a_step_by_whose_input_it_differentiates():
    """The step makes its input require grad, as a gradient penalty does; a call of the trace does not."""
    model = nn.Linear(2, 1)

    def penalty(x):
        x.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        loss = slope.pow(2).sum()
        loss.backward()
        return loss.detach()

    tr = st.trace(penalty, (torch.ones(1, 2),))
    assert [effect.name for effect in tr.side_effects] == ["x.requires_grad"]
    tr.check((torch.ones(1, 2),))


def test_a_check_compares_gradients_and_leaves_them_as_they_are():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model, optimizer, x, y):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    args = (model, optimizer, *batches()[0])
    step(*args)
    trace = st.trace(step, args)
    before = [p.grad.clone() for p in model.parameters()]
    trace.check(args)
    assert all(map(torch.equal, before, (p.grad for p in model.parameters())))
    for node in trace.graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.aten._log_softmax_backward_data.default
    ):
        node.args = (node.args[0], *node.args[1:2], 0, torch.float32)
    trace.graph_module.recompile()
    with pytest.raises(st.CheckError, match=r"gradient of model\.|gradient of _tensor_constant"):
        trace.check(args)


@pytest.mark.parametrize("has_gradient", [False, True])
@pytest.mark.parametrize("kind", ["one", "twice", "eager first", "zeroed"])
def test_a_call_of_another_trace_in_a_step_adds_to_gradients(kind, has_gradient):
    model, x = torch.nn.Linear(3, 2), torch.randn(4, 3)

    def backward(x):
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    def step(x, inner):
        if kind == "zeroed":
            model.zero_grad()
        first = (backward if kind == "eager first" else inner)(x)
        return first if kind == "one" else first + inner(x * 2)

    def prepare(has_gradient):
        for p in model.parameters():
            p.grad = torch.ones_like(p) if has_gradient else None

    inner = st.trace(backward, (x,))
    prepare(has_gradient)
    tr = st.trace(lambda x: step(x, inner), (x,))
    for is_there in {has_gradient, has_gradient if kind == "zeroed" else not has_gradient}:
        gradients = []
        for run in (lambda x: step(x, backward), tr, tr):
            prepare(is_there)
            run(x)
            gradients.append(model.weight.grad)
        torch.testing.assert_close(gradients[1:], gradients[:1] * 2)


def test_a_call_of_another_trace_in_a_step_reads_the_gradients_of_the_step():
    model, x = torch.nn.Linear(3, 2), torch.randn(4, 3)

    def backward(x):
        model.zero_grad()
        model(x).square().sum().backward()

    def update():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad)

    backward(x)
    before = [p.detach().clone() for p in model.parameters()]
    inner = st.trace(update, ())
    tr = st.trace(lambda x: (backward(x), inner())[1], (x,))
    tr(x * 2)
    traced = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p, old in zip(model.parameters(), before, strict=True):
            p.copy_(old)
    backward(x * 2)
    update()
    torch.testing.assert_close(traced, [p.detach() for p in model.parameters()])
