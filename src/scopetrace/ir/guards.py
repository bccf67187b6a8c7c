"""What a program depends on beside the tensors that it is given.

Data flow:
    Python asks for a fact of an input, an attribute, a global or a flag -> a Guard on the tape: name, value, source
    a call -> each source is asked again -> another answer is an error, since the program holds for the first one
    each Guard -> Probes: functions that give the same objects while these are where they were
    Probes of all guards -> one loop in C, which says quickly that nothing has changed
    modules of the model, before the forward -> their submodules and hooks as they are, and a copy of each
    a call -> all these tables are compared with the copies at once -> a TableChange for each that differs
    arguments of the trace + the names in the forward's code -> an ArgumentNumber for each number that it may read
    a call -> the same numbers in its arguments -> InputMismatchError where a number differs
    a file made from the trace, which cannot check -> FixedValueWarning

Tensors and arguments have no guards: they are the inputs of the program. Nor are values that the forward wrote itself.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import itertools
import operator
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from scopetrace._compat.questions import MISSING, Missing, fact_of, flag, hooks_of_all_modules, quick_flag
from scopetrace.containers.contents import (
    ATTRIBUTES,
    Attributes,
    Place,
    extra_attributes,
    form_of,
    is_users_class,
    own_dict,
    same,
    same_entries,
    same_objects,
    slots_of,
    snapshot,
)
from scopetrace.containers.structure import effect_targets, is_plain_object, open_container, shared_parts, weak_cache
from scopetrace.errors import FixedValueWarning, InputMismatchError
from scopetrace.ir.registered import tensor_in
from scopetrace.ir.scopes import Frames, source_of, user_line, walk_frames
from scopetrace.sources import NOT_THE_MODEL


@dataclasses.dataclass(frozen=True)
class CallInputs:
    """What a call is given, for sources that are in its arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: Sequence[torch.Tensor]
    """The tensors among the arguments, in the order of `ProgramTape.inputs`."""
    object_types: Collection[type] = ()
    """The classes of objects among the arguments that hold tensors."""


NO_CALL = CallInputs((), {}, ())
"""For sources that are not in arguments."""


class Source:
    """Where something was read and can be asked for again. Equal for two reads of one thing."""

    __slots__ = ()

    @property
    def kind(self) -> str:
        """What it belongs to: `attribute`, `closure`, `code`, `hooks`, `input`, `submodules`, `tensor` or `state`."""
        return "attribute"

    stays = False
    """Whether it exists in another process too: it belongs to the call or to torch, not to the model's objects."""

    def current(self, call: CallInputs) -> Any:
        """What is there at a call; MISSING where there is nothing."""
        raise NotImplementedError


@dataclasses.dataclass(slots=True)
class At(Source):
    """A place: in the `__dict__` of a module, object or Python file, a variable around a function, or in a class."""

    owner: Any
    key: str
    """Of an attribute of a class, which may inherit it; `cell_contents` for the variable of a cell."""

    @property
    def place(self) -> Place:
        """The place."""
        return Place(self.owner, self.key)

    @property
    def kind(self) -> str:
        if type(self.owner) is types.CellType:
            return "closure"
        if self.key == "_modules":
            return "submodules"
        return "global" if type(self.owner) is dict and "__name__" in self.owner else "attribute"

    def current(self, call: CallInputs) -> Any:
        if type(self.owner) is dict:  # as of most
            return self.owner.get(self.key, MISSING)
        held = self.place.current()
        # a method of nn.Module is that class: tracers of torch replace its methods for a time
        is_replaced = isinstance(self.owner, type) and held is vars(torch.nn.Module).get(self.key, self)
        return torch.nn.Module if is_replaced else held


@dataclasses.dataclass(frozen=True)
class InTables(Source):
    """An attribute that a module lacks: no plain one, no parameter, buffer or submodule, and none of its class."""

    tables: tuple[Mapping[str, Any], ...]
    key: str

    def current(self, call: CallInputs) -> Any:
        return next((table[self.key] for table in self.tables if self.key in table), MISSING)


