"""Random models of repeated blocks that differ in one thing, for `st.trace(reuse=True)`, and how two tapes differ.

    seed -> a Net: some layers of one class, each of the same parts -> in one layer, something is another
    two tapes -> ops, values, calls, scopes, constants, reads and effects as text -> the lines that differ

    python tests/reuse_programs.py --draw 1000 --seed 70000

A part is one way by which a call may do something else than one before: attributes, globals, closures, hooks, state.
"""

import argparse
import collections
import contextlib
import contextvars
import copy
import dataclasses
import enum
import functools
import itertools
import os
import random
import re
import sys
import types
import typing
import warnings
import weakref

import numpy
import torch
from torch import nn

import scopetrace as st
from scopetrace._compat.symbols import Symbolic, to_expr
from scopetrace.containers.structure import map_structure
from scopetrace.ir.scopes import walk_frames
from scopetrace.ir.tape import BodyTape, ProgramTape, Value, map_argument
from scopetrace.session import record

FACTOR = 2.0
HISTORY = []
REGISTRY = {}
COUNTS = {"calls": 0}
MODE = contextvars.ContextVar("MODE", default=1.0)
TABLE = torch.ones(4)


class Part(nn.Module):
    """What all parts have: a number, which is another one in the odd layer, and the index of the layer."""

    def __init__(self, number, index):
        super().__init__()
        self.number, self.index = number, index
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))


class Reads(Part):
    def forward(self, x):
        return x * self.number


class DoesNotRead(Part):
    def forward(self, x):
        return torch.relu(x) + self.weight


class ReadsUnlessNone(Part):
    def forward(self, x):
        return x * getattr(self, "other", 3) if self.index is None else x + getattr(self, "missing", 1)


class OfClass(Part):
    factor = 2

    def forward(self, x):
        return x * self.factor * type(self).factor


class OfGlobal(Part):
    def forward(self, x):
        return x * FACTOR


class OfTable(Part):
    def forward(self, x):
        return x * TABLE


class OfClosure(Part):
    def __init__(self, number, index):
        super().__init__(number, index)
        self.act = lambda x: x * number

    def forward(self, x):
        return self.act(x)


class OfPartial(Part):
    def __init__(self, number, index):
        super().__init__(number, index)
        self.act = functools.partial(torch.mul, other=number)
        self.method = self.scaled

    def scaled(self, x):
        return x * self.number

    def forward(self, x):
        return self.method(self.act(x))


class OfDefault(Part):
    def forward(self, x, seen=[]):  # noqa: B006
        seen.append(1)
        if len(seen) > 3:
            seen.clear()
        return x * len(seen)


class OfFixedDefault(Part):
    def forward(self, x, by=(1, 2), *, to=[3]):  # noqa: B006
        return x * by[1] + to[0]


class OfBufferData(Part):
    def __init__(self, number, index):
        super().__init__(number, index)
        self.register_buffer("steps", torch.tensor(number))

    def forward(self, x):
        for _ in range(int(self.steps)):
            x = x + 1
        return x


class Branches(Part):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x


class BranchesOnShape(Part):
    def forward(self, x):
        return x.reshape(-1) if x.dim() == self.number else x + x.shape[-1]


class Tied(Part):
    def __init__(self, number, index):
        super().__init__(number, index)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        if number != 2:
            self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x))


class SharesMemory(Part):
    def __init__(self, number, index):
        super().__init__(number, index)
        base = torch.zeros(8)
        self.register_buffer("low", base[:4])
        self.register_buffer("high", base[4:] if number == 2 else base.clone()[4:])

    def forward(self, x):
        self.low.add_(1)
        return x + self.high + self.low


class Remembers(Part):
    def forward(self, x):
        before, self.last = getattr(self, "last", None), x
        return x if before is None else x + before


class Counts(Part):
    def forward(self, x):
        self.number += 1
        return x * self.number


class CountsForAll(Part):
    def forward(self, x):
        COUNTS["calls"] += 1
        return x * COUNTS["calls"]


class CountsInClass(Part):
    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return x * type(self).calls


class CountsInTensor(Part):
    def forward(self, x):
        self.mean.add_(1)
        return x + self.mean


class BindsBuffer(Part):
    def forward(self, x):
        self.mean = self.mean * 0.9 + x.mean(0) * 0.1
        return x - self.mean


