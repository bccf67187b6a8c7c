"""What a layer may hold, and how: drawn by `state_programs`, which runs this file anew for each program.

VALUES: a name -> what makes a value of a number, what tells the number, what changes it in place (or None)
HOLDERS: modules that `get` a value from somewhere, where `put` has put it
"""

import abc
import array
import collections
import contextvars
import copy
import ctypes
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import inspect
import io
import itertools
import logging
import math
import operator
import pathlib
import pickle
import queue
import random
import re
import string
import struct
import sys
import threading
import types
import typing
import uuid
import warnings
import weakref

import numpy as np
import torch
from torch import nn

# Values --------------------------------------------------------------------------------------------------------------


class Settings:
    def __init__(self, size):
        self.size = size


class Slots:
    __slots__ = ("__weakref__", "size")

    def __init__(self, size):
        self.size = size


class DictAndSlots(Slots):
    def __init__(self, size):
        super().__init__(0)
        self.other, self.size = 1, size


@dataclasses.dataclass
class Data:
    size: int
    unread: list = dataclasses.field(default_factory=list)

    @functools.cached_property
    def twice(self):
        return 2 * self.size


@dataclasses.dataclass(frozen=True)
class Frozen:
    size: int


@dataclasses.dataclass(slots=True)
class SlottedData:
    size: int


Pair = collections.namedtuple("Pair", "size other")


class Typed(typing.NamedTuple):
    size: int


class Color(enum.Enum):
    TWO, THREE = 2, 3

    def __init__(self, number):
        self.size = number


class Number(enum.IntEnum):
    TWO, THREE = 2, 3


class Flags(enum.Flag):
    ONE, TWO = 1, 2


class Two:
    size = 2


class Three:
    size = 3


class InheritsTwo(Two):
    pass


class Fixed:
    __slots__ = ()
    size = 2


class Base(abc.ABC):  # noqa: B024
    """A class of which others may be said to be subclasses."""


class WithEq:
    """Equal to all others of its class."""

    def __init__(self, size):
        self.size = size

    def __eq__(self, other):
        return True

    __hash__ = object.__hash__


class Asks:
    """What it lacks is found by its class."""

    def __init__(self, size):
        self.table = {"size": size}

    def __getattr__(self, name):
        try:
            return self.__dict__["table"][name]
        except KeyError:
            raise AttributeError(name) from None


class Given:
    """All that it is asked for comes from a method of its class."""

    def __init__(self, size):
        self._size = size

    def __getattribute__(self, name):
        return object.__getattribute__(self, "_size" if name == "size" else name)


class Called:
    def __init__(self, size):
        self.size = size

    def __call__(self):
        return self.size

    def __len__(self):
        return self.size

    def __getitem__(self, key):
        return self.size

    def __iter__(self):
        return iter([self.size])

    def __bool__(self):
        return self.size == 2


def tagged(x, size):
    x.size = size
    return x


def subclass(kind):
    return type(f"Sub{kind.__name__}", (kind,), {"__module__": __name__})


SubList, SubTuple, SubDict, SubSet = map(subclass, (list, tuple, dict, set))
SubStr, SubInt, SubFloat, SubPartial = map(subclass, (str, int, float, functools.partial))
SubDeque, SubDefault, SubLocal = map(subclass, (collections.deque, collections.defaultdict, threading.local))


class Sized(list):
    """A list of another length than it has."""

    size = 2

    def __len__(self):
        return self.size


def function(number, name="f", doc=None, default=1, closure=1, annotation=int):
    def f(x: annotation = default, *, y=default):
        return x * closure * y

    f.__name__, f.__doc__ = name, doc
    return f


def cached(number):
    return functools.lru_cache(lambda: number)


def called_cache(number):
    """A memo that was asked so often."""
    found = functools.lru_cache(abs)
    for i in range(number):
        found(i)
    return found


def dispatch(number):
    found = functools.singledispatch(lambda x: 2)
    if number == 3:
        found.register(int, lambda x: 3)
    return found


def abstract(number):
    kind = abc.ABCMeta("Abstract", (), {"__module__": __name__})
    if number == 3:
        kind.register(Settings)
    return kind


def module_of(number):
    found = types.ModuleType("held")
    found.size = number
    return found


def variable(number):
    found = contextvars.ContextVar("held")
    found.set(number)
    return found


def logger(number):
    found = logging.Logger("held")
    found.setLevel(number)
    return found


def lock(number):
    found = threading.Lock()
    if number == 3:
        found.acquire()
    return found


def event(number):
    found = threading.Event()
    if number == 3:
        found.set()
    return found


def queued(number):
    found = queue.Queue()
    found.queue.extend(range(number))
    return found


def local(number):
    return tagged(threading.local(), number)


def weak_table(number):
    found = weakref.WeakValueDictionary()
    for i in range(number):
        KEPT.append(Settings(i))
        found[i] = KEPT[-1]
    return found


KEPT = []


def weak(make):
    def made(number):
        KEPT.append(Settings(number))
        return make(KEPT[-1])

    return made


def generator(number):
    while True:
        yield number


