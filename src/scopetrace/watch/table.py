"""The table of what a call is checked for: what one forward read of Python's state.

Data flow:
    reads of modules' attributes, seen by `guards.attributes` -> a Guard each, with the line
    modules that were called -> their classes, hooks and own methods -> a Guard each for all of them
    functions that ran, known by the frames of ops and calls -> their code, and what they name of globals, variables
        around them and attributes of classes -> a Guard each; of functions that these name, numbers and text
    tensors of the model in several places -> a Guard that they are one

Values are taken after the forward, when the model is as it was before. What the forward has changed is no Guard here:
`watch.settle` decides.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import operator
import os
import sys
import types
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import torch

from scopetrace._compat.questions import MISSING, OTHER_SETTINGS, Condition
from scopetrace._compat.tensors import tags_of
from scopetrace.containers.contents import (
    ATOMS,
    ATTRIBUTES,
    MEMO,
    Change,
    Place,
    form_of,
    is_another_object,
    is_library,
    is_users_class,
    snapshot,
)
from scopetrace.errors import UnsupportedOpError
from scopetrace.guards import attributes
from scopetrace.guards.attributes import ALL_SUBMODULES, BOOKKEEPING, GETATTR
from scopetrace.guards.reach import DEPTH, OF_ALL_ATTRIBUTES, Reach, functions_of, names_of, unwrapped
from scopetrace.ir.guards import (
    ALL_MODULES,
    MODULE_TABLES,
    NO_CALL,
    Asked,
    At,
    CallInputs,
    Flag,
    Guard,
    InTables,
    OfFunctions,
    OfModules,
    OfTensor,
    Source,
    WhichInputs,
    WhichOfModel,
    hooks_of_module,
    source_in,
)
from scopetrace.ir.scopes import Frames, Ran, source_of, walk_frames
from scopetrace.ir.tape import RecordedTape
from scopetrace.record.builder import TapeBuilder
from scopetrace.record.model import lists_weights
from scopetrace.record.values import ValueTable
from scopetrace.sources import SCOPETRACE, is_users
from scopetrace.watch.effects import EffectWatch

Location = tuple[Frames, str]
"""Where something was read: the frames, and the path of the scope."""
_Held = tuple[str, Place]
"""The name of an entry in a table of a module that holds a tensor, and where it is."""
_ROOMS = ("record", "watch", "guards", "program", "ir", "containers")
_RECORDER = tuple([str(Path(__file__).parents[1] / room) + os.sep for room in _ROOMS])
_SKIPPED = BOOKKEEPING.difference(MODULE_TABLES) | {"forward"}
_BOOKKEEPERS = {
    vars(torch.nn.Module)[name].__code__
    for name in ("__setattr__", "__delattr__", "register_parameter", "register_buffer", "add_module", "__dir__")
}
"""What looks at the attributes of a module for torch itself, whoever calls it."""


class StateReads:
    """Sees what one forward reads of Python's state, and makes the table of it.

    `effects` leads to the functions that it may run.
    """

    def __init__(self, values: ValueTable, effects: EffectWatch) -> None:
        self._builder, self._model, self._examples = values.builder, values.model, [*values.examples.values()]
        self._reach, self._objects = effects.reach, effects.objects
        self._members: dict[int, torch.Tensor] = {}
        """By id, the parameters and buffers that the forward got from a module."""
        self._read: dict[tuple[int, str], tuple[torch.nn.Module, str, Location]] = {}
        """By id of a module and name, the attributes that were asked for, in order."""
        self._called: dict[int, torch.nn.Module] = {}
        """By id, the modules that were called."""
        self._used: dict[int, torch.nn.Module] = {}
        """These, and those that were taken from attributes of others."""
        self.names: frozenset[str] | None = None
        """Of objects with attributes, those that code which ran names; None for all. Known after `guards`."""

    @contextlib.contextmanager
    def watching(self, is_observed: Condition) -> Iterator[None]:
        """Inside, reads of attributes are seen; `is_observed` says whether the forward runs, not the recorder."""

        def note(module: torch.nn.Module, name: str) -> bool:
            return is_observed() and self._note(module, name)

        with attributes.watching([saved.module for saved in self._model.saved_modules], note):
            yield

    def _note(self, module: torch.nn.Module, name: str) -> bool:
        key, asker = (id(module), name), sys._getframe(3)
        while (code := asker.f_code) is GETATTR or code.co_filename == attributes.__file__:
            assert asker.f_back is not None
            asker = asker.f_back
        if code.co_filename.startswith(_RECORDER) or code in _BOOKKEEPERS:
            return False
        is_known = key in self._read or name in _SKIPPED or lists_weights(module, name)
        if not is_known and not self._is_new(module, name):
            self._read[key] = module, name, location_of(self._builder, asker)
            self._builder.ran.setdefault(id(code), (code, asker.f_globals))
        return True

    def _is_new(self, module: torch.nn.Module, name: str) -> bool:
        """Whether the forward itself has put a parameter, buffer or submodule there."""
        saved = self._model.saved(module)
        tables = zip(saved.live[1:], saved.tables[1:], strict=True) if saved is not None else ()
        return any(name in table and table[name] is not before.get(name) for table, before in tables)

    def was_read(self, change: Change) -> bool:
        """Whether the forward read what it changed before it wrote it, as far as that is known."""
        saved = self._model.saved(change.holder) if change.attribute else None
        return saved is None or (id(change.holder), change.attribute) in self._read

    def asks_identity(self, change: Change) -> bool:
        """Whether code that read what was changed compares objects, and it is another object now. Known after `guards`.

        Of variables, whether any of the code that ran does.
        """
        read = self._read.get((id(change.holder), change.attribute))
        compares = self._ran.comparing is not None if read is None else _compares_objects(read[2][0])
        return compares and is_another_object(change.old, change.new)

    # ---------------------------------------------------------------- after the forward

    def guards(self, fn: Any, changes: list[Change]) -> list[Guard]:
        """The table; `changes` are what the forward changed. To be called when the model is as it was before."""
        changed = {(id(change.holder), change.attribute) for change in changes if change.attribute}
        tape, held = self._builder.tape, list[_Held]()
        taken = self._taken_modules()
        values = [*taken.values(), *(module.__dict__.get(key) for module, key, _ in self._read.values())]
        hooks = [guard for guard in tape.guards if guard.source.kind == "hooks"]
        values += [x for _, x in self._objects] + [getattr(fn, "__self__", fn)]
        run = [x for guard in hooks for part in guard.value for x in (part if type(part) is list else [part])]
        for module in {id(call.module): call.module for call in tape.calls if call.module is not None}.values():
            run += itertools.chain.from_iterable(hooks_of_module(module).values())
        ran = self._ran = RanFunctions(fn, tape, self._builder.ran, self._reach, values, run)
        self.names = ran.names
        for guard in hooks:
            guard.value, guard.names = snapshot(guard.value, self.names), self.names
        self._called = self._called_modules()
        self._used = self._called | taken
        attributes = list(self._attributes(held))
        path, variables = tape.root.path, list(ran.guards(tape.root.path))
        objects = [*self._objects]
        while isinstance(fn, functools.partial):
            attributes += [Guard.of(name, At(fn.keywords, name), path, names=self.names) for name in fn.keywords]
            objects += [(f"args[{i}]", x) for i, x in enumerate(fn.args)]
            fn = fn.func
        owner = getattr(fn, "__self__", fn)
        objects += [("self", owner)] if form_of(type(owner)) is ATTRIBUTES else []
        of_objects = [Guard.of(name, At({name: x}, name), "", names=self.names) for name, x in objects]
        others = [*of_objects, *self._of_called(changed), *self._identities(ran)]
        return [*variables, *attributes, *others, *self._of_members(held)]

    def _attributes(self, held: list[_Held]) -> Iterator[Guard]:
        """A Guard for each attribute that was asked for; `held` gets the plain ones that are tensors."""
        self._read_what_is_not_hidden()
        for module, key, (frames, path) in self._read.values():
            saved = self._model.saved(module)
            outer = "" if saved is None else saved.name
            name = f"{outer}.{key}".removeprefix("self.").lstrip(".")
            if key == ALL_SUBMODULES:
                yield Guard.of(name, At(module.__dict__, key), path, frames)
                continue
            if key in MODULE_TABLES:
                self._members.update({id(t): t for t in module.__dict__[key].values() if t is not None})
                continue
            source = source_in(module, key)
            value = source.current(NO_CALL)
            if isinstance(value, torch.Tensor):
                self._members[id(value)] = value
                if isinstance(source, At) and source.owner is module.__dict__:
                    held.append((name, source.place))
                continue
            yield Guard(name, snapshot(value, self.names), source, frames, path, names=self.names)
            yield from _of_identity(name, source, frames, path)

    def _read_what_is_not_hidden(self) -> None:
        """Attributes that modules have beside their class, or beside a `__getattr__` of it: those that code names."""
        for saved in self._model.saved_modules:
            if id(saved.module) not in self._used:
                continue
            if not isinstance(saved.contents.get("forward"), (types.FunctionType, types.NoneType)):  # as a partial
                self._read[id(saved.module), "forward"] = saved.module, "forward", ((), saved.name)
            is_open = not saved.is_watched
            tables = MODULE_TABLES[:2] if is_open and not _BY_TABLE.isdisjoint(self._reach.names) else ()
            for key in [key for key in saved.module.__dict__ if key in self._reach.names or key in tables]:
                is_skipped = key in _SKIPPED or key in saved.hooks or lists_weights(saved.module, key)
                if (is_open or hasattr(saved.kind, key)) and not is_skipped:
                    self._read.setdefault((id(saved.module), key), (saved.module, key, ((), saved.name)))

    def _called_modules(self) -> dict[int, torch.nn.Module]:
        called = {id(c.module): c.module for c in self._builder.tape.calls if c.module is not None and not c.leaf}
        for module in [m for m in called.values() if type(m).__module__.startswith("torch.nn.modules.")]:
            called.update((id(inner), inner) for inner in module.modules())  # it may ask for the hooks of these
        return called

    def _taken_modules(self) -> dict[int, torch.nn.Module]:
        taken = list[torch.nn.Module | None]()
        for module, key, _ in self._read.values():
            modules = module.__dict__.get("_modules") or {}
            taken += modules.values() if key == ALL_SUBMODULES else [modules.get(key)]
        return {id(m): m for m in taken if m is not None}

    def _of_called(self, changed: Set[tuple[int, str]]) -> Iterator[Guard]:
        """Classes and methods of modules that were used, hooks of those that were called, and of all of the process."""
        path = self._builder.tape.root.path
        plain = [m for m in self._used.values() if not isinstance(m, torch.jit.ScriptModule)]
        saved = [(self._model.saved(m), m) for m in plain]
        named = tuple([(s.name.removeprefix("self.") if s is not None else type(m).__name__, m) for s, m in saved])
        called = tuple([(name, m) for name, m in named if id(m) in self._called])
        for aspect in OfModules.ASPECTS:
            modules = called if aspect == "hooks" else named
            source = OfModules(modules, aspect, self.names, frozenset(name for _, name in changed))
            yield Guard.of(f"{aspect} of the modules", source, path)
        yield Guard.of("hooks of all modules", ALL_MODULES, path)
        for name, module in named:
            if isinstance(module, torch.fx.GraphModule):  # its class has another forward after each recompile()
                code = Asked(operator.attrgetter("code"), (module,), kind="code")
                yield Guard.of(f"{name}.code".removeprefix("self."), code, path)
        scripted = [m for m in self._used.values() if isinstance(m, torch.jit.ScriptModule)]
        if scripted:
            yield Guard.of("training of scripted modules", Asked(_modes_of, (scripted,)), path)
        for key in MODULE_TABLES[:2]:
            readers = [m for m, k, _ in self._read.values() if k == key]
            if of := [(s.fqn if (s := self._model.saved(m)) else "", m) for m in readers]:
                yield Guard.of(f"{key[1:]}()", Asked(_keys_of, (of, key, changed)), path)

    # ---------------------------------------------------------------- tensors

    def _identities(self, ran: RanFunctions) -> Iterator[Guard]:
        """Which inputs are tensors of the model; which tensors are one object, where the forward may ask: `x is y`.

        An input that is a tensor of the model, which the forward takes from there too, is one value with it.
        """
        tape = self._builder.tape
        code = ran.comparing
        if code is not None:
            members = Asked(_shared, (self._places_of_members(),))
            yield Guard.of("parameters and buffers that are one tensor", members, tape.root.path)
        taken = set(map(id, tape.attributes.values()))
        examples = self._examples if code is not None else [t for t in self._examples if id(t) in taken]
        of_model = dict.fromkeys(filter(None, map(self._model.owner, examples)))
        if not tape.inputs or (code is None and not of_model):
            return
        frames, path = ((), () if code is None else ((code, code.co_firstlineno),)), tape.root.path
        call = CallInputs((), {}, self._examples)
        which = WhichOfModel(tuple(of_model)).current(call)
        if code is not None and which:
            raise UnsupportedOpError(
                f"{tape.input_paths[which[0][0]]} is a tensor of the model, and the forward compares objects (`is`, "
                "`id`), which are others in a trace",
                module=path,
                source=source_of(frames),
                hint="give x.clone() to the trace",
            )
        if code is not None:
            inputs = WhichInputs()
            yield Guard("which arguments are one tensor", inputs.current(call), inputs, frames, path)
        source = WhichOfModel(tuple(of_model) if code is None else self._model.owners)
        yield Guard("which arguments are tensors of the model", which, source, frames, path)

    def _of_members(self, held: Sequence[_Held]) -> Iterator[Guard]:
        """Of modules outside the model, which tensor is which; dtype, shape and device of those that no op takes; tags.

        `held` are the plain attributes that were read.
        """
        model, root = self._model, self._builder.tape.root.path
        used = set(map(id, self._builder.tape.attributes.values()))
        for saved in model.saved_modules if len(model.saved_modules) > len(model.modules) else ():
            tables = [] if model.names_of(saved.module) else saved.tables[1:3]
            for name, t in [(name, t) for table in tables for name, t in table.items() if id(t) in used]:
                yield Guard(f"{saved.name}.{name}", t, InTables(saved.live, name), (), root)
        for tied in self._tied(used | self._members.keys(), held):
            names, places = zip(*tied, strict=True)
            hint = "give each place a tensor of its own (clone()) before the trace if the forward puts others there"
            source = Asked(_hold_one, (places,), hint=hint, kind="tensor")
            yield Guard(f"{' and '.join(names)} as one tensor", True, source, (), root)
        for key, t in self._members.items():
            if (owner := model.owner(t)) is None:
                continue
            fqn, holder, attribute = owner
            if key not in used:
                yield Guard.of(fqn, OfTensor(holder, attribute, "metadata"), root)
            for tag in [tag for tag in tags_of(t) if self.names is None or tag in self.names] if vars(t) else ():
                yield Guard.of(f"{fqn}.{tag}", OfTensor(holder, attribute, f".{tag}"), root, names=self.names)

    def _tied(self, used: Set[int], held: Sequence[_Held]) -> Iterator[list[_Held]]:
        """Where each tensor of the model is that several places hold, if its id is in `used`."""
        model = self._model
        if not held and not model.has_shared_tensors and len(model.saved_modules) == len(model.modules):
            return
        owners = filter(None, [model.owner(place.current()) for _, place in held])
        others = [(fqn, Place(m.__dict__, key)) for fqn, m, key in owners if key in m.__dict__]
        for saved in model.saved_modules:
            names = sorted(self._reach.names.intersection(saved.contents))
            others += [(f"{saved.fqn}.{key}".lstrip("."), Place(saved.module.__dict__, key)) for key in names]
        holders: dict[int, dict[Any, _Held]] = collections.defaultdict(dict)
        for name, place in (*self._places_of_members(), *held, *others):
            holders[id(dict.get(*place))].setdefault(place.id, (name, place))
        yield from [[*places.values()] for key, places in holders.items() if len(places) > 1 and key in used]

    def _places_of_members(self) -> list[_Held]:
        """Those of parameters and buffers."""
        tables = [(saved.fqn, table) for saved in self._model.saved_modules for table in saved.live[1:3]]
        return [(f"{fqn}.{key}".lstrip("."), Place(table, key)) for fqn, table in tables for key in table]


class RanFunctions:
    """The functions that ran, since ops and calls were in them, and what they read of variables.

    Those that they name may have run too: where no op was in one, nobody saw whether it ran.
    """

    def __init__(
        self, fn: Any, tape: RecordedTape, ran: Ran, reach: Reach, held: Sequence[Any], hooks: Sequence[Any]
    ) -> None:
        """`ran` is the code in which ops and calls were; `held` the attributes that were read; `hooks` ran too.

        `reach` has followed what may run.
        """
        self._called = dict.fromkeys(type(call.module) for call in tape.calls if call.module is not None)
        opened = _Opened()
        self.reach = Reach(opened.add, depth=DEPTH)
        known = reach.by_code()
        for x in (fn, *hooks, *(getattr(kind, "forward", None) for kind in self._called)):
            self.reach.add(x)
        for code, table in ran.values():
            is_ours = code.co_filename.startswith(SCOPETRACE)
            if table and not is_ours and not is_library(table.get("__name__")):
                cells = tuple([types.CellType() for _ in code.co_freevars])  # those of one that nobody names
                self.reach.add(known.get(id(code)) or types.FunctionType(code, table, closure=cells))
        first = [*self.reach.followed.values()]
        for x in held:
            opened.add("", x)
        for kind in self._called:
            self.reach.add_class(kind, 1, is_named=False)
        self.reach.follow(opened.take, 1)
        self.functions = [*self.reach.followed.values()]
        """Those of users; several may have one code."""
        codes = {id(f.__code__): f.__code__ for f in self.functions}
        self.comparing = next((code for code in codes.values() if names_of(code).compares_objects), None)
        """Code that asks for identity."""
        self._codes, self._named = {*codes}, {name for code in codes.values() for name in names_of(code).all}
        naming = [*first, *(f for f in self.functions if f.__name__ not in OF_ALL_ATTRIBUTES)]
        names = self.reach.by_getters.union(*(names_of(f.__code__).all for f in naming))
        self.names = None if names & {"vars", "__dict__"} else frozenset(names)
        """Of objects with attributes, those that code names which may have run; None where it may take all."""

    def guards(self, path: str) -> Iterator[Guard]:
        """What the functions read of variables."""
        if self.functions:
            yield Guard.of("functions", OfFunctions(tuple(self.functions)), path)
        for name, place, function in self.reach.variables.values():
            source, frames = At(*place), ((), ((function.__code__, function.__code__.co_firstlineno),))
            if _is_state(source.current(NO_CALL)):
                yield Guard.of(name, source, path, frames, self.names)
                yield from _of_identity(name, source, frames, path)
        yield from self._of_classes(path)
        for name in [name for name in OTHER_SETTINGS if name.rpartition(".")[2] in self._named]:
            yield Guard.of(name, Flag(name), path)

    def _of_classes(self, path: str) -> Iterator[Guard]:
        """Attributes of users' classes that code which ran names, and methods that ran."""
        names = self._named.union(f.__code__.co_name for f in self.functions)
        called = [kind for kind in self._called if not issubclass(kind, torch.fx.GraphModule)]  # made at its first call
        for kind, name in itertools.product(called, ("forward", "__call__")):
            yield Guard.of(f"{kind.__name__}.{name}", At(kind, name), path)
        for kind in filter(is_users_class, self.reach.classes):
            bases = {name: base for base in reversed(kind.__mro__) for name in sorted(vars(base).keys() & names)}
            for name, base in bases.items():
                if is_users_class(base) and self._may_count(name, vars(base)[name], is_called=kind in called):
                    yield Guard.of(f"{kind.__name__}.{name}", At(kind, name), path, names=self.names)

    def _may_count(self, name: str, member: Any, *, is_called: bool) -> bool:
        """Whether code may have read an attribute of a class, or run a method."""
        if name[:2] != "__" and not hasattr(type(member), "__get__"):
            return True
        codes = [id(getattr(unwrapped(f), "__code__", None)) for f in functions_of(member)]
        return (is_called and bool(codes)) or not self._codes.isdisjoint(codes)


