"""What the forward reads of Python objects.

Data flow:
    attributes of modules and objects -> a descriptor on their class tells of each read -> Read, unless written before
    those of torch's layers that only torch's code names -> by the names in the forward of a layer that was called
    those of objects whose class takes no descriptors -> by the names in the code that may run
    globals, variables around functions and functions themselves -> `record.code`

Values are taken after the forward, when the model is as it was before. What the forward has changed is a side effect,
and no Read; nor is a tensor of a module, which is an input of the program.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Set
from typing import Any

import torch

from scopetrace._compat.questions import Mine
from scopetrace._compat.replaced import replacing
from scopetrace.errors import UnsupportedOpError
from scopetrace.ir.reads import (
    MISSING,
    NO_CALL,
    Asked,
    CallInputs,
    InDict,
    InLayer,
    InSlot,
    InTable,
    InTables,
    OfTensor,
    Read,
    Tied,
    WhichInputs,
    WhichOfModel,
    own_dict,
    snapshot,
)
from scopetrace.ir.scopes import Frame, source_of
from scopetrace.ir.tape import called_modules
from scopetrace.record.builder import TapeBuilder
from scopetrace.record.code import (
    ATOMS,
    Reach,
    functions_read,
    functions_that_ran,
    is_installed,
    is_users,
    is_users_class,
    names_of,
    variables_read,
)
from scopetrace.record.model import BOOKKEEPING, Change, Model, attribute_tables, bookkeeping_of
from scopetrace.record.original import Original
from scopetrace.record.reads import Noted, Notes, Watched, class_attribute, noted_at
from scopetrace.record.repeated_reads import OfOwner, Repeated, RepeatedReads

_BOOKKEEPING = BOOKKEEPING | {"forward"}
_HEAP_TYPE, _IMMUTABLE = 1 << 9, 1 << 8  # classes made by a class statement, whose attributes can be set

_module: Any = torch.nn.Module
_REGISTERING = [f.__code__ for f in (_module.register_buffer, _module.register_parameter, _module.add_module)]
"""They ask whether there is an attribute of the name that they are given."""

_Held = tuple[int, str, dict[str, Any], str]
"""A place of a tensor in a module: the id of the tensor, the name of the place, a table and a key in it."""


class ObjectReads:
    """Sees what one forward reads of Python objects.

    `reach` leads to the functions that it may run, and `examples` are the inputs as they were given.
    """

    def __init__(
        self,
        builder: TapeBuilder,
        model: Model,
        reach: Reach,
        members: dict[int, torch.Tensor],
        examples: Sequence[torch.Tensor],
    ) -> None:
        self._builder = builder
        self._examples = examples
        self._model = model
        self._reach = reach
        self._members = members
        self._modules = model.saved_modules
        kinds: set[Any] = {type(saved.module) for saved in self._modules}
        self._layer_names = {kind: _names_in_layer(kind) for kind in kinds if _is_layer(kind)}
        found = [s for s in model.snapshot.saved.values() if s.kind.entries == "."]
        self._objects = [s for s in found if _takes_descriptors(s.owner)]
        self._others = [s for s in found if not _takes_descriptors(s.owner)]
        self._watched: dict[type, dict[str, Watched]] = {}
        """By class, the descriptors on it."""
        self._unfound: dict[tuple[int, str], tuple[Any, InTable | InTables | InSlot, Noted]] = {}
        """By owner and name, attributes that are missing, or None in place of a tensor or module."""
        self._dicts: dict[int, tuple[Any, Noted]] = {}
        """By id, the modules and objects whose `__dict__` was asked for."""
        self.overwritten: dict[tuple[int, str], Read] = {}
        """By the id of an object and a name, what was read of it that the forward changes."""
        self._notes = Notes()

    @contextlib.contextmanager
    def watching(self, mine: Mine) -> Iterator[None]:
        """Inside, reads of attributes are seen; `mine` says whether the forward runs, rather than the recorder."""
        names: dict[type, set[str]] = collections.defaultdict(set)
        for saved in self._modules:
            names[type(saved.module)].update(saved.module.__dict__)
        for found in self._objects:
            names[type(found.owner)].update(found.before)
        for cls, own in names.items():
            self._watch(cls, own - (self._layer_names.get(cls, frozenset()) - self._reach.names))
        with replacing() as replace, self._descriptors_in_place():
            owners = dict.fromkeys(owner for cls in self._watched for owner in _getattr_owners(cls))
            for owner, ask in [(owner, class_attribute(owner, "__getattr__")[1]) for owner in owners]:
                replace(owner, "__getattr__", self._reporting(_no_attribute if ask is MISSING else ask, mine))
            copies = not self._reach.names.isdisjoint(("copy", "deepcopy"))
            for cls in self._watched:
                is_module, of_users = issubclass(cls, torch.nn.Module), is_users_class(cls)
                if self._reach.takes_dicts or not (of_users or is_module):  # `==` of two argparse.Namespaces takes them
                    ask = class_attribute(cls, "__getattribute__")[1]
                    replace(cls, "__getattribute__", self._reporting_dicts(ask, mine, of_users or is_module))
                if (copies and of_users) or not is_module:
                    copy = class_attribute(cls, "__reduce_ex__")[1]
                    replace(cls, "__reduce_ex__", self._reporting_copies(copy, mine))
            yield

    @contextlib.contextmanager
    def _descriptors_in_place(self) -> Iterator[None]:
        found = [watched for of_class in self._watched.values() for watched in of_class.values()]
        try:
            for watched in found:
                setattr(watched.cls, watched.key, watched)
            yield
        finally:
            for watched in found:
                watched.put_back()

    def _reporting(self, ask: Callable[..., Any], mine: Mine) -> Callable[..., Any]:
        """The `__getattr__` of a class, which tells of names that are missing, or in a module stand for None."""

        def __getattr__(owner: Any, name: str) -> Any:
            found: Any = None
            try:
                found = ask(owner, name)
            finally:
                if found is None and name not in _BOOKKEEPING and name[:2] != "__" and mine():
                    asker = _asker(owner, sys._getframe(1))
                    if asker is not None:
                        self.note_unfound(owner, name, noted_at(self._builder, asker))
            if isinstance(found, torch.Tensor) and sys._getframe(1).f_code not in _REGISTERING:
                self._members[id(found)] = found
            return found

        return __getattr__

    def note_unfound(self, owner: Any, name: str, noted: Noted) -> None:
        """Note that a module or object does not have a name."""
        place: Any
        if isinstance(owner, torch.nn.Module):
            tables = attribute_tables(owner)
            place = next((InTable(t, name) for t in tables if name in t), InTables(tuple(tables), name))
        else:
            own = getattr(owner, "__dict__", None)
            place = InSlot(owner, name) if own is None else InTable(own, name)
        self._unfound.setdefault((id(owner), name), (owner, place, noted))

    def _reporting_dicts(self, ask: Callable[..., Any], mine: Mine, only_users: bool) -> Callable[..., Any]:
        """The `__getattribute__` of a class, which tells of code that asks for a `__dict__`, as `vars` does.

        With `only_users`, of users' code.
        """

        def __getattribute__(owner: Any, name: str) -> Any:
            asker = sys._getframe(1) if name == "__dict__" else None
            if asker is not None and (not only_users or is_users(asker.f_code.co_filename)) and mine():
                self.note_whole(owner, noted_at(self._builder, asker))
            return ask(owner, name)

        return __getattribute__

    def _reporting_copies(self, copy: Callable[..., Any], mine: Mine) -> Callable[..., Any]:
        """The `__reduce_ex__` of a class, by which `copy.copy` takes all that an object has."""

        def __reduce_ex__(owner: Any, protocol: Any) -> Any:
            if mine():
                self.note_whole(owner, noted_at(self._builder, sys._getframe(2)))
            return copy(owner, protocol)

        return __reduce_ex__

    def _watch(self, cls: type, names: Set[str]) -> None:
        """Make descriptors for attributes that the instances of a class have in their `__dict__`, or from the class."""
        if type(cls).__setattr__ is not type.__setattr__ or issubclass(cls, torch.jit.ScriptModule):
            return  # an Enum, which nobody changes; attributes in C++
        watched = self._watched[cls] = {}
        names = names | {name for base in cls.__mro__ if is_users_class(base) for name in _class_level(base)}
        for name in names - bookkeeping_of(cls) - {"forward"}:
            base, below = class_attribute(cls, name)
            if name[:2] != "__" and not hasattr(type(below), "__set__"):
                watched[name] = Watched(self._builder, self._notes, cls, name, base, below)

    # ---------------------------------------------------------------- calls that repeat others

    def may_have_read(self, owner: Any, key: str) -> bool:
        """Whether the forward may have read an attribute of a module or object so far."""
        self._notes.note_repeated([id(owner)])
        watched = self._watched.get(type(owner), {}).get(key)
        return watched is None or id(owner) in watched.first or id(owner) in self._dicts

    def unfound(self, owners: Iterable[Any]) -> list[tuple[Any, str, Noted]]:
        """The names that these modules and objects did not have, each with where it was asked for."""
        ids = set(map(id, owners))
        return [(owner, name, noted) for (key, name), (owner, _, noted) in self._unfound.items() if key in ids]

    def whole(self, owners: Iterable[Any]) -> list[tuple[Any, Noted]]:
        """Those of these modules and objects whose `__dict__` was asked for, each with where it was."""
        return [self._dicts[id(owner)] for owner in owners if id(owner) in self._dicts]

    def note_whole(self, owner: Any, noted: Noted) -> None:
        """Note that the `__dict__` of a module or object was asked for."""
        self._dicts.setdefault(id(owner), (owner, noted))

    def seen(self, owners: Iterable[Any]) -> list[tuple[Watched, int]]:
        """What was read of these modules and objects so far, by id, in the order in which it was."""
        by_class: dict[type, dict[int, Any]] = {}
        self._notes.note_repeated(map(id, owners))
        for owner in owners:
            by_class.setdefault(type(owner), {})[id(owner)] = owner
        watched = [(each, ids) for kind, ids in by_class.items() for each in self._watched.get(kind, {}).values()]
        return [(each, key) for each, ids in watched for key in each.first if key in ids]

    def repeat(self, repeated: Repeated, *, at_once: bool) -> None:
        """A call has read of its modules and objects what another one has read of those in their place.

        It is noted for each attribute when somebody asks, or writes it; `at_once` where something else may have asked.
        """
        ids = repeated.owners
        self._notes.note_repeated(ids)
        if at_once or not self._notes.touched.isdisjoint(ids):
            self._notes.note_all(repeated)
        else:
            self._notes.repeated.update(dict.fromkeys(ids, repeated))

    def _waiting(self) -> list[Repeated]:
        """The repetitions of which no attribute is noted, each once."""
        return [each for each in dict.fromkeys(self._notes.repeated.values()) if isinstance(each, Repeated)]

    # ---------------------------------------------------------------- after the forward

    def found(self, fn: Any, changes: list[Change]) -> tuple[list[Read], list[Read], list[RepeatedReads]]:
        """What `fn` read of variables, of attributes, and in repetitions; `changes` are what it changed.

        To be called when the model is as it was before the forward.
        """
        changed = {(id(change.holder), change.key[1:]) for change in changes}
        self._note_changed({key for key, _ in changed})
        held: list[_Held] = []
        names = {id(s.owner): s.name for s in (*self._objects, *self._others)}
        names.update([(id(s.module), s.name) for s in self._modules])
        attributes: list[Read] = list(self._whole_dicts(names, changed))
        for owner, place, (frames, path) in self._attributes():
            value = place.now(NO_CALL)
            outer = names.get(id(owner), owner.__name__ if isinstance(owner, type) else "")
            name = f"{outer}.{place.key}".removeprefix("self.").lstrip(".")
            if isinstance(value, torch.Tensor) and isinstance(owner, torch.nn.Module):
                self._members[id(value)] = value
                if isinstance(place, InTable):
                    held.append((id(value), name, place.table, place.key))
            else:
                read, key = Read(name, snapshot(value), place, frames, path), (id(owner), place.key)
                if key in changed:
                    self.overwritten[key] = read
                else:
                    attributes.append(read)
        layers = list(self._layers(changed))
        repeated = list(self._in_repetitions(layers, names))
        written, root = {change.key for change in changes if change.holder is None}, self._builder.tape.root.path
        while isinstance(fn, functools.partial):
            attributes += [
                Read(key, snapshot(x), InTable(fn.keywords, key), (), root)
                for key, x in fn.keywords.items()
                if not isinstance(x, torch.Tensor)
            ]
            fn = fn.func
        values = [*(read.value for read in attributes), *(value for found in repeated for value in found.values)]
        ran = functions_that_ran(fn, values, self._builder.tape, self._reach)
        variables = [*variables_read(ran, written, changed, root), *functions_read(ran, self._builder.tape, written)]
        of_layers = [read for _, read in layers]
        own = [*self._identities(ran), *of_layers, *self._of_members(changed, held), *self._entries(ran)]
        self._notes.repeated.clear()  # what is watched would hold itself
        return variables, [*attributes, *own], repeated

    def _note_changed(self, changed: Set[int]) -> None:
        """Note each attribute of repetitions where they, or their originals, have what was changed, or read tensors."""
        self._notes.note_repeated(changed)
        by_original: dict[Original, list[Repeated]] = collections.defaultdict(list)
        for repeated in self._waiting():
            by_original[repeated.original].append(repeated)
        for original, found in by_original.items():
            reads = self._read_of(original)
            special = any(
                noted is None or id(holder) in changed or isinstance(place.now(NO_CALL), torch.Tensor)
                for _, holder, place, noted in reads
            )
            if special or not changed.isdisjoint(original.owners):
                for repeated in found:
                    self._notes.note_all(repeated)

    def _read_of(self, original: Original) -> Iterator[tuple[Any, Any, InTable, Noted | None]]:
        """The attributes that were read of the modules and objects of an original, or written first.

        Gives who was asked, what has the attribute, itself or its class, the place of it, and where it was read.
        """
        for watched, key in original.seen:
            owner, noted = watched.first[key]
            yield from [(owner, holder, place, noted) for holder, place in watched.places(owner)]

    def _in_repetitions(
        self, layers: list[tuple[torch.nn.Module, Read]], names: dict[int, str]
    ) -> Iterator[RepeatedReads]:
        """What repetitions read of which it was not noted for each attribute; `layers` are as `_layers` gives them."""
        of_originals: dict[Original, list[OfOwner]] = {}
        for repeated in self._waiting():
            original = repeated.original
            if original not in of_originals:
                of_originals[original] = self._by_owner(original, layers, names)
            if of_originals[original]:
                yield RepeatedReads(repeated, of_originals[original], names)

    def _by_owner(
        self, original: Original, layers: list[tuple[torch.nn.Module, Read]], names: dict[int, str]
    ) -> list[OfOwner]:
        found: dict[int, tuple[Any, list[Read], list[Read]]] = {}
        for layer, read in layers:
            if id(layer) in original.owners:
                found.setdefault(id(layer), (layer, [], []))[1].append(read)
        for owner, holder, place, noted in self._read_of(original):
            assert noted is not None
            if holder is owner:
                read = Read(names.get(id(owner), ""), MISSING, place, *noted)
            else:
                read = Read(f"{holder.__name__}.{place.key}", snapshot(place.now(NO_CALL)), place, *noted)
            found.setdefault(id(owner), (owner, [], []))[1 if holder is owner else 2].append(read)
        return [OfOwner(*each) for each in found.values()]

    def _identities(self, ran: Reach) -> Iterator[Read]:
        """Which inputs are tensors of the model; which are one object, where the forward may ask: `x is y`.

        An input that is a tensor of the model, which the forward takes from there too, is one value with it.
        """
        tape = self._builder.tape
        code = next((f.__code__ for f in ran.functions if "id" in names_of(f.__code__).globals), None)
        taken = set(map(id, tape.attributes.values()))
        examples = self._examples if code is not None else [t for t in self._examples if id(t) in taken]
        given = dict.fromkeys(filter(None, map(self._model.owner, examples)))
        if not tape.inputs or (code is None and not given):
            return
        frames, path = ((), () if code is None else ((code, code.co_firstlineno),)), tape.root.path
        places = WhichInputs(), WhichOfModel(tuple(given) if code is None else self._model.owners)
        own = WhichOfModel(tuple(given)).now(CallInputs((), {}, self._examples))
        if code is None:
            yield Read("which arguments are tensors of the model", own, places[1], frames, path)
            return
        if own:
            raise UnsupportedOpError(
                f"{tape.input_paths[own[0][0]]} is a tensor of the model, and the forward compares objects (`is`, "
                "`id`), which are others in a trace",
                module=path,
                source=source_of(frames),
                hint="give x.clone() to the trace",
            )
        same_now = places[0].now(CallInputs((), {}, self._examples))
        yield Read("which arguments are one tensor", same_now, places[0], frames, path)
        yield Read("which arguments are tensors of the model", own, places[1], frames, path)

    def _entries(self, ran: Reach) -> Iterator[Read]:
        """What tables of parameters and buffers hold, where code names them; which are one tensor, where it asks."""
        path, modules = self._builder.tape.root.path, self._modules
        for name, code in [(n, f.__code__) for n in _MEMBER_TABLES for f in ran.functions if n in f.__code__.co_names]:
            frames = ((), ((code, code.co_firstlineno),))
            for saved in [saved for saved in modules if name in saved.module.__dict__]:
                place = Asked(_entries_of, (saved.module, name))
                yield Read(f"{saved.name}.{name}".removeprefix("self."), place.now(NO_CALL), place, frames, path)
        if any("id" in names_of(f.__code__).globals and not is_installed(f) for f in ran.functions):
            places = [(f"{s.fqn}.{key}".lstrip("."), t, key) for s in modules for t in s.live[1:3] for key in t]
            yield Read(
                "parameters and buffers that are one tensor", _shared(places), Asked(_shared, (places,)), (), path
            )

    def is_written_first(self, change: Change) -> bool:
        """Whether the forward wrote an attribute before it read it; False where that is not known."""
        owner, kind = change.holder, type(change.holder)
        if (
            not change.attribute
            or change.attribute == "training"
            or kind not in self._watched
            or id(owner) in self._dicts
        ):
            return False
        watched = self._watched[kind].get(change.attribute)
        if watched is not None:
            return watched.first.get(id(owner), (owner, ()))[1] is None
        asked = (id(owner), change.attribute) in self._unfound
        return change.old is MISSING and not asked and class_attribute(kind, change.attribute)[1] is MISSING

    def _whole_dicts(self, names: dict[int, str], changed: Set[tuple[int, str]]) -> Iterator[Read]:
        for owner, (frames, path) in self._dicts.values():
            own = own_dict(owner)
            left_out = BOOKKEEPING | {k for i, k in changed if i == id(owner)}
            left_out |= {key for key, x in own.items() if isinstance(x, torch.Tensor)}
            name, place = f"vars({names.get(id(owner), 'object')})", InDict(own, left_out)
            yield Read(name, snapshot(place.now(NO_CALL)), place, frames, path)

    def _of_members(self, changed: Set[tuple[int, str]], held: Sequence[_Held]) -> Iterator[Read]:
        """Of modules outside the model, which tensor is which; dtype, shape and device of those that no op takes.

        `held` are the plain attributes that were read. Those in whose place the forward puts others are `overwritten`.
        """
        used = set(map(id, self._builder.tape.attributes.values()))
        root = self._builder.tape.root.path
        for saved in self._modules if len(self._modules) > len(self._model.modules) else ():
            tables = saved.tables[1:3] if self._model.is_outside(saved.module) else []
            for name, t in [(name, t) for table in tables for name, t in table.items() if id(t) in used]:
                yield Read(f"{saved.name}.{name}", t, InTables(saved.live, name), (), root)
        for tied in self._tied(used | self._members.keys(), held):
            names = " and ".join([name for _, name, _, _ in tied])
            places = tuple([(table, key) for _, _, table, key in tied])
            yield Read(f"{names} as one tensor", True, Tied(places), (), root)
        for key, t in self._members.items():
            owner = self._model.owner(t)
            if key in used or owner is None:
                continue
            fqn, holder, attribute = owner
            place = OfTensor(holder, attribute, "metadata")
            read = Read(f"{fqn}'s dtype, shape and device", place.now(NO_CALL), place, (), root)
            if (id(holder), attribute) in changed:
                self.overwritten.setdefault((id(holder), attribute), read)
            else:
                yield read

    def _tied(self, used: Set[int], held: Sequence[_Held]) -> Iterator[list[_Held]]:
        """Where each tensor of the model is that several places hold, if its id is in `used`."""
        if not held and not self._model.has_shared_tensors and len(self._modules) == len(self._model.modules):
            return
        members = [id(t) for saved in self._modules for t in saved.members if t is not None]
        if not held and len(set(members)) == len(members):
            return
        holders: dict[int, list[_Held]] = collections.defaultdict(list)
        for saved in self._modules:
            for table, live in zip(saved.tables[1:3], saved.live[1:3], strict=True):
                for key, t in table.items():
                    holders[id(t)].append((id(t), f"{saved.fqn}.{key}".lstrip("."), live, key))
        for place in self._with_others(held):
            holders[place[0]].append(place)
        yield from [found for key, found in holders.items() if len(found) > 1 and key in used]

    def _with_others(self, held: Sequence[_Held]) -> list[_Held]:
        """The plain attributes that were read, each once, with others that hold the same tensors.

        Those are the ones by which calls find these, and what code may have put them into, where they were before.
        """
        found = {(number, id(table), key): (number, name, table, key) for number, name, table, key in held}
        owners = [self._model.owner(table[key]) for _, _, table, key in held]
        places = [(module, key, fqn) for fqn, module, key in filter(None, owners) if key in module.__dict__]
        for saved in self._modules:
            names = self._reach.names.intersection(saved.contents)
            places += [(saved.module, key, f"{saved.fqn}.{key}".lstrip(".")) for key in sorted(names)]
        for module, key, name in places:
            own = module.__dict__
            found.setdefault((id(own[key]), id(own), key), (id(own[key]), name, own, key))
        return [*found.values()]

    def _attributes(self) -> Iterator[tuple[Any, InTable | InTables | InSlot, Noted]]:
        """The attributes that were read, of layers only those that users' code names.

        Gives their owner, their place, and where they were read.
        """
        for of_class in self._watched.values():
            for watched in of_class.values():
                for owner, noted in watched.first.values():
                    if noted is not None:
                        for asked, entry in watched.places(owner):
                            yield asked, entry, noted
        yield from self._unfound.values()
        for found in self._others:
            table, noted = _table_of(found.owner), ((), self._builder.tape.root.path)
            keys = set(found.before) if self._reach.takes_dicts else self._reach.names.intersection(found.before)
            for key in keys if isinstance(found.owner, types.FunctionType) else self._reach.asked | keys:
                place = InTable(table, key) if key in table else InSlot(found.owner, key)
                if key in found.before or place.now(NO_CALL) is MISSING:
                    yield found.owner, place, noted

    def _layers(self, changed: Set[tuple[int, str]]) -> Iterator[tuple[torch.nn.Module, Read]]:
        """What torch's own code read of its layers, but for those of repetitions that wait."""
        calls = self._first_calls()
        around = self._read_by_others(calls)
        unseen: dict[type, tuple[frozenset[str], tuple[Frame, ...]] | None] = {}
        for saved in self._modules:
            module, cls = saved.module, type(saved.module)
            noted = calls.get(id(module))
            if noted is None:
                continue
            if cls not in unseen:
                unseen[cls] = None
                if _is_layer(cls):
                    code = cls.forward.__code__
                    unseen[cls] = self._layer_names[cls] - self._watched[cls].keys(), ((code, code.co_firstlineno),)
            of_class = unseen[cls]
            if of_class is None:
                continue
            (names, inner), own = of_class, module.__dict__
            if id(module) in around:
                names = names & self._layer_names[around[id(module)]] - {"training"}
            lacks = [k for k, x in own["_parameters"].items() if x is None and k in names]
            if own["_buffers"]:
                lacks += [k for k, x in own["_buffers"].items() if x is None and k in names]
            keys = list(names & own.keys())
            if changed:
                keys = [k for k in keys if (id(module), k) not in changed]
                lacks = [k for k in lacks if (id(module), k) not in changed]
            value = tuple([own[k] if type(own[k]) in ATOMS else snapshot(own[k]) for k in keys])
            place = InLayer(own, tuple(keys), tuple(lacks))
            name, frames = saved.name.removeprefix("self."), (noted[0], inner)
            yield module, Read(name, (*value, *[None] * len(lacks)), place, frames, noted[1])

    def _first_calls(self) -> dict[int, Noted | None]:
        """By id of each module that was called, where it first was; None of those of repetitions that wait."""
        repeated = {each.call: each for each in self._waiting()}
        found: dict[int, Noted | None] = {}
        for module, frames, path in called_modules(self._builder.tape.calls, repeated):
            found.setdefault(id(module), (frames, path))
        for each in repeated.values():
            called = (each.original.call, *each.original.calls)
            found.update([(id(each.partner(inner.module)), None) for inner in called])
        return found

    def _read_by_others(self, calls: dict[int, Noted | None]) -> dict[int, type]:
        """The modules that did not run, in a layer of torch that did: `nn.TransformerEncoderLayer` has such a way.

        Each with the class of that layer, whose code may have read their attributes. They get its place in `calls`.
        """
        found: dict[int, type] = {}
        for module in [saved.module for saved in self._modules]:
            noted, children = calls.get(id(module)), module.__dict__.get("_modules")
            if not children or noted is None or not _is_layer(type(module)):
                continue
            for inner in list(_outside_of(calls, module)):
                calls[id(inner)], found[id(inner)] = noted, type(module)
        return found


