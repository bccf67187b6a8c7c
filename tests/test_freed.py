"""What a trace made is freed with it: tape, fake tensors, module. Counted after the garbage collector ran."""

import builtins
import collections
import gc
import os
import random
import signal
import sys
import threading
import time
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor

import scopetrace as st
from scopetrace._compat.ops import building
from scopetrace.ir.tape import Call, Op, Tape, Value

Q = torch.randn(3, 2, 4)


@pytest.fixture(autouse=True)
def interrupts():
    """As Python has them; a shell begins what runs in the background with interrupts ignored."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


class Attention(nn.MultiheadAttention):
    def forward(self, q):
        return super().forward(q, q, q)


class Counter(nn.Module):
    """It writes to a buffer, and to a view of what autograd saves."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        y = x * self.weight
        y[0] *= 2
        return y.sigmoid()


MODELS = {
    "linear": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
    "attention": lambda: Attention(4, 2),
    "batch_norm": lambda: nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()),
    "lstm": lambda: nn.LSTM(4, 4),
    "encoder": lambda: nn.TransformerEncoderLayer(4, 2, 8),
    "counter": Counter,
}


class Fails(nn.Module):
    """Raises after the model has run."""

    def __init__(self, model, error):
        super().__init__()
        self.model, self.error = model, error

    def forward(self, x):
        self.model(x)
        raise self.error


def saved(model, path):
    st.trace(model, (Q,)).save(path)
    st.load(path)(Q)


def in_a_thread(model, path):
    grad = torch.is_grad_enabled()  # which each thread has of its own

    def run():
        with torch.set_grad_enabled(grad):
            st.trace(model, (Q,))(Q)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def failed(error):
    def use(model, path):
        with pytest.raises(error):
            st.trace(Fails(model, error), (Q,))

    return use


USES = {
    "trace": lambda model, path: st.trace(model, (Q,)).graph_module,
    "call": lambda model, path: st.trace(model, (Q,))(Q),
    "saved": saved,
    "exported": lambda model, path: st.trace(model, (Q,)).to_exported_program(),
    "outlined": lambda model, path: str(st.trace(model, (Q,)).outline(type(model))),
    "failed": failed(RuntimeError),
    "interrupted": failed(KeyboardInterrupt),
    "in_a_thread": in_a_thread,
}


@pytest.fixture(scope="module", autouse=True)
def only_new_objects():
    """The garbage collector leaves out what other tests and imports made, which takes most of its time."""
    gc.collect()
    gc.freeze()


COUNTED = (Tape, Op, Call, Value, FakeTensor, nn.Module)


def alive():
    """What is there of traces, by kind."""
    gc.collect()
    kinds = collections.Counter(map(type, gc.get_objects()))
    return {kind.__name__: count for kind, count in kinds.items() if issubclass(kind, COUNTED)}


@pytest.mark.sample(5)
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("model", MODELS)
def test_nothing_stays(model, use, grad, tmp_path):
    with torch.set_grad_enabled(grad):
        USES[use](MODELS[model](), tmp_path / "trace")  # torch keeps some things when it is first used
        before = alive()
        for _ in range(2):
            USES[use](MODELS[model](), tmp_path / "trace")
    assert alive() == before


