"""Memory that tensors of a call share: a program that writes is right for the ranges of bytes of the trace, or says no.

How the tensors lie when traced  x  how they lie in the call  x  program  ->  as eager, or InputMismatchError
"""

import itertools

import pytest
import torch

import scopetrace as st
from scopetrace.program.sharing import _in_one_memory, memory_range


def base():
    return torch.arange(24.0)


LAYOUTS = {
    "separate": lambda: (base()[:3].clone(), base()[3:6].clone()),
    "one": lambda: (t := base()[:3], t),
    "the same part": lambda: (t := base(), (t[:3], t[:3]))[1],
    "the same part, elsewhere": lambda: (t := base(), (t[7:10], t[7:10]))[1],
    "disjoint": lambda: (t := base(), (t[:3], t[3:6]))[1],
    "disjoint, elsewhere": lambda: (t := base(), (t[9:12], t[2:5]))[1],
    "one after": lambda: (t := base(), (t[:3], t[1:4]))[1],
    "one after, elsewhere": lambda: (t := base(), (t[5:8], t[6:9]))[1],
    "two after": lambda: (t := base(), (t[:3], t[2:5]))[1],
    "one before": lambda: (t := base(), (t[1:4], t[:3]))[1],
    "interleaved": lambda: (t := base(), (t[0:6:2], t[1:6:2]))[1],
    "every second, shared": lambda: (t := base(), (t[0:6:2], t[2:8:2]))[1],
    "every second and all": lambda: (t := base(), (t[0:6:2], t[:3]))[1],
    "columns": lambda: (t := base().view(6, 4), (t[:3, 0], t[:3, 1]))[1],
    "a row and a column": lambda: (t := base().view(6, 4), (t[0, :3], t[:3, 0]))[1],
    "bits": lambda: (t := base(), (t[:3], t.view(torch.int32)[1:4]))[1],
}
APART = ("separate", "disjoint", "disjoint, elsewhere", "interleaved", "columns")
ALIKE = (
    ("the same part", "the same part, elsewhere"),
    ("the same part", "one"),
    ("one after", "one after, elsewhere"),
    *itertools.permutations(APART, 2),
)


def both(a, b):
    a.mul_(2)
    b.add_(1)
    return a + 0


def first(a, b):
    a.mul_(2)
    return a + b


def second(a, b):
    c = a * 2
    b.copy_(c)
    return a, b


def part(a, b):
    a[1:].add_(b[:2].clone())
    return b * 1


def neither(a, b):
    return a + b


PROGRAMS = (both, first, second, part, neither)


def outcome(run, args):
    """Results and all memory afterwards."""
    found = run(*args)
    found = found if isinstance(found, tuple) else (found,)
    return [t.clone() for t in (*found, *args)]


def as_trace(function, args):
    return st.trace(function, args)


def as_functionalized(function, args):
    return st.functionalize(torch.fx.symbolic_trace(function), args)


@pytest.mark.sample(5)
@pytest.mark.parametrize("make", (as_trace, as_functionalized))
@pytest.mark.parametrize("function", PROGRAMS)
@pytest.mark.parametrize("traced", LAYOUTS)
def test_inputs_in_one_memory(function, traced, make):
    try:
        run = make(function, LAYOUTS[traced]())
    except (st.errors.FunctionalizationError, st.errors.InputMismatchError, RuntimeError):
        return
    for called, layout in LAYOUTS.items():
        if (called == "bits") != (traced == "bits"):
            continue
        expected = outcome(function, layout())
        try:
            found = outcome(run, layout())
        except st.errors.InputMismatchError as error:
            matters = function is not neither or traced == "one"  # one tensor is one input of the graph
            assert matters and called != traced and (traced, called) not in ALIKE, (called, error)
            continue
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=f"traced {traced}, called {called}")


