"""What a program depends on beside the tensors that it is given.

Data flow:
    Python asks for a fact of an input, an attribute, a global or a flag -> a Read on the tape: name, value, place
    a call -> each place is asked again -> another answer is an error, since the program holds for the first one
    each Read -> Conditions that hold only while its answer is that one: that the same objects are where they were
    Conditions, and those of all tables -> one function of Python, in a third of the time of a loop over them
    modules of the model, before the forward -> their submodules and hooks as they are, and a copy of each
    a call -> all these tables are compared with the copies at once -> a TableChange for each that differs
    arguments of the trace + the names in the forward's code -> an ArgumentNumber for each number that it may read
    a call -> the same places in its arguments -> InputMismatchError where a number differs
    a file made from the trace, which cannot check -> FixedValueWarning

Tensors and arguments are no reads: they are the inputs of the program. Nor are values that the forward wrote itself.
"""

from __future__ import annotations

import array
import collections
import contextvars
import dataclasses
import functools
import itertools
import keyword
import operator
import os
import queue
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, Protocol

import torch

from scopetrace._compat.questions import MISSING as MISSING
from scopetrace._compat.questions import Missing as Missing
from scopetrace._compat.questions import fact_of, flag, quick_flag
from scopetrace._compat.sources import NOT_THE_MODEL
from scopetrace._compat.tensors import parameters_of
from scopetrace.containers.structure import effect_targets, is_plain_object, open_container
from scopetrace.errors import FixedValueWarning, InputMismatchError
from scopetrace.ir.scopes import Frames, source_of, walk_frames


@dataclasses.dataclass(frozen=True)
class CallInputs:
    """What a call is given, for places that are in its arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: Sequence[torch.Tensor]
    """The tensors among the arguments, in the order of `ProgramTape.inputs`."""


NO_CALL = CallInputs((), {}, ())
"""For places that are not in arguments."""


class Place(Protocol):
    """Where a read can be asked again. Equal for two reads of one thing."""

    @property
    def kind(self) -> str:
        """What it belongs to: `attribute`, `closure`, `code`, `input`, `tensor`, `state` or `environment`."""

    @property
    def stays(self) -> bool:
        """Whether it exists in another process too: it belongs to the call or to torch, not to the model's objects."""

    def now(self, call: CallInputs) -> Any:
        """What is there at a call; MISSING where there is nothing."""


@dataclasses.dataclass(slots=True)
class InTable:
    """An entry of the `__dict__` of a module, an object, a class or a Python file."""

    table: Any
    key: str
    stays = False

    @property
    def kind(self) -> str:
        """As `Place.kind`."""
        return "global" if "__name__" in self.table else "attribute"

    def now(self, call: CallInputs) -> Any:
        """As `Place.now`."""
        return self.table.get(self.key, MISSING)


@dataclasses.dataclass(frozen=True)
class InClosure:
    """A variable of a function around the one that read it."""

    cell: types.CellType
    kind, stays = "closure", False

    def now(self, call: CallInputs) -> Any:
        """As `Place.now`."""
        return content_of(self.cell)


@dataclasses.dataclass(slots=True)
class InLayer:
    """All attributes of one of torch's layers that its code names: a tuple of their values."""

    table: dict[str, Any]
    keys: tuple[str, ...]
    lacks: tuple[str, ...]
    """Further names, of parameters and buffers that are None."""
    kind, stays = "attribute", False

    def now(self, call: CallInputs) -> Any:
        """As `Place.now`."""
        return tuple([part.now(call) for _, part in self.parts()])

    def parts(self) -> list[tuple[str, InTable]]:
        """The names, each with where it is."""
        params, buffers = self.table["_parameters"], self.table["_buffers"]
        found = [(key, InTable(self.table, key)) for key in self.keys]
        return [*found, *((key, InTable(params if key in params else buffers, key)) for key in self.lacks)]


