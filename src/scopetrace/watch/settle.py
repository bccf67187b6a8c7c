"""What a forward's changes of Python's state mean for calls, judged by running it again.

Data flow:
    changes of the first run -> none, or only tensors that the program reads and binds as state: nothing to judge
    else the forward runs again on the state that it left, with stand-ins in the place of what it changed
    same program, nothing asked of the stand-ins -> the changes do not matter: counters, histories, logs
    reads of a change are not seen -> it runs with None and with an `_Unread` in its place; same program -> no matter
    no further change, same program -> a call may have the first value or the one that the forward leaves
    no further change, and the first program is the second one beside what it stores -> a cache
    anything else -> the program is right for one call
    while it runs again -> what changed is compared after each line of code of users -> the lines in the errors

Both runs begin with the modules, arguments and random state as they were; at the end all is as before the first.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from scopetrace._compat.ops import eager, is_random
from scopetrace._compat.questions import MISSING
from scopetrace._compat.symbols import Symbolic
from scopetrace._compat.tensors import FakeTensor, is_inference_of, version_of
from scopetrace.containers.contents import (
    ATTRIBUTES,
    Change,
    Place,
    TensorLike,
    attributes_and_slots,
    entries_of,
    form_of,
    is_iterator,
    same,
    short,
    snapshot,
    write_dict,
)
from scopetrace.containers.stand_ins import is_watched, plain, stand_in
from scopetrace.containers.structure import leaves, map_structure
from scopetrace.guards.attributes import current_attributes
from scopetrace.interrupts import interrupts
from scopetrace.ir.guards import HOOKS, MODULE_TABLES, NO_CALL, Asked, At, Guard, InTables, OfTensor
from scopetrace.ir.registered import tensor_in
from scopetrace.ir.scopes import user_line
from scopetrace.ir.side_effects import SideEffect
from scopetrace.ir.tape import Op, RecordedTape, Value
from scopetrace.sources import is_users
from scopetrace.watch.effects import is_change
from scopetrace.watch.programs import is_same_program


class Run(NamedTuple):
    """One recording, and what the forward changed."""

    tape: RecordedTape
    changes: list[Change]
    """By value; without tensors that are bound to attributes in the place of ones like them."""
    bound: Mapping[int, Value]
    """By id of a change's new value, the value of the tape that a tensor is."""
    was_read: Callable[[Change], bool]
    """Whether the forward read what it changed before it wrote it."""
    values_differ: Callable[..., bool]
    """Whether what another recording gives and leaves differs from that of this one, for the example inputs."""
    data_of: Callable[..., torch.Tensor | None]
    """What a value is for the example inputs; None where it has no data, or sizes are dynamic."""
    first_states: Sequence[Any] = ()
    """What optimizers have put into their state in their first steps."""


def judged(first: Run, again: Callable[[], Run]) -> RecordedTape:
    """The tape of `first`, with what its changes mean for calls; `again` records the forward another time."""
    if not first.changes:
        return first.tape
    if any(map(_advances, first.changes)):
        return _for_one_call(first, {}, set())
    tensors = dict[int, torch.Tensor]()
    left = _Left([(change, _real(plain(change.new), tensors)) for change in first.changes], tensors)
    run, lines, relevant = None, dict[str, str](), set[str]()
    if not any(change.is_generator for change in first.changes):
        with _watched_state(left) as asked, _noting_lines(first.changes) as lines, _may_fail():
            run = again()  # fails on the state that it left, as where the forward deletes an attribute
    if run is not None:
        changes, is_same = [*filter(is_change, run.changes)], is_same_program(first.tape, run.tape)
        if not changes and (is_same or _only_stores_more(first, left, run) or _gives_the_same(first, run)):
            return _settled(first, left, run, lines)
        if changes:
            relevant.update(asked, (c.name for c in changes if _was_read(c, run)))
            if not is_same:  # an op takes a number without asking it
                relevant.update(change.name for change in first.changes if not _is_content(change))
            unseen = {c.name for c in changes if c.name in relevant and _may_be_unread(c)}
            if is_same and relevant == unseen and (not unseen or _is_unread(first, left, unseen, again)):
                leave_out(first.tape, first.changes)  # what a call finds there does not count
                first.tape.side_effects += _harmless(first, lines)
                return first.tape
    if not lines.keys() >= {change.name for change in first.changes}:
        with _noting_lines(first.changes) as noted:
            again()
        lines |= noted
    return _for_one_call(first, lines, relevant)


