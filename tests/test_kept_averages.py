"""Tensors that a step puts in the place of others in dicts, objects, tuples and lists: the next call finds them."""

import collections
import copy
import operator

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import scopetrace as st


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def copies(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trained(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


KEPT = {}


def kept(make):
    KEPT[make.__name__] = make
    return make


@kept
def averages_in_a_dict(model, optimizer):
    averages = copies(model)

    def step(x):
        loss = trained(model, optimizer, x)
        for name, p in model.named_parameters():
            averages[name] = averages[name] * 0.9 + p.detach() * 0.1
        return loss

    return step, averages


@kept
def averages_that_the_loss_reads(model, optimizer):
    averages = copies(model)

    def step(x):
        teacher = torch.func.functional_call(model, averages, x).detach()
        optimizer.zero_grad()
        loss = (model(x) - teacher).square().mean() + model(x).square().mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                averages[name] = torch.lerp(averages[name], p, 0.1)
        return loss.detach()

    return step, averages


@kept
def averages_in_a_defaultdict_of_an_object(model, optimizer):
    class Average:
        def __init__(self):
            self.shadow = collections.defaultdict(lambda: None, copies(model))

        def update(self):
            for name, p in model.named_parameters():
                self.shadow[name] = 0.1 * p.detach() + 0.9 * self.shadow[name]

    average = Average()

    def step(x):
        loss = trained(model, optimizer, x)
        average.update()
        return loss

    return step, average.shadow


@kept
def an_attribute_of_an_object(model, optimizer):
    class Stats:
        mean, last = torch.zeros(()), torch.zeros(())

        def __init__(self):
            self.mean, self.last = torch.zeros(()), torch.zeros(())

    stats = Stats()

    def step(x):
        loss = trained(model, optimizer, x / (1 + stats.mean))
        stats.mean = stats.mean * 0.5 + loss * 0.5
        stats.last = loss.clone()
        return loss

    return step, vars(stats)


@kept
def a_dict_of_dicts(model, optimizer):
    state = {"a": {"w": torch.ones(2)}, "b": {"w": torch.zeros(2)}}

    def step(x):
        loss = trained(model, optimizer, x)
        state["a"]["w"] = state["a"]["w"] + state["b"]["w"] + loss
        state["b"]["w"] = state["a"]["w"] * 2
        return loss

    return step, state["b"]


@kept
def read_after_it_is_written(model, optimizer):
    state = {"mean": torch.zeros(())}

    def step(x):
        state["mean"] = state["mean"] * 0.5 + x.mean()
        loss = trained(model, optimizer, x - state["mean"])
        state["mean"] = state["mean"] + loss
        return loss + state["mean"]

    return step, state


@kept
def written_in_place_and_replaced(model, optimizer):
    state = {"mean": torch.zeros(())}

    def step(x):
        state["mean"].add_(1)
        loss = trained(model, optimizer, x)
        state["mean"] = state["mean"] * 0.5 + loss
        state["mean"].mul_(0.5)
        return loss

    return step, state


@kept
def a_result_that_is_kept_too(model, optimizer):
    state = {"last": torch.zeros(())}

    def step(x):
        loss = trained(model, optimizer, x)
        before, state["last"] = state["last"], loss
        return loss, before

    return step, state


@kept
def two_that_change_places(model, optimizer):
    state = {"new": torch.zeros(()), "old": torch.ones(())}

    def step(x):
        loss = trained(model, optimizer, x + state["old"] * 0.1 + state["new"])
        state["new"], state["old"] = loss * 2, state["new"]
        return loss

    return step, state


def beside_eager(make, products=lambda tr: tr):
    models = [net(), net()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    (step, state), (eager, expected) = (make(m, o) for m, o in zip(models, optimizers, strict=True))
    torch.manual_seed(1)
    batches = [torch.randn(5, 4) for _ in range(4)]
    before = {key: x.clone() for key, x in state.items()}
    tr = st.trace(step, (batches[0],))
    torch.testing.assert_close(dict(state), before)
    tr.check(batches[1])
    torch.testing.assert_close(dict(state), before)
    run = products(tr)
    for x in batches:
        torch.testing.assert_close(run(x), eager(x))
        torch.testing.assert_close(dict(state), dict(expected))
        torch.testing.assert_close(models[0].state_dict(), models[1].state_dict())
    return tr


@pytest.mark.parametrize("name", KEPT)
def test_what_a_step_keeps_is_that_of_eager(name):
    tr = beside_eager(KEPT[name])
    assert not tr.side_effects


@pytest.mark.parametrize("name", ["averages_in_a_dict", "averages_that_the_loss_reads", "two_that_change_places"])
@pytest.mark.parametrize("products", [lambda tr: tr.decompose(), lambda tr: tr.outline("Linear")])
def test_what_is_made_of_a_trace_keeps_it_too(name, products):
    beside_eager(KEPT[name], products)


def test_the_names_of_what_is_kept():
    tr = beside_eager(averages_in_a_dict)
    kept = [m.name for m in tr.mutations if m.name.startswith("averages")]
    assert kept == ["averages.0.weight", "averages.0.bias", "averages.2.weight", "averages.2.bias"]


def test_a_file_keeps_it_by_itself(tmp_path):
    models = [net(), net()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    (step, _), (eager, _) = (averages_that_the_loss_reads(m, o) for m, o in zip(models, optimizers, strict=True))
    st.trace(step, (torch.ones(5, 4),)).save(tmp_path / "step")
    loaded = st.load(tmp_path / "step")
    for x in torch.randn(4, 5, 4):
        torch.testing.assert_close(loaded(x), eager(x))


class Keeps(nn.Module):
    """Has an average in a dict, and adds it to its result."""

    def __init__(self):
        super().__init__()
        self.net, self.kept = net(), {"mean": torch.zeros(2)}

    def forward(self, x):
        y = self.net(x).detach()
        self.kept["mean"] = self.kept["mean"] * 0.5 + y.mean(0)
        return y + self.kept["mean"]


def test_a_dict_of_a_module():
    model, twin = Keeps(), Keeps()
    tr = st.trace(model, (torch.ones(5, 4),))
    for x in torch.randn(4, 5, 4):
        torch.testing.assert_close(tr(x), twin(x))
        torch.testing.assert_close(model.kept, twin.kept)
    moved = tr.to_module()
    torch.testing.assert_close(moved(x), twin(x))
    with pytest.raises(st.ExportError, match=r"reads self.kept.mean and binds it to a new tensor, and it is no buffer"):
        tr.to_exported_program()


def test_another_tensor_that_somebody_puts_there_is_read():
    model = net()
    state = {"scale": torch.ones(())}

    def step(x):
        state["scale"] = state["scale"] + 1
        return model(x) * state["scale"]

    tr, x = st.trace(step, (torch.ones(5, 4),)), torch.randn(5, 4)
    tr(x)
    state["scale"] = torch.full((), 7.0)
    torch.testing.assert_close(tr(x), model(x) * 8)
    assert state["scale"] == 8
    state["scale"] = torch.ones(2)
    with pytest.raises(
        st.StateMismatchError, match=r"state.scale was float32 \[\] when traced and is float32 \[2\] now"
    ):
        tr(x)


def a_tensor_of_two_names(model, optimizer):
    first = torch.ones(())
    state = {"mean": first}

    def step(x):
        state["mean"] = state["mean"] + 1
        return model(x).detach() * state["mean"] * first

    return step, state


def a_number_that_python_reads(model, optimizer):
    state = {"count": torch.zeros(())}

    def step(x):
        scale = 1 if state["count"].item() < 2 else 2
        state["count"] = state["count"] + 1
        return model(x).detach() * scale

    return step, state


def first_a_parameter(model, optimizer):
    state = {"w": model[0].bias}

    def step(x):
        loss = trained(model, optimizer, x)
        state["w"] = state["w"].detach() * 0.9
        return loss + state["w"].sum()

    return step, state


def a_view_of_a_parameter(model, optimizer):
    state = {"w": model[0].bias.detach()}

    def step(x):
        loss = trained(model, optimizer, x)
        state["w"] = state["w"] * 0.9
        return loss + state["w"].sum()

    return step, state


def absent_at_first(model, optimizer):
    state = {}

    def step(x):
        loss = trained(model, optimizer, x)
        state["mean"] = state["mean"] * 0.9 + loss if "mean" in state else loss
        return loss + state["mean"]

    return step, state


def grows(model, optimizer):
    state = {"all": torch.zeros(1)}

    def step(x):
        loss = trained(model, optimizer, x)
        state["all"] = torch.cat([state["all"], loss[None]])
        return loss + state["all"].sum()

    return step, state


def of_two_dicts_that_are_one(model, optimizer):
    state = {"mean": torch.zeros(())}
    others = [state]

    def step(x):
        others[0]["mean"] = state["mean"] + x.mean()
        return trained(model, optimizer, x) + state["mean"]

    return step, state


WRONG_NEVER = [
    a_tensor_of_two_names,
    a_number_that_python_reads,
    first_a_parameter,
    a_view_of_a_parameter,
    absent_at_first,
    grows,
    of_two_dicts_that_are_one,
]


@pytest.mark.parametrize("make", WRONG_NEVER)
def test_each_call_is_that_of_eager_or_refused(make):
    models = [net(), net()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    (step, _), (eager, _) = (make(m, o) for m, o in zip(models, optimizers, strict=True))
    torch.manual_seed(1)
    batches = [torch.randn(5, 4) for _ in range(4)]
    try:
        tr = st.trace(step, (batches[0],))
        for x in batches:
            expected = eager(x)
            torch.testing.assert_close(tr(x), expected)
    except st.ScopetraceError:
        pass


class Recurrent(nn.Module):
    """Has a state in a container, which `forward` replaces, or writes into."""

    start, after = (), None

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(3, 3)
        self.reset()

    def reset(self):
        self.state = copy.deepcopy(self.start)

    def forward(self, x):
        h, c = torch.zeros(3), self.fc(x)
        for t in pytree.tree_leaves(self.state):
            h = h * 0.5 + t if isinstance(t, torch.Tensor) else h
        self.after(torch.tanh(h + c).mean(0))
        return h + c


def zero_and_one():
    return torch.zeros(3), torch.ones(3)


def binds(make):
    """A forward that puts what this makes of the state and a new tensor in its place."""
    return lambda m, h: setattr(m, "state", make(m.state, h))


Pair = collections.namedtuple("Pair", "h c")
STATES = {
    "a tuple": (zero_and_one(), binds(lambda s, h: (h, s[1] + h))),
    "a part of it": (zero_and_one(), binds(lambda s, h: (h, s[1]))),
    "detached": (zero_and_one(), binds(lambda s, h: (h.detach(), s[1]))),
    "one tensor in both": (zero_and_one(), binds(lambda s, h: (h, h))),
    "two that change places": (zero_and_one(), binds(lambda s, h: (s[1], s[0]))),
    "a named tuple": (Pair(*zero_and_one()), binds(lambda s, h: Pair(s.c, h))),
    "beside None and a flag": ((torch.zeros(3), None, True), binds(lambda s, h: (h, *s[1:]))),
    "tuples in a list": ([zero_and_one(), zero_and_one()], binds(lambda s, h: [(h, s[0][0]), s[1]])),
    "a new list": ([*zero_and_one()], binds(lambda s, h: [h, s[0]])),
    "a slot of a list": ([*zero_and_one()], lambda m, h: operator.setitem(m.state, 1, h)),
    "a reversed list": ([*zero_and_one()], lambda m, h: m.state.reverse()),
    "a tuple in a slot": ([zero_and_one(), zero_and_one()], lambda m, h: operator.setitem(m.state, 0, (h, h * 2))),
    "a new dict": (dict(h=torch.zeros(3), n=1, c=[torch.ones(3)]), binds(lambda s, h: {**s, "h": h, "c": [s["h"]]})),
    "a deque": (collections.deque(zero_and_one(), maxlen=2), lambda m, h: m.state.append(h)),
    "a deque that turns": (collections.deque(zero_and_one()), lambda m, h: m.state.rotate(1)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kept", STATES)
def test_state_in_a_tuple_or_list(kept, grad, tmp_path):
    start, after = STATES[kept]
    model, twin = (type("M", (Recurrent,), {"start": start, "after": after})() for _ in range(2))
    xs = torch.randn(4, 2, 3)
    with torch.set_grad_enabled(grad):
        tr = st.trace(model, (xs[0],))
        tr.check(xs[1])
        torch.testing.assert_close(model.state, start)
        tr.save(tmp_path / "a.st")
        for run in (tr, st.load(tmp_path / "a.st"), model, tr):
            model.reset()
            twin.reset()
            for x in xs:
                torch.testing.assert_close(run(x), twin(x))
                if run is tr:
                    torch.testing.assert_close(model.state, twin.state)
                    assert [*map(type, model.state)] == [*map(type, twin.state)]


OTHER_STATES = {
    "a longer tuple": lambda m: (*m.state, torch.ones(3)),
    "a list": lambda m: [*m.state],
    "other shapes": lambda m: (torch.ones(4), m.state[1]),
    "None": lambda m: None,
}


@pytest.mark.parametrize("other", OTHER_STATES)
def test_another_state_in_its_place_is_refused(other):
    start, after = STATES["a tuple"]
    model = type("M", (Recurrent,), {"start": start, "after": after})()
    tr = st.trace(model, (torch.ones(2, 3),))
    model.state = OTHER_STATES[other](model)
    with pytest.raises(st.StateMismatchError, match=r"state\.0 was float32 \[3\] when traced"):
        tr(torch.ones(2, 3))


LIST = [*zero_and_one()]
REFUSED = {
    "a counter": ((torch.zeros(3), 0), binds(lambda s, h: (h, s[1] + 1))),
    "a longer tuple": (zero_and_one(), binds(lambda s, h: (*s, h))),
    "a list that grows": ([*zero_and_one()], lambda m, h: m.state.append(h)),
    "a list in two places": ({"a": LIST, "b": LIST}, lambda m, h: operator.setitem(m.state["a"], 0, h)),
    "one tensor in two slots": (collections.deque([torch.zeros(3)] * 2), lambda m, h: m.state.append(h)),
}


@pytest.mark.parametrize("kept", REFUSED)
def test_what_a_call_cannot_follow_is_right_for_one_call(kept):
    start, after = REFUSED[kept]
    model, twin = (type("M", (Recurrent,), {"start": start, "after": after})() for _ in range(2))
    tr = st.trace(model, (torch.ones(2, 3),))
    torch.testing.assert_close(tr(torch.ones(2, 3)), twin(torch.ones(2, 3)))
    with pytest.raises(st.SideEffectError, match=r"self\.state.* was"):
        tr(torch.ones(2, 3))