@dataclasses.dataclass(frozen=True)
class InDict:
    """All plain attributes of a module or object, which `vars(x)` gives: its `__dict__` without `left_out`."""

    table: dict[str, Any]
    left_out: frozenset[str]
    kind, stays = "attribute", False

    def now(self, call: CallInputs) -> Any:
        """As `Place.now`."""
        return {key: x for key, x in self.table.items() if key not in self.left_out}


@dataclasses.dataclass(frozen=True)
class InTables:
    """An attribute that a module does not have: no plain one, and no parameter, buffer or submodule."""

    tables: tuple[dict[str, Any], ...]
    key: str
    kind, stays = "attribute", False

    def now(self, call: CallInputs) -> Any:
        """As `Place.now`."""
        return next((table[self.key] for table in self.tables if self.key in table), MISSING)


@dataclasses.dataclass(frozen=True)
class Tied:
    """Whether several places of modules have one and the same parameter or buffer."""

    places: tuple[tuple[dict[str, Any], str], ...]
    kind, stays = "tensor", False

    def now(self, call: CallInputs) -> Any:
        """As `Place.now`."""
        return len({id(table.get(key)) for table, key in self.places}) == 1


@dataclasses.dataclass(frozen=True)
class InSlot:
    """An attribute of an object that has no `__dict__`."""

    owner: Any
    key: str
    kind, stays = "attribute", False

    def now(self, call: CallInputs) -> Any:
        """As `Place.now`. A method of nn.Module is that class: tracers of torch replace its methods for a time."""
        found = getattr(self.owner, self.key, MISSING)
        return torch.nn.Module if found is vars(torch.nn.Module).get(self.key, self) else found


@dataclasses.dataclass(frozen=True)
class OfFunctions:
    """What makes functions: of each its code, the number of default arguments, these, and those of keywords."""

    functions: tuple[types.FunctionType, ...]
    kind, stays = "code", False

    def now(self, call: CallInputs) -> Any:
        """As `Place.now`."""
        return [_made_of(f.__code__, f.__defaults__ or (), f.__kwdefaults__ or {}) for f in self.functions]