def _of_identity(name: str, source: Source, frames: Frames, path: str) -> Iterator[Guard]:
    """That a place holds the object that it held, where the code that read it compares objects: `self.mode is A`."""
    x = source.current(NO_CALL)
    if form_of(type(x)) is ATTRIBUTES and _compares_objects(frames):
        yield Guard(f"{name} as the object it was", True, Asked(_holds, (source, x)), frames, path)


def _compares_objects(frames: Frames) -> bool:
    return any(names_of(code).compares_objects for code, _ in walk_frames(frames)[-1:])


def _holds(source: Source, x: Any) -> bool:
    return source.current(NO_CALL) is x


_BY_TABLE = frozenset({"parameters", "named_parameters", "buffers", "named_buffers", "state_dict"})
"""Methods of nn.Module that go through the tables of parameters and buffers."""


def _is_state(value: Any) -> bool:
    """Whether a variable may hold another value at a call: no function of a library, and no Python module."""
    if isinstance(value, (types.ModuleType, types.BuiltinFunctionType)):
        return False
    if isinstance(value, (types.FunctionType, types.MethodType, type, MEMO)):
        return not is_library(getattr(value, "__module__", None))  # `random.randrange` is a method
    return value is not MISSING


class _Opened:
    """Gets what variables hold, and gives it with what is in it, each object once."""

    def __init__(self) -> None:
        self._new, self._known = list[Any](), dict[int, Any]()

    def add(self, _: str, x: Any, __: Any = None, place: Place | None = None) -> None:
        """Open an object; nothing is done for the attribute of a class."""
        if id(x) not in self._known and (place is None or not isinstance(place.owner, type)):
            self._known[id(x)] = x
            self._new += [item for item in _with_items(x) if type(item) not in ATOMS and type(item) is not MEMO]

    def take(self) -> list[Any]:
        """What is new since it was asked before."""
        new, self._new = self._new, []
        return new