def _asker(owner: Any, asker: types.FrameType) -> types.FrameType | None:
    """The frame that asks for an attribute; None for one of torch's own, of its layers."""
    if isinstance(owner, torch.nn.Module):
        if _is_layer(type(owner)) and not is_users(asker.f_code.co_filename):
            return None
        if asker.f_code in _REGISTERING and asker.f_back is not None:
            return asker.f_back
    return asker


_MEMBER_TABLES = (
    *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def _entries_of(module: torch.nn.Module, table: str) -> list[Any]:
    """The names in a table of a module, each with whether something is there; of hooks, which have none, how many."""
    found = module.__dict__[table]
    if not isinstance(found, dict):
        return sorted(found)
    return [len(found)] if table.endswith("_hooks") else [(key, x is not None) for key, x in found.items()]


def _shared(places: Sequence[tuple[str, dict[str, Any], str]]) -> tuple[str, ...]:
    """The names of entries of tables that hold one tensor: `("emb.weight and head.weight",)`."""
    names: dict[int, list[str]] = {}
    for name, table, key in places:
        if table.get(key) is not None:
            names.setdefault(id(table[key]), []).append(name)
    return tuple([" and ".join(found) for found in names.values() if len(found) > 1])


def _no_attribute(owner: Any, name: str) -> Any:
    """What a class without `__getattr__` does: Python asks once more, and raises its own error."""
    return object.__getattribute__(owner, name)


def _table_of(owner: Any) -> dict[str, Any]:
    """The `__dict__` of an object; none of a `threading.local`, which has one for each thread."""
    return {} if isinstance(owner, threading.local) else getattr(owner, "__dict__", {})


def _getattr_owners(cls: type) -> list[type]:
    """The classes on which the `__getattr__` of `cls` is replaced: those that define one, or the class itself.

    The class too in the place of `nn.Module`, whose subclasses Python would visit one by one.
    """
    found = [base for base in cls.__mro__ if "__getattr__" in base.__dict__]
    return found if found and found != [torch.nn.Module] else [cls]


def _takes_descriptors(owner: Any) -> bool:
    """Whether attributes of an object can be watched; not of weak dictionaries, which torch has too."""
    return (
        type(owner).__flags__ & (_HEAP_TYPE | _IMMUTABLE) == _HEAP_TYPE
        and type(getattr(owner, "__dict__", None)) is dict
        and type(owner).__module__ != "weakref"
    )


def _is_layer(cls: type) -> bool:
    """Whether a class of modules is all torch's, so that its code asks for no attributes by computed names."""
    return cls.__module__.startswith("torch.nn.modules.")


@functools.cache
def _names_in_layer(cls: Any) -> frozenset[str]:
    """The names in the code of a layer's `forward`, and of methods that it names; none of a container without one."""
    is_container = class_attribute(cls, "forward")[0] is torch.nn.Module
    found, pending = set[str](), [] if is_container else ["forward"]
    while pending:
        code = getattr(class_attribute(cls, pending.pop())[1], "__code__", None)
        if code is not None:
            new = names_of(code).all - found
            found |= new
            pending += new
    return frozenset(found - bookkeeping_of(cls) - {"forward"})


def _outside_of(calls: Container[int], module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules inside of one that are not among `calls`, nor inside of such."""
    for inner in module.__dict__["_modules"].values():
        if inner is not None and id(inner) not in calls:
            yield inner
            yield from _outside_of(calls, inner)


def _class_level(base: type) -> list[str]:
    """The attributes that a class of the model gives to all its instances: no methods, and no tensors."""
    return [k for k, v in base.__dict__.items() if k[:2] != "__" and _is_plain_class(type(v))]


def _is_plain_class(kind: type) -> bool:
    """Whether Python gives objects of a class as they are, where they are attributes of classes."""
    return not hasattr(kind, "__get__") and not issubclass(kind, torch.Tensor)