def _made_of(code: types.CodeType, defaults: tuple[Any, ...], of_keywords: dict[str, Any]) -> tuple[Any, ...]:
    return code, len(defaults), *defaults, *of_keywords, *of_keywords.values()


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a function tells of an object that the model knows, such as the level of a logger."""

    ask: Callable[..., Any]
    args: tuple[Any, ...]
    text: Callable[[Any], str] | None = None
    """What an error says of it; None for its repr."""
    hint: str = ""
    """How a program can follow it, which an error says where it has changed."""
    kind, stays = "attribute", False

    def now(self, call: CallInputs) -> Any:
        """As `Place.now`."""
        return self.ask(*self.args)


@dataclasses.dataclass(frozen=True)
class OfInput:
    """What an input tensor answers to a question: `x.stride(0)`."""

    index: int
    """Its position among `ProgramTape.inputs`."""
    fact: str
    args: tuple[Any, ...] = ()
    kind, stays = "input", True

    def now(self, call: CallInputs) -> Any:
        """As `Place.now`."""
        return fact_of(call.tensors[self.index], self.fact, self.args)


@dataclasses.dataclass(frozen=True)
class GradientOfInput:
    """Whether the `grad` of an input is the tensor that it was. Never so in a loaded trace, which has a copy of it."""

    index: int
    """Its position among `ProgramTape.inputs`."""
    gradient: torch.Tensor | None = None
    kind, stays = "input", True

    def now(self, call: CallInputs) -> Any:
        """As `Place.now`."""
        return self.gradient is not None and call.tensors[self.index].grad is self.gradient


@dataclasses.dataclass(frozen=True)
class WhichInputs:
    """Which inputs are one Python object: the position of each among them, or of the first that it is."""

    kind, stays = "input", True

    def now(self, call: CallInputs) -> Any:
        """As `Place.now`."""
        ids = list(map(id, call.tensors))
        return tuple(map(ids.index, ids))


@dataclasses.dataclass(frozen=True)
class WhichOfModel:
    """Which inputs are which tensors of the model, whose names there, modules and names in these are given."""

    owners: Iterable[tuple[str, torch.nn.Module, str]]
    kind, stays = "input", False

    def now(self, call: CallInputs) -> Any:
        """As `Place.now`."""
        own = {id(_held(module, name)): fqn for fqn, module, name in self.owners}
        return tuple([(i, own[id(t)]) for i, t in enumerate(call.tensors) if id(t) in own])


def _held(module: torch.nn.Module, name: str) -> Any:
    """An attribute of a module; nn.Module looks for parameters last."""
    own = parameters_of(module).get(name)
    return getattr(module, name, None) if own is None else own


@dataclasses.dataclass(frozen=True)
class OfTensor:
    """What a parameter, buffer or other tensor of the model answers to a question without arguments."""

    module: torch.nn.Module
    name: str
    """The attribute that holds it, as `weight`; or `weight.grad`."""
    fact: str
    kind, stays = "tensor", False

    def now(self, call: CallInputs) -> Any:
        """As `Place.now`."""
        name, _, of_it = self.name.partition(".")
        tensor = getattr(self.module, name, None)
        if of_it:
            tensor = getattr(tensor, of_it, None)
        return fact_of(tensor, self.fact, ()) if isinstance(tensor, torch.Tensor) else MISSING


@dataclasses.dataclass(frozen=True)
class HasGradient:
    """Whether a tensor that the program holds has a `grad`. A loaded trace has no model that it could ask."""

    tensor: torch.Tensor
    kind, stays = "tensor", True

    def now(self, call: CallInputs) -> Any:
        """As `Place.now`."""
        return self.tensor.grad is not None


def in_a_file(read: Read, held: Collection[torch.Tensor]) -> Read | None:
    """A read as a file has it, of a program that holds these tensors; None for one of which a file knows nothing."""
    place = read.place
    if isinstance(place, OfTensor) and place.fact == "has_grad":
        tensor = _held(place.module, place.name)
        is_held = any(t is tensor for t in held)
        return dataclasses.replace(read, place=HasGradient(tensor)) if is_held and not read.value else None
    if isinstance(place, HasGradient) and read.value:
        return None  # a file has those that the program reads, which are compared as all that it holds
    return read if place.stays else None


@dataclasses.dataclass(frozen=True)
class Flag:
    """The state of the process, as a function of torch tells it; `torch.autocast` stands for `autocast_state()`."""

    function: str
    args: tuple[Any, ...] = ()
    kind, stays = "state", True

    def now(self, call: CallInputs) -> Any:
        """As `Place.now`."""
        return flag(self.function, self.args)


@dataclasses.dataclass(frozen=True)
class OfEnvironment:
    """An environment variable; without a key, the names of all."""

    key: str | None
    kind, stays = "environment", True

    def now(self, call: CallInputs) -> Any:
        """As `Place.now`."""
        return list(os.environ) if self.key is None else os.environ.get(self.key, MISSING)


@dataclasses.dataclass(slots=True, eq=False)
class Read:
    """One thing that the forward read, and on which the program depends."""

    name: str
    """As in source: `x.stride(0)`, `layers.0.training`, `SCALE`, `os.environ['SCALE']`, `torch.is_grad_enabled()`."""
    value: Any
    """What was there: a copy, of a list, dict or set."""
    place: Place
    frames: Frames = ()
    """The Python frames of the first read."""
    module: str = ""
    """The path of the scope in which it was read first."""

    @property
    def is_of_model(self) -> bool:
        """Whether it is data, rather than an object or function, that the model's own code read, not torch's code."""
        if not isinstance(self.value, _DATA) or self.place.kind == "code":
            return False
        if self.place.kind in ("global", "closure"):
            return True  # only those in the model's code are looked for
        frames = walk_frames(self.frames)
        return self.name not in _READ_BY_OPS and not (frames and frames[-1][0].co_filename.startswith(NOT_THE_MODEL))

    @property
    def parts(self) -> list[Read]:
        """A read of each attribute, of one of a layer; else itself."""
        place = self.place
        if not isinstance(place, InLayer):
            return [self]
        return [
            Read(f"{self.name}.{key}", value, part, self.frames, self.module)
            for (key, part), value in zip(place.parts(), self.value, strict=True)
        ]

    @property
    def source(self) -> str | None:
        """The user's line that read it first: `model.py:12, in forward: if x.is_contiguous():`."""
        return source_of(self.frames)

    def __str__(self) -> str:
        at = f", at {self.source}" if self.source else ""
        return f"{self.name} was {self.value!r}{at}"