class ForATime(Part):
    def forward(self, x):
        self.number, before = self.number + 1, self.number
        y = x * self.number
        self.number = before
        return y


class InHistory(Part):
    def forward(self, x):
        HISTORY.append(x)
        return x + HISTORY[0] * len(HISTORY)


class Drops(Part):
    def __init__(self, number, index):
        super().__init__(number, index)
        self.drop = nn.Dropout(0.5 if number == 1 else 0.25)

    def forward(self, x):
        return self.drop(x) * self.training


class Normalizes(Part):
    def __init__(self, number, index):
        super().__init__(number, index)
        self.norm = nn.BatchNorm1d(4, momentum=None if number == 2 else 0.1)

    def forward(self, x):
        return self.norm(x)


class LayerNorms(Part):
    def __init__(self, number, index):
        super().__init__(number, index)
        self.norms = nn.Sequential(nn.LayerNorm(4, eps=number * 1e-5), nn.Linear(4, 4, bias=number == 1))

    def forward(self, x):
        return self.norms(x)


class HasHook(Part):
    def __init__(self, number, index):
        super().__init__(number, index)
        self.inner = nn.Sequential(nn.ReLU(), nn.Tanh())
        if number == 2:
            self.inner.register_forward_hook(lambda m, a, y: y * 2)

    def forward(self, x):
        return self.inner(x)


class OfGetattr(Part):
    def __init__(self, number, index):
        super().__init__(number, index)
        self.__dict__["table"] = {"gain": number}

    def __getattr__(self, name):
        table = self.__dict__.get("table", {})
        return table[name] if name in table else super().__getattr__(name)

    def forward(self, x):
        return x * self.gain + self.weight


class OfProperty(Part):
    @property
    def gain(self):
        return self.number + 1

    @functools.cached_property
    def shift(self):
        return self.number * 2

    def forward(self, x):
        return x * self.gain + (self.shift if self.index == 0 else 0)


class Slots:
    __slots__ = ("gain", "unread")

    def __init__(self, gain, unread):
        self.gain, self.unread = gain, unread


@dataclasses.dataclass(frozen=True)
class Frozen:
    gain: float
    unread: int = 0


class Settings:
    def __init__(self, gain, unread):
        self.gain, self.unread, self.inner = gain, unread, {"bias": gain, "list": [gain]}


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class OfObjects(Part):
    def __init__(self, number, index):
        super().__init__(number, index)
        self.held = [Slots(number, index), Frozen(number, index), Settings(number, index), Color(number)][index % 1 :]
        self.chosen = random.randrange(4)

    def forward(self, x):
        held = self.held[self.chosen]
        return x * (held.value if isinstance(held, Color) else held.gain)


class OfOneObject(Part):
    def __init__(self, number, index):
        super().__init__(number, index)
        self.config = Settings(number, index)

    def forward(self, x):
        return x * self.config.gain + self.config.inner["list"][0]


class OfArray(Part):
    def __init__(self, number, index):
        super().__init__(number, index)
        self.array = numpy.array([number, 2.0])

    def forward(self, x):
        return x * float(self.array[0])


class OfComputedName(Part):
    def __init__(self, number, index):
        super().__init__(number, index)
        self.gain_0, self.gain_1 = number, 7

    def forward(self, x):
        return x * getattr(self, f"gain_{self.index % 2}") + vars(self)["number"]


class Writes(Part):
    def forward(self, x):
        return x.mul_(2)


class WritesToCopy(Part):
    def forward(self, x):
        y = x.clone()
        y[:, 0] = self.number
        y.t().add_(1)
        return y


class GivesView(Part):
    def forward(self, x):
        return x.view(-1, 4)[:]


class GivesInput(Part):
    def forward(self, x):
        return x.to(torch.float32).contiguous()


class MakesTensors(Part):
    def forward(self, x):
        return x + torch.tensor([1.0, 2.0, self.number, 4.0]) + torch.arange(4) + torch.full((), self.number)


class AsksLayout(Part):
    def forward(self, x):
        return x + (1 if x.is_contiguous() else 2) * x.stride(0)


class AsksGradient(Part):
    def forward(self, x):
        return x + 1 if x.requires_grad else x + 2


class SwitchesGradient(Part):
    def forward(self, x):
        with torch.no_grad():
            y = x * 2
        return y + x * self.weight


