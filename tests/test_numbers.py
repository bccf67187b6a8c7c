"""What Python does with a number that depends on a tensor or a dynamic size: as in eager, or refused.

n = t.item()       ->  isinstance(n, int), round(n, -1), divmod(n, 2), {2: 1.0}.get(n), f"{n}"
"""

import decimal
import fractions
import functools
import linecache
import logging
import math
import numbers
import operator
import re
import sys
import types
import warnings

import pytest
import torch

import scopetrace as st

EXPRESSIONS = """
round(n)  round(n,1)  round(n,0)  round(n,-1)  math.trunc(n)  math.floor(n)  math.ceil(n)  int(n)  float(n)  bool(n)
abs(n)  -n  +n  ~n  divmod(n,2)[1]  divmod(7,n+1)[0]  n//2  n%2  7%(abs(n)+1)  7//(abs(n)+1)  n/2  2/(abs(n)+1)  n*2.5
1-n  n**2  abs(n)**0.5  2**n  pow(int(abs(n)),2,5)  n<<1  n>>1  n&1  n|1  n^1  n>0  n>=1  n<2  n<=1  n==1  n==True
n!=0  n==1.0  math.sqrt(abs(n))  math.exp(n)  math.log(abs(n)+1)  math.sin(n)  math.atan2(n,2)  math.pow(n,2)
math.hypot(n,2)  math.isnan(n)  math.isclose(n,2)  math.fmod(n,2)  math.copysign(n,-1)  math.factorial(int(abs(n)))
math.prod([n,2])  max(n,1)  min(n,1)  max([n,1,2])  sum([n,n])  any([n])  all([n,True])  (n and 2.0)  (n or 3.0)
(not n)*1.0  torch.sym_max(n,1)  torch.sym_int(n)  torch.sym_float(n)  torch.sym_ite(n>1,n,1)  n.conjugate()  n.real
n.imag  int(n).bit_length()  n.as_integer_ratio()[0]  float(n).is_integer()*1.0  int(n).numerator  complex(n).real
float(fractions.Fraction(n))  float(decimal.Decimal(n))  operator.index(int(n))  hash(n)  range(9)[int(n)]
[1.,2.,3.,4.,5.,6.][int(abs(n))]  {1:1.,2:2.,3:3.}.get(n,5.)  {True:1.,False:2.}[n>1]  {1,2}.__contains__(n)*1.0
(n in [1,2])*1.0  float(len(range(int(abs(n)))))  isinstance(n,int)*1.0  isinstance(n,float)*1.0
isinstance(n,bool)*1.0  isinstance(n,(int,float))*1.0  isinstance(n>1,bool)*1.0
isinstance(n,numbers.Integral)*1.0  isinstance(n,numbers.Real)*1.0
issubclass(n.__class__,int)*1.0  float(f'{n}')  float(str(n))  float(repr(n))  float('%s'%n)  float('%.1f'%n)
float(format(n,'.2f'))  len(f'{n}')  len(str(n))  (f'{n}'=='2')*1.0  {'2':4.}[str(n)]  {'2':4.}[f'{n}']
{'2':4.}.get(str(n),1.)  int(str(n))  torch.tensor(n)  torch.tensor([n,1])  torch.full((2,),n)  x.clone().fill_(n)
torch.arange(int(abs(n))).sum()  x.clamp(max=n)  x**n  torch.linspace(0,n,3).sum()  torch.as_tensor(n)
x[:int(abs(n))].sum()  x[int(abs(n))%2]  x.roll(int(n))  x[n]  x[:n].sum()  torch.where(x>n,x,n)  x.masked_fill(x>0,n)
torch.lerp(x,x*2,n)  (x<n).sum()  x.div(n+1,rounding_mode='floor')  (n is True)*1.0
(n is not False)*1.0  (x if n is None else x*2)
"""
"""Parted by two spaces or a line's end; `n` is the number, `x` a tensor."""

TENSORS = {
    "int": torch.tensor([2, 3]),
    "float": torch.tensor([2.25, 1.75]),
    "bool": torch.tensor([True, False]),
}
PARTS = [part for line in EXPRESSIONS.splitlines() for part in line.split("  ") if part]


def function_of(number, expression):
    """`forward(x, t)` with a source that errors can show."""
    code = f"def forward(x, t):\n    n = {number}\n    return x * ({expression})\n"
    name = f"<{number} {expression}>"
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    modules = (decimal, fractions, math, numbers, operator, torch)
    found = {module.__name__: module for module in modules}
    exec(compile(code, name, "exec"), found)
    return found["forward"]


