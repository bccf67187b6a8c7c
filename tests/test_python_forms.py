"""The forms that Python gives a forward, one statement each: right, or refused by an error of ours.

Classes and their methods, generators, errors that are caught, copies and new modules, subclasses of tensors, results.
"""

import pytest
from forwards import HEAD, assert_right_or_refused

MODEL = """
import weakref

LOG = []

class Base(nn.Module):
    K = 2.0

    def __init__(s):
        super().__init__()
        torch.manual_seed(3)
        s.lin = nn.Linear(4, 4)
        s.register_buffer("buf", torch.ones(4))
        s.n = 0
        s.items = [1.0, 2.0]
        s.w = nn.Parameter(torch.ones(4))
        s.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        s.d = nn.ModuleDict({"a": nn.ReLU(), "b": nn.Tanh()})
        s.ps = nn.ParameterList([nn.Parameter(torch.ones(4) * i) for i in range(2)])
        s.drop = nn.Dropout(0.5)
        s.bn = nn.BatchNorm1d(4)

    def helper(s, x):
        return s.lin(x)

    @property
    def prop(s):
        return s.w * 2

    @property
    def twice(s):
        return s.n * 2

    @staticmethod
    def stat(x):
        return x * 3

    @classmethod
    def clsm(cls, x):
        return x * cls.K

    def forward(s, x):
        return x * 5

    @functools.cached_property
    def cp(s):
        return s.w * 4

    @functools.lru_cache(maxsize=None)
    def cached(s, k):
        return s.w * k

    def gen(s, x):
        for l in s.layers:
            x = l(x)
            yield x

class M(Base):
    K = 3.0

    def helper(s, x):
        return super().helper(x) + 1

make = M

class Wrapped:
    def __init__(s, t):
        s.t = t

    def __add__(s, o):
        return Wrapped(s.t + (o.t if isinstance(o, Wrapped) else o))

    def __matmul__(s, o):
        return Wrapped(s.t @ o.t)

    def __getitem__(s, i):
        return s.t[i]

    def __len__(s):
        return len(s.t)

    def __iter__(s):
        return iter(s.t)

    def __call__(s, x):
        return s.t * x

    def __enter__(s):
        return s

    def __exit__(s, *a):
        pass

    def __eq__(s, o):
        return s is o

    def __hash__(s):
        return 1

    def __getattr__(s, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(s.t, name)

@dataclasses.dataclass
class DC:
    a: torch.Tensor
    k: int = 2

    def run(s):
        return s.a * s.k

class Sub(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out

class Sub2(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        return out * 2 if func is torch.Tensor.sin else out

class Arr:
    def __init__(s, t):
        s.t = t

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        un = lambda a: a.t if isinstance(a, Arr) else a
        return func(*[un(a) for a in args], **(kwargs or {})) * 2

class Fn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 3

NT = collections.namedtuple("NT", "a b")

class Color(enum.Enum):
    R = 1
    G = 2

def rec(x, n):
    return x if n == 0 else rec(x + 1, n - 1)

def kw(x, *args, scale=2.0, **more):
    return x * scale + sum(args) + sum(more.values())

def deco(f):
    @functools.wraps(f)
    def inner(*a, **k):
        return f(*a, **k) * 2

    return inner

@functools.singledispatch
def sd(x):
    return 0

@sd.register
def _(x: torch.Tensor):
    return x * 7

@sd.register
def _(x: int):
    return x
"""

