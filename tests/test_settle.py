"""What a forward changes of Python's state, judged by running it again: docs/side_effects.md.

m.n += 1; return x * 2                      # the same program, nothing asked: no call is refused
if m.cos is None: m.cos = table(len(x))     # settled, another program that stores: a cache, filled by the first call
m.n += 1; return x * 2 if m.n < 3 else x    # asked, and never settled: right for one call
"""

import collections
import contextlib
import copy
import functools
import random
import signal
import types

import pytest
import torch
from torch import nn

import scopetrace as st

X = torch.arange(12.0).view(3, 4)


class Net(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.run, self.n, self.seen, self.table, self.cos, self.shape = forward, 0, [], {}, None, None
        self.register_buffer("scale", torch.tensor([2.0, 3.0]))
        self.recent, self.kinds = collections.deque([1, 2, 3], maxlen=3), set()
        self.record = types.SimpleNamespace()

    def forward(self, x):
        return self.run(self, x)


def counter(m, x):
    m.n += 1
    return x * 2


def history(m, x):
    m.seen.append(tuple(x.shape))
    return x * 2


def recent_steps(m, x):
    m.n += 1
    m.recent.append(m.n)
    m.kinds.add(tuple(x.shape))
    return x * m.recent.maxlen


def last_kept(m, x):
    m.last = x.shape[0]
    return x * 2


def rebuilt(m, x):
    m.seen = [*m.seen]
    return x * len(m.seen)


def set_once(m, x):
    if m.n == 0:
        m.n = 5
    return x * 2


def other_ops_at_first(m, x):
    """The first program has another op, which changes no value."""
    if m.n == 0:
        m.n = 5
        return x * 2 + 0
    return x * 2


def rotary(m, x):
    if m.cos is None or len(m.cos) < len(x):
        m.cos = torch.arange(len(x), dtype=x.dtype).cos()
    return x * m.cos[: len(x), None]


def anchors(m, x):
    y = x.sin()
    if m.shape != x.shape:
        m.cos, m.strides = (
            t.transpose(0, 1) for t in (torch.arange(4).view(1, 4).type_as(y) + 0.5, y.new_full((3, 1), 8.0))
        )
        m.shape = x.shape
    return y * m.cos.view(4) * m.strides.view(3, 1)


def scratch(m, x):
    if m.cos is None:
        m.cos = torch.zeros_like(x).expand_as(x) + m.scale.sum()
    return x + m.cos


def memo(m, x):
    key = tuple(x.shape)
    if key not in m.table:
        m.table[key] = torch.ones(key).cumsum(0)
    return x + m.table[key]


def scheduled(m, x):
    m.n += 1
    return x * 2 if m.n < 3 else x * 3


def grows(m, x):
    m.seen.append(0)
    return x * len(m.seen)


def shifts(m, x):
    m.recent.append(m.recent[0] + 5)
    return x * 2 if 2 in m.recent else x


def meets(m, x):
    m.kinds.add(len(x) + len(m.kinds))
    return x * (2 if m.kinds & {4} else 3)


def recurrent(m, x):
    m.cos = x if m.cos is None else m.cos * 0.5 + x
    return m.cos * 1


def of_the_first_batch(m, x):
    if m.cos is None:
        m.cos = x.mean(0)
    return x - m.cos


def drawn(m, x):
    return x * random.random()


def notes_text(m, x):
    m.n += 1
    m.table["text"] = m.record.text = f"step {m.n}"
    return x * 2


class Result:
    """What a forward made, with a number beside it."""

    def __init__(self, x, n=0):
        self.x, self.n = x, n


def keeps_its_result(m, x):
    m.record.result = Result(x * 2)
    m.table["last"] = (m.record.result, x)
    return m.record.result.x + m.table["last"][1]


def counts_in_its_result(m, x):
    last = getattr(m.record, "result", None)
    m.record.result = Result(x, 0 if last is None else last.n + 1)
    return x * (2 if m.record.result.n < 4 else 3)


def counts_in_a_row(m, x):
    m.table["last"] = Result(x, m.table["last"].n + 1 if m.table else 0)
    return x * (2 if m.table["last"].n < 4 else 3)


def counts_in_text(m, x):
    m.table["text"] = m.table.get("text", "") + "a"
    return x * (3 if m.table["text"] == "aaaaa" else 2)


SERVED = [
    counter,
    history,
    recent_steps,
    last_kept,
    rebuilt,
    set_once,
    other_ops_at_first,
    notes_text,
    keeps_its_result,
]
CACHES = [rotary, anchors, scratch, memo]
ONE_CALL = [scheduled, grows, shifts, meets, recurrent, of_the_first_batch, drawn, counts_in_text]


@pytest.mark.parametrize("forward", [*SERVED, *CACHES])
def test_calls_are_as_those_of_eager(forward):
    model = Net(forward)
    eager = copy.deepcopy(model)
    trace = st.trace(model, (X,))
    assert not any(effect.baked_in for effect in trace.side_effects)
    for i in range(12):
        assert torch.equal(trace(X + i), eager(X + i))


def test_what_is_kept_anew_may_stand_there_at_the_trace():
    model = Net(keeps_its_result)
    model(X)
    trace = st.trace(model, (X,))
    for kept in (model.record.result, None):  # as somebody resets it
        model.record.result = kept
        assert trace(X + 1).equal(model(X + 1))


@pytest.mark.parametrize("run", [1, 2, 3, 4])
def test_the_end_of_a_time_limit_is_raised_in_each_run(run, monkeypatch):
    """Runs that judge may fail, and are no place where the exception of a signal is lost."""
    monkeypatch.setattr(torch.utils, "runs", 0, raising=False)  # which a trace does not put back

    def forward(m, x):
        torch.utils.runs += 1
        if torch.utils.runs == run:
            signal.raise_signal(signal.SIGALRM)
        return keeps_its_result(m, x)

    def time_out(*_):
        raise TimeoutError

    handler = signal.signal(signal.SIGALRM, time_out)
    try:
        with pytest.raises(TimeoutError):
            st.trace(Net(forward), (X,))
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert torch.utils.runs == run


@pytest.mark.parametrize("forward", [counts_in_its_result, counts_in_a_row, counts_in_text])
def test_what_is_read_first_is_refused_after_calls_too(forward):
    model = Net(forward)
    model(X)
    trace = st.trace(model, (X,))
    trace(X)
    with pytest.raises(st.errors.SideEffectError):
        trace(X)


@pytest.mark.parametrize("forward", CACHES)
def test_a_cache_is_filled_by_a_call_and_may_be_filled_before(forward):
    model, filled = Net(forward), Net(forward)
    trace = st.trace(model, (X,))
    assert model.cos is None and model.table == {}  # as before the trace
    filled(X)
    trace(X)
    if forward is not memo:
        assert torch.equal(model.cos, filled.cos)
    model.cos = filled.cos
    for i in range(3):
        assert torch.equal(trace(X - i), filled(X - i))


@pytest.mark.parametrize("forward", ONE_CALL)
def test_what_never_settles_is_right_for_one_call(forward):
    model = Net(forward)
    eager = copy.deepcopy(model)
    random.seed(0)
    trace = st.trace(model, (X,))
    random.seed(0)
    expected = eager(X + 1 if forward is not of_the_first_batch else X)
    assert torch.equal(trace(X + 1 if forward is not of_the_first_batch else X), expected)
    with pytest.raises(st.errors.SideEffectError, match="run the model once before") as error:
        trace(X + 2)
    assert f"in {forward.__name__}: " in str(error.value)


randrange = random.randrange


def test_a_generator_that_a_forward_names_and_does_not_use():
    model = Net(lambda m, x: x * (randrange(3) if m.n else 2))
    trace = st.trace(model, (X,))
    random.random()
    assert torch.equal(trace(X), X * 2)


def test_a_model_that_ran_before_needs_no_second_run():
    runs = []
    note = runs.append  # a list would be put back

    def forward(m, x):
        note(1)
        return rotary(m, x)

    model = Net(forward)
    model(X)
    st.trace(model, (X,))
    assert len(runs) == 2


class Head(nn.Module):
    """Puts its result into a list of the model around it."""

    def __init__(self, heads):
        super().__init__()
        self.heads = heads

    def forward(self, x):
        self.heads[0] = x * 3
        return x


def test_a_list_that_two_modules_share_is_one_list_when_the_forward_runs_again():
    class Shares(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = [torch.zeros(1)]
            self.head = Head(self.heads)

        def forward(self, x):
            return self.head(x) + self.heads[0]

    model, eager = Shares(), Shares()
    trace = st.trace(model, (X,))
    for n in range(3):
        assert torch.equal(trace(X + n), eager(X + n))


class Anchors(nn.Module):
    """Computes a table when the size changes, and has statistics."""

    table, size = torch.empty(0), None

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        if self.size != len(x):
            self.table = torch.arange(1.0, 1 + len(x))[:, None]
            self.size = len(x)
        return self.norm(x) * self.table


def test_a_cache_of_which_another_trace_has_stored_the_tensor_is_one():
    model, eager = Anchors(), Anchors()
    for n in range(2):  # a call stores `table`, and no number
        trace = st.trace(model, (X,))
        assert torch.equal(trace(X + n), eager(X + n))
    model(X), eager(X)
    assert torch.equal(trace(X), eager(X))
    assert torch.equal(model.norm.running_mean, eager.norm.running_mean)
    model.table = model.table + 1  # beside `size`, which says that it is filled
    with pytest.raises(st.errors.StateMismatchError, match="table"):
        trace(X)


def test_numbers_that_ops_have_computed_are_kept_beside_rows_that_the_example_decides():
    def forward(m, x):
        if m.n == 0:
            m.n = round(torch.tensor([4.0, 8.0]).log2().sum().item())
        rows = x[x[:, 0] > 3][:5]
        return [row * torch.tensor([2.0, 3.0, 4.0, 5.0]) * m.n for row in rows], rows.unbind(1)[0]

    model, eager = Net(forward), Net(forward)
    trace = st.trace(model, (X,), specialize=True)
    assert not any(effect.baked_in for effect in trace.side_effects)
    for n in range(3):
        torch.testing.assert_close(trace(X + n / 2), eager(X + n / 2), rtol=0, atol=0)
    with pytest.raises(st.InputMismatchError, match="specialized"):
        trace(X - 4)


def in_an_attribute(m, x):
    if m.cos is None:
        m.cos = torch.arange(len(x), dtype=x.dtype).cos()
    return m.cos


def in_a_buffer(m, x):
    if "table_of_cosines" not in m._buffers:
        m.register_buffer("table_of_cosines", torch.arange(len(x), dtype=x.dtype).cos(), persistent=False)
    return m.table_of_cosines


def in_a_dict(m, x):
    if len(x) not in m.table:
        m.table[len(x)] = torch.arange(len(x), dtype=x.dtype).cos()
    return m.table[len(x)]


def in_a_list(m, x):
    if not m.seen:
        m.seen.append(torch.arange(len(x), dtype=x.dtype).cos())
    return m.seen[0]


WHERE = [in_an_attribute, in_a_buffer, in_a_dict, in_a_list]


@pytest.mark.sample(3)
@pytest.mark.parametrize("filled_by", ["the trace", "the model"])
@pytest.mark.parametrize("change", ["written", "replaced", "replaced by an equal one", "none"])
@pytest.mark.parametrize("where", WHERE, ids=lambda where: where.__name__)
def test_a_stored_tensor_that_is_changed_afterwards_is_seen(where, change, filled_by):
    def forward(m, x):
        return x * where(m, x)[:, None]

    model = Net(forward)
    trace = st.trace(model, (X,))
    (trace if filled_by == "the trace" else model)(X)
    trace(X)  # compares what is there
    is_filled = where.__name__ == "in_an_attribute" or filled_by == "the model"
    if is_filled:  # of other places, only the model itself stores it
        table = where(model, X)
        if change == "written":
            table.add_(1)
        elif change != "none":
            new = table + (1 if change == "replaced" else 0)
            if where is in_an_attribute:
                model.cos = new
            elif where is in_a_buffer:
                model.table_of_cosines = new
            elif where is in_a_dict:
                model.table[3] = new
            else:
                model.seen[0] = new
    if is_filled and change in ("written", "replaced"):
        with pytest.raises(st.errors.StateMismatchError):
            trace(X)
    else:
        assert torch.equal(trace(X), copy.deepcopy(model)(X))


TABLE = {}


def of_a_weight(m, x):
    if m.cos is None:
        m.cos = m.scale.clone()
    return x[:2] * m.cos[:, None] + m.scale.sum()


def in_a_global(m, x):
    if len(x) not in TABLE:
        TABLE[len(x)] = torch.arange(len(x), dtype=x.dtype).cos()
    return x * TABLE[len(x)][:, None]


def counts(m, x):
    m.n += 1
    return x * m.n


def registers(m, x):
    m.register_buffer("last", x * 2, persistent=False)
    return x + m.last


CHANGES = {
    "a cache of a buffer, which is written afterwards": (of_a_weight, lambda m: m.scale.add_(1), "scale"),
    "a cache in a global, which another one fills": (in_a_global, lambda m: TABLE.update({3: torch.ones(3)}), "TABLE"),
    "a counter, before the first call": (counts, lambda m: m(X), "n, which"),
    "a buffer that each run registers anew": (registers, lambda m: m(X), None),
}


@pytest.mark.parametrize("case", CHANGES)
def test_state_that_somebody_else_changes_between_calls(case):
    forward, change, refused = CHANGES[case]
    TABLE.clear()
    model = Net(forward)
    trace = st.trace(model, (X,))
    if forward is of_a_weight:
        trace(X)
    change(model)
    for n in range(3):
        if refused is not None:
            with pytest.raises(st.errors.StateMismatchError, match=refused):
                trace(X + n)
        else:
            assert torch.equal(trace(X + n), copy.deepcopy(model)(X + n))


@pytest.mark.parametrize("kind", ["a scripted module", "a graph"])
def test_what_a_scripted_module_and_a_graph_are_is_compared(kind):
    model = nn.Sequential(torch.jit.script(nn.Dropout(1.0)) if kind == "a scripted module" else nn.Dropout(0.0))
    if kind == "a graph":
        model = torch.fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    trace = st.trace(model, (X,))
    assert torch.equal(trace(X), model(X))
    if kind == "a graph":
        model.recompile()
        trace(X)  # equal code
        (node,) = (n for n in model.graph.nodes if n.op == "call_module")
        node.op, node.target = "call_function", torch.zeros_like
        model.recompile()
    else:
        model.eval()
    with pytest.raises(st.errors.StateMismatchError, match="scripted" if kind == "a scripted module" else "code"):
        trace(X)


class Kept:
    """What keeps a value at its first use, in the ways in which Python's library does it."""

    n = 3

    @functools.cached_property
    def number(self):
        return self.n * 2

    @functools.cached_property
    def tensor(self):
        return torch.arange(self.n * 1.0)

    @functools.lru_cache  # noqa: B019
    def table(self):
        return torch.arange(self.n * 1.0)


class KeptByModule(Kept, nn.Module):
    pass


@pytest.mark.parametrize("owner", [Kept, KeptByModule])
@pytest.mark.parametrize("use", [lambda o: o.number, lambda o: o.tensor, lambda o: o.table()])
def test_a_value_that_is_kept_at_its_first_use(owner, use):
    """The trace leaves none in the model, and its calls serve before the model has one and after it."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.owner = owner()

        def forward(self, x):
            return x * use(self.owner)

    net, x = Net(), torch.tensor([1.0, 2.0, 3.0])
    before = dict(vars(net.owner))
    tr = st.trace(net, (x,))
    assert vars(net.owner) == before
    for run in (tr, tr, net, tr, net, tr):
        assert torch.equal(run(x), x * use(owner()))
    for name in vars(net.owner).keys() - before.keys():  # not what is in the table of `lru_cache`
        vars(net.owner)[name] = use(owner()) + 1
        with pytest.raises(st.errors.StateMismatchError, match=f"owner.{name}"):
            tr(x)


def test_a_counter_that_a_branch_computes_with_is_read():
    def forward(m, x):
        n = m.n
        m.n += 1
        return torch.cond(x.sum() > 0, lambda x: x + n, lambda x: x - n, (x,))

    m = Net(forward)
    tr = st.trace(m, (X,))
    assert [(effect.name, effect.baked_in) for effect in tr.side_effects] == [("self.n", True)]
    assert torch.equal(tr(X), m(X))
    with pytest.raises(st.errors.ScopetraceError):
        tr(X)


class Norm(nn.Module):
    """Keeps what it computed, and in `both` a table too, as it does in eager: anew in each call."""

    def __init__(self, keep):
        super().__init__()
        self.keep, self.norm, self.last, self.cos = keep, nn.BatchNorm1d(4), None, None

    def forward(self, x):
        h = self.norm(x)
        return self.keep(self, h)


def activation(m, h):
    m.last = h.detach()
    return h


def loss(m, h):
    m.last = (h**2).mean()
    return h


def both(m, h):
    if m.cos is None:
        m.cos = torch.arange(4.0).cos()
    m.last = h * m.cos
    return m.last + 1


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("keep", [activation, loss, both])
def test_what_each_call_keeps_anew_is_no_cache(keep, training):
    model = Norm(keep).train(training)
    eager = copy.deepcopy(model)
    tr = st.trace(model, (X,))
    for i in range(4):
        torch.testing.assert_close(tr(X * i), eager(X * i))
        torch.testing.assert_close((model.last, model.cos), (eager.last, eager.cos))
        torch.testing.assert_close(list(model.buffers()), list(eager.buffers()))


class Side:
    """Of which two are equal by value."""

    def __init__(self):
        self.scale = 2.0


LEFT, RIGHT = Side(), Side()
CURRENT = LEFT


def flips(self, x):
    if self.side is LEFT:
        self.side = RIGHT
        return x + 1
    self.side = LEFT
    return x - 1


def flips_a_global(self, x):
    global CURRENT
    CURRENT, old = RIGHT if CURRENT is LEFT else LEFT, CURRENT
    return x + 1 if old is LEFT else x - 1


def asks(self, x):
    return x + 1 if self.side is LEFT else x - 1


def reads(self, x):
    return x * self.side.scale


def renews(self, x):
    y = x * self.side.scale
    self.side = Side()
    return y


@pytest.mark.parametrize(
    ("forward", "later", "after"),
    [
        (flips, "right for one call only", None),
        (flips_a_global, "right for one call only", None),
        (asks, None, "side as the object it was"),
        (reads, None, None),
        (renews, None, None),
    ],
)
def test_objects_that_are_equal_differ_where_code_compares_objects(forward, later, after):
    """`later` refuses a second call, `after` one when the model has another object, equal to that of the trace."""
    global CURRENT
    CURRENT = LEFT
    model, eager = Net(forward), Net(forward)
    model.side = eager.side = LEFT
    tr = st.trace(model, (X,))
    assert model.side is LEFT and CURRENT is LEFT
    assert torch.equal(tr(X), eager(X))
    CURRENT = LEFT
    with pytest.raises(st.errors.SideEffectError, match=later) if later else contextlib.nullcontext():
        tr(X)
    model.side = RIGHT
    with pytest.raises(st.errors.StateMismatchError, match=after) if after else contextlib.nullcontext():
        if not later:
            assert torch.equal(tr(X), model(X))