def read_only(number):
    found = np.ones(1)
    found.flags.writeable = number == 2
    return found


def other(number):
    """The other one of the numbers."""
    return 5 - number


def of(name):
    return operator.attrgetter(name)


def set_size(x, number):
    x.size = number


def set_first(x, number):
    x[0] = number


def size(x):
    return x.size


def first(x):
    return x[0]


def call(x):
    return x()


def length_of_text(x):
    return len(str(x))


VALUES = {
    "number": (lambda n: n, lambda x: x, None),
    "float": (float, lambda x: x, None),
    "text": (lambda n: "a" * n, len, None),
    "bytes": (lambda n: b"a" * n, len, None),
    "zero": (lambda n: -0.0 if n == 3 else 0.0, lambda x: math.copysign(2, x), None),
    "bool": (lambda n: n == 3 or 1, length_of_text, None),
    "int or float": (lambda n: 1.0 if n == 3 else 1, length_of_text, None),
    "complex": (lambda n: complex(0, -0.0 if n == 3 else 0.0), lambda x: math.copysign(2, x.imag), None),
    "range": (lambda n: range(0, n + 1, 2), lambda x: x.stop, None),
    "slice": (lambda n: slice(n), lambda x: x.stop, None),
    "set": (lambda n: {0, 8} if n == 2 else {8, 0}, lambda x: next(iter(x)), lambda x, n: x.add(n)),
    "frozenset": (lambda n: frozenset((0, 8) if n == 2 else (8, 0)), lambda x: next(iter(x)), None),
    "set of True": (lambda n: {True if n == 3 else 1}, length_of_text, None),
    "dict order": (lambda n: {2: 2, 3: 3} if n == 2 else {3: 3, 2: 2}, lambda x: next(iter(x)), None),
    "dict of True": (lambda n: {True if n == 3 else 1: 1}, length_of_text, None),
    "list": (lambda n: [n], first, set_first),
    "tuple": (lambda n: (1, (n,)), lambda x: x[1][0], None),
    "tuple of zero": (lambda n: (0.0 * (5 - 2 * n),), lambda x: math.copysign(2, x[0]), None),
    "nested": (
        lambda n: {"a": [(n, Settings(n))]},
        lambda x: x["a"][0][1].size,
        lambda x, n: set_size(x["a"][0][1], n),
    ),
    "decimal": (lambda n: decimal.Decimal("1." + "0" * n), length_of_text, None),
    "fraction": (fractions.Fraction, float, None),
    "time": (lambda n: datetime.datetime(2000, 1, 1, fold=n - 2), lambda x: x.fold + 1, None),
    "zone": (
        lambda n: datetime.datetime(2000, 1, 1, n, tzinfo=datetime.timezone(datetime.timedelta(hours=n))),
        lambda x: x.hour,
        None,
    ),
    "uuid": (lambda n: uuid.UUID(int=n), int, None),
    "path": (lambda n: pathlib.PurePosixPath("a" * n), lambda x: len(x.name), None),
    "pattern": (lambda n: re.compile("a" * n), lambda x: len(x.pattern), None),
    "struct": (lambda n: struct.Struct("b" * n), of("size"), None),
    "template": (lambda n: string.Template("a" * n), lambda x: len(x.template), lambda x, n: set_template(x, n)),
    "hash": (lambda n: hashlib.md5(b"a" * n), lambda x: x.digest()[0], lambda x, n: x.update(b"b")),
    "numpy float": (lambda n: np.float64(-0.0 if n == 3 else 0.0), lambda x: math.copysign(2, x), None),
    "numpy int": (np.int64, int, None),
    "array": (lambda n: np.array([n]), lambda x: float(x[0]), set_first),
    "array of zero": (lambda n: np.array([0.0 * (5 - 2 * n)]), lambda x: math.copysign(2, x[0]), None),
    "array dtype": (lambda n: np.ones(1, np.float64 if n == 3 else np.float32), lambda x: x.itemsize, None),
    "array shape": (lambda n: np.ones((1, 6) if n == 2 else (6, 1)), lambda x: len(x), None),
    "array flags": (read_only, lambda x: 2 + x.flags.writeable, lambda x, n: x.setflags(write=n == 2)),
    "array of objects": (lambda n: np.array([Settings(n)]), lambda x: x[0].size, lambda x, n: set_size(x[0], n)),
    "typed array": (lambda n: array.array("i", [n]), first, set_first),
    "bytearray": (lambda n: bytearray([n]), first, set_first),
    "memoryview": (lambda n: memoryview(bytearray([n])), first, set_first),
    "C": (ctypes.c_int, of("value"), lambda x, n: setattr(x, "value", n)),
    "item getter": (lambda n: operator.itemgetter(n), lambda x: x(range(9)), None),
    "attribute getter": (lambda n: operator.attrgetter("size" if n == 2 else "other"), lambda x: x(Pair(2, 3)), None),
    "method caller": (lambda n: operator.methodcaller("__add__", n), lambda x: x(1), None),
    "class": (lambda n: Two if n == 2 else Three, size, set_size),
    "class that inherits": (lambda n: InheritsTwo, size, lambda x, n: set_size(Two, n)),
    "class and its text": (lambda n: type("T" * n, (), {"__doc__": "d" * n}), lambda x: len(x.__name__), None),
    "instance of class": (lambda n: Fixed(), size, lambda x, n: set_size(Fixed, n)),
    "module": (module_of, size, set_size),
    "alias": (lambda n: dict[int, int] if n == 3 else list[int], lambda x: len(x.__args__), None),
    "function attribute": (lambda n: tagged(function(n), n), size, set_size),
    "function name": (lambda n: function(n, name="f" * n), lambda x: len(x.__name__), None),
    "function doc": (lambda n: function(n, doc="f" * n), lambda x: len(x.__doc__), None),
    "function default": (lambda n: function(n, default=n), call, lambda x, n: setattr(x, "__defaults__", (n,))),
    "function closure": (
        lambda n: function(n, closure=n),
        call,
        lambda x, n: setattr(x.__closure__[-1], "cell_contents", n),
    ),
    "function object": (lambda n: function(n, default=Settings(n)), lambda x: x.__defaults__[0].size, None),
    "annotation": (
        lambda n: function(n, annotation=Two if n == 2 else Three),
        lambda x: x.__annotations__["x"].size,
        None,
    ),
    "signature": (lambda n: inspect.signature(function(n, default=n)), lambda x: x.parameters["x"].default, None),
    "lambda": (lambda n: lambda: n, call, None),
    "partial": (lambda n: functools.partial(max, 0, n), call, None),
    "partial of object": (lambda n: functools.partial(size, Settings(n)), call, lambda x, n: set_size(x.args[0], n)),
    "partial attribute": (lambda n: tagged(functools.partial(max, 0, 1), n), size, set_size),
    "sub partial": (lambda n: tagged(SubPartial(max, 0, 1), n), size, set_size),
    "method": (lambda n: Called(n).__len__, call, lambda x, n: set_size(x.__self__, n)),
    "method of list": (lambda n: [n].__getitem__, lambda x: x(0), lambda x, n: set_first(x.__self__, n)),
    "callable": (Called, call, set_size),
    "sized": (Called, len, set_size),
    "indexed": (Called, first, set_size),
    "iterable": (Called, lambda x: max(x), set_size),
    "truth": (Called, lambda x: 2 if x else 3, set_size),
    "sub list": (lambda n: tagged(SubList([1]), n), size, set_size),
    "sub tuple": (lambda n: tagged(SubTuple([1]), n), size, set_size),
    "sub dict": (lambda n: tagged(SubDict(a=1), n), size, set_size),
    "sub set": (lambda n: tagged(SubSet([1]), n), size, set_size),
    "sub str": (lambda n: tagged(SubStr("a"), n), size, set_size),
    "sub int": (lambda n: tagged(SubInt(1), n), size, set_size),
    "sub float": (lambda n: tagged(SubFloat(1), n), size, set_size),
    "sub deque": (lambda n: tagged(SubDeque([1]), n), size, set_size),
    "sub default": (lambda n: tagged(SubDefault(), n), size, set_size),
    "sub local": (lambda n: tagged(SubLocal(), n), size, set_size),
    "list of other length": (lambda n: Sized(), len, lambda x, n: set_size(x, n)),
    "items of sub dict": (lambda n: SubDict(a=n), lambda x: x["a"], lambda x, n: x.update(a=n)),
    "user dict": (lambda n: collections.UserDict(a=n), lambda x: x["a"], lambda x, n: x.update(a=n)),
    "user list": (lambda n: collections.UserList([n]), first, set_first),
    "user string": (lambda n: collections.UserString("a" * n), len, None),
    "deque": (lambda n: collections.deque([n]), first, set_first),
    "deque length": (lambda n: collections.deque([1], maxlen=n), of("maxlen"), None),
    "default factory": (lambda n: collections.defaultdict(Two if n == 2 else Three), lambda x: x[0].size, None),
    "default dict": (lambda n: collections.defaultdict(list, a=n), lambda x: x["a"], lambda x, n: x.update(a=n)),
    "ordered dict": (
        lambda n: collections.OrderedDict([(n, n), (5 - n, 5 - n)]),
        lambda x: next(iter(x)),
        lambda x, n: x.move_to_end(n, last=False),
    ),
    "counter": (lambda n: collections.Counter("a" * n), lambda x: x["a"], lambda x, n: x.update("a")),
    "chain map": (lambda n: collections.ChainMap({}, {"a": n}), lambda x: x["a"], lambda x, n: x.maps[1].update(a=n)),
    "mapping proxy": (lambda n: types.MappingProxyType({"a": n}), lambda x: x["a"], None),
    "namespace": (lambda n: types.SimpleNamespace(size=n), size, set_size),
    "settings": (Settings, size, set_size),
    "slots": (Slots, size, set_size),
    "dict and slots": (DictAndSlots, size, set_size),
    "data": (Data, size, set_size),
    "cached property": (Data, of("twice"), set_size),
    "frozen data": (Frozen, size, lambda x, n: object.__setattr__(x, "size", n)),
    "slotted data": (SlottedData, size, set_size),
    "data as dict": (Data, lambda x: dataclasses.asdict(x)["size"], set_size),
    "replaced data": (Data, lambda x: dataclasses.replace(x).size, set_size),
    "copied": (Settings, lambda x: copy.copy(x).size, set_size),
    "deep copied": (Settings, lambda x: copy.deepcopy(x).size, set_size),
    "pickled": (lambda n: {"a": n}, lambda x: pickle.loads(pickle.dumps(x))["a"], lambda x, n: x.update(a=n)),
    "vars": (Settings, lambda x: vars(x)["size"], set_size),
    "dir": (
        lambda n: tagged(Settings(1), 1) if n == 2 else tagged2(Settings(1)),
        lambda x: 2 + ("late" in dir(x)),
        None,
    ),
    "formatted": (Settings, lambda x: len("a" * int("{0.size}".format(x))), set_size),  # noqa: UP030, UP032
    "members": (Settings, lambda x: dict(inspect.getmembers(x))["size"], set_size),
    "pair": (lambda n: Pair(n, 1), size, None),
    "typed": (Typed, size, None),
    "enum": (Color, of("value"), None),
    "enum attribute": (Color, size, set_size),
    "enum by name": (Color, lambda x: len(x.name), None),
    "number enum": (Number, lambda x: x + 1, None),
    "flags": (Flags, of("value"), None),
    "equal": (WithEq, size, set_size),
    "asks": (Asks, size, lambda x, n: x.table.update(size=n)),
    "given": (Given, size, lambda x, n: setattr(x, "_size", n)),
    "reference": (weak(weakref.ref), lambda x: x().size, lambda x, n: set_size(x(), n)),
    "proxy": (weak(weakref.proxy), size, set_size),
    "weak table": (weak_table, len, lambda x, n: x.pop(0, None)),
    "iterator": (lambda n: iter([n] * 30), next, None),
    "count": (itertools.count, next, None),
    "cycle": (lambda n: itertools.cycle([n, 1]), next, None),
    "generator": (generator, next, None),
    "generator of globals": (lambda n: (x for x in [n] * 30), next, None),
    "zip": (lambda n: zip([n] * 30), lambda x: next(x)[0], None),
    "context variable": (variable, lambda x: x.get(), lambda x, n: x.set(n)),
    "local": (local, size, set_size),
    "exception": (lambda n: ValueError(n), lambda x: x.args[0], lambda x, n: setattr(x, "args", (n,))),
    "device": (
        lambda n: torch.device("cpu", 0) if n == 3 else torch.device("cpu"),
        lambda x: 2 if x.index is None else 3,
        None,
    ),
    "dtype": (lambda n: torch.float64 if n == 3 else torch.float32, of("itemsize"), None),
    "torch size": (lambda n: torch.Size([n]), first, None),
    "tensor": (lambda n: torch.full((), float(n)), lambda x: x, lambda x, n: x.fill_(n)),
    "tensor item": (lambda n: torch.full((), float(n)), lambda x: x.item(), lambda x, n: x.fill_(n)),
    "tensor list": (lambda n: torch.full((1,), float(n)), lambda x: x.tolist()[0], lambda x, n: x.fill_(n)),
    "tensor tag": (lambda n: tagged(torch.ones(1), n), size, set_size),
    "tensor grad": (
        lambda n: torch.ones(1, requires_grad=n == 3),
        lambda x: 2 + x.requires_grad,
        lambda x, n: x.requires_grad_(n == 3),
    ),
    "tensor strides": (lambda n: torch.ones(2, 2).t() if n == 3 else torch.ones(2, 2), lambda x: x.stride()[0], None),
    "torch generator": (
        lambda n: torch.Generator().manual_seed(n),
        lambda x: x.initial_seed(),
        lambda x, n: x.manual_seed(n),
    ),
    "random": (random.Random, lambda x: x.random(), lambda x, n: x.seed(n)),
    "numpy random": (np.random.RandomState, lambda x: x.rand(), lambda x, n: x.seed(n)),
    "lock": (lock, lambda x: 2 + x.locked(), lambda x, n: x.acquire(blocking=False)),
    "event": (event, lambda x: 2 + x.is_set(), lambda x, n: x.set()),
    "queue": (queued, lambda x: x.qsize(), lambda x, n: x.put(1)),
    "text file": (lambda n: io.StringIO("a" * n), lambda x: len(x.getvalue()), lambda x, n: x.write("b" * 9)),
    "logger": (logger, lambda x: x.level, lambda x, n: x.setLevel(n)),
    "memo": (cached, call, None),
    "memo counts": (called_cache, lambda x: x.cache_info().misses, lambda x, n: x(n + 7)),
    "dispatch": (dispatch, lambda x: x(1), lambda x, n: x.register(int, lambda _: n)),
    "abstract": (abstract, lambda x: 2 + issubclass(Settings, x), lambda x, n: x.register(Settings)),
    "layer": (lambda n: nn.LayerNorm(4, eps=n), of("eps"), lambda x, n: setattr(x, "eps", n)),
    "layer in a list": (lambda n: [nn.Dropout(n / 4)], lambda x: x[0].p, lambda x, n: setattr(x[0], "p", n / 4)),
    "training": (lambda n: nn.Dropout().train(n == 3), lambda x: 2 + x.training, lambda x, n: x.train(n == 3)),
    "hooked": (lambda n: hooked(nn.ReLU(), n), lambda x: x(torch.ones(1)), lambda x, n: hooked(x, n)),
    "layers": (lambda n: nn.ModuleList([nn.ReLU()] * n), len, lambda x, n: x.append(nn.ReLU())),
    "layers by name": (lambda n: nn.ModuleDict({"a" * n: nn.ReLU()}), lambda x: len(next(iter(x))), None),
    "parameters": (lambda n: nn.ParameterList([torch.ones(1)] * n), len, lambda x, n: x.append(torch.ones(1))),
    "parameter names": (
        lambda n: nn.ParameterDict({"a" * n: torch.ones(1)}),
        lambda x: len(next(iter(x.keys()))),
        None,
    ),
    "tied": (lambda n: tied(n), lambda x: 2 + (x[0].weight is x[1].weight), None),
    "state dict": (lambda n: nn.BatchNorm1d(n), lambda x: x.state_dict()["weight"].shape[0], None),
    "buffers": (
        lambda n: with_buffers(n),
        lambda x: len(list(x.buffers())),
        lambda x, n: x.register_buffer(f"late{n}", None),
    ),
}