def outcome(run, *args):
    """The result, or the class of Python's error; None where it is refused."""
    try:
        return run(*args)
    except st.errors.ScopetraceError:
        return None
    except Exception as error:
        return type(error)


def same(a, b):
    """Whether they are equal; where eager raises, `b` is the class of its error, and `a` may be anything."""
    if isinstance(a, type) or isinstance(b, type):
        return isinstance(b, type)
    return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, equal_nan=True)


@functools.cache
def traced(kind, expression):
    """The trace of what a number of a tensor is used for; as `outcome`, where there is none."""
    return outcome(st.trace, function_of("t.item()", expression), (torch.tensor([1.0, -2.0]), TENSORS[kind][0]))


@pytest.mark.sample(5)
@pytest.mark.parametrize("expression", PARTS)
@pytest.mark.parametrize("kind", TENSORS)
def test_a_number_of_a_tensor_is_used_as_in_eager_or_refused(kind, expression):
    forward, x = function_of("t.item()", expression), torch.tensor([1.0, -2.0])
    given = TENSORS[kind].unbind()
    expected = [outcome(forward, x, t) for t in given]
    trace = traced(kind, expression)
    if isinstance(trace, type):
        assert isinstance(expected[0], type), trace
    elif trace is not None:
        for t, wanted in zip(given, expected, strict=True):
            found = outcome(trace, x, t)
            assert found is None or same(found, wanted), (t, wanted, found)


@pytest.mark.sample(4)
@pytest.mark.parametrize("expression", PARTS)
def test_a_dynamic_size_is_used_as_in_eager_or_refused(expression):
    forward, x = function_of("x.shape[0]", expression), torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0])
    sizes = ({0: torch.export.Dim("n", min=2, max=9)}, None)
    expected = [outcome(forward, x[:n].clone(), torch.ones(())) for n in (2, 3, 5)]
    trace = outcome(lambda: st.trace(forward, (x[:2].clone(), torch.ones(())), dynamic_shapes=sizes))
    if isinstance(trace, type):
        assert isinstance(expected[0], type), trace
    elif trace is not None:
        for n, wanted in zip((2, 3, 5), expected, strict=True):
            found = outcome(trace, x[:n].clone(), torch.ones(()))
            assert found is None or same(found, wanted), (n, wanted, found)


def test_many_of_these_are_not_refused():
    found = [traced("int", e) for e in PARTS[::5]] + [traced("float", e) for e in PARTS[4::5]]  # those traced above
    assert sum(isinstance(tr, st.Trace) for tr in found) > 0.4 * len(found)


@pytest.mark.parametrize(
    "text",
    [
        "f'{n}'",
        "str(n)",
        "repr(n)",
        "f'is {n:.2f}!'",
        "'%s' % n",
        "str(t)",
        "f'{t}'",
        "[{'a': f'{n}'}]",
        "{'k%s' % n: 1}",
    ],
)
def test_text_of_a_number_is_not_returned(text):
    forward = eval(f"lambda x, t: (lambda n: (x, {text}))(t.item())")
    with pytest.raises(st.errors.DataDependentError, match="the forward returns text of a tensor"):
        st.trace(forward, (torch.ones(2), torch.tensor(2.5)))


SHOWN = """
print(f"s{n}")  print("%s!" % n)  print(str(n), [n])  log.info("%s", n)  log.warning(f"{n:.2f}")  print(Parts(n))
warnings.warn(f's{n}')  text = f"s{n}"; print(text)  text = "a" + str(n); log.info(text)  sys.stderr.write(f"{n}")
texts = [f"s{n}", str(n)]; print(*texts)  print(", ".join(f"{m}" for m in (n, n)))
print(", ".join([str(m) for m in (n, n)]))  assert x is not None, f"s{n}"  torch._assert(x is not None, f"s{n}")
torch._check(True, lambda: f"s{n}")  print(repr(t), f"{t}")  print("{} {}".format(n, x))  print({"n": n})  print(x)
log.info("of %s", x)  x = (print(f"s{n}"), x)[1]  x = (warnings.warn(f's{n}'), x)[1]
assert x is not None, "a" + f"s{n}"  warn_once(f"s{n}")  print(f"s{n}" if x is not None else "")  print({"a": f"s{n}"})
"""
LOOKED_UP = """
TABLE[f"s{n}"]  TABLE["s%s" % n]  getattr(x, f"s{n}")  getattr(torch, "relu" + str(n))  TABLE[named(n)]
TABLE[str({"n": n})]  float(f"{n}")
int(str(n))  TABLE.get(str(n), 1.)  len(f"{n}")  ("2" == str(n))  ("2" in str(n))  (2. if str(n).endswith("2") else 1.)
"""