class Casts(Part):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.number == 1):
            y = torch.nn.functional.linear(x, self.weight.expand(4, 4))
        return y.float()


class Detaches(Part):
    def forward(self, x):
        return x.detach() + x.data * self.weight


class DrawsNumber(Part):
    def forward(self, x):
        return x * random.random()


class DrawsTensor(Part):
    def forward(self, x):
        return x + torch.rand_like(x) * torch.rand(4)


class Catches(Part):
    def forward(self, x):
        try:
            return x.view(3, 5, 7)
        except RuntimeError:
            return x + 1


class Scoped(Part):
    def forward(self, x):
        with st.scope("gate"):
            return torch.sigmoid(x) * self.weight


class KnowsItself(Part):
    def forward(self, x):
        return x * REGISTRY.get(id(self), 1)


class KnowsByKey(Part):
    def forward(self, x):
        return x * REGISTRY.get(self, 1)


class KnowsOwner(Part):
    def forward(self, x):
        layers = self.__dict__["owner"][0].layers
        return x * (1 + [any(p is self for p in layer.parts) for layer in layers].index(True))


class Iterates(Part):
    shared = None

    def __init__(self, number, index):
        super().__init__(number, index)
        self.numbers = itertools.count(number)

    def forward(self, x):
        return x * next(self.numbers)


class OfContext(Part):
    def forward(self, x):
        return x * MODE.get()


@functools.cache
def remembered(n):
    return n * 2


class Remembered(Part):
    def forward(self, x):
        return x * remembered(self.number)


class SeveralResults(Part):
    def forward(self, x):
        a, b = x.chunk(2, dim=-1)
        return {"a": a, "pair": (b, [a + b, self.number])}


class Attends(Part):
    def __init__(self, number, index):
        super().__init__(number, index)
        self.attention = nn.MultiheadAttention(4, number, batch_first=True)

    def forward(self, x):
        return self.attention(x[None], x[None], x[None], need_weights=False)[0][0]


class Encodes(Part):
    def __init__(self, number, index):
        super().__init__(number, index)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x[None])[0]
        return x


class Loops(Part):
    def __init__(self, number, index):
        super().__init__(number, index)
        self.cell = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        for _ in range(self.number + 2):
            x = self.cell(x)
        return x


class CountsInClosure(Part):
    def __init__(self, number, index):
        super().__init__(number, index)
        count = 0

        def tick():
            nonlocal count
            count += number
            return count

        self.tick = tick

    def forward(self, x):
        return x * self.tick()


class OfEnvironment(Part):
    def forward(self, x):
        return x * int(os.environ.get("REUSE_GAIN", "2"))


class OfEnvironmentTable(Part):
    def forward(self, x):
        return x * sum(len(value) for name, value in os.environ.items() if name.startswith("REUSE_"))


class KnowsWeakly(Part):
    def forward(self, x):
        owner = weakref.ref(self.__dict__["owner"][0])
        self.__dict__.setdefault("ref", owner)
        return x + len(self.ref().layers)


class Decides(Part):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x * self.number, (x,))


class GivesParameter(Part):
    def forward(self, x):
        return self.weight


class TakesParameter(Part):
    def __init__(self, number, index):
        super().__init__(number, index)
        self.inner = Adds()

    def forward(self, x):
        return self.inner(x, self.weight) + self.inner(x, x) + self.inner(x, x[:])


class Adds(nn.Module):
    """Adds two tensors, one of which it may write."""

    def forward(self, x, y):
        return x + 1 if x is y else x + y


class Reruns(Part):
    def __init__(self, number, index):
        super().__init__(number, index)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


class MakesLikeIt(Part):
    def forward(self, x):
        return x + torch.zeros(4, dtype=x.dtype) + torch.ones_like(x, dtype=torch.float64).sum().to(x.dtype)


class Mask(Part):
    def forward(self, x):
        mask = torch.ones(4, 4).tril().bool()
        return x.masked_fill(~mask[:1], float("-inf")).softmax(-1) * self.number


class MakesModules(Part):
    def forward(self, x):
        return nn.Tanh()(x) * self.weight


class Peculiar(Settings):
    """Its attributes are asked for by a method of its own, which reads another one."""

    table: typing.ClassVar = {"size": "gain"}

    def __getattribute__(self, name):
        return super().__getattribute__(super().__getattribute__("table").get(name, name))