def _with_items(x: Any) -> Iterator[Any]:
    """`x`, and what is in it if it is a list, a dict, or an object with attributes; also in lists and dicts there."""
    yield x
    if (form := form_of(type(x))) is not None and (form.entries or type(x) in (list, tuple)):
        for item in form.read(x).values() if form.entries else x:
            yield item
            if type(item) in (list, dict):  # no classes of a dict, which may be a register of many
                yield from item if type(item) is list else [x for x in item.values() if type(x) is types.FunctionType]


def _hold_one(places: Sequence[Place]) -> bool:
    return len({id(table.get(key)) for table, key in places}) == 1


def _shared(places: Sequence[_Held]) -> tuple[str, ...]:
    """The names of entries of tables that hold one tensor: `("emb.weight and head.weight",)`."""
    names: dict[int, list[str]] = {}
    for name, place in places:
        if (t := dict.get(*place)) is not None:
            names.setdefault(id(t), []).append(name)
    return tuple([" and ".join(tied) for tied in names.values() if len(tied) > 1])


def _modes_of(modules: Sequence[torch.nn.Module]) -> list[bool]:
    return [m.training for module in modules for m in module.modules()]


def _keys_of(modules: Sequence[tuple[str, torch.nn.Module]], table: str, changed: Set[tuple[int, str]]) -> list[str]:
    """The names in a table of modules, beside those that the forward changes; a tensor in several places has one."""
    names = dict[Any, str]()
    for fqn, module in modules:
        for key, x in module.__dict__[table].items():
            if (id(module), key) not in changed:
                names.setdefault(key if x is None else id(x), f"{fqn}.{key}".lstrip("."))
    return [*names.values()]


def location_of(builder: TapeBuilder, frame: types.FrameType) -> Location:
    """Where the forward is: in `frame`, or where users' code in the same call has led there."""
    while frame.f_code.co_filename.startswith(SCOPETRACE) and frame.f_back is not None:
        frame = frame.f_back
    outer_frame = frame
    while outer_frame.f_back is not None and not outer_frame.f_code.co_filename.startswith(SCOPETRACE):
        if is_users(outer_frame.f_code.co_filename):
            frame = outer_frame
            break
        outer_frame = outer_frame.f_back
    outer: Frames = builder.call.frames if builder.call is not None else ()
    return (outer, ((frame.f_code, frame.f_lineno),)), builder.state.current_scope.path