STATEMENTS = r"""
y = sum(l(x) for l in s.layers)
y = [l(x) for l in s.layers][-1]
y = list(s.gen(x))[-1]
g = s.gen(x); y = next(g); y2 = next(g); y = y + y2
*_, y = s.gen(x)
y = functools.reduce(lambda a, l: l(a), s.layers, x)
y = torch.stack(list(map(lambda l: l(x), s.layers)))
y = torch.stack([t for t in x]).sum(0)
y = sum(x)
y = sum(t for t in x if t.dim() == 1)
y = [a+b for a, b in zip(x, x[1:])][0]
y = {k: m(x) for k, m in s.d.items()}['b']
y = [*x.unbind()][0] + (lambda *a: a[1])(*x)
y = torch.cat([*itertools.chain(x, x[:1])])
y = max(x[0].unbind(), key=lambda t: t.dim())
y = sorted([x, x*2], key=lambda t: t.shape)[0]
a, (b, *c) = x[0], x; y = a + b + c[0]
y = x; y += 1
y = x.clone(); y += 1
y = x; y = y + 1 if y.shape[0] > 2 else y
y = x if len(x) > 5 else x*2
y = x*2 if x is not None and x.numel() else x
y = x.new_zeros(3) if not isinstance(x, torch.Tensor) else x*3
y = (z0 := x*2) + z0
try: y = x @ x
except RuntimeError: y = x @ x.T
try: y = s.lin(torch.ones(7))
except RuntimeError as e: y = x*2
try: y = s.lin(x.double())
except Exception as e: y = x*2 if 'dtype' in str(e) else x*3
try: y = x.view(5, 5)
except RuntimeError as e: y = x*len(e.args)
try: y = x[10]
except IndexError: y = x*4
try: y = x.reshape(-1)[100]
except (IndexError, RuntimeError) as e: y = x*(2 if type(e) is IndexError else 3)
try: y = s.missing
except AttributeError: y = x*5
try: y = x.nope
except AttributeError: y = x*6
try: y = x.item()
except RuntimeError: y = x*7
try: y = x + 'a'
except TypeError: y = x*8
try: y = s.d['zz'](x)
except KeyError: y = x*9
try: y = torch.cat([x, x.sum()])
except RuntimeError: y = x*10
try: y = x.numpy()
except Exception as e: y = x*(2 if isinstance(e, RuntimeError) else 3)
try: y = s.w.numpy()
except Exception as e: y = x*(2 if isinstance(e, RuntimeError) else 3)
try: y = bool(x); y = x
except RuntimeError: y = x*11
try: x.add_(x.double()); y=x
except RuntimeError: y = x*12
try: s.w.add_(1); y = x
except RuntimeError: y = x*13
try: assert x.dim() == 3, 'no'; y=x
except AssertionError: y = x*14
try: raise StopIteration
except StopIteration: y = x*15
finally: y = y+1
try: y = s.buf.copy_(torch.ones(9))
except RuntimeError: y = x*16
s.buf.add_(1); y = x+s.buf; s.buf.sub_(1)
try: s.buf.add_(1); raise ValueError
except ValueError: y = s.buf*x
try: s.buf.add_(1); s.buf.add_(torch.ones(9))
except RuntimeError: y = s.buf*x
y = s.helper(x)
y = super(M, s).helper(x)
y = super(M, s).forward(x)
y = Base.forward(s, x)
y = Base.helper(s, x)
y = nn.Linear.forward(s.lin, x)
y = type(s).K*x
y = s.K*x
y = s.prop*x
y = s.twice*x + x
y = s.stat(x)
y = s.clsm(x)
y = s.cp*x
y = s.cached(2.)*x
y = getattr(s, 'helper')(x)
y = s.__class__.helper(s, x)
y = M.helper.__get__(s)(x)
y = types.MethodType(lambda self, x: x*2, s)(x)
y = (Wrapped(x)+Wrapped(x)).t
y = (Wrapped(x)@Wrapped(x.T)).t
y = Wrapped(x)[0]
y = x*len(Wrapped(x))
y = sum(Wrapped(x))
y = Wrapped(x)(x)
y = Wrapped(x).sum()
y = Wrapped(x).T
with Wrapped(x) as w0: y = w0.t*2
y = {Wrapped(x): 1} and x*2
y = DC(x).run()
y = dataclasses.replace(DC(x), k=3).run()
y = DC(x*2)
y = dataclasses.asdict(DC(x))['a']
y = NT(x, x*2)
y = NT(x, x*2)._replace(a=x*3)
y = NT(x, x*2)._asdict()
y = x*Color.G.value
y = {Color.R: x, Color.G: x*2}[Color.G]
y = {Color.R: x, Color.G: x*2}
y = x.as_subclass(Sub)*2
y = x.as_subclass(Sub).sin().as_subclass(torch.Tensor)
y = x.as_subclass(Sub2).sin()
y = x.as_subclass(Sub2).sin().as_subclass(torch.Tensor)
y = torch.add(x, Arr(x))
y = torch.sin(Arr(x))
y = x + Arr(x)
y = Fn.apply(x)
y = Fn.apply(s.lin(x))
y = rec(x, 3)
y = kw(x, 1, 2, scale=3., a=4)
y = kw(x, *s.items, **{'scale': 2.})
y = deco(lambda x: x+1)(x)
y = functools.partial(torch.add, x)(x)
y = functools.partial(kw, scale=4.)(x)
y = sd(x)
y = x*sd(3)
y = operator.add(x, x)
y = operator.itemgetter(0)(x)
y = operator.attrgetter('T')(x)
y = operator.methodcaller('sum', 0)(x)
y = x.__add__(1)
y = x.__getitem__(0)
y = torch.Tensor.add(x, 1)
y = getattr(torch, 'sin')(x)
y = torch.ops.aten.sin(x)
y = torch.ops.aten.sin.default(x)
y = torch._C._nn.gelu(x)
y = torch.Tensor.__mul__(x, 2)
y = eval('x*2')
exec('q0 = x*3'); y = locals().get('q0', x)
y = (lambda: (yield))() and x*2
y = copy.copy(s.lin)(x)
y = copy.deepcopy(s.lin)(x)
y = copy.deepcopy(s.items)[1]*x
y = copy.copy(x)*2
y = copy.deepcopy(x)*2
y = copy.deepcopy(s.buf)*x
m0 = copy.deepcopy(s.lin); m0.weight.data.mul_(2); y = m0(x)
y = nn.Linear(4,4)(x)
y = nn.ReLU()(x)
y = nn.Sequential(nn.ReLU(), s.lin)(x)
y = nn.LayerNorm(4)(x)
y = nn.Dropout(.5)(x)
y = nn.Dropout(.5).eval()(x)
y = nn.BatchNorm1d(4)(x)
y = nn.Parameter(x.detach())*2
y = nn.Parameter(torch.ones(4))*x
y = nn.Parameter(torch.ones(4), requires_grad=False)*x
y = nn.Buffer(torch.ones(4))*x
y = x*(2 if s.lin.weight is s.layers[0].weight else 3)
y = x*(2 if s.layers[0] is s.layers[0] else 3)
y = x*(2 if s.w in set(s.parameters()) else 3)
y = x*(2 if any(p is s.w for p in s.parameters()) else 3)
y = x*len({id(p) for p in s.parameters()})
y = x*([p is s.w for p in s.parameters()].index(True)+1)
y = s._buffers['buf']*x
y = s._parameters['w']*x
y = s._modules['lin'](x)
s._buffers['buf'] = s.buf+1; y = s.buf*x
s._buffers['buf'].add_(1); y = s.buf*x
s.register_buffer('new', x.detach()*2); y = s.new*x
s.register_buffer('tmp', None); y = x*2
del s.buf; s.buf = torch.zeros(4); y = s.buf+x
s.buf = s.buf*2; y = s.buf+x
s.extra = x*2; y = s.extra+1
s.n += 1; y = x*s.n
s.items.append(3.); y = x*len(s.items)
s.items[0] += 1; y = x*s.items[0]
setattr(s, 'late', 5.); y = x*s.late
y = x*getattr(s, 'late2', 5.)
y = vars(s)['n']+x
y = s.__dict__['n']+x
y = s.ps[0]+x
y = sum(s.ps)+x
y = [p*x for p in s.ps][1]
y = s.d['a'](x)
y = nn.ModuleList(s.layers)[1](x)
y = nn.ModuleList([*s.layers, nn.ReLU()])[-1](x)
y = nn.Sequential(*s.layers)(x)
y = nn.Sequential(*list(s.children())[:1])(x)
y = s.layers[1:][0](x)
y = s.layers[-1](x)
y = [m for m in s.modules() if isinstance(m, nn.Tanh)][0](x)
y = dict(s.named_modules())['layers.1'](x)
y = s.get_submodule('layers.2')(x)
y = s.lin.weight @ x[0]
y = s.lin.weight[0]*x
s.lin.weight.data[0] = 1.; y = s.lin(x)
s.lin.bias.data.zero_(); y = s.lin(x)
with torch.no_grad(): s.w.add_(1)
y = s.w*x
s.w.data = s.w.data*2; y = s.w*x
s.w = nn.Parameter(torch.zeros(4)); y = s.w*x
s.lin = nn.Linear(4,4); y = s.lin(x)
s.eval(); y = s.drop(x)
s.train(False); y = s.bn(x); s.train()
s.requires_grad_(False); y = s.lin(x)
s.zero_grad(); y = s.lin(x)
s.half(); y = x; s.float()
s.apply(lambda m: None); y = s.lin(x)
s.lin.register_forward_hook(lambda m, a, o: o*2); y = s.lin(x)
h0 = s.lin.register_forward_hook(lambda m, a, o: o*2); y = s.lin(x); h0.remove()
y = torch.cond(x.sum() > 0, lambda t: t*2, lambda t: t*3, (x,))
y = torch.cond(torch.tensor(True), lambda t: t*2, lambda t: t*3, (x,))
y = torch.cond(x.shape[0] > 2, lambda t: t*2, lambda t: t*3, (x,))
y = torch.where(x > 0, x, -x)
y = torch.vmap(lambda t: t*2)(x)
y = torch.vmap(s.lin)(x)
y = torch.func.functional_call(s.lin, {'weight': s.w.expand(4,4)}, (x,))
y = torch.func.grad(lambda t: (t*t).sum())(x)
y = torch.while_loop(lambda t: t.sum() < 3, lambda t: (t.abs()+1,), (x,))[0]
y = torch.jit.annotate(torch.Tensor, x)*2
y = torch.jit.is_scripting()*x
y = torch.jit.is_tracing()*x
y = torch.onnx.is_in_onnx_export()*x
y = x*torch.get_num_threads()
y = x*(2 if torch.cuda.is_available() else 3)
y = x*int(torch.__version__[0])
y = x*(2 if hasattr(x, 'numpy') else 3)
y = x*(2 if callable(x) else 3)
y = x*hash('a').bit_length()*0+x
y = x*len(repr(x.shape))
y = x*len(f'{x.shape}')
y = x*len(str(x.dtype))
y = x*len(str(x.device))
y = x*(id(x)==id(x))
y = x*(x is x)
y = x*(x in [x])
y = x*[x, x*2].index(x)
y = x*{x: 2}[x]
y = x*len({x, x})
y = weakref.ref(x)()*2
y = collections.OrderedDict(a=x, b=x*2)
y = collections.defaultdict(list); y['a'].append(x)
y = collections.deque([x, x*2])
y = collections.Counter({'a': 2})['a']*x
y = {'a': [x, (x*2, None)], 'b': 3}
y = (x for _ in range(2))
y = iter([x])
y = zip([x],[x])
y = map(torch.sin, [x])
y = lambda: x
y = None
y = x.shape
y = x.dtype
y = x.device
y = [x.shape[0], x.numel(), x.dim()]
y = float(x.numel())
y = 'text'
y = range(3)
y = slice(0, 2)
y = frozenset([1])
y = {x.shape[0]}
y = np.ones(3)
y = torch.from_numpy(np.ones(4))*x
y = torch.tensor(np.ones(4))*x
y = torch.as_tensor([1.,2.,3.,4.])*x
y = x*np.float64(2.)
y = x*np.float32(2.)
y = np.float64(2.)*x
y = x*np.ones(4)
y = np.sin(x.detach())
y = x*math.sqrt(x.shape[0])
y = x*math.prod(x.shape)
y = x*float('inf')
y = x.apply_(lambda v: v*2) if not x.requires_grad else x
y = x.detach().map_(x, lambda a, b: a+b)
y = x.to(torch.device('cpu'))
y = x.type(torch.float64)
y = x.type_as(s.buf)
y = x.to(x)
y = x.float().double().float()
y = x.untyped_storage().nbytes()*x
y = torch.Size([x.shape[0]])
y = x.size()[1:]
y = x[..., None][:, 0].squeeze(-1)
y = x[x > 0].sum()
y = x[x.argmax(0)]
y = x.nonzero().sum()
y = torch.unique(x.round()).sum()
x.resize_(12) if not x.requires_grad else None; y = x*1
x.t_(); y = x*1
x.unsqueeze_(0); y = x*1
x.data = x.data*2; y = x*1
x.grad = None; y = x*1
x.requires_grad_(); y = x*1
x.foo = 3.; y = x*x.foo
x.retain_grad() if x.requires_grad else None; y = x*1
x.zero_(); y = x*1
del x; x = s.buf.expand(3, 4); y = x*1
global G0; G0 = 3.; y = x*G0
LOG.append(1); y = x*len(LOG)
print(end=''); y = x
warnings.warn('w'); y = x
import math as mm; y = x*mm.pi
from torch.nn import functional as FF; y = FF.relu(x)
def inner(a, b=2.): return a*b
y = inner(x)
class Inner(nn.Module):
    def forward(self, x): return x*2
y = Inner()(x)
async def co(): return x*2
y = x
assert x.shape[1] == 4; y = x
assert x.sum() == x.sum(); y = x
torch._check(x.shape[0] == 3); y = x
torch._assert(x.shape[0] == 3, 'a'); y = x
y = x
for i in range(x.shape[0]): y = y + i
y = x
while y.dim() < 4: y = y[None]
y = x
for i, r in enumerate(x): y = y + r*i
y = x
for l in s.layers[::-1]: y = l(y)
y = x
for k, m in s.d.items(): y = m(y)
y = x
for p in s.parameters(): y = y + p.sum()
y = x
for n0, b in s.named_buffers(): y = y + b.sum() if 'buf' in n0 else y
match x.dim():
    case 2: y = x*2
    case _: y = x*3
match x.shape:
    case (3, n0): y = x*n0
    case _: y = x
match x:
    case torch.Tensor(): y = x*2
    case _: y = x
match {'a': x}:
    case {'a': t0}: y = t0*4
"""
"""Parted by the ends of lines, but for lines that belong to the one before."""


def statements():
    """Each statement, with the lines that belong to it."""
    found = []
    for line in STATEMENTS.strip("\n").split("\n"):
        last = found[-1] if found else ""
        is_open = last.startswith(("def ", "class ", "async ", "with torch.no_grad(): s.w")) and "\ny = " not in last
        loops = last == "y = x" and line.startswith(("for ", "while "))
        if line.startswith((" ", "except", "finally", "else")) or is_open or loops:
            found[-1] += f"\n{line}"
        else:
            found.append(line)
    return found


@pytest.mark.sample(9)
@pytest.mark.parametrize(("number", "statement"), [*enumerate(statements())], ids=lambda x: str(x)[:40])
@pytest.mark.filterwarnings("ignore")
def test_a_form_of_python_is_right_or_refused(number, statement):
    forward = "def forward(s, x):\n" + "".join(f"    {line}\n" for line in statement.split("\n")) + "    return y\n"
    assert_right_or_refused(f"{HEAD}{MODEL}\n{forward}\nM.forward = forward\n", grad=number % 2 == 0)