class OfPeculiar(Part):
    def __init__(self, number, index):
        super().__init__(number, index)
        self.config = Peculiar(number, index)

    def forward(self, x):
        return x * self.config.size


class Numbered(Part):
    names: typing.ClassVar = {}

    def forward(self, x):
        return x * self.names.setdefault(self.number, len(self.names) + 1)


PARTS = [kind for kind in globals().values() if isinstance(kind, type) and issubclass(kind, Part) and kind is not Part]


def flat(x):
    """One tensor of what a part gives."""
    if isinstance(x, dict):
        (a, (b, (c, n))) = x["a"], x["pair"]
        return torch.cat([a + c, b * n], -1)
    return x.reshape(-1, 4)


class Block(nn.Module):
    """A layer."""

    def __init__(self, kinds, number, index):
        super().__init__()
        self.layer_idx = index
        self.parts = nn.ModuleList(kind(number, index) for kind in kinds)
        self.out = nn.Linear(4, 4)

    def forward(self, x, past=None, scale=1, **options):
        for part in self.parts:
            x = flat(part(x))
        if past is not None:
            past.append(x)
            x = x + len(past)
        if "mask" in options:
            x = x * options["mask"]
        return self.out(x) * scale


Wrapped = collections.namedtuple("Wrapped", "x n")


class Tupled(Block):
    """A layer that takes and gives tuples."""

    def forward(self, pair, past=None, scale=1, **options):
        return Wrapped(super().forward(pair.x, past, scale, **options), pair.n)


class Net(nn.Module):
    """Layers in a row; `between` is what happens before the layer `odd`."""

    def __init__(self, layers, between, odd):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.between, self.odd = between, odd

    def forward(self, x, mask=None):
        past = [] if self.between == "list" else None
        for i, layer in enumerate(self.layers):
            with self.around(i, layer, x.x if isinstance(x, Wrapped) else x) as options:
                tupled = isinstance(layer, Tupled)
                call = layer.forward if self.between == "direct" and i == self.odd else layer
                x = call(Wrapped(x, 1) if tupled else x, past, **options)
                x = x.x if tupled else x
        HISTORY.clear()
        return x

    @contextlib.contextmanager
    def around(self, i, layer, past):
        """What differs in the call of one layer."""
        options = {}
        if self.between == "view":
            options["mask"] = self.layers[i].out.weight[0] if i == self.odd else torch.ones(4)
        if self.between == "argument" and i == self.odd:
            options["scale"] = 2.0
        if self.between == "mask" and i == self.odd:
            options["mask"] = torch.ones(4)
        if self.between == "alias":
            options["mask"] = past[:] if i == self.odd else past.clone()
        with AROUND.get(self.between, nothing)(layer) if i == self.odd else contextlib.nullcontext():
            yield options


def nothing(layer):
    """No change around the call of a layer."""
    return contextlib.nullcontext()


@contextlib.contextmanager
def other_global(layer):
    global FACTOR
    FACTOR += 1
    yield
    FACTOR -= 1


@contextlib.contextmanager
def other_class(layer):
    OfClass.factor += 1
    yield
    OfClass.factor -= 1


@contextlib.contextmanager
def other_attribute(layer):
    layer.parts[0].number += 1
    yield
    layer.parts[0].number -= 1


@contextlib.contextmanager
def other_context(layer):
    token = MODE.set(3.0)
    yield
    MODE.reset(token)


@contextlib.contextmanager
def other_mode(layer):
    layer.train(not layer.training)
    yield
    layer.train(not layer.training)


@contextlib.contextmanager
def other_forward(layer):
    layer.forward = types.MethodType(lambda self, x, past=None: x * 5, layer)
    yield
    del layer.forward


@contextlib.contextmanager
def other_environment(layer):
    os.environ["REUSE_GAIN"] = "3"
    yield
    del os.environ["REUSE_GAIN"]


@contextlib.contextmanager
def other_dtype(layer):
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