def source_in(module: torch.nn.Module, key: str) -> At | InTables:
    """Where a module has an attribute, without asking the module for it: its properties compute, and may keep it."""
    plain = module.__dict__
    if key in plain:
        return At(plain, key)
    tables = [t for t in map(plain.get, MODULE_TABLES) if isinstance(t, dict)]
    of_class = [vars(base) for base in type(module).__mro__ if is_users_class(base)]
    return next((At(t, key) for t in tables if key in t), None) or InTables((plain, *tables, *of_class), key)


MODULE_TABLES = ("_parameters", "_buffers", "_modules")
"""The attributes of a module that hold what `__getattr__` looks for, in its order."""


@dataclasses.dataclass(frozen=True)
class OfModules(Source):
    """What the modules are that were called: their classes, their hooks, and methods that they have themselves."""

    modules: tuple[tuple[str, torch.nn.Module | None], ...]
    """With their names in the model; None for what the hooks of all modules are."""
    aspect: str
    """One of ASPECTS."""
    named: frozenset[str] | None
    """What code that ran names; None where it may ask for anything."""
    free: frozenset[str]
    """Attributes that the forward itself changes."""
    ASPECTS = ("classes", "hooks", "methods")

    @property
    def kind(self) -> str:
        return "hooks" if self.aspect == "hooks" else "code"

    def current(self, call: CallInputs) -> dict[str, Any]:
        """By name of a module, what there is; empty entries are left out."""
        if self.aspect == "classes":
            return {name: type(module) for name, module in self.modules}
        get: Any = hooks_of_module if self.aspect == "hooks" else self._methods_of
        entries = ((name, get(module)) for name, module in self.modules)
        return {name: what for name, what in entries if what}

    def names_in(self, kind: type) -> frozenset[str]:
        """The methods of a class, and of its other attributes those that code which ran names."""
        methods, others = _names_of_class(kind)
        return (methods | (others if self.named is None else others & self.named)) - self.free

    def _methods_of(self, module: torch.nn.Module) -> dict[str, Any]:
        """What a module has itself in the place of methods and attributes of its class."""
        names = self.names_in(type(module)) & module.__dict__.keys()
        return {name: module.__dict__[name] if name == "forward" else True for name in names}

    def words(self, traced: dict[str, Any], current: dict[str, Any]) -> tuple[str, str, str]:
        """What differs first, and what it was and is."""
        name = next(name for name in (*traced, *current) if not same(traced.get(name), current.get(name)))
        old, new, of = traced.get(name), current.get(name), name if name != "self" else "the model"
        of = f"module {of}" if of[0].isdigit() else of
        if self.aspect == "classes":
            return f"class of {of}", getattr(old, "__name__", "missing"), getattr(new, "__name__", "missing")
        old, new = old or {}, new or {}
        key = next(key for key in (*old, *new) if not same(old.get(key), new.get(key)))
        if self.aspect == "hooks":
            return f"{key} of {of}", str(len(old.get(key, ()))), str(len(new.get(key, ())))
        was, is_now = ["another one" if key in x else "that of its class" for x in (old, new)]
        return f"{key} of {of}", was, is_now


HOOKS = {
    "_forward_pre_hooks": "forward pre-hooks",
    "_forward_hooks": "forward hooks",
    "_backward_pre_hooks": "backward pre-hooks",
    "_backward_hooks": "backward hooks",
}
"""The tables of a module that have its hooks, and what people call these."""
ALL_MODULES = OfModules((("all modules", None),), "hooks", None, frozenset())
"""The hooks that run for each module of the process."""


def hook_tables(module: torch.nn.Module | None) -> dict[str, dict[Any, Any]]:
    """By kind, the tables of the hooks of a module; of those of all modules for None."""
    if module is None:
        return hooks_of_all_modules()
    return {words: module.__dict__.get(name, {}) for name, words in HOOKS.items()}


