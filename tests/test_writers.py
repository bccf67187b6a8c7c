"""A forward that writes to something of Python: where that is, in which function, and what is done with it.

Each program is traced, which leaves it as it was; five calls of the trace are as in eager, or refused.
"""

import collections
import functools
import itertools
import types

import pytest
import torch
from forwards import loaded

import scopetrace as st
from scopetrace.errors import ScopetraceError

PLACES = {
    "global": ("N = 0", "global N; N += 1", "N"),
    "item of a dict": ("N = {'a': 0}", "N['a'] += 1", "N['a']"),
    "list": ("N = []", "N.append(1)", "len(N)"),
    "attribute": ("N = types.SimpleNamespace(v=0)", "N.v += 1", "N.v"),
    "class attribute": ("class C: v = 0", "C.v += 1", "C.v"),
    "function attribute": ("def f_(): pass\nf_.v = 0", "f_.v += 1", "f_.v"),
    "of the module": ("", "s.n += 1", "s.n"),
    "item of the module": ("", "s.d['v'] += 1", "s.d['v']"),
    "list of the module": ("", "s.l.append(1)", "len(s.l)"),
    "nested in the module": ("", "s.cfg.inner.v += 1", "s.cfg.inner.v"),
    "of the class": ("", "type(s).k += 1", "s.k"),
    "of a submodule": ("", "s.sub.n += 1", "s.sub.n"),
    "buffer": ("", "s.b = s.b + 1", "float(s.b.numel())"),
    "setdefault": ("N = {}", "N.setdefault('k', 5)", "N['k']"),
    "memo": ("N = {}", "N['k'] = 5 if 'k' not in N else N['k']", "N['k']"),
    "lazy attribute": ("", "s.z = 4 if s.z is None else s.z", "s.z"),
    "toggle": ("", "s.f = not s.f", "(2.0 if s.f else 3.0)"),
    "global toggle": ("N = False", "global N; N = not N", "(2.0 if N else 3.0)"),
    "iterator": ("N = iter(range(100))", "s.last = next(N)", "s.last"),
    "count": ("N = itertools.count()", "s.last = next(N)", "s.last"),
    "deque": ("N = collections.deque([1, 2, 3])", "N.rotate(1)", "N[0]"),
    "set": ("N = set()", "N.add(len(N))", "len(N)"),
}
"""What a file has, the statement that writes (`s` is the model), and the value that it writes to."""
USES = {
    "none": "y",
    "operand": "y * {value}",
    "branch": "(y * 2 if {value} > 1 else y * 3)",
    "index": "y * [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0][int({value}) % 8]",
    "text": "y * len(str({value}))",
}


def chain(links, write, result):
    """Functions that call one another, the last of which writes and computes."""
    calls = [f"def h{i}(s, x): return h{i + 1}(s, x)" for i in range(links)]
    return "\n".join([*calls, f"def h{links}(s, x):\n    {write}\n    y = x + 1\n    return {result}", "go = h0"])


def apart(links, write, result):
    """The statement is in the last of functions that call one another, in which there is no op."""
    calls = [f"def w{i}(s): w{i + 1}(s)" for i in range(links)]
    writer = "\n".join([*calls, f"def w{links}(s):\n    {write}"])
    return f"{writer}\ndef go(s, x):\n    w0(s)\n    y = x + 1\n    return {result}"


WRITERS = {
    **{f"{n} functions further": functools.partial(chain, n) for n in (0, 1, 2, 5)},
    **{f"without an op, {n} further": functools.partial(apart, n) for n in (0, 3)},
    "of an object": lambda write, result: (
        f"class W:\n    def step(self, s):\n        {write}\n"
        f"G = W()\ndef go(s, x):\n    G.step(s)\n    y = x + 1\n    return {result}"
    ),
    **{
        name: functools.partial(
            lambda call, write, result: (
                f"class W:\n    def __init__(self, s):\n        {write}\n"
                f"KINDS = {{'w': W}}\nheld = W.__new__(W)\ndel W\n"
                f"def go(s, x):\n    {call}(s)\n    y = x + 1\n    return {result}"
            ),
            call,
        )
        for name, call in {"of a class in a table": "KINDS['w']", "of the class of an object": "type(held)"}.items()
    },
    "after the op": lambda write, result: (
        f"def w(s):\n    {write}\ndef go(s, x):\n    y = x + 1\n    r = {result}\n    w(s)\n    return r"
    ),
}
NOT_YET_THERE = {(place, "after the op") for place in ("setdefault", "memo", "lazy attribute")}
"""What is read in eager before it is written."""
MODEL = """
class Sub(nn.Module):
    n = 0
    def forward(self, x): return x

class M(nn.Module):
    k = 0

    def __init__(self):
        super().__init__()
        self.n, self.z, self.f, self.last = 0, None, False, 0
        self.d, self.l = {'v': 0}, []
        self.cfg = types.SimpleNamespace(inner=types.SimpleNamespace(v=0))
        self.sub = Sub()
        self.register_buffer("b", torch.zeros(3))

    def forward(self, x): return go(self, x)
"""
HEAD = "import collections, itertools, types\nimport torch\nfrom torch import nn\n"


def state(g, m):
    """The values of all places."""
    holders = [vars(g[name])["v"] for name in ("C", "f_") if name in g]
    kept = g.get("N")
    if not isinstance(kept, (bool, int, dict, list, set, collections.deque, types.SimpleNamespace)):
        kept = None  # an iterator cannot be put back
    return repr((kept, holders, m.n, m.z, m.f, m.d, m.l, m.cfg, m.sub.n, type(m).k, m.b))


def assert_right_or_refused(place, writer, use):
    setup, write, value = PLACES[place]
    source = f"{HEAD}{setup}\n{WRITERS[writer](write, USES[use].format(value=value))}\n{MODEL}"
    ours, eager = loaded(source), loaded(source)
    model, other, x = ours["M"]().eval(), eager["M"]().eval(), torch.tensor([1.0, 2.0])
    before = state(ours, model)
    tr = st.trace(model, (x,))
    assert state(ours, model) == before
    for i in range(5):
        try:
            result = tr(x + i)
        except ScopetraceError:
            assert i > 0
            return
        assert torch.equal(result, other(x + i)), (i, result)


@pytest.mark.sample(7)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("place", PLACES)
@torch.no_grad()
def test_operand(place, writer):
    if (place, writer) not in NOT_YET_THERE:
        assert_right_or_refused(place, writer, "operand")


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@torch.no_grad()
def test_all(place):
    for writer, use in itertools.product(WRITERS, USES):
        if (place, writer) not in NOT_YET_THERE or use == "none":
            assert_right_or_refused(place, writer, use)
