"""What a forward asks of its module, of objects and globals: after a change, a call is as in eager or refused.

    if len(self.layers) > 2: ...       # and then model.layers.append(...)

Each question is asked by a model of its own, which is changed between the trace and the call in many ways.
"""

import functools
import linecache
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import scopetrace as st
from scopetrace.errors import StateMismatchError

QUESTIONS = """
float(s.training)  float(s.a.training)  float(s.drop.training)  len(list(s.parameters()))
sum(p.numel() for p in s.parameters())  sum(p.sum() for p in s.parameters())
sum(p.requires_grad for p in s.parameters())  len(dict(s.named_parameters()))
dict(s.named_parameters())['a.weight'].sum()  len(s.state_dict())  s.state_dict()['a.weight'].sum()
sum(v.sum() for v in s.state_dict().values())  len(list(s.buffers()))  dict(s.named_buffers())['buf'].sum()
s.buf.sum()  s._buffers['buf'].sum()  s._parameters['w'].sum()  s._modules['a'].weight.sum()
s.get_parameter('w').sum()  s.get_buffer('buf').sum()  s.get_submodule('a').weight.sum()  getattr(s,'w').sum()
getattr(s,'n'+'um')  hasattr(s,'num')  hasattr(s,'late')  getattr(s,'late',5.)  s.num  s.num+s.cfg['k']  s.cfg['k']
s.cfg.get('zz',3.)  len(s.cfg)  'zz' in s.cfg  sum(s.cfg.values())  s.lst[0]  len(s.lst)  sum(s.lst)  s.lst[-1]
s.tup[1]  s.obj.v  s.obj.inner.v  getattr(s.obj,'late',2.)  s.name=='m'  len(s.name)  s.flag  (1. if s.flag else 2.)
(1. if s.opt is None else 2.)  s.fn(2.)  s.act(x).sum()  s.a(x).sum()  s.drop(x).sum()  s.bn(x).sum()
len(list(s.children()))  len(list(s.modules()))  len(dict(s.named_modules()))
[n for n,_ in s.named_children()].index('a')  isinstance(s.a,nn.Linear)  isinstance(s.act,nn.ReLU)
type(s.a).__name__=='Linear'  type(s.act) is nn.ReLU  type(s).__name__=='M'  s.__class__.__name__=='M'
s.a.in_features  s.a.out_features  s.a.weight.shape[0]  s.a.bias is None  s.a.bias is not None
(s.a.weight.sum() if s.a.bias is None else s.a.bias.sum())  s.a.weight.requires_grad  s.a.weight.dtype==torch.float32
next(s.parameters()).dtype==torch.float32  next(s.parameters()).device.type=='cpu'  next(iter(s.parameters())).sum()
s.a.weight.is_leaf  s.a.weight.grad is None  (s.a.weight.grad.sum() if s.a.weight.grad is not None else 2.)
s.a.weight._version  s.a.weight.data.sum()  s.a.weight.detach().sum()  s.a is s.b  s.a==s.b  s.a in list(s.children())
len(s.layers)  s.layers[0].weight.sum()  s.layers[-1].weight.sum()  sum(l.weight.sum() for l in s.layers)
sum(l.weight.sum() for l in reversed(s.layers))  s.layers[:1][0].weight.sum()  [l(x).sum() for l in s.layers][-1]
nn.Sequential(*s.layers)(x).sum()  len(s.dct)  'p' in s.dct  sum(m.weight.sum() for m in s.dct.values())
list(s.dct.keys())[0]=='p'  s.dct['p'].weight.sum()  s.plist[0].sum()  sum(p.sum() for p in s.plist)  len(s.plist)
s.pdict['q'].sum()  nn.utils.parameters_to_vector(s.parameters()).sum()
torch.cat([p.flatten() for p in s.parameters()]).sum()
torch.func.functional_call(s.a,dict(s.a.named_parameters()),x).sum()  F.linear(x,s.a.weight,s.a.bias).sum()
s.a.forward(x).sum()  nn.Linear.forward(s.a,x).sum()  s.a.__call__(x).sum()  len(s.a._forward_hooks)
len(s.a._forward_pre_hooks)  s.extra_repr()==''  len(s.__dict__)>5  'num' in s.__dict__
s.__dict__['num']  vars(s)['num']  s.prop  s.cached  s.static(2.)  s.clsm()  type(s).CONST  s.CONST  GLOB  GDICT['k']
GLIST[0]  G.v  len(GLIST)  s.default()  s.default2()  s.clos()  s.part(1.)  s.lam(1.)  s.method(1.)  s.meth2(1.)
math.sqrt(s.num)  s.bn.running_mean.sum()  s.bn.num_batches_tracked.item()  s.bn.momentum  s.bn.eps  s.drop.p
copy.copy(s.cfg)['k']  copy.deepcopy(s.cfg)['k']  dict(s.cfg)['k']  {**s.cfg}['k']  [*s.lst][0]  sorted(s.lst)[0]
max(s.lst)  any(s.lst)  tuple(s.lst)[0]  list(map(float,s.lst))[0]  list(zip(s.lst,s.tup))[0][1]
next(iter(s.cfg.values()))  next(iter(s.lst))  list(enumerate(s.lst))[1][1]  functools.reduce(operator.add,s.lst)
1. in s.st_  s.dq[0]  s.cnt['a']  s.nt.f  s.dc.f  s.enum.value  s.arr.sum()  float(s.arr[0])
torch.from_numpy(s.arr).sum()  torch.tensor(s.lst).sum()  s.plain.sum()  s.tensors[0].sum()  s.tdict['t'].sum()
s.dtype_==torch.float32  s.dev.type=='cpu'  s.size_[0]  s.gen is None  s.slots.v  s.single(3.)  s.memo(3)
s.path.name=='a'  s.dt.year  len(s.bytes_)  s.rng.start  s.sl.start
(1. if s._buffers.get('nb') is None else 2.)
s.a._parameters.keys()=={'weight','bias'}  s.a.weight is s.b.weight
len(s._non_persistent_buffers_set)  s.buf is s.bn.running_mean
"""
"""Parted by two spaces or a line's end; `s` is the module."""