AROUND = {
    "environment": other_environment,
    "dtype": other_dtype,
    "scope": lambda layer: st.scope("odd"),
    "device": lambda layer: torch.device("cpu"),
    "inference": lambda layer: torch.inference_mode(),
    "global": other_global,
    "class": other_class,
    "object": other_attribute,
    "variable": other_context,
    "training": other_mode,
    "method": other_forward,
    "grad": lambda layer: torch.no_grad(),
    "cast": lambda layer: torch.autocast("cpu", dtype=torch.bfloat16),
}
BETWEEN = (
    *("", "", "", "", "global", "class", "object", "argument", "mask", "variable", "training", "method", "list"),
    *("view", "grad", "cast", "environment", "dtype", "scope", "device", "inference", "alias", "direct"),
)


def program(seed):
    """A model, and the arguments of a call."""
    random.seed(seed)
    torch.manual_seed(seed)
    REGISTRY.clear()
    HISTORY.clear()
    kinds = random.choices(PARTS, k=random.choice((1, 1, 2, 3)))
    layers, odd = random.randint(2, 5), random.choice((None, 0, 1, 2))
    block = random.choice((Block, Block, Block, Tupled))
    chosen = random.getstate()
    made = []
    for i in range(layers):
        random.setstate(chosen)  # the same choices in each layer
        made.append(block(kinds, 2 if i == odd else 1, i))
    net = Net(made, random.choice(BETWEEN), random.randrange(layers))
    for i, layer in enumerate(made):
        for part in layer.parts:
            part.__dict__["owner"] = [net]
            if isinstance(part, KnowsItself | KnowsByKey):
                REGISTRY[id(part) if isinstance(part, KnowsItself) else part] = i
    TWISTS[random.choice(list(TWISTS)) * random.randint(0, 1)](net.layers)
    net.train(random.random() < 0.3)
    return net, (torch.randn(3, 4, requires_grad=random.random() < 0.2),)


def _share_part(layers):
    for layer in layers:
        layer.parts[0] = layers[0].parts[0]


def _wrap_forward(layers):
    forward = layers[-1].out.forward
    layers[-1].out.forward = lambda x: forward(x) * 2


TWISTS = {
    "": lambda layers: None,
    "shared part": _share_part,
    "forward": _wrap_forward,
    "tie": lambda layers: setattr(layers[-1].out, "weight", layers[0].out.weight),
    "freeze": lambda layers: layers[-1].out.weight.requires_grad_(False),
    "hook": lambda layers: layers[-1].register_forward_pre_hook(lambda m, a: None),
    "without bias": lambda layers: setattr(layers[-1].out, "bias", None),
    "double": lambda layers: layers[-1].parts[0].register_buffer("mean", torch.zeros(4, dtype=torch.float64)),
    "view": lambda layers: layers[-1].parts[0].register_buffer("mean", torch.zeros(8)[::2]),
    "share": lambda layers: layers.__setitem__(0, layers[-1]),
    "twice": lambda layers: layers.extend(list(layers)),
    "deep copy": lambda layers: layers.extend([copy.deepcopy(layer) for layer in layers]),
}
"""What is changed from outside: of the last layer, or in which layers there are."""


# How tapes differ ----------------------------------------------------------------------------------------------------


class _Text(str):
    def __repr__(self):
        return str(self)