class Parts:
    def __init__(self, n):
        self.n = n

    def __repr__(self):
        return f"s{self.n}"


def named(n):
    """Text that its caller shows or uses."""
    text = f"s{n}"
    return text


def warn_once(text):
    if text not in SEEN:
        SEEN.add(text)


SEEN = set()


def forward_of(body):
    code = f"def forward(x, t):\n    n = t.item()\n    {body}\n    return x * n\n"
    name = f"<{body}>"
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    found = {
        "torch": torch,
        "log": logging.getLogger("test"),
        "warnings": warnings,
        "sys": sys,
        "re": re,
        "Parts": Parts,
    }
    found |= {"named": named, "warn_once": warn_once}
    found |= {
        "TABLE": {"s2": 3.0},
        "box": types.SimpleNamespace(),
        "scale_of": lambda text: 3.0 if text == "s2" else 1.0,
    }
    exec(compile(code, name, "exec"), found)
    return found["forward"]


def bodies(text):
    return [part for line in text.splitlines() for part in line.split("  ") if part]


TOLD = [
    *bodies(SHOWN),
    "box.text = f's{n}'",
    "print(named(n))",
    "texts = [f's{n}']; texts.append(str(n)); print(*texts)",
]
LOOKS = ["x = x * " + part for part in bodies(LOOKED_UP)]


@pytest.mark.parametrize("body", TOLD)
@pytest.mark.filterwarnings("ignore")
def test_text_for_people(body):
    forward = forward_of(body)
    trace = st.trace(forward, (torch.ones(2), torch.tensor(2)))
    assert torch.equal(trace(torch.ones(2), torch.tensor(3)), forward(torch.ones(2), torch.tensor(3)))


@pytest.mark.parametrize("body", LOOKS)
def test_text_that_names_something_is_refused(body):
    with pytest.raises(st.errors.DataDependentError, match=r"the forward (looks up|reads) text of a tensor"):
        st.trace(forward_of(body), (torch.ones(2), torch.tensor(2)))


def test_a_table_by_the_text_of_a_dynamic_size_is_a_cache():
    """As of einsum equations or grids: the first forward fills it, and the text of the size stands for each."""
    table = {}

    def forward(x):
        key = f"{x.shape[0]}x{x.shape[1]}"
        if key not in table:
            table[key] = "relu"
        return getattr(torch, table[key])(x) * x.shape[0]

    trace = st.trace(forward, (torch.ones(3, 2),), dynamic_shapes=({0: torch.export.Dim("n", min=2)},))
    assert table == {}
    for n in (3, 5):
        assert torch.equal(trace(torch.ones(n, 2)), torch.full((n, 2), float(n)))


def test_text_of_a_number_may_be_shown(capsys):
    def forward(x, t):
        n = t.item()
        print(f"loss {n:.3f}", n, t, f"{t:.2f}")
        return x * n

    trace = st.trace(forward, (torch.ones(2), torch.tensor(2.5)))
    assert capsys.readouterr().out.startswith("loss zuf0 zuf0")
    assert torch.equal(trace(torch.ones(2), torch.tensor(3.0)), torch.full((2,), 3.0))


def test_classes_of_numbers_are_torch_s_after_a_trace():
    names = {cls: dict(vars(cls)) for cls in (torch.SymInt, torch.SymFloat, torch.SymBool)}
    st.trace(lambda x, t: x * isinstance(t.item(), int), (torch.ones(2), torch.tensor(2)))
    assert {cls: dict(vars(cls)) for cls in names} == names


@pytest.mark.parametrize("text", ["str(x.shape)", "f'{x.shape}'", "f'of {x.shape[0]}'", "{f'{tuple(x.shape)}': 1}"])
def test_text_of_a_dynamic_size_is_not_returned(text):
    forward = eval(f"lambda x: (x, {text})")
    with pytest.raises(st.errors.DataDependentError, match="the forward returns text of a tensor"):
        st.trace(forward, (torch.ones(3, 2),), dynamic_shapes=({0: torch.export.Dim("n")},))
    assert st.trace(forward, (torch.ones(3, 2),))(torch.ones(3, 2))[1] == forward(torch.ones(3, 2))[1]


def test_the_bytes_of_a_dynamic_size():
    trace = st.trace(lambda x: x * x.nbytes, (torch.ones(3),), dynamic_shapes=({0: torch.export.Dim("n")},))
    assert torch.equal(trace(torch.ones(5)), torch.full((5,), 20.0))