def hooks_of_module(module: torch.nn.Module | None) -> dict[str, list[Any]]:
    """By kind, the hooks of a module; those of all modules for None."""
    return {kind: [*table.values()] for kind, table in hook_tables(module).items() if table}


@weak_cache
def _names_of_class(kind: type) -> tuple[frozenset[str], frozenset[str]]:
    """What users gave a class of modules: `forward` and methods; other attributes."""
    members = {k: x for base in kind.__mro__ if is_users_class(base) for k, x in vars(base).items() if k[:2] != "__"}
    methods = frozenset(k for k, x in members.items() if type(x) is types.FunctionType)
    return methods | {"forward"}, frozenset(members) - methods


@dataclasses.dataclass(frozen=True)
class OfFunctions(Source):
    """What makes functions: of each its code, the number of default arguments, these, and those of keywords."""

    functions: tuple[types.FunctionType, ...]
    kind = "code"

    def current(self, call: CallInputs) -> Any:
        parts = [(f.__code__, f.__defaults__ or (), f.__kwdefaults__ or {}) for f in self.functions]
        return [(code, len(x), *x, *of_keywords, *of_keywords.values()) for code, x, of_keywords in parts]


@dataclasses.dataclass(frozen=True)
class Asked(Source):
    """What a function tells of an object that the model knows, such as the level of a logger."""

    ask: Callable[..., Any]
    args: tuple[Any, ...]
    text: Callable[[Any], str] | None = None
    """What an error says of it; None for its repr."""
    hint: str = ""
    """How a program can follow it, which an error says where it has changed."""
    kind: str = "attribute"

    def current(self, call: CallInputs) -> Any:
        return self.ask(*self.args)


@dataclasses.dataclass(frozen=True)
class OfInput(Source):
    """What an input tensor answers to a question: `x.stride(0)`."""

    index: int
    """Its position among `ProgramTape.inputs`."""
    fact: str
    args: tuple[Any, ...] = ()
    kind, stays = "input", True

    def current(self, call: CallInputs) -> Any:
        return fact_of(call.tensors[self.index], self.fact, self.args)


@dataclasses.dataclass(frozen=True)
class GradientOfInput(Source):
    """Whether the `grad` of an input is the tensor that it was. Never so in a loaded trace, which has a copy of it."""

    index: int
    """Its position among `ProgramTape.inputs`."""
    gradient: torch.Tensor | None = None
    kind, stays = "input", True

    def current(self, call: CallInputs) -> Any:
        return self.gradient is not None and call.tensors[self.index].grad is self.gradient


@dataclasses.dataclass(frozen=True)
class WhichInputs(Source):
    """Which inputs are one Python object: the position of each among them, or of the first that it is."""

    kind, stays = "input", True

    def current(self, call: CallInputs) -> Any:
        ids = list(map(id, call.tensors))
        return tuple(map(ids.index, ids))


@dataclasses.dataclass(frozen=True)
class WhichContainers(Source):
    """Which lists, dicts and objects among the arguments are one, or the model's, where the forward changes some."""

    held: tuple[tuple[str, Source], ...] | None = None
    """What the forward reads elsewhere, with its names. A loaded trace knows nothing of it."""

    kind, stays = "input", True

    def current(self, call: CallInputs) -> Any:
        outside = [(name, source.current(NO_CALL)) for name, source in self.held or ()]
        parts = shared_parts((call.args, call.kwargs), call.object_types, outside)
        return frozenset(f"{''.join(path[1:])} is {''.join(first[1:])}" for path, first in parts)

    def words(self, traced: frozenset[str], current: frozenset[str]) -> tuple[str, str, str]:
        """What it is called, and what it was and is."""
        was, is_now = [" and ".join(sorted(x)) or "none" for x in (traced, current)]
        return "arguments, or parts of them, that are one list, dict or object, which the model changes", was, is_now