def set_template(x, number):
    x.template = "a" * number


def tagged2(x):
    x.late = 1
    return x


def hooked(layer, number):
    if number == 3:
        layer.register_forward_hook(lambda module, args, out: out * 3)
    return layer


def tied(number):
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    if number == 3:
        layers[1].weight = layers[0].weight
    return layers


def with_buffers(number):
    layer = nn.Module()
    for i in range(number):
        layer.register_buffer(f"b{i}", torch.ones(1))
    return layer


# Where a layer has a value from --------------------------------------------------------------------------------------


class Holder(nn.Module):
    """Multiplies by the number of a value, if it `reads`; and puts another value, if it `writes`."""

    def __init__(self, kind, number, reads=True, writes=""):
        super().__init__()
        self.make, self.tell, self.mutate = VALUES[kind]
        self.reads, self.writes, self.times = reads, writes, 1
        self.key = f"k{number}"
        self.start(number)

    def start(self, number):
        """Hold a value at first."""
        self.put(self.make(number))

    def change(self, number, in_place):
        """Hold another value, or change the one that there is."""
        if in_place:
            self.mutate(self.get(), number)
        else:
            self.put(self.make(number))

    def forward(self, x):
        y = x.relu()
        if self.reads:
            y = y * self.tell(self.get())
        if self.writes:
            self.change(3, self.writes == "in place")
        return y