_DATA = (bool, int, float, str, type(None), torch.dtype, torch.device, list, tuple, dict, set, Missing)
_READ_BY_OPS = ("torch.autocast", "torch.get_default_device()", "torch.get_default_dtype()")


def snapshot(value: Any, around: tuple[int, ...] = ()) -> Any:
    """`value`, with copies of what holds values in it: containers of Python and arrays of NumPy.

    `around` has the ids of the containers that it is in.
    """
    kind = type(value)  # isinstance would ask an object that is none of these for its `__class__`
    if kind in _WITHOUT_CONTENT:
        return value
    if kind is tuple and _WITHOUT_CONTENT.issuperset(map(type, value)):
        return value
    if id(value) in around:
        return f"<container {len(around) - around.index(id(value))} up>"
    items = _items(kind, value, (*around, id(value)))
    if items is not None:
        return items
    if kind in _CONTENTS:
        return snapshot(_CONTENTS[kind](value), around)
    is_array = kind.__module__ == "numpy" and hasattr(kind, "tobytes")
    return (str(value.dtype), value.shape, value.tobytes()) if is_array else value


_WITH_ITEMS = dict, list, tuple, collections.deque


def _items(kind: Any, value: Any, around: tuple[int, ...]) -> Any:
    """What a container holds, by the methods of its built-in class, and the attributes of one of a subclass."""

    def copied(items: Iterable[Any]) -> list[Any]:
        return [snapshot(item, around) for item in items]

    own: dict[str, Any] = {}
    if kind.__dictoffset__ and issubclass(kind, _WITH_ITEMS) and own_dict(value) is not value:
        own = snapshot(own_dict(value), around)
    if issubclass(kind, dict):
        items = (collections.OrderedDict if issubclass(kind, collections.OrderedDict) else dict).items(value)
        return {
            **{key: snapshot(item, around) for key, item in items},
            **{f".{key}": item for key, item in own.items()},
        }
    if issubclass(kind, tuple):
        return (*copied(tuple.__iter__(value)), *own.items())
    if issubclass(kind, collections.deque):
        size = () if value.maxlen is None else (value.maxlen,)
        return [*copied(collections.deque.__iter__(value)), *size, *own.items()]
    if issubclass(kind, list):
        return [*copied(list.__iter__(value)), *own.items()]
    return set(set.__iter__(value)) if issubclass(kind, set) else None


def own_dict(x: Any) -> dict[str, Any]:
    """The `__dict__` of an object, past a `__getattribute__` of its class; of a `threading.local`, this thread's."""
    if issubclass(type(x), threading.local):  # isinstance may call a `__getattribute__` too
        return x.__dict__
    found: dict[str, Any] = object.__getattribute__(x, "__dict__")
    return found