@dataclasses.dataclass(frozen=True)
class WhichOfModel(Source):
    """Which inputs are which tensors of the model."""

    owners: Iterable[tuple[str, torch.nn.Module, str]]
    """Of each tensor its name in the model, its module and its name there."""
    kind = "input"

    def current(self, call: CallInputs) -> Any:
        fqns = {id(tensor_in(module, name)): fqn for fqn, module, name in self.owners}
        return tuple([(i, fqns[id(t)]) for i, t in enumerate(call.tensors) if id(t) in fqns])


@dataclasses.dataclass(frozen=True)
class OfTensor(Source):
    """What a parameter, buffer or other tensor of the model answers to a question without arguments."""

    module: torch.nn.Module
    name: str
    """The attribute that holds it, as `weight`; or `weight.grad`."""
    fact: str
    kind = "tensor"

    def current(self, call: CallInputs) -> Any:
        tensor = tensor_in(self.module, self.name)
        return MISSING if tensor is None else fact_of(tensor, self.fact, ())


@dataclasses.dataclass(frozen=True)
class HasGradient(Source):
    """Whether a tensor that the program holds has a `grad`. A loaded trace has no model that it could ask."""

    tensor: torch.Tensor
    kind, stays = "tensor", True

    def current(self, call: CallInputs) -> Any:
        return self.tensor.grad is not None


def in_a_file(guards: Iterable[Guard], held: Collection[torch.Tensor]) -> list[Guard]:
    """The guards as a file has them, of a program that holds these tensors: it knows nothing of the model's Python."""
    kept: list[Guard] = []
    for guard in guards:
        source = guard.source
        if isinstance(source, OfTensor) and source.fact == "has_grad":
            tensor = tensor_in(source.module, source.name)
            if tensor is not None and not guard.value and any(t is tensor for t in held):
                kept.append(dataclasses.replace(guard, source=HasGradient(tensor)))
        elif source.stays and not (isinstance(source, HasGradient) and guard.value):
            kept.append(guard)  # gradients that the program reads are in the file, and compared as all that it holds
    return kept


@dataclasses.dataclass(frozen=True)
class Flag(Source):
    """The state of the process, as a function of torch tells it; `torch.autocast` stands for `autocast_state()`."""

    function: str
    args: tuple[Any, ...] = ()
    kind, stays = "state", True

    def current(self, call: CallInputs) -> Any:
        return flag(self.function, self.args)


@dataclasses.dataclass(slots=True, eq=False)
class Guard:
    """One thing that the forward read, and on which the program depends."""

    name: str
    """As in source: `x.stride(0)`, `layers.0.training`, `SCALE`, `os.environ['SCALE']`, `torch.is_grad_enabled()`."""
    value: Any
    """What was there: a copy, of a list, dict or set."""
    source: Source
    frames: Frames = ()
    """The Python frames of the first read."""
    module: str = ""
    """The path of the scope in which it was read first."""
    others: tuple[Any, ...] = ()
    """Further values that are as good: those that the forward itself leaves there."""
    names: frozenset[str] | None = None
    """Of objects with attributes, those that count; None for all."""
    skip: frozenset[tuple[int, Any]] = frozenset()
    """Entries that do not count: the id of what holds them, and their key."""

    @classmethod
    def of(
        cls, name: str, source: Source, module: str, frames: Frames = (), names: frozenset[str] | None = None
    ) -> Guard:
        """One of what is there now."""
        return cls(name, snapshot(source.current(NO_CALL), names), source, frames, module, names=names)

    def current(self, call: CallInputs = NO_CALL) -> Any:
        """What is there now, as a snapshot."""
        return snapshot(self.source.current(call), self.names, self.skip)

    def labels(self) -> list[str]:
        """What it is called; of functions, the name of each."""
        functions = self.source.functions if isinstance(self.source, OfFunctions) else ()
        return [function.__qualname__ for function in functions] or [self.name]

    @property
    def is_of_model(self) -> bool:
        """Whether it is data, rather than an object, function or hook, that the model's code read, not torch's."""
        is_method = isinstance(self.value, Attributes) and issubclass(self.value.kind, types.MethodType)
        if not isinstance(self.value, _DATA) or is_method or self.source.kind in ("code", "hooks"):
            return False
        if self.source.kind in ("global", "closure"):
            return True  # only those in the model's code are looked for
        frames = walk_frames(self.frames)
        return self.name not in _READ_BY_OPS and not (frames and frames[-1][0].co_filename.startswith(NOT_THE_MODEL))

    @property
    def line(self) -> str | None:
        """The user's line that read it first: `model.py:12, in forward: if x.is_contiguous():`."""
        frames = walk_frames(self.frames)
        if self.source.kind in ("global", "closure") and frames:
            (code, _), name = frames[-1], self.name.rpartition(".")[2]
            return user_line([(code, _line_of(code, name))])
        return source_of(self.frames)

    def __str__(self) -> str:
        at = f", at {self.line}" if self.line else ""
        return f"{self.name} was {self.value!r}{at}"