class InAttribute(Holder):
    def put(self, value):
        self.value = value

    def get(self):
        return self.value


class InList(Holder):
    def put(self, value):
        self.values = [1, [value]]

    def get(self):
        return self.values[1][0]


class InListPlace(Holder):
    def put(self, value):
        self.__dict__.setdefault("values", [None])[0] = value

    def get(self):
        return self.values[0]


class InTable(Holder):
    def put(self, value):
        self.__dict__.setdefault("table", {})["a"] = value

    def get(self):
        return self.table["a"]


class InTuple(Holder):
    def put(self, value):
        self.values = (value, 1)

    def get(self):
        return self.values[0]


class InPair(Holder):
    def put(self, value):
        self.values = Pair(value, 1)

    def get(self):
        return self.values.size


class InSettings(Holder):
    def put(self, value):
        self.config = Settings(value)

    def get(self):
        return self.config.size


class InSettingsPlace(Holder):
    def put(self, value):
        if not hasattr(self, "config"):
            self.config = Settings(value)
        self.config.size = value

    def get(self):
        return self.config.size


class InSlots(Holder):
    def put(self, value):
        self.config = Slots(value)

    def get(self):
        return self.config.size


class InData(Holder):
    def put(self, value):
        self.config = Frozen(value)

    def get(self):
        return self.config.size