def content_of(cell: types.CellType) -> Any:
    """The variable of an enclosing function; MISSING where it is not bound."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def value_of(variable: contextvars.ContextVar[Any]) -> Any:
    """The value in the present context, which may be the default; MISSING where there is none."""
    try:
        return variable.get()
    except LookupError:
        return MISSING


_WITHOUT_CONTENT = frozenset(
    {bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size, type, types.CodeType, types.FunctionType}
)
_CONTENTS: dict[type, Callable[[Any], Any]] = {
    bytearray: bytes,
    array.array: lambda x: (x.typecode, x.tobytes()),
    functools.partial: lambda x: (x.func, x.args, x.keywords, vars(x)),
    **dict.fromkeys((queue.Queue, queue.LifoQueue, queue.PriorityQueue), operator.attrgetter("queue")),
    types.MappingProxyType: dict,
    collections.ChainMap: operator.attrgetter("maps"),
    collections.UserDict: operator.attrgetter("data"),
    collections.UserList: operator.attrgetter("data"),
    contextvars.ContextVar: value_of,
    weakref.ref: lambda x: id(x()),
    weakref.WeakKeyDictionary: operator.attrgetter("data"),
    weakref.WeakValueDictionary: operator.attrgetter("data"),
    weakref.WeakSet: operator.attrgetter("data"),
}
"""By class, what an object holds that is no container itself."""


_TOLD_BY_EQUALITY = frozenset({int, bool, str, bytes, set, frozenset})
"""Classes of values that are the same if they are equal, but for the order of sets, which is another in a copy."""


def same(then: Any, now: Any) -> bool:
    """Whether a place has the value that it had: one object, containers of such, or equal ones of one type and text.

    0.0 is no -0.0, and Decimal("1.0") no Decimal("1.00").
    """
    if then is now:
        return True
    kind = type(then)
    if kind is not type(now):
        return False
    if kind in (list, tuple):
        return len(then) == len(now) and (all(map(operator.is_, then, now)) or all(map(same, then, now)))
    if kind is dict:
        return same([*then, *then.values()], [*now, *now.values()])
    try:
        if kind in _TOLD_BY_EQUALITY:
            return bool(then == now)
        is_equal = not isinstance(then, torch.Tensor) and bool(then == now or then != then)
        return is_equal and repr(then) == repr(now)
    except Exception:  # objects of others may raise anything, as tables of numbers do
        return False


# Asked again at a call -----------------------------------------------------------------------------------------------


class Condition(NamedTuple):
    """Something that is true or false when it is asked."""

    form: str
    """An expression with `{}` for each operand."""
    operands: tuple[Any, ...]


def is_attribute(owner: Any, name: str, value: Any) -> Condition:
    """Whether an attribute is this very object."""
    if name.isidentifier() and not keyword.iskeyword(name):
        return Condition(f"{{}}.{name} is {{}}", (owner, value))
    return Condition("{}({}, {}) is {}", (getattr, owner, name, value))


def is_entry(table: Any, key: str, value: Any) -> Condition:
    """Whether a table has this very object under a key."""
    return Condition("{}[{}] is {}" if type(table) is dict else "{}.get({}) is {}", (table, key, value))


def check(conditions: Iterable[Condition], otherwise: Callable[[], None]) -> Callable[[], None]:
    """A function that asks all conditions, and calls `otherwise` where one does not hold or cannot be asked.

    It cannot where an attribute, an entry or the content of a cell is gone.
    """
    names: dict[int, str] = {}
    given: dict[str, Any] = {"otherwise": otherwise}

    def name(x: Any) -> str:
        found = names.setdefault(id(x), f"x{len(names)}")
        given[found] = x
        return found

    terms = [condition.form.format(*map(name, condition.operands)) for condition in conditions]
    exec(_CHECK.replace("CONDITIONS", " and ".join(terms) or "True"), given)  # of forms and names made here
    found: Callable[[], None] = given.pop("check")  # a function in its own globals would be freed late
    return found


_CHECK = """
def check():
    try:
        if CONDITIONS:
            return
    except (AttributeError, LookupError, ValueError):
        pass
    otherwise()