_DATA = (bool, int, float, str, type(None), torch.dtype, torch.device, list, tuple, dict, set, Missing)
_READ_BY_OPS = ("torch.autocast", "torch.get_default_device()", "torch.get_default_dtype()")


# Asked again at a call -----------------------------------------------------------------------------------------------


Probe = tuple[tuple[Any, ...], Any]
"""A function with its arguments, and the object that it gives while something is as it was."""


def _line_of(code: types.CodeType, name: str) -> int:
    """The first line in which code names a variable or attribute."""
    lines = (step.positions.lineno for step in dis.get_instructions(code) if step.argval == name and step.positions)
    return next(filter(None, lines), code.co_firstlineno)


def is_same(guard: Guard) -> bool:
    """Whether what a guard compares is as in the trace."""
    current = guard.current()
    return same(guard.value, current) or any(same(other, current) for other in guard.others)


def unchanged(guard: Guard, known: set[int]) -> list[Probe]:
    """What gives these objects only while what a guard compares is as in the trace.

    `known` has the ids of the containers about which there are probes already.
    """
    source, traced = guard.source, guard.value
    whole: list[Probe] = [((is_same, guard), True)]
    if isinstance(source, Flag) and (quick := quick_flag(source.function, source.args, traced)) is not None:
        ask, args, answer = quick
        return [((ask, *args), answer)] if isinstance(answer, (int, torch.dtype)) else whole  # text is new each time
    if guard.others or not is_same(guard):
        return whole
    if isinstance(source, At):
        held = source.place.current()
        if held is not source.place.current():  # a property of a class, which makes an object for each who asks
            return whole
        inside = list(_content(guard, source.current(NO_CALL), known))
        certain = [probe for probe in inside if probe is not None]
        return [(source.place.question, held), *certain] if len(certain) == len(inside) else whole
    if isinstance(source, OfModules):
        return list(_of_modules(source, traced))  # none for no modules
    return list(_of_source(source, traced)) or whole


def _of_source(source: Any, traced: Any) -> Iterator[Probe]:
    """Probes of other places; nothing where there are none."""
    if isinstance(source, InTables) and traced is MISSING:
        yield from [((operator.contains, table, source.key), False) for table in source.tables]
    elif isinstance(source, OfFunctions) and not any(map(_has_defaults_with_content, source.functions)):
        parts = itertools.product(source.functions, ("__code__", "__defaults__", "__kwdefaults__"))
        yield from [((getattr, f, part), getattr(f, part)) for f, part in parts]
        by_keyword = [f.__kwdefaults__ for f in source.functions if f.__kwdefaults__]
        yield from [((same_entries, defaults.copy(), defaults), True) for defaults in by_keyword]


def _has_defaults_with_content(function: types.FunctionType) -> bool:
    defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    return any(form_of(type(x)) is not None for x in defaults)