def _was_read(change: Change, run: Run) -> bool:
    """Whether a run read what another one had left where it changes it again, of what has no stand-in."""
    if isinstance(change.old, torch.Tensor):
        return any(t is change.old for t in run.tape.attributes.values())
    return not is_watched(plain(change.old)) and run.was_read(change)


def _may_be_unread(change: Change) -> bool:
    """Whether nobody has seen if what was there is read."""
    is_attribute = isinstance(change.holder, torch.nn.Module) and change.attribute
    return not (is_attribute or is_watched(plain(change.old)))


class _Unread:
    """Stands where a forward writes, and notes what is asked of it."""

    asked = False

    def __getattr__(self, name: str) -> Any:
        self.asked = True
        raise AttributeError(name)

    def _ask(self, *_: Any) -> Any:
        self.asked = True
        raise TypeError("the place of what a forward stores is asked")

    __bool__ = __eq__ = __hash__ = __str__ = __repr__ = __format__ = _ask


def _is_unread(first: Run, left: _Left, names: set[str], again: Callable[[], Run]) -> bool:
    """Whether the program is the same with other things in the places of these changes, of which none is asked."""
    same = 0
    for other in (None, unread := _Unread()):
        with _may_fail(), _state(left):  # it fails where it takes more of what stands there
            for change in [change for change, _ in left.values if change.name in names]:
                change.place.put(other)
            same += is_same_program(first.tape, again().tape)
    return same == 2 and not unread.asked


@contextlib.contextmanager
def _may_fail() -> Iterator[None]:
    """Inside, a forward may raise anything on the state that it finds; the exception of a signal is raised on."""
    acted = interrupts.acted
    try:
        yield
    except Exception:
        if interrupts.acted != acted:
            raise


def _advances(change: Change) -> bool:
    """Whether an iterator gave an item: it gives another one to each call, and to each run."""
    return is_iterator(change.place.owner)


# The state that a run left --------------------------------------------------------------------------------------------


class _Left(NamedTuple):
    """What a run left, without tensors and numbers of its trace."""

    values: list[tuple[Change, Any]]
    """Each change, and what stands there after it."""
    tensors: dict[int, torch.Tensor]
    """By id of the tensors of the trace, what stands for them."""


def _real(x: Any, tensors: dict[int, torch.Tensor]) -> Any:
    """`x`, with tensors that have data in the place of those of a trace, and numbers in that of symbols."""
    if isinstance(x, FakeTensor):
        if id(x) not in tensors:
            with eager():
                sizes = [int(n) if not isinstance(n, Symbolic) else int(n.node.hint or 1) for n in x.shape]
                t = torch.zeros(sizes, dtype=x.dtype, device="meta" if x.is_meta else x.device)
            tensors[id(x)] = random_like(t, len(tensors))
        return tensors[id(x)]
    if isinstance(x, Symbolic):
        return x.node.pytype(x.node.hint) if x.node.hint is not None else x
    if type(x) in (list, tuple):
        return type(x)([_real(item, tensors) for item in x])
    if type(x) is dict:
        return {key: _real(item, tensors) for key, item in x.items()}
    if form_of(type(x)) is ATTRIBUTES and id(x) not in tensors and not isinstance(x, type):
        tensors[id(x)] = x  # an object that the forward has made: each once
        for name, item in attributes_and_slots(x).items():
            real = _real(item, tensors)
            if real is not item:
                object.__setattr__(x, name, real)
    return x


def random_like(t: torch.Tensor, seed: int) -> torch.Tensor:
    """A tensor with other data, where it has numbers of which any may be a value."""
    if not t.is_floating_point() or t.device.type == "meta":
        return t
    with eager():
        generator = torch.Generator(t.device).manual_seed(seed)  # torch's generator is to stay as it is
        return torch.empty_like(t).normal_(generator=generator)