"""


_IDENTICAL = frozenset({bool, int, float, str, type(None), type, types.FunctionType, torch.dtype, Missing})
"""The classes of values that do not change: where nothing was assigned there is the same object."""

_MOST = 16
"""So many items of a container are asked one by one; those of longer ones are compared in a loop of C."""


def is_constant(x: Any) -> bool:
    """Whether an object, a number or text for one, does not change."""
    return type(x) in _IDENTICAL or (type(x) is tuple and _IDENTICAL.issuperset(map(type, x)))


def is_same(read: Read) -> bool:
    """Whether the answer to a read is that of the trace."""
    now = read.place.now(NO_CALL)
    return same(read.value, now) or same(read.value, snapshot(now))


def unchanged(read: Read) -> list[Condition]:
    """What holds only while the answer to a read is that of the trace."""
    place, then = read.place, read.value
    if isinstance(place, Flag) and (quick := quick_flag(place.function, place.args, then)) is not None:
        ask, args, answer = quick  # whose class is always the same; text is a new object each time
        return [Condition(f"{{}}({', '.join('{}' for _ in args)}) == {{}}", (ask, *args, answer))]
    if isinstance(place, InTable | InTables) and then is MISSING:
        tables = (place.table,) if isinstance(place, InTable) else place.tables
        return [Condition("{} not in {}", (place.key, table)) for table in tables]
    found = None
    if isinstance(place, InTable | InClosure) and is_same(read):
        now = place.now(NO_CALL)
        is_there = (
            is_entry(place.table, place.key, now)
            if isinstance(place, InTable)
            else is_attribute(place.cell, "cell_contents", now)
        )
        found = _with_content(is_there, now)
    elif isinstance(place, InSlot) and is_constant(then) and is_same(read):
        found = [is_attribute(place.owner, place.key, getattr(place.owner, place.key, MISSING))]
    elif isinstance(place, OfFunctions) and is_same(read) and not any(f.__kwdefaults__ for f in place.functions):
        parts = itertools.product(place.functions, ("__code__", "__defaults__", "__kwdefaults__"))
        found = [is_attribute(f, part, getattr(f, part)) for f, part in parts]
    return [Condition("{}({})", (is_same, read))] if found is None else found


def _with_content(is_there: Condition, x: Any, around: tuple[int, ...] = ()) -> list[Condition] | None:
    """That an object is somewhere, and has in it what it has now; None where that is no question of identity alone.

    `around` has the ids of the containers that it is in.
    """
    if id(x) in around or snapshot(x) is x:  # it is compared by identity, or does not change
        return [is_there]
    if type(x) not in (list, tuple, dict) or len(x) > _MOST:
        return None
    keys = list(x) if type(x) is dict else list(range(len(x)))
    if not all(map(is_constant, keys)):
        return None
    same_keys = Condition("[*{}] == {}", (x, keys)) if type(x) is dict else Condition("{}({}) == {}", (len, x, len(x)))
    found = [is_there, same_keys]
    for key in keys:
        of_item = _with_content(Condition("{}[{}] is {}", (x, key, x[key])), x[key], (*around, id(x)))
        if of_item is None:
            return None
        found += of_item
    return found


# What modules run beside their code ----------------------------------------------------------------------------------


SUBMODULES = "_modules"
CODE = "its code"

_WORDS = {
    "_forward_pre_hooks": "forward pre-hooks",
    "_forward_hooks": "forward hooks",
    "_backward_pre_hooks": "backward pre-hooks",
    "_backward_hooks": "backward hooks",
}


_TABLES = (SUBMODULES, *_WORDS)
_tables_of: Callable[[dict[str, Any]], tuple[dict[Any, Any], ...]] = operator.itemgetter(*_TABLES)


class TableChange(NamedTuple):
    """A table of a module that is not what it was."""

    module: torch.nn.Module | None
    """None for hooks of all modules."""
    name: str
    """The module's name in the model."""
    table: str
    """`_modules`, the name of the hooks, or `CODE`."""
    old: dict[Any, Any]
    new: dict[Any, Any]

    @property
    def text(self) -> str:
        """What changed: `forward hooks of fc: 0 when traced and 1 now`."""
        if self.table == CODE:
            what, then = next(iter(self.old.items()))
            return f"{what} of {self.name or 'the model'}: {then} when traced and {self.new[what]} now"
        if self.table != SUBMODULES:
            hooks = f"{_WORDS.get(self.table, self.table)} of {self.name or 'the model'}"
            return f"{hooks}: {len(self.old)} when traced and {len(self.new)} now"
        found = []
        for key in dict.fromkeys((*self.old, *self.new)):
            old, new = (type(t[key]).__name__ if key in t else "missing" for t in (self.old, self.new))
            if self.old.get(key) is not self.new.get(key):
                name = f"{self.name}.{key}" if self.name else key
                found.append(f"{name}: {old} when traced and {'another ' if old == new else ''}{new} now")
        return "; ".join(found) or f"the submodules of {self.name or 'the model'} are in another order"