class InSubDict(Holder):
    def put(self, value):
        self.config = SubDict(a=value)

    def get(self):
        return self.config["a"]


class InDefaultDict(Holder):
    def put(self, value):
        self.config = collections.defaultdict(int, a=value)

    def get(self):
        return self.config["a"]


class InDeque(Holder):
    def put(self, value):
        self.config = collections.deque([value])

    def get(self):
        return self.config[0]


class InChain(Holder):
    def put(self, value):
        self.config = collections.ChainMap({}, {"a": value})

    def get(self):
        return self.config["a"]


class InProxy(Holder):
    def put(self, value):
        self.config = types.MappingProxyType({"a": value})

    def get(self):
        return self.config["a"]


class InSlotOfModule(Holder):
    __slots__ = ("slot",)

    def put(self, value):
        self.slot = value

    def get(self):
        return self.slot


class OfProperty(Holder):
    def put(self, value):
        self._value = value

    @property
    def value(self):
        return self._value

    def get(self):
        return self.value


class OfCachedProperty(Holder):
    def put(self, value):
        self._value = value

    @functools.cached_property
    def value(self):
        return self._value

    def get(self):
        return self.value


class OfGetattr(Holder):
    def put(self, value):
        self.__dict__["hidden"] = {"shown": value}

    def __getattr__(self, name):
        hidden = self.__dict__.get("hidden", {})
        return hidden[name] if name in hidden else super().__getattr__(name)

    def get(self):
        return self.shown


