"""What helpers without ops read counts, by whatever way the forward gets at them."""

import linecache
import sys
import types

import pytest
import torch

import scopetrace as st

X = torch.ones(2)
FILE = """
import contextlib, dataclasses, enum, functools, types
import torch

SCALE = 2.0
users = types.ModuleType("users")


def helper():
    return SCALE


class Empty:
    pass


{definitions}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Identity()
        {attributes}

    def method(self):
        return helper()

    def forward(self, x):
        return self.fc(x) * {call}
"""
METHOD = "class O:\n    def go(self): return helper()\n    __call__ = go\n    def __add__(self, x): return helper()"
FUNCTIONS = "class O:\n    def __init__(self): self.f, self.fs = helper, {'a': helper}"
# by what is defined, and what attributes the model has: how its forward calls the helper
WAYS = {
    ("", ""): ("helper()", "self.method()", "[helper() for _ in [0]][0]", "list(map(lambda _: helper(), [0]))[0]"),
    ("def two(): return helper()\ndef three(): return two()", ""): ("two()", "three()"),
    ("", "self.o = helper"): ("self.o()",),
    ("", "self.o = {'a': helper}"): ("self.o['a']()",),
    ("", "self.o = [helper], (helper,)"): ("self.o[0][0]()",),
    ("", "self.o = types.SimpleNamespace(f=helper)"): ("self.o.f()",),
    ("", "self.fc.register_forward_hook(lambda m, x, y: y * helper())"): ("1.0",),
    ("fs, o = {'a': helper, 'b': [helper]}, Empty()\no.f = helper", ""): ("fs['a']()", "fs['b'][0]()", "o.f()"),
    ("users.f = helper", ""): ("users.f()",),
    (METHOD + "\no, bound = O(), O().go", ""): ("o.go()", "o()", "(o + 1)", "bound()", "O().go()"),
    (METHOD, "self.o = O()"): ("self.o.go()", "self.o()", "(self.o + 1)", "getattr(self.o, 'go')()"),
    (METHOD + "\nclass P(O): pass", "self.o = P(); self.o.f = self.o.go"): ("self.o.go()", "self.o.f()"),
    (FUNCTIONS, "self.o = O()"): ("self.o.f()", "self.o.fs['a']()"),
    ("class O:\n    v = property(lambda self: helper())", "self.o = O()"): ("self.o.v",),
    ("class O:\n    def __init__(self): self.v = helper()", ""): ("O().v",),
    ("class O:\n    go = staticmethod(helper)\n    run = classmethod(lambda c: helper())", ""): ("O.go()", "O.run()"),
    ("class O(torch.nn.Module):\n    def go(self): return helper()", "self.o = O()"): ("self.o.go()",),
    ("class O(enum.Enum):\n    A = 1\n    def go(self): return helper()", ""): ("O.A.go()",),
    ("@dataclasses.dataclass\nclass O:\n    def go(self): return helper()", "self.o = O()"): ("self.o.go()",),
    ("def call(f): return f()\np = functools.partial(call, helper)", ""): ("p()",),
    ("def make(f):\n    def g(): return f()\n    return g\np, q = make(int), make(helper)", ""): ("(1 + p()) * q()",),
    ("def p(f=helper): return f()\ndef q(*, f=helper): return f()", ""): ("p()", "q()"),
    ("@functools.cache\ndef p(): return helper", ""): ("p()()",),
    ("p = functools.cache(functools.partial(lambda f: f, helper))", ""): ("p()()",),
    ("def gen():\n    yield helper()", ""): ("next(gen())",),
    ("ctx = contextlib.contextmanager(lambda: (helper() for _ in [0]))", ""): ("ctx().__enter__()",),
}


@pytest.mark.parametrize(("way", "call"), [(way, call) for way, calls in WAYS.items() for call in calls])
def test_a_call_is_refused_after_a_change_of_what_a_helper_reads(way, call):
    text = FILE.format(definitions=way[0], attributes=way[1], call=call)
    module = types.ModuleType(f"reached_{abs(hash(text))}")
    file = f"<{module.__name__}>.py"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    exec(compile(text, file, "exec"), vars(sys.modules.setdefault(module.__name__, module)))
    model = module.Net()
    tr = st.trace(model, (X,))
    assert tr(X).equal(model(X))
    module.SCALE = 5.0
    with pytest.raises(st.errors.StateMismatchError):
        tr(X)