class TablesOfModule(NamedTuple):
    """What a module was in the trace."""

    name: str
    module: torch.nn.Module
    kind: type
    methods: Set[str]
    """The names of those of its class."""
    forward: Any
    """One that it had itself; MISSING where it had none."""
    filled: Mapping[str, dict[Any, Any]]
    """Its submodules and hooks, by the name of their table; of those only that were not empty."""


class ModuleTables:
    """The tables of a model's modules, their classes and replaced forwards, and what these were in the trace."""

    def __init__(
        self, modules: Callable[[], list[TablesOfModule]], hooks: Mapping[str, dict[Any, Any]], read: Set[str]
    ) -> None:
        """`modules` gives the model's, when somebody asks.

        `hooks` are the tables of hooks that run for all modules of the process, and `read` the attributes that the
        forward's code names.
        """
        self.read = frozenset(read)
        self._make = modules
        self._of_process = {name: (table, table.copy()) for name, table in hooks.items()}

    @functools.cached_property
    def _modules(self) -> list[TablesOfModule]:
        return self._make()

    def _pairs(self) -> Iterator[tuple[torch.nn.Module | None, str, str, dict[Any, Any], dict[Any, Any]]]:
        """Of each table: its module, the name of that and its own, what it holds and what it held."""
        for each in self._modules:
            for name, now in zip(_TABLES, _tables_of(each.module.__dict__), strict=True):
                yield each.module, each.name, name, now, each.filled.get(name, _EMPTY)
        for name, (now, then) in self._of_process.items():
            yield None, "all modules", name, now, then

    def restore(self) -> None:
        """Take hooks for all modules away that a forward has made, and put those back that there were."""
        for now, then in self._of_process.values():
            if now != then:
                now.clear()
                now.update(then)

    def unchanged(self) -> Iterator[Condition]:
        """What holds as long as all is what it was."""
        for each in self._modules:
            yield Condition("{}({}) is {}", (type, each.module, each.kind))
        for each in self._modules:
            for name in each.methods:
                yield Condition("{} not in {}", (name, each.module.__dict__))
        for each in self._modules:
            if each.forward is not MISSING:
                yield Condition("{}.get('forward') == {}", (each.module.__dict__, each.forward))
        tables = [(now, then) for _, _, _, now, then in self._pairs()]
        yield Condition("not {}({})", (any, [now for now, then in tables if not then]))
        yield Condition("{} == {}", ([now for now, then in tables if then], [then for _, then in tables if then]))

    def changes(self) -> Iterator[TableChange]:
        """The tables that are not what they were."""
        for module, name, table, now, then in self._pairs():
            if now != then:
                yield TableChange(module, name, table, then, now)
        for each in self._modules:
            module, own = each.module, each.module.__dict__
            if type(module) is not each.kind:
                names = each.kind.__name__, type(module).__name__
                yield TableChange(module, each.name, CODE, {"class": names[0]}, {"class": names[1]})
            for method in own.keys() & each.methods:
                yield TableChange(module, each.name, CODE, {method: "that of its class"}, {method: "another one"})
            if each.forward is not MISSING and own.get("forward") != each.forward:
                yield TableChange(module, each.name, CODE, {"forward": "one of its own"}, {"forward": "another one"})