class _Described:
    """A tape as lines of text, in which values, memory and constants have numbers."""

    def __init__(self, tape):
        self.tape = tape
        self._numbers, self._memory = {}, {}

    def _number(self, v):
        return self._numbers.setdefault(v, len(self._numbers))

    def _value(self, v):
        t = v.fake
        metadata = t.dtype, t.device, tuple(t.size()), t.stride(), t.storage_offset(), t.is_inference()
        metadata = *metadata, t.requires_grad, _is_leaf(t)
        memory = self._memory.setdefault(v.storage, len(self._memory)), t.untyped_storage().nbytes(), v.offset
        real = None if v.real is None else self.tape.owners.get(v.op.name, (None, v.real.tolist()))[1]
        facts = v.requires_grad, v.autograd_placeholder, v.slot, v.key is None, real
        return f"%{self._number(v)}", str(metadata), str(memory), facts

    def _argument(self, x):
        if isinstance(x, Value):
            return f"%{self._number(x)}"
        if isinstance(x, BodyTape):
            return str(list(_Described(x).lines()))
        return f"symbol {to_expr(x)}" if isinstance(x, Symbolic) else f"{type(x).__name__} {x!r}"

    def _template(self, x):
        return repr(map_structure(lambda v: _Text(f"%{self._number(v)}"), x, Value))

    def lines(self):
        """All that the tape says."""
        tape = self.tape
        for op in tape.ops:
            made = [(*self._value(v), v.op is op) for v in op.values()]
            args, call = map_argument(self._argument, (op.args, op.kwargs)), op.call and op.call.position
            yield "op", op.kind, str(op.target), str(args), made, op.scope.path, call, walk_frames(op.frames)
            more = [self._number(v) for v in op.writes], [self._number(v) for v in op.tracked]
            yield "of op", op.grad, more, str(op.unbacked), str(op.meta), op.autocast, op.phase
        for c in tape.calls:
            taken = self._template(c.args), self._template(c.kwargs), self._template(c.outputs)
            place = c.fqn, c.index, c.parent and c.parent.position, c.scope.path, c.start, c.stop, c.position
            how = repr(c.raised), c.leaf, c.direct, c.module_type, c.replaced, walk_frames(c.frames)
            yield "call", type(c.module).__name__, place, taken, how, repr(c.attributes)
        yield "outputs", self._template((tape.outputs, getattr(tape, "args", None))), list(tape.attributes)
        yield "scopes", [scope.path for scope in tape.root.walk()]
        if not isinstance(tape, ProgramTape):
            return
        yield "bound", [(w.path, self._number(w.value)) for w in tape.attribute_writes], list(tape.owners)
        yield "specializations", list(map(str, tape.specializations))
        yield from (("effect", str(effect)) for effect in tape.side_effects)
        reads = {(r.name, "" if r.name == "functions" else repr(r.value), r.source, r.module) for r in tape.reads}
        yield from sorted(("read", *map(str, read)) for read in reads)


def _is_leaf(t):
    try:
        return t.is_leaf
    except RuntimeError as error:  # of a view of several that was written
        return str(error)


def without_addresses(line):
    return re.sub(r"0x[0-9a-f]+|\b\d{12,}\b", "", str(line))


def described(tape):
    """All that a tape says, as lines of text."""
    return list(map(without_addresses, _Described(tape).lines()))


def differences(one, other):
    """The lines that two tapes do not share."""
    left, right = described(one), described(other)
    found = [(a, b) for a, b in zip(left, right, strict=False) if a != b]
    return found or ([] if len(left) == len(right) else [(len(left), len(right))])


def _start():
    """All that programs write outside of their model, as it is at first."""
    global FACTOR
    FACTOR, OfClass.factor, CountsInClass.calls, COUNTS["calls"] = 2.0, 2, 0, 0
    HISTORY.clear()
    Numbered.names.clear()
    os.environ.pop("REUSE_GAIN", None)
    torch.set_default_dtype(torch.float32)
    OfDefault.forward.__defaults__[0].clear()


def recorded_twice(seed, **options):
    """The tapes of a program, with each call recorded and with repetitions, or class and text of the error of each."""
    found = []
    for reuse in (False, True):
        _start()
        model, args = program(seed)
        with torch.inference_mode() if seed % 6 == 3 else torch.set_grad_enabled(seed % 3 != 0):
            try:
                found.append(record(model, args, {}, reuse=reuse, **options))
            except Exception as error:
                found.append((type(error).__name__, str(error)))
    return found


def disagreement(seed, **options):
    """What differs in the two tapes of a program; and how many calls were repeated."""
    plain, repeated = recorded_twice(seed, **options)
    if isinstance(plain, tuple) or isinstance(repeated, tuple):
        return ([] if plain == repeated else [(plain, repeated)]), 0
    return differences(plain, repeated), sum(repeated.reuse.replayed.values())


def main(argv: list[str] | None = None) -> int:
    """Draw programs and print those whose two tapes differ; 1 if any do."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draw", type=int, metavar="N", default=100, help="N random programs")
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the others have those after it")
    parser.add_argument("--dynamic", action="store_true", help="with a dynamic batch size")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dynamic = {"dynamic_shapes": {"x": {0: torch.export.Dim("n")}}} if options.dynamic else {}
    wrong = repeats = 0
    for seed in range(options.seed, options.seed + options.draw):
        found, count = disagreement(seed, **dynamic)
        repeats += count > 0
        wrong += bool(found)
        if found:
            print(f"# {seed}: {found[0]}", flush=True)
    print(f"{options.draw} programs, of which {repeats} copy calls: {wrong} differ")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