@contextlib.contextmanager
def _state(left: _Left) -> Iterator[None]:
    """Inside, Python's state is what a run left; after it, as before, also the order of entries."""
    owners = [change.place.owner for change, _ in left.values]
    tables = [(table, entries_of(table)) for table in owners if isinstance(table, dict)]
    try:
        for change, value in left.values:
            change.place.put(value)
        yield
    finally:
        for change, _ in reversed(left.values):
            change.place.put(change.old)
        for table, entries in tables:
            write_dict(table, entries)


@contextlib.contextmanager
def _watched_state(left: _Left) -> Iterator[list[str]]:
    """As `_state`, with stand-ins. Gives the names of those that were asked."""
    asked: list[str] = []
    replaced: list[tuple[Place, Any]] = []
    with _state(left):
        for change, value in left.values:
            owner, note = change.place.owner, functools.partial(asked.append, change.name)
            if not _is_content(change):
                change.place.put(stand_in(value, note))
                continue
            watched = stand_in(owner, note)
            for place in change.places if watched is not owner else ():
                replaced.append((place, owner))
                place.put(watched)
            if watched is owner or not change.places:  # nobody can see what is asked of it
                asked.append(change.name)
        try:
            yield asked
        finally:
            for place, owner in reversed(replaced):
                place.put(owner)


def _is_content(change: Change) -> bool:
    """Whether it is of the content of a list or set as a whole."""
    return change.place.key is MISSING and change.attribute not in HOOKS