def test_a_forward_that_runs_again_leaves_nothing():
    class Derivative(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return torch.autograd.grad(self.inner(x).tanh().sum(), x)

    x = Q.clone().requires_grad_()
    st.trace(Derivative(), (x,))(x)
    before = alive()
    st.trace(Derivative(), (x,))(x)
    assert alive() == before


def test_dynamic_and_specialized_traces_leave_nothing():
    def run():
        layer = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
        st.trace(layer, (torch.randn(3, 4),), dynamic_shapes=({0: torch.export.Dim("n")},))(torch.randn(5, 4))
        st.trace(lambda x: x * 2 if layer(x).sum() < 1e9 else x, (torch.randn(3, 4),), specialize=True)

    run()
    before = alive()
    run()
    assert alive() == before


def test_a_class_of_a_function_is_freed():
    """Signatures and source lines are cached by function and by line: neither keeps the class of a model."""

    def run():
        scale = torch.ones(4)

        class Local(nn.Module):
            def forward(self, x):
                return x * scale

        tr = st.trace(Local(), (Q,))
        str(tr), tr.calls[0].arguments
        return weakref.ref(scale)

    kept = run()
    gc.collect()
    assert kept() is None


def test_an_interrupt_waits_for_the_next_op():
    said = []
    note = said.append  # a list that the forward names would be put back

    def interrupted(x):
        signal.raise_signal(signal.SIGINT)
        note("before the op")
        y = x * 2
        note("after the op")
        return y

    def interrupted_twice(x):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        note("after two")

    handler = signal.getsignal(signal.SIGINT)
    for forward in (interrupted, interrupted_twice):
        with pytest.raises(KeyboardInterrupt):
            st.trace(forward, (Q,))
    assert said == ["before the op"] and signal.getsignal(signal.SIGINT) is handler
    with pytest.raises(KeyboardInterrupt):  # there is no other op
        st.trace(lambda x: signal.raise_signal(signal.SIGINT), (Q,))


def run_all(path, draw):
    """Each use of each model, in an order of its own."""
    uses = [(model, use, grad) for model in MODELS for use in USES for grad in (False, True)]
    draw.shuffle(uses)
    for model, use, grad in uses:
        with torch.set_grad_enabled(grad):
            USES[use](MODELS[model](), path)


REPLACED = (torch, torch.Tensor, torch._C, nn.Module, nn.LSTM, builtins, type(os.environ), torch.SymInt)
"""Some of what a trace replaces attributes of while it runs."""


def tables():
    return [dict(vars(owner)) for owner in REPLACED]


def left(before):
    """What is not as it was in the process: attributes, by name, and settings."""
    pairs = zip(before, tables(), strict=True)
    names = [name for then, now in pairs for name in then if name[:2] != "__" and now.get(name) is not then[name]]
    settings = {
        "dispatch modes": not torch._C._len_torch_dispatch_stack(),
        "function modes": not torch._C._len_torch_function_stack(),
        "garbage collector": gc.isenabled(),
        "compiling": not torch.compiler.is_compiling(),
        "stance of torch.compile": torch._dynamo.eval_frame._stance.stance == "default",
        "interrupts": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    }
    return [*names, *(name for name, is_as_before in settings.items() if not is_as_before)]


@pytest.mark.slow
def test_500_traces_of_mixed_models(tmp_path):
    run_all(tmp_path / "trace", random.Random(0))
    before, objects = alive(), len(gc.get_objects())
    for i in range(5):  # 480 traces
        run_all(tmp_path / "trace", random.Random(i))
    assert alive() == before
    assert len(gc.get_objects()) < objects + 1000


@pytest.mark.slow
def test_500_traces_in_threads(tmp_path):
    run_all(tmp_path / "trace", random.Random(0))
    before, state, errors = alive(), tables(), []

    def run(i):
        try:
            run_all(tmp_path / f"trace{i}", random.Random(i))
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=run, args=(i,)) for i in range(5)]
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    del threads
    assert not errors and not left(state)
    assert alive() == before


def test_a_thread_that_builds_waits_for_no_other():
    """While one thread builds, another asks for a graph; then the first asks for one of its own."""
    mine, other = (st.trace(nn.Linear(4, 4), torch.randn(2, 4)) for _ in range(2))
    builds, graphs = threading.Event(), []

    def build():
        with building():
            builds.set()
            time.sleep(0.5)
            graphs.append(mine.graph_module)

    threads = [threading.Thread(target=f, daemon=True) for f in (build, lambda: graphs.append(other.graph_module))]
    for thread in threads:
        thread.start()
        builds.wait()
    for thread in threads:
        thread.join(30)
    assert len(graphs) == 2


class TimedOut(Exception):
    """What the handler of an alarm raises."""


def time_out(*_):
    raise TimedOut


