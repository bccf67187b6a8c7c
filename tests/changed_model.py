"""A model with all that `test_changed_attributes` asks of it, in place of QUESTION. `s` is the module in `forward`."""

import collections
import copy  # noqa: F401
import dataclasses
import datetime
import enum
import fractions
import functools
import math  # noqa: F401
import operator
import pathlib
import threading
import weakref

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F  # noqa: F401


class Obj:
    def __init__(self, v):
        self.v = v


class Sl:
    __slots__ = ("v",)

    def __init__(self):
        self.v = 2.0


class En(enum.Enum):
    A = 1.0
    B = 2.0


@dataclasses.dataclass
class DC:
    f: float = 2.0


NT = collections.namedtuple("NT", "f")
GLOB = 2.0
GDICT = {"k": 2.0}
GLIST = [2.0, 3.0]
G = Obj(2.0)


def deff(v=[2.0]):  # noqa: B006
    return v[0]


class M(nn.Module):
    CONST = 2.0

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.register_buffer("buf", torch.ones(3))
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.0)
        self.bn = nn.BatchNorm1d(3)
        self.act = nn.ReLU()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.dct = nn.ModuleDict({"p": nn.Linear(3, 3)})
        self.plist = nn.ParameterList([torch.ones(3)])
        self.pdict = nn.ParameterDict({"q": torch.ones(3)})
        self.num = 2.0
        self.cfg = {"k": 2.0, "j": 3.0}
        self.lst = [2.0, 3.0]
        self.tup = (2.0, 3.0)
        self.obj = Obj(2.0)
        self.obj.inner = Obj(3.0)
        self.name = "m"
        self.flag = True
        self.opt = None
        self.fn = lambda v: v * 2
        self.st_ = {1.0, 2.0}
        self.dq = collections.deque([2.0, 3.0])
        self.dd = collections.defaultdict(lambda: 4.0)
        self.cnt = collections.Counter("aab")
        self.nt = NT(2.0)
        self.dc = DC()
        self.enum = En.A
        self.arr = np.ones(3, dtype=np.float32)
        self.plain = torch.ones(3)
        self.tensors = [torch.ones(3)]
        self.tdict = {"t": torch.ones(3)}
        self.wr = weakref.ref(self)
        self.it_ = iter([1, 2, 3])
        self.dtype_ = torch.float32
        self.dev = torch.device("cpu")
        self.size_ = torch.Size([2])
        self.gen = None
        self.slots = Sl()
        self.part = functools.partial(operator.mul, 2.0)
        self.lam = lambda v: v * GLOB
        self.ev = threading.Event()
        self.lock = threading.Lock()
        self.path = pathlib.Path("/x/a")
        self.dt = datetime.date(2020, 1, 1)
        self.frac = fractions.Fraction(1, 2)
        self.bytes_ = b"ab"
        self.rng = range(2, 5)
        self.sl = slice(2, 3)
        self.cplx = 2 + 1j
        self.single = functools.singledispatch(lambda v: v * 2)
        self.memo = functools.lru_cache(lambda v: v * 2.0)

    @property
    def prop(self):
        return self.num * 2

    @functools.cached_property
    def cached(self):
        return self.num * 3

    @staticmethod
    def static(v):
        return v * GLOB

    @classmethod
    def clsm(cls):
        return cls.CONST

    def default(self, v=3.0):
        return v

    def default2(self):
        return deff()

    def clos(self):
        k = self.num

        def inner():
            return k * 2

        return inner()

    def method(self, v):
        return v * self.num

    def meth2(self, v):
        return self.method(v) + GDICT["k"]

    def forward(s, x):
        return x * (QUESTION)  # noqa: F821