class OfGetattribute(Holder):
    def put(self, value):
        self.__dict__["value"] = value  # nn.Module would keep a module elsewhere

    def __getattribute__(self, name):
        return super().__getattribute__("value" if name == "shown" else name)

    def get(self):
        return self.shown


class ByName(Holder):
    def put(self, value):
        setattr(self, "value_" + self.key, value)

    def get(self):
        return getattr(self, "value_" + self.key)


class ByVars(Holder):
    def put(self, value):
        self.value = value

    def get(self):
        return vars(self)["value"]


class ByDict(Holder):
    def put(self, value):
        self.value = value

    def get(self):
        return self.__dict__["value"]


class ByItems(Holder):
    def put(self, value):
        self.value = value

    def get(self):
        return next(x for name, x in self.__dict__.items() if name.startswith("val"))


class ByGetter(Holder):
    def put(self, value):
        self.config = Settings(value)

    def get(self):
        return operator.attrgetter("config.size")(self)


class ByCopy(Holder):
    def put(self, value):
        self.config = Settings([value])

    def get(self):
        return copy.copy(self.config).size[0]


class ByCopyOfModule(Holder):
    def put(self, value):
        self.value = value

    def get(self):
        return copy.copy(self).value


class ByMatch(Holder):
    def put(self, value):
        self.config = Settings(value)

    def get(self):
        match self.config:
            case Settings(size=found):
                return found


class InClass(Holder):
    value = None

    def put(self, value):
        type(self).value = value

    def get(self):
        return self.value


class InClassOnly(Holder):
    value = None

    def put(self, value):
        InClassOnly.value = value

    def get(self):
        return type(self).value


class HasValue(nn.Module):
    value = None


class InBase(Holder, HasValue):
    def put(self, value):
        HasValue.value = value

    def get(self):
        return super().value


class InTableOfClass(Holder):
    table = {}  # noqa: RUF012

    def put(self, value):
        self.table[self.key] = value

    def get(self):
        return self.table[self.key]


class Meta(type):
    @property
    def value(cls):
        return cls.held[0]


class InMeta(Holder, metaclass=Meta):
    held = [None]  # noqa: RUF012

    def put(self, value):
        self.held[0] = value

    def get(self):
        return type(self).value


class Descriptor:
    """Has a value for each module, elsewhere."""

    def __init__(self):
        self.table = {}

    def __get__(self, owner, cls):
        return self if owner is None else self.table[owner.key]

    def __set__(self, owner, value):
        self.table[owner.key] = value


class WeakDescriptor:
    def __init__(self):
        self.table = weakref.WeakKeyDictionary()

    def __get__(self, owner, cls):
        return self if owner is None else self.table[owner]

    def __set__(self, owner, value):
        self.table[owner] = value


class InOwnDescriptor:
    """Has the value in the `__dict__` of the module, under another name."""

    def __set_name__(self, owner, name):
        self.name = f"_{name}_"

    def __get__(self, owner, cls):
        return self if owner is None else owner.__dict__[self.name]

    def __set__(self, owner, value):
        owner.__dict__[self.name] = value


class OfDescriptor(Holder):
    value = Descriptor()

    def put(self, value):
        vars(type(self))["value"].__set__(self, value)

    def get(self):
        return self.value


class OfWeakDescriptor(Holder):
    value = WeakDescriptor()

    def put(self, value):
        vars(type(self))["value"].__set__(self, value)

    def get(self):
        return self.value


class OfInOwnDescriptor(Holder):
    value = InOwnDescriptor()

    def put(self, value):
        vars(type(self))["value"].__set__(self, value)

    def get(self):
        return self.value


GLOBAL = None


class InGlobal(Holder):
    def put(self, value):
        global GLOBAL
        GLOBAL = value

    def get(self):
        return GLOBAL


TABLE: dict = {}


class InGlobalTable(Holder):
    def put(self, value):
        TABLE[self.key] = value

    def get(self):
        return TABLE[self.key]


BY_ID: dict = {}


class ById(Holder):
    def put(self, value):
        BY_ID[id(self)] = value

    def get(self):
        return BY_ID[id(self)]


BY_MODULE: dict = {}


class ByModule(Holder):
    def put(self, value):
        BY_MODULE[self] = value

    def get(self):
        return BY_MODULE[self]


WEAK: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class ByWeakTable(Holder):
    def put(self, value):
        WEAK[self] = value

    def get(self):
        return WEAK[self]


SETTINGS = Settings(None)


class InGlobalSettings(Holder):
    def put(self, value):
        SETTINGS.size = value

    def get(self):
        return SETTINGS.size