SIGNALS = {
    "Ctrl-C": (signal.ITIMER_PROF, signal.SIGPROF, lambda *_: signal.raise_signal(signal.SIGINT)),
    "an alarm": (signal.ITIMER_REAL, signal.SIGALRM, time_out),
}


@pytest.mark.parametrize("what", SIGNALS)
@pytest.mark.parametrize("count", [30, pytest.param(500, marks=pytest.mark.slow)])
def test_interrupts_at_any_time(count, what, monkeypatch):
    """Ctrl-C, or the end of a time limit, at a time that has nothing to do with what runs.

    Python drops one that arrives in the callback of a weak reference; pytest would keep it, with the frames around.
    """
    monkeypatch.setattr(sys, "unraisablehook", lambda *_: None)
    draw, interrupted = random.Random(0), 0
    for make in MODELS.values():
        st.trace(make(), (Q,))(Q)
    before, state = alive(), tables()
    timer, number, handle = SIGNALS[what]
    handler = signal.signal(number, handle)
    try:
        for _ in range(count):
            with torch.set_grad_enabled(draw.random() < 0.5):
                try:
                    signal.setitimer(timer, draw.uniform(0.0005, 0.02))
                    try:
                        st.trace(draw.choice([*MODELS.values()])(), (Q,))(Q)
                    finally:
                        signal.setitimer(timer, 0)
                        time.sleep(0)  # what has arrived acts here
                except (KeyboardInterrupt, TimedOut):
                    interrupted += 1
            assert left(state) == []
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, handler)
    assert interrupted > count / 10
    assert alive() == before


def lines_interrupted(enter, where, at=None):
    """How many lines of functions called `where` run in `with enter()`, where Ctrl-C arrives before the one `at`."""
    lines = 0

    def interrupt(frame, event, _):
        nonlocal lines
        if where not in frame.f_code.co_qualname:
            return None
        if event == "line":
            lines += 1
            if lines == at:
                signal.raise_signal(signal.SIGINT)
        return interrupt

    sys.settrace(interrupt)
    try:
        with enter():
            pass
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return lines


def test_interrupts_at_each_line_of_what_switches_the_garbage_collector():
    lines = lines_interrupted(building, "building")
    assert lines > 4
    for at in range(1, lines + 1):
        lines_interrupted(building, "building", at)
        assert gc.isenabled()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_as_before_when_the_last_thread_has_left(enabled):
    def second():
        with building(), building():
            assert not gc.isenabled()

    thread = threading.Thread(target=second)
    (gc.enable if enabled else gc.disable)()
    try:
        with building():
            thread.start()
            with building():
                assert not gc.isenabled()
            assert not gc.isenabled()
        thread.join()
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_interrupts_at_each_line_of_what_keeps_them():
    """Whenever the first arrives, the next trace keeps the second one until it has put everything back."""
    lines = lines_interrupted(building, "_Interrupts")
    assert lines > 8
    for at in range(1, lines + 1):
        lines_interrupted(building, "_Interrupts", at)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        after = []
        with pytest.raises(KeyboardInterrupt), building():
            signal.raise_signal(signal.SIGINT)
            after.append("kept")
        assert after == ["kept"], at


class Step(nn.Module):
    """A model of layers that are copied, and its training step."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(2), nn.ReLU()) for _ in range(3)))

    def forward(self, x):
        return self.layers(x)

    def step(self, x):
        loss = self(x).sum()
        loss.backward()
        return loss


def test_nothing_is_left_to_the_garbage_collector():
    """What a trace needs is freed when it ends, but for ops and values of tapes that are not kept: they form cycles."""
    model = Step()
    for traced in (model, model.step):
        st.trace(traced, (Q,))  # makes what torch and the classes keep
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            trace = st.trace(traced, (Q,))
            gc.collect()
            left = collections.Counter(type(x).__module__ for x in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
        assert not [name for name in left if name.startswith("scopetrace") and name != "scopetrace.ir.tape"], left
        del trace