# The lines that change it --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _noting_lines(changes: list[Change]) -> Iterator[dict[str, str]]:
    """Inside, the lines that change what `changes` are of are noted, by the names of the changes.

    Such a run takes several times as long. Nothing is noted where a debugger or a coverage tool traces lines already.
    """
    noted: dict[str, str] = {}
    if sys.gettrace() is not None:
        yield noted
        return
    getters = [_getter(change) for change in changes]
    values = [get() for get in getters]
    lines: list[tuple[types.CodeType, int]] = []  # that which each open function is at, the innermost last

    def trace(frame: types.FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename[:1] == "<" or not is_users(frame.f_code.co_filename):
            return None
        for i, change in enumerate(changes if event != "exception" else ()):
            before, values[i] = values[i], getters[i]()
            if lines and change.name not in noted and _differ(before, values[i]):
                noted[change.name] = user_line(lines[-1:]) or ""
        if event in ("line", "return") and lines:
            lines.pop()
        if event in ("line", "call"):
            lines.append((frame.f_code, frame.f_lineno))
        return trace

    sys.settrace(trace)
    try:
        yield noted
    finally:
        sys.settrace(None)


def _differ(before: Any, after: Any) -> bool:
    """Whether two values of a place are different objects, and no equal numbers: a stand-in would be asked."""
    is_plain = type(before) is type(after) and type(after) in (int, bytes, _Ids)
    return after is not before and not (is_plain and after == before)


def _getter(change: Change) -> Callable[[], Any]:
    owner, key = change.place
    if isinstance(change.holder, torch.nn.Module) and change.attribute:
        return lambda: _of_module(change.holder, change.attribute)
    if change.is_generator:
        form = form_of(type(owner))
        return lambda: pickle.dumps(form.read(owner)) if form is not None else None
    if key is not MISSING:
        return change.place.current
    if change.places and is_watched(owner):  # which may have a stand-in there
        return lambda: _ids(change.places[0].current())
    return lambda: _ids(owner)


class _Ids(tuple[int, ...]):
    """The ids of the items of a list or set."""


def _ids(x: Any) -> _Ids:
    """The ids of the items of a list or set, without asking a stand-in."""
    base = next((base for base in (list, set, collections.deque) if isinstance(x, base)), None)
    return _Ids(() if base is None else map(id, base.__iter__(x)))


def _of_module(module: torch.nn.Module, name: str) -> Any:
    attributes = current_attributes(module)
    tables = (attributes, *(attributes.get(table, {}) for table in MODULE_TABLES))
    return next((table[name] for table in tables if name in table), MISSING)


# What it means -------------------------------------------------------------------------------------------------------


def _harmless(run: Run, lines: dict[str, str]) -> list[SideEffect]:
    """The changes that calls do not make, and need not: all but tensors that these bind to attributes of modules."""
    bound = {(id(write.module), write.name) for write in run.tape.attribute_writes}
    changes = [c for c in run.changes if (id(c.holder), c.attribute) not in bound]
    return [_effect(change, run, lines, baked_in=False) for change in changes]


def _stored(first: Run, left: _Left, last: Run) -> dict[int, Value]:
    """By id of what stands for tensors that the first run stored, and `last` did not, the values that they are.

    Where there was one like it already, that stands for it: another trace has stored it, and no number beside it.
    """
    again = {write.path for write in last.tape.attribute_writes}
    writes = [write for write in first.tape.attribute_writes if write.path not in again]
    anew = {write.value for write in first.tape.attribute_writes if write.path in again}
    of_left = [(id(t), first.bound.get(key)) for key, t in left.tensors.items()]
    there = [(tensor_in(w.module, w.name), w.value) for w in writes if w.module is not None]
    stored = {key: value for key, value in of_left if value is not None and value not in anew}
    return stored | {id(t): value for t, value in there if t is not None}


def _only_stores_more(first: Run, left: _Left, last: Run) -> bool:
    """Whether the first program is the last one, beside what it stores: values that no call changes."""
    stored = _stored(first, left, last)
    return not _depends_on_data(first.tape, stored.values()) and is_same_program(first.tape, last.tape, stored)


def _gives_the_same(first: Run, last: Run) -> bool:
    """Whether other ops give the same, as `x + 0`, and none writes into tensors that were there or replaces them."""
    written, reads = last.tape.written_storages(), last.tape.attribute_reads()
    writes = last.tape.attribute_writes or not written.isdisjoint(v.storage for _, v in reads)
    return not writes and not first.values_differ(last.tape)


def _settled(first: Run, left: _Left, last: Run, lines: dict[str, str]) -> RecordedTape:
    """The last run changed nothing: a call may find what the first did, or what that left."""
    tape, values = first.tape, _stored(first, left, last)
    stored = {key: TensorLike(value.fake, first.data_of(value)) for key, value in values.items()}
    with _state(left):
        for i, guard in enumerate(tape.guards):
            if guard.source.kind in ("attribute", "global", "closure", "tensor") and not same(
                guard.value, current := guard.current()
            ):
                # any tensor like a stored one is as good
                other = map_structure(lambda t: stored.get(id(t), t), current, torch.Tensor)
                tape.guards[i] = dataclasses.replace(guard, others=(*guard.others, other))
    again = {write.path for write in last.tape.attribute_writes}
    tape.attribute_writes = [dataclasses.replace(w, is_cache=w.path not in again) for w in tape.attribute_writes]
    tape.settled = {w.path: (w.value.fake.dtype, w.value.fake.shape) for w in tape.attribute_writes}
    for write in [write for write in tape.attribute_writes if write.is_cache and write.module is not None]:
        source = Asked(tensor_in, (write.module, write.name), text=short, kind="tensor")
        like = TensorLike(write.value.fake, first.data_of(write.value))
        tape.guards.append(Guard(write.path, source.current(NO_CALL), source, (), tape.root.path, (like,)))
    filled = [write.value for write in tape.attribute_writes if write.is_cache]
    tape.guards += _of_sources(tape, dict.fromkeys([*values.values(), *filled]))
    tape.side_effects += _harmless(first, lines)
    return tape


def _as_written(module: torch.nn.Module, name: str) -> list[Any]:
    """A tensor of a module, and how often it was written."""
    t = tensor_in(module, name)
    return [t, 0 if t is None or is_inference_of(t) else version_of(t)]


def _of_sources(tape: RecordedTape, stored: Iterable[Value]) -> Iterator[Guard]:
    """That the model's tensors from which a cache was computed are as they were: the program computes it each time."""
    sources = dict.fromkeys(stored)
    pending = [*sources]
    for value in pending:  # which grows
        new = [v for v in operands(value.op) if v not in sources]
        sources |= dict.fromkeys(new)
        pending += new
    names = dict.fromkeys(v.op.name for v in sources if v.op.kind == "get_attr")
    caches = {write.path for write in tape.attribute_writes}
    for name in [n for n in names if n not in caches and tape.owners.get(n, (None,))[0] is not None]:
        source = Asked(
            _as_written, tape.owners[name], text=lambda x: f"{short(x[0])}, written {x[1]} times", kind="tensor"
        )
        yield Guard.of(f"{name}, from which a cache was computed", source, tape.root.path)


def _depends_on_data(tape: RecordedTape, values: Any) -> bool:
    """Whether inputs, random numbers or state that the forward writes decide one of these values."""
    differs = {v.storage for v in tape.inputs} | tape.written_storages()
    for op in tape.ops:
        if is_random(op.target) or any(v.storage in differs for v in operands(op)):
            differs |= {v.storage for v in op.values()}
    return any(v.storage in differs for v in values)


def operands(op: Op) -> list[Value]:
    """Those of which an op takes more than shape, dtype and device."""
    like = LIKE.get(op.target)
    return op.inputs() if like is None else leaves([*op.args[:like], *op.args[like + 1 :], op.kwargs], Value)


_aten = torch.ops.aten
LIKE: dict[Any, int] = {
    **dict.fromkeys((_aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default), 0),
    **dict.fromkeys((_aten.new_empty.default, _aten.new_zeros.default, _aten.new_ones.default), 0),
    **dict.fromkeys((_aten.full_like.default, _aten.new_full.default), 0),
    **dict.fromkeys((_aten.type_as.default, _aten.expand_as.default, _aten.view_as.default, _aten.to.other), 1),
}
"""Ops that take an operand for its shape, dtype and device alone, with its position."""


def _for_one_call(run: Run, lines: dict[str, str], relevant: set[str]) -> RecordedTape:
    """The results depend on the changes `relevant`; on all, where it is not known on which.

    A tensor that a call puts in the place of another is compared at the next one, which is right or refused.
    """
    known = relevant & {change.name for change in run.changes}
    bound = {(id(write.module), write.name) for write in run.tape.attribute_writes}
    kept = [c for c in run.changes if not isinstance(c.old, torch.Tensor) or (id(c.holder), c.attribute) not in bound]
    run.tape.side_effects += [
        _effect(change, run, lines, baked_in=not known or change.name in known) for change in kept
    ]
    return run.tape


def leave_out(tape: RecordedTape, changes: list[Change]) -> None:
    """Take what was changed out of the table of what a call is checked for."""
    entries = frozenset(change.place.id for change in changes)
    names = {(id(change.holder), change.attribute) for change in changes if change.attribute}
    kept: list[Guard] = []
    for guard in tape.guards:
        source = guard.source
        if (
            (isinstance(source, At) and source.place.id in entries)
            or (isinstance(source, OfTensor) and (id(source.module), source.name) in names)
            or (isinstance(source, InTables) and guard.value is MISSING and source.key in {name for _, name in names})
        ):
            continue
        if guard.source.kind in ("attribute", "global", "closure") and not isinstance(guard.value, torch.Tensor):
            skip = guard.skip | entries
            raw = guard.source.current(NO_CALL)
            if skip and form_of(type(raw)) is not None:
                if id(raw) in {number for number, key in entries if key is MISSING}:
                    continue
                guard = dataclasses.replace(guard, skip=skip, value=snapshot(raw, guard.names, skip))
        kept.append(guard)
    tape.guards[:] = kept


def _effect(change: Change, run: Run, lines: dict[str, str], *, baked_in: bool) -> SideEffect:
    tape, line = run.tape, lines.get(change.name) or None
    at = {id(call.module): call for call in reversed(tape.calls) if call.module is not None}
    call = at.get(id(change.holder), tape.calls[0])
    if _advances(change):
        return SideEffect(f"next({change.name})", "", "an item", call.scope.path, line, baked_in)
    if change.is_generator:
        return SideEffect(change.name, "in one state", "in another", call.scope.path, line, baked_in)
    text = (lambda x: str(len(x))) if change.attribute in HOOKS else short
    return SideEffect(change.name, text(change.old), text(change.new), call.scope.path, line, baked_in)