@pytest.mark.sample(2)
@pytest.mark.parametrize("level", ("aten", "torch"))
@pytest.mark.parametrize("function", PROGRAMS)
def test_a_compiled_model_with_inputs_in_one_memory(function, level):
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=st.functional_backend(lambda gm, _: gm, level=level))
    for called, layout in LAYOUTS.items():
        if called in ("bits", "one"):
            continue
        try:
            found = outcome(compiled, layout())
        except (st.errors.ScopetraceError, RuntimeError):
            continue
        torch.testing.assert_close(found, outcome(function, layout()), rtol=0, atol=0, msg=called)


def test_a_file_knows_how_inputs_lay(tmp_path):
    st.trace(both, LAYOUTS["one after"]()).save(tmp_path / "both.st")
    loaded = st.load(tmp_path / "both.st")
    expected = outcome(both, LAYOUTS["one after, elsewhere"]())
    torch.testing.assert_close(outcome(loaded, LAYOUTS["one after, elsewhere"]()), expected)
    with pytest.raises(st.errors.InputMismatchError, match="b and a lay otherwise in the memory that they share"):
        loaded(*LAYOUTS["two after"]())


class Held(torch.nn.Module):
    def __init__(self, layout):
        super().__init__()
        self.a, self.b = None, None
        self.lie(layout)

    def lie(self, layout):
        a, b = layout()
        del self.a, self.b
        self.register_buffer("a", a)
        self.register_buffer("b", b)

    def forward(self, x):
        self.a.mul_(x)
        self.b.add_(1)
        return self.a + self.b


@pytest.mark.parametrize("traced", LAYOUTS)
def test_tensors_of_the_model_in_one_memory(traced):
    if traced == "bits":
        return
    net, x = Held(LAYOUTS[traced]), torch.full((3,), 2.0)
    trace = st.trace(net, (x,))
    for called, layout in LAYOUTS.items():
        if called == "bits":
            continue
        net.lie(layout)
        net_in_eager = Held(layout)
        expected = (net_in_eager(x), net_in_eager.a, net_in_eager.b)
        try:
            found = trace(x)
        except st.errors.StateMismatchError as error:
            assert called != traced and (traced, called) not in ALIKE, (called, error)
            continue
        torch.testing.assert_close((found, net.a, net.b), expected, msg=f"traced {traced}, called {called}")


class Beside(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.memory = torch.arange(12.0)
        self.register_buffer("a", self.memory[:3])

    def forward(self, x):
        self.a.mul_(2)
        return self.a + x


def test_an_input_may_lie_beside_a_tensor_of_the_model_and_not_in_it():
    net = Beside()
    trace = st.trace(net, (torch.ones(3),))
    torch.testing.assert_close(trace(net.memory[3:6]), torch.tensor([0.0, 2, 4]) + torch.tensor([3.0, 4, 5]))
    with pytest.raises(st.errors.InputMismatchError, match="x shares memory with a of the model"):
        trace(net.memory[2:5])


def test_many_dimensions_meet_or_do_not():
    """Against the positions themselves, for random strides."""
    generator = torch.Generator().manual_seed(0)

    def some(high, count):
        return torch.randint(1, high, (count,), generator=generator).tolist()

    for _ in range(3000):
        memory = torch.zeros(600)
        count = some(4, 1)[0]
        views = [torch.as_strided(memory, some(4, count), some(20, count), some(60, 1)[0]) for _ in range(2)]
        lies = _in_one_memory(*map(memory_range, views))
        views[0].fill_(1)
        assert (lies is not None) == bool(views[1].any())


def test_strides_of_thousands_of_elements_take_no_time():
    memory = torch.empty(8, 3, 4096, 64, device="meta")
    keys, values = memory[:, 0].transpose(1, 2), memory[:, 1].transpose(1, 2)
    assert _in_one_memory(memory_range(keys), memory_range(values)) is None
    assert _in_one_memory(memory_range(keys), memory_range(memory[:, 0, 5:])) is not None