MODEL = (Path(__file__).parent / "changed_model.py").read_text()

CHANGES = {
    "nothing": "pass",
    "eval": "m.eval()",
    "train": "m.train()",
    "a.eval": "m.a.eval()",
    "num": "m.num=5.",
    "cfg": "m.cfg['k']=5.",
    "cfgnew": "m.cfg['zz']=7.",
    "cfgrebind": "m.cfg={'k':5.}",
    "lst0": "m.lst[0]=5.",
    "lstapp": "m.lst.append(9.)",
    "lstrebind": "m.lst=[8.]",
    "tup": "m.tup=(5.,6.)",
    "obj": "m.obj.v=5.",
    "objinner": "m.obj.inner.v=5.",
    "objlate": "m.obj.late=5.",
    "name": "m.name='mm'",
    "flag": "m.flag=False",
    "opt": "m.opt=1",
    "fn": "m.fn=lambda v: v*5",
    "act": "m.act=nn.GELU()",
    "aswap": "m.a=nn.Linear(3,3)",
    "anobias": "m.a.bias=None",
    "wdata": "m.w.data.add_(1)",
    "winpl": "torch.no_grad().__enter__(); m.w.add_(1); m.a.weight.mul_(2); torch.set_grad_enabled(True)",
    "wset": "m.w=nn.Parameter(torch.ones(3)*4)",
    "awset": "m.a.weight=nn.Parameter(torch.ones(3,3)*4)",
    "wfreeze": "m.a.weight.requires_grad_(False)",
    "grad": "m.a.weight.grad=torch.ones(3,3)",
    "double": "m.double()",
    "buf": "m.buf.add_(1)",
    "bufset": "m.buf=torch.ones(3)*7",
    "reg": "m.register_buffer('nb',torch.ones(2))",
    "regp": "m.register_parameter('np_',nn.Parameter(torch.ones(2)))",
    "regnp": "m.register_buffer('nb',None,persistent=False)",
    "tiem": "m.a=m.b",
    "tiew": "m.a.weight=m.b.weight",
    "tiebuf": "m.buf=m.bn.running_mean",
    "layersapp": "m.layers.append(nn.Linear(3,3))",
    "layersset": "m.layers[0]=nn.Linear(3,3)",
    "layersw": "m.layers[1].weight.data.mul_(3)",
    "dctadd": "m.dct['r']=nn.Linear(3,3)",
    "plistset": "m.plist[0]=nn.Parameter(torch.ones(3)*5)",
    "hook": "m.a.register_forward_hook(lambda mod,a,o:o*2)",
    "prehook": "m.a.register_forward_pre_hook(lambda mod,a:(a[0]*2,))",
    "late": "m.late=6.",
    "const": "M.CONST=6.",
    "iconst": "m.CONST=6.",
    "glob": "G_['GLOB']=6.",
    "gdict": "G_['GDICT']['k']=6.",
    "glist": "G_['GLIST'][0]=6.",
    "glistapp": "G_['GLIST'].append(1.)",
    "gobj": "G_['G'].v=6.",
    "deff": "G_['deff'].__defaults__[0][0]=6.",
    "mdef": "M.default.__defaults__=(6.,)",
    "meth": "M.method=lambda s,v: v*9",
    "fwda": "m.a.forward=lambda x: x*9",
    "bnmom": "m.bn.momentum=.5",
    "bneps": "m.bn.eps=.5",
    "dropp": "m.drop.p=0.5",
    "st": "m.st_.add(9.)",
    "dq": "m.dq.appendleft(9.)",
    "dd": "m.dd['zz']=9.",
    "cnt": "m.cnt['a']=9",
    "nt": "m.nt=NT(9.)",
    "dc": "m.dc.f=9.",
    "en": "m.enum=En.B",
    "arr": "m.arr[0]=9.",
    "plain": "m.plain.add_(1)",
    "plainset": "m.plain=torch.ones(3)*9",
    "tens": "m.tensors[0]=torch.ones(3)*9",
    "tensapp": "m.tensors.append(torch.ones(3))",
    "tdict": "m.tdict['t'].add_(1)",
    "dtype": "m.dtype_=torch.float64",
    "size": "m.size_=torch.Size([5])",
    "slots": "m.slots.v=9.",
    "part": "m.part=functools.partial(operator.mul,9.)",
    "path": "m.path=pathlib.Path('/x/b')",
    "delnum": "del m.cfg['j']",
    "outf": "m.a.out_features=9",
    "instcls": "m.__class__=type('M2',(M,),{})",
    "cached": "m.num=5.; m.__dict__.pop('cached',None)",
    "bnrun": "m.bn.running_mean.add_(1)",
}
"""What is done to the model `m`, by name; `G_` are the globals of its file."""