PLACE = types.ModuleType("place")
PLACE.value = None


class InPythonModule(Holder):
    def put(self, value):
        PLACE.value = value

    def get(self):
        return PLACE.value


def counted():
    return counted.value


counted.value = None


class InFunction(Holder):
    def put(self, value):
        counted.value = value

    def get(self):
        return counted()


def closure_of(value):
    def get():
        return value

    def put(new):
        nonlocal value
        value = new

    return get, put


SHARED = closure_of(None)


class InClosure(Holder):
    def put(self, value):
        if "pair" not in self.__dict__:
            self.pair = closure_of(value)
        self.pair[1](value)

    def get(self):
        return self.pair[0]()


class InSharedClosure(Holder):
    def put(self, value):
        SHARED[1](value)

    def get(self):
        return SHARED[0]()


class InDefault(Holder):
    def put(self, value):
        self._held()[0] = value

    def _held(self, held=[None]):  # noqa: B006
        return held

    def get(self):
        return self._held()[0]


class InNamedDefault(Holder):
    def put(self, value):
        type(self)._held.__kwdefaults__["held"] = value

    def _held(self, *, held=None):
        return held

    def get(self):
        return self._held()


class InPartial(Holder):
    def put(self, value):
        self.make_it = functools.partial(lambda x, y: y, 1, value)

    def get(self):
        return self.make_it()


class InMethod(Holder):
    def put(self, value):
        self.make_it = Called(value).__call__

    def get(self):
        return self.make_it()


class InOwnMethod(Holder):
    """Has a method of its own in place of that of its class."""

    def put(self, value):
        self.found = types.MethodType(lambda self: value, self)

    def get(self):
        return self.found()


class InMemo(Holder):
    def put(self, value):
        self.value = value

    @functools.lru_cache  # noqa: B019
    def found(self):
        return self.value

    def get(self):
        return self.found()


class InMemoByKey(Holder):
    def put(self, value):
        type(self).held[self.key] = value

    held = {}  # noqa: RUF012

    @staticmethod
    @functools.cache
    def found(key):
        return InMemoByKey.held[key]

    def get(self):
        return self.found(self.key)


VARIABLE: contextvars.ContextVar = contextvars.ContextVar("VARIABLE")


class InVariable(Holder):
    def put(self, value):
        VARIABLE.set(value)

    def get(self):
        return VARIABLE.get()


LOCAL = threading.local()


class InLocal(Holder):
    def put(self, value):
        LOCAL.value = value

    def get(self):
        return LOCAL.value


class InOwnLocal(Holder):
    def put(self, value):
        self.local = tagged(threading.local(), value)

    def get(self):
        return self.local.size


class InWeakReference(Holder):
    def put(self, value):
        KEPT.append(Settings(value))
        self.reference = weakref.ref(KEPT[-1])

    def get(self):
        return self.reference().size


class InTag(Holder):
    def put(self, value):
        if "weight" not in self._parameters:
            self.weight = nn.Parameter(torch.ones(1))
        self.weight.held = value

    def get(self):
        return self.weight.held


class InChild(Holder):
    def put(self, value):
        self.child = nn.Identity()
        self.child.held = value

    def get(self):
        return self.child.held


class InChildByKey(Holder):
    def put(self, value):
        self.children_ = nn.ModuleDict({"k2": nn.Identity(), "k3": nn.Identity()})
        self.children_[self.key].held = value

    def get(self):
        return self.children_[self.key].held


class InModulesOfDict(Holder):
    """Finds its child by the table of submodules."""

    def put(self, value):
        self.child = nn.Identity()
        self.child.held = value

    def get(self):
        return next(self.children()).held


class InNetwork(Holder):
    """Has a value by the model around it."""

    def put(self, value):
        self.__dict__.setdefault("around", [None])
        self.pending = value
        if self.around[0] is not None:
            setattr(self.around[0], self.slot, value)

    def get(self):
        return self.pending if self.around[0] is None else getattr(self.around[0], self.slot)


class InGenerator(Holder):
    """Asks a generator that it keeps."""

    def put(self, value):
        self.source = itertools.repeat(value)

    def get(self):
        return next(self.source)


class ByContext(Holder):
    """Has the value by a context manager that it enters."""

    def put(self, value):
        self.manager = Manager(value)

    def get(self):
        with self.manager as found:
            return found


class Manager:
    def __init__(self, value):
        self.value = value

    def __enter__(self):
        return self.value

    def __exit__(self, *args):
        return False


class ByComprehension(Holder):
    def put(self, value):
        self.values = [value, value]

    def get(self):
        return [x for x in self.values if x is not None][0]  # noqa: RUF015


class ByLoop(Holder):
    def put(self, value):
        self.config = {"a": 1, "b": value}

    def get(self):
        for name, value in self.config.items():
            if name == "b":
                found = value
        return found


class ByUnpacking(Holder):
    def put(self, value):
        self.config = {"value": value}

    def get(self):
        return self.take(**self.config)

    def take(self, value):
        return value