def _of_modules(source: OfModules, traced: dict[str, Any]) -> Iterator[Probe]:
    if source.aspect == "classes":
        yield from [((type, module), type(module)) for _, module in source.modules]
    elif source.aspect == "methods":
        for name, module in source.modules:
            table, of_module = module.__dict__, traced.get(name, ())
            if "forward" in of_module:
                yield (table.get, "forward"), table["forward"]
            yield (source.names_in(type(module)).difference(of_module).isdisjoint, table), True
    else:
        tables = [table for _, module in source.modules for table in hook_tables(module).values()]
        yield (any, [table for table in tables if not table]), False
        filled = [table for table in tables if table]
        yield (operator.eq, filled, [table.copy() for table in filled]), True


def _content(guard: Guard, x: Any, known: set[int]) -> Iterator[Probe | None]:
    """That an object has in it what it has now; None where that is no question of identity alone."""
    form = form_of(type(x))
    if form is None or id(x) in known:
        return
    if type(x) is set:
        yield (operator.eq, x.copy(), x), True
        return
    table: Any = own_dict(x) if form is ATTRIBUTES and type(x).__dictoffset__ and not slots_of(type(x)) else x
    if guard.skip or extra_attributes(x) or type(table) not in (dict, list, tuple):
        yield None
        return
    known.add(id(x))
    items = table
    if table is not x:
        items = {key: item for key, item in table.items() if guard.names is None or key in guard.names}
        yield (_has_entries, table, items, len(table)), True
    elif type(x) is not tuple:
        yield (same_entries if type(x) is dict else same_objects, x.copy(), x), True
    for item in items.values() if type(items) is dict else items:
        yield from _content(guard, item, known)


def _has_entries(table: dict[str, Any], entries: dict[str, Any], count: int) -> bool:
    """Whether a table of so many entries has these very objects."""
    return len(table) == count and all(map(operator.is_, map(table.get, entries), entries.values()))


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
    arguments: Any, names: Sequence[str], object_types: Collection[type], attributes: Collection[str] | None
) -> list[ArgumentNumber]:
    """The numbers in objects among (args, kwargs) that stand in one of `attributes`, or in any.

    `names` are of the positional arguments.
    """
    args, kwargs = arguments

    def inside(x: Any, place: ArgumentNumber, outer: list[Any]) -> Iterator[ArgumentNumber]:
        opened = None if place.attributes else open_container(x, object_types)
        is_container = opened is not None
        is_object = not (is_container or isinstance(x, (list, tuple, dict))) and is_plain_object(x)
        if is_object and not any(x is seen for seen in outer):
            opened = [(f".{key}", value) for key, value in vars(x).items()]
        for key, child in opened or ():
            where = ((*place.path, key), ()) if is_container else (place.path, (*place.attributes, key[1:]))
            number = ArgumentNumber(place.name + key, child, *where)
            if key[0] != "." or type(child) not in (int, float):
                yield from inside(child, number, [*outer, x])
            elif attributes is None or key[1:] in attributes:
                yield number

    places = [("[0]", f"[{i}]") for i in range(len(args))] + [("[1]", f"[{name!r}]") for name in kwargs]
    named = zip((*args, *kwargs.values()), (*names, *kwargs), places, strict=True)
    return [number for x, name, path in named for number in inside(x, ArgumentNumber(name, 0, path, ()), [])]


def check_numbers(numbers: Sequence[ArgumentNumber], arguments: Any) -> None:
    """Raise InputMismatchError where an object among the arguments, (args, kwargs), has another number."""
    inside = [n for n in numbers if n.attributes]
    for number, x in zip(inside, effect_targets(inside, arguments), strict=True):
        current = functools.reduce(lambda part, key: getattr(part, key, None), number.attributes, x)
        if type(current) is not type(number.value) or current != number.value:
            raise InputMismatchError(
                f"{number.name} was {number.value} when traced and is {current!r} now: numbers in objects are fixed in "
                "a trace; pass it as a tensor, or as an argument of its own that dynamic_shapes= makes dynamic"
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