EVERY = [pytest.param(20, id="some"), pytest.param(5, id="more", marks=pytest.mark.slow)]
"""Each question is asked with one in so many of the changes, which are others for the next question."""


@functools.lru_cache(1)
def compiled(question):
    """The code of a file that has the model."""
    code = MODEL.replace("QUESTION)", f"{question})")
    name = f"<{question}>"
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    return compile(code, name, "exec")


def made(question):
    """The globals of a file that has the model, and `m`, one of them."""
    found = {"__name__": "changed_model"}
    exec(compiled(question), found)
    torch.manual_seed(0)
    return found | {"G_": found, "m": found["M"]()}


def outcome(run, *args):
    """The result, or the class of Python's error; None where it is refused."""
    torch.manual_seed(1)
    try:
        return run(*args)
    except st.errors.ScopetraceError:
        return None
    except Exception as error:
        return type(error)


ASKED = [q for line in QUESTIONS.splitlines() for q in line.split("  ") if q]


@pytest.mark.sample(10)
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize(("number", "question"), [*enumerate(ASKED)], ids=ASKED)
@pytest.mark.filterwarnings("ignore")
def test_after_a_change_a_call_is_right_or_refused(number, question, every, monkeypatch):
    monkeypatch.setitem(sys.modules, "changed_model", types.ModuleType("changed_model"))  # for dataclasses
    for name, change in [*CHANGES.items()][number % every :: every]:
        ours, eager = made(question), made(question)
        trace = outcome(st.trace, ours["m"], (torch.ones(2, 3),))
        if trace is None:
            return
        exec(change, ours)
        exec(change, eager)
        dtype = eager["m"].w.dtype
        wanted, found = (outcome(run, torch.ones(2, 3, dtype=dtype)) for run in (eager["m"], trace))
        if isinstance(wanted, torch.Tensor) and found is not None:
            assert isinstance(found, torch.Tensor), (name, found)
            assert found.requires_grad == wanted.requires_grad, name
            torch.testing.assert_close(found.detach(), wanted.detach(), msg=name)


class Local(threading.local):
    """Has a `__dict__` for each thread."""


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.local = Local()
        self.local.scale = 2

    def forward(self, x):
        return x * self.local.scale


class SetsScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Scaled(), Scaled()

    def forward(self, x):
        x = self.first(x)
        self.second.local.scale = 3
        x = self.second(x)
        self.second.local.scale = 2
        return x


def test_attributes_of_a_subclass_of_a_thread_local():
    model, x = SetsScale(), torch.ones(2)
    tr = st.trace(model, (x,))
    assert torch.equal(tr(x), model(x))
    model.first.local.scale = 5
    with pytest.raises(StateMismatchError, match=r"first\.local\.scale.*2 when traced and 5 now"):
        tr(x)