class ByCall(Holder):
    """Gives the value to another module."""

    def put(self, value):
        self.value = value
        if "inner" not in self._modules:
            self.inner = Takes()

    def get(self):
        return self.inner(self.value)


class Takes(nn.Module):
    def forward(self, value):
        return value


class ByHook(Holder):
    """Its part gets the value in a hook."""

    def put(self, value):
        self.inner = Takes()
        self.inner.register_forward_hook(lambda module, args, out: value)

    def get(self):
        return self.inner(None)


class ByLateHook(Holder):
    """Hangs a hook on its part for one call."""

    def put(self, value):
        self.value, self.inner = value, Takes()

    def get(self):
        handle = self.inner.register_forward_hook(lambda module, args, out: self.value)
        try:
            return self.inner(None)
        finally:
            handle.remove()


# What Python or torch keeps outside of objects ------------------------------------------------------------------------


class OfProcess(Holder):
    """Holds a number by a setting of the process."""

    def start(self, number):
        """As the base's."""

    def change(self, number, in_place):
        self.put(number)

    def forward(self, x):
        y = x.relu()
        if self.reads:
            y = y * self.get()
        if self.writes:
            self.put(3)
        return y


LOG = logging.getLogger("state_programs")


class LogLevel(OfProcess):
    def put(self, number):
        LOG.setLevel(number)

    def get(self):
        return LOG.level


class LogOfRoot(OfProcess):
    def put(self, number):
        logging.disable(number)

    def get(self):
        return logging.root.manager.disable


class Filters(OfProcess):
    def put(self, number):
        warnings.simplefilter("ignore", type(f"W{number}", (Warning,), {}))

    def get(self):
        return len(warnings.filters)


class DefaultType(OfProcess):
    def put(self, number):
        torch.set_default_dtype(torch.float64 if number == 3 else torch.float32)

    def get(self):
        return torch.get_default_dtype().itemsize


class Precision(OfProcess):
    def put(self, number):
        decimal.getcontext().prec = number

    def get(self):
        return decimal.getcontext().prec


class PrecisionOfDivision(OfProcess):
    def put(self, number):
        decimal.getcontext().prec = number

    def get(self):
        return float(decimal.Decimal(1) / decimal.Decimal(3))


class Recursion(OfProcess):
    def put(self, number):
        sys.setrecursionlimit(1000 + number)

    def get(self):
        return sys.getrecursionlimit() - 998


class MatmulPrecision(OfProcess):
    def put(self, number):
        torch.set_float32_matmul_precision("high" if number == 3 else "highest")

    def get(self):
        return len(torch.get_float32_matmul_precision())


class Randomness(OfProcess):
    def put(self, number):
        random.seed(number)

    def get(self):
        return random.random()


class RandomState(OfProcess):
    def put(self, number):
        random.seed(number)

    def get(self):
        return random.getstate()[1][5] % 7


class NumpyRandomness(OfProcess):
    def put(self, number):
        np.random.seed(number)

    def get(self):
        return np.random.rand()


SWITCH = functools.singledispatch(lambda x: 2)


class Dispatch(OfProcess):
    def put(self, number):
        SWITCH.register(int, lambda x: number)

    def get(self):
        return SWITCH(1)


class Registry(OfProcess):
    def put(self, number):
        Base.register(Settings)

    def get(self):
        return 2 + issubclass(Settings, Base)


class RegistryOfInstance(OfProcess):
    def put(self, number):
        Base.register(Settings)

    def get(self):
        return 2 + isinstance(SETTINGS, Base)


@functools.lru_cache
def memo(n):
    return n


class MemoCounts(OfProcess):
    def put(self, number):
        memo(number)

    def get(self):
        return 2 + memo.cache_info().currsize


class Subclasses(OfProcess):
    def put(self, number):
        KEPT.append(type(f"S{number}", (Two,), {}))

    def get(self):
        return len(Two.__subclasses__())


class Locked(OfProcess):
    def put(self, number):
        HELD.acquire(blocking=False)

    def get(self):
        return 2 + HELD.locked()


HELD = threading.Lock()
NUMBERS = itertools.count(2)


class Counts(OfProcess):
    def put(self, number):
        next(NUMBERS)

    def get(self):
        return next(NUMBERS)


class CountsByClass(OfProcess):
    calls = 2

    def put(self, number):
        type(self).calls += 1

    def get(self):
        return self.calls


class ClassText(OfProcess):
    def put(self, number):
        type(self).__doc__ = "d" * number

    def get(self):
        return len(type(self).__doc__ or "dd")


class Replaces(OfProcess):
    """Puts another function in the place of one of its class."""

    def put(self, number):
        type(self).found = lambda self: number

    def found(self):
        return 2

    def get(self):
        return self.found()


def replaced():
    return 2


class ReplacesGlobal(OfProcess):
    def put(self, number):
        globals()["replaced"] = lambda: number

    def get(self):
        return replaced()


def found():
    return 2


class ReplacesCode(OfProcess):
    def put(self, number):
        found.__code__ = (lambda: 3).__code__

    def get(self):
        return found()


HOLDERS = {
    kind.__name__: kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Holder) and kind not in (Holder, OfProcess)
}
