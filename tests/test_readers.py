"""A number that a forward reads: where it is kept, by which code it is read, with an op in that code or without one.

Each program is traced and called; then the number is another one, and a call is as in eager, or refused. All places
and all readers in both ways are slow; each place with three readers, and each reader with three places, are not.
"""

import functools
import itertools
import sys
import types

import pytest
import torch
from forwards import loaded

import scopetrace as st
from scopetrace.errors import ScopetraceError

PLACES = {
    "global": ("N = 2.0", "N", "g['N'] = 3.0"),
    "item of a list": ("N = [2.0]", "N[0]", "g['N'][0] = 3.0"),
    "item of a dict": ("N = {'a': 2.0}", "N['a']", "g['N']['a'] = 3.0"),
    "absent item": ("N = {}", "N.get('a', 2.0)", "g['N']['a'] = 3.0"),
    "attribute": ("class C: pass\nN = C()\nN.v = 2.0", "N.v", "g['N'].v = 3.0"),
    "class attribute": ("class C:\n    v = 2.0", "C.v", "g['C'].v = 3.0"),
    "function attribute": ("def f_(): pass\nf_.v = 2.0", "f_.v", "g['f_'].v = 3.0"),
    "Python module": ("import settings_of_readers as other", "other.N", "g['other'].N = 3.0"),
    "enum": ("class E(enum.Enum):\n    A = 2.0\n    B = 3.0\nN = E.A", "N.value", "g['N'] = g['E'].B"),
    "dataclass": ("@dataclasses.dataclass\nclass D:\n    v: float = 2.0\nN = D()", "N.v", "g['N'].v = 3.0"),
    "named tuple": ("Point = collections.namedtuple('Point', 'v')\nN = Point(2.0)", "N.v", "g['N'] = g['Point'](3.0)"),
    "partial": ("N = functools.partial(float, 2)", "N()", "g['N'] = functools.partial(float, 3)"),
    "function": ("def N(): return 2.0", "N()", "g['N'] = lambda: 3.0"),
    "flag": ("N = False", "(3.0 if N else 2.0)", "g['N'] = True"),
    "None": ("N = None", "(2.0 if N is None else N)", "g['N'] = 3.0"),
    "text": ("N = 'a'", "(2.0 if N == 'a' else 3.0)", "g['N'] = 'b'"),
    "length": ("N = [1, 2]", "float(len(N))", "g['N'].append(1)"),
    "member": ("N = {1, 2}", "(3.0 if 7 in N else 2.0)", "g['N'].add(7)"),
    "context variable": (
        "import contextvars\nN = contextvars.ContextVar('N')\nN.set(2.0)",
        "N.get()",
        "g['N'].set(3.0)",
    ),
    "of the module": ("", "s.v", "m.v = 3.0"),
    "item of the module": ("", "s.d['v']", "m.d['v'] = 3.0"),
    "nested in the module": ("", "s.cfg.inner.v", "m.cfg.inner.v = 3.0"),
    "of the class": ("", "s.k", "type(m).k = 3.0"),
    "property": ("", "s.p", "m._p = 3.0"),
    "absent attribute": ("", "getattr(s, 'absent', 2.0)", "m.absent = 3.0"),
    "hasattr": ("", "(3.0 if hasattr(s, 'absent') else 2.0)", "m.absent = 3.0"),
    "of a submodule": ("", "s.sub.v", "m.sub.v = 3.0"),
    "number of submodules": ("", "float(len(s.mods))", "m.mods.append(torch.nn.Identity())"),
    "training": ("", "(3.0 if s.training else 2.0)", "m.train()"),
    "vars": ("", "vars(s)['v']", "m.v = 3.0"),
    "requires_grad": ("", "(2.0 if s.w.requires_grad else 3.0)", "m.w.requires_grad_(False)"),
    "dtype": ("", "(2.0 if s.w.dtype is torch.float32 else 3.0)", "m.w = torch.nn.Parameter(m.w.double())"),
    "shape": ("", "float(s.w.shape[0])", "m.w = torch.nn.Parameter(torch.ones(3))"),
    "grad mode": ("", "(3.0 if torch.is_grad_enabled() else 2.0)", "torch.set_grad_enabled(True)"),
    "default dtype": (
        "",
        "(2.0 if torch.get_default_dtype() is torch.float32 else 3.0)",
        "torch.set_default_dtype(torch.half)",
    ),
    "setting": (
        "",
        "(3.0 if torch.are_deterministic_algorithms_enabled() else 2.0)",
        "torch.use_deterministic_algorithms(True)",
    ),
    "method": ("", "s.num()", "type(m).num = lambda self: 3.0"),
    "method of the module itself": ("", "s.num()", "m.num = lambda: 3.0"),
}
"""What a file has, how the number is read (`s` is the model), and what makes it another one."""


def chain(links, value, before=""):
    """A function that calls one that calls one ..., the last of which reads the number."""
    calls = [f"{before}def h{i}(s, x): return h{i + 1}(s, x)" for i in range(links)]
    return "\n".join([f"{before}def h{links}(s, x): return {value}", *calls, "go = h0"])


DECORATOR = "def deco(f):\n    @functools.wraps(f)\n    def w(*a, **k): return f(*a, **k)\n    return w\n"