_EMPTY: dict[Any, Any] = {}


# Numbers in objects among the arguments ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ArgumentNumber:
    """A number in an object among the arguments that the forward may read."""

    name: str
    """In source: `past_key_values.layers[0].cumulative_length`."""
    value: int | float
    """That of the example, which the program has."""
    path: tuple[str, ...]
    """The keys that lead from (args, kwargs) to the object that is no container of tensors."""
    attributes: tuple[str, ...]
    """The attributes that lead from there to the number; empty in a container, whose numbers are compared anyway."""
    changes: bool = False
    """Whether the forward sets it to another value."""


def numbers_read(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: Sequence[str],
    object_types: Collection[type],
    attributes: Collection[str],
) -> list[ArgumentNumber]:
    """The numbers in objects that stand in one of `attributes`; `names` are those of the positional arguments."""
    search = _Search(object_types, attributes)
    found = [
        n for i, (name, x) in enumerate(zip(names, args, strict=True)) for n in search.of(x, name, ("[0]", f"[{i}]"))
    ]
    return [*found, *(n for name, x in kwargs.items() for n in search.of(x, name, ("[1]", f"[{name!r}]")))]


class _Search:
    def __init__(self, object_types: Collection[type], attributes: Collection[str]) -> None:
        self._object_types = object_types
        self._attributes = attributes

    def of(self, x: Any, name: str, path: tuple[str, ...]) -> Iterator[ArgumentNumber]:
        children = open_container(x, self._object_types)
        if children is None:
            yield from self._in_object(x, name, path, (), [])
        for key, child in children or ():
            if key[0] == "." and type(child) in (int, float):
                if key[1:] in self._attributes:
                    yield ArgumentNumber(name + key, child, (*path, key), ())
            else:
                yield from self.of(child, name + key, (*path, key))

    def _in_object(
        self, x: Any, name: str, path: tuple[str, ...], attributes: tuple[str, ...], outer: list[Any]
    ) -> Iterator[ArgumentNumber]:
        if not is_plain_object(x) or any(x is seen for seen in outer):
            return
        for key, value in vars(x).items():
            if type(value) not in (int, float):
                yield from self._in_object(value, f"{name}.{key}", path, (*attributes, key), [*outer, x])
            elif key in self._attributes:
                yield ArgumentNumber(f"{name}.{key}", value, path, (*attributes, key))


def check_numbers(numbers: Sequence[ArgumentNumber], template: Any, arguments: Any) -> None:
    """Raise InputMismatchError where an object among the arguments, (args, kwargs), has another number."""
    inside = [n for n in numbers if n.attributes]
    for number, x in zip(inside, effect_targets(inside, template, arguments), strict=True):
        now = functools.reduce(lambda found, key: getattr(found, key, None), number.attributes, x)
        if type(now) is not type(number.value) or now != number.value:
            raise InputMismatchError(
                f"{number.name} was {number.value} when traced and is {now!r} now: numbers in objects are fixed in a "
                "trace; pass it as a tensor, or as an argument of its own that dynamic_shapes= makes dynamic"
            )


def warn_of_numbers(numbers: Sequence[ArgumentNumber], what: str) -> None:
    """Give a FixedValueWarning that names the numbers which `what`, a file or program, has and cannot check."""
    if numbers:
        some = ", ".join(f"{n.name} = {n.value}" for n in numbers[:_SHOWN])
        more = f", and {len(numbers) - _SHOWN} more, in Trace.specializations" if len(numbers) > _SHOWN else ""
        warnings.warn(
            f"{what} is right only where objects among the arguments have the numbers of the trace, and cannot check "
            f"that: {some}{more}; keep such a number in a tensor, or pass it as an argument of its own with "
            "dynamic_shapes=",
            FixedValueWarning,
            stacklevel=4,
        )


_SHOWN = 5