def in_class(method, args, body, use):
    """A class with a method, and a function `go` that uses it."""
    init = "    def __init__(self, s=None, x=None): self.s, self.x = s, x"
    return f"class Go:\n{init}\n    def {method}(self, {args}): {body}\nG = Go()\ndef go(s, x): return {use}"


READERS = {
    "the forward's own function": lambda value: f"def go(s, x): return {value}",
    **{f"{n} functions further": functools.partial(chain, n) for n in (1, 2, 3, 6)},
    "an inner function": lambda value: f"def go(s, x):\n    def inner(): return {value}\n    return inner()",
    "a lambda": lambda value: f"go = lambda s, x: {value}",
    "a closure": lambda value: f"def make():\n    def go(s, x): return {value}\n    return go\ngo = make()",
    "decorated": lambda value: DECORATOR + chain(0, value, "@deco\n"),
    "decorated functions": lambda value: DECORATOR + chain(2, value, "@deco\n"),
    "a callable object": lambda value: in_class("__call__", "s, x", f"return {value}", "G(s, x)"),
    "a method": lambda value: in_class("run", "s, x", f"return {value}", "G.run(s, x)"),
    "a method of a new object": lambda value: in_class(
        "run", "", f"s, x = self.s, self.x; return {value}", "Go(s, x).run()"
    ),
    "an operator": lambda value: in_class("__mul__", "x", f"s = self.s; return {value}", "Go(s) * x"),
    "a method with a computed name": lambda value: in_class(
        "run", "s, x", f"return {value}", "getattr(G, 'r' + 'un')(s, x)"
    ),
    "__getattr__": lambda value: in_class("__getattr__", "name", f"return lambda s, x: {value}", "G.run(s, x)"),
    "a static method": lambda value: (
        f"class Go:\n    @staticmethod\n    def run(s, x): return {value}\ndef go(s, x): return Go.run(s, x)"
    ),
    "of a table": lambda value: f"def f(s, x): return {value}\nT = {{'f': f}}\ndef go(s, x): return T['f'](s, x)",
    "of a list": lambda value: f"def f(s, x): return {value}\nT = [f]\ndef go(s, x): return T[0](s, x)",
    "a partial": lambda value: (
        f"def f(k, s, x): return {value}\nP = functools.partial(f, 1)\ndef go(s, x): return P(s, x)"
    ),
    "map": lambda value: f"def f(s, x): return {value}\ndef go(s, x): return [*map(f, [s], [x])][0]",
    "a comprehension": lambda value: f"def go(s, x): return [{value} for _ in range(1)][0]",
    "a generator": lambda value: f"def f(s, x): yield {value}\ndef go(s, x): return next(f(s, x))",
    "a default argument": lambda value: f"def f(s, x): return {value}\ndef go(s, x, f=f): return f(s, x)",
    "a context": lambda value: (
        f"@contextlib.contextmanager\ndef f(s, x): yield {value}\ndef go(s, x):\n    with f(s, x) as r: return r"
    ),
}
"""By what reads it, a file with a function `go` that gives the value for a model and an input."""
MODEL = """
import types
class Sub(nn.Module):
    v = 2.0
    def forward(self, x): return x

class M(nn.Module):
    k = 2.0

    def __init__(self):
        super().__init__()
        self.v = self._p = 2.0
        self.d, self.cfg = {{'v': 2.0}}, types.SimpleNamespace(inner=types.SimpleNamespace(v=2.0))
        self.sub, self.w = Sub(), nn.Parameter(torch.ones(2))
        self.mods = nn.ModuleList([nn.Identity(), nn.Identity()])

    def num(self): return 2.0

    @property
    def p(self): return self._p

    def forward(self, x): return {result}
"""
HEAD = "import collections, contextlib, dataclasses, enum, functools\nimport torch\nfrom torch import nn\n"


@pytest.fixture(autouse=True)
def settings():
    sys.modules["settings_of_readers"] = types.ModuleType("settings_of_readers")
    with torch.no_grad():
        yield
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    del sys.modules["settings_of_readers"]


def assert_seen(place, reader, with_op):
    setup, value, change = PLACES[place]
    sys.modules["settings_of_readers"].N = 2.0
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    body = READERS[reader](f"x * {value}" if with_op else value)
    g = loaded(f"{HEAD}{setup}\n{body}\n{MODEL.format(result='go(self, x)' if with_op else 'x * go(self, x)')}")
    m, x = g["M"]().eval(), torch.tensor([1.0, 2.0])
    tr = st.trace(m, (x,))
    g["UNREAD"], m.unread = 1, 1
    assert torch.equal(tr(x), m(x))
    exec(change, {"g": g, "m": m, "torch": torch, "functools": functools})
    try:
        result = tr(x)
    except ScopetraceError:
        return
    assert torch.equal(result, m(x))


@pytest.mark.sample(5)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("reader", ["the forward's own function", "decorated functions", "a method"])
def test_each_place(place, reader):
    assert_seen(place, reader, with_op=False)


@pytest.mark.sample(5)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("place", ["global", "class attribute", "nested in the module"])
def test_each_reader(place, reader):
    for with_op in (True, False):
        assert_seen(place, reader, with_op)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_each_place_by_each_reader(place):
    for reader, with_op in itertools.product(READERS, (True, False)):
        assert_seen(place, reader, with_op)
